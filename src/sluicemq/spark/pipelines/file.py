"""The cluster, the source and the sinks of a file: what their keys may be, and what goes together.

Options of the `rocketmq` source and sink are those that `spark/options.py` declares, checked by its
own parsers; what else a sink takes is declared here as fields. Both are looked up without regard to
case, as Spark does, so two spellings of one option are one key twice.

Reads a pipeline file and checks it as far as that goes without a cluster and without Spark.

    name: late-flights
    cluster: {nameServers: "127.0.0.1:9876"}
    source: {topic: flights, filter.sql: dep_delay > 60}
    transform: select origin, count(*) as n from source group by origin
    sinks:
      - {kind: table, url: "sqlite:///late.db", table: late, key: [origin]}

All that is wrong is found in one reading, each with its line, its key, the nearest right name and a
cure. What needs more is found by `plan`: a transform is parsed by Spark, topics are looked for at
the cluster, tables in the database. Nothing is ever printed that `Secrets` knows.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.filter.check import check
from sluicemq.filter.findings import IGNORED_TEXT
from sluicemq.filter.subscriptions import parse_tags
from sluicemq.spark.options import (
    AT_LEAST_ONCE,
    DECLARED,
    EXACTLY_ONCE,
    OPTIONS,
    READ,
    STORE_OPTIONS,
    STREAM,
    WRITE,
    Option,
    Options,
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
from sluicemq.spark.sources.offsets import topics_of

CONNECTION: Final = tuple(
    option.name
    for option in OPTIONS
    if option.name in ("nameServers", "accessKey", "secretKey", "securityToken", "timeoutMs")
    or option.name.startswith("tls")
)
SECRET: Final = ("secretKey", "securityToken", "tls.keyPassword")
MESSAGE: Final = (
    "value", "tag", "keys", "properties", "queue_id", "sharding_key", "delay_level", "delay_ms",
    "deliver_at",
)  # fmt: skip
"""Parts of a message that a topic sink may compute by Spark SQL expressions."""
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
    Field(
        "write", TEXT, "What a batch does where files are already.", "fail",
        ("fail", "append", "overwrite"),
    ),
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
    Field(
        "output", TEXT, "What a stream hands on: new rows, or changed ones of an aggregate.",
        "append", ("append", "update", "complete"),
    ),
)  # fmt: skip

Cluster = Mapping[str, tuple[str, int]]


def read_cluster(entry: Entry | None) -> dict[str, tuple[str, int]]:
    """Option -> text and line, of the options that say where the cluster is and who asks."""
    if entry is None:
        return {}
    known = _options_by_name(READ, lambda option: option.name in CONNECTION)
    found = _options(entry.mapping() or {}, known, READ, "a cluster")
    keys = [name for name in ("accessKey", "secretKey") if name in found]
    if len(keys) == 1:
        lacking = "secretKey" if keys == ["accessKey"] else "accessKey"
        entry.problem(f"the option {lacking!r} is missing.", f"{keys[0]} is given; it needs both.")
    return found


def _options_by_name(
    use: str, wanted: Callable[[Option], bool], options: Sequence[Option] = OPTIONS
) -> dict[str, Option]:
    return {
        name: option
        for option in options
        if use in option.use and wanted(option)
        for name in (option.name, *option.aliases)
    }


def _options(
    entries: Mapping[str, Entry],
    known: Mapping[str, Option],
    use: str,
    what: str,
    others: tuple[str, ...] = (),
) -> dict[str, tuple[str, int]]:
    """Declared options by their own name, each with its line; what is wrong becomes problems."""
    by_lower = {name.lower(): option for name, option in known.items()}
    found: dict[str, tuple[str, int]] = {}
    for name, entry in entries.items():
        option = by_lower.get(name.lower())
        if option is None:
            _unknown(entry, name, use, what, [*known, *others])
            continue
        if option.name in SECRET:
            entry.document.secrets.add(str(getattr(entry.node, "value", "")))
        text = _option_text(entry)
        if option.name in SECRET and text:
            entry.document.secrets.add(text)
        if option.name in found:
            cure = f"Line {found[option.name][1]} says {option.name} already; keep one."
            entry.problem(f"it means {option.name!r}, which is there.", cure)
        elif text is not None and _parses(entry, option, text):
            found[option.name] = (text, entry.line)
    return found


def _unknown(entry: Entry, name: str, use: str, what: str, names: list[str]) -> None:
    other = next((one for one in OPTIONS if name.lower() == one.name.lower()), None)
    if other is not None and use not in other.use:
        entry.problem(
            f"it does not go with a {use}.", f"It is for: {', '.join(sorted(other.use))}."
        )
    elif other is not None:
        entry.problem(f"it does not belong to {what}.", "Put it into source: or a sink.")
    else:
        entry.problem(f"{what} has no such key.", nearest(name, names))


def _option_text(entry: Entry) -> str | None:
    """A scalar's text; a list is joined by commas, a mapping is JSON (offsets)."""
    if isinstance(entry.node.value, str):
        return entry.scalar()
    value = entry.plain()
    if isinstance(value, list):
        return ",".join(str(one) for one in value)
    return orjson.dumps(value).decode()


