"""The options of the sources and the sink: name, values, uses, default and description of each.

Each option is declared once. Spark hands options over as strings, with names in lower case.
`parse_options` turns them into values. It refuses an option that is not declared and suggests the
nearest name: a misspelt `filter.tag` that silently reads a whole topic would cost more than an
error. The tables of the documentation are generated from `OPTIONS` (`rocketmq`) and `STORE_OPTIONS`
(`rocketmq_store`). An option that both sources have means the same in both.
"""

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from sluicemq.client.core.names import Credentials, check_topic_to_send
from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.filter.check import check_tags
from sluicemq.hints import did_you_mean
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.model.positions import parse_position
from sluicemq.net.tls import VERIFY_MODES, Tls
from sluicemq.numbers import other_unit

READ = "batch read"
STREAM = "stream read"
WRITE = "write"
AT_LEAST_ONCE = "at-least-once"
EXACTLY_ONCE = "exactly-once"
_MIB: Final = 1024 * 1024
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


# ---- parsers of option values
#
# Each takes the string that the user gave and returns the value. It raises ValueError with a text
# that says what the value must be; `parse_options` puts the option's name in front of it.


def parse_text(option_value: str) -> str:
    """Return the string without surrounding blanks. Raises ValueError if nothing is left."""
    if not option_value.strip():
        raise ValueError("it is empty")
    return option_value.strip()


def parse_boolean(option_value: str) -> bool:
    """Return True for `true` and False for `false`, in any case. Raises ValueError."""
    return one_of("true", "false", description="true or false")(option_value) == "true"


def integer_between(minimum: int, maximum: int) -> Callable[[str], int]:
    """Return a parser for whole numbers from `minimum` to `maximum`, both included.

    The parser raises ValueError for any other text.
    """

    def parse(option_value: str) -> int:
        """Return the text as an int. Raises ValueError if it is not one or out of range."""
        is_whole_number = option_value.strip().lstrip("-").isdecimal()
        if not is_whole_number or not minimum <= int(option_value) <= maximum:
            raise ValueError(f"it must be a whole number from {minimum:,} to {maximum:,}")
        return int(option_value)

    return parse


def one_of(*words: str, description: str = "") -> Callable[[str], str]:
    """Return a parser that accepts `words` in any case, and returns the word in lower case.

    The parser raises ValueError for any other text. `description` replaces the list of words in its
    error.
    """

    def parse(option_value: str) -> str:
        """Return the word in lower case. Raises ValueError if it is not an allowed word."""
        if option_value.strip().lower() not in words:
            raise ValueError(f"it must be {description or ' or '.join(words)}")
        return option_value.strip().lower()

    return parse


def parse_bad_rows(option_value: str) -> str:
    """Return the value of the option `badRows`: `fail`, `skip` or `topic:NAME`.

    Raises ValueError for any other text, and for an invalid topic name.
    """
    policy, _, topic = option_value.strip().partition(":")
    if policy.lower() in ("fail", "skip") and not topic:
        return policy.lower()
    if policy.lower() != "topic":
        raise ValueError("it must be fail, skip or topic:NAME")
    try:
        return f"topic:{check_topic_to_send(topic.strip())}"
    except ConfigurationError as error:
        raise ValueError(error.fact) from None


def parse_addresses(option_value: str) -> str:
    """Return addresses with `;` between them. In `option_value`, `;` or `,` is between them."""
    addresses = parse_text(option_value).replace(",", ";").split(";")
    return ";".join(address.strip() for address in addresses if address)


