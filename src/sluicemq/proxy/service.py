"""The dispatch of calls of `apache.rocketmq.v2.MessagingService` to conversations.

    bytes -> request message -> client and account (metadata, signature)
          -> conversation -> response messages -> bytes

Each method of the protocol is a generator `(client, request, call) -> response`. Its result is one
message, or the list of all messages if the method streams its response. The generator yields the
requests to brokers, and each request is checked against the permissions of the account that signed
the call. An error becomes a status in an ordinary response, as clients expect (spec/grpc.md §1). A
StatusError has its own status; a broker's response code is translated by the table of spec/grpc.md
§2.

In a bidirectional stream (`BidirectionalCall`), a conversation runs for each message that arrives,
one after another, and the stream stays open after its responses. An error ends the call.

`server.method_table` lists the methods.
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
from sluicemq.client.core import conversations
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
from sluicemq.proxy.backend import ConversationRunner, OnResponse
from sluicemq.proxy.clients import Client, Clients
from sluicemq.proxy.limits import Refusal, StatusError, check_shape
from sluicemq.proxy.messages import Code
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

PATH: Final = "/apache.rocketmq.v2.MessagingService/"
"""The prefix of the path of each method."""
AUTHORIZATION: Final = "authorization"
"""The metadata key of the signature."""
DATE_TIME: Final = "x-mq-date-time"
"""The metadata key of the date that is part of the signature."""
TELEMETRY_FAILED: Final = "process client telemetryCommand failed. "
"""RocketMQ's prefix of each error that ends a telemetry stream."""

_CODE_BY_RESPONSE: Final[Mapping[int, Code]] = {
    ResponseCode.SUCCESS: Code.OK,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.QUERY_NOT_FOUND: Code.OFFSET_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
    # RocketMQ's proxy returns INTERNAL_SERVER_ERROR for these two. But a retry cannot succeed.
    ResponseCode.MESSAGE_ILLEGAL: Code.BAD_REQUEST,
    ResponseCode.INVALID_PARAMETER: Code.BAD_REQUEST,
}


def to_status(error: Exception) -> m.Status:
    """Return the status that a client gets for an error.

    An error that is not a SluiceError is a bug: it is logged, and the client gets only its class
    name.
    """
    code = Code.INTERNAL_SERVER_ERROR
    message = str(error)
    if isinstance(error, StatusError):
        code = error.code
    elif isinstance(error, RequestError):
        code = _CODE_BY_RESPONSE.get(error.code, code)
        message = error.remark
    elif isinstance(error, RouteNotFoundError):
        code = Code.TOPIC_NOT_FOUND
        message = f"{Refusal.TOPIC_UNKNOWN.phrase}: {message}"
    elif isinstance(error, RequestTimeoutError | ConnectionLostError):
        code = Code.PROXY_TIMEOUT
    elif not isinstance(error, SluiceError):
        log.error("A call failed because of a bug in the proxy.", exc_info=error)
        message = type(error).__name__
    return m.Status(code=code, message=message)


_GRPC_STATUS_BY_CODE: Final[Mapping[int, StatusCode]] = {
    Code.UNAUTHORIZED: StatusCode.UNAUTHENTICATED,
    Code.FORBIDDEN: StatusCode.PERMISSION_DENIED,
    Code.TOO_MANY_REQUESTS: StatusCode.RESOURCE_EXHAUSTED,
}


def to_call_error(error: Exception) -> CallError:
    """Return the gRPC error that ends a call because of `error`.

    Its gRPC status says whether the client or the server caused the error. Its text ends with
    RocketMQ's code in parentheses, as in `… (40000 BAD_REQUEST)`. A CallError is returned
    unchanged.
    """
    if isinstance(error, CallError):
        return error
    status = to_status(error)
    # RocketMQ's codes 40000 to 49999 blame the client, as the codes 400 to 499 of HTTP.
    is_client_error = Code.BAD_REQUEST <= status.code < Code.INTERNAL_ERROR
    default_code = StatusCode.INVALID_ARGUMENT if is_client_error else StatusCode.INTERNAL
    grpc_code = _GRPC_STATUS_BY_CODE.get(status.code, default_code)
    return CallError(grpc_code, f"{status.message} ({status.code:d} {Code(status.code).name})")


