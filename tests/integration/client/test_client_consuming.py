"""Consumers against the real broker in this process: broadcast, batches, strategies, changes."""

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

import pytest

from sluicemq import Sluice
from sluicemq.client.aio.members import Member
from sluicemq.client.core.conversations import Call
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    FilterSyntaxError,
    RequestError,
    RetryLaterError,
    SubscriptionConflictError,
)
from sluicemq.model.topic import CONTRACT, GroupConfig, MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command
from waiting import limit, until


async def fill(mq: Sluice, topic: str, count: int, *, queues: int = 4, tag: str = "A") -> None:
    if topic not in await mq.admin.topics():
        await mq.admin.create_topic(topic, queues=queues)
    targets = await mq.admin.queues(topic)
    for number in range(count):
        await mq.send(topic, b"%s%d" % (tag.encode(), number), tag=tag,
                      queue=targets[number % len(targets)])  # fmt: skip


def member(mq: EmbeddedSluice, group: str) -> Member:
    found = mq.member_of(group)
    assert found is not None
    return found


def own(mq: EmbeddedSluice, group: str, topic: str) -> set[MessageQueue]:
    return {queue for queue in member(mq, group).readers.queues if queue.topic == topic}


# ----------------------------------------------------------------------------- broadcasting


async def test_every_broadcasting_consumer_gets_every_message_and_continues_after_a_restart():
    files = CrashableFiles()
    async with embedded() as mq:
        await fill(mq, "t", 20)
        got: dict[str, list[bytes]] = {"one": [], "two": []}

        async def consume(name: str, count: int) -> None:
            client = mq.servers.client(instance=name, files=files, offsets_directory="/offsets")
            consumer = client.consumer(
                "g", lambda message: got[name].append(message.body), broadcast=True
            )
            await consumer.subscribe("t").start()
            await until(lambda: len(got[name]) >= count)
            await client.close()

        await asyncio.gather(consume("one", 20), consume("two", 20))
        assert sorted(got["one"]) == sorted(got["two"]) == sorted(b"A%d" % n for n in range(20))
        await fill(mq, "t", 8, tag="B")
        await consume("one", 28)
        assert Counter(got["one"])[b"A0"] == 1, "what was committed does not come again"
        offsets = mq.servers.broker.core.offsets
        assert not offsets.topics_of("g"), "the broker keeps no offsets of a broadcasting group"
    (client,) = [name for name in files.names("/offsets") if name.endswith("@one")]
    assert set(files.names(f"/offsets/{client}/g")) >= {"offsets.json", "offsets.json.bak"}


async def test_a_failed_message_of_a_broadcasting_group_is_logged_and_dropped(caplog):
    async with embedded() as mq:
        await fill(mq, "t", 3, queues=1)
        seen: list[bytes] = []

        def handler(message) -> None:
            seen.append(message.body)
            if message.body == b"A1":
                raise ValueError("no")

        client = mq.servers.client(files=CrashableFiles(), offsets_directory="/offsets")
        await client.consumer("g", handler, broadcast=True).subscribe("t").start()
        await until(lambda: len(seen) == 3)
        await until(lambda: "was rejected and is dropped" in caplog.text)
        await client.close()
        assert seen == [b"A0", b"A1", b"A2"]
        assert "%RETRY%g" not in member_topics(mq), "no message went to the retry topic"


def member_topics(mq: EmbeddedSluice) -> list[str]:
    return [topic for topic, _ in mq.servers.broker.store.queues()]


async def test_an_ordered_broadcast_needs_no_locks_and_repeats_in_place():
    async with embedded() as mq:
        await fill(mq, "t", 4, queues=1)
        seen: list[bytes] = []

        def handler(message) -> None:
            seen.append(message.body)
            if message.body == b"A1" and seen.count(b"A1") == 1:
                raise RetryLaterError

        clients = [
            mq.servers.client(instance=name, files=CrashableFiles(), offsets_directory="/o")
            for name in ("one", "two")
        ]
        for client in clients:
            await (
                client.consumer("g", handler, broadcast=True, ordered=True, suspend_s=0.01)
                .subscribe("t")
                .start()
            )
        await until(lambda: len(seen) == 9)
        for client in clients:
            await client.close()
        assert Counter(seen) == {b"A0": 2, b"A1": 3, b"A2": 2, b"A3": 2}