def parse_tag_expression(option_value: str) -> str:
    """Return a tag expression unchanged, after a check for likely mistakes.

    Raises ValueError for `UA|AA`, which is one tag and not two, and for `*` among other tags. An
    expression with a syntax error is returned, because its error is raised where it is compiled.
    """
    with contextlib.suppress(FilterSyntaxError):
        for finding in check_tags(option_value):
            if finding.code == "single-bar":
                with_double_bars = re.sub(r"[|]+", "||", option_value)
                raise ValueError(
                    f"a single | is part of a tag; write {with_double_bars!r} for"
                    " several tags, or filter.sql with TAGS = '…' for one tag that contains a bar"
                )
            if finding.code == "star-tag":
                raise ValueError("* among other tags does not mean all; write * alone")
    return option_value


def parse_names(option_value: str) -> tuple[str, ...]:
    """Return the distinct names in a list such as `a, b; c`, in their order.

    Raises ValueError if there is no name.
    """
    names = [name.strip() for name in option_value.replace(";", ",").split(",")]
    distinct_names = tuple(dict.fromkeys(name for name in names if name))
    if not distinct_names:
        raise ValueError("it is empty")
    return distinct_names


def parse_pattern(option_value: str) -> str:
    """Return a regular expression without the white space around it.

    Raises ValueError if it does not compile or is empty.
    """
    try:
        re.compile(option_value)
    except re.error as error:
        raise ValueError(f"it is not a valid regular expression: {error}") from None
    return parse_text(option_value)


def parse_timestamp(option_value: str) -> int:
    """Return a time in milliseconds since 1970.

    The text is such a number, or a time in ISO 8601, which is UTC unless it names a zone. Raises
    ValueError for any other text, and for a number that is probably in seconds or another unit.
    """
    if option_value.strip().lstrip("-").isdecimal():
        time_ms = int(option_value)
        likely_unit = other_unit(time_ms)
        if likely_unit is not None:
            unit, converted_ms = likely_unit
            raise ValueError(
                f"it looks like {unit}, but must be in milliseconds: write {converted_ms}"
            )
        return time_ms
    try:
        time = datetime.datetime.fromisoformat(option_value.strip())
    except ValueError:
        raise ValueError(
            "it must be a Unix timestamp in milliseconds, or a date and time such as "
            "2026-11-21T12:00:00Z"
        ) from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return (time - _EPOCH) // datetime.timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class StoreTimestamp:
    """A time in place of an offset: the offset of the first message stored then or later."""

    time_ms: int


OffsetChoice = int | str | StoreTimestamp
"""An offset, `earliest` or `latest`, or a time."""
OffsetTable = dict[str, dict[int, OffsetChoice]]
"""The choice for each queue, by broker name and queue id."""


_SPARK_NAMES: Final = {"first": "earliest", "last": "latest"}


def parse_offsets(option_value: str) -> str | OffsetTable | dict[str, OffsetTable]:
    """Return the offsets in the value of the option `startingOffsets` or `endingOffsets`.

    The value is `earliest` or `first`, `latest` or `last`, or JSON, {"broker": {"queue id":
    choice}}. A choice is an offset, one of these words, or a time. For several topics the JSON is
    {"topic": {"broker": …}}.

    The result is `earliest` or `latest`, or a table of the same form as the JSON, with queue ids as
    int and times as `StoreTimestamp`. Raises ValueError for any other value.
    """
    position = parse_position(option_value)
    if position is not None:
        return _SPARK_NAMES[position]
    try:
        table = json.loads(option_value)
        if _has_topics(table):
            return {topic: _parse_offset_table(brokers) for topic, brokers in table.items()}
        return _parse_offset_table(table)
    except (json.JSONDecodeError, TypeError, AttributeError):
        raise ValueError(
            'it must be earliest, latest or JSON such as {"broker-a": {"0": 120, "1": "earliest"}}'
        ) from None


def _has_topics(table: Any) -> bool:
    """Return whether a table of offsets has the form {"topic": {"broker": {…}}}.

    Its other form is {"broker": {"queue id": choice}}. Raises AttributeError if it has neither.
    """
    for by_broker_or_queue in table.values():
        for queues_or_choice in by_broker_or_queue.values():
            if isinstance(queues_or_choice, dict):
                return True
    return False


