"""SendMessage, EndTransaction, RecallMessage."""

import asyncio
import gzip
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from hypothesis import given, settings
from hypothesis import strategies as st

from proxied import Proxied, Speaker, proxied
from sluicemq.client.core.requests import SendStatus
from sluicemq.client.core.transactions import PreparedMessageLocation
from sluicemq.config.proxying import ProxyLimits
from sluicemq.model.ids import Host, java_hash
from sluicemq.model.message import SHARDING_KEY, StoredMessage
from sluicemq.model.properties import HIDDEN_PROPERTIES, RESERVED
from sluicemq.model.topic import MessageQueue
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import Code, MessageType
from sluicemq.proxy.sending import (
    consistent_hash,
    format_transaction_id,
    parse_transaction_id,
    to_batch,
    to_outgoing_message,
    to_send_response,
)
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.frames import Command

Scene = Callable[[Proxied, Speaker], Awaitable[None]]


def play(scene: Scene, clock: VirtualClock | None = None, **settings: str) -> None:
    """A scene with the topic `orders` of four queues, and one client."""

    async def whole() -> None:
        async with proxied(clock, **settings) as proxy:
            await proxy.mq.admin.create_topic("orders", queues=4)
            await scene(proxy, proxy.speaker())

    asyncio.run(whole())


def message(body: bytes = b"body", topic: str = "orders", **fields: Any) -> m.Message:
    user = fields.pop("user", {})
    fields.setdefault("message_id", "01AABB")
    fields.setdefault("born_timestamp", m.Timestamp(seconds=1_700_000_000, nanos=123_456_789))
    system = m.SystemProperties(**fields)
    return m.Message(
        topic=m.Resource(name=topic), user_properties=user, system_properties=system, body=body
    )


async def send(client: Speaker, *messages: m.Message) -> m.SendMessageResponse:
    request = m.SendMessageRequest(messages=[*messages])
    answer: m.SendMessageResponse = await client.ask("SendMessage", request)
    return answer


async def stored(proxy: Proxied, topic: str = "orders") -> list[StoredMessage]:
    """All of a topic, as a consumer of the remoting protocol reads them."""
    reader = proxy.mq.pull_consumer()
    found: list[StoredMessage] = []
    for queue in await reader.queues(topic):
        found += (await reader.pull(queue, 0)).messages
    return found


async def of_type(proxy: Proxied, kind: str, name: str = "typed") -> None:
    await proxy.mq.admin.create_topic(name, queues=4, type=kind)


# -------------------------------------------------------------------------------------- sends


def test_a_message_is_stored_with_its_properties() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        answer = await send(
            client,
            message(
                tag="A", keys=["k1", "k2"], trace_context="trace", user={"region": "EU", "none": ""}
            ),
        )
        entry = answer.entries[0]
        assert (answer.status.code, answer.status.message) == (Code.OK, "OK")
        assert (entry.status.code, entry.message_id, entry.offset) == (Code.OK, "01AABB", 0)
        assert (entry.transaction_id, entry.recall_handle) == ("01AABB", "")
        (found,) = await stored(proxy)
        assert dict(found.properties) == {
            "region": "EU", "UNIQ_KEY": "01AABB", "TAGS": "A", "KEYS": "k1 k2", "PGROUP": "orders",
            "RECONSUME_TIME": "0", "__BORNHOST": str(client.peer.remote),
            "BORN_TIMESTAMP": "1700000000123", "TRACE_CONTEXT": "trace",
            "MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster",
        }  # fmt: skip
        assert (found.body, found.sys_flag, found.flag) == (b"body", 0, 0)
        assert found.born_time_ms == 1_700_000_000_123
        assert found.born_host == client.peer.remote

    play(scene)


def test_what_the_client_says_of_birth_and_attempts_is_kept() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        one = message(born_host="producer-1", delivery_attempt=3)
        one.system_properties.ClearField("born_timestamp")
        await send(client, one)
        (found,) = await stored(proxy)
        assert found.properties["__BORNHOST"] == "producer-1"
        assert found.properties["RECONSUME_TIME"] == "3"
        assert found.properties["BORN_TIMESTAMP"] == str(found.born_time_ms)
        assert abs(found.born_time_ms - found.store_time_ms) < 60_000

    play(scene)


