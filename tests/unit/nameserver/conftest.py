"""A name server's parts without sockets, and a way to ask its handlers."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from sluicemq.config import NameServerConfig
from sluicemq.files import SYSTEM_FILES
from sluicemq.model.ids import Host
from sluicemq.nameserver.requests import NameServerRequests
from sluicemq.nameserver.routes import RouteTable
from sluicemq.wire.frames import Command


class FakePeer(NamedTuple):
    remote: Host = Host("127.0.0.1", 50000)
    local: Host = Host("127.0.0.1", 9876)
    is_disconnected: bool = False


LOCAL = FakePeer()
Ask = Callable[..., Command]


@pytest.fixture
def parts(tmp_path: Path) -> NameServerRequests:
    config = NameServerConfig(
        kv_config_path=str(tmp_path / "kvConfig.json"),
        config_path=str(tmp_path / "namesrv.properties"),
    )
    return NameServerRequests(config, SYSTEM_FILES, RouteTable(), started_ms=0)


@pytest.fixture
def ask(parts: NameServerRequests) -> Ask:
    """`ask(code, fields, body, peer=, now_ms=, version=)` -> the answer."""

    def ask(
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        peer: FakePeer = LOCAL,
        now_ms: int = 0,
        version: int = 479,
    ) -> Command:
        command = Command(code, fields, body, version=version)
        return parts.handle_now(command, peer, now_ms)

    return ask
