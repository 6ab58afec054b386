# ruff: noqa: SIM117 - nested blocks show the order of events
"""Consumers at a scripted broker: streams, handlers, rebalances, offsets."""

import asyncio
import time

import pytest

from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import OffsetMoved
from sluicemq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionLostError,
    FilterSyntaxError,
    GroupNotFoundError,
    RequestError,
    RouteNotFoundError,
    SubscriptionConflictError,
)
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.frames import Command
from waiting import limit, until


async def take(stream, count, *, ack=True):
    messages = []
    for _ in range(count):
        async with asyncio.timeout(limit(5)):
            message = await stream.receive()
        messages.append(message)
        if ack:
            await message.ack()
    return messages


async def test_a_loop_sees_every_message_and_commits_what_was_acknowledged(fake):
    fake.topics["t"] = 2
    for index in range(20):
        fake.broker.put("t", index % 2, b"%d" % index, TAGS="A")
    seen = []
    async with Sluice(fake.name_server) as mq:
        async for message in mq.subscribe("t", group="g"):
            seen.append(int(message.body))
            await message.ack()
            if len(seen) == 20:
                break
    assert sorted(seen) == list(range(20))
    assert fake.broker.committed["g", "t", 0] == 10
    assert fake.broker.committed["g", "t", 1] == 10


async def test_the_lowest_unacknowledged_offset_is_committed(fake):
    fake.topics["t"] = 1
    for index in range(5):
        fake.broker.put("t", 0, b"%d" % index)
    async with Sluice(fake.name_server) as mq:
        stream = mq.subscribe("t", group="g")
        messages = await take(stream, 5, ack=False)
        for index in (0, 1, 3, 4):
            assert await messages[index].ack()
        assert not await messages[0].ack(), "a second time does not count"
        await stream.close()
    assert fake.broker.committed["g", "t", 0] == 2
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g") as again:
        assert [message.queue_offset for message in await take(again, 3)] == [2, 3, 4]


