"""Offsets of whole groups: reset (222), time spans (303), correction (308), clone (314), units
(321).

What the real broker does: spec/traffic java53-reset-while-consuming-{server,client}-side.
"""

import pytest

from simulation.stepped import START_MS, SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import bodies

SEND, PULL, QUERY, COMMIT, BEAT, STATS = 310, 11, 14, 15, 34, 208
RESET, SPANS, CORRECTION, CLONE, UNITS, TOLD = 222, 303, 308, 314, 321, 220
MOVED, NOT_FOUND, NO_TOPIC, NO_GROUP, OFFLINE = 21, 19, 17, 26, 206
COMMITS = 0x1
WAITS = 0x2


def queue(queue_id: int = 0, topic: str = "T") -> MessageQueue:
    return MessageQueue(topic, "broker-a", queue_id)


def join(client: SteppedClient, group: str = "G", client_id: str = "c") -> None:
    data = bodies.ConsumerData(group, subscriptions=(Subscription("T"),))
    client.call(BEAT, {}, bodies.encode_heartbeat(bodies.Heartbeat(client_id, (), (data,))))


def reset(client: SteppedClient, time_ms: int = -1, **more: object) -> dict[MessageQueue, int]:
    fields = {"topic": "T", "group": "G", "timestamp": time_ms, "isForce": "true"} | more
    answer = client.call(RESET, fields)
    assert answer.code == 0, answer.remark
    return bodies.decode_queue_offsets(answer.body)


def commit(client: SteppedClient, offset: int, group: str = "G", queue_id: int = 0) -> None:
    fields = {"consumerGroup": group, "topic": "T", "queueId": queue_id, "commitOffset": offset}
    assert client.call(COMMIT, fields).code == 0


def committed(client: SteppedClient, group: str = "G", queue_id: int = 0) -> int:
    fields = {"consumerGroup": group, "topic": "T", "queueId": queue_id}
    return int((client.call(QUERY, fields).fields or {})["offset"])


@pytest.fixture
def stocked(broker: SteppedBroker, client: SteppedClient) -> SteppedClient:
    """Queue 0 of T holds ten messages, one a second; the group G is known."""
    for number in range(10):
        client.call(SEND, send_fields(), b"%d" % number)
        broker.clock.advance(1)
    client.call(PULL, pull_fields())
    return client


def test_a_reset_by_time_answers_with_the_first_offset_of_that_time(
    stocked: SteppedClient,
) -> None:
    assert reset(stocked, START_MS + 3000)[queue()] == 3
    assert committed(stocked) == 3


@pytest.mark.parametrize(("time_ms", "offset"), [(0, 0), (-1, 10), (START_MS + 99_000, 10)])
def test_the_beginning_the_end_and_the_future(
    stocked: SteppedClient, time_ms: int, offset: int
) -> None:
    assert reset(stocked, time_ms)[queue()] == offset


def test_every_queue_that_is_read_is_reset(stocked: SteppedClient) -> None:
    assert reset(stocked) == {queue(): 10, queue(1): 0, queue(2): 0, queue(3): 0}


def test_one_queue_goes_to_one_offset(stocked: SteppedClient) -> None:
    assert reset(stocked, 0, queueId=0, offset=7) == {queue(): 7}


def test_an_offset_that_the_queue_does_not_hold_is_refused(stocked: SteppedClient) -> None:
    fields = {"topic": "T", "group": "G", "timestamp": 0, "queueId": 0, "offset": 12}
    answer = stocked.call(RESET, fields)
    assert answer.code == 1
    assert "0 to 10" in (answer.remark or "")


def test_unknown_topics_groups_and_queues_are_refused(stocked: SteppedClient) -> None:
    fields = {"topic": "T", "group": "G", "timestamp": 0}
    assert stocked.call(RESET, fields | {"topic": "none"}).code == NO_TOPIC
    assert stocked.call(RESET, fields | {"group": "none"}).code == NO_GROUP
    assert stocked.call(RESET, fields | {"queueId": 4, "offset": 0}).code == 1


def test_the_next_pull_is_told_where_to_go_on(stocked: SteppedClient) -> None:
    reset(stocked, START_MS + 3000)
    answer = stocked.call(PULL, pull_fields(offset=10))
    assert (answer.code, answer.remark) == (MOVED, "OFFSET_RESET")
    fields = answer.fields or {}
    assert [fields[name] for name in ("nextBeginOffset", "minOffset", "maxOffset")] == [
        "3", "0", "10",
    ]  # fmt: skip
    assert stocked.call(PULL, pull_fields(offset=3)).code == 0


