"""Reads a pipeline file and checks it as far as that goes without a cluster and without Spark.

    name: late-flights
    cluster: {nameServers: "127.0.0.1:9876"}
    source: {topic: flights, filter.sql: dep_delay > 60}
    transform: select origin, count(*) as n from source group by origin
    sinks:
      - {kind: table, url: "sqlite:///late.db", table: late, key: [origin]}

PyYAML's `compose` gives nodes with marks instead of values. `Entry` wraps one: the path of keys
that leads to it (`sinks[1].url`), its line, its texts. All that is wrong is found in one reading,
each with its line, its key, the nearest right name and a cure (`Document.problems`). What needs
more is found by `plan`: a transform is parsed by Spark, topics are looked for at the cluster,
tables in the database; a `Pipeline` keeps the line of each part, so that this is told the same way.

`${NAME}` in a text is taken from the environment (`$${` is a plain `${`). What came from a variable
whose name sounds like a secret, and what stands where secrets stand, is remembered in `Secrets`,
which takes it out of whatever is printed.

Options of the `rocketmq` source and sink are those of `spark/options.py`, checked by its parsers
and looked up without regard to case, as Spark does; what else a sink takes is declared here.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import yaml  # type: ignore[import-untyped]

from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.filter.check import check_sql92
from sluicemq.filter.findings import IGNORED_TEXT
from sluicemq.filter.subscriptions import parse_tags
from sluicemq.hints import suggest
from sluicemq.pipelines.dedup import check_url
from sluicemq.pipelines.ready import (
    AVAILABLE_NOW,
    BATCH,
    DURATION,
    FLAG,
    INTEGER,
    LIST,
    MAPPING,
    NAMES,
    NUMBER,
    REQUIRED,
    STREAMING,
    TEXT,
    Field,
    duration_s,
    ready,
    trigger_s,
)
from sluicemq.spark.errors import FileProblem, PlaceError, Secrets
from sluicemq.spark.options import (
    AT_LEAST_ONCE,
    CONNECTION_OPTION_NAMES,
    EXACTLY_ONCE,
    OPTIONS,
    READ,
    STORE_OPTIONS,
    STREAM,
    WRITE,
    Option,
    Options,
    index_by_name,
    parse_options,
)
from sluicemq.spark.schema import declared_columns
from sluicemq.spark.sources.offsets import parse_topics

ROCKETMQ, STORE, PARQUET = "rocketmq", "store", "parquet"
TOPIC, TABLE = "topic", "table"
VIEW: Final = "source"
_VARIABLE: Final = re.compile(r"\$\$(?=\{)|\$\{([^}]*)\}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME: Final = re.compile(r"SECRET|PASS|PWD|TOKEN|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_NULL: Final = "tag:yaml.org,2002:null"


# ---- reading


@dataclass(slots=True)
class Document:
    """One file that is being read: its environment, and what was found wrong so far."""

    environment: Mapping[str, str]
    problems: list[FileProblem] = field(default_factory=list)
    secrets: Secrets = field(default_factory=Secrets)

    def add(self, line: int, key: str, what: str, fix: str = "", *, is_error: bool = True) -> None:
        hidden = self.secrets.mask
        problem = FileProblem(line, key, hidden(what), hidden(fix), is_error)
        if problem not in self.problems:
            self.problems.append(problem)

    def root(self, text: str) -> "Entry | None":
        """The whole document. None, with the problem added, when it is no YAML mapping."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            what = getattr(error, "problem", None) or getattr(error, "context", None) or error
            self.add(mark.line + 1 if mark else 1, "", f"this is no YAML: {what}.")
            return None
        if not isinstance(node, yaml.MappingNode):
            self.add(1, "", "a pipeline is a mapping.", "Begin with name:, source: and sinks:.")
            return None
        return Entry(self, node, "", node.start_mark.line + 1)


