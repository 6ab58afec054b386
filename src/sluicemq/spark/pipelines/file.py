"""Reads a pipeline file and checks it as far as that goes without a cluster and without Spark.

    name: late-flights
    cluster: {nameServers: "127.0.0.1:9876"}
    source: {topic: flights, filter.sql: dep_delay > 60}
    transform: select origin, count(*) as n from source group by origin
    sinks:
      - {kind: table, url: "sqlite:///late.db", table: late, key: [origin]}

All that is wrong is found in one reading, each with its line, its key, the nearest right name and a
cure. What needs more is found by `plan`: a transform is parsed by Spark, topics are looked for at
the cluster, tables in the database. Nothing is ever printed that `Secrets` knows.

Options of the `rocketmq` source and sink are those that `spark/options.py` declares, checked by its
own parsers; what else a sink takes is declared here as fields. Options are looked up without regard
to case, as Spark does, so two spellings of one option are one key twice.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.filter.check import check
from sluicemq.filter.findings import IGNORED_TEXT
from sluicemq.filter.subscriptions import parse_tags
from sluicemq.spark.options import (
    AT_LEAST_ONCE,
    CONNECTION,
    EXACTLY_ONCE,
    OPTIONS,
    READ,
    STORE_OPTIONS,
    STREAM,
    WRITE,
    Option,
    Options,
    by_name,
    parse_options,
)
from sluicemq.spark.pipelines.document import (
    AVAILABLE_NOW,
    BATCH,
    PARQUET,
    ROCKETMQ,
    STORE,
    STREAMING,
    TABLE,
    TOPIC,
    VIEW,
    Document,
    Entry,
    Pipeline,
    Problem,
    Sink,
    Source,
    nearest,
)
from sluicemq.spark.pipelines.ready import (
    FLAG,
    INTEGER,
    LIST,
    MAPPING,
    NAMES,
    REQUIRED,
    TEXT,
    Field,
    duration_s,
    read_field,
    read_fields,
    ready,
)
from sluicemq.spark.schema import declared_columns
from sluicemq.spark.sinks.databases import check_url
from sluicemq.spark.sources.offsets import topics_of

Entries = Mapping[str, Entry]
Cluster = Mapping[str, tuple[str, int]]
"""Options with the line of each."""
SECRET: Final = ("secretKey", "securityToken", "tls.keyPassword")
MESSAGE: Final = (
    "value", "tag", "keys", "properties", "queue_id", "sharding_key", "delay_level", "delay_ms",
    "deliver_at",
)  # fmt: skip
"""Parts of a message that a topic sink may compute by Spark SQL expressions."""
_OF_FILES: Final = ("source", "transform", "sinks", "mode", "trigger", "checkpoint")
_TOP: Final = ("name", "cluster", *_OF_FILES, "use", "with", "spark")
_KIND_OF_SOURCE: Final = Field("kind", TEXT, "", ROCKETMQ, (ROCKETMQ, STORE, PARQUET))
_KIND_OF_SINK: Final = Field("kind", TEXT, "", REQUIRED, (TOPIC, PARQUET, TABLE))
_SINK_NAME: Final = Field("name", TEXT, "Of the sink, for the log and its checkpoint.", None)
PARQUET_SOURCE: Final = (
    Field("path", TEXT, "The directory or file."),
    Field("schema", TEXT, "Columns as in SQL; without it they are taken from the files.", None),
    Field("options", MAPPING, "Further options of Spark's Parquet source.", {}),
)
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


def load_pipeline(path: str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline of a file. Raises ConfigurationError whose text has a line for each problem:
    `FILE:LINE: KEY: what is wrong. What to do.`"""
    pipeline, problems = check_pipeline(path, environment)
    if pipeline is None:
        told = [one.told(path) for one in problems if one.is_error]
        raise ConfigurationError("\n".join(told))
    return pipeline


def check_pipeline(
    path: str, environment: Mapping[str, str] | None = None
) -> tuple[Pipeline | None, list[Problem]]:
    """The pipeline, if the file is right, and all problems and warnings in the order of lines.

    Raises ConfigurationError when there is no such file or it is no UTF-8.
    """
    try:
        text = read_text(SYSTEM_FILES, path)
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"the file {path!r} cannot be read: {error}.") from None
    if text is None:
        raise ConfigurationError(f"there is no file {path!r}.", cure="Give the path of a pipeline.")
    return parse_pipeline(text, path, os.environ if environment is None else environment)


