"""Master and slave, one of ours and one of RocketMQ's, over RocketMQ's HA protocol.

A slave has its master's log byte for byte from where it began, and queues that point to the same
places; a send to a SYNC_MASTER is answered when the slave has it; a slave that was killed goes on
where it was, and one that is gone is said to be. An empty slave of ours behind a master of ours has
the whole log, each other one the master's last file and what comes after it (docs/spec/ha.md §1).

RocketMQ's 5.x servers know their master's HA address from the name server alone: `haMasterAddress`
in their file is lost at the start.
"""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from peer.beside import side_by_side
from peer.drivers import Driver
from peer.names import own
from peer.replicas import FILE_BYTES, OURS, Replica, Replicas, until

from conftest import missing_tool_is_a_reason
from sluicemq import SendResult, Sluice
from thorough import ALL

RELEASES = ("java-4.9.7", "java-5.3.3", "java-5.5.0")
MIXES = [(OURS, OURS), *((java, OURS) for java in RELEASES), *((OURS, java) for java in RELEASES)]
if not ALL:
    MIXES = [(RELEASES[-1], OURS)]
MESSAGES = 400
"""Of half a kilobyte: several files of the log."""


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], None]]:
    with side_by_side({
        "-before-".join(mix): partial(follow, tmp_path_factory, *mix) for mix in MIXES
    }) as found:  # fmt: skip
        yield found


class Pair:
    """A master that has something, and a slave to be."""

    def __init__(self, replicas: Replicas, master: str) -> None:
        self.replicas = replicas
        self.topic = own("Replicated")
        self.master = replicas.start(master, "SYNC_MASTER")
        self.slave: Replica

    def send(self, count: int) -> Counter[str]:
        """How the sends were answered."""

        async def all_of_them() -> list[SendResult]:
            async with Sluice(self.replicas.name_server) as mq:
                sends = (
                    mq.send(self.topic, bytes(500), tag="a", keys=[f"k{number}"])
                    for number in range(count)
                )
                return await asyncio.gather(*sends)  # each may wait for slaveTimeout

        return Counter(str(result.status.name) for result in asyncio.run(all_of_them()))

    def send_until_safe(self) -> Counter[str]:
        """One by one, until the slave has one."""
        found: Counter[str] = Counter()

        def is_safe() -> bool:
            answers = self.send(1)
            found.update(answers)
            return answers == Counter(OK=1)

        assert until(is_safe, 90), found
        return found

    def agree(self) -> None:
        """The slave has what the master has, from where it began."""

        def is_same() -> bool:
            there, here = self.master.log(), self.slave.log()
            return bool(here) and here == {
                base: there.get(base) for base in there if base >= min(here)
            }

        assert until(is_same), (
            {base: len(data) for base, data in self.master.log().items()},
            [
                base
                for base, data in self.slave.log().items()
                if self.master.log().get(base) != data
            ],
        )

        def is_dispatched() -> bool:
            there, here = self.master.queues(), self.slave.queues()
            begin = min(self.slave.log()).to_bytes(8)
            return here == {
                name: b"".join(
                    units[at : at + 20] for at in range(0, len(units), 20)
                    if units[at : at + 8] >= begin
                )
                for name, units in there.items()
                if name in here
            } and any(name.startswith(self.topic) for name in here)  # fmt: skip

        assert until(is_dispatched), (self.master.queues(), self.slave.queues())


@pytest.mark.parametrize("mix", ["-before-".join(mix) for mix in MIXES])
def test_a_slave_has_its_masters_log_and_comes_back_to_it(
    followed: Callable[[str], None], mix: str
) -> None:
    with missing_tool_is_a_reason():
        followed(mix)