def _parse_offset_table(brokers: Any) -> OffsetTable:
    """Return what a table of offsets chooses for each queue of one topic.

    `brokers` is {"broker": {"queue id": choice}}. In the result, queue ids are integers. Raises
    ValueError for a wrong queue id or choice, and TypeError or AttributeError if `brokers` has
    another form.
    """
    table: OffsetTable = {}
    for broker, queues in brokers.items():
        table[broker] = {}
        for queue, offset in queues.items():
            if not queue.isdecimal():
                raise ValueError(f"{queue!r} is not a queue id; write a whole number")
            choice = _parse_offset_choice(offset)
            if choice is None:
                raise ValueError(
                    f"queue {queue!r} of {broker!r} has the offset {offset!r}; write a whole"
                    " number, earliest, latest or a time like 2026-11-21T12:00:00Z"
                )
            table[broker][int(queue)] = choice
    return table


def _parse_offset_choice(offset: Any) -> OffsetChoice | None:
    """Return what the JSON value `offset` chooses for one queue; None if it is invalid.

    An integer of 0 or more is an offset. A string is "earliest", "latest" or a time. A string of
    digits is invalid, because it could be an offset or a time.
    """
    choice: OffsetChoice | None = None
    position = parse_position(offset) if isinstance(offset, str) else None
    if position is not None and offset != "0":
        choice = _SPARK_NAMES[position]
    elif type(offset) is int and offset >= 0:
        choice = offset
    elif isinstance(offset, str) and not offset.strip().lstrip("-").isdecimal():
        with contextlib.suppress(ValueError):
            choice = StoreTimestamp(parse_timestamp(offset))
    return choice


def parse_directory(option_value: str) -> str:
    """Return a path on this machine, from a path or a URL of the form `file:/…`.

    Raises ValueError for a URL of another machine or scheme.
    """
    path = parse_text(option_value)
    url = urlsplit(path)
    if url.scheme == "file":
        if url.netloc not in ("", "localhost"):
            raise ValueError("it names a machine; write file:///path")
        path = unquote(url.path)
    elif "://" in path:
        raise ValueError(
            "files are memory-mapped, so the store must be in a directory that driver and executors"
            " can access (local, NFS …); mount it, or copy the store"
        )
    return str(PurePosixPath(path))


def parse_log_directory(option_value: str) -> str:
    """Return the path of the commit log's directory, from a path or a URL of the form `file:/…`.

    Raises ValueError for a URL of another machine or scheme, and for several directories with
    commas between them. RocketMQ can spread its log over these, but this reader does not support
    that.
    """
    if "," in option_value:
        raise ValueError(
            "a commit log in several directories is not supported; copy its files into one"
        )
    return parse_directory(option_value)


# ---- the options


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option.

    `parse` turns the user's string into a value; it raises ValueError saying what is wrong.
    `default` is the value if the option is not given, and is not parsed. `uses` contains READ,
    STREAM and WRITE where the option is allowed. `aliases` are other names that users may write.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    uses: frozenset[str]
    description: str
    aliases: tuple[str, ...] = ()


_READ = frozenset({READ})
_STREAM = frozenset({STREAM})
_WRITE = frozenset({WRITE})
_READS: Final = _READ | _STREAM
_ALL: Final = _READS | _WRITE

