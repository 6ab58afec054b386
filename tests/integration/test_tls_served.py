"""Every face of the client against `sluice up` that enforces TLS and wants certificates of clients:
asyncio, blocking, threaded, RocketMQ's names, Spark's source and sink, the command line.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from certificates import Authority
from sluicemq.cli import main
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer
from sluicemq.errors import NameServerUnreachableError, SluiceError
from sluicemq.model.message import Message, StoredMessage
from sluicemq.net.tls import Tls
from sluicemq.rocketmq import DefaultMQProducer
from sluicemq.rocketmq import Message as MigrantMessage
from waiting import limit

ROOT = Path(__file__).parents[2]


class Cluster:
    """A running `sluice up`, and what its clients show and trust."""

    def __init__(self, address: str, directory: Path, authority: Authority) -> None:
        self.address = address
        self.directory = directory
        self.authority = authority
        mine = authority.issue("client")
        self.tls = Tls(ca=authority.path, certificate=mine.path, key=mine.key_path)

    @property
    def options(self) -> list[str]:
        """For a command."""
        return [
            "-n", self.address, "--tls-ca", str(self.tls.ca),
            "--tls-certificate", str(self.tls.certificate), "--tls-key", str(self.tls.key),
        ]  # fmt: skip

    def put_certificate(self) -> None:
        issued = self.authority.issue("server", ["127.0.0.1"])
        for source, name in zip(issued, ("server.pem", "server.key"), strict=True):
            shutil.copy(source, self.directory / f"{name}.new")
            (self.directory / f"{name}.new").replace(self.directory / name)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("tls")
    authority = Authority(directory / "authority")
    made = Cluster("", directory, authority)
    made.put_certificate()
    settings = {
        "tls.server.mode": "enforcing",
        "tls.server.certPath": directory / "server.pem",
        "tls.server.keyPath": directory / "server.key",
        "tls.server.need.client.auth": "require",
        "tls.server.trustCertPath": authority.path,
        "tls.client.authServer": "true",
        "tls.client.trustCertPath": authority.path,
        "tls.client.certPath": made.tls.certificate,
        "tls.client.keyPath": made.tls.key,
        "mappedFileSizeCommitLog": 16 << 20,
    }
    lines = "".join(f"{name}={value}\n" for name, value in settings.items())
    (directory / "broker.conf").write_text(lines)
    command = [
        sys.executable, "-m", "sluicemq", "up", "--nameserver-port", "0", "--broker-port", "0",
        "--store", str(directory / "store"), "-c", str(directory / "broker.conf"),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            ready = next(line for line in server.stdout if line.startswith("ready "))
            made.address = dict(part.split("=", 1) for part in ready.split()[1:])["nameserver"]
            yield made
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(limit(30)) == 0


async def test_the_asyncio_client_over_a_change_of_the_certificate(cluster: Cluster) -> None:
    """Sends and a subscription go on while the server gets another certificate."""
    async with Sluice(cluster.address, tls=cluster.tls) as mq:
        stream = mq.subscribe("T_aio", group="G_aio")
        got: list[bytes] = []

        async def consume() -> None:
            async for message in stream:
                got.append(bytes(message.body))
                await message.ack()
                if len(got) == 60:
                    return

        task = asyncio.create_task(consume())
        for part in range(3):
            for number in range(20):
                await mq.send("T_aio", f"{part}-{number}".encode())
            cluster.put_certificate()
            await asyncio.sleep(1.2)  # the servers look once a second, and once more
        async with asyncio.timeout(limit(40)):
            await task
    assert sorted(got) == sorted(f"{p}-{n}".encode() for p in range(3) for n in range(20))
    async with Sluice(cluster.address, tls=cluster.tls) as mq:
        await mq.send("T_aio", b"with the new certificate")


class Commits(TransactionListener):
    def execute_local(self, message: Message, transaction_id: str, argument: Any) -> Any:
        return TransactionState.COMMIT

    def check(self, message: StoredMessage) -> TransactionState:
        return TransactionState.COMMIT


def test_the_blocking_client_with_its_heartbeats_and_bulk_reads(cluster: Cluster) -> None:
    with Admin(cluster.address, tls=cluster.tls) as admin:
        admin.create_topic("T_sync", queues=1)
        with Producer(cluster.address, tls=cluster.tls, listener=Commits()) as producer:
            producer.send("T_sync", os.urandom(100_000))
            producer.send_in_transaction(Message("T_sync", b"half"))
        (queue,) = admin.queues("T_sync")
        first, end = admin.offsets(queue)
        assert end >= 2
        address = admin.address(queue)
    with BulkReader(address, "T_sync", 0, first, end, tls=cluster.tls) as reader:
        assert sum(len(chunk) for chunk in reader) > 100_000
    with Consumer(cluster.address, "T_sync", group="G_sync", tls=cluster.tls) as consumer:
        assert len(next(iter(consumer)).body) == 100_000


def test_the_classes_with_rocketmqs_names(cluster: Cluster) -> None:
    producer = DefaultMQProducer("P_migrant", namesrv_addr=cluster.address)
    producer.set_use_tls(cluster.tls)
    producer.start()
    try:
        assert producer.send(MigrantMessage("T_migrant", b"x")).msg_id
    finally:
        producer.shutdown()


def test_the_command_line(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with Admin(cluster.address, tls=cluster.tls) as admin:
        admin.create_topic("T_cli", queues=1)
    run = CliRunner().invoke
    listed = run(main, ["topic", "list", *cluster.options])
    assert (listed.exit_code, "T_cli" in listed.output) == (0, True)
    sent = run(main, ["produce", "T_cli", "x", *cluster.options])
    assert sent.exit_code == 0, sent.output
    plain = run(main, ["topic", "list", "-n", cluster.address])
    assert plain.exit_code == 1
    assert "tls" in plain.output
    monkeypatch.setenv("SLUICE_TLS_CA", str(cluster.tls.ca))
    nobody = run(main, ["topic", "list", "-n", cluster.address])
    assert "refused the TLS handshake" in nobody.output
    monkeypatch.setenv("SLUICE_TLS_CERTIFICATE", str(cluster.tls.certificate))
    monkeypatch.setenv("SLUICE_TLS_KEY", str(cluster.tls.key))
    assert run(main, ["topic", "list", "-n", cluster.address]).exit_code == 0
    assert run(main, ["topic", "list", "-n", cluster.address, "--no-tls"]).exit_code == 1


def test_sparks_source_and_sink(cluster: Cluster) -> None:
    pytest.importorskip("pyspark")
    from sluicemq.spark.options import parse_options
    from sluicemq.spark.sources.offsets import open_admin

    given = {
        "nameServers": cluster.address,
        "topic": "T_spark",
        "tls.ca": str(cluster.tls.ca),
        "tls.certificate": str(cluster.tls.certificate),
        "tls.key": str(cluster.tls.key),
    }
    options = parse_options(given)
    assert options.tls == cluster.tls
    with open_admin(options) as admin:
        admin.create_topic("T_spark", queues=1)
    with Producer(cluster.address, tls=cluster.tls) as producer:
        for body in (b"a", b"b", b"c"):
            producer.send("T_spark", body)
    assert sorted(rows(given)) == [b"a", b"b", b"c"]
    with pytest.raises(SluiceError, match="tls"):
        rows({"nameServers": cluster.address, "topic": "T_spark"})
    assert parse_options(given | {"tls": "false"}).tls is None
    with pytest.raises(SluiceError) as caught:
        parse_options({"tls.keyPassword": ""})
    assert "tls.keyPassword" in str(caught.value)


def rows(given: dict[str, str]) -> list[Any]:
    """The bodies that a batch read gives, without a JVM."""
    from pyspark_rocketmq import DefaultSource

    source = DefaultSource(given)
    schema = source.schema()
    reader = source.reader(schema)
    found = []
    for partition in reader.partitions():
        for batch in reader.read(partition):
            found += batch.column(batch.schema.get_field_index("body")).to_pylist()
    return found


def test_who_trusts_somebody_else_is_told_which_certificate(
    cluster: Cluster, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path)
    with (
        Admin(cluster.address, tls=Tls(ca=stranger.path)) as admin,
        pytest.raises(NameServerUnreachableError, match="was rejected: ") as caught,
    ):
        admin.topics()
    assert "Set ca" in caught.value.fix