@dataclass(slots=True)
class Entry:
    """One value of the document. `block_line`: the line where the text of a block (`|`) begins."""

    document: Document
    node: Any
    key: str
    line: int

    def problem(self, what: str, fix: str = "", *, is_error: bool = True) -> None:
        self.document.add(self.line, self.key, what, fix, is_error=is_error)

    @property
    def block_line(self) -> int:
        is_block = getattr(self.node, "style", None) in ("|", ">")
        return int(self.node.start_mark.line) + 1 + is_block

    def scalar(self) -> str | None:
        """The text of a scalar, with its variables. None, with a problem, for anything else and for
        nothing."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.problem("a text is wanted here, not a list or a mapping.")
            return None
        if self.node.tag == _NULL:
            self.problem("nothing is said.", "Give a value, or leave the key out.")
            return None
        environment, secrets = self.document.environment, self.document.secrets

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name is None:
                return "$"
            if name not in environment:
                if _NAME.fullmatch(name):
                    fix = f"Set it, as in: {name}=… sluice pipeline run …"
                    self.problem(f"the variable {name} is not set.", fix)
                else:
                    self.problem(f"${{{name}}} is no variable.", "Write $${ for a plain ${.")
                return ""
            if _SECRET_NAME.search(name):
                secrets.add(environment[name], f"${{{name}}}")
            return environment[name]

        return _VARIABLE.sub(value, str(self.node.value))

    def items(self) -> "list[Entry] | None":
        """The entries of a list. None, with a problem, for anything else."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.problem("a list is wanted here.", "Write [a, b], or a line with - for each.")
            return None
        return [
            Entry(self.document, node, f"{self.key}[{index}]", node.start_mark.line + 1)
            for index, node in enumerate(self.node.value)
        ]

    def mapping(self) -> "dict[str, Entry] | None":
        """The entries by key. None, with a problem, for anything else; keys twice are problems."""
        if not isinstance(self.node, yaml.MappingNode):
            self.problem("a mapping is wanted here.", "Write a line key: value for each.")
            return None
        found: dict[str, Entry] = {}
        for name_node, node in self.node.value:
            line = name_node.start_mark.line + 1
            name = str(getattr(name_node, "value", ""))
            key = f"{self.key}.{name}" if self.key else name
            if not isinstance(name_node, yaml.ScalarNode):
                self.document.add(line, self.key, "a key is a text.")
            elif name in found:
                fix = f"It stands in line {found[name].line} already; keep one."
                self.document.add(line, key, "the key is there twice.", fix)
            else:
                found[name] = Entry(self.document, node, key, line)
        return found

    def plain(self, depth: int = 5) -> Any:
        """The value as plain lists, mappings, texts and numbers, for what is handed on as JSON."""
        if depth == 0:
            self.problem("this is nested too deep.")
            return None
        if isinstance(self.node, yaml.MappingNode):
            return {name: one.plain(depth - 1) for name, one in (self.mapping() or {}).items()}
        if isinstance(self.node, yaml.SequenceNode):
            return [one.plain(depth - 1) for one in self.items() or ()]
        text = self.scalar()
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else text

    def joined(self) -> str | None:
        """A scalar's text; a list is joined by commas, a mapping is JSON (offsets)."""
        if isinstance(self.node.value, str):
            return self.scalar()
        value = self.plain()
        is_list = isinstance(value, list)
        return ",".join(map(str, value)) if is_list else orjson.dumps(value).decode()


Entries = Mapping[str, Entry]
Texts = dict[str, str]
"""Options as Spark takes them."""


# ---- what it means


@dataclass(frozen=True, slots=True)
class Source:
    """What comes in. `options` are those of Spark's source, those of the cluster included."""

    kind: str
    options: Mapping[str, str]
    line: int


