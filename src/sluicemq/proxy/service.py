"""Calls of `apache.rocketmq.v2.MessagingService`: from their bytes to a talk, and to an answer.

    bytes -> request message -> who asks (metadata, signature) -> Talk -> answer messages -> bytes

A method is a generator `(client, request, call) -> answer`: one message, or all of those of a call
that streams. It yields the requests for brokers; each is checked against the rights of the account
that signed the call. What goes wrong is a status inside an ordinary answer, as the clients expect
(spec/grpc.md §1): a StatusError as it says, what a broker refuses by the table of spec/grpc.md §2.

Where both sides stream (`Dialogue`) there is such a talk for each message that comes, one after
another, and its answers are sent without an end. There an error is the end of the call.

In `server.table` stands which method is whose.
"""

import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

from sluicemq.acl.guard import Guard
from sluicemq.acl.rules import Account
from sluicemq.client.core import conversations as talks
from sluicemq.clock import Clock
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import (
    ConnectionLostError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.net.grpc import MESSAGE_BYTES_MAX, Call, CallError, Handler, StatusCode
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Answered, ConversationRun
from sluicemq.proxy.clients import Client, Clients
from sluicemq.proxy.limits import Refusal, StatusError, check_shape
from sluicemq.proxy.messages import Code
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

PATH: Final = "/apache.rocketmq.v2.MessagingService/"
AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"
TELEMETRY_FAILED: Final = "process client telemetryCommand failed. "

_OF_BROKER: Final[Mapping[int, Code]] = {
    ResponseCode.SUCCESS: Code.OK,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.QUERY_NOT_FOUND: Code.OFFSET_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
    # RocketMQ's proxy calls these two INTERNAL_SERVER_ERROR. They are refused each time that the
    # client tries again.
    ResponseCode.MESSAGE_ILLEGAL: Code.BAD_REQUEST,
    ResponseCode.INVALID_PARAMETER: Code.BAD_REQUEST,
}


def status_of(error: Exception) -> m.Status:
    """What a client is told of an error; of a bug only its kind."""
    code, text = Code.INTERNAL_SERVER_ERROR, str(error)
    if isinstance(error, StatusError):
        code = error.code
    elif isinstance(error, RequestError):
        code, text = _OF_BROKER.get(error.code, code), error.remark
    elif isinstance(error, RouteNotFoundError):
        code, text = Code.TOPIC_NOT_FOUND, f"{Refusal.TOPIC_UNKNOWN.phrase}: {text}"
    elif isinstance(error, RequestTimeoutError | ConnectionLostError):
        code = Code.PROXY_TIMEOUT
    elif not isinstance(error, SluiceError):
        log.error("a call failed", exc_info=error)
        text = type(error).__name__
    return m.Status(code=code, message=text)


_OF_STATUS: Final[Mapping[int, StatusCode]] = {
    Code.UNAUTHORIZED: StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: StatusCode.PERMISSION_DENIED,
    Code.TOO_MANY_REQUESTS: StatusCode.RESOURCE_EXHAUSTED,
}


def end_of(error: Exception) -> CallError:
    """Return the end of a call for an error: whose fault it is, and behind the text the code that
    clients know."""
    if isinstance(error, CallError):
        return error
    status = status_of(error)
    is_theirs = Code.BAD_REQUEST <= status.code < Code.INTERNAL_ERROR
    code = StatusCode.INVALID_ARGUMENT if is_theirs else StatusCode.INTERNAL
    text = f"{status.message} ({status.code:d} {Code(status.code).name})"
    return CallError(_OF_STATUS.get(status.code, code), text)


def end_of_telemetry(error: Exception) -> CallError:
    """Return what ends a telemetry stream. It begins as RocketMQ's does, except where settings have
    neither side, of which RocketMQ speaks without that beginning."""
    end = end_of(error)
    if isinstance(error, StatusError) and error.refusal is Refusal.SETTINGS_EMPTY:
        return end
    return CallError(end.code, f"{TELEMETRY_FAILED}{end}")


class Method(NamedTuple):
    """A method, and its messages. `streams`: it answers with a list. `is_dialogue`: clients stream
    too, and there is a talk for each message."""

    request: type[Any]
    response: type[Any]
    talk: Callable[..., talks.Conversation[Any]]
    streams: bool = False
    is_dialogue: bool = False


WAITING_MAX: Final = 64


class Dialogue:
    """A call in which both sides stream: the messages of the client one after another. It ends when
    the client has said all, and all of that is done."""

    __slots__ = ("_begin", "_call", "_is_busy", "_waiting", "_waiting_bytes")

    def __init__(self, call: Call, begin: Callable[[Callable[[Any], None], bytes], None]) -> None:
        """`begin` sees to a message; it is given what to call with the answers, or an error."""
        self._call = call
        self._begin = begin
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_busy = False
        call.on_half_close = self._next

    def heard(self, data: bytes, call: Call) -> None:
        """One more message. Raises CallError for one who says more than is listened to."""
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if len(self._waiting) > WAITING_MAX or self._waiting_bytes > MESSAGE_BYTES_MAX:
            raise CallError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{len(self._waiting)} messages of {self._waiting_bytes} bytes wait to be looked at"
                f", the limits are {WAITING_MAX} and {MESSAGE_BYTES_MAX}.",
            )
        self._next()

    def _next(self) -> None:
        if self._is_busy or self._call.is_closed:
            return
        if self._waiting:
            self._is_busy = True
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._begin(self._done, data)
        elif self._call.is_half_closed:
            self._call.end()

    def _done(self, result: Sequence[Any] | Exception) -> None:
        self._is_busy = False
        if isinstance(result, Exception):
            error = end_of_telemetry(result)
            self._call.end(error.code, str(error))
            return
        for answer in result:
            self._call.send(answer.SerializeToString())
        self._next()


