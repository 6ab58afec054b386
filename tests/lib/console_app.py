"""A console before a cluster, asked as a browser would: cookies, forms, redirects on demand."""

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
    """Requests of one browser; a form carries what its page said."""

    def __init__(self, console: Console, base: str = "http://console:8082") -> None:
        self.console = console
        app = console.build_app(PAGES, sign_in.routes(console))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url=base)

    async def get(self, path: str, *, live: bool = False, **headers: str) -> httpx.Response:
        """A page, or its live part."""
        more = {"hx-request": "true"} if live else {}
        return await self.http.get(path, headers=headers | more)

    async def post(self, path: str, data: Mapping[str, str], **headers: str) -> httpx.Response:
        """A form as it is given."""
        return await self.http.post(path, data=dict(data), headers=headers)

    async def form_token(self) -> str:
        """That of this session, as its pages have it."""
        found = re.search(r'name="form_token" value="([^"]+)"', (await self.get("/topics")).text)
        return found[1] if found else ""

    async def submit(self, path: str, **data: str) -> httpx.Response:
        """A form of this session."""
        return await self.post(path, {"form_token": await self.form_token(), **data})

    async def enter(self) -> httpx.Response:
        """By the link."""
        return await self.get(f"{sign_in.LINK}?token={self.console.sessions.create_link()}")

    async def sign_in(self, name: str, secret: str, **data: str) -> httpx.Response:
        """By the form."""
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
    """A browser before a console; with `roles` it has an account for each, of the role's name."""
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