def parse_pipeline(
    text: str, path: str, environment: Mapping[str, str]
) -> tuple[Pipeline | None, list[Problem]]:
    """The same from the file's text."""
    document = Document(environment)
    root = document.root(text)
    if root is None:
        return None, document.problems
    entries = root.mapping() or {}
    for name in [name for name in entries if name not in _TOP]:
        entries.pop(name).problem("there is no such key.", nearest(name, _TOP))
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.rpartition("/")[2].rpartition(".")[0])
    name = _text(entries, "name") or stem or "pipeline"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        entries["name"].problem(f"it is {name!r}.", "Use letters, digits, dots, _ and -.")
    cluster = _cluster(entries.get("cluster"))
    settings: dict[str, str] = {}
    if "spark" in entries:
        settings = read_field(entries["spark"], Field("spark", MAPPING, "")) or {}
        for setting, entry in (entries["spark"].mapping() or {}).items():
            if not setting.startswith("spark."):
                cure = "As in spark.executor.memory."
                entry.problem("a setting of Spark begins with spark.", cure)
    parts = _ready(entries) if "use" in entries else _own(root, entries, cluster)
    problems = sorted(document.problems)
    if any(one.is_error for one in problems):
        return None, problems
    pipeline = Pipeline(
        path, name, {option: text for option, (text, _) in cluster.items()}, settings=settings,
        secrets=document.secrets, warnings=tuple(problems), **parts,
    )  # fmt: skip
    return pipeline, problems


def _text(entries: Entries, name: str) -> str | None:
    text: str | None = None
    if name in entries:
        text = read_field(entries[name], Field(name, TEXT, ""))
    return text


def _ready(entries: Entries) -> dict[str, Any]:
    """The parts of a pipeline that uses a ready one."""
    use = entries["use"].scalar() or ""
    for name in _OF_FILES:
        if name in entries:
            entries[name].problem("this does not go with use:.", "A ready pipeline has with:.")
    if use not in NAMES:
        entries["use"].problem(f"there is no ready pipeline {use!r}.", nearest(use, NAMES))
        return {"use": use}
    owner = entries.get("with", entries["use"])
    given = (entries["with"].mapping() if "with" in entries else None) or {}
    what = f"the ready pipeline {use!r}"
    return {"use": use, "given": read_fields(given, ready(use).fields, owner, what)}


def _own(root: Entry, entries: Entries, cluster: Cluster) -> dict[str, Any]:
    """The parts of a pipeline with source and sinks of its own."""
    if "with" in entries:
        entries["with"].problem("this goes with use: NAME, a ready pipeline.")
    mode = BATCH
    if "mode" in entries:
        words = Field("mode", TEXT, "", words=(BATCH, STREAMING))
        mode = read_field(entries["mode"], words) or BATCH
    parts: dict[str, Any] = {"mode": mode, "transform": _text(entries, "transform")}
    for name, cure in (
        ("trigger", "Write trigger: available-now or 10s."),
        ("checkpoint", "Write checkpoint: DIR, where the stream notes how far it is."),
    ):
        if mode == BATCH and name in entries:
            entries[name].problem("this goes with mode: streaming.", "A batch reads once.")
        elif mode == STREAMING and name not in entries:
            entries["mode"].problem(f"mode: streaming needs the key {name!r}.", cure)
    parts["trigger"] = _trigger(entries.get("trigger"))
    parts["checkpoint"] = _text(entries, "checkpoint")
    if "source" in entries:
        parts["source"] = _source(entries["source"], cluster, mode)
    else:
        root.problem("the key 'source' is missing.", "Say what is read, as in source: {topic: T}.")
    if "transform" in entries:
        parts["transform_line"] = entries["transform"].block_line
        if not re.search(rf"\b{VIEW}\b", parts["transform"] or VIEW, re.IGNORECASE):
            what = f"it does not read the view {VIEW!r}."
            entries["transform"].problem(what, "select … from source")
    if "sinks" in entries:
        parts["sinks"] = _sinks(entries["sinks"], cluster, mode)
    else:
        root.problem("the key 'sinks' is missing.", "Say where it goes, as in sinks: [{kind: …}].")
    return parts


def _trigger(entry: Entry | None) -> float | None:
    text = None if entry is None else entry.scalar()
    if entry is None or text is None or text.strip() == AVAILABLE_NOW:
        return None
    try:
        return duration_s(text)
    except ValueError:
        entry.problem(f"it is {text!r}.", f"Write {AVAILABLE_NOW}, or a time such as 10s or 5m.")
        return None


# ---- options


