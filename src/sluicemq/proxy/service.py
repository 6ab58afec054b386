"""Calls of `apache.rocketmq.v2.MessagingService`: from their bytes to a talk, and to an answer.

    bytes -> request message -> who asks (metadata, signature) -> Talk -> answer messages -> bytes

A method is a generator `(client, request, call) -> answer`: one message, or all of those of a call
that streams. It yields the requests for brokers; each is checked against the rights of the account
that signed the call. What goes wrong is a status inside an ordinary answer, as the clients expect
(spec/grpc.md §1): a StatusError as it says, what a broker refuses by the table of spec/grpc.md §2.

In `server.table` stands which method is whose.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from sluicemq.acl.guard import Guard
from sluicemq.acl.rules import Account
from sluicemq.client.core import talks
from sluicemq.errors import (
    ConnectionLostError,
    ProtocolError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.net.grpc import Call, CallError, Handler, StatusCode
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Answered, Conversation
from sluicemq.proxy.clients import Client, Clients, StatusError
from sluicemq.proxy.messages import Code
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

PATH: Final = "/apache.rocketmq.v2.MessagingService/"
AUTHORIZATION: Final = "authorization"
DATE_TIME: Final = "x-mq-date-time"

_OF_BROKER: Final[Mapping[int, Code]] = {
    ResponseCode.SUCCESS: Code.OK,
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.QUERY_NOT_FOUND: Code.OFFSET_NOT_FOUND,
    ResponseCode.SUBSCRIPTION_PARSE_FAILED: Code.ILLEGAL_FILTER_EXPRESSION,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.NO_PERMISSION: Code.FORBIDDEN,
}


def status_of(error: Exception) -> m.Status:
    """What a client is told of an error; of a bug only its kind."""
    code, text = Code.INTERNAL_SERVER_ERROR, str(error)
    if isinstance(error, StatusError):
        code = error.code
    elif isinstance(error, RequestError):
        code, text = _OF_BROKER.get(error.code, code), error.remark
    elif isinstance(error, RouteNotFoundError):
        code = Code.TOPIC_NOT_FOUND
    elif isinstance(error, RequestTimeoutError | ConnectionLostError):
        code = Code.PROXY_TIMEOUT
    elif not isinstance(error, SluiceError):
        log.error("a call failed", exc_info=error)
        text = type(error).__name__
    return m.Status(code=code, message=text)


class Method(NamedTuple):
    """A method, and its messages. `streams`: it answers with a list."""

    request: type[Any]
    response: type[Any]
    talk: Callable[..., talks.Talk[Any]]
    streams: bool = False


class Calls:
    """Methods by path, for a `net.grpc.GrpcServer`."""

    def __init__(self, clients: Clients, guard: Guard | None) -> None:
        self.clients = clients
        self.guard = guard

    def methods(self, table: Mapping[str, Method]) -> dict[str, Handler]:
        """Those of a table: name -> method, bound to its family."""
        return {PATH + name: partial(self._handle, method) for name, method in table.items()}

    def account(self, call: Call) -> Account | None:
        """Who signed a call; None: somebody who may do all. Raises StatusError."""
        if self.guard is None:
            return None
        headers, host = call.headers, call.connection.peer.remote.address
        verdict = self.guard.identify_call(
            headers.get(AUTHORIZATION, ""), headers.get(DATE_TIME, ""), host
        )
        if not verdict.is_allowed:
            raise StatusError(Code.UNAUTHORIZED, verdict.reason)
        return verdict.account

    def _handle(self, method: Method, data: bytes, call: Call) -> None:
        try:
            request = method.request.FromString(data)
        except Exception as error:
            raise CallError(
                StatusCode.INVALID_ARGUMENT, f"This is no {method.request.__name__}."
            ) from error
        done = partial(self._done, method, call)
        try:
            account = self.account(call)
            client = self.clients.of(call)
        except StatusError as error:
            done(error)
            return
        Conversation(method.talk(client, request, call), partial(self.ask, client, account), done)

    def ask(
        self, client: Client, account: Account | None, call: talks.Call, answered: Answered
    ) -> None:
        """A request of a client to a broker, if the account may make it."""
        if self.guard is not None:
            command = call.command
            try:
                verdict = self.guard.check_as(
                    account, command.code, command.fields or {}, bytes(command.body)
                )
            except ProtocolError as error:
                answered(error)
                return
            if not verdict.is_allowed:
                answered(StatusError(Code.FORBIDDEN, verdict.reason))
                return
        client.link.ask(call, answered)

    def _done(self, method: Method, call: Call, result: Any) -> None:
        if isinstance(result, Exception):
            result = method.response(status=status_of(result))
            result = [result] if method.streams else result
        if method.streams:
            answers: Sequence[Any] = result
            call.reply_all([answer.SerializeToString() for answer in answers])
        else:
            call.reply(result.SerializeToString())
