"""Write docs/reference/options.md from the signatures, typed dictionaries and docstrings.

    python tools/options_page.py docs/reference/options.md

The text between `<!-- written: NAME -->` and `<!-- end -->` is replaced. Names, types and defaults
come from the declarations, and meanings from the items of the docstrings. `TEXTS` has the meanings
of options that a docstring describes together with others. A test compares the page.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from written_tables import replace_tables, rewrite_page

from sluicemq.client.aio.producer import Producer
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.balance import STRATEGY_NAMES
from sluicemq.client.core.consuming import ConsumeLimits, ConsumeOptions, LitePullLimits
from sluicemq.client.core.messages import MessageOptions
from sluicemq.client.core.sending import ProducerOptions, Sender
from sluicemq.client.sync.producer import Producer as BlockingProducer

_ITEM: Final = re.compile(
    r"^- (?P<names>`\w+`[^:]*?): (?P<text>.*?)(?=^- |^\S|\Z)", re.MULTILINE | re.DOTALL
)

_DEFAULT: Final = re.compile(r' \((?:[\d.,]+|`"\w+"`|the default)\)| The default is [^.]*\.')
"""How docstrings say defaults, which the page shows in a column of their own."""
_HEAD: Final = "| option | type | default | meaning |\n|---|---|---|---|\n"
_TYPES: Final = {
    "Start": '"first", "last", int or datetime',
    "OnUndecodable": '"deliver", "raise" or "dead_letter"',
    "Selector": "function",
    "Callable[[OffsetMoved], None]": "function",
    "Sequence[str]": "list of str",
    "Mapping[str, str]": "dict of str",
    "Credentials | tuple[str, str]": "Credentials, tuple",
}
"""How the page shows types whose names say little to users."""
_FOR_TESTS: Final = {"clock", "files", "heartbeat_thread", "network", "rng"}

TEXTS: Final = {
    "tags": (
        "A tag, or several joined by `||`: only messages with one of them are received. Not "
        "together with `where`. Without both, all messages match."
    ),
    "where": (
        'A SQL92 expression over properties, such as `"price > 3"`: only messages that match are '
        "received. Not together with `tags`."
    ),
    "prefetch_count": (
        "The number of unacknowledged messages of one queue at which the client stops fetching "
        "from that queue."
    ),
    "prefetch_bytes": (
        "The size of the unacknowledged messages of one queue at which the client stops fetching "
        "from that queue."
    ),
    "count_max": (
        "The number of prefetched messages of one queue at which the client stops fetching from it."
    ),
    "bytes_max": (
        "The size of the prefetched messages of one queue at which the client stops fetching from "
        "it."
    ),
    "topic_count_max": (
        "The maximum number of unacknowledged messages of a topic. Its queues share it evenly. "
        "None means no limit."
    ),
    "topic_bytes_max": (
        "The maximum size of the unacknowledged messages of a topic. Its queues share it evenly. "
        "None means no limit."
    ),
    "delay_level": (
        "Delay the message by a level of the broker, 1 to 18. 0 means no delay. At most one of "
        "`delay_level`, `delay` and `deliver_at` may be set."
    ),
    "delay": "Delay the message by this time, in seconds or as a timedelta.",
    "deliver_at": (
        "Deliver the message at this time: a datetime with a time zone, or milliseconds since 1970."
    ),
    "queue": "The queue to send to. Without it, messages go to all queues in turn.",
    "selector": (
        "A function that selects the queue of each message: `(queues, message) -> queue`. Only "
        "for `send`."
    ),
    "timeout_ms": "The time limit in milliseconds of one send with all its attempts.",
    "group": "The consumer group. Its members share the messages of a topic.",
    "start": (
        'Where a group without a committed offset begins: `"first"` (all stored messages), '
        '`"last"` (only new ones), or a time as a datetime or in milliseconds since 1970. '
        '`"earliest"` and `"latest"` mean the same as the first two.'
    ),
    "instance": (
        "The last part of the name of the directory in which broadcasting consumers keep their "
        "offsets. Clients on one machine that broadcast for the same group need different ones."
    ),
    "allocate": (
        f"The strategy that assigns queues to members: {', '.join(STRATEGY_NAMES)}, or a function. "
        "All members must use the same."
    ),
    "clock": "Tells the time.",
    "network": "Carries the bytes.",
    "files": "Stores the offsets of broadcasting consumers.",
    "rng": "Selects the queue with which each producer begins.",
    "heartbeat_thread": "False sends heartbeats on the event loop of the caller.",
    "young_from_first": (
        "RocketMQ's rule: a group without an offset begins at the first message, whatever `start` "
        "says, while its broker still has the whole queue in memory."
    ),
    "on_undecodable": (
        "What becomes of a message whose body cannot be decoded. `deliver`: the application "
        "receives it, and reading `body` raises UndecodableBodyError. `raise`: the call raises the "
        "error. `dead_letter`: the message goes to the dead letters of the group."
    ),
    "credentials": (
        "A pair (access key, secret key) or a `Credentials`. None sends unsigned requests."
    ),
    "trace": (
        "True writes trace records about messages to the topic RMQ_SYS_TRACE_TOPIC. A string names "
        "another topic."
    ),
    "tls": (
        "True, or a `Tls` with certificate files. None follows the environment variable "
        "SLUICE_TLS, and False means no TLS."
    ),
}
"""Meanings of options that share an item of a docstring with others, or that have none."""


class Option(NamedTuple):
    """One row of a table."""

    name: str
    type: str
    default: Any
    """`inspect.Parameter.empty` if the option is required."""
    meaning: str


def with_tables(text: str) -> str:
    """Return the page with its tables as the declarations are now."""
    return replace_tables(text, _write_table)


def _write_table(name: str) -> str:
    return _HEAD + "".join(map(_row, TABLES[name]()))


def _row(option: Option) -> str:
    meaning = option.meaning.replace("|", "\\|")
    return f"| `{option.name}` | {option.type} | {_show_default(option)} | {meaning} |\n"


def _show_default(option: Option) -> str:
    """Return the default as Python code, sizes with their unit, and `–` for objects."""
    default = option.default
    if default is inspect.Parameter.empty:
        return "required"
    if default == ():
        return "none"
    if isinstance(default, bool | str | None):
        return "`" + (f'"{default}"' if isinstance(default, str) else repr(default)) + "`"
    if isinstance(default, int | float):
        if option.name.endswith("bytes_max") or "_bytes" in option.name:
            return f"{default // 2**20} MiB" if default >= 2**20 else f"{default:,} bytes"
        return f"{default:,g}" if isinstance(default, float) else f"{default:,}"
    return "–"


def list_signature_options(function: Callable[..., Any], *docstring_owners: Any) -> list[Option]:
    """Return the keyword-only options of a function, with the meanings of the docstrings."""
    source = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(source, ast.FunctionDef | ast.AsyncFunctionDef)
    types = {arg.arg: _show_type(arg.annotation) for arg in source.args.kwonlyargs}
    parameters = inspect.signature(function).parameters
    return [
        Option(name, types[name], parameters[name].default, _find_meaning(name, docstring_owners))
        for name in types
    ]


def list_dict_options(typed_dict: type, defaults: Callable[..., Any]) -> Iterator[Option]:
    """Yield the options that a typed dictionary declares itself. `defaults` has their defaults."""
    source = ast.parse(inspect.getsource(typed_dict)).body[0]
    assert isinstance(source, ast.ClassDef)
    parameters = inspect.signature(defaults).parameters
    for line in source.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name = line.target.id
            meaning = _find_meaning(name, (typed_dict,))
            yield Option(name, _show_type(line.annotation), parameters[name].default, meaning)


def _show_type(annotation: ast.expr | None) -> str:
    """Return a type in words: `int | None` as "int or None"."""
    assert annotation is not None
    text = ast.unparse(annotation)
    for source, shown in _TYPES.items():
        text = re.sub(rf"(?<![\w.]){re.escape(source)}(?!\w)", shown, text)
    *first, last = text.split(" | ")
    return f"{', '.join(first)} or {last}" if first else last


def _find_meaning(name: str, docstring_owners: tuple[Any, ...]) -> str:
    """Return the meaning of an option as sentences. Raises KeyError if it is not described."""
    if name in TEXTS:
        return TEXTS[name]
    for owner in docstring_owners:
        for item in _ITEM.finditer(inspect.getdoc(owner) or ""):
            if f"`{name}`" in item["names"]:
                text = _DEFAULT.sub("", " ".join(item["text"].split()))
                return text[0].upper() + text[1:].rstrip(".") + "."
    raise KeyError(f"the option {name} is described nowhere: add it to a docstring, or to TEXTS")


def _list_client_options(*, for_tests: bool) -> list[Option]:
    options = list_signature_options(Sluice.__init__, Sluice.__init__)
    return [option for option in options if (option.name in _FOR_TESTS) is for_tests]


def _list_send_options() -> list[Option]:
    options = list_signature_options(Sender.send_message, Sender.send_message, MessageOptions)
    own = [option for option in options if option.name not in MessageOptions.__annotations__]
    timeout = "The time limit of this send in milliseconds. None means that of the producer."
    return [
        option._replace(meaning=timeout) if option.name == "timeout_ms" else option
        for option in own
    ]


def _list_blocking_options() -> list[Option]:
    options = list_signature_options(BlockingProducer.__init__, ProducerOptions, Sluice.__init__)
    return [
        option._replace(meaning="The producer group.") if option.name == "group" else option
        for option in options
        if option.name not in _FOR_TESTS
    ]


TABLES: Final[dict[str, Callable[[], Any]]] = {
    "client": lambda: _list_client_options(for_tests=False),
    "client for tests": lambda: _list_client_options(for_tests=True),
    "producer": lambda: list_dict_options(ProducerOptions, Producer.__init__),
    "blocking producer": _list_blocking_options,
    "message": lambda: list_dict_options(MessageOptions, Sender.send_message),
    "send": _list_send_options,
    "subscribe": lambda: list_signature_options(Sluice.subscribe, Sluice.subscribe),
    "consumer": lambda: list_signature_options(Sluice.consumer, Sluice.consumer, Sluice.subscribe),
    "lite_pull": lambda: [
        *list_signature_options(Sluice.lite_pull, Sluice.lite_pull, Sluice.subscribe),
        *list_dict_options(LitePullLimits, ConsumeOptions),
    ],
    "pull_consumer": lambda: list_signature_options(Sluice.pull_consumer, ConsumeLimits),
    "all consumers": lambda: list_dict_options(ConsumeLimits, ConsumeOptions),
}
"""The tables of the page by their names in it."""


if __name__ == "__main__":
    rewrite_page(with_tables)