def _cluster(entry: Entry | None) -> Cluster:
    """The options that say where the cluster is and who asks."""
    if entry is None:
        return {}
    known = [option for option in OPTIONS if option.name in CONNECTION]
    found = _options(entry.mapping() or {}, known, READ, "a cluster")
    keys = [name for name in ("accessKey", "secretKey") if name in found]
    if len(keys) == 1:
        lacking = "secretKey" if keys == ["accessKey"] else "accessKey"
        entry.problem(f"the option {lacking!r} is missing.", f"{keys[0]} is given; it needs both.")
    return found


def _options(
    entries: Entries, declared: Iterable[Option], use: str, what: str, others: Sequence[str] = ()
) -> dict[str, tuple[str, int]]:
    """Options by their own name, each with its line; what is wrong becomes problems."""
    known = {
        name: option
        for option in declared
        if use in option.use
        for name in (option.name, *option.aliases)
    }
    by_lower = {name.lower(): option for name, option in known.items()}
    found: dict[str, tuple[str, int]] = {}
    for name, entry in entries.items():
        option = by_lower.get(name.lower())
        if option is None:
            _unknown(entry, name, use, what, [*known, *others])
            continue
        secrets = entry.document.secrets
        if option.name in SECRET:
            secrets.add(str(getattr(entry.node, "value", "")))
        text = _option_text(entry)
        if option.name in SECRET:
            secrets.add(text or "")
        if option.name in found:
            cure = f"Line {found[option.name][1]} says {option.name} already; keep one."
            entry.problem(f"it means {option.name!r}, which is there.", cure)
        elif text is not None:
            try:
                option.parse(text)
                found[option.name] = (text, entry.line)
            except ValueError as error:
                entry.problem(f"it is {text!r}: {error}.")
    return found


def _unknown(entry: Entry, name: str, use: str, what: str, names: list[str]) -> None:
    other = next((one for one in OPTIONS if name.lower() == one.name.lower()), None)
    if other is None:
        entry.problem(f"{what} has no such key.", nearest(name, names))
    elif use not in other.use:
        uses = ", ".join(sorted(other.use))
        entry.problem(f"it does not go with a {use}.", f"It is for: {uses}.")
    else:
        entry.problem(f"it does not belong to {what}.", "Put it into source: or a sink.")


def _option_text(entry: Entry) -> str | None:
    """A scalar's text; a list is joined by commas, a mapping is JSON (offsets)."""
    if isinstance(entry.node.value, str):
        return entry.scalar()
    value = entry.plain()
    if isinstance(value, list):
        return ",".join(str(one) for one in value)
    return orjson.dumps(value).decode()


# ---- source


def _source(entry: Entry, cluster: Cluster, mode: str) -> Source | None:
    """None when its kind is not known."""
    entries = entry.mapping()
    if entries is None:
        return None
    kind = read_field(entries.pop("kind"), _KIND_OF_SOURCE) if "kind" in entries else ROCKETMQ
    if kind == PARQUET:
        fields = read_fields(entries, PARQUET_SOURCE, entry, "a parquet source")
        given = {"path": fields.get("path", ""), **fields["options"]}
        given |= {"schema": fields["schema"]} if fields["schema"] else {}
        return Source(PARQUET, given, entry.line)
    if kind is None:
        return None
    if kind == STORE and mode == STREAMING:
        entry.problem("a store source is read in a batch.", "Write mode: batch.")
    use = STREAM if kind == ROCKETMQ and mode == STREAMING else READ
    before = len(entry.document.problems)
    looks: tuple[Callable[[Options], object], ...]
    if kind == STORE:
        found = _options(entries, STORE_OPTIONS, use, "a store source", ("kind",))
        looks = (lambda options: options.required("path"), topics_of, declared_columns)
    else:
        found = {**cluster, **_options(entries, OPTIONS, use, "a source", ("kind",))}
        looks = (
            topics_of, declared_columns, lambda options: options.required("nameServers"),
            lambda options: options.credentials,
        )  # fmt: skip
    texts = {name: text for name, (text, _) in found.items()}
    if len(entry.document.problems) == before:
        options = parse_options(texts, use, by_name(STORE_OPTIONS if kind == STORE else OPTIONS))
        for look in looks:
            _check_together(entry, entries, look, options)
    _check_filters(entries, texts)
    return Source(kind, texts, entry.line)


def _check_together(
    entry: Entry, entries: Entries, look: Callable[[Options], object], options: Options
) -> None:
    """What the options say together: one way to name topics, columns, both keys."""
    try:
        look(options)
    except ConfigurationError as error:
        named = [name for name in entries if f"'{name}'" in str(error)]
        if not named and look is declared_columns:
            named = [name for name in entries if name == "columns"]
        place = entries[named[0]] if named else entry
        place.problem(f"{error.fact}.", "" if ".option(" in error.cure else error.cure)


