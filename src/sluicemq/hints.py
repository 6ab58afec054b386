"""Did you mean …? For who uses another word than ours: a tag in the plural, Kafka's `key`.

A wrong option stays the TypeError that Python raises, and its text names the right one. A right
call pays nothing for that: names are looked at when the call has failed. Only where options are
handed on (`**options: Unpack[…]`) are they compared first, because they would fail too late.

`helpful` does this for the methods of a class. It also gives the class the verbs of other libraries
(`publish`, `poll`, `nack`) as attributes that are errors: type checkers, `dir` and `hasattr` do not
see them.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, ParamSpec, TypeVar, get_args

C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")

_OPTIONS: Final[Mapping[str, str]] = {
    "tag": "tags label routing_key type event_type",
    "tags": "tag",
    "where": "filter sql selector expression condition sub_expression filter_expression sql92",
    "keys": "key message_key",
    "sharding_key": "partition_key message_group ordering_key shard_key hash_key",
    "properties": "headers attributes props user_properties metadata",
    "body": "value data payload message content",
    "topic": "topics queue_name subject stream exchange destination",
    "group": "group_id consumer_group group_name producer_group name durable",
    "delay": "delay_s delay_seconds delay_ms delay_time countdown ttl after",
    "delay_ms": "delay delay_s",
    "deliver_at": "at eta delivery_time deliver_time deliver_at_ms schedule_at not_before",
    "deliver_at_ms": "deliver_at at eta delivery_time",
    "delay_level": "level delay_time_level",
    "queue": "partition message_queue",
    "timeout_ms": "timeout timeout_s send_timeout send_timeout_ms",
    "send_timeout_ms": "timeout timeout_ms timeout_s send_timeout",
    "timeout_s": "timeout timeout_ms",
    "start": "auto_offset_reset consume_from consume_from_where offset from_offset",
    "prefetch_count": "prefetch qos max_poll_records",
    "count_max": "count limit max_records max_messages batch_size",
    "handler": "callback listener on_message",
    "on_done": "callback on_delivery",
    "concurrency": "workers threads max_workers consume_thread_max",
    "ordered": "orderly order fifo",
    "broadcast": "broadcasting message_model fanout",
    "batch_max": "batch batch_size max_batch consume_message_batch_max_size",
    "auto_commit": "enable_auto_commit auto_ack",
    "max_reconsume_times": "max_retries retries max_deliver max_attempts",
    "retries": "max_retries retry retry_times",
    "name_servers": "name_server nameserver namesrv namesrv_addr bootstrap_servers host url",
    "credentials": "access_key secret_key acl auth username password sasl",
    "tls": "ssl use_tls use_ssl ssl_context",
    "ca": "cafile ca_file ca_cert ca_certs",
    "certificate": "cert certfile cert_file client_cert",
}
"""Ours, and what it is called elsewhere."""

_FORMS: Final[Mapping[str, str]] = {
    "tags": "text, 'A||B'",
    "where": "SQL92, 'price > 3'",
    "delay": "seconds or a timedelta",
    "deliver_at": "a datetime with a time zone, or ms since 1970",
    "queue": "a MessageQueue",
    "timeout_ms": "milliseconds",
    "send_timeout_ms": "milliseconds",
    "timeout_s": "seconds",
    "start": "'first', 'last' or a time",
    "credentials": "a pair (access_key, secret_key)",
}
"""How ours is given, where it may be another unit or type than elsewhere."""

_VERBS: Final[Mapping[str, str]] = {
    "send": "publish produce basic_publish send_message send_sync send_and_wait",
    "send_soon": "send_async",
    "send_batch": "send_many send_all send_messages publish_batch",
    "subscribe": "consume listen",
    "consumer": "basic_consume",
    "lite_pull": "poll fetch",
    "poll": "pull fetch consume receive getmany",
    "receive": "get poll pull getone",
    "ack": "acknowledge basic_ack commit done complete",
    "reject": "nack nak basic_nack basic_reject negative_acknowledge retry",
    "body": "value data payload content",
    "properties": "headers attributes",
    "message_id": "id msg_id",
    "queue_offset": "offset",
    "tag": "tags",
    "keys": "key",
    "close": "shutdown stop disconnect aclose",
}
"""The same of methods and attributes."""


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar.

    The comparison ignores case. `cutoff` is the least similarity, from 0 (anything) to 1 (equal).
    The search takes about 1 microsecond per known name, so call this only for a name that is wrong.
    """
    import difflib  # noqa: PLC0415 - most programs never mistype a name

    by_lower = {one.lower(): one for one in reversed(list(known))}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "Did you mean 'topic'?" with the known name that is nearest, or "" if none is near."""
    near = nearest_name(name, known, cutoff=cutoff)
    return "" if near is None else f"Did you mean {near!r}?"


def suggest(name: str, known: Iterable[str], *, shown_max: int = 20) -> str:
    """Return "Did you mean …?" if a known name is near, else a sentence that lists known names.

    The list has at most `shown_max` names: "There are: a, b and 7 more." or "There are: none."
    """
    names = list(known)
    if hint := did_you_mean(name, names):
        return hint
    more = f" and {len(names) - shown_max:,} more" if len(names) > shown_max else ""
    return f"There are: {', '.join(names[:shown_max]) or 'none'}{more}."


def intended_name(
    name: str, known: Iterable[str], synonyms: Mapping[str, str] = _OPTIONS
) -> str | None:
    """Return the known name that `name` probably means, or None.

    `synonyms` maps a known name to the words that other libraries use for it, separated by spaces.
    A synonym is preferred to a name that is only spelt similarly.
    """
    names = list(known)
    for ours in names:
        if name in synonyms.get(ours, "").split():
            return ours
    return nearest_name(name, names)


def options_of(function: Callable[..., Any]) -> dict[str, bool]:
    """The names that a call may use, those of a TypedDict at its end too -> whether it has to."""
    names: dict[str, bool] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            for options in get_args(parameter.annotation):
                names |= dict.fromkeys(options.__annotations__, True)
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            names[parameter.name] = parameter.kind is parameter.KEYWORD_ONLY
    return names


def unexpected(function: Callable[..., Any], name: str, more: Iterable[str] = ()) -> str:
    """The text of the TypeError for an option that a function does not have; it has `more`, which
    its signature does not tell."""
    known = options_of(function) | dict.fromkeys(more, True)
    text = f"{_shown(function)} got an unexpected keyword argument {name!r}."
    if ours := intended_name(name, known):
        form = f" ({_FORMS[ours]})" if ours in _FORMS else ""
        return f"{text} Did you mean {ours!r}{form}?"
    return f"{text} It takes {', '.join(option for option, named in known.items() if named)}."


def explain(error: TypeError, function: Callable[..., Any], named: Iterable[str]) -> None:
    """Completes the text of an error that the call itself raised; what the body raised stays. To
    be called where the function was."""
    trace = error.__traceback__
    if trace is not None and trace.tb_next is None:
        known = options_of(function)
        for name in named:
            if name not in known:
                error.args = (unexpected(function, name),)
                return
        if re.search("(was|were) given$", str(error)) and any(known.values()):
            options = ", ".join(f"{option}=" for option, is_named in known.items() if is_named)
            fact = str(error).partition("()")[2]
            error.args = (f"{_shown(function)}{fact}. Options are given by name: {options}.",)


def _last(function: Callable[..., Any]) -> Any:
    """How a function's `**options` are annotated: Unpack of a TypedDict, or a type of values."""
    if not function.__code__.co_flags & inspect.CO_VARKEYWORDS:
        return None
    parameters = inspect.signature(function).parameters
    return parameters[next(reversed(parameters))].annotation


