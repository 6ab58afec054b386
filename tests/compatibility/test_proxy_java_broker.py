"""Our proxies before a broker of RocketMQ: a client of grpcio says what clients of RocketMQ 5 say.

Two of them stand side by side. What one has given out the other takes back.
"""

import contextlib
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from peer.clusters import SOURCE, await_line, process
from peer.names import own
from peer.popping import Raw
from peer.stores import KILL, House, house

from conftest import missing_tool_is_a_reason
from sluicemq.client.sync.admin import Admin
from sluicemq.model.ids import parse_host
from sluicemq.net.grpc import call_unary
from sluicemq.proxy import STATUS_METHOD
from sluicemq.proxy import messages as m
from sluicemq.proxy.cluster import GROUP_CHECK_S
from sluicemq.proxy.messages import ClientType, Code, MessageType
from thorough import ALL
from waiting import limit, wait_for

RELEASES = ["5.5.0", *(["5.3.3"] if ALL else [])]
PATH = "/apache.rocketmq.v2.MessagingService/"
POLL_S = 5  # the least that a proxy takes
QUICK = {
    "transactionTimeOut": "2000", "transactionCheckInterval": "1000",
    "transactionOpBatchInterval": "100", "recallMessageEnable": "true",
}  # fmt: skip
NUMBERS = itertools.count()


class Caller:
    """One client of one proxy."""

    def __init__(self, address: str) -> None:
        self.client_id = f"caller@{next(NUMBERS)}"
        self.address = address
        self._channel = grpc.insecure_channel(address)
        self._said: queue.SimpleQueue[m.TelemetryCommand | None] = queue.SimpleQueue()
        self.heard: list[m.TelemetryCommand] = []

    def ask(self, name: str, timeout_s: float = 20.0, **fields: Any) -> Any:
        """The answer to a call, a list for those that stream."""
        request = getattr(m, f"{name}Request")(**fields)
        streams = name == "ReceiveMessage"
        method = self._channel.unary_stream if streams else self._channel.unary_unary
        call = method(
            PATH + name,
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(m, f"{name}Response").FromString,
        )
        answer = call(request, timeout=timeout_s, metadata=self._metadata)
        return list(answer) if streams else answer

    @property
    def _metadata(self) -> list[tuple[str, str]]:
        return [
            ("x-mq-client-id", self.client_id), ("x-mq-language", "PYTHON"),
            ("x-mq-client-version", "5.1.0"), ("x-mq-protocol", "v2"),
        ]  # fmt: skip

    def join(self, settings: m.Settings) -> m.TelemetryCommand:
        """Says its settings over a telemetry stream, which stays open; what is answered."""
        stream = self._channel.stream_stream(
            PATH + "Telemetry",
            request_serializer=m.TelemetryCommand.SerializeToString,
            response_deserializer=m.TelemetryCommand.FromString,
        )
        self._said.put(m.TelemetryCommand(settings=settings))
        answers = stream(iter(self._said.get, None), metadata=self._metadata)

        def listen() -> None:
            with contextlib.suppress(grpc.RpcError):
                self.heard.extend(answers)

        threading.Thread(target=listen, daemon=True).start()
        wait_for(lambda: self.heard)
        return self.heard[0]

    def close(self) -> None:
        self._said.put(None)
        self._channel.close()


class Place:
    """A broker of RocketMQ with two of our proxies, and what is asked of them."""

    def __init__(self, inside: House, proxies: list[str], logs: list[Path]) -> None:
        self.house = inside
        self.proxies = proxies
        self.logs = logs
        self._stack = contextlib.ExitStack()
        self.one, self.other = map(self.caller, proxies)
        self.raw = Raw(parse_host(inside.broker))
        self._stack.callback(self.raw.close)

    def caller(self, address: str) -> Caller:
        made = Caller(address)
        self._stack.callback(made.close)
        return made

    def close(self) -> None:
        self._stack.close()

    def topic(self, name: str, kind: str = "normal") -> m.Resource:
        with Admin(self.house.name_server) as admin:
            admin.create_topic(own(f"T_proxied_{name}"), queues=2, type=kind)
        return m.Resource(name=own(f"T_proxied_{name}"))

    def group(self, name: str, topic: m.Resource) -> "Group":
        """A group that reads a topic from here on: its first pop finds nothing."""
        resource = m.Resource(name=own(f"G_proxied_{name}"))
        self.raw.group(resource.name)
        group = Group(topic, resource)
        assert group.receive(self.one) == []
        return group


