"""The official clients for C# and C++ as their sources say that they talk: metadata, signatures,
the order of calls, and the oddities of what they send. Replayed with grpcio over TLS, against
a proxy with access control; the clients themselves do not run here.

    C#    route, telemetry with a deadline in ten years and no language in it, then the work
    C++   telemetry first, with a deadline in an hour; route; assignments; then the work. The
          credential names a region and a service; bodies are zlib's and called gzip's; the time of
          a delayed message stands in its delivery attempt too, cut to 32 bits
"""

import asyncio
import itertools
import queue
import ssl
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import ClientType, Code, FilterType, MessageType
from sluicemq.proxy.service import PATH
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire.signature import sign_call
from waiting import limit

grpc: Any = pytest.importorskip("grpc")

KEY, SECRET = "orders-service", "12345678"
TOPIC, DELAYED, GROUP = "orders", "later", "billing"
RULES = f"accounts:\n- {{accessKey: {KEY}, secretKey: '{SECRET}', admin: true}}\n"
TEN_YEARS_S = 3650 * 24 * 3600
Metadata = list[tuple[str, str]]


class Replayed:
    """One client: a channel with TLS, its metadata, and a telemetry stream."""

    streams_in = frozenset({"Telemetry"})
    telemetry_s: float

    def __init__(self, address: str, kind: int) -> None:
        host, _, port = address.partition(":")
        pem = ssl.get_server_certificate((host, int(port))).encode()
        self.channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(pem))
        self.id = f"host@{uuid.uuid4().hex[:6]}@1@abc"
        self.kind = kind
        self.access_point = m.Endpoints(
            scheme=m.AddressScheme.IPv4, addresses=[m.Address(host=host, port=int(port))]
        )
        self._said: queue.Queue[Any] = queue.Queue()

    def metadata(self) -> Metadata:
        raise NotImplementedError

    def settings(self) -> m.Settings:
        raise NotImplementedError

    def call(self, name: str, request: Any, timeout_s: float = 10) -> Any:
        """The answer, a list of those of a call that streams."""
        several = name == "ReceiveMessage"
        make = self.channel.unary_stream if several else self.channel.unary_unary
        method = make(
            PATH + name,
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(m, f"{name}Response").FromString,
        )
        answer = method(request, timeout=timeout_s, metadata=self.metadata())
        return list(answer) if several else answer

    def begin_session(self) -> m.Settings:
        """Opens the telemetry stream and waits for the settings, as both do, three seconds."""
        method = self.channel.stream_stream(
            PATH + "Telemetry",
            request_serializer=m.TelemetryCommand.SerializeToString,
            response_deserializer=m.TelemetryCommand.FromString,
        )
        self._said.put(m.TelemetryCommand(settings=self.settings()))
        stream = method(
            iter(self._said.get, None), timeout=self.telemetry_s, metadata=self.metadata()
        )
        answer: m.TelemetryCommand = next(stream)
        assert answer.WhichOneof("command") == "settings"
        sent = self.settings()
        assert answer.settings.WhichOneof("pub_sub") == sent.WhichOneof("pub_sub")
        return answer.settings

    def route(self, topic: str) -> list[m.MessageQueue]:
        request = m.QueryRouteRequest(topic=m.Resource(name=topic), endpoints=self.access_point)
        answer = self.call("QueryRoute", request)
        assert answer.status.code == Code.OK
        assert {it.broker.endpoints.SerializeToString() for it in answer.message_queues} == {
            self.access_point.SerializeToString()
        }
        return list(answer.message_queues)

    def send(self, message: m.Message) -> m.SendResultEntry:
        answer = self.call("SendMessage", m.SendMessageRequest(messages=[message]))
        assert answer.status.code == Code.OK, answer
        (entry,) = answer.entries
        assert entry.message_id == message.system_properties.message_id
        return entry

    def heartbeat(self) -> None:
        request = m.HeartbeatRequest(client_type=self.kind)
        if self.kind != ClientType.PRODUCER:
            request.group.name = GROUP
        assert self.call("Heartbeat", request).status.code == Code.OK

    def receive(self, queues: Iterator[m.MessageQueue], expression: str) -> list[m.Message]:
        """Of the next queue; both want neither an attempt id nor renewal."""
        request = m.ReceiveMessageRequest(
            group=m.Resource(name=GROUP), message_queue=next(queues), batch_size=16,
            filter_expression=m.FilterExpression(type=FilterType.TAG, expression=expression),
            invisible_duration=m.Duration(seconds=15),
            long_polling_timeout=m.Duration(seconds=1), auto_renew=False,
        )  # fmt: skip
        answers = self.call("ReceiveMessage", request, 11)
        (status,) = [it.status for it in answers if it.HasField("status")]
        assert status.code in (Code.OK, Code.MESSAGE_NOT_FOUND), status
        return [it.message for it in answers if it.HasField("message")]

    def of(self, kind: str, message: m.Message, **more: Any) -> Any:
        """A request about a message that was received: acknowledgement or change of its time."""
        common = {"group": m.Resource(name=GROUP), "topic": message.topic}
        system = message.system_properties
        named = {"message_id": system.message_id, "receipt_handle": system.receipt_handle}
        if kind == "AckMessage":
            return m.AckMessageRequest(**common, entries=[m.AckMessageEntry(**named)])
        return m.ChangeInvisibleDurationRequest(**common, **named, **more)

    def acknowledge(self, message: m.Message) -> None:
        answer = self.call("AckMessage", self.of("AckMessage", message))
        assert [answer.status.code, *(it.status.code for it in answer.entries)] == [Code.OK] * 2

    def end(self) -> None:
        request = m.NotifyClientTerminationRequest()
        if self.kind != ClientType.PRODUCER:
            request.group.name = GROUP
        assert self.call("NotifyClientTermination", request).status.code == Code.OK
        self._said.put(None)
        self.channel.close()