def test_a_pull_that_waits_is_told_at_once(broker: SteppedBroker, stocked: SteppedClient) -> None:
    parked = stocked.request(PULL, pull_fields(offset=10, sysFlag=4 | WAITS))
    stocked.feed(parked)
    assert parked.opaque not in stocked.answers
    reset(stocked, 0)
    assert stocked.answers[parked.opaque].code == MOVED
    assert len(broker.core.polls) == 0


def test_a_reset_to_the_place_where_the_group_reads_is_told_too(stocked: SteppedClient) -> None:
    """It may hold older messages that are not acknowledged, and would commit below."""
    reset(stocked, -1)
    commit(stocked, 4)
    assert stocked.call(PULL, pull_fields(offset=10)).code == MOVED
    assert committed(stocked) == 10


def test_what_is_under_way_does_not_commit_over_a_reset(stocked: SteppedClient) -> None:
    commit(stocked, 5)
    reset(stocked, START_MS + 2000)
    commit(stocked, 6)  # before the consumer knows
    assert committed(stocked) == 2
    fields = pull_fields(offset=10, sysFlag=4 | COMMITS, commitOffset=7)
    assert stocked.call(PULL, fields).code == MOVED
    assert committed(stocked) == 2
    commit(stocked, 8)  # sent before the 21 arrived
    assert committed(stocked) == 2
    assert stocked.call(PULL, pull_fields(offset=2)).code == 0
    commit(stocked, 3)
    assert committed(stocked) == 3


def test_who_did_not_hear_is_told_again(stocked: SteppedClient) -> None:
    """The answer was lost with its connection: the next pull comes from the old place."""
    reset(stocked, 0)
    assert stocked.call(PULL, pull_fields(offset=10)).code == MOVED
    commit(stocked, 10)
    assert stocked.call(PULL, pull_fields(offset=10)).code == MOVED
    assert committed(stocked) == 0


def test_who_never_listens_is_not_held_for_ever(stocked: SteppedClient) -> None:
    reset(stocked, 0)
    codes = [stocked.call(PULL, pull_fields(offset=10)).code for _ in range(4)]
    assert codes == [MOVED, MOVED, MOVED, NOT_FOUND]


def test_a_group_that_is_away_is_told_when_it_comes(
    broker: SteppedBroker, stocked: SteppedClient
) -> None:
    reset(stocked, START_MS + 4000)
    stocked.disconnect()
    back = broker.connect()
    assert committed(back) == 4
    assert back.call(PULL, pull_fields(offset=4)).code == MOVED
    assert back.call(PULL, pull_fields(offset=4)).code == 0


def test_other_groups_and_queues_go_on(stocked: SteppedClient) -> None:
    reset(stocked, 0, queueId=0)
    assert stocked.call(PULL, pull_fields(offset=3, consumerGroup="other")).code == 0
    assert stocked.call(PULL, pull_fields(offset=0, queueId=1)).code == NOT_FOUND


def test_a_deleted_group_has_no_reset(broker: SteppedBroker, stocked: SteppedClient) -> None:
    reset(stocked, 0)
    broker.core.offsets.forget(group="G")
    assert len(broker.core.offsets.resets) == 0
    reset(stocked, 0)
    broker.core.offsets.forget(topic="T")
    assert len(broker.core.offsets.resets) == 0


# --- by the consumers (useServerSideResetOffset=false)


@pytest.fixture
def by_consumers(broker: SteppedBroker, stocked: SteppedClient) -> SteppedClient:
    broker.change(server_side_reset=False)
    return stocked


def test_consumers_are_told_the_queues_and_their_offsets(
    broker: SteppedBroker, by_consumers: SteppedClient
) -> None:
    members = [broker.connect(), broker.connect()]
    for number, member in enumerate(members):
        join(member, client_id=f"c{number}")
    for queue_id in range(4):
        commit(by_consumers, 0, queue_id=queue_id)
    wanted = reset(by_consumers, -1)
    for member in members:
        (told,) = [request for request in member.requests if request.code == TOLD]
        assert told.is_oneway
        assert (told.fields or {})["group"] == "G"
        assert bodies.decode_queue_offsets(told.body) == wanted
    assert committed(by_consumers) == 0, "they commit it themselves"


def test_without_consumers_nobody_could_do_it(by_consumers: SteppedClient) -> None:
    """mqadmin falls back to 15 on this code."""
    fields = {"topic": "T", "group": "G", "timestamp": 0, "isForce": "true"}
    assert by_consumers.call(RESET, fields).code == OFFLINE


def test_without_force_a_group_only_goes_back(
    broker: SteppedBroker, by_consumers: SteppedClient
) -> None:
    join(broker.connect())
    for queue_id in range(4):
        commit(by_consumers, 5, queue_id=queue_id)
    assert reset(by_consumers, -1, isForce="false")[queue()] == 5
    assert reset(by_consumers, START_MS + 2000, isForce="false")[queue()] == 2