class Group:
    """A group, and how it receives."""

    def __init__(self, topic: m.Resource, group: m.Resource) -> None:
        self.topic, self.group = topic, group

    def receive(self, caller: Caller, **options: Any) -> list[m.Message]:
        """What one receive gets."""
        options = {"invisible_duration": m.Duration(seconds=30), "batch_size": 32, **options}
        answers = caller.ask(
            "ReceiveMessage", group=self.group, message_queue=m.MessageQueue(topic=self.topic),
            long_polling_timeout=m.Duration(seconds=POLL_S), **options,
        )  # fmt: skip
        messages = [it.message for it in answers if it.HasField("message")]
        status = next(it.status for it in answers if it.HasField("status"))
        assert status.code == (Code.OK if messages else Code.MESSAGE_NOT_FOUND), status
        return messages

    def all(self, caller: Caller, count: int, **options: Any) -> list[m.Message]:
        """So many messages, however many receives that takes."""
        found: list[m.Message] = []
        end_s = time.monotonic() + limit(60)
        while len(found) < count and time.monotonic() < end_s:
            found += self.receive(caller, **options)
        return found

    def acknowledge(self, caller: Caller, messages: list[m.Message]) -> None:
        entries = [
            m.AckMessageEntry(
                message_id=it.system_properties.message_id,
                receipt_handle=it.system_properties.receipt_handle,
            )
            for it in messages
        ]
        answer = caller.ask("AckMessage", group=self.group, topic=self.topic, entries=entries)
        assert {it.status.code for it in answer.entries} == {Code.OK}, answer


def message(topic: m.Resource, body: str, **system: Any) -> m.Message:
    system = {"message_id": f"{body}-{next(NUMBERS)}", "message_type": MessageType.NORMAL, **system}
    return m.Message(
        topic=topic, body=body.encode(), user_properties={"n": body},
        system_properties=m.SystemProperties(**system),
    )  # fmt: skip


def send(caller: Caller, *messages: m.Message) -> Any:
    """The entries of the answer."""
    answer = caller.ask("SendMessage", messages=messages)
    assert answer.status.code == Code.OK, answer
    assert len(answer.entries) == len(messages)
    return list(answer.entries)


def bodies(messages: list[m.Message]) -> list[str]:
    return sorted(it.body.decode() for it in messages)