def to_telemetry_error(error: Exception) -> CallError:
    """Return the gRPC error that ends a telemetry stream because of `error`.

    Its text begins with RocketMQ's prefix `TELEMETRY_FAILED`. As in RocketMQ, there is no prefix
    for settings without publishing and subscription data.
    """
    end = to_call_error(error)
    if isinstance(error, StatusError) and error.refusal is Refusal.SETTINGS_EMPTY:
        return end
    return CallError(end.code, f"{TELEMETRY_FAILED}{end}")


class Method(NamedTuple):
    """A method of the protocol, with the classes of its messages.

    `streams_responses` means that the response is a stream. `is_bidirectional` means that the
    client streams too, and that a conversation runs for each of its messages.
    """

    request: type[Any]
    response: type[Any]
    conversation: Callable[..., conversations.Conversation[Any]]
    streams_responses: bool = False
    is_bidirectional: bool = False


PENDING_MESSAGES_MAX: Final = 64
"""The maximum number of messages of one bidirectional stream that wait to be processed."""


class BidirectionalCall:
    """A bidirectional stream, whose messages are processed one after another.

    The call ends when the client has half-closed it and all of its messages have been processed.
    """

    __slots__ = ("_call", "_is_running", "_pending", "_pending_bytes", "_start")

    def __init__(self, call: Call, start: Callable[[Callable[[Any], None], bytes], None]) -> None:
        """Process the messages of `call`, one at a time.

        `start(on_done, message)` starts to process the bytes of one message. It calls `on_done`
        with the list of responses or with an exception.
        """
        self._call = call
        self._start = start
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._is_running = False
        call.on_half_close = self._start_next

    def receive(self, message: bytes, call: Call) -> None:
        """Start to process a message, or queue it while another one is being processed.

        Raises CallError if more than `PENDING_MESSAGES_MAX` messages, or `MESSAGE_BYTES_MAX` bytes
        of messages, are queued.
        """
        self._pending.append(message)
        self._pending_bytes += len(message)
        if len(self._pending) > PENDING_MESSAGES_MAX or self._pending_bytes > MESSAGE_BYTES_MAX:
            raise CallError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"{len(self._pending)} messages with {self._pending_bytes} bytes are waiting to be "
                f"processed; the limits are {PENDING_MESSAGES_MAX} and {MESSAGE_BYTES_MAX}.",
            )
        self._start_next()

    def _start_next(self) -> None:
        """Start to process the next queued message, unless one is being processed.

        If no message is queued and the client has closed its side of the stream, end the call.
        """
        if self._is_running or self._call.is_closed:
            return
        if self._pending:
            self._is_running = True
            message = self._pending.popleft()
            self._pending_bytes -= len(message)
            self._start(self._finish, message)
        elif self._call.is_half_closed:
            self._call.end()

    def _finish(self, outcome: Sequence[Any] | Exception) -> None:
        """Send the responses to a message, and start the next one.

        `outcome` is the list of responses or an exception. An exception ends the call with its
        error.
        """
        self._is_running = False
        if isinstance(outcome, Exception):
            error = to_telemetry_error(outcome)
            self._call.end(error.code, str(error))
            return
        for response in outcome:
            self._call.send(response.SerializeToString())
        self._start_next()


LATENCY_BOUNDS_MS: Final = (1, 3, 5, 7, 10, 100, 1000, 2000, 3000)
"""The bucket bounds of RocketMQ's metric rocketmq_rpc_latency, in milliseconds."""