async def test_two_broadcasting_consumers_do_not_share_one_offsets_file():
    files = CrashableFiles()
    async with embedded() as mq:
        await fill(mq, "t", 1)
        one, two = (mq.servers.client(files=files, offsets_directory="/o") for _ in range(2))
        async with one.subscribe("t", group="g", broadcast=True):
            with pytest.raises(ConfigurationError, match="instance="):
                await two.subscribe("t", group="g", broadcast=True).start()
        async with two.subscribe("t", group="g", broadcast=True) as stream:
            assert (await stream.receive()).body == b"A0"


async def test_an_offsets_file_of_a_java_client_is_continued():
    files = CrashableFiles()
    async with embedded() as mq:
        await fill(mq, "t", 6, queues=1)
        text = (
            '{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,'
            '\n\t\t\t"topic":"t"\n\t\t}:4\n\t}\n}'
        )
        directory = "/o/10.0.0.5@DEFAULT/g"
        files.make_directory(directory)
        file = files.open(f"{directory}/offsets.json", create=True)
        file.pwrite(text.encode(), 0)
        file.close()
        client = mq.servers.client(
            client_id="10.0.0.5@DEFAULT", files=files, offsets_directory="/o"
        )
        async with client.subscribe("t", group="g", broadcast=True) as stream:
            assert [(await stream.receive()).body for _ in range(2)] == [b"A4", b"A5"]


# ---------------------------------------------------------------------------------- batches


async def test_a_handler_of_lists_gets_messages_of_one_queue_up_to_the_limit():
    async with embedded() as mq:
        await fill(mq, "t", 100, queues=2)
        batches: list[list[bytes]] = []

        async def handler(messages) -> None:
            assert len({message.queue for message in messages}) == 1
            batches.append([message.body for message in messages])

        consumer = mq.consumer("g", handler, batch_max=16).subscribe("t")
        await consumer.start()
        await until(lambda: sum(map(len, batches)) == 100)
        await consumer.close()
        assert max(map(len, batches)) == 16
        assert len({body for batch in batches for body in batch}) == 100


async def test_a_handler_may_acknowledge_the_first_messages_of_a_batch():
    async with embedded() as mq:
        await fill(mq, "t", 4, queues=1)
        rounds: list[list[bytes]] = []

        def handler(messages) -> None:
            rounds.append([message.body for message in messages])
            if len(rounds) == 1:
                raise RetryLaterError(done=1, delay_level=1)

        consumer = mq.consumer("g", handler, batch_max=4, concurrency=1).subscribe("t")
        await consumer.start()
        await until(lambda: sum(map(len, rounds)) >= 7, 8)
        await consumer.close()
        assert rounds[0] == [b"A0", b"A1", b"A2", b"A3"]
        assert sorted(body for batch in rounds[1:] for body in batch) == [b"A1", b"A2", b"A3"]


async def test_an_ordered_batch_is_redelivered_whole_and_in_order():
    async with embedded() as mq:
        await fill(mq, "t", 6, queues=1)
        rounds: list[list[bytes]] = []

        def handler(messages) -> None:
            rounds.append([message.body for message in messages])
            if len(rounds) == 1:
                raise RetryLaterError(suspend_s=0.01)

        consumer = mq.consumer("g", handler, batch_max=3, ordered=True).subscribe("t")
        await consumer.start()
        await until(lambda: sum(map(len, rounds)) >= 9)
        await consumer.close()
        assert [body for batch in rounds[1:] for body in batch] == [b"A%d" % n for n in range(6)]
        assert rounds[0] == rounds[1]


# ------------------------------------------------------------------------ shares and changes


