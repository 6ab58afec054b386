"""The setters, getters and overloaded constructors of the classes with RocketMQ's names.

Java's setters and getters are declared in one line each. The lines have types, so that editors
complete the names and type checkers reject wrong values:

    send_msg_timeout = 10_000
    set_send_msg_timeout = Setter[int]()    # set_send_msg_timeout(value) sets send_msg_timeout
    get_send_msg_timeout = Getter[int]()    # get_send_msg_timeout() returns it

Reading or setting an undeclared name raises AttributeError at once, and the error names the
attribute that was probably meant: `setNamesrvAddr` is `set_namesrv_addr` here. For a setting that
Java's client has and this one does not, the error says what to do instead (`_FIXES`). Type checkers
do not see this mechanism; for them such a name does not exist.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar, overload

from sluicemq.errors import ConfigurationError
from sluicemq.hints import did_you_mean

T = TypeVar("T")
_WORD_BOUNDARY: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAMESPACE: Final = "Write the namespace before the name of a topic or group: 'prod%orders'."
_GROUP: Final = "Use the attribute group."
_AUTOMATIC: Final = "Remove it: the client does this by itself."
_FIXES: Final = {
    "adjust_thread_pool_nums_threshold": _AUTOMATIC,
    "auto_batch": "Send a list of messages.",
    "await_termination_millis_when_shutdown": _AUTOMATIC,
    "callback_executor": "Submit the result to your executor in the callback.",
    "async_sender_executor": _AUTOMATIC,
    "client_callback_executor_threads": _AUTOMATIC,
    "client_ip": "Remove it: client ids are unique. Offset files are named by instance_name.",
    "compress_level": _AUTOMATIC,
    "compress_type": "Remove it: bodies are compressed with zlib, which every client can read.",
    "consumer_group": _GROUP,
    "consume_timeout": "Limit the time of the work in your listener.",
    "consumer_pull_timeout_millis": _AUTOMATIC,
    "create_topic_key": "Create the topic: create_topic(topic, queue_num).",
    "default_topic_queue_nums": "Create the topic: create_topic(topic, queue_num).",
    "heartbeat_broker_interval": _AUTOMATIC,
    "language": _AUTOMATIC,
    "max_message_size": "Set maxMessageSize of the brokers.",
    "message_queue_listener": "Use register_topic_message_queue_change_listener, or poll.",
    "namespace": _NAMESPACE,
    "namespace_v2": _NAMESPACE,
    "offset_store": "Remove it: brokers store offsets. Set offsets_directory for broadcasting.",
    "poll_name_server_interval": _AUTOMATIC,
    "producer_group": _GROUP,
    "pull_interval": "Limit what is prefetched with pull_threshold_for_queue.",
    "pull_thread_nums": _AUTOMATIC,
    "resume": "Unsubscribe and subscribe again, or shut the consumer down and start another one.",
    "send_latency_fault_enable": "Remove it: slow brokers are always avoided for a while.",
    "suspend": "Unsubscribe and subscribe again, or shut the consumer down and start another one.",
    "unit_mode": _AUTOMATIC,
    "update_core_pool_size": "Set consume_thread_max before start.",
}
"""What to do instead of a setting or method that Java's client has and this package does not."""


def to_snake_case(name: str) -> str:
    """Return a name of Java in snake case.

    >>> to_snake_case("setRetryAnotherBrokerWhenNotStoreOK")
    'set_retry_another_broker_when_not_store_ok'
    """
    return _WORD_BOUNDARY.sub("_", name).lower()


def make_attribute_error(owner_class: type, name: str) -> AttributeError:
    """Return the error for a `name` that the class `owner_class` does not have.

    The text suggests the name that was probably meant, or says what to do instead.
    """
    fix = _fix_of_name(owner_class, to_snake_case(name))
    return AttributeError(f"{owner_class.__name__} has no attribute {name!r}. {fix}", name=name)


def _fix_of_name(owner_class: type, snake_name: str) -> str:
    """Return advice for a name that does not exist, such as "Read the attribute topic".

    `snake_name` is the name that was used, in snake case, and `owner_class` the class of the
    object.
    """
    public_names = [
        public_name for public_name in dir(owner_class) if not public_name.startswith("_")
    ]
    if snake_name in public_names:
        return f"Names are in snake case here: {snake_name}."
    attribute = snake_name.removeprefix("get_").removeprefix("set_").removeprefix("is_")
    if attribute in _FIXES:
        return _FIXES[attribute]
    if attribute in public_names:
        if not snake_name.startswith("set_"):
            return f"Read the attribute {attribute}."
        has_setters = any(public_name.startswith("set_") for public_name in public_names)
        if has_setters:
            return f"Set the attribute {attribute}."
        return f"{attribute} cannot be changed: create another {owner_class.__name__} with it."
    suggestion = did_you_mean(snake_name, public_names, cutoff=0.7)
    return suggestion or f"See help({owner_class.__name__}) for its attributes and methods."


