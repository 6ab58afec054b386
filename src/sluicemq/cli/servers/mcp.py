"""`sluice mcp`: the questions of an assistant, over its standard input or over HTTP."""

import asyncio
import base64
import binascii
from typing import Any

import click

from sluicemq.cli.output import Access, client_options
from sluicemq.cli.servers.console import default_path
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.console.accounts import Accounts
from sluicemq.errors import ConfigurationError, install_extra

PORT = 8083
LOOPBACKS = frozenset({"127.0.0.1", "::1", "localhost"})


@click.command()
@client_options
@click.option("--http", is_flag=True, help="Serve HTTP (path /mcp) instead of standard input.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(1, 65535), default=PORT, show_default=True,
    help="Port to listen at.",
)  # fmt: skip
@click.option(
    "--accounts", "path", type=click.Path(dir_okay=False),
    help="File of the console's accounts (~/.config/sluicemq/console.json).",
)  # fmt: skip
def mcp(access: Access, http: bool, host: str, port: int, path: str | None) -> None:
    """Answer an assistant's questions about a cluster (Model Context Protocol); change nothing.

    All is asked by the account of the options. With --http who asks needs an account of the
    console (HTTP basic), except at 127.0.0.1 while there is none.
    """
    try:
        from sluicemq.operate.mcp import server_of  # noqa: PLC0415 - the extra may be missing
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"sluice mcp needs the package {error.name}.", cure=install_extra("mcp")
        ) from error
    server = server_of(access.admin, SYSTEM_CLOCK)
    if not http:
        server.run("stdio")
        return
    import uvicorn  # noqa: PLC0415 - comes with the extra

    accounts = Accounts(path or default_path())
    if host not in LOOPBACKS and not accounts.all():
        raise ConfigurationError(
            f"sluice mcp would listen at {host} without accounts.",
            cure="Add one with `sluice console account add`, or listen at 127.0.0.1.",
        )
    app = SignedIn(server.streamable_http_app(host=host, stateless_http=True), accounts)
    click.echo(f"ready mcp=http://{host}:{port}/mcp")
    uvicorn.run(app, host=host, port=port, log_level="warning", server_header=False)


class SignedIn:
    """Lets in who has an account, of any role: nothing here changes anything."""

    def __init__(self, app: Any, accounts: Accounts) -> None:
        self._app, self._accounts = app, accounts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI."""
        if scope["type"] == "http" and not await asyncio.to_thread(
            self._is_known, dict(scope["headers"])
        ):
            headers = [(b"www-authenticate", b'Basic realm="sluicemq"')]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b"sign in with an account\n"})
            return
        await self._app(scope, receive, send)

    def _is_known(self, headers: dict[bytes, bytes]) -> bool:
        if not self._accounts.all():
            return True
        kind, _, text = headers.get(b"authorization", b"").partition(b" ")
        try:
            name, found, secret = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return False
        is_basic = kind.lower() == b"basic" and bool(found)
        return is_basic and self._accounts.check(name, secret) is not None
