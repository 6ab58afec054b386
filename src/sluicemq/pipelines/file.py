"""Read a pipeline file and check everything that can be checked without a cluster and Spark.

    name: late-flights
    cluster: {nameServers: "127.0.0.1:9876"}
    source: {topic: flights, filter.sql: dep_delay > 60}
    transform: select origin, count(*) as n from source group by origin
    sinks:
      - {kind: table, url: "sqlite:///late.db", table: late, key: [origin]}

All problems are found in one reading (`pipelines.document`), each with its line, its key, the most
similar valid name and a fix. `plan` finds the others: Spark parses the transform, the cluster knows
the topics, and the database its tables. A `Pipeline` keeps the line of each part, so that those
problems are reported with a line too.

The options of the `rocketmq` source and sink are those of `spark/options.py`. The parsers there
check them, and names are compared without regard to case, as Spark does. The other keys of sources
and sinks are declared in this module as `Field`s. Values of options and URLs that are secrets are
added to `Secrets`, which masks them in everything that is printed.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.filter.check import check_sql92
from sluicemq.filter.findings import IGNORED_TEXT
from sluicemq.filter.subscriptions import parse_tags
from sluicemq.hints import suggest
from sluicemq.pipelines.document import Document, Entries, Entry, read_field, read_fields
from sluicemq.pipelines.ready import (
    AVAILABLE_NOW,
    BATCH,
    FLAG,
    INTEGER,
    LIST,
    MAPPING,
    NAMES,
    REQUIRED,
    STREAMING,
    TEXT,
    Field,
    find_ready_pipeline,
    parse_trigger_s,
)
from sluicemq.pipelines.sinks.databases import check_url
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

ROCKETMQ = "rocketmq"
STORE = "store"
PARQUET = "parquet"
"""The kinds of sources. PARQUET is a kind of sink too."""
TOPIC = "topic"
TABLE = "table"
"""The other kinds of sinks."""
VIEW: Final = "source"
"""The name of the view that the transform reads."""

OptionTexts = dict[str, str]
"""Options by name, in the form that Spark's readers and writers accept."""


# ---- the parts of a pipeline


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a pipeline. `options` are those of Spark's reader, including the cluster's."""

    kind: str
    options: Mapping[str, str]
    line: int


@dataclass(frozen=True, slots=True)
class Sink:
    """A sink of a pipeline.

    `fields` are the values of the keys that are declared for this kind of sink. `options` are the
    options of Spark's sink `rocketmq`, and empty for other kinds than TOPIC. `key_path` is the path
    of keys that leads to the sink in the file, such as `sinks[1]`, and `line` the first line there.
    `key_lines` are the lines of its keys.
    """

    name: str
    kind: str
    fields: Mapping[str, Any]
    options: Mapping[str, str]
    key_path: str
    line: int
    key_lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, message: str, fix: str = "", *, field_name: str = "") -> PlaceError:
        """Return an error about the sink, or about its key `field_name` if that is not empty."""
        key_path = f"{self.key_path}.{field_name}" if field_name else self.key_path
        line = self.key_lines.get(field_name, self.line)
        return PlaceError(FileProblem(line, key_path, message, fix))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline file that has no errors.

    If `use` is not None, it names a ready pipeline, and `use_options` are the values of the file's
    `with:`. Otherwise `source` and `sinks` are set. `cluster` are the options of `cluster:`,
    `spark_settings` those of `spark:`. `trigger_s` are the seconds between the micro-batches of a
    stream; None means that the stream reads what is available and ends. `transform_line` is the
    line of the file where the SQL text begins.
    """

    path: str
    name: str
    cluster: Mapping[str, str]
    source: Source | None = None
    transform: str | None = None
    transform_line: int = 0
    sinks: tuple[Sink, ...] = ()
    mode: str = BATCH
    trigger_s: float | None = None
    checkpoint: str | None = None
    use: str | None = None
    use_options: Mapping[str, Any] = field(default_factory=dict)
    spark_settings: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    warnings: tuple[FileProblem, ...] = ()

    @property
    def is_streaming(self) -> bool:
        """Whether the pipeline runs streaming queries."""
        return self.mode == STREAMING

    def checkpoint_of(self, sink: Sink) -> str:
        """Return the checkpoint directory of a sink's query, a subdirectory of `checkpoint`."""
        return f"{(self.checkpoint or '').rstrip('/')}/{sink.name}"

    def to_configuration_error(self, error: PlaceError) -> ConfigurationError:
        """Return the error for the user: with file, line and key, and with secrets masked."""
        return ConfigurationError(self.secrets.mask(error.problem.describe(self.path)))


