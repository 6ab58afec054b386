"""Serve the console: its socket, and who may use it.

On the loopback interface without accounts, a link with a token admits the user who started the
console. At other addresses everyone on the network can connect, so accounts are required there.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Final

import uvicorn

from sluicemq.client.tasks import Tasks
from sluicemq.console import sign_in
from sluicemq.console.accounts import LOOPBACKS, require_accounts
from sluicemq.console.app import Console
from sluicemq.console.http_limits import uvicorn_options
from sluicemq.console.table import PAGES
from sluicemq.errors import ConfigurationError
from sluicemq.model.addresses import format_address

CLOSE_S: Final = 5
"""The time that requests have to finish when the server closes."""


@contextlib.asynccontextmanager
async def run_server(console: Console, host: str, port: int) -> AsyncIterator[str]:
    """Return a context manager that serves the console; its value is the address to open.

    At 127.0.0.1 without accounts, the address contains a token by which the user signs in. Raises
    ConfigurationError if accounts are required, or if the server cannot listen at this address.
    """
    require_accounts(console.accounts, host, "The console")
    app = console.build_app(PAGES, sign_in.routes(console))
    listening_socket = open_socket(host, port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        # The address of a client is that of its connection: any client can write a header.
        proxy_headers=False,
        timeout_graceful_shutdown=CLOSE_S,
        **uvicorn_options(),
    )
    server = uvicorn.Server(config)
    # From now on, early connections wait until the server accepts them.
    listening_socket.listen()
    bound_port = listening_socket.getsockname()[1]
    tasks = Tasks()
    # `serve` would take over the signals of the process.
    server_task = tasks.spawn(server._serve([listening_socket]), "console")
    try:
        yield browser_address(console, host, bound_port)
    finally:
        server.should_exit = True
        await asyncio.wait({server_task})


def browser_address(console: Console, host: str, port: int) -> str:
    """Return the address to open in a browser.

    Without accounts, on this machine only, it contains a new token by which the user signs in.
    """
    site = f"http://{format_address(host, port)}"
    if host in LOOPBACKS and not console.accounts.load():
        return f"{site}{sign_in.LINK}?token={console.sessions.create_link()}"
    return f"{site}/"


def open_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to the address; port 0 takes a free port.

    Raises ConfigurationError if the address cannot be bound.
    """
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound_socket = socket.socket(family, socket_type, protocol)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(address)
    except OSError as error:
        raise ConfigurationError(
            f"The console cannot listen at {host}:{port}: {error.strerror or error}.",
            fix="Choose another port with --port, or 0 for a free one.",
        ) from error
    return bound_socket