@pytest.mark.parametrize("name", ["average", "average_circle", "consistent_hash"])
async def test_members_share_all_queues_by_each_strategy(name):
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=8)
        clients = [mq.servers.client() for _ in range(3)]
        for client in clients:
            await client.subscribe("t", group="g", allocate=name).start()
        shares = lambda: [queue for client in clients for queue in own(client, "g", "t")]  # noqa: E731
        await until(lambda: len(shares()) == 8 and len(set(shares())) == 8, 8)


async def test_an_allocation_strategy_of_the_application_is_called_and_its_failure_is_logged(
    caplog,
):
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=4)
        asked = []

        def first_two(client_id, queues, members):
            asked.append((client_id, len(members)))
            return queues[:2]

        await mq.subscribe("t", group="g", allocate=first_two).start()
        assert {queue.queue_id for queue in own(mq, "g", "t")} == {0, 1}
        assert asked[0] == (mq.client_id, 1)
        other = mq.servers.client()
        await other.subscribe("t", group="h", allocate=lambda *_: 1 // 0).start()
        assert "strategy of 'h' failed" in caplog.text


async def test_a_join_and_a_leave_move_queues_within_a_second():
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=4)
        await mq.subscribe("t", group="g").start()
        assert len(own(mq, "g", "t")) == 4
        other = mq.servers.client()
        await other.subscribe("t", group="g").start()
        await until(lambda: len(own(mq, "g", "t")) == 2, 1.0)
        await other.close()
        await until(lambda: len(own(mq, "g", "t")) == 4, 1.0)


async def test_a_lost_connection_moves_queues_at_once_and_back_after_the_reconnect():
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=4)
        await mq.subscribe("t", group="g").start()
        other = mq.servers.client()
        await other.subscribe("t", group="g").start()
        await until(lambda: len(own(mq, "g", "t")) == 2, 1.0)
        await asyncio.sleep(0.1)  # else `other`, which balances still, comes back within a moment
        group = mq.servers.broker.core.consumers.groups["g"]
        (peer,) = [peer for peer, who in group.members.items() if who.client_id == other.client_id]
        peer.close()
        await until(lambda: len(own(mq, "g", "t")) == 4, 1.0)
        await until(lambda: len(own(mq, "g", "t")) == 2 and len(own(other, "g", "t")) == 2, 4.0)


async def test_a_changed_subscription_applies_in_all_queues_and_to_prefetched_messages():
    async with embedded() as mq:
        await fill(mq, "t", 40, tag="A")
        await fill(mq, "t", 40, tag="B")
        async with mq.subscribe("t", group="g", tags="A || B") as stream:
            first = await stream.receive()
            await until(lambda: member(mq, "g").readers.queues)
            before = mq.servers.broker.core.consumers.find_subscription(
                "g", "t"
            ).subscription.version
            await stream.change(tags="B")
            watch = mq.servers.broker.core.consumers.find_subscription("g", "t")
            assert watch.subscription.version > before
            assert watch.subscription.expression == "B"
            got = [await stream.receive() for _ in range(40)]
            assert {message.tag for message in got} == {"B"}
            for message in (first, *got):
                await message.ack()
            await stream.change(where="TAGS = 'C'")
            await fill(mq, "t", 4, tag="B")
            await fill(mq, "t", 1, tag="C")
            assert (await stream.receive()).tag == "C"