def test_a_body_of_gzip_is_readable_to_all() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await send(client, message(gzip.compress(b"plain"), body_encoding=m.Encoding.GZIP))
        (found,) = await stored(proxy)
        assert (found.body, found.sys_flag) == (b"plain", 0)

    play(scene)


def test_messages_without_a_group_go_round() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        for number in range(8):
            await send(client, message(message_id=f"01{number}"))
        queues = [one.queue_id for one in await stored(proxy)]
        assert queues == [0, 0, 1, 1, 2, 2, 3, 3]

    play(scene)


def test_a_group_has_its_queue() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await of_type(proxy, "FIFO")
        for number, group in enumerate(("order-1", "order-2", "order-3", "order-1")):
            one = message(topic="typed", message_group=group, message_id=f"01{number}")
            assert (await send(client, one)).status.code == Code.OK
        for found in await stored(proxy, "typed"):
            group = found.properties["__SHARDINGKEY"]
            assert found.queue_id == {"order-1": 3, "order-2": 2, "order-3": 3}[group]

    play(scene)


def test_a_batch_may_name_a_delay_in_its_users_properties() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        batch = [message(message_id=f"01{number}") for number in range(2)]
        batch[0].user_properties["why"] = "TIMER_DELIVER_MS"
        answer = await send(client, *batch)
        assert answer.status.code == Code.OK
        assert len(answer.entries) == 2

    play(scene)


def test_a_batch_is_stored_as_one() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        batch = [message(b"%d" % number, message_id=f"01{number}", tag="A") for number in range(3)]
        answer = await send(client, *batch)
        assert answer.status.code == Code.OK
        entries = [(it.status.code, it.message_id, it.offset) for it in answer.entries]
        assert entries == [(Code.OK, "010", 0), (Code.OK, "011", 1), (Code.OK, "012", 2)]
        found = await stored(proxy)
        assert [one.body for one in found] == [b"0", b"1", b"2"]
        assert len({one.queue_id for one in found}) == 1
        assert [one.properties["UNIQ_KEY"] for one in found] == ["010", "011", "012"]
        await of_type(proxy, "FIFO")
        batch = [message(topic="typed", message_group="order-3") for _ in range(3)]
        await send(client, *batch)
        assert {one.queue_id for one in await stored(proxy, "typed")} == {3}

    play(scene)


GROUPS = ("order-1", "order-2", "order-4")


@given(st.lists(st.lists(st.sampled_from(GROUPS), min_size=1, max_size=4), max_size=8))
@settings(max_examples=int(os.environ.get("SLUICEMQ_EXAMPLES", "15")), deadline=None)
def test_however_messages_are_batched_a_group_stays_in_its_queue_in_order(
    batches: list[list[str]],
) -> None:
    """Every batch is stored whole or refused; what is stored of a group is in order."""

    async def scene(proxy: Proxied, client: Speaker) -> None:
        await of_type(proxy, "FIFO")
        number, accepted = 0, dict[str, list[bytes]]()
        for batch in batches:
            sent = []
            for group in batch:
                number += 1
                sent.append(message(b"%d" % number, "typed", message_group=group))
            code = (await send(client, *sent)).status.code
            assert code == (Code.OK if len(set(batch)) == 1 else Code.BAD_REQUEST)
            for one in sent if code == Code.OK else ():
                accepted.setdefault(one.system_properties.message_group, []).append(one.body)
        queues, found = dict[str, set[int]](), dict[str, list[bytes]]()
        for one in await stored(proxy, "typed"):
            group = one.properties[SHARDING_KEY]
            queues.setdefault(group, set()).add(one.queue_id)
            found.setdefault(group, []).append(one.body)
        assert all(len(ids) == 1 for ids in queues.values())
        assert found == accepted

    play(scene)


