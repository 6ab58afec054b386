"""Access control between their clients and our broker, and between our client and the real broker
4.9.7, both with the same plain_acl.yml; and mqadmin 4.9.7, which changes that file.
"""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peer import drivers, toolchain
from peer.clusters import (
    QUICK_JVM,
    Cluster,
    await_line,
    await_port,
    await_registered,
    free_ports,
    java_broker_settings,
    java_home,
    java_server,
    sluice_cluster,
    write_properties,
)

from conftest import missing_tool_is_a_reason
from sluicemq import PermissionDeniedError
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from waiting import limit

COUNT = 5
RULES = """\
accounts:
- accessKey: RocketMQ
  secretKey: 12345678
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  - groupA=DENY
  - groupB=PUB|SUB
- accessKey: rocketmq2
  secretKey: 12345678
  admin: true
"""
ADMIN = ("rocketmq2", "12345678")
RIGHT, WRONG = ("RocketMQ", "12345678"), ("RocketMQ", "12345679")
CLIENTS: dict[str, Callable[[Path], drivers.Driver]] = {
    "java-4.9.7": lambda directory: drivers.java_driver("client-acl-4.9.7", directory),
    "java-5.3.3": lambda directory: drivers.java_driver("client-5.3.3", directory),
    "go-2.1.2": drivers.golang_driver,
}


@contextlib.contextmanager
def ours(directory: Path) -> Iterator[Cluster]:
    (directory / "plain_acl.yml").write_text(RULES)
    with sluice_cluster(directory, aclEnable="true", metricsExporterType="DISABLE") as cluster:
        yield cluster


@contextlib.contextmanager
def theirs(directory: Path) -> Iterator[Cluster]:
    """The real name server and broker 4.9.7."""
    (java_home(directory) / "conf" / "plain_acl.yml").write_text(RULES)
    names_port, broker_port, _ = free_ports()
    names_file = write_properties(directory / "namesrv.conf", {"listenPort": str(names_port)})
    settings = java_broker_settings(directory, names_port, broker_port) | {"aclEnable": "true"}
    broker_file = write_properties(directory / "broker.conf", settings)
    main = "org.apache.rocketmq"
    with (
        java_server(
            directory, "namesrv", f"{main}.namesrv.NamesrvStartup", names_file, QUICK_JVM,
            release="4.9.7",
        ) as names,
        java_server(
            directory, "broker", f"{main}.broker.BrokerStartup", broker_file, QUICK_JVM,
            release="4.9.7",
        ) as broker,
    ):  # fmt: skip
        await_port(names, names_port, directory / "namesrv.log")
        await_line(broker, directory / "broker.log", "boot success")
        await_registered(broker, names_port, directory / "broker.log")
        names_address, address = f"127.0.0.1:{names_port}", f"127.0.0.1:{broker_port}"
        yield Cluster("rocketmq", names_address, address, {"broker": broker.pid}, 0.0)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Cluster]]:
    """guarded("sluicemq"), guarded("rocketmq"): a cluster that knows these rules."""
    running: dict[str, Cluster] = {}
    with contextlib.ExitStack() as stack:

        def start(kind: str) -> Cluster:
            if kind not in running:
                directory = tmp_path_factory.mktemp(f"acl-{kind}")
                make = ours if kind == "sluicemq" else theirs
                with missing_tool_is_a_reason():
                    running[kind] = stack.enter_context(make(directory))
                # Go subscribes to no topic that is not there, and any test may be the first
                with Admin(running[kind].name_server, credentials=ADMIN) as admin:
                    admin.create_topic("topicB", queues=4)
            return running[kind]

        yield start


@pytest.fixture(scope="module", params=CLIENTS)
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    with missing_tool_is_a_reason():
        driver = CLIENTS[request.param](tmp_path_factory.mktemp(request.param))
    yield driver
    driver.close()


def where(cluster: Cluster, pair: tuple[str, str] | None, **more: object) -> dict[str, object]:
    keys = {} if pair is None else {"ak": pair[0], "sk": pair[1]}
    return {"ns": cluster.name_server, **keys, **more}


def test_their_clients_with_the_right_keys_send_and_consume(
    client: drivers.Driver, guarded: Callable[[str], Cluster]
) -> None:
    cluster = guarded("sluicemq")
    options = where(cluster, RIGHT, topic="topicB", group="groupB", expect=COUNT, timeout_s=30)
    events = client.call("push", count=COUNT, prefix=str(id(client)), **options)
    got = [event["body"] for event in events if event["event"] == "got"]
    mine = {body for body in got if body.startswith(str(id(client)))}
    assert len(mine) == COUNT