@dataclass(frozen=True, slots=True)
class Sink:
    """Where it goes. `fields`: the declared ones by name; `options`: of Spark's sink (topics);
    `lines` has the line of each key."""

    name: str
    kind: str
    fields: Mapping[str, Any]
    options: Mapping[str, str]
    key: str
    line: int
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, what: str, fix: str = "", *, at: str = "") -> PlaceError:
        """An error at the sink, or at one of its keys."""
        key = f"{self.key}.{at}" if at else self.key
        return PlaceError(FileProblem(self.lines.get(at, self.line), key, what, fix))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A whole file. With `use` a ready one of that name, whose fields are `given`; else `source`
    and `sinks` are there. `trigger`: seconds between micro-batches, None for all that is there
    now. `transform_line`: the line of the file where the SQL begins."""

    path: str
    name: str
    cluster: Mapping[str, str]
    source: Source | None = None
    transform: str | None = None
    transform_line: int = 0
    sinks: tuple[Sink, ...] = ()
    mode: str = BATCH
    trigger: float | None = None
    checkpoint: str | None = None
    use: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    warnings: tuple[FileProblem, ...] = ()

    @property
    def is_streaming(self) -> bool:
        return self.mode == STREAMING

    def checkpoint_of(self, sink: Sink) -> str:
        """The checkpoint directory of a sink's query: one below the pipeline's for each."""
        return f"{(self.checkpoint or '').rstrip('/')}/{sink.name}"

    def failed(self, error: PlaceError) -> ConfigurationError:
        """The error as the user sees it: file, line, key."""
        return ConfigurationError(self.secrets.mask(error.problem.describe(self.path)))


# ---- declared fields

_SCALARS: Final[Mapping[str, tuple[str, Callable[[str], Any], str]]] = {
    TEXT: (r"(?s).*\S.*", str, "it is empty"),
    INTEGER: (r"\s*[+-]?\d[\d_]*\s*", int, "write a whole number"),
    NUMBER: (r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", float, "write a number"),
    FLAG: (r"(?i)\s*(true|false)\s*", lambda text: text.strip().lower() == "true",
           "write true or false"),
    DURATION: (r"(?s).*", duration_s, ""),
}  # fmt: skip
"""Kind -> what its texts look like, how they are read, and what to do about others."""


def read_fields(
    entries: Entries, fields: Sequence[Field], owner: Entry, what: str
) -> dict[str, Any]:
    """Every declared field by name, defaults filled in. `what` says whose fields they are; a
    missing one is a problem of the owner's line."""
    by_name = {one.name: one for one in fields}
    values = {one.name: one.default for one in fields if one.default is not REQUIRED}
    for name, entry in entries.items():
        if name not in by_name:
            entry.problem(f"{what} has no such key.", suggest(name, by_name))
        elif (value := read_field(entry, by_name[name])) is not None:
            values[name] = value
    for one in fields:
        if one.default is REQUIRED and one.name not in entries:
            owner.problem(f"{what} needs the key {one.name!r}.", one.what)
    return values


def read_field(entry: Entry | None, one: Field) -> Any:
    """The value, or None with a problem; None of no entry. A single text is a list of one."""
    if entry is None:
        return None
    if one.kind == LIST:
        entries = [entry] if isinstance(entry.node.value, str) else entry.items()
        texts = [read_field(inner, Field("", TEXT, "", words=one.words)) for inner in entries or ()]
        return [text for text in texts if text is not None]
    if one.kind == MAPPING:
        found = {name: inner.scalar() for name, inner in (entry.mapping() or {}).items()}
        return {name: text for name, text in found.items() if text is not None}
    text = entry.scalar()
    if text is None:
        return None
    pattern, parse, fix = _SCALARS[one.kind]
    try:
        if not re.fullmatch(pattern, text):
            raise ValueError(fix)  # noqa: TRY301 - as the parsers do
        value = parse(text)
    except ValueError as error:
        entry.problem(f"it is {text!r}: {error}.")
        return None
    if one.words and value not in one.words:
        entry.problem(f"it is {value!r}.", f"It can be {' or '.join(one.words)}.")
        return None
    return value


