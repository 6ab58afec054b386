"""The options of the `rocketmq` source and sink, declared once: name, kind, default, one line.

Spark hands options over as texts, in lower case. `parse_options` turns them into values and refuses
what is not declared, naming the nearest option: a misspelt `filter.tag` that silently reads a whole
topic costs more than an error. The documentation's table is made from `OPTIONS`.
"""

import datetime
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.client.core.credentials import Credentials
from sluicemq.errors import ConfigurationError

READ, STREAM, WRITE = "batch read", "stream read", "write"
_READS: Final = frozenset({READ, STREAM})
_ALL: Final = frozenset({READ, STREAM, WRITE})


@dataclass(frozen=True, slots=True)
class Option:
    """One declared option. `parse` raises ValueError saying what is wrong; `use`: where it goes."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    use: frozenset[str]
    text: str
    aliases: tuple[str, ...] = ()


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def _expression(value: str) -> str:
    return value


def _boolean(value: str) -> bool:
    if value.strip().lower() not in ("true", "false"):
        raise ValueError("it must be true or false")
    return value.strip().lower() == "true"


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        number = int(value) if value.strip().lstrip("-").isdecimal() else None
        if number is None or not least <= number <= most:
            raise ValueError(f"it must be a whole number from {least:,} to {most:,}")
        return number

    return parse


def _choice(*words: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value.strip().lower() not in words:
            raise ValueError(f"it must be {' or '.join(words)}")
        return value.strip().lower()

    return parse


def _addresses(value: str) -> str:
    return ";".join(part.strip() for part in _text(value).replace(",", ";").split(";") if part)


def _offsets(value: str) -> str | dict[str, dict[int, int | str]]:
    """`earliest`, `latest`, or JSON {"broker": {"queue id": offset or word}}."""
    word = value.strip().lower()
    if word in ("earliest", "latest"):
        return word
    try:
        return _offset_table(json.loads(value))
    except (json.JSONDecodeError, TypeError, AttributeError):
        raise ValueError(
            'it must be earliest, latest or JSON such as {"broker-a": {"0": 120, "1": "earliest"}}'
        ) from None


def _offset_table(found: Any) -> dict[str, dict[int, int | str]]:
    table: dict[str, dict[int, int | str]] = {}
    for broker, queues in found.items():
        table[broker] = {}
        for queue, offset in queues.items():
            known = offset in ("earliest", "latest") or (
                isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0
            )
            if not queue.isdecimal() or not known:
                raise ValueError(
                    f"queue {queue!r} of {broker!r} has the offset {offset!r}; write a queue id and"
                    " a whole number, earliest or latest"
                )
            table[broker][int(queue)] = offset
    return table


def _time(value: str) -> int:
    """Milliseconds since 1970, or ISO 8601 (without a zone: UTC)."""
    if value.strip().lstrip("-").isdecimal():
        return int(value)
    try:
        moment = datetime.datetime.fromisoformat(value.strip())
    except ValueError:
        raise ValueError(
            "it must be milliseconds since 1970 or a time like 2026-11-21T12:00:00Z"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH) // datetime.timedelta(milliseconds=1)


_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MIB: Final = 1024 * 1024

OPTIONS: Final[tuple[Option, ...]] = (
    Option(
        "topic",
        _text,
        None,
        _ALL,
        "The topic. A sink may take it from a column instead.",
        ("path",),
    ),
    Option(
        "nameServers",
        _addresses,
        None,
        _ALL,
        "Addresses host:port of the name servers, separated by `;`.",
        ("namesrv", "namesrvAddr", "nameServer", "namesrv.addr"),
    ),
    Option(
        "group",
        _text,
        None,
        _ALL,
        "Consumer group: it reads in this name, and a stream commits its offsets to "
        "it. Sink: producer group.",
    ),
    Option(
        "filter.tags",
        _expression,
        None,
        _READS,
        "Tag expression such as `UA||AA`; the broker filters by hash, the reader exactly.",
    ),
    Option(
        "filter.sql",
        _expression,
        None,
        _READS,
        "SQL92 selector on properties, evaluated at the broker.",
    ),
    Option(
        "columns",
        _text,
        None,
        _READS,
        "The columns to read, in order; `prop:NAME[:TYPE]` makes a property a column of its own.",
    ),
    Option(
        "properties",
        _choice("own", "all"),
        "own",
        _READS,
        "What the column `properties` holds: the message's own, or also those that producer and "
        "broker put on every message.",
    ),
    Option(
        "badProperties",
        _choice("null", "fail"),
        "null",
        _READS,
        "What a promoted property that is not of its type becomes: null (counted in "
        "the log), or an error.",
    ),
    Option(
        "startingOffsets",
        _offsets,
        None,
        _READS,
        "`earliest` (default of batch), `latest` (default of a new stream) or JSON by "
        "broker and queue.",
    ),
    Option(
        "endingOffsets",
        _offsets,
        "latest",
        frozenset({READ}),
        "`latest` or JSON by broker and queue; exclusive.",
    ),
    Option(
        "startingTimestamp",
        _time,
        None,
        _READS,
        "First store time to read: milliseconds or ISO 8601.",
    ),
    Option(
        "endingTimestamp", _time, None, frozenset({READ}), "First store time not to read any more."
    ),
    Option(
        "maxOffsetsPerTrigger",
        _count(1, 1 << 60),
        None,
        frozenset({STREAM}),
        "Most offsets of one micro-batch, shared by lag (Spark 4.2 or later).",
    ),
    Option(
        "minPartitions",
        _count(1, 100_000),
        None,
        _READS,
        "At least so many Spark partitions; large ranges are split.",
    ),
    Option(
        "maxRecordsPerPartition",
        _count(1, 1 << 60),
        1_000_000,
        _READS,
        "Largest range of offsets of one partition.",
    ),
    Option(
        "failOnDataLoss",
        _boolean,
        True,
        _READS,
        "Fail when offsets to be read are gone; false reads what is left and logs.",
    ),
    Option(
        "pushFilters",
        _boolean,
        True,
        frozenset({READ}),
        "Hand Spark's predicates to the broker where that is exact.",
    ),
    Option(
        "batchBytes",
        _count(64 * 1024, 8 * _MIB),
        4 * _MIB,
        _READS,
        "Size of one pull of a bulk read.",
    ),
    Option(
        "batchMessages",
        _count(1, 10_000),
        1_000,
        frozenset({WRITE}),
        "Messages of one batch that is sent.",
    ),
    Option("timeoutMs", _count(100, 3_600_000), 30_000, _ALL, "How long an answer may take."),
    Option("accessKey", _text, None, _ALL, "Access key, for brokers with access control."),
    Option("secretKey", _text, None, _ALL, "Secret key."),
    Option("securityToken", _text, None, _ALL, "Token of temporary keys."),
)
"""Every option there is."""

_SPARKS_OWN: Final = frozenset(
    {"checkpointlocation", "queryname", "outputmode", "__partition_columns"}
)
"""What Spark itself passes along to a source or sink."""
_BY_NAME: Final = {
    name.lower(): option for option in OPTIONS for name in (option.name, *option.aliases)
}


@dataclass(frozen=True, slots=True)
class Options:
    """Parsed options; `values` holds every option of `OPTIONS` by its name."""

    values: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def required(self, name: str) -> str:
        """A text that has to be there. Raises ConfigurationError."""
        value = self.values[name]
        if value is None:
            option = _BY_NAME[name.lower()]
            raise ConfigurationError(
                f"the option {name!r} is missing.",
                cure=f'Add .option("{name}", …): {option.text}',
            )
        return str(value)

    @property
    def credentials(self) -> Credentials | None:
        """Raises ConfigurationError when one of the two keys is missing."""
        access, secret = self.values["accessKey"], self.values["secretKey"]
        if access is None and secret is None:
            return None
        return Credentials(
            self.required("accessKey"), self.required("secretKey"), self.values["securityToken"]
        )


def parse_options(given: Mapping[str, str], use: str | None = None) -> Options:
    """Texts to values. `use` is READ, STREAM or WRITE; None takes the options of all three.

    Raises ConfigurationError for an unknown option, one of another use, or a bad value.
    """
    values = {option.name: option.default for option in OPTIONS}
    for name, text in given.items():
        if name.lower() in _SPARKS_OWN:
            continue
        option = _BY_NAME.get(name.lower())
        if option is None:
            raise _unknown(name)
        if use is not None and use not in option.use:
            raise ConfigurationError(
                f"the option {option.name!r} does not go with a {use}.",
                cure=f"It is for: {', '.join(sorted(option.use))}.",
            )
        values[option.name] = _parsed(option, text)
    return Options(values)


def _parsed(option: Option, text: str) -> Any:
    try:
        return option.parse(text)
    except ValueError as error:
        shown = "" if "secret" in option.name.lower() else f" {text!r}"
        raise ConfigurationError(f"the option {option.name!r} is{shown}: {error}.") from None


def _unknown(name: str) -> ConfigurationError:
    near = difflib.get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.5)
    cure = f"Did you mean {_BY_NAME[near[0]].name!r}?" if near else ""
    listed = ", ".join(sorted(option.name for option in OPTIONS))
    return ConfigurationError(
        f"unknown option {name!r}. {cure}".rstrip(), cure=f"There are: {listed}."
    )


def options_table() -> str:
    """The options as a Markdown table, for the documentation."""
    lines = ["| option | for | default | |", "|---|---|---|---|"]
    for option in OPTIONS:
        default = "" if option.default is None else f"`{str(option.default).lower()}`"
        names = ", ".join(f"`{name}`" for name in (option.name, *option.aliases))
        text = option.text.replace("|", "\\|")
        lines.append(f"| {names} | {', '.join(sorted(option.use))} | {default} | {text} |")
    return "\n".join(lines) + "\n"
