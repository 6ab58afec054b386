"""Pulls: the order of checks, what the store's answer becomes, filters, waiting, bulk."""

import dataclasses
from itertools import product
from typing import Any

import orjson
import pytest

from simulation.stepped import SMALL, SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker.consume import pull
from sluicemq.config import BrokerConfig
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.store import bulk
from sluicemq.store.queues import UNIT_BYTES
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command, encode

OK, NO_PERMISSION, NO_TOPIC, NOT_FOUND, RETRY, MOVED = 0, 16, 17, 19, 20, 21
PARSE_FAILED, NO_SUBSCRIPTION, NOT_LATEST, NO_GROUP, NO_FILTER, INVALID = 23, 24, 25, 26, 27, 29
WAITS = 0x2 | 0x4


def fill(client: SteppedClient, count: int, tags: str = "A", body: bytes = b"x" * 20) -> None:
    for number in range(count):
        tag = tags[number % len(tags)]
        properties = f"UNIQ_KEY\x01AB{number}\x02TAGS\x01{tag}\x02n\x01{number}\x02"
        client.call(310, send_fields(properties=properties), body)


def numbers(answer: Command) -> list[int]:
    return [int(m.properties["n"]) for m in decode_records(answer.body)]


def offsets(answer: Command) -> tuple[int, int, int]:
    fields = answer.fields or {}
    return int(fields["nextBeginOffset"]), int(fields["minOffset"]), int(fields["maxOffset"])


def beat(
    client: SteppedClient, expression: str, kind: str = "TAG", version: int = 1, **rest: str
) -> Command:
    codes = frozenset([65]) if expression == "A" else frozenset()
    subscription = Subscription("T", expression, kind, codes=codes, version=version)
    data = bodies.ConsumerData("G", subscriptions=(subscription,), **rest)  # type: ignore[arg-type]
    heartbeat = bodies.Heartbeat("client", consumers=(data,))
    return client.call(34, {}, bodies.encode_heartbeat(heartbeat))


# ------------------------------------------------------------------------------ what is found


def test_a_pull_gets_messages_in_order_and_where_to_go_on(client: SteppedClient) -> None:
    fill(client, 5)
    answer = client.call(11, pull_fields(offset=1, maxMsgNums=3))
    assert (answer.code, answer.remark, numbers(answer)) == (OK, "FOUND", [1, 2, 3])
    assert answer.fields == {
        "suggestWhichBrokerId": "0", "nextBeginOffset": "4", "minOffset": "0", "maxOffset": "5",
        "topicSysFlag": "0", "groupSysFlag": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("queue_id", "offset", "code", "remark", "next_offset"),
    [
        (0, 3, NOT_FOUND, "OFFSET_OVERFLOW_ONE", 3),
        (0, 9, MOVED, "OFFSET_OVERFLOW_BADLY", 3),
        (0, -1, MOVED, "OFFSET_TOO_SMALL", 0),
        (1, 0, NOT_FOUND, "NO_MESSAGE_IN_QUEUE", 0),
        (1, 5, MOVED, "NO_MESSAGE_IN_QUEUE", 0),
    ],
)
def test_offsets_without_a_message(
    client: SteppedClient, queue_id: int, offset: int, code: int, remark: str, next_offset: int
) -> None:
    fill(client, 3)
    answer = client.call(11, pull_fields(offset=offset, queueId=queue_id))
    assert (answer.code, answer.remark, offsets(answer)[0]) == (code, remark, next_offset)