# ---- declared fields

SECRET: Final = ("secretKey", "securityToken", "tls.keyPassword")
"""Options whose values are secrets."""
MESSAGE: Final = (
    "value",
    "tag",
    "keys",
    "properties",
    "queue_id",
    "sharding_key",
    "delay_level",
    "delay_ms",
    "deliver_at",
)
"""The parts of a message that a topic sink can compute by Spark SQL expressions."""
_SOURCE_AND_SINK_KEYS: Final = ("source", "transform", "sinks", "mode", "trigger", "checkpoint")
"""The keys that a file with `use:` must not have."""
_TOP_LEVEL_KEYS: Final = ("name", "cluster", *_SOURCE_AND_SINK_KEYS, "use", "with", "spark")
_TEXT_FIELD: Final = Field("", TEXT, "")
_MODE_FIELD: Final = Field("mode", TEXT, "", BATCH, (BATCH, STREAMING))
_SOURCE_KIND_FIELD: Final = Field("kind", TEXT, "", ROCKETMQ, (ROCKETMQ, STORE, PARQUET))
_SINK_NAME_FIELD: Final = Field("name", TEXT, "Name of the sink, for logs and checkpoint.", None)
PARQUET_SOURCE: Final = (
    Field("path", TEXT, "The directory or file."),
    Field("schema", TEXT, "Columns as in SQL; the default is the schema of the files.", None),
    Field("options", MAPPING, "Further options of Spark's Parquet source.", {}),
)
TOPIC_SINK: Final = (_SINK_NAME_FIELD, *(Field(name, TEXT, "", None) for name in MESSAGE))
"""The fields of a topic sink, apart from the options of Spark's sink `rocketmq`."""
PARQUET_SINK: Final = (
    _SINK_NAME_FIELD,
    Field("path", TEXT, "The directory."),
    Field("partition_by", LIST, "Columns that become directories.", []),
    Field(
        "write",
        TEXT,
        "What a batch does if the directory has files already.",
        "fail",
        ("fail", "append", "overwrite"),
    ),
    Field("options", MAPPING, "Further options of Spark's Parquet sink.", {}),
)
TABLE_SINK: Final = (
    _SINK_NAME_FIELD,
    Field("url", TEXT, "SQLAlchemy URL of the database: postgresql://user@host/name."),
    Field("table", TEXT, "The table, or schema.table."),
    Field("key", LIST, "Columns that identify a row: a row with the same key is replaced."),
    Field(
        "version", TEXT, "Column: a row is only replaced by one whose version is not smaller.", None
    ),
    Field("create", FLAG, "Create the table if it is missing.", True),
    Field("batch_rows", INTEGER, "Rows of one transaction.", 1_000),
    Field(
        "output",
        TEXT,
        "Output mode of a stream: new rows, or changed or all rows of an aggregate.",
        "append",
        ("append", "update", "complete"),
    ),
)
_NEEDED_KEYS: Final = {
    "source": ("", "Name what to read, as in source: {topic: T}."),
    "sinks": ("", "Name where to write, as in sinks: [{kind: …}]."),
    "trigger": (STREAMING, "Write trigger: available-now or 10s."),
    "checkpoint": (STREAMING, "Write checkpoint: DIR, where the stream stores its progress."),
}
"""The required keys of a file, each with the mode that needs it ("" is any mode) and the fix."""
_KEYS_OF_OTHER_MODES: Final = {
    ("", "trigger", BATCH): ("this requires mode: streaming.", "A batch reads once."),
    ("", "checkpoint", BATCH): ("this requires mode: streaming.", "A batch reads once."),
    (TOPIC, "queryId", STREAMING): (
        "this is not supported with mode: streaming.",
        "The stream's checkpoint contains its id.",
    ),
    (PARQUET, "write", STREAMING): ("this requires mode: batch.", "A stream appends."),
    (TABLE, "output", BATCH): ("this requires mode: streaming.", "A batch writes every row."),
}
"""Message and fix of each invalid combination: kind of sink ("" is the file itself), key, mode."""
_SINK_FIELDS: Final = {TOPIC: TOPIC_SINK, PARQUET: PARQUET_SINK, TABLE: TABLE_SINK}
_SINK_KIND_FIELD: Final = Field("kind", TEXT, "", REQUIRED, tuple(_SINK_FIELDS))


