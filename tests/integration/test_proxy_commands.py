"""Test what `sluice proxy status` and `sluice group show` print about gRPC clients."""

import asyncio
import contextlib
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("google.protobuf")

from sluicemq.cli import main
from sluicemq.proxy import STATUS_METHOD
from sluicemq.proxy import messages as m
from sluicemq.proxy.service import PATH
from sluicemq.testing.embedded import embedded
from sluicemq.wire.codes import version_name
from waiting import limit

grpc: Any = pytest.importorskip("grpc")
METADATA = [
    ("x-mq-client-id", "one"), ("x-mq-language", "GO"), ("x-mq-client-version", "5.1.2"),
]  # fmt: skip


def subscribed(group: str, topic: str, tag: str) -> m.TelemetryCommand:
    wish = m.SubscriptionEntry(
        topic=m.Resource(name=topic), expression=m.FilterExpression(type=1, expression=tag)
    )
    return m.TelemetryCommand(
        settings=m.Settings(
            client_type=m.ClientType.PUSH_CONSUMER,
            user_agent=m.UA(language=m.Language.GOLANG, version="5.1.2"),
            subscription=m.Subscription(group=m.Resource(name=group), subscriptions=[wish]),
        )
    )


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(main, [*arguments], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def conversation(name_server: str, proxy: str) -> None:
    said: queue.SimpleQueue[m.TelemetryCommand | None] = queue.SimpleQueue()
    with grpc.insecure_channel(proxy) as channel:
        telemetry = channel.stream_stream(
            PATH + "Telemetry",
            request_serializer=m.TelemetryCommand.SerializeToString,
            response_deserializer=m.TelemetryCommand.FromString,
        )
        said.put(subscribed("billing", "orders", "paid"))
        answers = telemetry(iter(said.get, None), metadata=METADATA)
        assert next(answers).HasField("settings")
        (client,) = run("proxy", "status", proxy, "--json")["clients"]
        assert (client["kind"], client["group"], client["has_stream"]) == (
            "PUSH_CONSUMER", "billing", True,
        )  # fmt: skip
        assert client["topics"] == {"orders": "paid"}
        text = run("proxy", "status", proxy)
        assert "2 connections, 1 clients, 0 waiting polls. The proxy runs in its broker." in text
        options = ("group", "show", "billing", "-n", name_server, "--proxy", proxy)
        report = run(*options, "--json")
        (member,) = report["clients"]
        assert (member["client_id"], member["language"]) == ("one", "GO")
        assert version_name(member["version"]) == "5.1.2"
        (client,) = report["proxy_clients"]
        assert (client["proxy"], client["version"]) == (proxy, "5.1.2")
        text = run(*options)
        assert "GO" in text
        assert "5.1.2" in text
        assert f"Members of billing at {proxy}" in text
        assert "5.1.2" in run("consumer", "list", "billing", "-n", name_server)
        said.put(None)


async def test_members_that_use_grpc_are_shown() -> None:
    async with embedded(tcp=True, proxy=True) as mq:
        await mq.admin.create_topic("orders")
        addresses = mq.servers.name_server_address, mq.servers.proxy_address
        await asyncio.wait_for(asyncio.to_thread(conversation, *addresses), limit(30))


async def test_a_proxy_without_the_status_method_is_an_error() -> None:
    async with embedded(tcp=True, proxy=True) as mq:
        del mq.servers.proxies["broker-a"].methods[STATUS_METHOD]
        address = mq.servers.proxy_address
        found = await asyncio.to_thread(CliRunner().invoke, main, ["proxy", "status", address])
        assert found.exit_code == 1
        assert f"{address} is not a SluiceMQ proxy" in found.stderr


@pytest.mark.parametrize(
    ("number", "text"),
    [(479, "5.3.3"), (413, "5.0.0"), (412, "5.0.0-SNAPSHOT"), (399, "4.9.3"), (401, "4.9.4"),
     (232, "4.1.0-SNAPSHOT"), (121, "121")],
)  # fmt: skip
def test_versions_are_shown_as_text(number: int, text: str) -> None:
    assert version_name(number) == text


# ------------------------------------------------------------------------- a process that ends


class Conversation:
    """A consumer that waits for messages, and a producer that sends until the proxy stops."""

    def __init__(self, proxy: str) -> None:
        self.channel = grpc.insecure_channel(proxy)
        self.said: queue.SimpleQueue[m.TelemetryCommand | None] = queue.SimpleQueue()
        self.stored: list[str] = []
        self.has_begun = threading.Event()

    def method(self, name: str, kind: str = "unary_unary") -> Any:
        message = "TelemetryCommand" if name == "Telemetry" else f"{name}Request"
        answer = "TelemetryCommand" if name == "Telemetry" else f"{name}Response"
        return getattr(self.channel, kind)(
            PATH + name,
            request_serializer=getattr(m, message).SerializeToString,
            response_deserializer=getattr(m, answer).FromString,
        )

    def telemetry(self) -> Any:
        self.said.put(subscribed("billing", "orders", "paid"))
        stream = self.method("Telemetry", "stream_stream")
        answers = stream(iter(self.said.get, None), metadata=METADATA)
        assert next(answers).HasField("settings")
        return answers

    def wait(self) -> list[m.ReceiveMessageResponse]:
        request = m.ReceiveMessageRequest(
            group=m.Resource(name="billing"),
            message_queue=m.MessageQueue(topic=m.Resource(name="orders")),
            filter_expression=m.FilterExpression(type=1, expression="paid"),
            batch_size=8,
            auto_renew=True,
        )
        request.long_polling_timeout.seconds = 20
        call = self.method("ReceiveMessage", "unary_stream")
        return list(call(request, metadata=METADATA, timeout=limit(25)))

    def produce(self) -> None:
        """Send messages, and count those that are acknowledged."""
        send = self.method("SendMessage")
        for number in itertools.count():
            message = m.Message(topic=m.Resource(name="orders"), body=b"%d" % number)
            message.system_properties.message_id = f"id-{number}"
            message.system_properties.message_type = m.MessageType.NORMAL
            try:
                answer = send(m.SendMessageRequest(messages=[message]), metadata=METADATA)
            except grpc.RpcError:
                return
            assert answer.status.code == m.Code.OK, answer
            self.stored.append(f"id-{number}")
            if number == 20:
                self.has_begun.set()


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Run `sluice up`. Yield its process and the addresses in its `ready` line."""
    command = (sys.executable, "-m", "sluicemq", "up", "--nameserver-port=0", "--broker-port=0")
    with subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield process, dict(word.split("=", 1) for word in line.split()[1:])
        finally:
            process.kill()


def test_a_stopping_proxy_answers_waiting_clients_and_loses_nothing(tmp_path: Any) -> None:
    store = f"--store={tmp_path / 'store'}"
    with served(store, "--proxy-port=0") as (process, addresses):
        run("topic", "create", "orders", "-n", addresses["nameserver"])
        client = Conversation(addresses["proxy"])
        with ThreadPoolExecutor() as pool:
            commands = client.telemetry()
            waiting, sending = pool.submit(client.wait), pool.submit(client.produce)
            assert client.has_begun.wait(limit(20))
            process.terminate()
            assert waiting.result(limit(10))[0].status.code == m.Code.MESSAGE_NOT_FOUND
            assert next(commands).HasField("reconnect_endpoints_command")
            sending.result(limit(10))
            assert process.wait(limit(10)) == 0
            client.said.put(None)
        client.channel.close()
    with served(store, "--no-proxy") as (_, addresses):
        shown = run("topic", "show", "orders", "-n", addresses["nameserver"], "--json")
    assert sum(it["offset_max"] for it in shown["queues"]) >= len(client.stored) > 20


def test_a_broker_configures_its_proxy_with_a_rocketmq_file(tmp_path: Any) -> None:
    """The port and a limit are those in rmq-proxy.json, which names the file of the broker."""
    broker = tmp_path / "broker.conf"
    broker.write_text("listenPort=0\nbindAddress=127.0.0.1\nmetricsExporterType=DISABLE\n")
    settings = tmp_path / "rmq-proxy.json"
    settings.write_text(json.dumps({
        "proxyMode": "LOCAL", "brokerConfigPath": str(broker), "grpcServerPort": 0,
        "minInvisibleTimeMillsForRecv": 70_000,
    }))  # fmt: skip
    command = [
        sys.executable, "-m", "sluicemq", "broker", "--store", str(tmp_path / "store"),
        "--proxy-config", str(settings),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            port = ready.rpartition(" proxy=127.0.0.1:")[2].strip()
            assert port.isdigit(), ready
            assert port != "8081", "the port is that of the file"
            request = m.ReceiveMessageRequest(
                group=m.Resource(name="g"),
                message_queue=m.MessageQueue(topic=m.Resource(name="t")),
                invisible_duration=m.Duration(seconds=60),
                long_polling_timeout=m.Duration(seconds=5),
            )
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                receive = channel.unary_stream(
                    PATH + "ReceiveMessage",
                    request_serializer=m.ReceiveMessageRequest.SerializeToString,
                    response_deserializer=m.ReceiveMessageResponse.FromString,
                )
                answer = next(receive(request, metadata=METADATA, timeout=limit(30)))
            assert answer.status.message.startswith("the invisibleTime is too small. min is 70000")
        finally:
            process.terminate()