BOUNDS_MS: Final = (1, 3, 5, 7, 10, 100, 1000, 2000, 3000)
"""Those of RocketMQ's rocketmq_rpc_latency."""


class Tally:
    """What became of the calls of one method. A call that nobody waits for any more counts too, and
    is in flight until its end. Latency includes the wait of a long poll."""

    __slots__ = ("_counts", "begun", "codes", "latency_sum_ms")

    def __init__(self) -> None:
        self.begun = 0
        self.codes: Counter[int] = Counter()
        """Ended calls by status; by the status of gRPC, below 0, where that was the answer."""
        self.latency_sum_ms = 0.0
        self._counts = [0] * (len(BOUNDS_MS) + 1)

    def ended(self, code: int, age_s: float) -> None:
        """HOT."""
        age_ms = age_s * 1000
        self.codes[code] += 1
        self.latency_sum_ms += age_ms
        self._counts[bisect_left(BOUNDS_MS, age_ms)] += 1

    @property
    def done(self) -> int:
        return sum(self._counts)

    @property
    def in_flight(self) -> int:
        return self.begun - self.done

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound -> how many took no longer."""
        bounds = [*(f"{bound:.1f}" for bound in BOUNDS_MS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))

    @property
    def by_name(self) -> dict[str, int]:
        """Ended calls by the name of their status."""
        return {_name(code): count for code, count in self.codes.copy().items()}


def _name(code: int) -> str:
    names: dict[int, str] = {it: it.name for it in Code}
    return f"grpc {StatusCode(-code).name}" if code < 0 else names.get(code, f"{code}")


class Calls:
    """Methods by path, for a `net.grpc.GrpcServer`."""

    def __init__(
        self, clients: Clients, guard: Guard | None, clock: Clock, limits: ProxyLimits
    ) -> None:
        self.clients = clients
        self.guard = guard
        self._clock = clock
        self._limits = limits
        self.tallies: dict[str, Tally] = {}
        """By method; dialogues, which last as long as their clients, are not counted."""

    def methods(self, table: Mapping[str, Method]) -> dict[str, Handler]:
        """Those of a table: name -> method, bound to its family."""
        self.tallies = {name: Tally() for name, it in table.items() if not it.is_dialogue}
        return {
            PATH + name: partial(self._hear, method)
            if method.is_dialogue
            else partial(self._handle, method, self.tallies[name])
            for name, method in table.items()
        }

    def account(self, call: Call) -> Account | None:
        """Return the account that signed a call; None for a caller who may do everything.

        The date of the signature is compared with the time at which the call began: a telemetry
        stream lasts for days, and has the headers of its beginning. Raises StatusError if there is
        no signature, if it is wrong, or if its date is too far away.
        """
        if self.guard is None:
            return None
        headers, peer = call.headers, call.connection.peer
        began_ms = self._clock.now_ms() - int(call.age_s * 1000)
        verdict = self.guard.identify_call(
            headers.get(AUTHORIZATION, ""), headers.get(DATE_TIME, ""), peer.remote.address,
            now_ms=began_ms, age_s_max=self._limits.date_s_max,
        )  # fmt: skip
        if not verdict.is_allowed:
            if not peer.is_trusted:
                peer.count_refusal()
            raise StatusError(Refusal.NOT_AUTHENTICATED, verdict.reason)
        peer.is_trusted = True
        return verdict.account

    def _handle(self, method: Method, tally: Tally, data: bytes, call: Call) -> None:
        tally.begun += 1
        self._begin(method, call, partial(self._done, method, tally, call), data)

    def _hear(self, method: Method, data: bytes, call: Call) -> None:
        """The first message of a call in which both sides stream."""
        dialogue = Dialogue(call, partial(self._begin, method, call))
        call.on_message = dialogue.heard
        dialogue.heard(data, call)

    def _begin(self, method: Method, call: Call, done: Callable[[Any], None], data: bytes) -> None:
        try:
            check_shape(data, has_bodies=method.request is m.SendMessageRequest)
        except StatusError as error:
            done(error)
            return
        try:
            request = method.request.FromString(data)
        except Exception:  # noqa: BLE001 - protobuf has several
            text = f"This is no {method.request.__name__}."
            done(CallError(StatusCode.INVALID_ARGUMENT, text))
            return
        try:
            account = self.account(call)
            client = self.clients.of(call, "" if account is None else account.access_key)
        except StatusError as error:
            done(error)
            return
        ConversationRun(
            method.talk(client, request, call), partial(self.ask, client, account), done
        )

    def require(self, code: int, call: Call) -> None:
        """Who signed a call has to have the rights for a request of this code. Raises CallError."""
        try:
            account = self.account(call)
        except StatusError as error:
            raise end_of(error) from error
        if self.guard is not None:
            verdict = self.guard.check_for_account(account, code, {}, b"")
            if not verdict.is_allowed:
                raise CallError(StatusCode.PERMISSION_DENIED, verdict.reason)

    def ask(
        self, client: Client, account: Account | None, call: talks.Call, answered: Answered
    ) -> None:
        """A request of a client to a broker, if the account may make it."""
        if self.guard is not None:
            command = call.command
            try:
                verdict = self.guard.check_for_account(
                    account, command.code, command.fields or {}, bytes(command.body)
                )
            except ProtocolError as error:
                answered(error)
                return
            if not verdict.is_allowed:
                answered(StatusError(Refusal.NOT_PERMITTED, verdict.reason))
                return
        client.link.ask(call, answered)

    def _done(self, method: Method, tally: Tally, call: Call, result: Any) -> None:
        if isinstance(result, CallError):
            tally.ended(-result.code, call.age_s)
            call.end(result.code, str(result))
            return
        if isinstance(result, Exception):
            result = method.response(status=status_of(result))
            result = [result] if method.streams else result
        if method.streams:
            answers: Sequence[Any] = result
            tally.ended(answers[0].status.code if answers else Code.OK, call.age_s)
            call.reply_all([answer.SerializeToString() for answer in answers])
        else:
            tally.ended(result.status.code, call.age_s)
            call.reply(result.SerializeToString())