class CSharp(Replayed):
    """grpc-dotnet: what a client of .NET sends."""

    telemetry_s = TEN_YEARS_S

    def metadata(self) -> Metadata:
        (date, (name, text)) = sign_call(KEY, SECRET, time.strftime("%Y%m%dT%H%M%SZ"))
        begin, _, signature = text.rpartition("=")
        return [
            ("x-mq-language", "DOTNET"), ("x-mq-client-version", "5.1.0"),
            ("x-mq-request-id", str(uuid.uuid4())), ("x-mq-client-id", self.id),
            ("x-mq-namespace", ""), date, (name, f"{begin}={signature.upper()}"),
        ]  # fmt: skip

    def settings(self) -> m.Settings:
        said = m.Settings(
            client_type=self.kind, access_point=self.access_point,
            request_timeout=m.Duration(seconds=3),
            user_agent=m.UA(version="5.1.0", hostname="host", platform="Unix 6.1"),
        )  # fmt: skip
        if self.kind == ClientType.PRODUCER:
            said.publishing.topics.add(name=TOPIC)
            said.publishing.validate_message_type = True
            said.backoff_policy.max_attempts = 3
            said.backoff_policy.exponential_backoff.multiplier = 1
        else:
            said.subscription.group.name = GROUP
            entry = said.subscription.subscriptions.add(topic=m.Resource(name=TOPIC))
            entry.expression.type, entry.expression.expression = FilterType.TAG, "red"
            said.subscription.long_polling_timeout.seconds = 1
        return said

    def message(self, number: int, tag: str) -> m.Message:
        system = m.SystemProperties(
            keys=[f"k{number}"], message_id=f"01{number:032X}", born_host="host", tag=tag,
            body_encoding=m.Encoding.IDENTITY, queue_id=number % 4,
            message_type=MessageType.NORMAL,
        )  # fmt: skip
        system.born_timestamp.seconds = int(time.time())
        body = b"c# %d" % number
        return m.Message(topic=m.Resource(name=TOPIC), body=body, system_properties=system)


class Cpp(Replayed):
    """gRPC's own library: what a client of C++ sends."""

    telemetry_s = 3600

    def metadata(self) -> Metadata:
        (date, (name, text)) = sign_call(
            KEY, SECRET, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        )
        text = text.replace(f"Credential={KEY}", f"Credential={KEY}/cn-hangzhou/RocketMQ")
        return [
            ("x-mq-language", "CPP"), ("x-mq-client-id", self.id), ("x-mq-namespace", ""),
            ("x-mq-client-version", "5.0.3"), ("x-mq-protocol-version", "v2"), date, (name, text),
        ]  # fmt: skip

    def settings(self) -> m.Settings:
        said = m.Settings(client_type=self.kind)
        if self.kind == ClientType.PRODUCER:
            said.publishing.max_body_size = 4 << 20
            said.publishing.topics.add(name=TOPIC)
        else:
            said.access_point.CopyFrom(self.access_point)
            said.subscription.group.name = GROUP
            entry = said.subscription.subscriptions.add(topic=m.Resource(name=TOPIC))
            entry.expression.type, entry.expression.expression = FilterType.TAG, "*"
        return said

    def message(self, number: int, body: bytes, due_s: float = 0) -> m.Message:
        system = m.SystemProperties(message_id=f"02{number:032X}", born_host="host", tag="blue")
        system.born_timestamp.seconds = int(time.time())
        system.message_type = MessageType.NORMAL
        if due_s:
            system.message_type = MessageType.DELAY
            cut = int(due_s * 1000) & 0xFFFFFFFF
            system.delivery_attempt = cut - (1 << 32) if cut >> 31 else cut
            system.delivery_timestamp.seconds = int(due_s)
            system.delivery_timestamp.nanos = int(due_s % 1 * 1e9)
        if len(body) > 1000:
            body, system.body_encoding = zlib.compress(body), m.Encoding.GZIP
        else:
            system.body_encoding = m.Encoding.IDENTITY
        topic = m.Resource(name=DELAYED if due_s else TOPIC)
        return m.Message(topic=topic, body=body, system_properties=system)

    def assignments(self, topic: str) -> list[m.MessageQueue]:
        request = m.QueryAssignmentRequest(
            topic=m.Resource(name=topic), group=m.Resource(name=GROUP), endpoints=self.access_point
        )
        answer = self.call("QueryAssignment", request)
        assert answer.status.code == Code.OK
        return [it.message_queue for it in answer.assignments]


