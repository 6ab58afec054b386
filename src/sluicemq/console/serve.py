"""Serving the console: where it listens, and who is let in.

It listens at the loopback, where a link with a token lets in whoever started it. At another address
everybody on the network can ask, so there it wants accounts.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Final

import uvicorn

from sluicemq.client.tasks import Tasks
from sluicemq.console import sign_in
from sluicemq.console.accounts import LOOPBACKS, check_listening
from sluicemq.console.app import Console
from sluicemq.console.http_limits import uvicorn_options
from sluicemq.console.table import PAGES
from sluicemq.errors import ConfigurationError
from sluicemq.model.addresses import format_address

CLOSE_S: Final = 5


@contextlib.asynccontextmanager
async def serving(console: Console, host: str, port: int) -> AsyncIterator[str]:
    """Serves for the time of the block; gives the address to open, with the link's token on the
    loopback without accounts. Raises ConfigurationError."""
    check_listening(console.accounts, host, "the console")
    app = console.app(PAGES, sign_in.routes(console))
    listening = listen(host, port)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="on",
        proxy_headers=False,  # who asks is who connects: what a header says anybody may write
        timeout_graceful_shutdown=CLOSE_S, **uvicorn_options(),
    )  # fmt: skip
    server = uvicorn.Server(config)
    listening.listen()  # who comes before it serves waits
    tasks = Tasks()
    # Not `serve`, which takes the signals of the process.
    task = tasks.spawn(server._serve([listening]), "console")
    try:
        yield address_of(console, host, listening.getsockname()[1])
    finally:
        server.should_exit = True
        await asyncio.wait({task})


def address_of(console: Console, host: str, port: int) -> str:
    """What to open in a browser."""
    base = f"http://{format_address(host, port)}/"
    if host in LOOPBACKS and not console.accounts.all():
        return f"{base[:-1]}{sign_in.LINK}?token={console.sessions.new_link()}"
    return base


def listen(host: str, port: int) -> socket.socket:
    """A socket of this address. Raises ConfigurationError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"the console cannot listen at {host}:{port}: {error.strerror or error}.",
            fix="Choose another port with --port, or 0 for a free one.",
        ) from error
    return made
