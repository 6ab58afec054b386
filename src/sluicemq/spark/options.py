"""The options of the sources and the sink, declared once: name, values, uses, default, one line.

Spark hands options over as texts, in lower case. `parse_options` turns them into values and refuses
what is not declared, naming the nearest option: a misspelt `filter.tag` that silently reads a whole
topic costs more than an error. The documentation's tables are made from `OPTIONS` (`rocketmq`) and
`STORE_OPTIONS` (`rocketmq_store`); what both sources have means the same in both.
"""

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from sluicemq.client.core.names import Credentials, check_topic_to_send
from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.filter.check import check_tags
from sluicemq.hints import did_you_mean
from sluicemq.model.bodies import BODY_BYTES_MAX
from sluicemq.net.tls import VERIFY_MODES, Tls
from sluicemq.numbers import other_unit

READ, STREAM, WRITE = "batch read", "stream read", "write"
AT_LEAST_ONCE, EXACTLY_ONCE = "at-least-once", "exactly-once"
_MIB: Final = 1024 * 1024
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


# ---- texts to values: each raises ValueError saying what the text must be


def text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def boolean(value: str) -> bool:
    return choice("true", "false", said="true or false")(value) == "true"


def count(least: int, most: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        number = int(value) if value.strip().lstrip("-").isdecimal() else None
        if number is None or not least <= number <= most:
            raise ValueError(f"it must be a whole number from {least:,} to {most:,}")
        return number

    return parse


def choice(*words: str, said: str = "") -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.strip().lower() not in words:
            raise ValueError(f"it must be {said or ' or '.join(words)}")
        return value.strip().lower()

    return parse


def bad_rows(value: str) -> str:
    """`fail`, `skip` or `topic:NAME`."""
    word, _, topic = value.strip().partition(":")
    if word.lower() in ("fail", "skip") and not topic:
        return word.lower()
    if word.lower() != "topic":
        raise ValueError("it must be fail, skip or topic:NAME")
    try:
        return f"topic:{check_topic_to_send(topic.strip())}"
    except ConfigurationError as error:
        raise ValueError(error.fact) from None


def addresses(value: str) -> str:
    return ";".join(part.strip() for part in text(value).replace(",", ";").split(";") if part)


def tags(value: str) -> str:
    """Return a tag expression as it stands. Raises ValueError for one that only looks like several
    tags (`UA|AA` is one tag)."""
    with contextlib.suppress(FilterSyntaxError):  # raised where the filter is compiled
        for finding in check_tags(value):
            if finding.code == "single-bar":
                raise ValueError(
                    f"a single | is part of a tag; write {re.sub(r'[|]+', '||', value)!r} for"
                    " several tags, or filter.sql with TAGS = '…' for one tag that has a bar"
                )
            if finding.code == "star-tag":
                raise ValueError("* among other tags does not mean all; write * alone")
    return value


def names(value: str) -> tuple[str, ...]:
    parts = (part.strip() for part in value.replace(";", ",").split(","))
    found = tuple(dict.fromkeys(filter(None, parts)))
    if not found:
        raise ValueError("it is empty")
    return found


def pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from None
    return text(value)


def moment(value: str) -> int:
    """Return the milliseconds since 1970 that a text says, itself or as ISO 8601 (UTC unless it
    names a zone). Raises ValueError, for a number that is a time in another unit too."""
    if value.strip().lstrip("-").isdecimal():
        number = int(value)
        if (other := other_unit(number)) is not None:
            unit, time_ms = other
            raise ValueError(f"that looks like {unit}, and must be milliseconds: write {time_ms}")
        return number
    try:
        found = datetime.datetime.fromisoformat(value.strip())
    except ValueError:
        raise ValueError(
            "it must be milliseconds since 1970 or a time like 2026-11-21T12:00:00Z"
        ) from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    return (found - _EPOCH) // datetime.timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Moment:
    """A time where an offset is asked for: the first message stored then or later."""

    time_ms: int


OffsetChoice = int | str | Moment
OffsetTable = dict[str, dict[int, OffsetChoice]]
"""By broker and queue."""


def offsets(value: str) -> str | OffsetTable | dict[str, OffsetTable]:
    """`earliest`, `latest`, or JSON {"broker": {"queue id": offset, word or time}}, for several
    topics {"topic": {"broker": …}}."""
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        found = json.loads(value)
        if any(isinstance(inner, dict) for one in found.values() for inner in one.values()):
            return {topic: _offset_table(table) for topic, table in found.items()}
        return _offset_table(found)
    except (json.JSONDecodeError, TypeError, AttributeError):
        raise ValueError(
            'it must be earliest, latest or JSON such as {"broker-a": {"0": 120, "1": "earliest"}}'
        ) from None


def _offset_table(found: Any) -> OffsetTable:
    table: OffsetTable = {}
    for broker, queues in found.items():
        table[broker] = {}
        for queue, offset in queues.items():
            if not queue.isdecimal():
                raise ValueError(f"{queue!r} is no queue; write a queue id, a whole number")
            chosen: OffsetChoice | None = None
            if offset in ("earliest", "latest") or (type(offset) is int and offset >= 0):
                chosen = offset
            elif isinstance(offset, str) and not offset.strip().lstrip("-").isdecimal():
                with contextlib.suppress(ValueError):
                    chosen = Moment(moment(offset))
            if chosen is None:
                raise ValueError(
                    f"queue {queue!r} of {broker!r} has the offset {offset!r}; write a whole"
                    " number, earliest, latest or a time like 2026-11-21T12:00:00Z"
                )
            table[broker][int(queue)] = chosen
    return table


def directory(value: str) -> str:
    """A path of this machine, also as `file:/…`."""
    given = text(value)
    parts = urlsplit(given)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError("it names a machine; write file:///path")
        given = unquote(parts.path)
    elif "://" in given:
        raise ValueError(
            "files are mapped, so the store has to lie in a directory that driver and executors"
            " see (local, NFS …); mount it, or copy the store"
        )
    return str(PurePosixPath(given))


def log_directory(value: str) -> str:
    """As `directory`; RocketMQ can spread its log over several."""
    if "," in value:
        raise ValueError("logs in several directories are not read; bring the files into one")
    return directory(value)


# ---- the options


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option. `parse` raises ValueError saying what is wrong; `use`: where it goes."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    use: frozenset[str]
    text: str
    aliases: tuple[str, ...] = ()


_READ, _STREAM, _WRITE = frozenset({READ}), frozenset({STREAM}), frozenset({WRITE})
_READS: Final = _READ | _STREAM
_ALL: Final = _READS | _WRITE

OPTIONS: Final[tuple[Option, ...]] = (
    Option("topic", text, None, _ALL, "The topic. A sink may take it from a column instead.",
           ("path",)),
    Option("topics", names, None, _READS,
           "Several topics, separated by commas, instead of `topic`.", ("subscribe",)),
    Option("topicsPattern", pattern, None, _READS,
           "All topics whose whole name matches the regular expression; a stream finds new ones. "
           "Retry and dead-letter topics only when it begins with `%`.", ("subscribePattern",)),
    Option("nameServers", addresses, None, _ALL,
           "Addresses host:port of the name servers, separated by `;`.",
           ("namesrv", "namesrvAddr", "nameServer", "namesrv.addr")),
    Option("group", text, None, _ALL,
           "Consumer group: it reads in this name, and a stream commits its offsets to "
           "it. Sink: producer group."),
    Option("filter.tags", tags, None, _READS,
           "Tag expression such as `UA||AA`; the broker filters by hash, the reader exactly."),
    Option("filter.sql", str, None, _READS,
           "SQL92 selector on properties, evaluated at the broker."),
    Option("columns", text, None, _READS,
           "The columns to read, in order; `prop:NAME[:TYPE]` makes a property a column of its "
           "own, of the type `auto` after a look at the newest messages; `prop:*` all that they "
           "have."),
    Option("inferMessages", count(1, 1_000_000), 1_000, _READS,
           "How many of the newest messages the type `auto` and `prop:*` look at."),
    Option("bodyFormat", choice("binary", "utf-8", "json"), "binary", _READS,
           "The column `body` as bytes, as a text or as a struct; the latter two add `_error`."),
    Option("bodySchema", text, None, _READS,
           "The struct of `bodyFormat=json`: `origin string, delay int, "
           "legs array<struct<to:string>>`."),
    Option("badBody", choice("null", "fail", "raw"), "null", _READS,
           "What a body becomes that cannot be decompressed, or is no text or JSON of the schema: "
           "null with the reason in `_error`, an error, or (`raw`, with bodies as bytes) what is "
           "stored."),
    Option("bodyBytesMax", count(1, (1 << 31) - 1), BODY_BYTES_MAX, _READS,
           "A compressed body that grows beyond this many bytes cannot be decompressed."),
    Option("properties", choice("own", "all"), "own", _READS,
           "What the column `properties` holds: the message's own, or also those that producer and "
           "broker put on every message."),
    Option("badProperties", choice("null", "fail"), "null", _READS,
           "What a promoted property that is not of its type becomes: null (counted in "
           "the log), or an error."),
    Option("startingOffsets", offsets, None, _READS,
           "`earliest` (default of batch), `latest` (default of a new stream) or JSON by "
           "broker and queue (and topic, of several): offset, word or time."),
    Option("endingOffsets", offsets, "latest", _READ,
           "`latest` or JSON by broker and queue (and topic, of several); exclusive."),
    Option("startingTimestamp", moment, None, _READS,
           "First store time to read: milliseconds since 1970 or ISO 8601; not together with "
           "`startingOffsets`."),
    Option("endingTimestamp", moment, None, _READ,
           "First store time not to read any more; not together with `endingOffsets`."),
    Option("maxOffsetsPerTrigger", count(1, 1 << 60), None, _STREAM,
           "Most offsets of one micro-batch, shared by lag (Spark 4.2 or later)."),
    Option("maxBytesPerTrigger", count(1, 1 << 60), None, _STREAM,
           "Most stored bytes of one micro-batch, about: sizes are sampled (Spark 4.2 or later)."),
    Option("onFilterChange", choice("fail", "continue"), "fail", _STREAM,
           "When the checkpoint was written with another filter: an error, or go on with the new "
           "one."),
    Option("minPartitions", count(1, 100_000), None, _READS,
           "At least so many Spark partitions; large ranges are split."),
    Option("maxRecordsPerPartition", count(1, 1 << 60), 1_000_000, _READS,
           "Largest range of offsets of one partition."),
    Option("failOnDataLoss", boolean, True, _READS,
           "Fail when offsets to be read are gone, the topic was deleted and created again, or "
           "queues disappeared; false reads what is left, of a new topic all, and logs."),
    Option("predicates", text, None, _READ,
           "JSON that `load_where`, `sluice sql` and pipelines write: rows that fail these "
           "predicates may be left out."),
    Option("pushFilters", boolean, True, _READ,
           "Hand `predicates` to the broker where that is exact; false: Spark alone decides."),
    Option("reportPushdown", boolean, True, _READ,
           "Log one line a read (on stderr): what the broker decides, what Spark does."),
    Option("batchBytes", count(64 * 1024, 8 * _MIB), 4 * _MIB, _READS,
           "Size of one pull of a bulk read."),
    Option("batchMessages", count(1, 10_000), 2_000, _WRITE,
           "Messages of one batch that is sent."),
    Option("badRows", bad_rows, "fail", _WRITE,
           "A row that no message can be made of: `fail` names it, `skip` leaves it out and "
           "counts, `topic:NAME` writes it there as JSON with the reason in the property "
           "`SLUICE_BAD_ROW`."),
    Option("delivery", choice(AT_LEAST_ONCE, EXACTLY_ONCE), AT_LEAST_ONCE, _WRITE,
           "`exactly-once`: no row is lost or doubled, whatever Spark runs again (SluiceMQ "
           "brokers)."),
    Option("queryId", text, None, _WRITE,
           "Exactly once, batch only: a name for this write; a second write of that name changes "
           "nothing. Without it each write has its own."),
    Option("queryEpoch", count(0, 1 << 60), 0, _WRITE,
           "Exactly once, batch only, with `queryId`: which write of that name this is. Numbers "
           "only grow; the last one may be repeated without effect."),
    Option("timeoutMs", count(100, 3_600_000), 30_000, _ALL,
           "How long an answer may take, and how long an outage is ridden out."),
    Option("accessKey", text, None, _ALL, "Access key, for brokers with access control."),
    Option("secretKey", text, None, _ALL, "Secret key."),
    Option("securityToken", text, None, _ALL, "Token of temporary keys."),
    Option("tls", boolean, None, _ALL,
           "TLS to name servers and brokers. Also on when one of the files below is named.",
           ("useTLS",)),
    Option("tls.ca", text, None, _ALL,
           "PEM file of the trusted authorities, on driver and executors. Default: the system's."),
    Option("tls.certificate", text, None, _ALL, "PEM file with this client's certificate."),
    Option("tls.key", text, None, _ALL, "PEM file with its key. Default: the same file."),
    Option("tls.keyPassword", text, None, _ALL, "Password of that key."),
    Option("tls.verify", choice(*VERIFY_MODES), "full", _ALL,
           "What is checked: `full` certificate and host name, `ca` the certificate, `none` "
           "nothing."),
    Option("tls.serverName", text, None, _ALL, "The name that certificates must bear instead."),
)  # fmt: skip
"""Every option of `rocketmq`."""
CONNECTION: Final = tuple(
    one.name for one in OPTIONS
    if one.name in ("nameServers", "accessKey", "secretKey", "securityToken", "timeoutMs")
    or one.name.startswith("tls")
)  # fmt: skip
"""The options that say where a cluster is and who asks."""
STORE_ONLY: Final[tuple[Option, ...]] = (
    Option("path", directory, None, _READ,
           "The directory of the store (storePathRootDir): a broker's own or a copy, seen by "
           "driver and executors under this name."),
    Option("commitLogPath", log_directory, None, _READ,
           "Where the log lies when it is not in `path` (storePathCommitLog)."),
    Option("consumeQueuePath", directory, None, _READ,
           "Where the queues lie when they are not in `path` (storePathConsumeQueue)."),
    Option("brokerName", text, None, _READ,
           "What the column `broker` says, and the offsets of `startingOffsets` and "
           "`endingOffsets` go by. Without it the name of the directory."),
    Option("checkBodies", boolean, False, _READ,
           "Compare every body with its checksum, about 2 µs a message. What leads to a message "
           "is compared in any case."),
)  # fmt: skip
"""The options that only `rocketmq_store` has."""
STORE_OPTIONS: Final[tuple[Option, ...]] = (
    *STORE_ONLY,
    *(
        replace(one, aliases=tuple(name for name in one.aliases if name != "path"))
        for one in OPTIONS
        if READ in one.use and one.name not in (*CONNECTION, "group", "batchBytes")
    ),
)
_SPARKS_OWN: Final = frozenset(
    {"checkpointlocation", "queryname", "outputmode", "__partition_columns"}
)
"""What Spark itself passes along to a source or sink."""


def by_name(options: Sequence[Option]) -> dict[str, Option]:
    """Options by every name they have, in lower case as Spark hands them over."""
    return {name.lower(): one for one in options for name in (one.name, *one.aliases)}


_OF_TLS: Final = frozenset({"tls.key", "tls.keyPassword", "tls.verify", "tls.serverName"})
"""Options that say how TLS is spoken, and do not switch it on."""
_DECLARED: Final = by_name(OPTIONS)
DECLARED: Final = by_name(STORE_OPTIONS)


@dataclass(frozen=True, slots=True)
class Options:
    """Parsed options; `values` holds every declared option by its name."""

    values: Mapping[str, Any]
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What each option is for."""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def required(self, name: str) -> str:
        """A text that has to be there. Raises ConfigurationError."""
        value = self.values[name]
        if value is None:
            raise ConfigurationError(
                f"the option {name!r} is missing.",
                fix=f'Add .option("{name}", …): {self.texts.get(name, "")}'.rstrip(": "),
            )
        return str(value)

    @property
    def credentials(self) -> Credentials | None:
        """Raises ConfigurationError when one of the two keys is missing."""
        if self.values["accessKey"] is None and self.values["secretKey"] is None:
            return None
        return Credentials(
            self.required("accessKey"), self.required("secretKey"), self.values["securityToken"]
        )

    @property
    def tls(self) -> Tls | None:
        """What the options say, else the environment. Raises ConfigurationError."""
        values = self.values
        wanted, ca, certificate = values["tls"], values["tls.ca"], values["tls.certificate"]
        if wanted is None and ca is None and certificate is None:
            return Tls.resolve(None)
        if wanted is False:
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
    given: Mapping[str, str],
    use: str | None = None,
    declared: Mapping[str, Option] = _DECLARED,
) -> Options:
    """Texts to values. `use` is READ, STREAM or WRITE; None takes the options of all three. What
    another source declares comes as `by_name` of it.

    Raises ConfigurationError for an unknown option, one of another use, a bad value, or options
    that contradict each other.
    """
    texts = {option.name: option.text for option in declared.values()}
    values = {option.name: option.default for option in declared.values()}
    chosen: set[str] = set()
    for name, value in given.items():
        if name.lower() in _SPARKS_OWN:
            continue
        option = declared.get(name.lower())
        if option is None:
            near = did_you_mean(name, texts, cutoff=0.5)
            raise ConfigurationError(
                f"unknown option {name!r}. {near}".rstrip(),
                fix=f"There are: {', '.join(sorted(texts))}.",
            )
        if use is not None and use not in option.use:
            raise ConfigurationError(
                f"the option {option.name!r} does not go with a {use}.",
                fix=f"It is for: {', '.join(sorted(option.use))}.",
            )
        try:
            values[option.name] = option.parse(value)
        except ValueError as error:
            is_secret = any(word in option.name.lower() for word in ("secret", "password"))
            shown = "" if is_secret else f" {value!r}"
            raise ConfigurationError(f"the option {option.name!r} is{shown}: {error}.") from None
        chosen.add(option.name)
    _check_together(chosen)
    return Options(values, texts)


def _check_together(chosen: Set[str]) -> None:
    """Raise ConfigurationError when one of the `chosen` options would take away the effect of
    another, or has none by itself."""
    for side in ("starting", "ending"):
        offsets_name, time_name = f"{side}Offsets", f"{side}Timestamp"
        if {offsets_name, time_name} <= chosen:
            raise ConfigurationError(
                f"the options {offsets_name!r} and {time_name!r} are given together.",
                fix=f"Give one of them. In {offsets_name} each queue may have a time:"
                ' {"broker-a": {"0": "2026-11-21T12:00:00Z"}}.',
            )
    if "securityToken" in chosen and "accessKey" not in chosen:
        raise ConfigurationError(
            "the option 'securityToken' is given without 'accessKey'.",
            fix="Give accessKey and secretKey too, or leave the token out.",
        )
    without_effect = sorted(chosen & _OF_TLS)
    if without_effect and not chosen & {"tls", "tls.ca", "tls.certificate"}:
        raise ConfigurationError(
            f"the option {without_effect[0]!r} is given, and nothing switches TLS on.",
            fix="Add tls=true, or leave the option out.",
        )


def options_table(options: Sequence[Option] = OPTIONS) -> str:
    """The options as a Markdown table, for the documentation."""
    lines = ["| option | for | default | |", "|---|---|---|---|"]
    for one in options:
        default = "" if one.default is None else f"`{str(one.default).lower()}`"
        listed = ", ".join(f"`{name}`" for name in (one.name, *one.aliases))
        said = one.text.replace("|", "\\|")
        lines.append(f"| {listed} | {', '.join(sorted(one.use))} | {default} | {said} |")
    return "\n".join(lines) + "\n"