SECRET: Final = ("secretKey", "securityToken", "tls.keyPassword")
MESSAGE: Final = (
    "value", "tag", "keys", "properties", "queue_id", "sharding_key", "delay_level", "delay_ms",
    "deliver_at",
)  # fmt: skip
"""Parts of a message that a topic sink may compute by Spark SQL expressions."""
_OF_FILES: Final = ("source", "transform", "sinks", "mode", "trigger", "checkpoint")
_TOP: Final = ("name", "cluster", *_OF_FILES, "use", "with", "spark")
_TEXT: Final = Field("", TEXT, "")
_MODE: Final = Field("mode", TEXT, "", BATCH, (BATCH, STREAMING))
_KIND_OF_SOURCE: Final = Field("kind", TEXT, "", ROCKETMQ, (ROCKETMQ, STORE, PARQUET))
_SINK_NAME: Final = Field("name", TEXT, "Of the sink, for the log and its checkpoint.", None)
PARQUET_SOURCE: Final = (
    Field("path", TEXT, "The directory or file."),
    Field("schema", TEXT, "Columns as in SQL; without it they are taken from the files.", None),
    Field("options", MAPPING, "Further options of Spark's Parquet source.", {}),
)
TOPIC_SINK: Final = (_SINK_NAME, *(Field(name, TEXT, "", None) for name in MESSAGE))
"""Beside the options of Spark's sink."""
PARQUET_SINK: Final = (
    _SINK_NAME,
    Field("path", TEXT, "The directory."),
    Field("partition_by", LIST, "Columns that become directories.", []),
    Field("write", TEXT, "What a batch does where files are already.", "fail",
          ("fail", "append", "overwrite")),
    Field("options", MAPPING, "Further options of Spark's Parquet sink.", {}),
)  # fmt: skip
TABLE_SINK: Final = (
    _SINK_NAME,
    Field("url", TEXT, "Of the database, as SQLAlchemy writes it: postgresql://user@host/name."),
    Field("table", TEXT, "The table; schema.table where there are schemas."),
    Field("key", LIST, "Columns that tell rows apart: a row with the same key is replaced."),
    Field("version", TEXT, "Column: a row is replaced only by one of no smaller version.", None),
    Field("create", FLAG, "Make the table when it is missing.", True),
    Field("batch_rows", INTEGER, "Rows of one transaction.", 1_000),
    Field("output", TEXT, "What a stream hands on: new rows, or changed ones of an aggregate.",
          "append", ("append", "update", "complete")),
)  # fmt: skip
_NEEDED: Final = {
    "source": ("", "Say what is read, as in source: {topic: T}."),
    "sinks": ("", "Say where it goes, as in sinks: [{kind: …}]."),
    "trigger": (STREAMING, "Write trigger: available-now or 10s."),
    "checkpoint": (STREAMING, "Write checkpoint: DIR, where the stream notes how far it is."),
}
"""Keys that a file has to have, in any mode or in one."""
_WRONG_IN: Final = {
    ("", "trigger", BATCH): ("this goes with mode: streaming.", "A batch reads once."),
    ("", "checkpoint", BATCH): ("this goes with mode: streaming.", "A batch reads once."),
    (TOPIC, "queryId", STREAMING): (
        "it does not go with mode: streaming.", "The stream's checkpoint holds its id.",
    ),
    (PARQUET, "write", STREAMING): ("this goes with mode: batch.", "A stream appends."),
    (TABLE, "output", BATCH): ("this goes with mode: streaming.", "A batch writes every row."),
}  # fmt: skip
"""Kind of sink (or ""), key and mode that do not go together."""
_SINKS: Final = {TOPIC: TOPIC_SINK, PARQUET: PARQUET_SINK, TABLE: TABLE_SINK}
_KIND_OF_SINK: Final = Field("kind", TEXT, "", REQUIRED, tuple(_SINKS))


# ---- the file