def refused(cluster: Cluster, access_key: str) -> int:
    """Return how many requests our servers refused to an account; "?" are those that nobody has."""
    with Admin(cluster.name_server, credentials=ADMIN) as admin:
        states = admin.access_status().values()
    assert sorted(state["server"] for state in states) == ["broker", "nameserver"]
    return sum(int(state["refused"].get(access_key, 0)) for state in states)


@pytest.mark.parametrize(
    ("pair", "topic", "counted"),
    [
        (WRONG, "topicB", "RocketMQ"),
        (None, "topicB", ""),
        (("nobody1", "12345678"), "topicB", "?"),
        (RIGHT, "topicA", "RocketMQ"),
        (RIGHT, "topicC", "RocketMQ"),
    ],
)
def test_their_clients_are_refused(
    client: drivers.Driver,
    guarded: Callable[[str], Cluster],
    pair: tuple[str, str] | None,
    topic: str,
    counted: str,
) -> None:
    cluster = guarded("sluicemq")
    before = refused(cluster, counted)
    with pytest.raises(drivers.DriverFailedError):
        client.call("send", count=1, **where(cluster, pair, topic=topic))
    assert refused(cluster, counted) > before


@pytest.mark.parametrize("kind", ["sluicemq", "rocketmq"])
def test_our_client_with_the_right_keys_sends_and_consumes(
    kind: str, guarded: Callable[[str], Cluster]
) -> None:
    names = guarded(kind).name_server
    bodies = {b"python-%d" % number for number in range(COUNT)}
    with Producer(names, credentials=RIGHT) as producer:
        for body in sorted(bodies):
            producer.send(Message("topicB", body))
    found: set[bytes] = set()

    async def consume() -> None:
        async with Sluice(names, credentials=RIGHT) as mq, asyncio.timeout(limit(30)):
            async for message in mq.subscribe("topicB", group="groupB"):
                found.add(message.body)
                await message.ack()
                if bodies <= found:
                    return

    asyncio.run(consume())


@pytest.mark.parametrize("kind", ["sluicemq", "rocketmq"])
@pytest.mark.parametrize(
    ("pair", "topic"), [(WRONG, "topicB"), (None, "topicB"), (RIGHT, "topicA"), (RIGHT, "topicC")]
)
def test_our_client_is_refused_with_a_cure(
    kind: str, pair: tuple[str, str] | None, topic: str, guarded: Callable[[str], Cluster]
) -> None:
    with (
        Producer(guarded(kind).name_server, credentials=pair) as producer,
        pytest.raises(PermissionDeniedError, match="AclException") as caught,
    ):
        producer.send(Message(topic, b"x"))
    assert "plain_acl.yml" in caught.value.fix
    assert "12345678" not in str(caught.value)


def test_mqadmin_changes_the_rules_and_they_are_in_force_at_once(
    guarded: Callable[[str], Cluster], tmp_path: Path
) -> None:
    cluster = guarded("sluicemq")
    home = java_home(tmp_path)
    keys = "accessKey: rocketmq2\nsecretKey: 12345678\n"
    (home / "conf" / "tools.yml").write_text(keys)

    def admin(*words: str) -> str:
        with missing_tool_is_a_reason():
            jars = toolchain.jars("client-acl-4.9.7")
        command = [toolchain.tool("java"), *drivers.JVM_FLAGS, f"-Duser.home={tmp_path}", "-cp"]
        command += [f"{jars}/*", "org.apache.rocketmq.tools.command.MQAdminStartup", *words]
        command += ["-n", cluster.name_server, "-b", cluster.broker]
        environment = {**os.environ, "ROCKETMQ_HOME": str(home)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit(60), check=False, env=environment
        )
        return done.stdout + done.stderr

    said = admin("updateAclConfig", "-a", "newcomer", "-s", "secret-of-it", "-t", "topicN=PUB")
    assert "success" in said
    with Producer(cluster.name_server, credentials=("newcomer", "secret-of-it")) as producer:
        producer.send(Message("topicN", b"x"))
    assert cluster.broker in admin("clusterAclConfigVersion")
    listed = admin("getAclConfig")
    assert "newcomer" in listed
    assert "secret-of-it" not in listed
    assert "success" in admin("updateGlobalWhiteAddr", "-g", "10.10.10.10,10.20.*.*")
    assert "10.20.*.*" in admin("getAclConfig")
    assert "success" in admin("deleteAclConfig", "-a", "newcomer")
    with (
        Producer(cluster.name_server, credentials=("newcomer", "secret-of-it")) as producer,
        pytest.raises(PermissionDeniedError, match="No acl config"),
    ):
        producer.send(Message("topicN", b"x"))
    assert "failed" in admin("updateAclConfig", "-a", "short", "-s", "x")