def _parses(entry: Entry, option: Option, text: str) -> bool:
    try:
        option.parse(text)
    except ValueError as error:
        entry.problem(f"it is {text!r}: {error}.")
        return False
    return True


def read_source(entry: Entry, cluster: Cluster, mode: str) -> Source | None:
    """The source; None when its kind is not known."""
    entries = entry.mapping()
    if entries is None:
        return None
    kind = ROCKETMQ
    if "kind" in entries:
        kind = read_field(entries.pop("kind"), _KIND_OF_SOURCE)
    if kind == PARQUET:
        fields = read_fields(entries, PARQUET_SOURCE, entry, "a parquet source")
        options = {"path": fields.get("path", ""), **fields["options"]}
        options |= {"schema": fields["schema"]} if fields["schema"] else {}
        return Source(PARQUET, options, entry.line)
    if kind == STORE:
        return _store(entry, entries, mode)
    return None if kind is None else _rocketmq(entry, entries, cluster, mode)


def _store(entry: Entry, entries: Mapping[str, Entry], mode: str) -> Source:
    if mode == STREAMING:
        entry.problem("a store source is read in a batch.", "Write mode: batch.")
    known = _options_by_name(READ, lambda option: True, STORE_OPTIONS)
    before = len(entry.document.problems)
    found = _options(entries, known, READ, "a store source", ("kind",))
    texts = {name: text for name, (text, _) in found.items()}
    lines = {name: line for name, (_, line) in found.items()}
    if len(entry.document.problems) == before:
        options = parse_options(texts, READ, DECLARED)
        _check_whole(entry, entries, options, (_directory, topics_of, declared_columns))
    _check_filters(entries, texts)
    return Source(STORE, texts, entry.line, lines)


def _directory(options: Options) -> object:
    return options.required("path")


def _rocketmq(
    entry: Entry, entries: Mapping[str, Entry], cluster: Cluster, mode: str
) -> Source | None:
    use = READ if mode == BATCH else STREAM
    before = len(entry.document.problems)
    own = _options(entries, _options_by_name(use, lambda option: True), use, "a source", ("kind",))
    found = dict(cluster) | own
    texts = {name: text for name, (text, _) in found.items()}
    lines = {name: line for name, (_, line) in own.items()}
    if len(entry.document.problems) == before:
        options = parse_options(texts, use)
        _check_whole(entry, entries, options, (topics_of, declared_columns, _connection))
    _check_filters(entries, texts)
    return Source(ROCKETMQ, texts, entry.line, lines)


def _check_whole(
    entry: Entry,
    entries: Mapping[str, Entry],
    options: Options,
    looks: tuple[Callable[[Options], object], ...],
) -> None:
    """What the options say together: one way to name topics, columns, both keys."""
    for look in looks:
        try:
            look(options)
        except ConfigurationError as error:
            named = [name for name in entries if f"'{name}'" in str(error)]
            if not named and look is declared_columns:
                named = [name for name in entries if name == "columns"]
            place = entries[named[0]] if named else entry
            cure = "" if error.cure.startswith("Add .option(") else error.cure
            place.problem(f"{error.fact}.", cure)


def _connection(options: Options) -> object:
    options.required("nameServers")
    return options.credentials