# ---- the file


def load_pipeline(path: str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """Return the pipeline that the file at `path` describes.

    Variables in the file are replaced by values in `environment`; None means `os.environ`. Raises
    ConfigurationError if the file cannot be read or has errors. Its text has one line for each
    error: `FILE:LINE: KEY: message fix`. Warnings are in `Pipeline.warnings`.
    """
    pipeline, problems = check_pipeline(path, environment)
    if pipeline is None:
        errors = [problem.describe(path) for problem in problems if problem.is_error]
        raise ConfigurationError("\n".join(errors))
    return pipeline


def check_pipeline(
    path: str, environment: Mapping[str, str] | None = None
) -> tuple[Pipeline | None, list[FileProblem]]:
    """Return the pipeline of the file at `path`, and its errors and warnings ordered by line.

    The pipeline is None if there is an error. Variables in the file are replaced by values in
    `environment`; None means `os.environ`. Raises ConfigurationError if the file cannot be read.
    """
    try:
        text = read_text(SYSTEM_FILES, path)
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"the file {path!r} cannot be read: {error}.") from None
    if text is None:
        raise ConfigurationError(
            f"the file {path!r} does not exist.", fix="Pass the path of a pipeline file."
        )
    if environment is None:
        environment = os.environ
    return parse_pipeline(text, path, environment)


def parse_pipeline(
    text: str, path: str, environment: Mapping[str, str]
) -> tuple[Pipeline | None, list[FileProblem]]:
    """Return the pipeline that `text` describes, and the errors and warnings ordered by line.

    The pipeline is None if there is an error. `path` is only used for texts and the default name.
    """
    document = Document(environment)
    root = document.parse_root(text)
    if root is None:
        return None, document.problems
    entries = root.read_mapping() or {}
    for key in list(entries):
        if key not in _TOP_LEVEL_KEYS:
            unknown_entry = entries.pop(key)
            unknown_entry.add_problem("there is no such key.", suggest(key, _TOP_LEVEL_KEYS))

    name = _parse_name(entries, path)
    cluster = _parse_cluster(entries["cluster"]) if "cluster" in entries else {}
    spark_settings = _parse_spark_settings(entries)
    if "use" in entries:
        attributes = _parse_ready_use(entries)
    else:
        attributes = _parse_source_and_sinks(root, entries, cluster)

    problems = sorted(document.problems)
    if any(problem.is_error for problem in problems):
        return None, problems
    pipeline = Pipeline(
        path,
        name,
        cluster,
        spark_settings=spark_settings,
        secrets=document.secrets,
        warnings=tuple(problems),
        **attributes,
    )
    return pipeline, problems


def _parse_name(entries: Entries, path: str) -> str:
    """Return the value of `name:`, or the file's name without its suffix.

    In the file's name, characters that are not allowed become dashes. An invalid name adds a
    problem.
    """
    file_name = path.rpartition("/")[2]
    file_stem = file_name.rpartition(".")[0]
    default_name = re.sub(r"[^A-Za-z0-9._-]", "-", file_stem) or "pipeline"
    name = read_field(entries.get("name"), _TEXT_FIELD) or default_name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        entries["name"].add_problem(
            f"invalid name {name!r}.", "Use letters, digits, dots, _ and -."
        )
    return str(name)


def _parse_cluster(entry: Entry) -> OptionTexts:
    """Return the connection options in `cluster:`. A single access key adds a problem."""
    connection_options = [option for option in OPTIONS if option.name in CONNECTION_OPTION_NAMES]
    cluster = _read_options(entry.read_mapping() or {}, connection_options, READ, "a cluster")
    for given, missing in (("accessKey", "secretKey"), ("secretKey", "accessKey")):
        if given in cluster and missing not in cluster:
            fix = f"{given} is given; it needs both."
            entry.add_problem(f"the option {missing!r} is missing.", fix)
    return cluster


def _parse_spark_settings(entries: Entries) -> dict[str, str]:
    """Return the settings in `spark:`. A name that does not begin with `spark.` adds a problem."""
    if "spark" not in entries:
        return {}
    settings = read_field(entries["spark"], Field("spark", MAPPING, "")) or {}
    for name, entry in (entries["spark"].read_mapping() or {}).items():
        if not name.startswith("spark."):
            entry.add_problem(
                "the name of a Spark setting begins with spark.",
                "Write it in full, as in spark.executor.memory.",
            )
    return dict(settings)


