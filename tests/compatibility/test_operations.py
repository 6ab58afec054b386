"""Operators' work on consumer groups with the unmodified mqadmin 5.3.3, and request-reply with the
Java client, against our broker; our client and command line against Java's consumer.

One JVM holds a Java push consumer that goes on while mqadmin works (java/Operations.java).
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from peer.clusters import SOURCE, Cluster
from peer.drivers import HERE, Driver, Event, java_driver
from peer.names import own

from sluicemq import Sluice
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import SluiceError
from sluicemq.model.topic import MessageQueue
from thorough import ALL
from waiting import limit, wait_for

KINDS = ["sluicemq", *(["rocketmq"] if ALL else [])]
COUNT = 20


@dataclass
class Site:
    """A cluster, the JVM, and topics of one queue."""

    driver: Driver
    cluster: Cluster

    @property
    def broker(self) -> str:
        """The name of its broker."""
        with Admin(self.cluster.name_server) as admin:
            return next(iter(admin.masters()))

    @property
    def where(self) -> dict[str, str]:
        return {"ns": self.cluster.name_server}

    def mqadmin(self, *words: str) -> str:
        (event,) = self.driver.call("admin", words="\n".join(words), **self.where)
        return str(event["text"])

    def serve(self, name: str, **options: object) -> str:
        """Topic and group of that name; the Java consumer reads it. Returns the client id."""
        with Admin(self.cluster.name_server) as admin:
            self.make(name)
            self.driver.call("serve", topic=name, group=name, **options, **self.where)
            wait_for(lambda: bool(self.clients(admin, name)))
            return self.clients(admin, name)[0]

    @staticmethod
    def clients(admin: Admin, group: str) -> list[str]:
        try:
            return [client.client_id for client in admin.consumers(group)]
        except SluiceError:  # the group is not there yet
            return []

    def make(self, name: str) -> None:
        with Admin(self.cluster.name_server) as admin:
            admin.create_topic(name, queues=1)

    def seen(self) -> list[str]:
        return [event["body"] for event in self.driver.call("seen")]

    def expect(self, bodies: list[str]) -> None:
        found: list[str] = []

        def is_complete() -> bool:
            found.extend(self.seen())
            return len(found) >= len(bodies)

        wait_for(is_complete)
        time.sleep(0.3)
        assert found + self.seen() == bodies

    def queue(self, name: str) -> MessageQueue:
        with Admin(self.cluster.name_server) as admin:
            return admin.queues(name)[0]

    def committed(self, name: str) -> int | None:
        with Admin(self.cluster.name_server) as admin:
            return admin.committed_offset(name, self.queue(name))

    def sluice(self, *words: str) -> list[Any]:
        """Our command line; its JSON lines."""
        command = [sys.executable, "-m", "sluicemq", *words]
        command += ["-n", self.cluster.name_server, "--json"]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(
            command, capture_output=True, env=environment, timeout=limit(60), check=False, text=True
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def send(self, name: str, bodies: list[str]) -> None:
        async def run() -> None:
            async with Sluice(self.cluster.name_server) as mq:
                for body in bodies:
                    await mq.send(name, body)

        asyncio.run(run())


@pytest.fixture(scope="module")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    source = HERE / "java" / "Operations.java"
    driver = java_driver("client-5.3.3", tmp_path_factory.mktemp("operations"), source=source)
    yield driver
    driver.close()


@pytest.fixture(params=KINDS)
def site(
    request: pytest.FixtureRequest, cluster: Callable[[str], Cluster], jvm: Driver
) -> Iterator[Site]:
    yield Site(jvm, cluster(request.param))
    jvm.call("stop")


def bodies(first: int = 0, end: int = COUNT) -> list[str]:
    return [str(number) for number in range(first, end)]


def test_reset_offset_by_time_sends_a_java_consumer_back(site: Site) -> None:
    site.make(own("Oreset"))
    site.send(own("Oreset"), bodies())
    site.serve(own("Oreset"))
    site.expect(bodies())
    text = site.mqadmin("resetOffsetByTime", "-g", own("Oreset"), "-t", own("Oreset"), "-s", "0")
    assert site.broker in text, text
    site.expect(bodies())
    wait_for(lambda: site.committed(own("Oreset")) == COUNT)


def test_a_reset_in_the_middle_of_a_java_consumers_work_lasts(site: Site) -> None:
    """It holds all messages and has some of them handled; after the reset it begins anew, and what
    it had does not come to count."""
    site.make(own("Omiddle"))
    site.send(own("Omiddle"), bodies())
    site.serve(own("Omiddle"), rest=150)
    seen: list[str] = []

    def begun() -> bool:
        seen.extend(site.seen())
        return len(seen) >= 4

    wait_for(begun)
    site.mqadmin("resetOffsetByTime", "-g", own("Omiddle"), "-t", own("Omiddle"), "-s", "0")

    def again() -> bool:
        seen.extend(site.seen())
        return seen.count("0") == 2 and seen[-1] == str(COUNT - 1) and len(seen) > COUNT

    wait_for(again, 40)
    second = len(seen) - 1 - seen[::-1].index("0")
    assert seen[second:] == bodies(), "all of them again, in order"
    assert seen[:second] == bodies(0, second), "the first round broke off"


def test_skip_accumulated_message_of_a_group_that_is_away(site: Site) -> None:
    site.make(own("Oskip"))
    site.send(own("Oskip"), bodies())
    site.serve(own("Oskip"))
    site.expect(bodies())
    wait_for(lambda: site.committed(own("Oskip")) == COUNT)
    site.driver.call("stop")
    site.send(own("Oskip"), ["missed"] * 3)
    text = site.mqadmin("skipAccumulatedMessage", "-g", own("Oskip"), "-t", own("Oskip"))
    assert site.broker in text, text
    assert site.committed(own("Oskip")) == COUNT + 3
    site.send(own("Oskip"), ["new"])
    site.serve(own("Oskip"))
    site.expect(["new"])


def test_our_command_line_resets_a_java_consumer(site: Site) -> None:
    site.make(own("Ocli"))
    site.send(own("Ocli"), bodies())
    site.serve(own("Ocli"))
    site.expect(bodies())
    wait_for(lambda: site.committed(own("Ocli")) == COUNT)
    (planned,) = site.sluice(
        "group", "reset", own("Ocli"), "-t", own("Ocli"), "--to", "earliest", "--dry-run"
    )
    assert (planned["from"], planned["to"], planned["come_again"]) == (COUNT, 0, COUNT)
    (done,) = site.sluice("group", "reset", own("Ocli"), "-t", own("Ocli"), "--to", "earliest")
    assert done["to"] == 0
    site.expect(bodies())


def test_clone_group_offset(site: Site) -> None:
    site.serve(own("Oclone"))
    site.send(own("Oclone"), bodies())
    site.expect(bodies())
    wait_for(lambda: site.committed(own("Oclone")) == COUNT)
    with Admin(site.cluster.name_server) as admin:
        found = admin.clone_offsets(own("Oclone"), own("Ocopy"))
        assert [change.new for change in found if change.queue.topic == own("Oclone")] == [COUNT]
        assert admin.committed_offset(own("Ocopy"), site.queue(own("Oclone"))) == COUNT
    text = site.mqadmin(
        "cloneGroupOffset", "-s", own("Oclone"), "-d", own("Ocopy"), "-t", own("Oclone")
    )
    assert "clone group offset success" in text


def test_consumer_status_shows_a_java_and_a_python_consumer(site: Site) -> None:
    client_id = site.serve(own("Ostatus"))
    text = site.mqadmin("consumerStatus", "-g", own("Ostatus"))
    assert client_id in text
    assert "Rebalance OK" in text, text
    detail = site.mqadmin("consumerStatus", "-g", own("Ostatus"), "-i", client_id, "-s")
    assert "NettyClientPublicExecutor" in detail, "the stacks of a JVM"
    with Admin(site.cluster.name_server) as admin:
        wait_for(
            lambda: (
                site.queue(own("Ostatus")) in admin.running_info(own("Ostatus"), client_id).queues
            )
        )
    (status,) = site.sluice("consumer", "status", own("Ostatus"), client_id)
    assert status["properties"]["language"] == "JAVA"
    assert {queue["topic"] for queue in status["queues"]} >= {own("Ostatus")}
    (stack,) = site.sluice("consumer", "stack", own("Ostatus"), client_id)
    assert "NettyClientWorkerThread" in stack["stack"] or "java.lang" in stack["stack"]


def test_get_consumer_status_asks_the_java_consumer(site: Site) -> None:
    client_id = site.serve(own("Oget"))
    site.send(own("Oget"), bodies())
    site.expect(bodies())
    (event,) = site.driver.call("status", group=own("Oget"), topic=own("Oget"), **site.where)
    assert (event["client"], event["offset"]) == (client_id, str(COUNT))


def test_a_message_is_consumed_directly_by_a_java_consumer(site: Site) -> None:
    client_id = site.serve(own("Odirect"))
    site.send(own("Odirect"), ["once"])
    site.expect(["once"])
    (found,) = messages_of(site, own("Odirect"))
    words = [
        "message",
        "consume",
        found,
        "-g",
        own("Odirect"),
        "-c",
        client_id,
        "-t",
        own("Odirect"),
    ]
    (result,) = site.sluice(*words)
    assert result["result"] == "CR_SUCCESS"
    site.expect(["once"])
    text = site.mqadmin(
        "queryMsgById", "-i", found, "-t", own("Odirect"), "-g", own("Odirect"), "-d", client_id
    )
    assert "consumeResult=CR_SUCCESS" in text, text
    site.expect(["once"])
    assert site.committed(own("Odirect")) in (None, 0, 1), "nothing is committed by it"


def messages_of(site: Site, topic: str) -> list[str]:
    """The offset message ids of a topic of one queue."""

    async def run() -> list[str]:
        async with Sluice(site.cluster.name_server) as mq:
            pulled = await mq.pull_consumer().pull((await mq.queues(topic))[0], 0)
            return [message.offset_message_id for message in pulled.messages]

    return asyncio.run(run())


def test_a_java_producers_request_gets_our_consumers_reply(site: Site) -> None:
    site.make(own("Oask"))

    async def run() -> list[Any]:
        async def handler(message: Any) -> None:
            await message.reply(b"python answers " + message.body)

        name_server = site.cluster.name_server
        async with (
            Sluice(name_server) as mq,
            mq.consumer(own("Oask"), handler).subscribe(own("Oask")),
        ):
            return await asyncio.to_thread(
                site.driver.call, "request", topic=own("Oask"), body="java asks", **site.where
            )

    (event,) = asyncio.run(run())
    assert event["event"] == "replied", event
    assert event["body"] == "python answers java asks"


def test_our_request_gets_a_java_consumers_reply(site: Site) -> None:
    site.serve(own("Oanswer"), reply="java answers ")

    async def run() -> bytes:
        async with Sluice(site.cluster.name_server) as mq:
            return (await mq.request(own("Oanswer"), "python asks", timeout_s=15)).body

    assert asyncio.run(run()) == b"java answers python asks"
    assert site.seen() == ["python asks"]


def test_mqadmin_sees_a_python_consumer(site: Site) -> None:
    site.make(own("Opython"))
    seen: list[bytes] = []

    async def run() -> tuple[str, str, Event, str]:
        async with Sluice(site.cluster.name_server) as mq:
            sent = await mq.send(own("Opython"), "once")
            consumer = mq.consumer(own("Opython"), lambda message: seen.append(message.body))
            async with consumer.subscribe(own("Opython")):
                while not seen:
                    await asyncio.sleep(0.05)
                words = ["-g", own("Opython")]
                tables = await asyncio.to_thread(site.mqadmin, "consumerStatus", *words)
                one = ["-i", mq.client_id, "-s"]
                detail = await asyncio.to_thread(site.mqadmin, "consumerStatus", *words, *one)
                status = {"group": own("Opython"), "topic": own("Opython"), **site.where}
                (where,) = await asyncio.to_thread(site.driver.call, "status", **status)
                identity = ["-i", sent.offset_message_id, "-t", own("Opython"), "-d", mq.client_id]
                direct = await asyncio.to_thread(site.mqadmin, "queryMsgById", *words, *identity)
                return tables, detail, where, direct

    tables, detail, where, direct = asyncio.run(run())
    assert "Rebalance OK" in tables, tables
    assert "sluicemq handler" in detail or "test_operations" in detail, detail[-3000:]
    assert where["offset"] == "1"
    assert "consumeResult=CR_SUCCESS" in direct, direct
    assert seen == [b"once"] * 2


def test_query_cq_and_send_msg_status(site: Site) -> None:
    site.make(own("Ocq"))
    site.send(own("Ocq"), bodies(0, 3))
    text = site.mqadmin(
        "queryCq", "-t", own("Ocq"), "-q", "0", "-i", "0", "-c", "3", "-b", site.cluster.broker
    )
    assert "Max Offset" in text or "max" in text.lower(), text
    assert (
        len([line for line in text.splitlines() if "physicOffset" in line or "idx" in line]) >= 3
    ), text
    assert "SEND_OK" in site.mqadmin("sendMsgStatus", "-b", site.broker, "-c", "2")