def test_a_client_in_another_language_gets_a_list(
    broker: SteppedBroker, by_consumers: SteppedClient
) -> None:
    member = broker.connect()
    join(member)
    for queue_id in range(4):
        commit(by_consumers, 0, queue_id=queue_id)
    fields = {"topic": "T", "group": "G", "timestamp": 0, "isForce": "true"}
    by_consumers.call(RESET, fields, language="CPP")  # type: ignore[arg-type]
    assert bytes(member.requests[-1].body).startswith(b'{"offsetTable":[{"brokerName":"broker-a"')


# --- clone, spans, correction, units


def test_a_clone_has_the_offsets_of_its_source(stocked: SteppedClient) -> None:
    commit(stocked, 4)
    commit(stocked, 2, queue_id=1)
    fields = {"srcGroup": "G", "destGroup": "copy", "topic": "T", "offline": "false"}
    assert stocked.call(CLONE, fields).code == 0
    assert [committed(stocked, "copy"), committed(stocked, "copy", 1)] == [4, 2]


def test_a_clone_moves_consumers_that_read(stocked: SteppedClient) -> None:
    commit(stocked, 4)
    stocked.call(PULL, pull_fields(consumerGroup="copy"))
    stocked.call(CLONE, {"srcGroup": "G", "destGroup": "copy"})
    commit(stocked, 9, group="copy")
    assert committed(stocked, "copy") == 4
    assert stocked.call(PULL, pull_fields(offset=9, consumerGroup="copy")).code == MOVED


def test_a_clone_of_an_unknown_group_is_refused(stocked: SteppedClient) -> None:
    assert stocked.call(CLONE, {"srcGroup": "none", "destGroup": "G"}).code == NO_GROUP


def test_time_spans_say_how_old_the_next_message_is(
    broker: SteppedBroker, stocked: SteppedClient
) -> None:
    commit(stocked, 4)
    answer = stocked.call(SPANS, {"topic": "T", "group": "G"})
    spans = {span.queue: span for span in bodies.decode_time_spans(answer.body)}
    now_ms = broker.clock.now_ms()
    span = spans[queue()]
    assert (span.first_ms, span.last_ms) == (START_MS, START_MS + 9000)
    assert span.consumed_ms == START_MS + 3000
    assert span.delay_ms == now_ms - (START_MS + 4000)
    assert spans[queue(1)].delay_ms == 0


def test_correction_is_the_least_offset_of_the_groups_that_count(stocked: SteppedClient) -> None:
    for group, offset in (("G", 6), ("A", 3), ("B", 1)):
        stocked.call(PULL, pull_fields(consumerGroup=group))
        commit(stocked, offset, group=group)

    def correction(**fields: str) -> dict[int, int]:
        answer = stocked.call(CORRECTION, {"topic": "T"} | fields)
        return bodies.decode_correction_offsets(answer.body)

    assert correction() == {0: 1}
    assert correction(filterGroups="B") == {0: 3}
    assert correction(filterGroups="B", compareGroup="G") == {0: 3}
    assert correction(filterGroups="B,G", compareGroup="B") == {0: (1 << 63) - 1}
    assert committed(stocked, "B") == 1, "asking changes nothing"


def test_the_units_of_a_queue_can_be_read(stocked: SteppedClient) -> None:
    stocked.call(SEND, send_fields(properties="TAGS\x01red\x02"), b"select_tagged")
    answer = stocked.call(UNITS, {"topic": "T", "queueId": 0, "index": 8, "count": 100})
    found = bodies.decode_queue_units(answer.body)
    assert (found.offset_min, found.offset_max) == (0, 11)
    assert [unit.tag_code for unit in found.units] == [0, 0, tag_code("red")]
    assert found.units[1].physical_offset > found.units[0].physical_offset


# --- a broker that stops


def test_a_consumer_is_told_by_the_broker_that_comes_back(
    broker: SteppedBroker, stocked: SteppedClient
) -> None:
    """The consumer goes on where it was, and knows of nothing."""
    reset(stocked, START_MS + 3000, queueId=0)
    broker.close()
    again = SteppedBroker(files=broker.files, clock=broker.clock)
    back = again.connect()
    commit(back, 10)
    assert committed(back) == 3
    assert back.call(PULL, pull_fields(offset=10)).code == MOVED
    assert back.call(PULL, pull_fields(offset=3)).code == 0
    commit(back, 4)
    again.close()
    last = SteppedBroker(files=again.files, clock=broker.clock)
    assert committed(last.connect()) == 4
    assert not last.core.offsets.resets