async def test_an_exception_in_the_loop_does_not_acknowledge(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x")

    async def consume(mq):
        async for _ in mq.subscribe("t", group="g"):
            raise ValueError("handler")

    async with Sluice(fake.name_server) as mq:
        with pytest.raises(ValueError, match="handler"):
            await consume(mq)
    assert fake.broker.committed["g", "t", 0] == 0


async def test_leaving_the_loop_ends_the_subscription_and_a_new_loop_continues(fake):
    fake.topics["t"] = 1
    for index in range(6):
        fake.broker.put("t", 0, b"%d" % index)
    async with Sluice(fake.name_server) as mq:
        seen = []
        for _ in range(2):
            async for message in mq.subscribe("t", group="g"):
                seen.append(int(message.body))
                if len(seen) % 3 == 0:
                    break  # the third one stays unacknowledged
                await message.ack()
            await until(lambda: not fake.broker.members.get("g"))
    assert seen == [0, 1, 2, 2, 3, 4]


async def test_new_messages_arrive_at_once_through_the_long_poll(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g") as stream:
        waiting = asyncio.gather(stream.receive())
        await until(lambda: fake.broker.parked)
        began = time.monotonic()
        fake.broker.put("t", 0, b"now")
        (message,) = await waiting
        assert message.body == b"now"
        assert time.monotonic() - began < limit(0.5)


async def test_messages_whose_tag_only_shares_the_hash_are_dropped_and_passed(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"other", TAGS="BB")  # "Aa" and "BB" have one Java hash
    fake.broker.put("t", 0, b"mine", TAGS="Aa")
    fake.broker.put("t", 0, b"other", TAGS="BB")
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g", tags="Aa||C") as stream:
        (message,) = await take(stream, 1)
        assert message.body == b"mine"
        await until(lambda: fake.broker.parked)
    assert fake.broker.committed["g", "t", 0] == 3


async def test_an_sql_filter_is_checked_at_the_broker_and_applied_there(fake):
    fake.topics["t"] = 1
    for index in range(10):
        fake.broker.put("t", 0, b"%d" % index, n=str(index))
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g", where="n BETWEEN 3 AND 5") as stream:
            assert [int(message.body) for message in await take(stream, 3)] == [3, 4, 5]
    assert fake.broker.seen[46] == 1


async def test_an_invalid_filter_is_refused_before_any_request():
    mq = Sluice("127.0.0.1:1")
    with pytest.raises(FilterSyntaxError, match="character 5"):
        mq.subscribe("t", group="g", where="n > 'x'")
    with pytest.raises(ConfigurationError, match="tags= and where= cannot be combined"):
        mq.subscribe("t", group="g", tags="A", where="n > 1")
    await mq.close()


async def test_a_broker_without_sql92_filters_is_an_error_that_names_its_setting(fake):
    fake.topics["t"] = 1
    fake.broker.script[46] = lambda command, peer: Command(
        1, remark="The broker does not support consumer to filter message by SQL92"
    )
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(ConfigurationError, match="enablePropertyFilter=true"):
            await mq.subscribe("t", group="g", where="n > 1").receive()


async def test_a_second_expression_for_a_group_is_refused_showing_both(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server) as mq, Sluice(fake.name_server) as other:
        async with mq.subscribe("t", group="g", tags="A"):
            for client in (mq, other):
                with pytest.raises(SubscriptionConflictError) as error:
                    await client.subscribe("t", group="g", where="n > 1").start()
                assert "tags='A'" in str(error.value)
                assert "where='n > 1'" in str(error.value)
        async with other.subscribe("t", group="g", where="n > 1"):
            pass  # free again


async def test_two_streams_of_one_client_share_the_messages(fake):
    fake.topics["t"] = 1
    for index in range(4):
        fake.broker.put("t", 0, b"%d" % index)
    async with Sluice(fake.name_server) as mq:
        first, second = (mq.subscribe("t", group="g") for _ in range(2))
        held = await take(first, 2, ack=False)
        other = await take(second, 2)
        assert {m.queue_offset for m in held} | {m.queue_offset for m in other} == {0, 1, 2, 3}
        await first.close()
        again = await take(second, 2)
        assert {m.queue_offset for m in again} == {m.queue_offset for m in held}
    assert fake.broker.committed["g", "t", 0] == 4


async def test_a_missing_group_raises_instead_of_idling(fake):
    fake.topics["t"] = 1
    fake.broker.groups_known = {"known"}
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(GroupNotFoundError, match="autoCreateSubscriptionGroup"):
            await mq.subscribe("t", group="missing").receive()
        async with mq.subscribe("t", group="known"):
            pass


async def test_a_missing_topic_raises_and_leaves_no_trace(fake):
    async with Sluice(fake.name_server) as mq:
        stream = mq.subscribe("nosuch", group="g", tags="A")
        with pytest.raises(RouteNotFoundError, match="consumers do not create topics"):
            await stream.receive()
        fake.topics["nosuch"] = 1
        async with mq.subscribe("nosuch", group="g", tags="B"):
            pass


async def test_a_revoked_permission_ends_the_loop_with_its_error(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g") as stream:
        fake.broker.script[11] = lambda command, peer: Command(16, remark="not readable")
        fake.broker.put("t", 0, b"x")
        await take(stream, 1)
        with pytest.raises(RequestError, match="not readable"):
            async with asyncio.timeout(limit(5)):
                await stream.receive()


async def test_an_offset_outside_the_queue_moves_the_reader_and_is_logged(fake, caplog):
    fake.topics["t"] = 1
    fake.broker.first["t", 0] = 100
    fake.broker.put("t", 0, b"first kept")
    fake.broker.committed["g", "t", 0] = 7
    moved = []

    def on_moved(event):
        moved.append(event)
        raise ValueError("of the application: it does not end the reading")

    async with Sluice(fake.name_server, on_moved=on_moved) as mq:
        async with mq.subscribe("t", group="g") as stream:
            (message,) = await take(stream, 1)
            assert message.queue_offset == 100
    assert "93 messages are lost: the broker deleted them" in caplog.text
    assert moved == [OffsetMoved("g", MessageQueue("t", "broker-a", 0), 7, 100, 93)]
    assert fake.broker.committed["g", "t", 0] == 101


async def test_an_offset_behind_the_end_begins_at_the_first_message_and_is_logged(fake, caplog):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"only one")
    fake.broker.committed["g", "t", 0] = 50
    moved = []
    async with Sluice(fake.name_server, on_moved=moved.append) as mq:
        async with mq.subscribe("t", group="g"), asyncio.timeout(limit(5)):
            while not moved:
                await asyncio.sleep(0.01)
    assert "deleted and created again, or its broker has lost messages" in caplog.text
    assert [(event.old, event.new, event.lost) for event in moved] == [(50, 0, 0)]


async def test_fetching_ahead_is_bounded_by_count(fake, monkeypatch):
    fake.topics["t"] = 1
    for index in range(100):
        fake.broker.put("t", 0, b"%d" % index)
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g", prefetch_count=40) as stream:
            first = await take(stream, 40, ack=False)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await stream.receive()
            for message in first:
                await message.ack()
            await take(stream, 60)


async def test_a_new_group_begins_where_its_option_says(fake):
    fake.topics["t"] = 1
    for index in range(10):
        fake.broker.put("t", 0, b"%d" % index)
    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="first") as stream:
            assert (await take(stream, 1))[0].queue_offset == 0
        async with mq.subscribe("t", group="time", start=1006) as stream:
            assert (await take(stream, 1))[0].queue_offset == 6
        async with mq.subscribe("t", group="last", start="last") as stream:
            assert fake.broker.committed["last", "t", 0] == 10, "said at once"
            fake.broker.put("t", 0, b"new")
            assert (await take(stream, 1))[0].body == b"new"


async def test_queues_move_between_members_as_they_come_and_go(fake):
    fake.topics["t"] = 4
    async with Sluice(fake.name_server) as one, Sluice(fake.name_server) as two:
        async with one.subscribe("t", group="g"):
            mine = one._members["g"].readers
            assert len([queue for queue in mine.queues if queue.topic == "t"]) == 4
            async with two.subscribe("t", group="g"):
                theirs = two._members["g"].readers
                await until(lambda: len([q for q in mine.queues if q.topic == "t"]) == 2)
                assert not mine.queues & theirs.queues
            await until(lambda: len([q for q in mine.queues if q.topic == "t"]) == 4)


async def test_acknowledging_after_the_queue_was_removed_does_not_count(fake):
    fake.topics["t"] = 2
    for queue_id in (0, 1):
        fake.broker.put("t", queue_id, b"x")
    async with Sluice(fake.name_server) as one, Sluice(fake.name_server) as two:
        async with one.subscribe("t", group="g") as stream:
            messages = await take(stream, 2, ack=False)
            async with two.subscribe("t", group="g") as other:
                mine = one._members["g"].readers
                await until(lambda: len([q for q in mine.queues if q.topic == "t"]) == 1)
                (again,) = await take(other, 1)
                answers = [await message.ack() for message in messages]
                assert sorted(answers) == [False, True]
                lost = messages[answers.index(False)]
                assert lost.queue == again.queue


async def test_a_retried_message_comes_back_under_its_own_topic(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g", tags="A") as stream:
        fake.broker.put("%RETRY%g", 0, b"again", RETRY_TOPIC="t", TAGS="A")
        (message,) = await take(stream, 1)
        assert message.topic == "t"
        assert message.queue.topic == "%RETRY%g"
    assert fake.broker.subscriptions["g"]["%RETRY%g"].expression == "*"
    assert fake.broker.committed["g", "%RETRY%g", 0] == 1


async def test_a_handler_that_blocks_the_loop_does_not_starve_heartbeats(fake_thread):
    fake_thread.topics["t"] = 1
    async with Sluice(fake_thread.name_server) as mq:
        mq._heartbeat_thread._period_s = 0.05
        async with mq.subscribe("t", group="g"):
            before = fake_thread.broker.seen[34]
            time.sleep(0.6)
            assert fake_thread.broker.seen[34] - before >= 5


async def test_a_lost_connection_is_registered_again(fake):
    fake.topics["t"] = 1
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g") as stream:
        members = fake.broker.members["g"]
        old = set(fake.broker.members["g"].values())
        for peer in fake.broker.server.peers:
            peer.close()
        await until(lambda: fake.broker.members["g"] and not old & set(members.values()))
        fake.broker.put("t", 0, b"after")
        assert (await take(stream, 1))[0].body == b"after"


async def test_a_handler_is_called_and_its_return_acknowledges(fake):
    fake.topics["t"] = 2
    for index in range(50):
        fake.broker.put("t", index % 2, b"%d" % index)
    seen = []

    async def handler(message):
        seen.append(int(message.body))

    async with Sluice(fake.name_server) as mq:
        async with mq.consumer("g", handler, concurrency=4).subscribe("t"):
            await until(lambda: len(seen) == 50)
    assert sorted(seen) == list(range(50))
    assert fake.broker.committed["g", "t", 0] == 25


async def test_a_plain_function_may_block_on_a_thread_of_its_own(fake):
    fake.topics["t"] = 1
    for index in range(8):
        fake.broker.put("t", 0, b"%d" % index)
    seen = []

    def handler(message):
        time.sleep(0.1)
        seen.append(message.body)

    async with Sluice(fake.name_server) as mq:
        began = time.monotonic()
        async with mq.consumer("g", handler, concurrency=8).subscribe("t"):
            await until(lambda: len(seen) == 8)
        assert time.monotonic() - began < limit(0.8)


async def test_closing_the_client_ends_waiting_loops(fake):
    fake.topics["t"] = 1
    mq = Sluice(fake.name_server)
    stream = mq.subscribe("t", group="g")
    await stream.start()
    waiting = asyncio.gather(stream.receive(), return_exceptions=True)
    await asyncio.sleep(0.05)
    await mq.close()
    async with asyncio.timeout(limit(5)):
        (error,) = await waiting
    assert isinstance(error, ClosedError)


async def test_a_handler_and_a_stream_may_not_share_a_group_in_one_client(fake):
    fake.topics["t"] = 1

    async def handler(message):
        pass

    async with Sluice(fake.name_server) as mq:
        async with mq.subscribe("t", group="g"):
            with pytest.raises(ConfigurationError, match="another kind of consumer"):
                await mq.consumer("g", handler).subscribe("t").start()
            with pytest.raises(ConfigurationError, match="another kind of consumer"):
                await mq.lite_pull("g").subscribe("t")


async def test_a_subscription_may_end_during_a_rebalance(fake, caplog):
    fake.topics["t"] = 4
    async with Sluice(fake.name_server) as mq:
        for _ in range(20):
            async with mq.subscribe("t", group="g"):
                mq._members["g"].schedule_rebalance()
                await asyncio.sleep(0)
    assert "died" not in caplog.text


async def test_an_unreachable_broker_does_not_affect_the_others(fake_two, caplog):
    fake_two.topics["t"] = 1
    await fake_two.brokers[1].server.close()
    fake_two.broker.put("t", 0, b"x")
    async with Sluice(fake_two.name_server) as mq, mq.subscribe("t", group="g") as stream:
        assert (await take(stream, 1))[0].body == b"x"
    assert caplog.text.count("heartbeat to") == 1, "said once, not every second"


async def test_a_broker_that_joins_later_gets_heartbeats_and_is_read_from_its_start(fake_two):
    fake_two.topics["t"] = 1
    later = fake_two.brokers.pop()
    later.put("t", 0, b"was there before us")
    async with Sluice(fake_two.name_server) as mq:
        async with mq.subscribe("t", group="g", start="last") as stream:
            fake_two.brokers.append(later)
            mq.cluster.routes.expire("t")
            mq._members["g"].schedule_rebalance()
            assert (await take(stream, 1))[0].body == b"was there before us"
            await until(lambda: later.members.get("g"))


async def test_start_raises_if_no_broker_is_reachable(fake):
    fake.topics["t"] = 1
    await fake.broker.server.close()
    async with Sluice(fake.name_server) as mq:
        with pytest.raises(ConnectionLostError, match="no broker of the group 'g'"):
            await mq.subscribe("t", group="g").receive()


async def test_a_stream_that_was_dropped_leaves_its_group_with_the_client(fake):
    fake.topics["t"] = 1
    fake.broker.put("t", 0, b"x", TAGS="A")
    async with Sluice(fake.name_server) as mq:
        stream = mq.subscribe("t", group="g", tags="A||B")
        await stream.start()
        del stream
    assert not fake.broker.members["g"]
    async with Sluice(fake.name_server) as mq, mq.subscribe("t", group="g") as stream:
        await take(stream, 1)