def load_pipeline(path: str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline of a file. Raises ConfigurationError whose text has a line for each problem:
    `FILE:LINE: KEY: what is wrong. What to do.`"""
    pipeline, problems = check_pipeline(path, environment)
    if pipeline is None:
        told = [one.describe(path) for one in problems if one.is_error]
        raise ConfigurationError("\n".join(told))
    return pipeline


def check_pipeline(
    path: str, environment: Mapping[str, str] | None = None
) -> tuple[Pipeline | None, list[FileProblem]]:
    """The pipeline, if the file is right, and all problems and warnings in the order of lines.

    Raises ConfigurationError when there is no such file or it is no UTF-8.
    """
    try:
        text = read_text(SYSTEM_FILES, path)
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"the file {path!r} cannot be read: {error}.") from None
    if text is None:
        raise ConfigurationError(f"there is no file {path!r}.", fix="Give the path of a pipeline.")
    return parse_pipeline(text, path, os.environ if environment is None else environment)


def parse_pipeline(
    text: str, path: str, environment: Mapping[str, str]
) -> tuple[Pipeline | None, list[FileProblem]]:
    """The same from the file's text."""
    document = Document(environment)
    root = document.root(text)
    if root is None:
        return None, document.problems
    entries = root.mapping() or {}
    for name in [name for name in entries if name not in _TOP]:
        entries.pop(name).problem("there is no such key.", suggest(name, _TOP))
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.rpartition("/")[2].rpartition(".")[0])
    name = read_field(entries.get("name"), _TEXT) or stem or "pipeline"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        entries["name"].problem(f"it is {name!r}.", "Use letters, digits, dots, _ and -.")
    cluster: Texts = {}
    if "cluster" in entries:
        entry = entries["cluster"]
        known = [option for option in OPTIONS if option.name in CONNECTION_OPTION_NAMES]
        cluster = _options(entry.mapping() or {}, known, READ, "a cluster")
        keys = {"accessKey", "secretKey"} & set(cluster)
        for lacking in {"accessKey", "secretKey"} - keys if keys else ():
            fix = f"{min(keys)} is given; it needs both."
            entry.problem(f"the option {lacking!r} is missing.", fix)
    settings = read_field(entries.get("spark"), Field("spark", MAPPING, "")) or {}
    for setting, entry in (entries["spark"].mapping() or {}).items() if "spark" in entries else ():
        if not setting.startswith("spark."):
            entry.problem("a setting of Spark begins with spark.", "As in spark.executor.memory.")
    parts = _used(entries) if "use" in entries else _own(root, entries, cluster)
    problems = sorted(document.problems)
    if any(one.is_error for one in problems):
        return None, problems
    pipeline = Pipeline(path, name, cluster, settings=settings, secrets=document.secrets,
                        warnings=tuple(problems), **parts)  # fmt: skip
    return pipeline, problems


def _used(entries: Entries) -> dict[str, Any]:
    """The parts of a pipeline that uses a ready one."""
    use = entries["use"].scalar() or ""
    for name in _OF_FILES:
        if name in entries:
            entries[name].problem("this does not go with use:.", "A ready pipeline has with:.")
    if use not in NAMES:
        entries["use"].problem(f"there is no ready pipeline {use!r}.", suggest(use, NAMES))
        return {"use": use}
    owner = entries.get("with", entries["use"])
    given = (entries["with"].mapping() if "with" in entries else None) or {}
    what = f"the ready pipeline {use!r}"
    return {"use": use, "given": read_fields(given, ready(use).fields, owner, what)}


def _own(root: Entry, entries: Entries, cluster: Texts) -> dict[str, Any]:
    """The parts of a pipeline with source and sinks of its own."""
    if "with" in entries:
        entries["with"].problem("this goes with use: NAME, a ready pipeline.")
    mode = read_field(entries.get("mode"), _MODE) or BATCH
    parts = {name: read_field(entries.get(name), _TEXT) for name in ("transform", "checkpoint")}
    parts["mode"] = mode
    _check_mode("", entries, mode)
    for name, (of, fix) in _NEEDED.items():
        if name not in entries and of == STREAMING == mode:
            entries["mode"].problem(f"mode: streaming needs the key {name!r}.", fix)
        elif name not in entries and not of:
            root.problem(f"the key {name!r} is missing.", fix)
    trigger = entries["trigger"].scalar() if "trigger" in entries else None
    try:
        parts["trigger"] = trigger_s(AVAILABLE_NOW if trigger is None else trigger)
    except ValueError:
        fix = f"Write {AVAILABLE_NOW}, or a time such as 10s or 5m."
        entries["trigger"].problem(f"it is {trigger!r}.", fix)
    if "source" in entries:
        parts["source"] = _source(entries["source"], cluster, mode)
    if "transform" in entries:
        parts["transform_line"] = entries["transform"].block_line
        if not re.search(rf"\b{VIEW}\b", parts["transform"] or VIEW, re.IGNORECASE):
            what = f"it does not read the view {VIEW!r}."
            entries["transform"].problem(what, "select … from source")
    if "sinks" in entries:
        parts["sinks"] = _sinks(entries["sinks"], cluster, mode)
    return parts