def _check_filters(entries: Mapping[str, Entry], texts: Mapping[str, str]) -> None:
    tags, sql = texts.get("filter.tags"), texts.get("filter.sql")
    if tags is not None and "filter.tags" in entries:
        try:
            parse_tags(tags)
        except FilterSyntaxError as error:
            entries["filter.tags"].problem(_one_line(str(error)))
    if sql is None or "filter.sql" not in entries:
        return
    for finding in check(sql):
        entries["filter.sql"].problem(
            f"at character {finding.position + 1}: {_one_line(finding.what)}",
            _one_line(finding.instead),
            is_error=finding.is_error or finding.code == IGNORED_TEXT,
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def read_sinks(entry: Entry, cluster: Cluster, mode: str) -> tuple[Sink, ...]:
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
    if kind is None:
        return None
    if kind == TOPIC:
        return _topic(entry, entries, cluster, mode, lines)
    fields = read_fields(entries, PARQUET_SINK if kind == PARQUET else TABLE_SINK, entry,
                         f"a {kind} sink")  # fmt: skip
    _check_fields(entries, fields, kind, mode)
    target = fields.get("table", "").replace("/", "-") if kind == TABLE else ""
    name = fields["name"] or (f"{kind}-{target}" if target else kind)
    return Sink(name, kind, fields, {}, entry.key, entry.line, lines)


def _check_fields(
    entries: Mapping[str, Entry], fields: Mapping[str, Any], kind: str, mode: str
) -> None:
    if kind == PARQUET:
        if mode == STREAMING and "write" in entries:
            entries["write"].problem("this goes with mode: batch.", "A stream appends.")
        return
    if "url" in entries and fields.get("url"):
        entries["url"].document.secrets.add_url(fields["url"])
        _check_url(entries["url"], fields["url"])
    if mode == BATCH and "output" in entries:
        entries["output"].problem("this goes with mode: streaming.", "A batch writes every row.")
    if "key" in entries and fields.get("key") == []:
        entries["key"].problem("there is no column.", "Name those that tell rows apart.")
    if "batch_rows" in entries and not 1 <= fields["batch_rows"] <= 1_000_000:
        entries["batch_rows"].problem(f"it is {fields['batch_rows']}.", "From 1 to 1,000,000.")


def _check_url(entry: Entry, url: str) -> None:
    from sluicemq.spark.sinks.databases import check_url  # noqa: PLC0415 - SQLAlchemy

    try:
        check_url(url)
    except ConfigurationError as error:
        entry.problem(f"{error.fact}.", error.cure)


def _topic(
    entry: Entry,
    entries: dict[str, Entry],
    cluster: Cluster,
    mode: str,
    lines: Mapping[str, int],
) -> Sink:
    fields: dict[str, Any] = {}
    for name in ("name", *MESSAGE):
        if name in entries:
            fields[name] = read_field(entries.pop(name), Field(name, TEXT, ""))
    known = _options_by_name(WRITE, lambda option: True)
    own = _options(entries, known, WRITE, "a topic sink", ("kind", "name", *MESSAGE))
    texts = {name: text for name, (text, _) in (dict(cluster) | own).items()}
    if "topic" not in texts and "topic" not in entries:
        entry.problem("a topic sink needs the key 'topic'.", "The topic to write to.")
    if "nameServers" not in texts:
        entry.problem("the option 'nameServers' is missing.", "Say it in cluster:.")
    _check_delivery(entries, texts, mode)
    name = fields.get("name") or f"{TOPIC}-{texts.get('topic', '')}"
    return Sink(name, TOPIC, fields, texts, entry.key, entry.line, lines)


def _check_delivery(entries: Mapping[str, Entry], texts: Mapping[str, str], mode: str) -> None:
    """Exactly once means an epoch: a micro-batch of a stream, or a batch write with a name."""
    delivery = texts.get("delivery", AT_LEAST_ONCE).strip().lower()
    if "queryId" not in texts or "queryId" not in entries:
        return
    if mode == STREAMING:
        entries["queryId"].problem("it does not go with mode: streaming.",
                                   "The stream's checkpoint holds its id.")  # fmt: skip
    elif delivery != EXACTLY_ONCE:
        entries["queryId"].problem(f"it does not go with delivery: {delivery}.",
                                   "Write delivery: exactly-once.")  # fmt: skip


_TOP: Final = (
    "name", "cluster", "source", "transform", "sinks", "mode", "trigger", "checkpoint", "use",
    "with", "spark",
)  # fmt: skip
_OF_FILES: Final = ("source", "transform", "sinks", "mode", "trigger", "checkpoint")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Entries = Mapping[str, Entry]


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
    pipeline = None if root is None else _pipeline(document, root, path)
    problems = sorted(document.problems)
    return (None if any(one.is_error for one in problems) else pipeline), problems


def _pipeline(document: Document, root: Entry, path: str) -> Pipeline:
    entries = dict(root.keys_of(_TOP))
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.rpartition("/")[2].rpartition(".")[0])
    name = _text(entries, "name") or stem or "pipeline"
    if not _NAME.fullmatch(name):
        entries["name"].problem(f"it is {name!r}.", "Use letters, digits, dots, _ and -.")
    cluster = read_cluster(entries.get("cluster"))
    settings = _settings(entries.get("spark"))
    if "use" in entries:
        use, given = _ready(root, entries)
        made = Pipeline(
            path, name, {one: text for one, (text, _) in cluster.items()}, use=use, given=given,
            settings=settings,
        )  # fmt: skip
    else:
        made = _own(root, entries, Pipeline(path, name, {}, settings=settings), cluster)
    return _with_rest(made, document)


