"""Every refusal of the proxy, provoked: its code, and RocketMQ's phrase at the beginning.

`tests/golden/grpc_refusals.json` is the table: name -> code, and how the message begins. What
RocketMQ's proxy writes was read from its source (facts only) and from recorded traffic.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from proxied import Proxied, Speaker, proxied
from sluicemq.config.proxying import ProxyLimits
from sluicemq.model.ids import RecallHandle
from sluicemq.net.grpc import CallError
from sluicemq.proxy import clients, receiving, renewal
from sluicemq.proxy import messages as m
from sluicemq.proxy.limits import REQUEST_BYTES_MAX, Refusal, StatusError
from sluicemq.proxy.messages import ClientType, Code, FilterType, QueryOffsetPolicy
from sluicemq.proxy.service import TELEMETRY_FAILED

GOLDEN: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "grpc_refusals.json").read_text()
)
Provoke = Callable[[Proxied, Speaker, pytest.MonkeyPatch], Awaitable[Any]]
TOPIC, GROUP = m.Resource(name="orders"), m.Resource(name="billing")
LIMITS = ProxyLimits(delay_ms_max=60_000)
HANDLE = "0 1 60000 0 0 broker-a 0 0 0"
FUTURE = 1 << 52


def message(topic: str = "orders", body: bytes = b"b", **fields: Any) -> m.Message:
    user = fields.pop("user", {})
    fields.setdefault("message_id", "01AB")
    system = m.SystemProperties(**fields)
    return m.Message(
        topic=m.Resource(name=topic), body=body, system_properties=system, user_properties=user
    )


def call(name: str, request: Any, **headers: str) -> Provoke:
    async def provoke(proxy: Proxied, speaker: Speaker, patch: pytest.MonkeyPatch) -> Any:
        speaker.headers.update(headers)
        return await speaker.ask(name, request, 20.0)

    return provoke


def send(*messages: m.Message) -> Provoke:
    return call("SendMessage", m.SendMessageRequest(messages=messages))


def text(**fields: Any) -> Provoke:
    return send(message(**fields))


def route(name: str) -> Provoke:
    return call("QueryRoute", m.QueryRouteRequest(topic=m.Resource(name=name)))


def assignment(group: str) -> Provoke:
    request = m.QueryAssignmentRequest(topic=TOPIC, group=m.Resource(name=group))
    return call("QueryAssignment", request)


def receive(topic: str = "orders", seconds: int = 30, **fields: Any) -> m.ReceiveMessageRequest:
    return m.ReceiveMessageRequest(
        group=GROUP,
        message_queue=m.MessageQueue(topic=m.Resource(name=topic)),
        filter_expression=fields.pop("filter_expression", m.FilterExpression(expression="*")),
        invisible_duration=m.Duration(seconds=seconds),
        long_polling_timeout=m.Duration(seconds=5),
        **fields,
    )


def receives(**fields: Any) -> Provoke:
    return call("ReceiveMessage", receive(**fields))


def hurried(version: str) -> Provoke:
    async def provoke(proxy: Proxied, speaker: Speaker, patch: pytest.MonkeyPatch) -> Any:
        speaker.headers["x-mq-client-version"] = version
        return await speaker.ask("ReceiveMessage", receive(), 2.0)

    return provoke


def sql(expression: str) -> m.FilterExpression:
    return m.FilterExpression(type=FilterType.SQL, expression=expression)


def change(handle: str) -> Provoke:
    request = m.ChangeInvisibleDurationRequest(
        group=GROUP, topic=TOPIC, receipt_handle=handle, invisible_duration=m.Duration(seconds=20)
    )
    return call("ChangeInvisibleDuration", request)


def acknowledge(*handles: str) -> Provoke:
    entries = [m.AckMessageEntry(receipt_handle=handle, message_id="m") for handle in handles]
    return call("AckMessage", m.AckMessageRequest(group=GROUP, topic=TOPIC, entries=entries))


def forward(handle: str) -> Provoke:
    request = m.ForwardMessageToDeadLetterQueueRequest(
        group=GROUP, topic=TOPIC, receipt_handle=handle, message_id="m"
    )
    return call("ForwardMessageToDeadLetterQueue", request)


def telemetry(command: m.TelemetryCommand) -> Provoke:
    return call("Telemetry", command)


def settings(kind: int = ClientType.PUSH_CONSUMER, **fields: Any) -> Provoke:
    return telemetry(m.TelemetryCommand(settings=m.Settings(client_type=kind, **fields)))


def subscribes(expression: str = "*") -> m.Subscription:
    entry = m.SubscriptionEntry(
        topic=TOPIC, expression=m.FilterExpression(type=FilterType.TAG, expression=expression)
    )
    return m.Subscription(group=GROUP, subscriptions=[entry])


def end(transaction_id: str) -> Provoke:
    request = m.EndTransactionRequest(topic=TOPIC, transaction_id=transaction_id, message_id="m")
    return call("EndTransaction", request)


def recall(handle: str) -> Provoke:
    request = m.RecallMessageRequest(topic=m.Resource(name="later"), recall_handle=handle)
    return call("RecallMessage", request)


def offsets(name: str, queue_id: int = 0, broker: str = "broker-a", **fields: Any) -> Provoke:
    topic = fields.pop("topic", TOPIC)
    queue = m.MessageQueue(topic=topic, id=queue_id, broker=m.Broker(name=broker))
    if name != "QueryOffset":
        fields["group"] = GROUP
    return call(name, getattr(m, f"{name}Request")(message_queue=queue, **fields))


def of_topic(name: str, perm: int, provoke: Provoke) -> Provoke:
    async def provoked(proxy: Proxied, speaker: Speaker, patch: pytest.MonkeyPatch) -> Any:
        await proxy.mq.admin.create_topic(name, queues=1, perm=perm)
        return await provoke(proxy, speaker, patch)

    return provoked


def patched(module: Any, name: str, value: Any, provoke: Provoke) -> Provoke:
    async def provoked(proxy: Proxied, speaker: Speaker, patch: pytest.MonkeyPatch) -> Any:
        patch.setattr(module, name, value)
        return await provoke(proxy, speaker, patch)

    return provoked


async def of_another_account(proxy: Proxied, speaker: Speaker, patch: pytest.MonkeyPatch) -> None:
    other = proxy.speaker()
    calls = (one.call("QueryRoute", m.QueryRouteRequest(topic=TOPIC)) for one in (speaker, other))
    first, second = calls
    proxy.dispatcher.clients.remove(proxy.dispatcher.clients.by_id["c"])
    proxy.dispatcher.clients.identify(first, "alice")  # type: ignore[arg-type]
    proxy.dispatcher.clients.identify(second, "mallory")  # type: ignore[arg-type]


async def of_a_closed_connection(proxy: Proxied, speaker: Speaker, _: pytest.MonkeyPatch) -> Any:
    speaker.peer.connection_lost()
    return await speaker.ask("QueryRoute", m.QueryRouteRequest(topic=TOPIC))


async def not_taken(proxy: Proxied, speaker: Speaker, patch: pytest.MonkeyPatch) -> Any:
    from proxied import Connection

    patch.setattr(Connection, "queued_bytes", clients.QUEUED_BYTES_MAX + 1)
    return await settings(subscription=subscribes())(proxy, speaker, patch)


async def unknown_handle(proxy: Proxied, speaker: Speaker, patch: pytest.MonkeyPatch) -> Any:
    now_ms = proxy.mq.servers.clock.now_ms()
    return await acknowledge(f"0 {now_ms} 60000 0 0 broker-a 7 99 0")(proxy, speaker, patch)


async def refused_by_rules(proxy: Proxied, speaker: Speaker, _: pytest.MonkeyPatch) -> Any:
    return StatusError(Refusal.NOT_PERMITTED, "no rights")  # test_server.py has accounts


async def unauthenticated(proxy: Proxied, speaker: Speaker, _: pytest.MonkeyPatch) -> Any:
    return StatusError(Refusal.NOT_AUTHENTICATED, "no account")


CASES: dict[Refusal, Provoke] = {
    Refusal.TOPIC_OF_SYSTEM: route("rmq_sys_REVIVE_LOG"),
    Refusal.TOPIC_BLANK: route(""),
    Refusal.TOPIC_TOO_LONG: route("t" * 128),
    Refusal.TOPIC_CHARACTERS: route("a b"),
    Refusal.TOPIC_UNKNOWN: route("nowhere"),
    Refusal.GROUP_OF_SYSTEM: assignment("CID_RMQ_SYS_x"),
    Refusal.GROUP_BLANK: assignment(""),
    Refusal.GROUP_TOO_LONG: assignment("g" * 121),
    Refusal.GROUP_CHARACTERS: assignment("a b"),
    Refusal.NO_MESSAGE: send(),
    Refusal.TOPICS_DIFFER: send(message(), message("other")),
    Refusal.BATCH_OF_SPECIAL: send(
        message("later", delivery_timestamp=m.Timestamp(seconds=1)),
        message("later", delivery_timestamp=m.Timestamp(seconds=1)),
    ),
    Refusal.BATCH_OF_GROUPS: send(
        message("ordered", message_group="a"), message("ordered", message_group="b")
    ),
    Refusal.NO_WRITABLE_QUEUE: of_topic("readonly", 4, send(message("readonly"))),
    Refusal.TYPE: send(message("orders", message_group="a")),
    Refusal.BODY_EMPTY: text(body=b""),
    Refusal.BODY_TOO_LARGE: text(body=bytes(LIMITS.body_bytes_max + 1)),
    Refusal.PROPERTY_OF_SYSTEM: text(user={"TAGS": "x"}),
    Refusal.PROPERTY_KEY_EMPTY: text(user={"": "x"}),
    Refusal.PROPERTY_KEY_CONTROL: text(user={"a\n": "x"}),
    Refusal.PROPERTY_VALUE_CONTROL: text(user={"a": "\n"}),
    Refusal.PROPERTIES_TOO_MANY: text(user={f"k{number}": "" for number in range(129)}),
    Refusal.PROPERTIES_TOO_LARGE: text(user={"a": "x" * 16_384}),
    Refusal.TAG_BLANK: text(tag=" "),
    Refusal.TAG_BAR: text(tag="a|b"),
    Refusal.TAG_CONTROL: text(tag="a\n"),
    Refusal.KEY_BLANK: text(keys=[" "]),
    Refusal.KEY_CONTROL: text(keys=["a\n"]),
    Refusal.MESSAGE_GROUP_BLANK: text(message_group=" "),
    Refusal.MESSAGE_GROUP_TOO_LONG: text(message_group="g" * 64),
    Refusal.MESSAGE_GROUP_CONTROL: text(message_group="a\n"),
    Refusal.MESSAGE_ID_EMPTY: text(message_id=" "),
    Refusal.MESSAGE_ID_CONTROL: text(message_id="a\n"),
    Refusal.LITE_TOPIC_BLANK: text(lite_topic=" "),
    Refusal.LITE_TOPIC_CONTROL: text(lite_topic="a\n"),
    Refusal.LITE_TOPIC_TOO_LONG: text(lite_topic="l" * 65),
    Refusal.BORN_HOST_CONTROL: text(born_host="a\n"),
    Refusal.TRACE_CONTEXT_CONTROL: text(trace_context="a\n"),
    Refusal.DELIVERY_TIME: send(message("later", delivery_timestamp=m.Timestamp(seconds=1 << 32))),
    Refusal.RECOVERY_TIME: send(
        message(
            "paid",
            message_type=m.MessageType.TRANSACTION,
            orphaned_transaction_recovery_duration=m.Duration(seconds=3601),
        )
    ),
    Refusal.TRANSACTION_ID_EMPTY: end(" "),
    Refusal.TRANSACTION_UNKNOWN: end("nothing"),
    Refusal.TRANSACTION_DELAYED: send(
        message(
            "paid",
            message_type=m.MessageType.TRANSACTION,
            delivery_timestamp=m.Timestamp(seconds=1),
        )
    ),
    Refusal.RECALL_HANDLE: recall("nothing"),
    Refusal.RECALL_BROKER: recall(RecallHandle("later", "elsewhere", 1, "01AB").encode()),
    Refusal.NO_READABLE_QUEUE: of_topic("writeonly", 2, receives(topic="writeonly")),
    Refusal.POLLING_TIME: hurried("5.0.5"),
    Refusal.POLLING_TIME_OLD_CLIENT: hurried("5.0.1"),
    Refusal.INVISIBLE_TIME_TOO_SMALL: receives(seconds=9),
    Refusal.INVISIBLE_TIME_TOO_LARGE: receives(seconds=12 * 3600 + 1),
    Refusal.FILTER_EMPTY: receives(filter_expression=sql("")),
    Refusal.FILTER: receives(filter_expression=sql("a = =")),
    Refusal.FILTER_OF_SETTINGS: settings(subscription=subscribes("||")),
    Refusal.MESSAGES_HELD_TOO_MANY: patched(renewal, "IN_FLIGHT_MAX", 0, receives(auto_renew=True)),
    Refusal.ENTRIES_TOO_MANY: patched(receiving, "ENTRIES_MAX", 1, acknowledge(HANDLE, HANDLE)),
    Refusal.ENTRIES_NONE: acknowledge(),
    Refusal.HANDLE_MALFORMED: change("nothing"),
    Refusal.HANDLE_EXPIRED: change(HANDLE),
    Refusal.HANDLE_WITHOUT_PLACE: forward("0 1 60000 0 0 broker-a 0 0"),
    Refusal.HANDLE_BROKER: change(f"0 {FUTURE} 60000 0 0 elsewhere 0 0 0"),
    Refusal.HANDLE_UNKNOWN: unknown_handle,
    Refusal.OFFSET_NEGATIVE: offsets("UpdateOffset", offset=-1),
    Refusal.OFFSET_POLICY: offsets("QueryOffset", query_offset_policy=QueryOffsetPolicy.TIMESTAMP),
    Refusal.QUEUE_BROKER: offsets("GetOffset", broker="elsewhere"),
    Refusal.QUEUE_UNKNOWN: offsets("GetOffset", queue_id=99),
    Refusal.QUEUE_UNREADABLE: of_topic(
        "writeonly", 2, offsets("GetOffset", topic=m.Resource(name="writeonly"))
    ),
    Refusal.LITE_TOPICS: call("SyncLiteSubscription", m.SyncLiteSubscriptionRequest()),
    Refusal.CLIENT_ID_MISSING: call(
        "QueryRoute", m.QueryRouteRequest(topic=TOPIC), **{clients.CLIENT_ID: ""}
    ),
    Refusal.CLIENTS_TOO_MANY: patched(clients, "CLIENTS_MAX", 0, route("orders")),
    Refusal.CLIENT_OF_ANOTHER_ACCOUNT: of_another_account,
    Refusal.CONNECTION_CLOSED: of_a_closed_connection,
    Refusal.SETTINGS_EMPTY: settings(),
    Refusal.SETTINGS_TOO_MANY: settings(
        ClientType.PRODUCER, publishing=m.Publishing(topics=[TOPIC] * 4097)
    ),
    Refusal.SETTINGS_MISSING: telemetry(m.TelemetryCommand()),
    Refusal.SETTINGS_UNKNOWN: call("Heartbeat", m.HeartbeatRequest()),
    Refusal.CLIENT_TYPE: settings(ClientType.LITE_PUSH_CONSUMER, subscription=subscribes()),
    Refusal.ANSWERS_NOT_TAKEN: not_taken,
    Refusal.REQUEST_TOO_LARGE: route("t" * REQUEST_BYTES_MAX),
    Refusal.NOT_AUTHENTICATED: unauthenticated,
    Refusal.NOT_PERMITTED: refused_by_rules,
}


def said(found: Any) -> tuple[str, str]:
    """The code and the text of an answer, or of the end of a call."""
    if isinstance(found, CallError):
        code, name = str(found).rpartition(" (")[2].removesuffix(")").split()
        assert Code(int(code)).name == name
        return name, str(found)
    if isinstance(found, StatusError):
        return found.code.name, str(found)
    answer = found[0] if isinstance(found, list) else found
    status = answer.entries[0].status if getattr(answer, "entries", None) else answer.status
    return Code(status.code).name, status.message


def test_every_refusal_is_in_the_golden_table_and_provoked() -> None:
    assert set(GOLDEN) == {refusal.name for refusal in Refusal}
    assert set(CASES) == set(Refusal)
    assert len(Refusal.__members__) == len(list(Refusal)), "two members are the same"
    for refusal in Refusal:
        code, begins = GOLDEN[refusal.name]
        phrase = refusal.phrase.partition("{")[0]
        begins = begins.removeprefix(TELEMETRY_FAILED)
        assert (code, begins.startswith(phrase)) == (refusal.code.name, True), refusal


@pytest.mark.parametrize("refusal", list(CASES), ids=lambda refusal: str(refusal.name))
def test_a_refusal_begins_as_rocketmqs(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> Any:
        async with proxied(limits=LIMITS) as proxy:
            for name, kind in (
                ("orders", "NORMAL"), ("ordered", "FIFO"), ("later", "DELAY"),
                ("paid", "TRANSACTION"),
            ):  # fmt: skip
                await proxy.mq.admin.create_topic(name, queues=2, type=kind)
            try:
                return await CASES[refusal](proxy, proxy.speaker(), monkeypatch)
            except (CallError, StatusError) as error:
                return error

    code, begins = GOLDEN[refusal.name]
    found = said(asyncio.run(play()))
    assert found[0] == code
    assert found[1].startswith(begins), found[1]


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("QueryRoute", m.QueryRouteRequest(topic=TOPIC)),
        ("QueryAssignment", m.QueryAssignmentRequest(topic=TOPIC, group=GROUP)),
        ("SendMessage", m.SendMessageRequest(messages=[message()])),
        ("GetOffset", None),
        ("UpdateOffset", None),
        ("QueryOffset", None),
        ("Heartbeat", m.HeartbeatRequest()),
        ("NotifyClientTermination", m.NotifyClientTerminationRequest()),
    ],
)
def test_an_ok_says_ok(name: str, request_: Any) -> None:
    async def play() -> None:
        async with proxied() as proxy:
            await proxy.mq.admin.create_topic("orders", queues=2)
            speaker = proxy.speaker()
            said = m.TelemetryCommand(settings=m.Settings(
                client_type=ClientType.PUSH_CONSUMER, subscription=subscribes()
            ))  # fmt: skip
            stream = speaker.call("Telemetry", said, None)
            await stream.arrived.wait()
            if request_ is None:
                await offsets("UpdateOffset")(proxy, speaker, pytest.MonkeyPatch())
                found = await offsets(name)(proxy, speaker, pytest.MonkeyPatch())
            else:
                found = await speaker.ask(name, request_)
            assert (found.status.code, found.status.message) == (Code.OK, "OK")

    asyncio.run(play())