def test_messages_without_a_group_go_along_with_those_of_one() -> None:
    batch = [message(message_group=group) for group in ("", "order-1", "")]
    peer = Host("127.0.0.1", 1)
    parts = [to_outgoing_message(one, "MIXED", peer, 0, ProxyLimits()) for one in batch]
    assert to_batch(batch, parts).sharding_key == "order-1"


def test_a_batch_of_two_message_groups_is_refused_and_the_answer_names_both() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await of_type(proxy, "FIFO")
        batch = [message(topic="typed", message_group=group) for group in ("G1", "G2")]
        answer = await send(client, *batch)
        assert answer.status.code == Code.BAD_REQUEST
        assert answer.status.message == (
            "the batch has messages of the groups 'G1' and 'G2', but is stored in one queue. Send "
            "each message group in a batch of its own."
        )
        assert await stored(proxy, "typed") == []

    play(scene)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], Code.MESSAGE_CORRUPTED),
        ([message(), message(topic="other")], Code.MESSAGE_CORRUPTED),
        ([message(topic="none")], Code.TOPIC_NOT_FOUND),
        ([message(topic="a b")], Code.ILLEGAL_TOPIC),
        ([message(topic="SCHEDULE_TOPIC_XXXX")], Code.ILLEGAL_TOPIC),
        ([message(b"")], Code.MESSAGE_BODY_EMPTY),
        ([message(tag="a|b")], Code.ILLEGAL_MESSAGE_TAG),
        ([message(message_group="g")], Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ([message(), message(message_group="g")], Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ([message(lite_topic="l")], Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ([message(priority=1)], Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE),
        ([message(delivery_timestamp=m.Timestamp(seconds=1 << 40))], Code.ILLEGAL_DELIVERY_TIME),
        ([message(message_type=MessageType.TRANSACTION,
                  orphaned_transaction_recovery_duration=m.Duration(seconds=3601))],
         Code.BAD_REQUEST),
    ],
)  # fmt: skip
def test_what_is_refused_is_not_stored(messages: list[m.Message], code: Code) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        answer = await send(client, *messages)
        assert (answer.status.code, len(answer.entries)) == (code, 0)
        assert await stored(proxy) == []

    play(scene)


def test_a_topic_of_one_type_takes_no_other() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await of_type(proxy, "DELAY")
        answer = await send(client, message(topic="typed"))
        assert answer.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        assert answer.status.message == (
            "TopicMessageType validate failed, the expected type is DELAY, but actual type is "
            "NORMAL"
        )

    play(scene)


def test_a_topic_that_is_not_writable_takes_nothing() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.admin.create_topic("closed", queues=1, perm=4)
        answer = await send(client, message(topic="closed"))
        assert (answer.status.code, answer.status.message) == (Code.FORBIDDEN, "no writable queue")

    play(scene)


def test_a_change_of_the_topic_is_seen_at_once() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await send(client, message())
        await proxy.mq.admin.create_topic("orders", queues=4, perm=4)
        assert (await send(client, message())).status.code == Code.FORBIDDEN
        await proxy.mq.admin.create_topic("orders", queues=4, type="fifo")
        answer = await send(client, message())
        assert answer.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        await proxy.mq.admin.delete_topic("orders")
        assert (await send(client, message())).status.code == Code.TOPIC_NOT_FOUND

    play(scene)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (SendStatus.FLUSH_DISK_TIMEOUT, Code.MASTER_PERSISTENCE_TIMEOUT),
        (SendStatus.FLUSH_SLAVE_TIMEOUT, Code.SLAVE_PERSISTENCE_TIMEOUT),
        (SendStatus.SLAVE_NOT_AVAILABLE, Code.HA_NOT_AVAILABLE),
    ],
)
def test_what_may_get_lost_is_no_success(status: SendStatus, code: Code) -> None:
    """Clients send it again: so no id, as RocketMQ's proxy answers."""
    answer = to_send_response(
        Command(status.value, {"queueOffset": "7"}), ["01AABB"], "01AABB", "here"
    )
    assert (answer.status.code, answer.status.message) == (code, code.name)
    entry = m.SendResultEntry(
        status=m.Status(code=code, message=f"send message failed, sendStatus={status.name}")
    )
    assert list(answer.entries) == [entry]