OPTIONS: Final[tuple[Option, ...]] = (
    Option("topic", parse_text, None, _ALL,
           "The topic. A sink may take it from a column instead.", ("path",)),
    Option("topics", parse_names, None, _READS,
           "Several topics, separated by commas, instead of `topic`.", ("subscribe",)),
    Option("topicsPattern", parse_pattern, None, _READS,
           "All topics whose whole name matches the regular expression; a stream finds new ones. "
           "Retry and dead-letter topics are included only if the pattern begins with `%`.",
           ("subscribePattern",)),
    Option("nameServers", parse_addresses, None, _ALL,
           "Addresses host:port of the name servers, separated by `;`.",
           ("namesrv", "namesrvAddr", "nameServer", "namesrv.addr")),
    Option("group", parse_text, None, _ALL,
           "Source: the consumer group in whose name it reads, and to which a stream commits its "
           "offsets. Sink: the producer group."),
    Option("filter.tags", parse_tag_expression, None, _READS,
           "Tag expression such as `UA||AA`; the broker filters by hash, the reader exactly."),
    Option("filter.sql", str, None, _READS,
           "SQL92 expression on properties, evaluated by the broker."),
    Option("columns", parse_text, None, _READS,
           "The columns to read, in order. `prop:NAME[:TYPE]` makes a column of a property; the "
           "type `auto` is inferred from the newest messages. `prop:*` makes a column of each "
           "property that they have."),
    Option("inferMessages", integer_between(1, 1_000_000), 1_000, _READS,
           "Number of newest messages from which `auto` and `prop:*` are inferred."),
    Option("bodyFormat", one_of("binary", "utf-8", "json"), "binary", _READS,
           "The column `body` as bytes, as a string or as a struct; the latter two add `_error`."),
    Option("bodySchema", parse_text, None, _READS,
           "The struct for `bodyFormat=json`: `origin string, delay int, "
           "legs array<struct<to:string>>`."),
    Option("badBody", one_of("null", "fail", "raw"), "null", _READS,
           "What to do with a body that cannot be decompressed, or is not valid text or JSON of "
           "the schema: read null with the reason in `_error`, fail, or (`raw`, for "
           "`bodyFormat=binary`) read the stored bytes."),
    Option("bodyBytesMax", integer_between(1, (1 << 31) - 1), BODY_BYTES_MAX, _READS,
           "Limit in bytes for a decompressed body. A larger one counts as undecodable."),
    Option("properties", one_of("own", "all"), "own", _READS,
           "What the column `properties` contains: only the message's own properties (`own`), or "
           "also those that producer and broker set on every message (`all`)."),
    Option("badProperties", one_of("null", "fail"), "null", _READS,
           "What to do with a promoted property that does not have the type of its column: read "
           "null (counted in the log), or fail."),
    Option("startingOffsets", parse_offsets, None, _READS,
           "`earliest` or `first` (default of batch), `latest` or `last` (default of a new "
           "stream), or JSON by broker and queue (by topic first, for several): offset, word "
           "or time."),
    Option("endingOffsets", parse_offsets, "latest", _READ,
           "`latest` or JSON by broker and queue (by topic first, for several); exclusive."),
    Option("startingTimestamp", parse_timestamp, None, _READS,
           "First store time to read: a Unix timestamp in milliseconds, or ISO 8601; not together "
           "with `startingOffsets`."),
    Option("endingTimestamp", parse_timestamp, None, _READ,
           "Store time at which to stop, exclusive; not together with `endingOffsets`."),
    Option("maxOffsetsPerTrigger", integer_between(1, 1 << 60), None, _STREAM,
           "Maximum number of offsets in one micro-batch, shared among queues by lag (Spark 4.2 or "
           "later)."),
    Option("maxBytesPerTrigger", integer_between(1, 1 << 60), None, _STREAM,
           "Approximate maximum of stored bytes in one micro-batch; sizes are sampled (Spark 4.2 "
           "or later)."),
    Option("onFilterChange", one_of("fail", "continue"), "fail", _STREAM,
           "What to do if the checkpoint was written with another filter: fail, or continue with "
           "the new one."),
    Option("minPartitions", integer_between(1, 100_000), None, _READS,
           "Minimum number of Spark partitions; large ranges are split."),
    Option("maxRecordsPerPartition", integer_between(1, 1 << 60), 1_000_000, _READS,
           "Maximum number of offsets in one partition."),
    Option("failOnDataLoss", parse_boolean, True, _READS,
           "Fail if offsets to be read are gone, the topic was deleted and created again, or "
           "queues disappeared. `false` reads what is left, and a new topic from its beginning, "
           "and logs it."),
    Option("predicates", parse_text, None, _READ,
           "JSON that `load_where`, `sluice sql` and pipelines write: rows that fail these "
           "predicates may be left out."),
    Option("pushFilters", parse_boolean, True, _READ,
           "Let the broker evaluate `predicates` where its result is exact; `false` leaves all of "
           "them to Spark."),
    Option("reportPushdown", parse_boolean, True, _READ,
           "Log one line on stderr for each read that has `predicates`: what the broker evaluates, "
           "what Spark does."),
    Option("batchBytes", integer_between(64 * 1024, 8 * _MIB), 4 * _MIB, _READS,
           "Bytes requested by one pull."),
    Option("batchMessages", integer_between(1, 10_000), 2_000, _WRITE,
           "Maximum number of messages in one batch request."),
    Option("badRows", parse_bad_rows, "fail", _WRITE,
           "What to do with a row that cannot be sent: `fail` names it in an error, `skip` leaves "
           "it out and counts it, `topic:NAME` writes it there as JSON with the reason in the "
           "property `SLUICE_BAD_ROW`."),
    Option("delivery", one_of(AT_LEAST_ONCE, EXACTLY_ONCE), AT_LEAST_ONCE, _WRITE,
           "`exactly-once`: no row is lost or doubled when Spark repeats tasks (SluiceMQ "
           "brokers)."),
    Option("queryId", parse_text, None, _WRITE,
           "For exactly-once batch writes: a name for this write. A second write with the same "
           "name changes nothing, also to another topic, and logs a warning. By default each "
           "write has a name of its own."),
    Option("queryEpoch", integer_between(0, 1 << 60), 0, _WRITE,
           "For exactly-once batch writes with `queryId`: the number of this write among those "
           "with the same name. A number that is not larger than the last one changes nothing, "
           "and logs a warning."),
    Option("timeoutMs", integer_between(100, 3_600_000), 30_000, _ALL,
           "Timeout of a request, and time for which requests are retried during an outage."),
    Option("accessKey", parse_text, None, _ALL, "Access key, for brokers with access control."),
    Option("secretKey", parse_text, None, _ALL, "Secret key."),
    Option("securityToken", parse_text, None, _ALL, "Token of temporary keys."),
    Option("tls", parse_boolean, None, _ALL,
           "Use TLS to name servers and brokers. Also on if `tls.ca` or `tls.certificate` is set.",
           ("useTLS",)),
    Option("tls.ca", parse_text, None, _ALL,
           "PEM file of the trusted authorities, on driver and executors. Default: the system's."),
    Option("tls.certificate", parse_text, None, _ALL, "PEM file with this client's certificate."),
    Option("tls.key", parse_text, None, _ALL,
           "PEM file with the key of the certificate. Default: the same file."),
    Option("tls.keyPassword", parse_text, None, _ALL, "Password of that key."),
    Option("tls.verify", one_of(*VERIFY_MODES), "full", _ALL,
           "What to verify: `full` certificate and host name, `ca` the certificate, `none` "
           "nothing."),
    Option("tls.serverName", parse_text, None, _ALL,
           "The name that certificates must have, instead of the host name."),
)  # fmt: skip
"""Every option of `rocketmq`."""
CONNECTION_OPTION_NAMES: Final = tuple(
    option.name
    for option in OPTIONS
    if option.name in ("nameServers", "accessKey", "secretKey", "securityToken", "timeoutMs")
    or option.name.startswith("tls")
)
"""The options for the connection to a cluster: addresses, keys, timeout, TLS."""
STORE_ONLY_OPTIONS: Final[tuple[Option, ...]] = (
    Option("path", parse_directory, None, _READ,
           "The directory of the store (storePathRootDir): a broker's own or a copy, which driver "
           "and executors see under this path."),
    Option("commitLogPath", parse_log_directory, None, _READ,
           "The directory of the commit log, if it is not in `path` (storePathCommitLog)."),
    Option("consumeQueuePath", parse_directory, None, _READ,
           "The directory of the consume queues, if it is not in `path` (storePathConsumeQueue)."),
    Option("brokerName", parse_text, None, _READ,
           "The broker name for the column `broker` and for the JSON of `startingOffsets` and "
           "`endingOffsets`. Default: the name of the directory."),
    Option("checkBodies", parse_boolean, False, _READ,
           "Compare every body with its checksum (about 2 µs per message). The header of a record "
           "is always checked."),
)  # fmt: skip
"""The options that only `rocketmq_store` has."""
STORE_OPTIONS: Final[tuple[Option, ...]] = (
    *STORE_ONLY_OPTIONS,
    *(
        replace(option, aliases=tuple(name for name in option.aliases if name != "path"))
        for option in OPTIONS
        if READ in option.uses
        and option.name not in (*CONNECTION_OPTION_NAMES, "group", "batchBytes")
    ),
)
"""Every option of `rocketmq_store`."""
_SPARK_OPTIONS: Final = frozenset(
    {"checkpointlocation", "queryname", "outputmode", "__partition_columns"}
)
"""Options that Spark itself passes to a source or sink, in lower case."""