def _check_filters(entries: Entries, texts: Mapping[str, str]) -> None:
    def one_line(text: str) -> str:
        return " ".join(text.split())

    if "filter.tags" in texts and "filter.tags" in entries:
        try:
            parse_tags(texts["filter.tags"])
        except FilterSyntaxError as error:
            entries["filter.tags"].problem(one_line(str(error)))
    if "filter.sql" in texts and "filter.sql" in entries:
        for finding in check(texts["filter.sql"]):
            entries["filter.sql"].problem(
                f"at character {finding.position + 1}: {one_line(finding.what)}",
                one_line(finding.instead),
                is_error=finding.is_error or finding.code == IGNORED_TEXT,
            )


# ---- sinks


def _sinks(entry: Entry, cluster: Cluster, mode: str) -> tuple[Sink, ...]:
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
            cure = f"Give one of them name: OTHER; the other begins in line {same[0].line}."
            one.problem(f"two sinks have the name {sink.name!r}.", cure)
        sinks.append(sink)
    return tuple(sinks)


def _sink(entry: Entry, cluster: Cluster, mode: str) -> Sink | None:
    entries = entry.mapping()
    if entries is None:
        return None
    lines = {name: inner.line for name, inner in entries.items()}
    if "kind" not in entries:
        entry.problem("a sink needs the key 'kind'.", f"It can be {TOPIC}, {PARQUET} or {TABLE}.")
        return None
    kind = read_field(entries.pop("kind"), _KIND_OF_SINK)
    options: dict[str, str] = {}
    if kind is None:
        return None
    if kind == TOPIC:
        fields, options = _topic(entry, entries, cluster, mode)
        target = options.get("topic", "")
    elif kind == PARQUET:
        fields = read_fields(entries, PARQUET_SINK, entry, "a parquet sink")
        if mode == STREAMING and "write" in entries:
            entries["write"].problem("this goes with mode: batch.", "A stream appends.")
        target = None
    else:
        fields = read_fields(entries, TABLE_SINK, entry, "a table sink")
        _check_table(entries, fields, mode)
        target = fields.get("table", "").replace("/", "-") or None
    name = fields.get("name") or (kind if target is None else f"{kind}-{target}")
    return Sink(name, kind, fields, options, entry.key, entry.line, lines)


def _check_table(entries: Entries, fields: Mapping[str, Any], mode: str) -> None:
    if "url" in entries and fields.get("url"):
        entries["url"].document.secrets.add_url(fields["url"])
        try:
            check_url(fields["url"])
        except ConfigurationError as error:
            entries["url"].problem(f"{error.fact}.", error.cure)
    if mode == BATCH and "output" in entries:
        entries["output"].problem("this goes with mode: streaming.", "A batch writes every row.")
    if "key" in entries and fields.get("key") == []:
        entries["key"].problem("there is no column.", "Name those that tell rows apart.")
    if "batch_rows" in entries and not 1 <= fields["batch_rows"] <= 1_000_000:
        entries["batch_rows"].problem(f"it is {fields['batch_rows']}.", "From 1 to 1,000,000.")


def _topic(
    entry: Entry, entries: dict[str, Entry], cluster: Cluster, mode: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fields and options of a topic sink. Exactly once means an epoch: a micro-batch of a stream,
    or a batch write with a name."""
    fields: dict[str, Any] = {
        name: read_field(entries.pop(name), Field(name, TEXT, ""))
        for name in ("name", *MESSAGE)
        if name in entries
    }
    own = _options(entries, OPTIONS, WRITE, "a topic sink", ("kind", "name", *MESSAGE))
    texts = {name: text for name, (text, _) in {**cluster, **own}.items()}
    if "topic" not in texts and "topic" not in entries:
        entry.problem("a topic sink needs the key 'topic'.", "The topic to write to.")
    if "nameServers" not in texts:
        entry.problem("the option 'nameServers' is missing.", "Say it in cluster:.")
    delivery = texts.get("delivery", AT_LEAST_ONCE).strip().lower()
    if "queryId" in texts and "queryId" in entries:
        if mode == STREAMING:
            cure = "The stream's checkpoint holds its id."
            entries["queryId"].problem("it does not go with mode: streaming.", cure)
        elif delivery != EXACTLY_ONCE:
            cure = "Write delivery: exactly-once."
            entries["queryId"].problem(f"it does not go with delivery: {delivery}.", cure)
    return fields, texts
