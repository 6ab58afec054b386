"""Every exception that SluiceMQ raises, in one tree.

    SluiceError
    ├── ConfigurationError      a key, value or option of the user is wrong
    ├── ProtocolError           bytes that are not the protocol (close the connection)
    ├── FilterError             a filter expression
    │   ├── FilterSyntaxError   ... does not compile
    │   └── FilterEvaluationError  ... cannot be evaluated on this message: no match
    ├── StoreError              the store on disk
    │   ├── StoreLockedError    another living process owns it
    │   ├── StoreDamagedError   bytes before the durable mark are bad, or a file has another size
    │   ├── StoreFullError      no space left, writes are refused
    │   ├── StoreTransientError the system has run short of something: the same works later
    │   ├── StoreUncertainError what was written may come back after a restart
    │   └── MessageIllegalError the message breaks a limit of the store
    ├── ConsensusError          the consensus service did not answer: the change is done or not
    ├── RequestError            a request was answered with a code that is not success
    │   ├── TopicNotFoundError
    │   ├── GroupNotFoundError
    │   └── PermissionDeniedError
    └── ClientError             the client could not do what was asked
        ├── NameServerUnreachableError
        ├── RouteNotFoundError
        ├── ConnectionLostError
        ├── RequestTimeoutError
        ├── SendError           the message was not stored
        │   └── SendUnknownError  it may be stored: do not resend blindly
        ├── SubscriptionConflictError
        ├── OffsetOutOfRangeError
        ├── UnsupportedByBrokerError
        ├── MessageNotFoundError
        ├── MessageKeyMissingError  a handler cannot tell whether it had the message before
        ├── ClosedError
        └── RetryLaterError   raised by a handler: give me the message again

The text of every error names the value, the limit and the cure; `cure` holds the last part alone.
Errors never carry secrets.
"""


def install_extra(name: str) -> str:
    """The cure for a package that comes with an extra: no package index has SluiceMQ yet, so it
    is installed again from where it came."""
    return (
        f"Install the extra {name!r}: pip install '.[{name}]' in the checkout,"
        f" or the path of the wheel followed by [{name}]."
    )


class SluiceError(Exception):
    """The root: `cure` says what the user can do about it."""

    def __init__(self, text: str, *, cure: str = "") -> None:
        super().__init__(f"{text} {cure}".rstrip())
        self.cure = cure

    @property
    def fact(self) -> str:
        """The text without the cure: for an error that tells of others and has its own cure."""
        return str(self).removesuffix(self.cure).rstrip().removesuffix(".")


class ConfigurationError(SluiceError):
    """A key, value or option is wrong; the text names it and its range."""


class ProtocolError(SluiceError):
    """Bytes of the other side are not the protocol. The connection has to be closed."""


class FilterError(SluiceError):
    """A filter expression is at fault."""


class FilterSyntaxError(FilterError):
    """The expression does not compile; `position` is the index of the character at fault."""

    def __init__(self, text: str, *, position: int = 0, cure: str = "") -> None:
        super().__init__(text, cure=cure)
        self.position = position


class FilterEvaluationError(FilterError):
    """The expression cannot be evaluated on this message, which therefore does not match.

    `reason` is the fact without the message's value: what errors are counted by.
    """

    def __init__(self, text: str, *, cure: str = "", reason: str = "") -> None:
        super().__init__(text, cure=cure)
        self.reason = reason or self.fact


class StoreError(SluiceError):
    """The store cannot do what was asked."""


class StoreLockedError(StoreError):
    """Another living process owns the store directory."""


class StoreDamagedError(StoreError):
    """Files are not what they must be: damaged bytes, or another size than configured."""


class StoreFullError(StoreError):
    """There is no room: writes are refused, nothing is lost."""


class StoreTransientError(StoreError):
    """The system is short of something (descriptors, memory): nothing is lost, and the same works
    when it has it again."""


class StoreUncertainError(StoreError):
    """The disk failed half-way: what was written may be there or not when the store is opened."""


class MessageIllegalError(StoreError):
    """The message breaks a limit of the store."""


class ConsensusError(SluiceError):
    """The consensus service did not answer; a change asked for may be done, now or later."""


class RequestError(SluiceError):
    """A server answered with a code that is not success."""

    def __init__(self, code: int, remark: str, *, address: str = "", cure: str = "") -> None:
        where = f" by {address}" if address else ""
        end = "." if cure and not remark.endswith((".", "!", "?")) else ""
        super().__init__(f"answered{where} with code {code}: {remark}{end}", cure=cure)
        self.code = code
        self.remark = remark
        self.address = address


class TopicNotFoundError(RequestError):
    """The topic does not exist there (code 17)."""


class GroupNotFoundError(RequestError):
    """The consumer group does not exist there (code 26)."""


class PermissionDeniedError(RequestError):
    """The topic, group, broker or access rules forbid it (code 16)."""


class ClientError(SluiceError):
    """The client could not do what was asked."""


class NameServerUnreachableError(ClientError):
    """None of the name servers answers."""


class RouteNotFoundError(ClientError):
    """No broker serves the topic."""


class ConnectionLostError(ClientError):
    """The connection broke before the answer came."""


class RequestTimeoutError(ClientError):
    """No answer within the time given."""


class SendError(ClientError):
    """The message was not stored."""


class SendUnknownError(SendError):
    """The answer is missing: the message may be stored or not."""


class SubscriptionConflictError(ClientError):
    """Two different subscriptions in one group; the text shows both expressions."""


class OffsetOutOfRangeError(ClientError):
    """The offset asked for is not in the queue any more, or not yet."""


class MessageNotFoundError(ClientError):
    """No stored message has that id."""


class MessageKeyMissingError(ClientError):
    """A message lacks the key by which an idempotent handler would know it again."""


class UnsupportedByBrokerError(ClientError):
    """The broker lacks a feature that only SluiceMQ has; the text names it."""


class RetryLaterError(ClientError):
    """A handler raises it to get the message again, without an error in the log.

    `delay_level`: 0 the group's ladder (10 s, 30 s … 2 h), n a level of the broker, -1 never: dead
    letters. None: as the consumer is set up. `suspend_s`: how long an ordered queue rests. `done`:
    a handler of lists is done with so many of the first messages, the others come again.
    """

    def __init__(
        self,
        text: str = "",
        *,
        delay_level: int | None = None,
        suspend_s: float | None = None,
        done: int = 0,
    ) -> None:
        super().__init__(text)
        self.done = done
        self.delay_level = delay_level
        self.suspend_s = suspend_s


class ClosedError(ClientError):
    """The client, producer or consumer is closed."""