def index_by_name(options: Sequence[Option]) -> dict[str, Option]:
    """Return the option of each name and alias; names are in lower case, as Spark passes them."""
    return {name.lower(): option for option in options for name in (option.name, *option.aliases)}


_TLS_DETAIL_OPTIONS: Final = frozenset(
    {"tls.key", "tls.keyPassword", "tls.verify", "tls.serverName"}
)
"""Options that configure TLS, but do not switch it on."""
_OPTIONS_BY_NAME: Final = index_by_name(OPTIONS)
STORE_OPTIONS_BY_NAME: Final = index_by_name(STORE_OPTIONS)


@dataclass(frozen=True, slots=True)
class Options:
    """The parsed options of one load or write.

    `values` contains every declared option by its name, with its default if it was not given.
    `descriptions` contains the description of each option, for errors.
    """

    values: Mapping[str, Any]
    descriptions: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def require(self, name: str) -> str:
        """Return the value of an option as a string.

        Raises ConfigurationError if the value is None, which means that the option is not given.
        """
        option_value = self.values[name]
        if option_value is None:
            description = self.descriptions.get(name, "")
            raise ConfigurationError(
                f"the option {name!r} is missing.",
                fix=f'Add .option("{name}", …): {description}'.rstrip(": "),
            )
        return str(option_value)

    @property
    def credentials(self) -> Credentials | None:
        """The credentials; None if no keys are given.

        Raises ConfigurationError if one of the two keys is missing.
        """
        if self.values["accessKey"] is None and self.values["secretKey"] is None:
            return None
        return Credentials(
            self.require("accessKey"), self.require("secretKey"), self.values["securityToken"]
        )

    @property
    def tls(self) -> Tls | None:
        """The TLS configuration, or None for connections without TLS.

        If the options do not mention TLS, environment variables decide. Raises ConfigurationError
        for a wrong configuration.
        """
        values = self.values
        is_enabled = values["tls"]  # None if the option is not given
        ca = values["tls.ca"]
        certificate = values["tls.certificate"]
        if is_enabled is None and ca is None and certificate is None:
            return Tls.resolve(None)
        if is_enabled is False:
            return None
        return Tls(
            ca=ca,
            certificate=certificate,
            key=values["tls.key"],
            key_password=values["tls.keyPassword"],
            verify=VERIFY_MODES[values["tls.verify"]],
            server_name=values["tls.serverName"],
        )