def csharp(address: str) -> None:
    producer = CSharp(address, ClientType.PRODUCER)
    queues = producer.route(TOPIC)
    assert [it.id for it in queues] == [0, 1, 2, 3]
    publishing = producer.begin_session().publishing
    assert publishing.validate_message_type
    assert publishing.max_body_size > 0
    producer.heartbeat()
    wanted = set()
    for number in range(40):
        message = producer.message(number, "red" if number % 2 else "green")
        producer.send(message)
        wanted |= {message.body} if number % 2 else set()
    consumer = CSharp(address, ClientType.SIMPLE_CONSUMER)
    cycle = itertools.cycle(consumer.route(TOPIC))
    assert consumer.begin_session().subscription.group.name == GROUP
    consumer.heartbeat()
    got, changed = dict[bytes, int](), False
    while len(got) < len(wanted) or not changed:
        for message in consumer.receive(cycle, "red"):
            got[message.body] = message.system_properties.delivery_attempt
            assert message.system_properties.tag == "red"
            if not changed:  # once given back, and given again at once
                soon = m.Duration(nanos=1_000_000)
                request = consumer.of("Change", message, invisible_duration=soon)
                answer = consumer.call("ChangeInvisibleDuration", request)
                assert answer.status.code == Code.OK
                assert answer.receipt_handle
                first, changed = message.body, True
                del got[first]
            else:
                consumer.acknowledge(message)
    assert set(got) == wanted
    assert got.pop(first) == 2
    assert set(got.values()) == {1}
    assert not consumer.receive(cycle, "red")
    consumer.end()
    producer.end()


def cpp(address: str) -> None:
    producer = Cpp(address, ClientType.PRODUCER)
    assert producer.begin_session().publishing.max_body_size > 0
    producer.route(TOPIC)
    large = b"a body that is compressed " * 400
    sent = {b"small", large}
    for number, body in enumerate(sorted(sent)):
        producer.send(producer.message(number, body))
    due_s = time.time() + 1.5
    producer.route(DELAYED)
    producer.send(producer.message(99, b"late", due_s))
    consumer = Cpp(address, ClientType.SIMPLE_CONSUMER)
    consumer.begin_session()
    consumer.route(TOPIC)
    for topic, wanted in ((TOPIC, sent), (DELAYED, {b"late"})):
        (queue_of_all,) = consumer.assignments(topic)
        assert queue_of_all.id == -1
        consumer.heartbeat()
        got = set()
        while got != wanted:
            for message in consumer.receive(itertools.repeat(queue_of_all), "*"):
                is_coded = message.system_properties.body_encoding == m.Encoding.GZIP
                got.add(zlib.decompress(message.body, 47) if is_coded else message.body)
                assert message.system_properties.delivery_attempt == 1
                consumer.acknowledge(message)
            assert got <= wanted
    assert time.time() > due_s - 0.1
    consumer.end()
    producer.end()


@pytest.mark.parametrize("client", [csharp, cpp])
def test_a_client_that_is_replayed_gets_what_it_wants(
    client: Callable[[str], None], tmp_path: Path
) -> None:
    async def main() -> None:
        rules = tmp_path / "plain_acl.yml"
        rules.write_text(RULES)
        settings = {"aclEnable": "true", "plainAclFile": str(rules), "timerWheelEnable": "true"}
        async with embedded(
            tcp=True, proxy=True, settings=settings, store=tmp_path / "store",
            credentials=(KEY, SECRET),
        ) as mq:  # fmt: skip
            await prepare(mq)
            await asyncio.wait_for(asyncio.to_thread(client, mq.servers.proxy_address), limit(60))

    asyncio.run(main())


async def prepare(mq: EmbeddedSluice) -> None:
    await mq.admin.create_topic(TOPIC, queues=4)
    await mq.admin.create_topic(DELAYED, queues=4, type="DELAY")


def refused(kind: type[Replayed], address: str) -> None:
    client = kind(address, ClientType.PRODUCER)
    answer = client.call("QueryRoute", m.QueryRouteRequest(topic=m.Resource(name=TOPIC)))
    assert answer.status.code == Code.UNAUTHORIZED
    client.channel.close()


def test_a_signature_of_another_secret_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        rules = tmp_path / "plain_acl.yml"
        rules.write_text(RULES.replace(SECRET, "87654321"))
        settings = {"aclEnable": "true", "plainAclFile": str(rules)}
        async with embedded(
            tcp=True, proxy=True, settings=settings, store=tmp_path / "store",
            credentials=(KEY, "87654321"),
        ) as mq:  # fmt: skip
            await mq.admin.create_topic(TOPIC)
            for kind in (CSharp, Cpp):
                await asyncio.to_thread(refused, kind, mq.servers.proxy_address)

    asyncio.run(main())