class StrictAttributes:
    """A base class with `__slots__` whose instances have the declared attributes and no others."""

    __slots__ = ()

    # With these methods a type checker would accept any name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise make_attribute_error(type(self), name)

        def __setattr__(self, name: str, value: Any) -> None:
            try:
                super().__setattr__(name, value)
            except AttributeError:
                if hasattr(type(self), name):
                    raise
                raise make_attribute_error(type(self), name) from None


class CheckedAttributes:
    """A base class whose settings are class attributes with their defaults.

    Setting one to a value of another type than its default raises ConfigurationError. Subclasses
    outside of this package may have further attributes.
    """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            raise make_attribute_error(type(self), name)

        def __setattr__(self, name: str, new_value: Any) -> None:
            own_class = type(self)
            if hasattr(own_class, name):
                if not name.startswith("_"):
                    self._check_setting(name, getattr(own_class, name), new_value)
            elif not name.startswith("_") and own_class.__module__.startswith(__package__):
                raise make_attribute_error(own_class, name)
            super().__setattr__(name, new_value)

    def _check_setting(self, name: str, default: Any, new_value: Any) -> None:
        """Raise ConfigurationError if the attribute `name` cannot have `new_value`.

        `default` is its present default, whose type the value must have. If the default is a
        string, None or a property, any value is accepted. A method can only be replaced by a
        callable.
        """
        expected_type = type(default)
        if isinstance(default, _Accessor) or (callable(default) and not callable(new_value)):
            raise ConfigurationError(
                f"{type(self).__name__}.{name} is a method.", fix=f"Call it: {name}({new_value!r})."
            )
        has_checked_type = not callable(default) and not isinstance(default, property | str | None)
        is_bool_as_number = isinstance(new_value, bool) and expected_type is not bool
        has_right_type = isinstance(new_value, expected_type) and not is_bool_as_number
        if has_checked_type and not has_right_type:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} must be of type {expected_type.__name__}, got "
                f"{new_value!r}.",
                fix=f"Set a value of that type. The default is {default!r}.",
            )


class _Accessor(Generic[T]):
    """A descriptor that gives access to an attribute by a method.

    The attribute is the part of the method's name after the first underscore, unless the
    constructor is given another one.
    """

    def __init__(self, attribute: str = "") -> None:
        self._attribute = attribute

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = self._attribute or name.partition("_")[2]


class Setter(_Accessor[T]):
    """A method `set_x(value)` that sets the attribute `x`."""

    @overload
    def __get__(self, owner: None, owner_class: type) -> Self: ...

    @overload
    def __get__(self, owner: object, owner_class: type) -> Callable[[T], None]: ...

    def __get__(self, owner: object | None, owner_class: type) -> Self | Callable[[T], None]:
        return self if owner is None else partial(setattr, owner, self._attribute)


class Getter(_Accessor[T]):
    """A method `get_x()` that returns the attribute `x`."""

    @overload
    def __get__(self, owner: None, owner_class: type) -> Self: ...

    @overload
    def __get__(self, owner: object, owner_class: type) -> Callable[[], T]: ...

    def __get__(self, owner: object | None, owner_class: type) -> Self | Callable[[], T]:
        return self if owner is None else partial(getattr, owner, self._attribute)


class PositionalArguments:
    """The positional arguments of a call of one of Java's overloaded methods.

    Java chooses an overload by the types of the arguments. Here, the method takes the arguments one
    after the other, each by the type that it expects next.
    """

    def __init__(self, *arguments: Any) -> None:
        self._remaining = list(arguments)

    def take(self, *types: type[T]) -> T | None:
        """Remove the next argument and return it, if it is an instance of one of `types`.

        Otherwise returns None and removes nothing, with one exception: an argument None is removed,
        because that is how Java callers leave out a parameter.
        """
        if self._remaining and isinstance(self._remaining[0], types):
            taken: T = self._remaining.pop(0)
            return taken
        if self._remaining and self._remaining[0] is None:
            self._remaining.pop(0)
        return None

    @property
    def next_argument(self) -> Any:
        """The argument that `take` looks at next, or None if there are no more."""
        return self._remaining[0] if self._remaining else None

    def take_pair(self, first_name: str, second_name: str) -> tuple[Any, Any]:
        """Remove the next two arguments and return them as a pair.

        `first_name` and `second_name` describe them in an error, for example "a selector" and "its
        argument". Raises ConfigurationError if there are fewer than two.
        """
        if len(self._remaining) < 2:
            raise ConfigurationError(
                f"{first_name} was passed without {second_name}.",
                fix=f"Pass {first_name} and {second_name}.",
            )
        return self._remaining.pop(0), self._remaining.pop(0)

    def expect_end(self, called: str, fix: str) -> None:
        """Raise ConfigurationError if there are further arguments.

        `called` is the name of the called method, and `fix` says which arguments it accepts.
        """
        if self._remaining:
            raise ConfigurationError(
                f"{called} does not accept {self._remaining[0]!r} at this position.", fix=fix
            )