def soon(seconds: float) -> m.Timestamp:
    now_ms = time.time_ns() // 1_000_000 + int(seconds * 1000)
    return m.Timestamp(seconds=now_ms // 1000, nanos=now_ms % 1000 * 1_000_000)


@pytest.fixture(scope="module", params=RELEASES)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("proxied")
    with contextlib.ExitStack() as stack:
        with missing_tool_is_a_reason():
            inside = stack.enter_context(house(directory, request.param, **QUICK))
        stack.enter_context(inside.java(KILL))
        logs = [directory / f"proxy-{number}.log" for number in (1, 2)]
        for log in logs:
            stack.enter_context(proxy(inside.name_server, log))
        made = Place(inside, [address_in(log) for log in logs], logs)
        stack.callback(made.close)
        yield made


@contextlib.contextmanager
def proxy(name_server: str, log: Path) -> Iterator[Any]:
    command = [sys.executable, "-m", "sluicemq", "proxy", "-n", name_server]
    command += ["--host", "127.0.0.1", "--port", "0"]
    with process(command, log, {"PYTHONPATH": str(SOURCE)}) as running:
        await_line(running, log, "ready")
        yield running


def address_in(log: Path) -> str:
    ready = next(line for line in log.read_text().splitlines() if line.startswith("ready "))
    return ready.partition("proxy=")[2].split()[0]


# ---- routes and members


def test_a_route_names_the_broker_at_the_proxy(place: Place) -> None:
    for kind, accepted in (("normal", MessageType.NORMAL), ("fifo", MessageType.FIFO)):
        topic = place.topic(f"route_{kind}", kind)
        answer = place.one.ask("QueryRoute", topic=topic)
        assert answer.status.code == Code.OK
        assert sorted(it.id for it in answer.message_queues) == [0, 1]
        for found in answer.message_queues:
            (address,) = found.broker.endpoints.addresses
            assert f"{address.host}:{address.port}" == place.one.address
            assert found.broker.name == "broker-a"
            assert list(found.accept_message_types) == [accepted]
    missing = place.one.ask("QueryRoute", topic=m.Resource(name="nowhere"))
    assert missing.status.code == Code.TOPIC_NOT_FOUND


def consumer(group: Group, expression: str = "*") -> m.Settings:
    entry = m.SubscriptionEntry(
        topic=group.topic, expression=m.FilterExpression(type=1, expression=expression)
    )
    return m.Settings(
        client_type=ClientType.SIMPLE_CONSUMER,
        subscription=m.Subscription(group=group.group, subscriptions=[entry]),
    )


def test_a_client_is_a_member_of_its_group_at_the_broker(place: Place) -> None:
    group = place.group("member", place.topic("member"))
    caller = place.caller(place.proxies[0])
    answer = caller.join(consumer(group))
    assert answer.settings.subscription.receive_batch_size == 32
    assert answer.settings.backoff_policy.max_attempts == 17
    heartbeat = caller.ask("Heartbeat", group=group.group, client_type=ClientType.SIMPLE_CONSUMER)
    assert heartbeat.status.code == Code.OK
    listed: dict[str, object] = {"consumerGroup": group.group.name}
    assert caller.client_id.encode() in bytes(place.raw.call(203, listed).body)
    ended = caller.ask("NotifyClientTermination", group=group.group)
    assert ended.status.code == Code.OK
    assert caller.client_id.encode() not in bytes(place.raw.call(203, listed).body)


def warnings(proxy_address: str, group: Group) -> list[str]:
    status = json.loads(call_unary(proxy_address, STATUS_METHOD, b"", (), tls=None))
    return [text for text in status["warnings"] if group.group.name in text]


@pytest.mark.thorough
def test_members_that_want_different_things_are_told_of(place: Place) -> None:
    """Two that came in by one proxy at once; by two proxies when the broker is looked at again."""
    group = place.group("unequal", place.topic("unequal"))
    early, late, later = map(place.caller, (*place.proxies, place.proxies[1]))
    for caller, expression in ((early, "a"), (late, "b"), (later, "c")):
        caller.join(consumer(group, expression))
    wait_for(lambda: warnings(place.proxies[1], group))
    assert "have different subscriptions" in place.logs[1].read_text()

    def is_told() -> list[str]:
        early.ask("Heartbeat", group=group.group, client_type=ClientType.SIMPLE_CONSUMER)
        return warnings(place.proxies[0], group)

    wait_for(is_told, GROUP_CHECK_S + 30)
    assert "a member at" in is_told()[0]


# ---- messages


def test_what_is_sent_is_received_once(place: Place) -> None:
    topic = place.topic("exact")
    group = place.group("exact", topic)
    for n in range(20):
        send(place.one, message(topic, f"m{n:02}", tag="a" if n % 2 else "b", keys=[f"k{n}"]))
    send(place.other, *(message(topic, f"m{n}") for n in range(20, 30)))
    found = group.all(place.one, 30)
    assert bodies(found) == [f"m{n:02}" for n in range(30)]
    for it in found[:20]:
        assert it.user_properties["n"] == it.body.decode()
        assert it.system_properties.delivery_attempt == 1
    group.acknowledge(place.other, found[::2])
    group.acknowledge(place.one, found[1::2])
    assert group.receive(place.other) == []


def test_tags_and_sql(place: Place) -> None:
    topic = place.topic("filter")
    tags, sql = place.group("tags", topic), place.group("sql", topic)
    for n in range(10):
        send(place.one, message(topic, f"{n}", tag="abc"[n % 3]))
    wanted = m.FilterExpression(type=1, expression="a || c")
    found = tags.all(place.one, 7, filter_expression=wanted)
    assert bodies(found) == ["0", "2", "3", "5", "6", "8", "9"]
    wanted = m.FilterExpression(type=2, expression="n >= 0 AND TAGS = 'b'")
    found = sql.all(place.other, 3, filter_expression=wanted)
    assert bodies(found) == ["1", "4", "7"]


@pytest.mark.thorough
def test_a_time_that_was_changed_counts(place: Place) -> None:
    topic = place.topic("change")
    group = place.group("change", topic)
    send(place.one, message(topic, "m"))
    (first,) = group.all(place.one, 1)
    answer = place.other.ask(
        "ChangeInvisibleDuration", group=group.group, topic=topic,
        receipt_handle=first.system_properties.receipt_handle,
        invisible_duration=m.Duration(seconds=2), message_id=first.system_properties.message_id,
    )  # fmt: skip
    assert answer.status.code == Code.OK
    assert answer.receipt_handle != first.system_properties.receipt_handle
    (again,) = group.all(place.one, 1)
    assert again.system_properties.message_id == first.system_properties.message_id
    assert again.system_properties.delivery_attempt == 2
    group.acknowledge(place.other, [again])
    assert group.receive(place.one) == []


@pytest.mark.thorough
def test_what_is_given_up_is_a_dead_letter(place: Place) -> None:
    topic = place.topic("dead")
    group = place.group("dead", topic)
    send(place.one, message(topic, "m"))
    (found,) = group.all(place.one, 1, invisible_duration=m.Duration(seconds=10))
    system = found.system_properties
    answer = place.other.ask(
        "ForwardMessageToDeadLetterQueue", group=group.group, topic=topic,
        receipt_handle=system.receipt_handle, message_id=system.message_id,
        delivery_attempt=system.delivery_attempt, max_delivery_attempts=1,
    )  # fmt: skip
    assert answer.status.code == Code.OK, answer
    place_of: dict[str, object] = {"topic": f"%DLQ%{group.group.name}", "queueId": 0}
    wait_for(lambda: (place.raw.call(30, place_of).fields or {}).get("offset") == "1")
    end_s = time.monotonic() + limit(12)
    while time.monotonic() < end_s:
        assert group.receive(place.one) == []


# ---- transactions


@pytest.mark.thorough
def test_transactions_are_ended_through_either_proxy(place: Place) -> None:
    topic = place.topic("tx", "transaction")
    group = place.group("tx", topic)
    ends = {"kept": m.TransactionResolution.COMMIT, "gone": m.TransactionResolution.ROLLBACK}
    for n, (body, resolution) in enumerate(ends.items()):
        one, other = (place.one, place.other)[:: -1 if n else 1]
        prepared = message(topic, body, message_type=MessageType.TRANSACTION)
        (entry,) = send(one, prepared)
        answer = other.ask(
            "EndTransaction", topic=topic, message_id=entry.message_id,
            transaction_id=entry.transaction_id, resolution=resolution,
            source=m.TransactionSource.SOURCE_CLIENT,
        )  # fmt: skip
        assert answer.status.code == Code.OK, answer
    found = group.all(place.one, 1)
    group.acknowledge(place.other, found)
    assert bodies(found) == ["kept"]
    assert group.receive(place.one) == []


def test_an_open_transaction_is_asked_about(place: Place) -> None:
    topic = place.topic("open", "transaction")
    group = place.group("open", topic)
    producer = place.caller(place.proxies[0])
    producer.join(
        m.Settings(client_type=ClientType.PRODUCER, publishing=m.Publishing(topics=[topic]))
    )
    (entry,) = send(producer, message(topic, "open", message_type=MessageType.TRANSACTION))
    wait_for(lambda: len(producer.heard) > 1)
    asked = producer.heard[1].recover_orphaned_transaction_command
    assert asked.message.system_properties.message_id == entry.message_id
    answer = place.other.ask(
        "EndTransaction", topic=topic, message_id=entry.message_id,
        transaction_id=asked.transaction_id, resolution=m.TransactionResolution.COMMIT,
        source=m.TransactionSource.SOURCE_SERVER_CHECK,
    )  # fmt: skip
    assert answer.status.code == Code.OK, answer
    found = group.all(place.one, 1)
    assert bodies(found) == ["open"]
    group.acknowledge(place.one, found)


# ---- delays


def test_a_delayed_message_comes_at_its_time_and_one_that_is_recalled_never(place: Place) -> None:
    topic = place.topic("delay", "delay")
    group = place.group("delay", topic)
    due, late = soon(6), soon(8)
    kinds: dict[str, Any] = {"message_type": MessageType.DELAY}
    send(place.one, message(topic, "comes", delivery_timestamp=due, **kinds))
    (entry,) = send(place.one, message(topic, "never", delivery_timestamp=late, **kinds))
    answer = place.other.ask("RecallMessage", topic=topic, recall_handle=entry.recall_handle)
    assert answer.status.code == Code.OK, answer
    assert answer.message_id == entry.message_id
    found = group.all(place.one, 1)
    assert time.time() >= due.seconds + due.nanos / 1e9
    assert bodies(found) == ["comes"]
    group.acknowledge(place.one, found)
    while time.time() < late.seconds + 3:
        assert group.receive(place.other) == []


# ---- the end of a proxy


@pytest.mark.thorough
def test_a_proxy_that_is_killed_takes_nothing_along(place: Place, tmp_path: Path) -> None:
    topic = place.topic("kill", "transaction")
    group = place.group("kill", topic)
    with proxy(place.house.name_server, tmp_path / "proxy.log") as running:
        caller = place.caller(address_in(tmp_path / "proxy.log"))
        prepared = [message(topic, f"{n}", message_type=MessageType.TRANSACTION) for n in range(3)]
        entries = [send(caller, it)[0] for it in prepared]
        for entry in entries[:2]:
            place.one.ask(
                "EndTransaction", topic=topic, message_id=entry.message_id,
                transaction_id=entry.transaction_id,
                resolution=m.TransactionResolution.COMMIT,
            )  # fmt: skip
        found = group.all(caller, 2)
        running.kill()
        running.wait()
    group.acknowledge(place.other, found)
    ended = place.other.ask(
        "EndTransaction", topic=topic, message_id=entries[2].message_id,
        transaction_id=entries[2].transaction_id, resolution=m.TransactionResolution.COMMIT,
    )  # fmt: skip
    assert ended.status.code == Code.OK
    last = group.all(place.one, 1)
    assert bodies(found + last) == ["0", "1", "2"]
    group.acknowledge(place.one, last)
    assert group.receive(place.one) == []