# --------------------------------------------------------------------------- delays, recalls


async def delayed(proxy: Proxied, client: Speaker, seconds: int) -> m.SendResultEntry:
    await of_type(proxy, "DELAY")
    due = m.Timestamp(seconds=proxy.mq.clock.now_ms() // 1000 + seconds)
    answer = await send(client, message(topic="typed", delivery_timestamp=due))
    assert answer.status.code == Code.OK
    return answer.entries[0]


def test_a_message_is_delivered_at_its_time() -> None:
    clock = VirtualClock()

    async def scene(proxy: Proxied, client: Speaker) -> None:
        await delayed(proxy, client, 60)
        await clock.advance(seconds=50)
        assert await stored(proxy, "typed") == []
        await clock.advance(seconds=15)
        (found,) = await stored(proxy, "typed")
        assert found.message_id == "01AABB"

    play(scene, clock)


def test_a_delayed_message_is_taken_back() -> None:
    clock = VirtualClock()

    async def scene(proxy: Proxied, client: Speaker) -> None:
        handle = (await delayed(proxy, client, 60)).recall_handle

        async def recall(topic: str, handle: str) -> m.RecallMessageResponse:
            request = m.RecallMessageRequest(topic=m.Resource(name=topic), recall_handle=handle)
            answer: m.RecallMessageResponse = await client.ask("RecallMessage", request)
            return answer

        answer = await recall("orders", handle)
        assert answer.status.code == Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
        answer = await recall("typed", "no handle")
        assert answer.status.code == Code.INTERNAL_SERVER_ERROR
        assert answer.status.message == "recall handle is invalid"
        answer = await recall("typed", handle)
        assert (answer.status.code, answer.message_id) == (Code.OK, "01AABB")
        await clock.advance(seconds=65)
        assert await stored(proxy, "typed") == []

    play(scene, clock, recallMessageEnable="true")


# ------------------------------------------------------------------------------ transactions


async def prepared(proxy: Proxied, client: Speaker) -> str:
    await of_type(proxy, "TRANSACTION")
    one = message(
        topic="typed", message_type=MessageType.TRANSACTION,
        orphaned_transaction_recovery_duration=m.Duration(seconds=30),
    )  # fmt: skip
    entry = (await send(client, one)).entries[0]
    assert (entry.status.code, entry.message_id) == (Code.OK, "01AABB")
    assert await stored(proxy, "typed") == []
    return entry.transaction_id


async def end(
    client: Speaker,
    transaction_id: str,
    resolution: int = m.TransactionResolution.COMMIT,
    source: int = m.TransactionSource.SOURCE_CLIENT,
) -> m.Status:
    request = m.EndTransactionRequest(
        topic=m.Resource(name="typed"), message_id="01AABB", transaction_id=transaction_id,
        resolution=resolution, source=source,
    )  # fmt: skip
    answer: m.EndTransactionResponse = await client.ask("EndTransaction", request)
    return answer.status


async def undecided(proxy: Proxied) -> list[Any]:
    return [one for found in (await proxy.mq.admin.transactions()).values() for one in found]


def test_a_transaction_ends_through_any_proxy() -> None:
    """Another connection of another client stands for one."""

    async def scene(proxy: Proxied, client: Speaker) -> None:
        transaction_id = await prepared(proxy, client)
        assert (await end(proxy.speaker("d"), transaction_id)).code == Code.OK
        (found,) = await stored(proxy, "typed")
        assert found.message_id == "01AABB"
        assert found.properties["CHECK_IMMUNITY_TIME_IN_SECONDS"] == "30"
        status = await end(client, transaction_id, m.TransactionResolution.ROLLBACK)
        assert status.code == Code.INTERNAL_SERVER_ERROR
        assert "committed before" in status.message

    play(scene)


def test_a_transaction_is_rolled_back() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        transaction_id = await prepared(proxy, client)
        unknown = m.TransactionResolution.TRANSACTION_RESOLUTION_UNSPECIFIED
        assert (await end(client, transaction_id, unknown)).code == Code.OK
        assert len(await undecided(proxy)) == 1
        rollback, check = m.TransactionResolution.ROLLBACK, m.TransactionSource.SOURCE_SERVER_CHECK
        assert (await end(client, transaction_id, rollback, check)).code == Code.OK
        assert await stored(proxy, "typed") == []
        assert await undecided(proxy) == []

    play(scene)


@pytest.mark.parametrize(
    "transaction_id", ["", " ", "01AABB", "01AABB broker-a 0", "01AABB broker-a -1 0",
                       "01AABB broker-x 0 0", f"01AABB broker-a 0 {1 << 70}"],
)  # fmt: skip
def test_an_id_that_names_no_place_is_refused(transaction_id: str) -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await prepared(proxy, client)
        assert (await end(client, transaction_id)).code == Code.INVALID_TRANSACTION_ID

    play(scene)


OFFSETS = st.integers(0, 10**18 - 1)


@given(
    st.text(min_size=1, max_size=40).filter(str.strip),
    st.from_regex(r"[\w%|.-]{1,20}", fullmatch=True),
    OFFSETS,
    OFFSETS,
)
def test_a_transaction_id_carries_its_place(
    message_id: str, broker: str, queue_offset: int, physical_offset: int
) -> None:
    queue = MessageQueue("T", broker, 0)
    place = PreparedMessageLocation(
        "T", queue, queue_offset, physical_offset, message_id, message_id
    )
    if "\n" not in message_id:
        assert parse_transaction_id(format_transaction_id(place), "T") == place


# -------------------------------------------------------------------------------------- queues


@pytest.mark.parametrize(
    ("group", "buckets"),
    [
        ("a", [0, 0, 0, 0, 0, 346]),
        ("order-1", [0, 0, 3, 3, 3, 489]),
        ("order-2", [0, 0, 2, 2, 11, 184]),
        ("order-3", [0, 1, 3, 7, 7, 666]),
        ("polygenelubricants", [0, 1, 2, 2, 2, 185]),  # its hash code is -2^31
        ("中文", [0, 0, 3, 3, 3, 401]),
        ("customer/42", [0, 0, 0, 0, 0, 760]),
        ("😀", [0, 1, 1, 4, 4, 748]),
        ("x" * 63, [0, 0, 2, 2, 2, 474]),
    ],
)
def test_a_group_goes_where_javas_proxy_sends_it(group: str, buckets: list[int]) -> None:
    """Hashing.consistentHash(group.hashCode(), n) of Guava 32.0.1-jre, run in Java; 20,000 random
    pairs agreed too."""
    found = [consistent_hash(java_hash(group), count) for count in (1, 2, 4, 8, 16, 1000)]
    assert found == buckets


@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(1, 200))
def test_one_queue_more_moves_only_what_it_takes(key: int, count: int) -> None:
    assert consistent_hash(key, count + 1) in (consistent_hash(key, count), count)


# ------------------------------------------------------------------------- reserved properties


def test_a_reserved_property_is_refused_or_stored_alike_alone_and_in_a_batch() -> None:
    """What the proxy lets through goes by 310 and 320, which store it by one rule:
    tests/unit/broker/test_reserved.py."""

    async def scene(proxy: Proxied, client: Speaker) -> None:
        for number, name in enumerate(sorted(RESERVED)):
            topic = f"reserved{number}"
            await proxy.mq.admin.create_topic(topic, queues=1)
            one = message(topic=topic, user={name: "5"})
            codes = {(await send(client, *it)).status.code for it in ([one], [one, one])}
            found = {it.properties.get(name) for it in await stored(proxy, topic)}
            if name in HIDDEN_PROPERTIES:
                assert (codes, found) == ({Code.ILLEGAL_MESSAGE_PROPERTY_KEY}, set()), name
            elif name == SHARDING_KEY:  # a user property makes it a message of another type
                assert found == set(), name
            else:
                assert (codes, found) == ({Code.OK}, {"5"}), name

    play(scene)
