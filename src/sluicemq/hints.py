"""Suggest names for wrong ones, as in "Did you mean 'tag'?".

`did_you_mean` and `suggest` help with names in any error text. The rest of this module helps with
Python names. People who come from another library write `tags=`, `headers=` or `publish`, so the
tables below translate such words.

A wrong keyword argument stays the TypeError that Python raises, but its text names the right one.
A correct call costs nothing more: the names are compared after the call has failed. Only functions
that pass options on (`**options: Unpack[…]`) compare them before the call, because the error would
come too late otherwise.

The decorator `with_hints` does this for the methods of a class. It also gives the class the verbs
of other libraries (`publish`, `poll`, `nack`) as attributes that raise AttributeError with a
suggestion. Type checkers, `dir` and `hasattr` do not see these attributes.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, ParamSpec, TypeVar, get_args

C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")

_OPTION_SYNONYMS: Final[Mapping[str, str]] = {
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
    "deliver_at": "at eta delivery_time deliver_time deliver_at_ms schedule_at not_before",
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
"""For each option of SluiceMQ: the words for it in other libraries, separated by spaces."""

_OPTION_FORMS: Final[Mapping[str, str]] = {
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
"""For each option whose unit or type may differ from other libraries: how it is given."""

_ATTRIBUTE_SYNONYMS: Final[Mapping[str, str]] = {
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
"""For each method or attribute of SluiceMQ: the words for it in other libraries."""


def nearest_name(name: str, known_names: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `name`, or None if none is similar.

    The result is also None if `name` itself is known, because then the name is not what was wrong.
    The comparison ignores case. `cutoff` is the least similarity, from 0 (anything) to 1 (equal).
    The search takes about 1 microsecond per known name.
    """
    import difflib  # noqa: PLC0415 - most programs never mistype a name

    # Reversed, so that the first of two known names that differ only in case is returned.
    names = list(known_names)
    if name in names:
        return None
    names_by_lower_case = {known.lower(): known for known in reversed(names)}
    matches = difflib.get_close_matches(name.lower(), names_by_lower_case, n=1, cutoff=cutoff)
    return names_by_lower_case[matches[0]] if matches else None