def _check_mode(kind: str, entries: Entries, mode: str) -> None:
    """Keys that do not go with the mode."""
    for (of, name, wrong_mode), (what, fix) in _WRONG_IN.items():
        if (of, wrong_mode) == (kind, mode) and name in entries:
            entries[name].problem(what, fix)


def _options(
    entries: Entries, declared: Iterable[Option], use: str, what: str, others: Sequence[str] = ()
) -> Texts:
    """Texts of options by their own names; what is wrong becomes problems."""
    declared = [option for option in declared if use in option.uses]
    known = [name for option in declared for name in (option.name, *option.aliases)]
    by_lower, all_by_lower = index_by_name(declared), {one.name.lower(): one for one in OPTIONS}
    found: Texts = {}
    lines: dict[str, int] = {}
    for name, entry in entries.items():
        option, other = by_lower.get(name.lower()), all_by_lower.get(name.lower())
        if option is None:
            said, fix = f"{what} has no such key.", suggest(name, [*known, *others])
            if other is not None and use not in other.uses:
                uses = ", ".join(sorted(other.uses))
                said, fix = f"it does not go with a {use}.", f"It is for: {uses}."
            elif other is not None:
                said, fix = f"it does not belong to {what}.", "Put it into source: or a sink."
            entry.problem(said, fix)
            continue
        if option.name in SECRET:
            entry.document.secrets.add(str(getattr(entry.node, "value", "")))
        text = entry.joined()
        if option.name in SECRET:
            entry.document.secrets.add(text or "")
        if option.name in found:
            fix = f"Line {lines[option.name]} says {option.name} already; keep one."
            entry.problem(f"it means {option.name!r}, which is there.", fix)
        elif text is not None:
            try:
                option.parse(text)
                found[option.name], lines[option.name] = text, entry.line
            except ValueError as error:
                entry.problem(f"it is {text!r}: {error}.")
    return found


_Looks = tuple[Callable[[Options], object], ...]
_SOURCES: Final[Mapping[str, tuple[str, Sequence[Option], _Looks]]] = {
    ROCKETMQ: ("a source", OPTIONS, (
        parse_topics, declared_columns, lambda options: options.require("nameServers"),
        lambda options: options.credentials,
    )),
    STORE: ("a store source", STORE_OPTIONS, (
        lambda options: options.require("path"), parse_topics, declared_columns,
    )),
}  # fmt: skip
"""Kind -> what it is, its options, and what they say together: topics, columns, both keys."""


def _source(entry: Entry, cluster: Texts, mode: str) -> Source | None:
    """None when its kind is not known."""
    entries = entry.mapping()
    if entries is None:
        return None
    kind = read_field(entries.pop("kind"), _KIND_OF_SOURCE) if "kind" in entries else ROCKETMQ
    if kind is None:
        return None
    if kind == PARQUET:
        fields = read_fields(entries, PARQUET_SOURCE, entry, "a parquet source")
        given = {"path": fields.get("path", ""), **fields["options"]}
        given |= {"schema": fields["schema"]} if fields["schema"] else {}
        return Source(PARQUET, given, entry.line)
    if kind == STORE and mode == STREAMING:
        entry.problem("a store source is read in a batch.", "Write mode: batch.")
    use = STREAM if kind == ROCKETMQ and mode == STREAMING else READ
    before = len(entry.document.problems)
    what, declared, looks = _SOURCES[kind]
    texts = _options(entries, declared, use, what, ("kind",))
    texts = {**cluster, **texts} if kind == ROCKETMQ else texts
    if len(entry.document.problems) == before:
        options = parse_options(texts, use, index_by_name(declared))
        for look in looks:
            try:
                look(options)
            except ConfigurationError as error:
                named = [name for name in entries if f"'{name}'" in str(error)]
                if not named and look is declared_columns:
                    named = [name for name in entries if name == "columns"]
                place = entries[named[0]] if named else entry
                place.problem(f"{error.fact}.", "" if ".option(" in error.fix else error.fix)
    _check_filters(entries, texts)
    return Source(kind, texts, entry.line)