def test_361_is_a_pull_too(client: SteppedClient) -> None:
    fill(client, 1)
    assert client.call(361, pull_fields(sysFlag=0x14)).code == OK


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"maxMsgNums": 3, "offset": 7}, True),
        ({"subscription": "B"}, True),
        ({"subscription": "nobody"}, True),
        ({"subscription": "n > 3", "expressionType": SQL92}, False),
        ({"sysFlag": 0x5, "commitOffset": 2}, True),
        ({"offset": 40}, False),
        ({"offset": -1}, False),
        ({"queueId": 1}, False),
        ({"topic": "missing"}, False),
        ({"consumerGroup": "new"}, False),
        ({"sysFlag": 0}, False),
        ({"queueOffset": "x"}, False),
        ({"sluiceBulk": "true"}, False),
    ],
)
def test_the_quick_way_answers_as_the_usual_one(
    broker: SteppedBroker, client: SteppedClient, changed: dict[str, Any], is_taken: bool
) -> None:
    fill(client, 40, tags="AB")
    core, usual = broker.core, broker.dispatcher.handlers[11]
    client.call(11, pull_fields(maxMsgNums=1))  # makes the group
    command = client.request(11, pull_fields(**changed))
    delivered, sums = core.delivered["T", "G"], []

    def counts() -> list[int]:
        return [
            delivered.messages_out,
            delivered.bytes_out,
            delivered.filtered_count,
            core.pull.found_count,
        ]

    begin = counts()
    taken = core.pull.pull_fast_path(orjson.loads(encode(command)[8:]), b"", client.peer)
    assert bool(taken) == is_taken
    sums.append([now - before for now, before in zip(counts(), begin, strict=True)])
    kept = dict(delivered.fetched_offsets), core.offsets.snapshot()
    if not is_taken:
        assert sums == [[0, 0, 0, 0]]
        return
    begin = counts()
    answer = usual(command, client.peer)
    sums.append([now - before for now, before in zip(counts(), begin, strict=True)])
    assert taken == answer
    assert sums[0] == sums[1]
    assert kept == (delivered.fetched_offsets, core.offsets.snapshot())


def test_an_ordinary_pull_is_limited_to_32_messages_and_256_kib(client: SteppedClient) -> None:
    fill(client, 40)
    assert len(numbers(client.call(11, pull_fields(maxMsgNums=32)))) == 32
    fill(client, 8, body=bytes(60_000))
    assert len(numbers(client.call(11, pull_fields(offset=40)))) == 4


@pytest.mark.parametrize("expression", ["*", "A", "TAGS = 'A'"])
@pytest.mark.parametrize(("fields", "most"), [({}, 32), ({"sluiceAnySpan": "true"}, 256)])
def test_no_answer_holds_more_than_rocketmqs_count_unless_the_client_is_ours(
    client: SteppedClient, expression: str, fields: dict[str, str], most: int
) -> None:
    fill(client, 300)
    kind = SQL92 if "=" in expression else "TAG"
    for code, asked in product([11, 361], [31, 32, 33, 64, 1000]):
        pulled = pull_fields(
            maxMsgNums=asked, subscription=expression, expressionType=kind, **fields
        )
        for repeat in range(3):  # the compiled engine answers the later ones
            answer = client.call(code, pulled)
            assert numbers(answer) == list(range(min(asked, most))), (code, asked, repeat)


def test_a_bulk_pull_has_the_limit_that_it_asks_for(client: SteppedClient) -> None:
    fill(client, 100, body=bytes(1000))
    many = pull_fields(maxMsgNums=10_000, sluiceBulk="true", maxMsgBytes=8 << 20)
    assert len(numbers(client.call(11, many))) == 100
    some = client.call(11, many | {"maxMsgBytes": 65_536})
    assert 40 < len(numbers(some)) < 65
    assert len(some.body) <= 65_536
    assert len(numbers(client.call(11, many | {"sluiceBulk": "false", "maxMsgNums": 32}))) == 32