class MethodStats:
    """Counters for the calls of one method.

    A call that its client has cancelled is counted too, and is in flight until its conversation
    ends. The latency includes the time of a long poll.
    """

    __slots__ = ("_counts", "count_by_status", "latency_sum_ms", "started_count")

    def __init__(self) -> None:
        """Create the counters of a method; all are 0."""
        self.started_count = 0
        self.count_by_status: Counter[int] = Counter()
        """The number of ended calls by status code; a gRPC status is negative."""
        self.latency_sum_ms = 0.0
        # The number of calls in each bucket of the latency histogram; the last one has no bound.
        self._counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)

    def record_end(self, code: int, age_s: float) -> None:
        """Count an ended call with its status and its age in seconds. Hot path."""
        age_ms = age_s * 1000
        self.count_by_status[code] += 1
        self.latency_sum_ms += age_ms
        self._counts[bisect_left(LATENCY_BOUNDS_MS, age_ms)] += 1

    @property
    def ended_count(self) -> int:
        """The number of ended calls."""
        return sum(self._counts)

    @property
    def in_flight_count(self) -> int:
        """The number of calls that have started and not ended."""
        return self.started_count - self.ended_count

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """The cumulative latency histogram: pairs of an upper bound in ms and a number of calls.

        The bounds are texts, the last one "+Inf". Each number counts all calls up to its bound.
        """
        bounds = [*(f"{bound:.1f}" for bound in LATENCY_BOUNDS_MS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))

    @property
    def count_by_status_name(self) -> dict[str, int]:
        """The number of ended calls by the name of their status."""
        return {_status_name(code): count for code, count in self.count_by_status.copy().items()}


def _status_name(code: int) -> str:
    """Return the name of a status code of RocketMQ.

    A negative code is a gRPC status, which gives "grpc NAME". An unknown code is returned as a
    string.
    """
    if code < 0:
        return f"grpc {StatusCode(-code).name}"
    for known_code in Code:
        if known_code == code:
            return known_code.name
    return f"{code}"