def follow(paths: pytest.TempPathFactory, master_kind: str, slave_kind: str) -> None:
    settings = {"inSyncReplicas": "2", "slaveTimeout": "1000"}
    with Replicas(paths.mktemp("replicas"), **settings) as replicas:
        pair = Pair(replicas, master_kind)
        answers = pair.send(MESSAGES)
        assert "OK" not in answers, "there is no slave yet"
        last_file = max(pair.master.log())
        pair.slave = replicas.start(slave_kind, "SLAVE", 1)
        pair.send_until_safe()
        pair.agree()
        is_whole = (master_kind, slave_kind) == (OURS, OURS)
        begin = min(pair.slave.log())
        assert begin == 0 if is_whole else begin >= last_file > FILE_BYTES
        assert pair.send(50) == Counter(OK=50)
        replicas.kill(pair.slave)
        assert "OK" not in pair.send(1)
        pair.slave = replicas.again(pair.slave)
        pair.send_until_safe()
        pair.agree()
        assert min(pair.slave.log()) == begin


@pytest.mark.thorough
def test_mqadmin_shows_master_and_slave(tmp_path: Path, driver: Callable[[str], Driver]) -> None:
    """haStatus of two releases: of the master its slave, which has all of the log, of the slave its
    master."""
    tools = [driver(release) for release in ("java-5.3.3", "java-5.5.0")]
    with Replicas(tmp_path) as replicas:
        pair = Pair(replicas, OURS)
        pair.slave = replicas.start(OURS, "SLAVE", 1)
        pair.send_until_safe()

        def shown(tool: Driver, at: Replica) -> tuple[dict[str, str], list[str]]:
            """What has a name, and the line of a slave."""
            words = ("haStatus", "-b", f"127.0.0.1:{at.port}")
            (event,) = tool.call("admin", ns=replicas.name_server, words="\n".join(words))
            lines = [line.split() for line in str(event["text"]).splitlines() if line.strip()]
            named = {line[0]: line[1] for line in lines if len(line) == 2}
            return named, lines[-1]

        for tool in tools:
            master, slave = shown(tool, pair.master)
            end = master["#MasterCommitLogMaxOffset"]
            assert int(end) > 500
            assert (master["#SlaveNum"], master["#InSyncSlaveNum"]) == ("1", "1")
            assert (slave[1], slave[2], slave[4], slave[5]) == (end, "0", "OK", end)
            found, _ = shown(tool, pair.slave)
            assert found["#MasterAddr"] == f"127.0.0.1:{pair.master.port + 1}"
            assert found["#CommitLogMaxOffset"] == end


@pytest.mark.parametrize("secret", ["the-right-one", "another-one"])
def test_under_access_control_a_slave_has_to_sign(tmp_path: Path, secret: str) -> None:
    """... and nobody else gets the log, from whatever address."""
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(
        "accounts:\n- accessKey: replicas\n  secretKey: the-right-one\n  admin: true\n"
    )
    rules.chmod(0o600)
    own_one = json.dumps({"accessKey": "replicas", "secretKey": secret})
    with Replicas(
        tmp_path, aclEnable="true", plainAclFile=str(rules), inSyncReplicas="2",
        innerClientAuthenticationCredentials=own_one,
    ) as replicas:  # fmt: skip
        master = replicas.start(OURS, "SYNC_MASTER")

        def is_let_in() -> bool:
            with socket.create_connection(("127.0.0.1", master.port + 1), 1) as stranger:
                try:
                    stranger.sendall(bytes(8))
                    return stranger.recv(12) != b""
                except TimeoutError:
                    return True  # the log is empty
                except ConnectionError:
                    return False

        assert not is_let_in()
        slave = replicas.start(OURS, "SLAVE", 1)
        log = slave.directory / "broker.log"
        if secret == "the-right-one":

            async def send() -> bool:
                async with Sluice(replicas.name_server, credentials=("replicas", secret)) as mq:
                    result = await mq.send(own("Signed"), b"for those who may")
                    return str(result.status.name) == "OK"

            assert until(lambda: asyncio.run(send())), "the slave has it"
        else:
            assert until(lambda: "Check signature failed" in log.read_text())
        assert not is_let_in(), "of this machine, as the slave: its address alone is nothing"