def _shown(function: Callable[..., Any]) -> str:
    return f"{function.__qualname__.removesuffix('.__init__').rpartition('.')[2]}()"


def hinting(function: Callable[P, T]) -> Callable[P, T]:
    """The same function with hints."""
    hands_on = bool(get_args(_last(function)))
    known = options_of(function).keys() if hands_on else frozenset()

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        if hands_on and not named.keys() <= known:
            raise TypeError(unexpected(call, next(name for name in named if name not in known)))
        try:
            return function(*arguments, **named)
        except TypeError as error:
            explain(error, call, named)
            raise

    return call


class _Foreign:
    """An attribute that is not there, with the name of the one that is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._text)


def helpful(kind: C) -> C:
    """The class with hints at its public methods that have options, and at the verbs of others.

    A method that is made of another one (`functools.wraps`) explains its errors itself: it is given
    its name here.
    """
    for name, function in list(vars(kind).items()):
        if not inspect.isfunction(function) or (name.startswith("_") and name != "__init__"):
            continue
        if hasattr(function, "__wrapped__"):
            function.__name__, function.__qualname__ = name, f"{kind.__qualname__}.{name}"
        elif function.__defaults__ or function.__kwdefaults__ or get_args(_last(function)):
            setattr(kind, name, hinting(function))
    foreign = set()
    for ours, theirs in _VERBS.items():
        for verb in theirs.split() if hasattr(kind, ours) else ():
            if not hasattr(kind, verb) and verb not in foreign:
                text = f"{kind.__name__!r} has no attribute {verb!r}. Did you mean {ours!r}?"
                setattr(kind, verb, _Foreign(text))
                foreign.add(verb)
    if foreign:
        listed: Any = kind.__dir__

        def listing(self: object) -> list[str]:
            return [name for name in listed(self) if name not in foreign]

        setattr(kind, "__dir__", listing)  # noqa: B010 - for the instances of a class made here
    return kind