def parse_options(
    user_options: Mapping[str, str],
    use: str | None = None,
    declared: Mapping[str, Option] = _OPTIONS_BY_NAME,
) -> Options:
    """Return the values of options that a user gave as strings.

    Names are compared without case, and options of Spark itself are skipped. `use` is READ, STREAM
    or WRITE; only options for this use are accepted. None accepts all. `declared` has the options
    of the source by name and alias. An option that the user did not give has its default.

    Raises ConfigurationError for an unknown option, an option for another use, a wrong value, and
    options that contradict each other.
    """
    descriptions = {option.name: option.description for option in declared.values()}
    parsed_values = {option.name: option.default for option in declared.values()}
    chosen: set[str] = set()
    for name, option_text in user_options.items():
        if name.lower() in _SPARK_OPTIONS:
            continue
        option = declared.get(name.lower())
        if option is None:
            raise _unknown_option_error(name, descriptions)
        if use is not None and use not in option.uses:
            raise ConfigurationError(
                f"the option {option.name!r} is not supported for a {use}.",
                fix=f"It is for: {', '.join(sorted(option.uses))}.",
            )
        parsed_values[option.name] = _parse_value(option, option_text)
        chosen.add(option.name)
    _check_combinations(chosen)
    return Options(parsed_values, descriptions)