def did_you_mean(name: str, known_names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "Did you mean 'topic'?" with the known name that is nearest, or "" if none is near."""
    suggestion = nearest_name(name, known_names, cutoff=cutoff)
    return "" if suggestion is None else f"Did you mean {suggestion!r}?"


def suggest(name: str, known_names: Iterable[str], *, shown_max: int = 20) -> str:
    """Return "Did you mean …?" if a known name is similar to `name`, else a list of known names.

    The list has at most `shown_max` names: "There are: a, b and 7 more." or "There are: none."
    """
    known_names = list(known_names)
    hint = did_you_mean(name, known_names)
    if hint:
        return hint

    shown_names = ", ".join(known_names[:shown_max]) or "none"
    hidden_count = len(known_names) - shown_max
    ending = f" and {hidden_count:,} more" if hidden_count > 0 else ""
    return f"There are: {shown_names}{ending}."


def intended_name(
    name: str, known_names: Iterable[str], synonyms: Mapping[str, str] = _OPTION_SYNONYMS
) -> str | None:
    """Return the known name that a user of another library probably means by `name`, or None.

    `synonyms` maps a known name to the words of other libraries for it, separated by spaces. If
    `name` is not a synonym, the most similar known name is returned.
    """
    known_names = list(known_names)
    for known_name in known_names:
        if name in synonyms.get(known_name, "").split():
            return known_name
    return nearest_name(name, known_names)


def keyword_options(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the names of a function's arguments, each with whether it is keyword-only.

    Positional-only arguments are left out. If the function ends with `**options:
    Unpack[SomeTypedDict]`, the keys of the TypedDict are included as keyword-only names.
    """
    is_keyword_only_by_name: dict[str, bool] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            for options in get_args(parameter.annotation):
                is_keyword_only_by_name |= dict.fromkeys(options.__annotations__, True)
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            is_keyword_only = parameter.kind is parameter.KEYWORD_ONLY
            is_keyword_only_by_name[parameter.name] = is_keyword_only
    return is_keyword_only_by_name


def unexpected_keyword_text(
    function: Callable[..., Any], wrong_name: str, hidden_options: Iterable[str] = ()
) -> str:
    """Return the text of a TypeError for a keyword argument that `function` does not accept.

    `wrong_name` is the name of the argument. `hidden_options` are further keyword-only options that
    the function accepts, although its signature does not show them. The text suggests the option
    that was probably meant, or lists all keyword-only options.
    """
    fact = f"{_shown_name(function)} got an unexpected keyword argument {wrong_name!r}."
    options = keyword_options(function) | dict.fromkeys(hidden_options, True)

    intended_option = intended_name(wrong_name, options)
    if intended_option is not None:
        form = _OPTION_FORMS.get(intended_option)  # its unit or type, where that may be unclear
        form_hint = "" if form is None else f" ({form})"
        return f"{fact} Did you mean {intended_option!r}{form_hint}?"

    return f"{fact} It takes {', '.join(_keyword_only_names(options))}."


def _keyword_only_names(options: Mapping[str, bool]) -> list[str]:
    """Return the keyword-only names in a result of `keyword_options`."""
    return [option for option, is_keyword_only in options.items() if is_keyword_only]


def improve_type_error(
    error: TypeError, function: Callable[..., Any], keywords: Iterable[str]
) -> None:
    """Add a suggestion to the text of a TypeError, if wrong arguments of a call have caused it.

    `keywords` are the keyword arguments of the call of `function`. An error that was raised in the
    body of the function is not changed. This must be called in the frame that has called the
    function, because the traceback of `error` must begin there.
    """
    trace = error.__traceback__
    if trace is None or trace.tb_next is not None:
        return  # raised in the body

    options = keyword_options(function)
    for keyword in keywords:
        if keyword not in options:
            error.args = (unexpected_keyword_text(function, keyword),)
            return

    # "send() takes 3 positional arguments but 4 were given": name the keyword-only options.
    has_too_many_positional = re.search("(was|were) given$", str(error)) is not None
    keyword_only = _keyword_only_names(options)
    if has_too_many_positional and keyword_only:
        fact = str(error).partition("()")[2]  # without the function's name as Python shows it
        shown_options = ", ".join(f"{option}=" for option in keyword_only)
        error.args = (
            f"{_shown_name(function)}{fact}. Options are given by name: {shown_options}.",
        )


def _keywords_annotation(function: Callable[..., Any]) -> Any:
    """Return the annotation of the function's `**options`, or None if it has no such parameter."""
    if not function.__code__.co_flags & inspect.CO_VARKEYWORDS:
        return None
    # `**options` is always the last parameter.
    parameters = inspect.signature(function).parameters
    return parameters[next(reversed(parameters))].annotation


def _shown_name(function: Callable[..., Any]) -> str:
    """Return the name as errors show it: `send()` for a method, `Message()` for a constructor."""
    return f"{function.__qualname__.removesuffix('.__init__').rpartition('.')[2]}()"


def with_call_hints(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `function`, and adds suggestions to its TypeErrors.

    Only a TypeError that wrong arguments have caused gets a suggestion.
    """
    passes_options_on = bool(get_args(_keywords_annotation(function)))
    options = keyword_options(function).keys() if passes_options_on else frozenset()

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> T:
        """Call the function. Add a hint to a TypeError about a wrong argument."""
        # A function that passes its options on would fail too late, in another function.
        if passes_options_on and not keywords.keys() <= options:
            wrong_name = next(keyword for keyword in keywords if keyword not in options)
            raise TypeError(unexpected_keyword_text(call, wrong_name))
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            improve_type_error(error, call, keywords)
            raise

    return call


class _ForeignAttribute:
    """A descriptor that raises AttributeError with the name of the attribute that was meant."""

    def __init__(self, error_text: str) -> None:
        """Create the descriptor; `error_text` is the text of the AttributeError."""
        self._error_text = error_text

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(self._error_text)


def with_hints(cls: C) -> C:
    """Add suggestions to the errors of a class for wrong arguments and wrong names of attributes.

    This is a decorator. Each public method with optional parameters is wrapped. For names that
    other libraries use, such as `publish`, attributes are added that raise an AttributeError with
    the right name. A method that is wrapped already only gets its own name, under which errors show
    it.
    """
    for name, function in list(vars(cls).items()):
        is_private = name.startswith("_") and name != "__init__"
        if is_private or not inspect.isfunction(function):
            continue
        if hasattr(function, "__wrapped__"):
            function.__name__ = name
            function.__qualname__ = f"{cls.__qualname__}.{name}"
            continue
        has_optional_parameters = function.__defaults__ or function.__kwdefaults__
        passes_options_on = get_args(_keywords_annotation(function))
        if has_optional_parameters or passes_options_on:
            setattr(cls, name, with_call_hints(function))
    _add_foreign_attributes(cls)
    return cls


def _add_foreign_attributes(cls: type) -> None:
    """Add attributes for method names of other libraries, which raise AttributeError with a hint.

    A name that the class has itself is left out. The attributes are not listed by `dir`.
    """
    foreign_verbs = set()
    for own_name, synonyms in _ATTRIBUTE_SYNONYMS.items():
        if not hasattr(cls, own_name):
            continue
        for verb in synonyms.split():
            # `hasattr` is False for a verb that was added before, because it raises AttributeError.
            if not hasattr(cls, verb) and verb not in foreign_verbs:
                fact = f"{cls.__name__!r} has no attribute {verb!r}."
                error_text = f"{fact} Did you mean {own_name!r}?"
                setattr(cls, verb, _ForeignAttribute(error_text))
                foreign_verbs.add(verb)
    if foreign_verbs:
        _hide_from_dir(cls, foreign_verbs)


def _hide_from_dir(cls: type, hidden_names: set[str]) -> None:
    """Change a class so that `dir` of its instances does not list the hidden names."""
    list_names: Any = cls.__dir__

    def list_own_names(self: object) -> list[str]:
        return [name for name in list_names(self) if name not in hidden_names]

    setattr(cls, "__dir__", list_own_names)  # noqa: B010 - mypy refuses to assign a method