def _with_rest(made: Pipeline, document: Document) -> Pipeline:
    warnings = tuple(one for one in sorted(document.problems) if not one.is_error)
    return replace(made, secrets=document.secrets, warnings=warnings)


def _settings(entry: Entry | None) -> Mapping[str, str]:
    if entry is None:
        return {}
    found: dict[str, str] = read_field(entry, Field("spark", MAPPING, "")) or {}
    for name, inner in (entry.mapping() or {}).items():
        if not name.startswith("spark."):
            inner.problem("a setting of Spark begins with spark.", "As in spark.executor.memory.")
    return found


def _ready(root: Entry, entries: Entries) -> tuple[str, Mapping[str, Any]]:
    use = entries["use"].scalar() or ""
    for name in _OF_FILES:
        if name in entries:
            entries[name].problem("this does not go with use:.", "A ready pipeline has with:.")
    if use not in NAMES:
        entries["use"].problem(f"there is no ready pipeline {use!r}.", nearest(use, NAMES))
        return use, {}
    found = ready(use)
    given = entries.get("with")
    inner = given.mapping() if given is not None else {}
    owner = given if given is not None else entries["use"]
    return use, read_fields(inner or {}, found.fields, owner, f"the ready pipeline {use!r}")


def _own(
    root: Entry, entries: Entries, made: Pipeline, cluster: Mapping[str, tuple[str, int]]
) -> Pipeline:
    if "with" in entries:
        entries["with"].problem("this goes with use: NAME, a ready pipeline.")
    mode = _mode(entries)
    trigger, checkpoint = _when(root, entries, mode)
    source = entries.get("source")
    if source is None:
        root.problem("the key 'source' is missing.", "Say what is read, as in source: {topic: T}.")
    transform = _text(entries, "transform")
    if transform is not None and not re.search(rf"\b{VIEW}\b", transform, re.IGNORECASE):
        entries["transform"].problem(f"it does not read the view {VIEW!r}.", "select … from source")
    sinks = entries.get("sinks")
    if sinks is None:
        root.problem("the key 'sinks' is missing.", "Say where it goes, as in sinks: [{kind: …}].")
    return replace(
        made,
        cluster={name: text for name, (text, _) in cluster.items()},
        source=None if source is None else read_source(source, cluster, mode),
        transform=transform,
        transform_line=entries["transform"].block_line if "transform" in entries else 0,
        sinks=() if sinks is None else read_sinks(sinks, cluster, mode),
        mode=mode,
        trigger=trigger,
        checkpoint=checkpoint,
    )


def _text(entries: Entries, name: str) -> str | None:
    if name not in entries:
        return None
    text: str | None = read_field(entries[name], Field(name, TEXT, ""))
    return text


def _mode(entries: Entries) -> str:
    if "mode" not in entries:
        return BATCH
    found = read_field(entries["mode"], Field("mode", TEXT, "", words=(BATCH, STREAMING)))
    return found or BATCH


def _when(root: Entry, entries: Entries, mode: str) -> tuple[float | None, str | None]:
    """Trigger and checkpoint: both belong to a stream, and a stream has both."""
    cures: tuple[tuple[str, Callable[[], Any], str], ...] = (
        ("trigger", lambda: _trigger(entries["trigger"]), "Write trigger: available-now or 10s."),
        ("checkpoint", lambda: _text(entries, "checkpoint"),
         "Write checkpoint: DIR, where the stream notes how far it is."),
    )  # fmt: skip
    values: list[Any] = []
    for name, read, cure in cures:
        if mode == BATCH and name in entries:
            entries[name].problem("this goes with mode: streaming.", "A batch reads once.")
        elif mode == STREAMING and name not in entries:
            entries["mode"].problem(f"mode: streaming needs the key {name!r}.", cure)
        values.append(read() if name in entries else None)
    return values[0], values[1]


def _trigger(entry: Entry) -> float | None:
    text = entry.scalar()
    if text is None or text.strip() == AVAILABLE_NOW:
        return None
    try:
        return duration_s(text)
    except ValueError:
        entry.problem(f"it is {text!r}.", f"Write {AVAILABLE_NOW}, or a time such as 10s or 5m.")
        return None