def _parse_ready_use(entries: Entries) -> dict[str, Any]:
    """Return the attributes `use` and `use_options` of a `Pipeline` that uses a ready pipeline.

    Adds problems for an unknown name, wrong options, and keys that are not supported with `use:`.
    """
    use = entries["use"].read_scalar() or ""
    for name in _SOURCE_AND_SINK_KEYS:
        if name in entries:
            entries[name].add_problem(
                "this is not supported with use:.", "Configure a ready pipeline in with:."
            )
    if use not in NAMES:
        entries["use"].add_problem(f"there is no ready pipeline {use!r}.", suggest(use, NAMES))
        return {"use": use}

    owner = entries["use"]
    option_entries: Entries = {}
    if "with" in entries:
        owner = entries["with"]
        option_entries = owner.read_mapping() or {}
    fields = find_ready_pipeline(use).fields
    use_options = read_fields(option_entries, fields, owner, f"the ready pipeline {use!r}")
    return {"use": use, "use_options": use_options}


def _parse_source_and_sinks(root: Entry, entries: Entries, cluster: OptionTexts) -> dict[str, Any]:
    """Return the attributes of a `Pipeline` that has a source and sinks.

    Adds problems for missing keys, and for keys that the mode (batch or streaming) does not
    support.
    """
    if "with" in entries:
        entries["with"].add_problem("this requires use: NAME, the name of a ready pipeline.")
    mode = read_field(entries.get("mode"), _MODE_FIELD) or BATCH
    transform = read_field(entries.get("transform"), _TEXT_FIELD)
    checkpoint = read_field(entries.get("checkpoint"), _TEXT_FIELD)
    attributes = {"transform": transform, "checkpoint": checkpoint, "mode": mode}
    _check_mode("", entries, mode)
    _check_needed_keys(root, entries, mode)

    attributes["trigger_s"] = _parse_trigger(entries)

    if "source" in entries:
        attributes["source"] = _parse_source(entries["source"], cluster, mode)
    if "transform" in entries:
        attributes["transform_line"] = entries["transform"].text_line
        reads_view = re.search(rf"\b{VIEW}\b", transform or VIEW, re.IGNORECASE)
        if not reads_view:
            message = f"the query does not read the view {VIEW!r}."
            entries["transform"].add_problem(message, "Write select … from source.")
    if "sinks" in entries:
        attributes["sinks"] = _parse_sinks(entries["sinks"], cluster, mode)
    return attributes


def _check_needed_keys(root: Entry, entries: Entries, mode: str) -> None:
    """Add a problem for each missing key of `_NEEDED_KEYS` that the file or its mode needs."""
    for name, (needing_mode, fix) in _NEEDED_KEYS.items():
        if name in entries:
            continue
        if not needing_mode:
            root.add_problem(f"the key {name!r} is missing.", fix)
        elif needing_mode == mode == STREAMING:
            entries["mode"].add_problem(f"mode: streaming needs the key {name!r}.", fix)


def _parse_trigger(entries: Entries) -> float | None:
    """Return the seconds between the micro-batches of a stream.

    None means that the stream reads what is available and ends. An invalid value adds a problem.
    """
    trigger = entries["trigger"].read_scalar() if "trigger" in entries else None
    if trigger is None:
        return None
    try:
        return parse_trigger_s(trigger)
    except ValueError:
        fix = f"Write {AVAILABLE_NOW}, or a time such as 10s or 5m."
        entries["trigger"].add_problem(f"invalid value {trigger!r}.", fix)
        return None


def _check_mode(sink_kind: str, entries: Entries, mode: str) -> None:
    """Add a problem for each key that is not supported in the mode of the pipeline.

    `sink_kind` is the kind of the sink whose entries these are, or "" for the keys of the file.
    """
    for (kind, name, wrong_mode), (message, fix) in _KEYS_OF_OTHER_MODES.items():
        if (kind, wrong_mode) == (sink_kind, mode) and name in entries:
            entries[name].add_problem(message, fix)


