"""Names that are there, and what happens to one that is not.

Java's setters and getters are one line each, typed, so that an editor completes them and a type
checker refuses a wrong value:

    send_msg_timeout = 10_000
    set_send_msg_timeout = Sets[int]()    # set_send_msg_timeout(value): send_msg_timeout = value
    get_send_msg_timeout = Gets[int]()

A name that nobody declared is an AttributeError at once, read or set, with the one that was meant:
`setNamesrvAddr` is `set_namesrv_addr` here. What Java has and we do not says so, and what to do
instead. Type checkers see none of this machinery: for them such a name just does not exist.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, overload

from sluicemq.errors import ConfigurationError
from sluicemq.hints import did_you_mean

T = TypeVar("T")
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BEFORE_NAMES: Final = "Java writes it before the names on the wire; so do you: 'prod%orders'."
_GROUP: Final = "The attribute is group."
_BY_ITSELF: Final = "Leave it out: the client sees to it by itself."
_FIXES: Final = {
    "adjust_thread_pool_nums_threshold": _BY_ITSELF,
    "auto_batch": "Send a list of messages.",
    "await_termination_millis_when_shutdown": _BY_ITSELF,
    "callback_executor": "Hand the result over to your executor in the callback.",
    "async_sender_executor": _BY_ITSELF,
    "client_callback_executor_threads": _BY_ITSELF,
    "client_ip": "Members are told apart by themselves; instance_name keeps their offsets apart.",
    "compress_level": _BY_ITSELF,
    "compress_type": "Bodies are compressed with zlib, which every client reads.",
    "consumer_group": _GROUP,
    "consume_timeout": "Give the work in your listener a deadline of its own.",
    "consumer_pull_timeout_millis": _BY_ITSELF,
    "create_topic_key": "Create the topic: create_topic(topic, queue_num).",
    "default_topic_queue_nums": "Create the topic: create_topic(topic, queue_num).",
    "heartbeat_broker_interval": _BY_ITSELF,
    "language": _BY_ITSELF,
    "max_message_size": "The brokers' maxMessageSize is the limit.",
    "message_queue_listener": "Use register_topic_message_queue_change_listener, or poll.",
    "namespace": _BEFORE_NAMES,
    "namespace_v2": _BEFORE_NAMES,
    "offset_store": "Offsets are at the brokers; offsets_directory is for broadcasting.",
    "poll_name_server_interval": _BY_ITSELF,
    "producer_group": _GROUP,
    "pull_interval": "pull_threshold_for_queue bounds what is fetched ahead.",
    "pull_thread_nums": _BY_ITSELF,
    "resume": "unsubscribe and subscribe again, or shut the consumer down and start one.",
    "send_latency_fault_enable": "It is always on: a slow broker is avoided for a while.",
    "suspend": "unsubscribe and subscribe again, or shut the consumer down and start one.",
    "unit_mode": _BY_ITSELF,
    "update_core_pool_size": "Set consume_thread_max before start.",
}
"""What Java has and we do not, and what to do instead."""


def snake(name: str) -> str:
    """Java's name as it is written here.

    >>> snake("setRetryAnotherBrokerWhenNotStoreOK")
    'set_retry_another_broker_when_not_store_ok'
    """
    return _HUMP.sub("_", name).lower()


def unknown(kind: type, name: str) -> AttributeError:
    """The error for a name that the class does not have, with the one that was meant."""
    known = [one for one in dir(kind) if not one.startswith("_")]
    wanted = snake(name)
    bare = wanted.removeprefix("get_").removeprefix("set_").removeprefix("is_")
    hint = did_you_mean(wanted, known, cutoff=0.7)
    if wanted in known:
        fix = f"Names are in snake case here: {wanted}."
    elif bare in _FIXES:
        fix = _FIXES[bare]
    elif bare in known and not wanted.startswith("set_"):
        fix = f"Read the attribute {bare}."
    elif bare in known and any(one.startswith("set_") for one in known):
        fix = f"Set the attribute {bare}."
    elif bare in known:
        fix = f"{bare} does not change: make another {kind.__name__} with it."
    elif hint:
        fix = hint
    else:
        fix = f"help({kind.__name__}) lists what there is."
    return AttributeError(f"{kind.__name__} has no {name!r}. {fix}", name=name)


class Strict:
    """A class with `__slots__`, whose objects have these attributes and no others."""

    __slots__ = ()

    if not TYPE_CHECKING:  # with them a type checker would take any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise unknown(type(self), name)

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except AttributeError:
                if hasattr(type(self), name):
                    raise
                raise unknown(type(self), name) from None


class Settings:
    """A class whose attributes stand in it with their defaults; a value of another kind than its
    default is refused. Subclasses of users may have attributes of their own."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise unknown(type(self), name)

        def __setattr__(self, name: str, value: Any) -> None:
            kind = type(self)
            if hasattr(kind, name):
                if not name.startswith("_"):
                    self._check(name, getattr(kind, name), value)
            elif not name.startswith("_") and kind.__module__.startswith(__package__):
                raise unknown(kind, name)
            super().__setattr__(name, value)

    def _check(self, name: str, default: Any, value: Any) -> None:
        """Raises ConfigurationError for a value that cannot be one of this attribute."""
        kind = type(default)
        if isinstance(default, _Accessor) or (callable(default) and not callable(value)):
            raise ConfigurationError(
                f"{type(self).__name__}.{name} is a method.", fix=f"Call it: {name}({value!r})."
            )
        is_plain = not callable(default) and not isinstance(default, property | str | None)
        if is_plain and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ):
            raise ConfigurationError(
                f"{type(self).__name__}.{name} would be {value!r}.",
                fix=f"It is of type {kind.__name__}, {default!r} unless it is set.",
            )


