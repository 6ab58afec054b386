"""Access control in real servers: the file is watched, brokers sign towards name servers, `sluice`
and our client sign and are told why they may not.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluicemq import PermissionDeniedError, Sluice
from sluicemq.broker.server import Broker
from sluicemq.cli import main
from sluicemq.config import NameServerConfig, load_broker_config
from sluicemq.nameserver.server import NameServer

RULES = """\
accounts:
- accessKey: account1
  secretKey: secret-of-account1
  topicPerms: [T=PUB|SUB]
- accessKey: operator
  secretKey: secret-of-operator
  admin: true
"""
ONE, OPERATOR = ("account1", "secret-of-account1"), ("operator", "secret-of-operator")


class Servers:
    """A name server and a broker, both with access control and the same file."""

    def __init__(self, directory: Path) -> None:
        self.rules = directory / "plain_acl.yml"
        self.rules.write_text(RULES)
        self.names = NameServer(
            NameServerConfig(
                bind_address="127.0.0.1", listen_port=0, acl_enable=True,
                acl_files=(str(self.rules),), kv_config_path=str(directory / "kv.json"),
            )
        )  # fmt: skip
        self.directory = directory

    async def start(self) -> None:
        await self.names.start()
        self.address = f"127.0.0.1:{self.names.port}"
        keys = {"accessKey": OPERATOR[0], "secretKey": OPERATOR[1]}
        config, store, _ = load_broker_config(
            "",
            overrides={
                "bindAddress": "127.0.0.1", "listenPort": "0", "namesrvAddr": self.address,
                "storePathRootDir": str(self.directory / "store"), "aclEnable": "true",
                "mappedFileSizeCommitLog": "8388608", "metricsExporterType": "DISABLE",
                "plainAclFile": str(self.rules),
                "innerClientAuthenticationCredentials": json.dumps(keys),
            },
        )  # fmt: skip
        self.broker = Broker(config, store)
        await self.broker.start()

    async def close(self) -> None:
        await self.broker.close()
        await self.names.close()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    found = Servers(tmp_path)
    await found.start()
    yield found
    await found.close()


async def test_an_edit_is_in_force_within_a_second(servers: Servers) -> None:
    async with Sluice(servers.address, credentials=ONE) as mq:
        assert (await mq.send("T", b"1")).queue_offset == 0
        servers.rules.write_text(RULES.replace("T=PUB|SUB", "T=SUB"))
        await asyncio.sleep(1.0)
        with pytest.raises(PermissionDeniedError, match="No permission for topic:T") as caught:
            await mq.send("T", b"2")
        assert "plain_acl.yml" in caught.value.fix
        servers.rules.write_text("accounts: [")
        await asyncio.sleep(1.0)
        with pytest.raises(PermissionDeniedError):
            await mq.send("T", b"3")
        servers.rules.write_text(RULES)
        await asyncio.sleep(1.0)
        await mq.send("T", b"4")


async def test_a_broker_that_does_not_sign_is_not_registered(servers: Servers) -> None:
    config, store, _ = load_broker_config(
        "",
        overrides={
            "bindAddress": "127.0.0.1", "listenPort": "0", "namesrvAddr": servers.address,
            "brokerName": "stranger", "storePathRootDir": str(servers.directory / "other"),
            "mappedFileSizeCommitLog": "8388608", "metricsExporterType": "DISABLE",
        },
    )  # fmt: skip
    stranger = Broker(config, store)
    await stranger.start()
    names = {data.broker for data in servers.names.requests.table.list_brokers()}
    await stranger.close()
    assert names == {servers.broker.settings.broker.broker_name}


async def test_the_command_line_signs_by_options_environment_and_tools_file(
    servers: Servers, tmp_path: Path
) -> None:
    (tmp_path / "home" / "conf").mkdir(parents=True)
    tools = "accessKey: operator\nsecretKey: secret-of-operator\n"
    (tmp_path / "home" / "conf" / "tools.yml").write_text(tools)

    async def sluice(environment: dict[str, str], *words: str) -> tuple[int, str]:
        runner = CliRunner(env=environment)
        command = ["acl", "status", "--json", "-n", servers.address, *words]
        result = await asyncio.to_thread(runner.invoke, main, command)
        return result.exit_code, result.output

    none = {"ROCKETMQ_HOME": "", "SLUICE_ACCESS_KEY": "", "SLUICE_SECRET_KEY": ""}
    keys = ("--access-key", OPERATOR[0], "--secret-key", OPERATOR[1])
    for environment, words in (
        (none, keys),
        (none | {"SLUICE_ACCESS_KEY": OPERATOR[0], "SLUICE_SECRET_KEY": OPERATOR[1]}, ()),
        ({"ROCKETMQ_ACCESS_KEY": OPERATOR[0], "ROCKETMQ_SECRET_KEY": OPERATOR[1]}, ()),
        (none | {"ROCKETMQ_HOME": str(tmp_path / "home")}, ()),
    ):
        code, output = await sluice(environment, *words)
        assert code == 0, output
        assert json.loads(output.splitlines()[-1])["accounts"] == 2
        assert ("tools.yml contains secrets" in output) == bool(environment.get("ROCKETMQ_HOME"))
    code, output = await sluice(none)
    assert (code, "No accessKey is configured" in output) == (1, True)
    code, output = await sluice(none, "--access-key", ONE[0], "--secret-key", ONE[1])
    assert (code, "Need admin permission" in output) == (1, True)
    assert ONE[1] not in output