def _read_options(
    entries: Entries,
    declared: Iterable[Option],
    use: str,
    owner_name: str,
    other_keys: Sequence[str] = (),
) -> OptionTexts:
    """Return the texts of Spark options, by the options' own names.

    `entries` maps keys of the file to their values. A key may be an alias, in any case. Only
    options in `declared` for `use` (READ, STREAM or WRITE) are accepted. Adds problems for unknown
    keys, repeated options and invalid values. In their texts, `owner_name` names what the options
    belong to, such as "a cluster". `other_keys` are further names to suggest.
    """
    accepted = [option for option in declared if use in option.uses]
    known_names: list[str] = []
    for option in accepted:
        known_names += (option.name, *option.aliases)
    known_names += other_keys

    accepted_by_name = index_by_name(accepted)
    text_by_option: OptionTexts = {}
    line_by_option: dict[str, int] = {}
    for name, entry in entries.items():
        accepted_option = accepted_by_name.get(name.lower())
        if accepted_option is None:
            message, fix = _explain_refused_option(name, use, owner_name, known_names)
            entry.add_problem(message, fix)
            continue
        option_name = accepted_option.name
        option_text = _read_option_text(entry, accepted_option)
        if option_name in text_by_option:
            fix = f"Line {line_by_option[option_name]} sets {option_name} already; keep one."
            entry.add_problem(f"this is the option {option_name!r} again.", fix)
        elif option_text is not None and _is_valid_option(entry, accepted_option, option_text):
            text_by_option[option_name] = option_text
            line_by_option[option_name] = entry.line
    return text_by_option


def _read_option_text(entry: Entry, option: Option) -> str | None:
    """Return the text of an option, with its variables replaced; None if it has a problem.

    The text of a secret option is added to the document's secrets, so that it is masked in all
    output.
    """
    if option.name not in SECRET:
        return entry.read_option()
    secrets = entry.document.secrets
    secrets.add(str(getattr(entry.node, "value", "")))
    option_text = entry.read_option()
    secrets.add(option_text or "")
    return option_text


def _is_valid_option(entry: Entry, option: Option, option_text: str) -> bool:
    """Return whether the text of an option is valid. An invalid one adds a problem."""
    try:
        option.parse(option_text)
    except ValueError as error:
        entry.add_problem(f"invalid value {option_text!r}: {error}.")
        return False
    return True


def _explain_refused_option(
    name: str, use: str, owner_name: str, known_names: Sequence[str]
) -> tuple[str, str]:
    """Return the message and the fix for a key that is not an accepted option.

    If there is such an option, but not for this `use` or `owner_name`, the fix says where it is
    accepted. Otherwise it suggests one of `known_names`.
    """
    options_by_name = {option.name.lower(): option for option in OPTIONS}
    option = options_by_name.get(name.lower())
    if option is None:
        return f"{owner_name} has no such key.", suggest(name, known_names)
    if use not in option.uses:
        uses = ", ".join(sorted(option.uses))
        return f"this is not supported for a {use}.", f"It is for: {uses}."
    return f"this option is not supported in {owner_name}.", "Put it into source: or a sink."


# ---- sources

_OptionChecks = tuple[Callable[[Options], object], ...]
_SOURCE_OPTIONS: Final[Mapping[str, tuple[str, Sequence[Option], _OptionChecks]]] = {
    ROCKETMQ: (
        "a source",
        OPTIONS,
        (
            parse_topics,
            declared_columns,
            lambda options: options.require("nameServers"),
            lambda options: options.credentials,
        ),
    ),
    STORE: (
        "a store source",
        STORE_OPTIONS,
        (
            lambda options: options.require("path"),
            parse_topics,
            declared_columns,
        ),
    ),
}
"""For each kind of source: its name in messages, its options, and checks of several options.

Each check raises ConfigurationError if the options do not fit together.
"""