class _Accessor(Generic[T]):
    """An argument names another attribute than its own name does."""

    def __init__(self, attribute: str = "") -> None:
        self._attribute = attribute

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = self._attribute or name.partition("_")[2]


class Sets(_Accessor[T]):
    """`set_x(value)`: x = value."""

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...

    @overload
    def __get__(self, owner: object, kind: type) -> Callable[[T], None]: ...

    def __get__(self, owner: object | None, kind: type) -> Self | Callable[[T], None]:
        return self if owner is None else partial(setattr, owner, self._attribute)


class Gets(_Accessor[T]):
    """`get_x()`: x."""

    @overload
    def __get__(self, owner: None, kind: type) -> Self: ...

    @overload
    def __get__(self, owner: object, kind: type) -> Callable[[], T]: ...

    def __get__(self, owner: object | None, kind: type) -> Self | Callable[[], T]:
        return self if owner is None else partial(getattr, owner, self._attribute)


class Given:
    """Positional arguments of one of Java's overloads, taken in its order by what they are."""

    def __init__(self, *arguments: Any) -> None:
        self._rest = list(arguments)

    def take(self, *kinds: type[T]) -> T | None:
        """The next argument if it is of one of these types, else None."""
        if self._rest and isinstance(self._rest[0], kinds):
            taken: T = self._rest.pop(0)
            return taken
        if self._rest and self._rest[0] is None:
            self._rest.pop(0)
        return None

    @property
    def next(self) -> Any:
        """What comes next; None at the end."""
        return self._rest[0] if self._rest else None

    def pair(self, what: str, more: str) -> tuple[Any, Any]:
        """The next two. Raises ConfigurationError when the second one is missing."""
        if len(self._rest) < 2:
            raise ConfigurationError(f"{what} came without {more}.", fix="Give both.")
        return self._rest.pop(0), self._rest.pop(0)

    def end(self, what: str, fix: str) -> None:
        """Raises ConfigurationError when something is left."""
        if self._rest:
            raise ConfigurationError(f"{what} does not take {self._rest[0]!r} there.", fix=fix)
