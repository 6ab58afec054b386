"""`sluice mcp`: the questions of an assistant, over its standard input or over HTTP."""

import asyncio
import base64
import binascii
import contextlib
from typing import Any

import click

from sluicemq.cli.output import Access, client_options
from sluicemq.cli.servers.console import accounts_option, default_path
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.console.accounts import LOOPBACKS, NAME_LENGTH_MAX, Accounts, require_accounts
from sluicemq.console.sessions import Throttle
from sluicemq.errors import ConfigurationError, install_extra

PORT = 8083
CHECKS_MAX = 2
"""Secrets that are checked at once: each takes 32 MiB and a tenth of a second."""


@click.command()
@client_options
@click.option("--http", is_flag=True, help="Serve HTTP (path /mcp) instead of standard input.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=PORT, show_default=True,
    help="Port to listen at.",
)  # fmt: skip
@accounts_option
def mcp(access: Access, http: bool, host: str, port: int, path: str | None) -> None:
    """Answer an assistant's questions about a cluster (Model Context Protocol); change nothing.

    All is asked by the account of the options. With --http who asks needs an account of the
    console (HTTP basic), except at 127.0.0.1 while there is none.
    """
    try:
        from sluicemq.operate.mcp import server_of  # noqa: PLC0415 - the extra may be missing
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"sluice mcp needs the package {error.name}.", fix=install_extra("mcp")
        ) from error
    server = server_of(access.admin, SYSTEM_CLOCK)
    if not http:
        with contextlib.suppress(KeyboardInterrupt):
            server.run("stdio")
        return
    import uvicorn  # noqa: PLC0415 - comes with the extra

    from sluicemq.console.http_limits import BoundedBody, uvicorn_options  # noqa: PLC0415 - as uvicorn

    accounts = Accounts(path or default_path())
    require_accounts(accounts, host, "sluice mcp")
    inner = server.streamable_http_app(host=host, stateless_http=True)
    app = SignedIn(BoundedBody(inner), accounts, is_open=host in LOOPBACKS)
    click.echo(f"ready mcp=http://{host}:{port}/mcp")
    # Who asks is who connects: what a header says of it anybody may write.
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.run(
            app, host=host, port=port, log_level="warning", server_header=False,
            proxy_headers=False, **uvicorn_options(),
        )  # fmt: skip


class SignedIn:
    """Lets in who has an account, of any role: nothing here changes anything. `is_open`: while
    there are no accounts, everybody; else nobody then, also when the last one was removed."""

    def __init__(
        self, app: Any, accounts: Accounts, *, is_open: bool, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._app, self._accounts, self._is_open = app, accounts, is_open
        self._throttle, self._checks = Throttle(clock), asyncio.Semaphore(CHECKS_MAX)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        status = 200
        if scope["type"] == "http":
            address, _ = scope.get("client") or ("", 0)
            status = await self._status(dict(scope["headers"]), address)
        if status == 200:
            await self._app(scope, receive, send)
            return
        headers = [(b"www-authenticate", b'Basic realm="sluicemq"')] if status == 401 else []
        text = b"sign in with an account\n" if status == 401 else b"wrong too often: wait\n"
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def _status(self, headers: dict[bytes, bytes], address: str) -> int:
        """200, 401 or 429, of whoever is named in the headers."""
        if self._is_open and not self._accounts.load():
            return 200
        name, secret = named(headers)
        if not name or len(name) > NAME_LENGTH_MAX:
            return 401
        async with self._checks:
            if self._throttle.wait_s(name, address) > 0:
                return 429
            self._throttle.add_failure(name, address)  # before it is known: two are checked at once
            if await asyncio.to_thread(self._accounts.authenticate, name, secret) is None:
                return 401
            self._throttle.add_success(name, address)
            return 200


def named(headers: dict[bytes, bytes]) -> tuple[str, str]:
    """Name and secret of HTTP basic; empty where there are none."""
    kind, _, text = headers.get(b"authorization", b"").partition(b" ")
    try:
        name, _, secret = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return "", ""
    return (name, secret) if kind.lower() == b"basic" else ("", "")