def _parse_source(entry: Entry, cluster: OptionTexts, mode: str) -> Source | None:
    """Return the source, or None if it is not a mapping or its kind is unknown.

    The options of `cluster:` are added to the options of a `rocketmq` source. Adds problems with
    its options and filters. Options are checked together only if each one is valid.
    """
    entries = entry.read_mapping()
    if entries is None:
        return None
    kind = read_field(entries.pop("kind"), _SOURCE_KIND_FIELD) if "kind" in entries else ROCKETMQ
    if kind is None:
        return None
    if kind == PARQUET:
        return _parse_parquet_source(entry, entries)

    if kind == STORE and mode == STREAMING:
        entry.add_problem("a store source does not support streams.", "Write mode: batch.")
    use = STREAM if kind == ROCKETMQ and mode == STREAMING else READ
    problem_count = len(entry.document.problems)
    owner_name, declared, checks = _SOURCE_OPTIONS[kind]
    options = _read_options(entries, declared, use, owner_name, ("kind",))
    if kind == ROCKETMQ:
        options = {**cluster, **options}
    each_is_valid = len(entry.document.problems) == problem_count
    if each_is_valid:
        parsed_options = parse_options(options, use, index_by_name(declared))
        _check_options_together(entry, entries, parsed_options, checks)
    _check_filters(entries, options)
    return Source(kind, options, entry.line)


def _parse_parquet_source(entry: Entry, entries: Entries) -> Source:
    """Return a source of the kind PARQUET. Adds problems with its keys."""
    fields = read_fields(entries, PARQUET_SOURCE, entry, "a parquet source")
    options = {"path": fields.get("path", ""), **fields["options"]}
    if fields["schema"]:
        options["schema"] = fields["schema"]
    return Source(PARQUET, options, entry.line)


def _check_options_together(
    entry: Entry, entries: Entries, options: Options, checks: _OptionChecks
) -> None:
    """Add a problem for each check that the options of a source do not pass.

    The checks are functions that raise ConfigurationError. `entry` is the source's entry in the
    file, and `entries` has its keys.
    """
    for check_options in checks:
        try:
            check_options(options)
        except ConfigurationError as error:
            is_about_columns = check_options is declared_columns
            _add_source_problem(entry, entries, error, is_about_columns=is_about_columns)


def _add_source_problem(
    entry: Entry, entries: Entries, error: ConfigurationError, *, is_about_columns: bool
) -> None:
    """Add the problem that several options of a source do not fit together.

    It is added at the first option that the error names. If it names none, it is added at `columns`
    for an error about columns, and otherwise at the source itself.
    """
    named_entries = [inner for name, inner in entries.items() if f"'{name}'" in str(error)]
    if named_entries:
        place = named_entries[0]
    elif is_about_columns and "columns" in entries:
        place = entries["columns"]
    else:
        place = entry
    # A fix with ".option(" is about Python code, and this is a file.
    fix = "" if ".option(" in error.fix else error.fix
    place.add_problem(f"{error.fact}.", fix)


def _check_filters(entries: Entries, options: OptionTexts) -> None:
    """Add the problems and warnings about the filters of the source."""
    if "filter.tags" in options and "filter.tags" in entries:
        try:
            parse_tags(options["filter.tags"])
        except FilterSyntaxError as error:
            entries["filter.tags"].add_problem(_join_lines(str(error)))
    if "filter.sql" in options and "filter.sql" in entries:
        for finding in check_sql92(options["filter.sql"]):
            what = _join_lines(finding.what)
            entries["filter.sql"].add_problem(
                f"at character {finding.position + 1}: {what}",
                _join_lines(finding.instead),
                is_error=finding.is_error or finding.code == IGNORED_TEXT,
            )


def _join_lines(text: str) -> str:
    """Return a text as one line, with single spaces between its words."""
    return " ".join(text.split())


# ---- sinks


def _parse_sinks(entry: Entry, cluster: OptionTexts, mode: str) -> tuple[Sink, ...]:
    """Return the sinks. Problems are added for an empty list, and for two sinks with one name."""
    sink_entries = entry.read_list()
    if sink_entries is not None and not sink_entries:
        entry.add_problem(
            "the list of sinks is empty.", "Name where to write, as in sinks: [{kind: topic, …}]."
        )
    sinks: list[Sink] = []
    line_by_name: dict[str, int] = {}
    for sink_entry in sink_entries or ():
        sink = _parse_sink(sink_entry, cluster, mode)
        if sink is None:
            continue
        if sink.name in line_by_name:
            other_line = line_by_name[sink.name]
            fix = f"Give one of them name: OTHER; the other begins in line {other_line}."
            sink_entry.add_problem(f"two sinks have the name {sink.name!r}.", fix)
        line_by_name.setdefault(sink.name, sink.line)
        sinks.append(sink)
    return tuple(sinks)


