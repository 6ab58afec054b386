"""Limits for HTTP connections to the console and to `sluice mcp`.

uvicorn serves both. It limits the bytes of a request's head (64 KiB) and closes idle connections.
It does not limit the time that a head or a body takes, the bytes of a body, or the number of
connections; this module does. A connection that exceeds a limit is closed, and a body that is too
large is answered with 413.
"""

import asyncio
from typing import Any, Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sluicemq.numbers import natural

CONNECTIONS_MAX: Final = 512
HEAD_S: Final = 10.0
"""The time in which the head of a request must be complete.

It is counted from the start of the connection, or from the last response.
"""
BODY_S: Final = 60.0
"""The time in which the body of a request must be complete, counted from its head."""
BODY_BYTES_MAX: Final = 1024 * 1024


class BoundedProtocol(H11Protocol):
    """An HTTP connection that is closed if a head or a body takes too long.

    A connection is also closed if there are more than `CONNECTIONS_MAX`. It is checked every
    `HEAD_S` seconds.
    """

    _check_timer: asyncio.TimerHandle | None = None
    _last_state: tuple[object, bool] = (None, True)
    """The request that was current at the last check, and whether it was answered by then."""
    _last_state_s = 0.0
    """The time of the check that found `_last_state` first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close a new connection if there are too many, else schedule its first check."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
            return
        self._last_state_s = self.loop.time()
        self._check_timer = self.loop.call_later(HEAD_S, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the next check. asyncio calls this when the connection has closed."""
        if self._check_timer is not None:
            self._check_timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        """Close the connection if the client sends its request too slowly, else check again later.

        The head of a request must arrive within `HEAD_S` seconds, and its body within `BODY_S`. The
        time is measured from the first check that has seen the present state.
        """
        cycle = self.cycle  # uvicorn's object for the current request and its response
        is_between_requests = cycle is None or cycle.response_complete
        if (cycle, is_between_requests) != self._last_state:
            self._last_state = (cycle, is_between_requests)
            self._last_state_s = self.loop.time()

        limit_s = HEAD_S if is_between_requests else BODY_S
        waits_for_client = is_between_requests or cycle.more_body
        if waits_for_client and self.loop.time() - self._last_state_s >= limit_s:
            self.transport.abort()
            return
        self._check_timer = self.loop.call_later(HEAD_S, self._check)


class BoundedBody:
    """An ASGI application that passes requests on to another, and refuses large bodies."""

    def __init__(self, app: ASGIApp, bytes_max: int = BODY_BYTES_MAX) -> None:
        """Pass requests on to `app` if their body has at most `bytes_max` bytes."""
        self._app = app
        self._bytes_max = bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application.

        The response is 413 if the body is too large or its Content-Length is not a number. If the
        application has started its response by then, nothing more is sent.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        bytes_left = self._bytes_max
        has_responded = False

        async def receive_bounded() -> Message:
            nonlocal bytes_left
            message = await receive()
            bytes_left -= len(message.get("body", b""))
            if bytes_left < 0:
                raise TooLargeError
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal has_responded
            has_responded = True
            await send(message)

        try:
            declared_length = dict(scope["headers"]).get(b"content-length", b"0")
            if natural(declared_length, self._bytes_max) is None:
                raise TooLargeError  # noqa: TRY301 - handled like a body without a length
            await self._app(scope, receive_bounded, send_and_note)
        except TooLargeError:
            if not has_responded:
                refusal = f"The request body is too large: the limit is {self._bytes_max} bytes.\n"
                await PlainTextResponse(refusal, 413)(scope, receive, send)


class TooLargeError(Exception):
    """The body of a request is larger than its limit."""


def uvicorn_options() -> dict[str, Any]:
    """Return the options of uvicorn that bound its connections."""
    return {"http": BoundedProtocol, "ws": "none", "timeout_keep_alive": 5, "backlog": 128}