@pytest.mark.parametrize("fields", [{}, {"sluiceAnySpan": "true"}])
@pytest.mark.parametrize("kind", ["TAG", SQL92])
def test_who_never_commits_is_given_each_match_once_and_looks_at_each_message_once(
    broker: SteppedBroker, client: SteppedClient, kind: str, fields: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fill(client, 3000, tags="A" + "B" * 99)
    looked: list[int] = []
    tagged = bulk.select_tagged

    def count(units: bytes, *rest: Any) -> Any:
        looked.append(len(units) // UNIT_BYTES)
        return tagged(units, *rest)

    monkeypatch.setattr(bulk, "select_tagged", count)
    expression, found, offset, pulls = "A" if kind == "TAG" else "TAGS = 'A'", [], 0, 0
    while offset < 3000:
        asked = pull_fields(
            offset=offset, maxMsgNums=4, subscription=expression, expressionType=kind, **fields
        )
        answer = client.call(11, asked)
        found += numbers(answer)
        offset, pulls = offsets(answer)[0], pulls + 1
    assert found == list(range(0, 3000, 100))
    # Who says nothing of its span may have the default of Java's, 2,000: it has asked for patience.
    assert pulls <= (30 // 4 + 3 if fields else 30)
    delivered = broker.core.delivered["T", "G"]
    assert delivered.filtered_count + delivered.messages_out == 3000
    assert sum(looked) == (3000 if kind == "TAG" else 0)
    assert broker.store.columns.rows_decoded <= 3000


HOLDS = list[tuple[float, Any]]


def hold_pulls(broker: SteppedBroker) -> HOLDS:
    """Let the broker hold pulls. Return the seconds of each hold, and what ends it."""
    holds: HOLDS = []
    broker.core.pull.call_later = lambda seconds, end: holds.append((seconds, end))
    return holds


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("kind", ["TAG", SQL92])
def test_every_answer_makes_progress_for_clients_that_cannot_keep_up(
    broker: SteppedBroker, client: SteppedClient, kind: str, is_held: bool
) -> None:
    """Their machine is starved: they ask on and on, and have consumed nothing."""
    holds = hold_pulls(broker) if is_held else []
    total, expression = 4400, "A" if kind == "TAG" else "TAGS = 'A'"
    fill(client, total, tags="A" + "B" * 80)
    for count, gap_s in product([1, 4, 32], [0.0, 0.05]):
        offset, found = 0, []
        while offset < total:
            request = client.request(11, pull_fields(
                offset=offset, maxMsgNums=count, subscription=expression, expressionType=kind,
                sysFlag=0x7, commitOffset=0, consumerGroup=f"G-{count}-{round(1000 * gap_s)}",
            ))  # fmt: skip
            client.feed(request)
            if request.opaque not in client.answers:
                seconds, end = holds.pop()
                broker.clock.advance(seconds)
                end()
            answer = client.answers.pop(request.opaque)
            assert answer.code in (OK, RETRY)
            assert offsets(answer)[0] > offset
            offset, found = offsets(answer)[0], found + numbers(answer)
            broker.clock.advance(gap_s)
        assert found == list(range(0, total, 81))
    assert not holds


def test_a_pull_out_of_reach_is_held_and_then_given_what_it_asked_for(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    holds = hold_pulls(broker)
    fill(client, 2200, tags="A" + "B" * 99)
    plain = {"sysFlag": 0x5, "commitOffset": 0, "subscription": "A"}
    assert numbers(client.call(11, pull_fields(**plain))) == list(range(0, 2001, 100))
    passed = client.call(11, pull_fields(offset=2001, **plain))
    assert (passed.code, offsets(passed)[0], holds) == (RETRY, 2100, [])
    request = client.request(11, pull_fields(offset=2100, **plain))
    client.feed(request)
    broker.step()
    assert request.opaque not in client.answers
    ((seconds, end),) = holds
    assert 0 < seconds <= 0.004
    end()
    assert numbers(client.answers[request.opaque]) == [2100]
    end()  # twice does nothing
    assert len(broker.core.polls) == 0
    consumed = client.call(11, pull_fields(offset=2100, **plain | {"commitOffset": 500}))
    assert numbers(consumed) == [2100], "it has consumed, and is not held"
    assert len(holds) == 1


def test_a_held_pull_of_a_connection_that_breaks_is_forgotten(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    holds = hold_pulls(broker)
    fill(client, 2200, tags="A" + "B" * 99)
    plain = {"sysFlag": 0x5, "commitOffset": 0, "subscription": "A"}
    client.call(11, pull_fields(**plain))
    client.feed(client.request(11, pull_fields(offset=2100, **plain)))
    ((_, end),) = holds
    client.disconnect()
    end()
    assert client.answers == {}
    assert len(broker.core.polls) == 0


@pytest.mark.parametrize("takes_pieces", [False, True])
def test_a_large_answer_leaves_in_pieces(
    client: SteppedClient, monkeypatch: pytest.MonkeyPatch, takes_pieces: bool
) -> None:
    fill(client, 100, body=bytes(1000))
    many = pull_fields(maxMsgNums=10_000, sluiceBulk="true", maxMsgBytes=8 << 20)
    joined = client.call(11, many)
    monkeypatch.setattr(pull, "UNJOINED_BYTES_MIN", 1)
    written: list[int] = []
    if takes_pieces:

        def writelines(pieces: list[bytes | memoryview]) -> None:
            written.extend(map(len, pieces))
            client.write(b"".join(pieces))

        monkeypatch.setattr(client, "writelines", writelines, raising=False)
    apart = client.call(11, many)
    assert (apart.body, apart.fields) == (joined.body, joined.fields)
    assert (sum(written) > len(apart.body)) is takes_pieces


def test_many_bulk_pulls_at_once_get_small_answers_after_the_budget(client: SteppedClient) -> None:
    broker = SteppedBroker(
        config=BrokerConfig(write_buffer_bytes_max=65_536, bulk_pull_bytes_max=200_000),
        store_config=dataclasses.replace(SMALL, commit_log_file_bytes=16 << 20),
    )
    broker.core.topics.put(TopicConfig("T", 1, 1))
    client = broker.connect()
    fill(client, 300, body=bytes(1000))
    fields = pull_fields(maxMsgNums=10_000, sluiceBulk="true", maxMsgBytes=8 << 20)
    pulls = [client.request(11, fields) for _ in range(4)]
    client.feed(*pulls)
    sizes = [len(client.answers[pull.opaque].body) for pull in pulls]
    assert sizes[0] > 190_000
    assert all(0 < size <= 65_536 for size in sizes[1:])
    broker.step()
    assert len(client.call(11, fields).body) > 190_000


def test_the_offset_in_a_pull_is_committed_when_it_says_so(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.call(11, pull_fields(commitOffset=7))
    assert broker.core.offsets.committed("G", "T", 0) == -1
    client.call(11, pull_fields(commitOffset=7, sysFlag=0x5))
    assert broker.core.offsets.committed("G", "T", 0) == 7


# ------------------------------------------------------------------------------------- checks


def test_checks_come_in_the_order_of_the_real_broker(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """Each fault is repaired in turn; the next one then shows."""
    broker.change(broker_permission=2, auto_create_group=False)
    broker.core.topics.put(TopicConfig("X", 1, 1, perm=2))
    broker.core.groups.forbidden = {"G": {"X": 4}}
    fields = pull_fields("nosuch", queueId=9, sysFlag=0)

    def ask() -> tuple[int, str | None]:
        answer = client.call(11, fields)
        assert answer.fields is not None
        return answer.code, answer.fields.get("forbiddenType")

    assert ask() == (NO_PERMISSION, "1")
    broker.change(broker_permission=6)
    assert ask() == (NO_GROUP, None)
    broker.core.groups.put(GroupConfig("G", consume_enable=False))
    assert ask() == (NO_PERMISSION, "2")
    broker.core.groups.put(GroupConfig("G", consume_broadcast_enable=False))
    assert ask() == (NO_TOPIC, None)
    fields["topic"] = "X"
    assert ask() == (NO_PERMISSION, "3")
    broker.core.topics.put(TopicConfig("X", 1, 1, perm=6))
    assert ask() == (NO_PERMISSION, "5")
    broker.core.groups.forbidden = {}
    assert ask() == (INVALID, None)
    fields["queueId"] = 0
    assert ask() == (NO_SUBSCRIPTION, None)
    beat(client, "*", message_model="BROADCASTING")
    assert ask() == (NO_PERMISSION, "4")
    beat(client, "*", version=2)
    assert ask() == (NO_SUBSCRIPTION, None)
    fields |= {"topic": "T", "subVersion": 3}
    assert ask() == (NOT_LATEST, None)
    fields["subVersion"] = 2
    assert ask()[0] == NOT_FOUND


@pytest.mark.parametrize(
    "name", ["consumerGroup", "topic", "queueId", "queueOffset", "maxMsgNums", "sysFlag"]
)
def test_a_missing_field_is_named(client: SteppedClient, name: str) -> None:
    fields = pull_fields()
    del fields[name]
    answer = client.call(11, fields)
    assert (answer.code, answer.remark) == (1, f"the custom field <{name}> is null")


def test_a_field_that_is_no_number_is_named(client: SteppedClient) -> None:
    answer = client.call(11, pull_fields(queueOffset="many"))
    assert answer.code == 1
    assert "queueOffset" in (answer.remark or "")


# ------------------------------------------------------------------------------------ filters


def test_tags_in_the_request(client: SteppedClient) -> None:
    fill(client, 9, tags="ABC")
    assert numbers(client.call(11, pull_fields(subscription="A || C"))) == [0, 2, 3, 5, 6, 8]
    nothing = client.call(11, pull_fields(subscription="Z"))
    assert (nothing.code, offsets(nothing)[0]) == (RETRY, 9)


def test_sql92_in_the_request(client: SteppedClient) -> None:
    fill(client, 9, tags="ABC")
    fields = pull_fields(expressionType="SQL92", subscription="n >= 7 OR TAGS = 'B'")
    assert numbers(client.call(11, fields)) == [1, 4, 7, 8]


def test_a_bad_expression_in_the_request_is_23_with_the_reason(client: SteppedClient) -> None:
    answer = client.call(11, pull_fields(expressionType="SQL92", subscription="a >> 5"))
    assert answer.code == PARSE_FAILED
    assert (answer.remark or "").startswith("parse the consumer's subscription failed")


def test_sql92_can_be_switched_off(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.change(enable_property_filter=False)
    answer = client.call(11, pull_fields(expressionType="SQL92", subscription="a > 5"))
    assert answer.code == 1
    assert "enablePropertyFilter=true" in (answer.remark or "")
    beat(client, "a > 5", SQL92)
    assert client.call(11, pull_fields(sysFlag=0)).code == 1


def test_tags_of_the_group(client: SteppedClient) -> None:
    fill(client, 6, tags="AB")
    beat(client, "A")
    assert numbers(client.call(11, pull_fields(sysFlag=0))) == [0, 2, 4]


def test_sql92_of_the_group_and_its_mistakes(client: SteppedClient) -> None:
    fill(client, 6)
    beat(client, "n BETWEEN 2 AND 3", SQL92)
    assert numbers(client.call(11, pull_fields(sysFlag=0))) == [2, 3]
    beat(client, "n >> 2", SQL92, version=2)
    answer = client.call(11, pull_fields(sysFlag=0, subVersion=2))
    assert answer.code == NO_FILTER
    beat(client, "n = 5", SQL92, version=3)
    assert numbers(client.call(11, pull_fields(sysFlag=0))) == [5]


def test_filtered_messages_are_counted(broker: SteppedBroker, client: SteppedClient) -> None:
    fill(client, 6, tags="AB")
    client.call(11, pull_fields(subscription="A"))
    delivered = broker.core.pull.deliveries["T", "G"]
    assert (delivered.messages_out, delivered.filtered_count) == (3, 3)


# ------------------------------------------------------------------------------------ waiting


def park(client: SteppedClient, **changes: object) -> int:
    request = client.request(11, pull_fields(**{"sysFlag": WAITS} | changes))  # type: ignore[arg-type]
    client.feed(request)
    return request.opaque


def test_a_waiting_pull_is_answered_in_the_turn_that_brings_its_message(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    opaque = park(client)
    assert opaque not in client.answers
    producer = broker.connect()
    producer.feed(producer.request(310, send_fields(properties="n\x010\x02UNIQ_KEY\x01A\x02")))
    assert opaque not in client.answers
    broker.step()
    assert numbers(client.answers[opaque]) == [0]


def test_producer_and_consumer_on_one_connection_get_one_write(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    opaque = park(client)
    send = client.request(310, send_fields(), b"x")
    client.feed(send)
    before = client.writes
    broker.step()
    assert {opaque, send.opaque} <= set(client.answers)
    assert client.writes == before + 1


def test_a_producer_has_its_answer_before_a_crowd_looks(broker: SteppedBroker) -> None:
    consumers = [broker.connect() for _ in range(20)]
    for consumer in consumers:
        park(consumer)
    producer = broker.connect()
    order: list[object] = []
    for one in (producer, *consumers):
        one.peer.set_transport(Noting(one, order))
    producer.feed(producer.request(310, send_fields(), b"x"))
    broker.step()
    assert order[0] is producer
    assert set(order) == {producer, *consumers}


class Noting:
    """Notes who is written to."""

    def __init__(self, client: SteppedClient, order: list[object]) -> None:
        self._client, self._order = client, order

    def write(self, data: bytes, /) -> None:
        self._order.append(self._client)

    def close(self) -> None:
        self._client.close()


def test_a_waiting_pull_is_not_woken_by_what_its_filter_does_not_want(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    opaque = park(client, subscription="B")
    producer = broker.connect()
    fill(producer, 3, tags="A")
    assert opaque not in client.answers
    assert len(broker.core.polls) == 1
    fill(producer, 1, tags="B")
    answer = client.answers[opaque]
    assert (numbers(answer), offsets(answer)[0]) == ([0], 4)
    assert len(broker.core.polls) == 0


def test_a_waiting_pull_asks_again_when_its_group_has_another_expression(
    client: SteppedClient,
) -> None:
    beat(client, "A", version=1)
    grouped = pull_fields(sysFlag=0x2, subVersion=1, offset=0)
    waiting = client.request(11, grouped)
    client.feed(waiting)
    fill(client, 1, tags="B")
    assert waiting.opaque not in client.answers
    beat(client, "B", version=2)
    fill(client, 2, tags="AB")
    answer = client.answers[waiting.opaque]
    assert (answer.code, answer.remark, offsets(answer)) == (RETRY, "NO_MATCHED_MESSAGE", (1, 0, 2))
    again = client.call(11, grouped | {"subVersion": "2", "queueOffset": "1"})
    assert [m.tag for m in decode_records(again.body)] == ["B"]


def test_a_pull_that_waited_in_vain_gets_19_and_one_that_skipped_messages_moves_on(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    plain, filtered = park(client, queueId=1), park(client, subscription="B")
    fill(broker.connect(), 3, tags="A")
    broker.advance(14.9)
    assert client.answers == {}
    broker.advance(0.2)
    assert client.answers[plain].code == NOT_FOUND
    answer = client.answers[filtered]
    assert (answer.code, offsets(answer)[0]) == (RETRY, 3)


def test_when_long_polling_is_off_a_pull_waits_a_second(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(long_polling_enable=False)
    opaque = park(client)
    broker.advance(1.1)
    assert client.answers[opaque].code == NOT_FOUND


def test_only_so_many_pulls_may_wait() -> None:
    broker = SteppedBroker(config=BrokerConfig(parked_pulls_max=2))
    broker.core.topics.put(TopicConfig("T", 1, 1))
    client = broker.connect()
    parked = [park(client) for _ in range(2)]
    answer = client.call(11, pull_fields(sysFlag=WAITS))
    assert answer.code == NOT_FOUND
    assert not set(parked) & set(client.answers)


def test_pulls_of_a_broken_connection_are_forgotten(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    park(client)
    park(client, queueId=1)
    client.disconnect()
    assert len(broker.core.polls) == 0
    fill(broker.connect(), 1)
    broker.advance(20)
    assert client.answers == {}


def test_a_pull_behind_the_end_does_not_wait(client: SteppedClient) -> None:
    fill(client, 1)
    assert client.call(11, pull_fields(offset=5, sysFlag=WAITS)).code == MOVED


def test_a_pull_that_does_not_want_to_wait_does_not(client: SteppedClient) -> None:
    assert client.call(11, pull_fields(sysFlag=0x4)).code == NOT_FOUND


@pytest.mark.parametrize(
    ("name", "sys_flag"),
    [("commitOffset", 0x5), ("suspendTimeoutMillis", 0x6), ("commitOffset", 0x7)],
)
def test_a_field_that_this_pull_needs_is_named(
    client: SteppedClient, name: str, sys_flag: int
) -> None:
    fields = pull_fields(sysFlag=sys_flag)
    del fields[name]
    answer = client.call(11, fields)
    assert (answer.code, answer.remark) == (1, f"the custom field <{name}> is null")


def test_who_is_slow_is_sent_to_a_slave_where_slaves_serve_readers(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    def suggested() -> str:
        return (client.call(11, pull_fields(sysFlag=0x4)).fields or {})["suggestWhichBrokerId"]

    fill(client, 2)
    assert suggested() == "0"
    broker.change(slave_read=True)
    assert suggested() == "0", "it is near"
    broker.core.store.reader._memory_bytes = 1
    assert suggested() == "1"
    broker.change(slave_read=False)
    assert suggested() == "0"


def asked_of_a_slave(broker: SteppedBroker, *, has_master: bool, **changes: object) -> None:
    """The broker is one that serves readers; its log is the shorter one."""
    broker.change(slave_read=True, **changes)
    broker.core.settings.is_slave = True
    broker.core.pull.has_master = lambda: has_master


def answered(client: SteppedClient, offset: int, sys_flag: int = 0x4) -> tuple[int, int, int]:
    """Code, next offset, and who is suggested."""
    answer = client.call(11, pull_fields(queueOffset=offset, sysFlag=sys_flag))
    fields = answer.fields or {}
    return answer.code, int(fields["nextBeginOffset"]), int(fields["suggestWhichBrokerId"])


def test_a_slave_sends_who_is_not_behind_back_to_the_master(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    asked_of_a_slave(broker, has_master=True)
    assert answered(client, 0) == (0, 2, 0)
    for offset in (2, 9):
        assert answered(client, offset, 0x6) == (20, offset, 0), "at once, and where it is"
    broker.core.store.reader._memory_bytes = 1
    assert answered(client, 0) == (0, 2, 1), "it is behind"
    assert answered(client, 2, 0x6) == (20, 2, 0)


def test_who_waits_at_a_slave_is_sent_back_when_its_master_is_there_again(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    asked_of_a_slave(broker, has_master=False)
    command = client.request(11, pull_fields(queueOffset=9, sysFlag=0x6))
    client.feed(command)
    broker.step()
    assert command.opaque not in client.answers
    asked_of_a_slave(broker, has_master=True)
    broker.core.polls.wake("T", 0)
    broker.core.group_commit.flush()
    answer = client.answers[command.opaque]
    assert (answer.code, (answer.fields or {})["nextBeginOffset"]) == (20, "9")


def test_a_slave_without_a_master_lets_readers_wait_where_they_are(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 2)
    asked_of_a_slave(broker, has_master=False)
    assert answered(client, 2) == (19, 2, 0)
    assert answered(client, 9) == (19, 9, 0), "the master may have more"
    broker.change(offset_check_in_slave=True)
    assert answered(client, 9) == (21, 2, 0)


def test_with_a_consensus_a_slave_is_never_asked_at_once_again(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """Routes that are older than a switch name it as the master."""
    fill(client, 2)
    asked_of_a_slave(broker, has_master=True)
    broker.core.settings.is_failover = True
    assert answered(client, 2) == (19, 2, 0)
    assert answered(client, 9) == (19, 9, 0)


@pytest.mark.parametrize("name", ["subscription", "expressionType", "requestSource", "bname"])
def test_an_empty_field_of_a_pull_is_as_good_as_none(
    name: str, broker: SteppedBroker, client: SteppedClient
) -> None:
    client.call(310, send_fields(), b"x")
    fields = {key: value for key, value in pull_fields().items() if key != name}
    absent, empty = client.call(11, fields), client.call(11, fields | {name: ""})
    assert (absent.code, bytes(absent.body)) == (empty.code, bytes(empty.body))
    assert empty.code == 0
