"""Test the authentication of `sluice mcp --http`."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("mcp")

from sluicemq.cli import main
from sluicemq.cli.servers.mcp import CHECKS_MAX, BasicAuthentication
from sluicemq.console.accounts import Accounts, Role
from sluicemq.console.sessions import FAILURES_FREE


async def status(app: Any, authorization: bytes | None) -> int:
    seen: list[Any] = []

    async def send(message: Any) -> None:
        seen.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization)]
    client = ("10.0.0.1", 40_000)
    await app({"type": "http", "headers": headers, "client": client}, None, send)
    return int(seen[0]["status"])


async def inside(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


def test_with_accounts_clients_must_sign_in(tmp_path: Path) -> None:
    accounts = Accounts(str(tmp_path / "console.json"))
    app = BasicAuthentication(inside, accounts, is_open=True)
    assert asyncio.run(status(app, None)) == 200, "nobody has an account yet"
    accounts.add("ann", "correct horse battery", Role.READ)
    assert asyncio.run(status(app, basic("ann:correct horse battery"))) == 200
    for wrong in (None, basic("ann:wrong"), basic("ann"), b"Bearer x", b"Basic \xff", b""):
        assert asyncio.run(status(app, wrong)) == 401


def test_at_a_public_address_all_are_refused_without_accounts(tmp_path: Path) -> None:
    accounts = Accounts(str(tmp_path / "console.json"))
    app = BasicAuthentication(inside, accounts, is_open=False)
    accounts.add("ann", "correct horse battery", Role.READ)
    assert asyncio.run(status(app, basic("ann:correct horse battery"))) == 200
    accounts.remove("ann")
    for authorization in (None, basic("ann:correct horse battery")):
        assert asyncio.run(status(app, authorization)) == 401


def test_wrong_secrets_are_throttled_and_few_are_checked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = Accounts(str(tmp_path / "console.json"))
    accounts.add("ann", "correct horse battery", Role.READ)
    running, most = 0, 0

    async def to_thread(_check: Any, _name: str, _secret: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    app = BasicAuthentication(inside, accounts, is_open=True)

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*(status(app, basic("ann:wrong")) for _ in range(20)))

    codes = asyncio.run(all_at_once())
    assert codes.count(401) == FAILURES_FREE
    assert codes.count(429) == 20 - FAILURES_FREE
    assert most == CHECKS_MAX
    assert asyncio.run(status(app, basic("x" * 10_000 + ":wrong"))) == 401


def test_a_public_address_requires_accounts(tmp_path: Path) -> None:
    path = str(tmp_path / "none.json")
    result = CliRunner().invoke(main, ["mcp", "--http", "--host", "0.0.0.0", "--accounts", path])
    assert result.exit_code == 1
    assert "sluice console account add" in result.output


def test_the_address_of_a_client_is_not_taken_from_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr("uvicorn.run", lambda _app, **options: told.update(options))
    path = str(tmp_path / "none.json")
    result = CliRunner().invoke(main, ["mcp", "--http", "--accounts", path])
    assert result.exit_code == 0, result.output
    assert told["proxy_headers"] is False
