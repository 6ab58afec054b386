"""A console of a cluster, and a client that behaves like a browser: cookies, forms, redirects."""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.console import sign_in
from sluicemq.console.accounts import Accounts, Role
from sluicemq.console.app import Connect, Console
from sluicemq.console.audit import AuditLog
from sluicemq.console.table import PAGES

SECRETS = {role: f"a secret to {role.name.lower()}" for role in Role}


class Browser:
    """Sends the requests of one browser. Its forms contain the token of their page."""

    def __init__(self, console: Console, base: str = "http://console:8082") -> None:
        self.console = console
        app = console.build_app(PAGES, sign_in.routes(console))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=base)

    async def get(self, path: str, *, live: bool = False, **headers: str) -> httpx.Response:
        """Request a page, or only its live part."""
        more = {"hx-request": "true"} if live else {}
        return await self.http.get(path, headers=headers | more)

    async def post(self, path: str, data: Mapping[str, str], **headers: str) -> httpx.Response:
        """Send a form unchanged."""
        return await self.http.post(path, data=dict(data), headers=headers)

    async def form_token(self) -> str:
        """Return the form token of this session, from one of its pages."""
        found = re.search(r'name="form_token" value="([^"]+)"', (await self.get("/topics")).text)
        return found[1] if found else ""

    async def submit(self, path: str, **data: str) -> httpx.Response:
        """Send a form with the form token of this session."""
        return await self.post(path, {"form_token": await self.form_token(), **data})

    async def enter(self) -> httpx.Response:
        """Sign in by the link."""
        return await self.get(f"{sign_in.LINK}?token={self.console.sessions.create_link()}")

    async def sign_in(self, name: str, secret: str, **data: str) -> httpx.Response:
        """Sign in with the form."""
        return await self.post(
            "/sign-in", {"name": name, "secret": secret, "kind": "account", **data}
        )


@asynccontextmanager
async def browsing(
    connect: Connect,
    directory: Path,
    *,
    roles: bool = False,
    clock: Clock = SYSTEM_CLOCK,
    **options: Any,
) -> AsyncIterator[Browser]:
    """Yield a browser of a console, which has an account for each of `roles` with its name."""
    accounts = Accounts(str(directory / "accounts" / "console.json"))
    for role in Role if roles else ():
        accounts.add(role.name.lower(), SECRETS[role], role)
    audit = AuditLog(clock, str(directory / "audit.jsonl"))
    console = Console(connect, accounts, audit=audit, clock=clock, **options)
    browser = Browser(console)
    try:
        yield browser
    finally:
        await browser.http.aclose()
        await console.close()