async def test_a_member_that_changes_its_filter_rebalances_before_it_reads_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with embedded() as mq:
        await fill(mq, "t", 4, tag="A")
        consumer = mq.consumer("g", lambda message: None)
        await consumer.subscribe("t", tags="A").start()
        await until(lambda: len(own(mq, "g", "t")) == 4)
        codes: list[int] = []
        exchange = mq.cluster.send_request

        async def noted(call: Call) -> Command:
            if (call.command.fields or {}).get("topic", "t") == "t":
                codes.append(call.command.code)
            return await exchange(call)

        monkeypatch.setattr(mq.cluster, "send_request", noted)
        await consumer.change("t", tags="B")
        await until(lambda: RequestCode.PULL_MESSAGE in codes)
        assert RequestCode.GET_CONSUMER_LIST_BY_GROUP in codes
        first_pull = codes.index(RequestCode.PULL_MESSAGE)
        assert codes.index(RequestCode.GET_CONSUMER_LIST_BY_GROUP) < first_pull


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_queue_that_is_added_while_the_filter_changes_is_read_with_the_new_filter(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """The balance that takes it began before the change; or the brokers never heard of the
    change."""
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=1)
        got: list[str] = []
        consumer = mq.consumer("g", lambda message: got.append(message.tag))
        await consumer.subscribe("t", tags="A").start()
        here = member(mq, "g")
        await until(lambda: len(own(mq, "g", "t")) == 1)
        await mq.admin.create_topic("t", queues=2)
        mq.cluster.routes.remove("t")
        is_taking, goes_on = asyncio.Event(), asyncio.Event()
        where = here.readers.find_start_offset

        async def slow(queue: MessageQueue, *, is_new: bool = False) -> tuple[int, int | None]:
            is_taking.set()
            await goes_on.wait()
            return await where(queue, is_new=is_new)

        monkeypatch.setattr(here.readers, "find_start_offset", slow)
        here.schedule_rebalance()
        await is_taking.wait()
        beat = here._send_heartbeats

        async def then_goes_on(*rest: Any, **more: Any) -> None:
            await beat(*rest, **more)
            goes_on.set()
            if is_refused:
                await until(lambda: len(own(mq, "g", "t")) == 2)
                raise ConnectionLostError("no broker heard of it.")

        monkeypatch.setattr(here, "_send_heartbeats", then_goes_on)
        with contextlib.suppress(ConnectionLostError):
            await consumer.change("t", tags="A || B")
        wanted = "A" if is_refused else "A || B"
        await until(lambda: len(own(mq, "g", "t")) == 2)
        assert {here.readers.get(queue).subscription.expression
                for queue in here.readers.queues if queue.topic == "t"} == {wanted}  # fmt: skip