def _unknown_option_error(name: str, option_names: Iterable[str]) -> ConfigurationError:
    """Return the error for a name that is not among the names of the options."""
    suggestion = did_you_mean(name, option_names, cutoff=0.5)
    return ConfigurationError(
        f"unknown option {name!r}. {suggestion}".rstrip(),
        fix=f"The options are: {', '.join(sorted(option_names))}.",
    )


def _parse_value(option: Option, option_text: str) -> Any:
    """Return the value of an option that a user gave as the string `option_text`.

    Raises ConfigurationError for a wrong value. The error does not show the value of an option that
    is a secret.
    """
    try:
        return option.parse(option_text)
    except ValueError as error:
        lower_name = option.name.lower()
        is_secret = "secret" in lower_name or "password" in lower_name
        shown_value = "" if is_secret else f" {option_text!r}"
        raise ConfigurationError(
            f"the option {option.name!r} has an invalid value{shown_value}: {error}."
        ) from None


def _check_combinations(chosen: Set[str]) -> None:
    """Raise ConfigurationError if an option that the user gave would have no effect.

    `chosen` are the names of these options. An option has no effect if another one contradicts it,
    or if an option that it needs is missing.
    """
    for side in ("starting", "ending"):
        offsets_name = f"{side}Offsets"
        time_name = f"{side}Timestamp"
        if {offsets_name, time_name} <= chosen:
            raise ConfigurationError(
                f"the options {offsets_name!r} and {time_name!r} are given together.",
                fix=f"Use one of them. In {offsets_name} each queue may have a time:"
                ' {"broker-a": {"0": "2026-11-21T12:00:00Z"}}.',
            )
    if "securityToken" in chosen and "accessKey" not in chosen:
        raise ConfigurationError(
            "the option 'securityToken' is given without 'accessKey'.",
            fix="Add accessKey and secretKey, or remove the token.",
        )
    without_effect = sorted(chosen & _TLS_DETAIL_OPTIONS)
    if without_effect and not chosen & {"tls", "tls.ca", "tls.certificate"}:
        raise ConfigurationError(
            f"the option {without_effect[0]!r} is given, but TLS is not switched on.",
            fix="Add tls=true, or remove the option.",
        )


def render_options_table(options: Sequence[Option] = OPTIONS) -> str:
    """Return a Markdown table of the options, for the documentation."""
    lines = ["| option | for | default | |", "|---|---|---|---|"]
    for option in options:
        default = "" if option.default is None else f"`{str(option.default).lower()}`"
        names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
        description = option.description.replace("|", "\\|")
        uses = ", ".join(sorted(option.uses))
        lines.append(f"| {names} | {uses} | {default} | {description} |")
    return "\n".join(lines) + "\n"