def _check_filters(entries: Entries, texts: Texts) -> None:
    if "filter.tags" in texts and "filter.tags" in entries:
        try:
            parse_tags(texts["filter.tags"])
        except FilterSyntaxError as error:
            entries["filter.tags"].problem(" ".join(str(error).split()))
    if "filter.sql" in texts and "filter.sql" in entries:
        for finding in check_sql92(texts["filter.sql"]):
            entries["filter.sql"].problem(
                f"at character {finding.position + 1}: {' '.join(finding.what.split())}",
                " ".join(finding.instead.split()),
                is_error=finding.is_error or finding.code == IGNORED_TEXT,
            )


# ---- sinks


def _sinks(entry: Entry, cluster: Texts, mode: str) -> tuple[Sink, ...]:
    """All sinks, each with a name of its own."""
    entries = entry.items()
    if entries is not None and not entries:
        entry.problem("there is no sink.", "Say where it goes, as in sinks: [{kind: topic, …}].")
    sinks: list[Sink] = []
    for one in entries or ():
        sink = _sink(one, cluster, mode)
        if sink is None:
            continue
        same = [other for other in sinks if other.name == sink.name]
        if same:
            fix = f"Give one of them name: OTHER; the other begins in line {same[0].line}."
            one.problem(f"two sinks have the name {sink.name!r}.", fix)
        sinks.append(sink)
    return tuple(sinks)


def _sink(entry: Entry, cluster: Texts, mode: str) -> Sink | None:
    entries = entry.mapping()
    if entries is None:
        return None
    lines = {name: inner.line for name, inner in entries.items()}
    if "kind" not in entries:
        entry.problem("a sink needs the key 'kind'.", f"It can be {TOPIC}, {PARQUET} or {TABLE}.")
        return None
    kind = read_field(entries.pop("kind"), _KIND_OF_SINK)
    if kind is None:
        return None
    declared, what, options = _SINKS[kind], f"a {kind} sink", Texts()
    names = [one.name for one in declared]
    if kind == TOPIC:
        rest = {name: inner for name, inner in entries.items() if name not in names}
        options = {**cluster, **_options(rest, OPTIONS, WRITE, what, ("kind", *names))}
        own = {name: inner for name, inner in entries.items() if name in names}
        found = read_fields(own, declared, entry, what)
        fields = {name: value for name, value in found.items() if value is not None}
    else:
        fields = read_fields(entries, declared, entry, what)
        entry.document.secrets.add_url(fields.get("url", ""))
    _check_mode(kind, entries, mode)
    for key, wrong, fix in _mistakes(kind, entries, fields, options):
        if not key or key in entries:
            (entries[key] if key else entry).problem(wrong, fix)
    suffix = {TOPIC: options.get("topic", ""), TABLE: fields.get("table", "").replace("/", "-")}
    name = fields.get("name") or "-".join(filter(None, (kind, suffix.get(kind))))
    return Sink(name, kind, fields, options, entry.key, entry.line, lines)


def _mistakes(
    kind: str, entries: Entries, fields: Mapping[str, Any], options: Texts
) -> Iterator[tuple[str, str, str]]:
    """What goes wrong together in a sink: key ("": the sink itself), what, cure."""
    if kind == TOPIC:
        if "topic" not in options and "topic" not in entries:
            yield "", "a topic sink needs the key 'topic'.", "The topic to write to."
        if "nameServers" not in options:
            yield "", "the option 'nameServers' is missing.", "Say it in cluster:."
        # Exactly once means an epoch: a micro-batch of a stream, or a batch write with a name.
        delivery = options.get("delivery", AT_LEAST_ONCE).strip().lower()
        if "queryId" in options and delivery != EXACTLY_ONCE:
            what = f"it does not go with delivery: {delivery}."
            yield "queryId", what, "Write delivery: exactly-once."
    elif kind == TABLE:
        if fields.get("url"):
            try:
                check_url(fields["url"])
            except ConfigurationError as error:
                yield "url", f"{error.fact}.", error.fix
        if fields.get("key") == []:
            yield "key", "there is no column.", "Name those that tell rows apart."
        if not 1 <= fields["batch_rows"] <= 1_000_000:
            yield "batch_rows", f"it is {fields['batch_rows']}.", "From 1 to 1,000,000."