async def test_a_member_that_a_strict_group_refuses_stops_reading_its_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And goes on, when it is taken again, behind what others have read of them meanwhile."""

    async def not_asked(*_: object) -> None: ...

    monkeypatch.setattr(Member, "_check_subscription", not_asked)  # the others came in between
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=2)
        await mq.admin.create_group(GroupConfig("g", attributes={f"+{CONTRACT}": "strict"}))
        got: list[bytes] = []
        other = mq.servers.client()
        consumers = [
            who.consumer("g", lambda message: got.append(message.body)).subscribe("t", tags="A")
            for who in (mq, other)
        ]
        for consumer in consumers:
            await consumer.start()
        await until(lambda: len(own(mq, "g", "t")) == len(own(other, "g", "t")) == 1)
        await consumers[1].change("t", tags="A || B")
        await until(lambda: len(own(mq, "g", "t")) == 2 and not own(other, "g", "t"))
        await fill(mq, "t", 8, tag="A")
        await until(lambda: len(got) == 8)
        await member(mq, "g").readers.commit()
        await consumers[0].change("t", tags="A || B")
        other_member = member(other, "g")
        other_member.schedule_rebalance()
        await until(lambda: len(own(mq, "g", "t")) == len(own(other, "g", "t")) == 1)
        await fill(mq, "t", 8, tag="B")
        await until(lambda: len(got) == 16)
        await asyncio.sleep(0.1)
        assert len(got) == 16


async def test_a_handlers_subscription_changes_and_a_topic_is_added_while_it_runs():
    async with embedded() as mq:
        await fill(mq, "t", 4, tag="A")
        await fill(mq, "u", 4, tag="A")
        seen: list[tuple[str, str]] = []
        consumer = mq.consumer("g", lambda message: seen.append((message.topic, message.tag)))
        await consumer.subscribe("t", tags="A").start()
        await until(lambda: len(seen) == 4)
        await consumer.change("u")
        await until(lambda: len(seen) == 8)
        await consumer.change("t", tags="B")
        await fill(mq, "t", 4, tag="A")
        await fill(mq, "t", 4, tag="B")
        await until(lambda: len(seen) == 12)
        assert Counter(seen) == {("t", "A"): 4, ("u", "A"): 4, ("t", "B"): 4}
        await consumer.unsubscribe("u")
        assert not own(mq, "g", "u")


# -------------------------------------------------------------------------------- lite pull


async def drain(consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with asyncio.timeout(limit(5)):
        while len(found) < count:
            found += [message.body for message in await consumer.poll(0.2)]
    return found


async def test_a_paused_queue_is_not_handed_out_and_continues_where_it_was_paused():
    async with embedded() as mq:
        await fill(mq, "t", 20, queues=2)
        async with mq.lite_pull("g") as consumer:
            await consumer.subscribe("t")
            first, second = (queue for queue in consumer.assignment if queue.topic == "t")
            consumer.pause([first])
            assert consumer.paused == [first]
            bodies = await drain(consumer, 10)
            assert bodies == [b"A%d" % n for n in range(1, 20, 2)]
            assert await consumer.poll(0.05) == []
            consumer.resume([first])
            assert await drain(consumer, 10) == [b"A%d" % n for n in range(0, 20, 2)]
            await consumer.commit()
            assert await consumer.committed(second) == 10


async def test_commits_are_exact_and_a_seek_outside_is_refused():
    async with embedded() as mq:
        await fill(mq, "t", 10, queues=1)
        async with mq.lite_pull("g", auto_commit=False) as consumer:
            (queue,) = await consumer.queues("t")
            await consumer.assign([queue])
            await drain(consumer, 10)
            assert await consumer.committed(queue) is None
            await consumer.commit({queue: 7})
            assert await consumer.committed(queue) == 7
            consumer.commit_soon()
            async with asyncio.timeout(2):
                while await consumer.committed(queue) != 10:
                    await asyncio.sleep(0.01)
            with pytest.raises(ConfigurationError, match="0 to 10, and 11 is outside"):
                await consumer.seek(queue, 11)
            await consumer.seek(queue, 4)
            assert await drain(consumer, 6) == [b"A%d" % n for n in range(4, 10)]
            with pytest.raises(ConfigurationError, match="timeout_s cannot be -1"):
                await consumer.poll(-1)


async def test_listeners_are_called_for_new_queues_and_for_a_new_assignment():
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=2)
        heard: list[int] = []
        shares: list[int] = []
        async with mq.lite_pull("g") as consumer:
            consumer.on_assignment_change = lambda topic, queues, mine: shares.append(len(mine))
            consumer.watch_queues(
                "t", lambda topic, queues: heard.append(len(queues)), period_s=0.02
            )
            await consumer.subscribe("t")
            assert shares == [2]
            await asyncio.sleep(0.1)
            assert heard == []
            await mq.admin.create_topic("t", queues=4)
            await until(lambda: heard == [4])
            other = mq.servers.client()
            async with other.lite_pull("g") as second:
                await second.subscribe("t")
                await until(lambda: len(own(other, "g", "t")) + len(own(mq, "g", "t")) == 4)
                await until(lambda: shares[-1] < 4)


# ------------------------------------------------------------------------------ where to begin


async def test_where_a_new_group_begins():
    async with embedded() as mq:
        await fill(mq, "t", 5, queues=1)

        async def start_of(group: str, **options) -> int:
            async with mq.lite_pull(group, **options) as consumer:
                await consumer.subscribe("t")
                (queue,) = [queue for queue in consumer.assignment if queue.topic == "t"]
                return member(mq, consumer.group).readers.get(queue).in_flight.committable

        ways = (
            {"start": "first"}, {"start": "last"}, {"start": 1}, {"start": 1 << 42},
            {"start": "last", "young_from_first": True},
        )  # fmt: skip
        starts = [await start_of(f"g{number}", **way) for number, way in enumerate(ways)]
        assert starts == [0, 5, 0, 5, 0]


async def test_unacknowledged_messages_stay_uncommitted():
    async with embedded() as mq:
        await fill(mq, "t", 10, queues=1)
        async with mq.subscribe("t", group="g") as stream:
            messages = [await stream.receive() for _ in range(10)]
            for message in messages[1:]:
                await message.ack()
            await member(mq, "g").readers.commit()
            offsets = mq.servers.broker.core.offsets
            assert offsets.committed("g", "t", 0) == 0
        assert offsets.committed("g", "t", 0) == 0


async def test_the_offsets_file_is_what_java_writes():
    files = CrashableFiles()
    async with embedded() as mq:
        await fill(mq, "t", 2, queues=1)
        client = mq.servers.client(client_id="c", files=files, offsets_directory="/o")
        async with client.subscribe("t", group="g", broadcast=True) as stream:
            for _ in range(2):
                await (await stream.receive()).ack()
    file = files.open("/o/c/g/offsets.json")
    text = file.pread(file.size(), 0).decode()
    assert text == (
        '{\n\t"offsetTable":{{\n\t\t\t"brokerName":"broker-a",\n\t\t\t"queueId":0,'
        '\n\t\t\t"topic":"t"\n\t\t}:2\n\t}\n}'
    )
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


async def test_topic_limits_apply_to_all_queues_of_a_topic_together():
    async with embedded() as mq:
        await fill(mq, "t", 400, queues=4)
        async with mq.subscribe("t", group="g", topic_count_max=40, pull_count=7) as stream:
            readers = member(mq, "g").readers

            def waiting() -> list[int]:
                return [readers.get(queue).in_flight.count for queue in own(mq, "g", "t")]

            await until(lambda: waiting() == [10] * 4)
            await asyncio.sleep(0.1)
            assert waiting() == [10] * 4, "nothing more is fetched"
            for _ in range(400):
                await (await stream.receive()).ack()


async def test_two_clients_of_one_process_may_have_different_filters_at_a_broker_with_lanes():
    """Each gets its own, all of it, and each once: before and after one changes what it wants."""
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=2)
        other = mq.servers.client()
        got: dict[str, list[str]] = {"mine": [], "its": []}
        mine = mq.consumer("g", lambda message: got["mine"].append(message.tag))
        its = other.consumer("g", lambda message: got["its"].append(message.tag))
        await mine.subscribe("t", tags="A").start()
        await its.subscribe("t", where="TAGS = 'B'").start()
        await until(lambda: len(own(mq, "g", "t")) == len(own(other, "g", "t")) == 2)
        for tag in "ABC":
            await fill(mq, "t", 4, tag=tag)
        await until(lambda: len(got["mine"]) == len(got["its"]) == 4)
        assert set(got["mine"]) == {"A"}
        assert set(got["its"]) == {"B"}
        await its.change("t", tags="B || C")
        await fill(mq, "t", 4, tag="C")
        await until(lambda: got["its"].count("C") >= 4)
        assert got["its"].count("B") == 4
        with pytest.raises(SubscriptionConflictError, match="A client must have one expression"):
            await mq.subscribe("t", group="g", tags="C").start()


async def test_start_raises_the_refusal_of_a_strict_group() -> None:
    async with embedded() as mq:
        await mq.admin.create_topic("t", queues=2)
        await mq.admin.create_group(GroupConfig("g", attributes={f"+{CONTRACT}": "strict"}))
        other = mq.servers.client()
        async with mq.subscribe("t", group="g", tags="A"):
            with pytest.raises(RequestError, match=r"contract strict.*TAG 'A' -> TAG 'B'"):
                await other.subscribe("t", group="g", tags="B").start()
            said = await mq.admin.explain_group("g")
            assert any(one.code == "refused-by-contract" for one in said.findings)


async def test_an_invalid_filter_leaves_the_subscription_unchanged():
    async with embedded() as mq:
        await fill(mq, "t", 1)
        async with mq.subscribe("t", group="g", tags="A") as mine:
            with pytest.raises(FilterSyntaxError):
                await mine.change(where="a >")
            assert member(mq, "g").subscriptions["t"].expression == "A"
