"""`sluice mcp`: a server of the Model Context Protocol, on standard input or over HTTP."""

import asyncio
import base64
import binascii
import contextlib
from typing import Any

import click

from sluicemq.cli.output import Access, client_options
from sluicemq.cli.servers.console import accounts_option, default_accounts_path
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.console.accounts import LOOPBACKS, NAME_LENGTH_MAX, Accounts, require_accounts
from sluicemq.console.sessions import Throttle
from sluicemq.errors import ConfigurationError, install_extra

PORT = 8083
CHECKS_MAX = 2
"""The number of secrets that are checked at the same time. Each check takes 32 MiB and 0.1 s."""


@click.command()
@client_options
@click.option(
    "--http", is_flag=True, help="Serve HTTP at the path /mcp, instead of standard input."
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="IP address at which the HTTP server listens. Any other address requires accounts.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=PORT,
    show_default=True,
    help="Port at which the HTTP server listens.",
)
@accounts_option
def mcp(access: Access, http: bool, host: str, port: int, path: str | None) -> None:
    """Serve an AI assistant that asks about a cluster (Model Context Protocol), read-only.

    --access-key and --secret-key are the account with which the server sends requests to the
    cluster. With --http, clients sign in with an account of the console (HTTP basic), except at
    127.0.0.1 if there are no accounts.
    """
    try:
        from sluicemq.operate.mcp import server_of  # noqa: PLC0415 - optional packages
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"sluice mcp needs the package {error.name}, which is not installed.",
            fix=install_extra("mcp"),
        ) from error
    server = server_of(access.admin, SYSTEM_CLOCK)
    if http:
        _serve_http(server, host, port, Accounts(path or default_accounts_path()))
        return
    with contextlib.suppress(KeyboardInterrupt):
        server.run("stdio")


def _serve_http(server: Any, host: str, port: int, accounts: Accounts) -> None:
    """Serve the MCP server over HTTP at the path /mcp, until Ctrl-C.

    Clients sign in with one of `accounts`. If there are none, only `host` 127.0.0.1 is allowed, and
    clients need not sign in; otherwise ConfigurationError is raised.
    """
    import uvicorn  # noqa: PLC0415 - optional package

    from sluicemq.console.http_limits import BoundedBody, uvicorn_options  # noqa: PLC0415 - imports uvicorn

    require_accounts(accounts, host, "sluice mcp")
    mcp_app = server.streamable_http_app(host=host, stateless_http=True)
    app = BasicAuthentication(BoundedBody(mcp_app), accounts, is_open=host in LOOPBACKS)
    click.echo(f"ready mcp=http://{host}:{port}/mcp")
    # `proxy_headers` stays off: any client could claim another address, and evade the throttle.
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.run(
            app,
            host=host,
            port=port,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            **uvicorn_options(),
        )


class BasicAuthentication:
    """An ASGI application that passes requests of signed-in clients to another one.

    Clients sign in with HTTP basic authentication and an account of any role, because the wrapped
    application changes nothing. If there are no accounts, also after the last one was removed, all
    requests are passed if `is_open` is True, and refused otherwise.
    """

    def __init__(
        self, app: Any, accounts: Accounts, *, is_open: bool, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Wrap the ASGI application `app`, so that clients must sign in with one of `accounts`.

        If `is_open` is True and there are no accounts, all requests are allowed.
        """
        self._app = app
        self._accounts = accounts
        self._is_open = is_open
        self._throttle = Throttle(clock)
        self._checks = asyncio.Semaphore(CHECKS_MAX)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection of ASGI: pass it on, or respond with 401 or 429."""
        status = 200
        if scope["type"] == "http":
            address, _ = scope.get("client") or ("", 0)
            status = await self._check_request(dict(scope["headers"]), address)
        if status == 200:
            await self._app(scope, receive, send)
            return

        headers = []
        body = b"too many failed attempts: wait\n"
        if status == 401:
            headers.append((b"www-authenticate", b'Basic realm="sluicemq"'))
            body = b"sign in with an account\n"
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _check_request(self, headers: dict[bytes, bytes], address: str) -> int:
        """Return the HTTP status for a request: 200 (go on), 401 (sign in) or 429 (wait).

        `headers` are the request's headers, and `address` is the client's IP address. Failed
        attempts are counted for the name and for the address; too many of them give 429.
        """
        if self._is_open and not self._accounts.load():
            return 200
        name, secret = parse_basic_credentials(headers)
        if not name or len(name) > NAME_LENGTH_MAX:
            return 401
        async with self._checks:
            if self._throttle.wait_s(name, address) > 0:
                return 429
            # Counted as failed before the check, because another check may run at the same time.
            self._throttle.add_failure(name, address)
            if await asyncio.to_thread(self._accounts.authenticate, name, secret) is None:
                return 401
            self._throttle.add_success(name, address)
            return 200


def parse_basic_credentials(headers: dict[bytes, bytes]) -> tuple[str, str]:
    """Return (name, secret) of HTTP basic authentication, ("", "") if the headers have none."""
    scheme, _, encoded = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"basic":
        return "", ""
    try:
        name_and_secret = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    name, _, secret = name_and_secret.partition(":")
    return name, secret
