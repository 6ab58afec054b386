"""Who may ask over HTTP."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("mcp")

from sluicemq.cli import main
from sluicemq.cli.servers.mcp import SignedIn
from sluicemq.console.accounts import Accounts, Role


async def status(app: Any, authorization: bytes | None) -> int:
    seen: list[Any] = []

    async def send(message: Any) -> None:
        seen.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization)]
    await app({"type": "http", "headers": headers}, None, send)
    return int(seen[0]["status"])


async def inside(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


def test_with_accounts_only_they_are_let_in(tmp_path: Path) -> None:
    accounts = Accounts(str(tmp_path / "console.json"))
    app = SignedIn(inside, accounts)
    assert asyncio.run(status(app, None)) == 200, "nobody has an account yet"
    accounts.add("ann", "correct horse battery", Role.READ)
    assert asyncio.run(status(app, basic("ann:correct horse battery"))) == 200
    for wrong in (None, basic("ann:wrong"), basic("ann"), b"Bearer x", b"Basic \xff", b""):
        assert asyncio.run(status(app, wrong)) == 401


def test_others_are_not_listened_to_without_accounts(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    result = CliRunner().invoke(main, ["mcp", "--http", "--host", "0.0.0.0", "--accounts", path])
    assert result.exit_code == 1
    assert "sluice console account add" in result.output