class CallDispatcher:
    """The handlers of all methods, for a `net.grpc.GrpcServer`."""

    def __init__(
        self, clients: Clients, guard: Guard | None, clock: Clock, limits: ProxyLimits
    ) -> None:
        """Create a dispatcher without methods. `bind_methods` adds them.

        `guard` decides which account may do what; None means that everything is allowed.
        """
        self.clients = clients
        self.guard = guard
        self._clock = clock
        self._limits = limits
        self.stats_by_method: dict[str, MethodStats] = {}
        """The counters of each method.

        Bidirectional streams are not counted, because they last as long as their clients.
        """

    def bind_methods(self, table: Mapping[str, Method]) -> dict[str, Handler]:
        """Return the handlers of methods by their gRPC path, and create the methods' counters.

        `table` has the methods by name.
        """
        self.stats_by_method = {}
        handlers: dict[str, Handler] = {}
        for name, method in table.items():
            if method.is_bidirectional:
                handlers[PATH + name] = partial(self._start_bidirectional, method)
            else:
                stats = self.stats_by_method[name] = MethodStats()
                handlers[PATH + name] = partial(self._handle_unary, method, stats)
        return handlers

    def authenticate(self, call: Call) -> Account | None:
        """Return the account that signed a call, or None if the caller may do everything.

        The date of the signature is compared with the time at which the call began, because a
        telemetry stream lasts for days with the headers of its beginning. Raises StatusError if the
        signature is missing or wrong, or if its date differs by more than `ProxyLimits.date_s_max`
        seconds.
        """
        if self.guard is None:
            return None
        headers = call.headers
        peer = call.connection.peer
        began_ms = self._clock.now_ms() - int(call.age_s * 1000)
        verdict = self.guard.identify_call(
            headers.get(AUTHORIZATION, ""),
            headers.get(DATE_TIME, ""),
            peer.remote.address,
            now_ms=began_ms,
            age_s_max=self._limits.date_s_max,
        )
        if not verdict.is_allowed:
            if not peer.is_trusted:
                peer.count_refusal()
            raise StatusError(Refusal.NOT_AUTHENTICATED, verdict.reason)
        peer.is_trusted = True
        return verdict.account

    def _handle_unary(self, method: Method, stats: MethodStats, message: bytes, call: Call) -> None:
        """Count the start of a call, and process its only request message."""
        stats.started_count += 1
        self._start(method, call, partial(self._finish, method, stats, call), message)

    def _start_bidirectional(self, method: Method, message: bytes, call: Call) -> None:
        """Process the first message of a bidirectional stream, and prepare for the next ones."""
        bidirectional = BidirectionalCall(call, partial(self._start, method, call))
        call.on_message = bidirectional.receive
        bidirectional.receive(message, call)

    def _start(
        self, method: Method, call: Call, on_done: Callable[[Any], None], message: bytes
    ) -> None:
        """Decode a request message, authenticate it, and start the method that it calls.

        `on_done` is called once with the result or an exception, possibly before this method
        returns.
        """
        try:
            # Before the message is decoded, because that could take long.
            check_shape(message, has_bodies=method.request is m.SendMessageRequest)
        except StatusError as error:
            on_done(error)
            return

        try:
            request = method.request.FromString(message)
        except Exception:  # noqa: BLE001 - protobuf raises several classes
            reason = f"The request is not a valid {method.request.__name__}."
            on_done(CallError(StatusCode.INVALID_ARGUMENT, reason))
            return

        try:
            account = self.authenticate(call)
            access_key = "" if account is None else account.access_key
            client = self.clients.identify(call, access_key)
        except StatusError as error:
            on_done(error)
            return

        ConversationRunner(
            method.conversation(client, request, call),
            partial(self.send_request, client, account),
            on_done,
        )

    def check_permission(self, code: int, call: Call) -> None:
        """Raise CallError unless the account of the call may send requests with this code.

        `code` is a request code of the remoting protocol.
        """
        try:
            account = self.authenticate(call)
        except StatusError as error:
            raise to_call_error(error) from error
        if self.guard is not None:
            verdict = self.guard.check_for_account(account, code, {}, b"")
            if not verdict.is_allowed:
                raise CallError(StatusCode.PERMISSION_DENIED, verdict.reason)

    def send_request(
        self,
        client: Client,
        account: Account | None,
        call: conversations.Call,
        on_response: OnResponse,
    ) -> None:
        """Send a client's request to a broker, if the account has the permission for it.

        `on_response` is called once, with the broker's response or an exception. The exception is a
        StatusError (FORBIDDEN) without the permission, and a ProtocolError if the request is
        malformed.
        """
        if self.guard is not None:
            command = call.command
            try:
                verdict = self.guard.check_for_account(
                    account, command.code, command.fields or {}, bytes(command.body)
                )
            except ProtocolError as error:
                on_response(error)
                return
            if not verdict.is_allowed:
                on_response(StatusError(Refusal.NOT_PERMITTED, verdict.reason))
                return
        client.session.send(call, on_response)

    def _finish(self, method: Method, stats: MethodStats, call: Call, outcome: Any) -> None:
        """Count an ended call, and send its response or its gRPC error.

        `outcome` is an exception, a response, or a list of responses for a method that streams
        them.
        """
        if isinstance(outcome, CallError):
            stats.record_end(-outcome.code, call.age_s)
            call.end(outcome.code, str(outcome))
            return

        if isinstance(outcome, Exception):
            error_response = method.response(status=to_status(outcome))
            outcome = [error_response] if method.streams_responses else error_response
        if method.streams_responses:
            responses: Sequence[Any] = outcome
            # A call that its client has ended has no responses.
            code = responses[0].status.code if responses else Code.OK
            stats.record_end(code, call.age_s)
            call.reply_all([response.SerializeToString() for response in responses])
        else:
            stats.record_end(outcome.status.code, call.age_s)
            call.reply(outcome.SerializeToString())