def _parse_sink(entry: Entry, cluster: OptionTexts, mode: str) -> Sink | None:
    """Return one sink, or None if it is not a mapping or its kind is missing or unknown.

    A sink without a name is called by its kind and its topic or table. Adds problems with its keys.
    """
    entries = entry.read_mapping()
    if entries is None:
        return None
    key_lines = {key: inner.line for key, inner in entries.items()}
    if "kind" not in entries:
        entry.add_problem(
            "a sink needs the key 'kind'.", f"It can be {TOPIC}, {PARQUET} or {TABLE}."
        )
        return None
    kind = read_field(entries.pop("kind"), _SINK_KIND_FIELD)
    if kind is None:
        return None

    options: OptionTexts = {}
    if kind == TOPIC:
        fields, options = _read_topic_sink(entry, entries, cluster)
    else:
        fields = read_fields(entries, _SINK_FIELDS[kind], entry, f"a {kind} sink")
        entry.document.secrets.add_url(fields.get("url", ""))

    _check_mode(kind, entries, mode)
    for key, message, fix in _find_sink_problems(kind, entries, fields, options):
        if not key:
            entry.add_problem(message, fix)
        elif key in entries:
            entries[key].add_problem(message, fix)
    name = fields.get("name") or _default_sink_name(kind, fields, options)
    return Sink(name, kind, fields, options, entry.key_path, entry.line, key_lines)


def _read_topic_sink(
    entry: Entry, entries: Entries, cluster: OptionTexts
) -> tuple[dict[str, Any], OptionTexts]:
    """Return (fields, options) of a topic sink.

    The fields are the given expressions for parts of a message. All other keys are options of
    Spark's sink, to which the options of `cluster` are added.
    """
    owner_name = f"a {TOPIC} sink"
    field_names = [declared.name for declared in TOPIC_SINK]
    field_entries: dict[str, Entry] = {}
    option_entries: dict[str, Entry] = {}
    for key, inner in entries.items():
        if key in field_names:
            field_entries[key] = inner
        else:
            option_entries[key] = inner

    sink_options = _read_options(option_entries, OPTIONS, WRITE, owner_name, ("kind", *field_names))
    fields = read_fields(field_entries, TOPIC_SINK, entry, owner_name)
    given_fields = {
        name: expression for name, expression in fields.items() if expression is not None
    }
    return given_fields, {**cluster, **sink_options}


def _default_sink_name(kind: str, fields: Mapping[str, Any], options: OptionTexts) -> str:
    """Return the name of a sink that has none in the file: "table-report", or "parquet"."""
    suffix = ""
    if kind == TOPIC:
        suffix = options.get("topic", "")
    elif kind == TABLE:
        suffix = fields.get("table", "").replace("/", "-")
    return f"{kind}-{suffix}" if suffix else kind


def _find_sink_problems(
    kind: str, entries: Entries, fields: Mapping[str, Any], options: OptionTexts
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, message, fix) for each problem with the values of a sink.

    The key is "" for a problem of the whole sink.
    """
    if kind == TOPIC:
        yield from _find_topic_problems(entries, options)
    elif kind == TABLE:
        yield from _find_table_problems(fields)


def _find_topic_problems(entries: Entries, options: OptionTexts) -> Iterator[tuple[str, str, str]]:
    """Yield (key, message, fix) for each problem with the options of a topic sink."""
    if "topic" not in options and "topic" not in entries:
        yield "", "a topic sink needs the key 'topic'.", "Name the topic to write to."
    if "nameServers" not in options:
        yield "", "the option 'nameServers' is missing.", "Set it in cluster:."
    # Exactly once needs an epoch: a micro-batch of a stream, or a batch write with a queryId.
    delivery = options.get("delivery", AT_LEAST_ONCE).strip().lower()
    if "queryId" in options and delivery != EXACTLY_ONCE:
        message = f"this is not supported with delivery: {delivery}."
        yield "queryId", message, "Write delivery: exactly-once."


def _find_table_problems(fields: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, message, fix) for each problem with the fields of a table sink."""
    if fields.get("url"):
        try:
            check_url(fields["url"])
        except ConfigurationError as error:
            yield "url", f"{error.fact}.", error.fix
    if fields.get("key") == []:
        yield "key", "the list of columns is empty.", "Name the columns that identify a row."
    if not 1 <= fields["batch_rows"] <= 1_000_000:
        message = f"invalid value {fields['batch_rows']}."
        yield "batch_rows", message, "Write a number from 1 to 1,000,000."
