"""Request 12 as the official clients send it, and its answers."""

import dataclasses
from typing import Any

import pytest

from simulation.stepped import SMALL, START_MS, SteppedBroker, SteppedClient, send_fields
from sluicemq.model.ids import offset_message_id
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command

QUERY, VIEW, SEND = 12, 33, 310
FOREVER = (1 << 63) - 1
NOTHING = "can not find message, maybe time range not correct"


def send(client: SteppedClient, number: int, keys: str = "", topic: str = "T") -> None:
    properties = f"UNIQ_KEY\x01ID{number}\x02" + (f"KEYS\x01{keys}\x02" if keys else "")
    assert client.call(SEND, send_fields(topic, properties), b"%d" % number).code == 0


def query(client: SteppedClient, key: str, **changes: Any) -> Command:
    fields = {
        "topic": "T", "key": key, "maxNum": 10, "beginTimestamp": 0, "endTimestamp": FOREVER,
        "_UNIQUE_KEY_QUERY": "false",
    }  # fmt: skip
    return client.call(QUERY, {**fields, **changes})


def bodies(answer: Command) -> list[bytes]:
    assert answer.code == 0, answer.remark
    return [message.body for message in decode_records(answer.body)]


def test_messages_of_a_key_are_answered_newest_first(client: SteppedClient) -> None:
    for number in range(3):
        send(client, number, "order-1")
    answer = query(client, "order-1")
    assert bodies(answer) == [b"2", b"1", b"0"]
    newest = decode_records(answer.body)[0]
    assert answer.fields == {
        "indexLastUpdateTimestamp": str(newest.store_time_ms),
        "indexLastUpdatePhyoffset": str(newest.physical_offset),
    }
    assert bodies(query(client, "order-1", maxNum=2)) == [b"2", b"1"]


def test_nothing_is_answered_as_the_real_broker_does(client: SteppedClient) -> None:
    send(client, 1, "order-1")
    for answer in (query(client, "nokey"), query(client, "order-1", topic="nowhere")):
        assert (answer.code, answer.remark, bytes(answer.body)) == (22, NOTHING, b"")
        assert answer.fields == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}


@pytest.mark.parametrize("how", [{"_UNIQUE_KEY_QUERY": "true"}, {"indexType": "U"}])
def test_a_unique_key_is_asked_for_by_either_field(
    client: SteppedClient, how: dict[str, str]
) -> None:
    send(client, 1, "ID2")
    send(client, 2, "k")
    assert bodies(query(client, "ID2")) == [b"2", b"1"]
    assert bodies(query(client, "ID2", **how)) == [b"2"]


def test_old_clients_do_not_say_which_kind_they_want(client: SteppedClient) -> None:
    send(client, 1, "k")
    fields = {"topic": "T", "key": "k", "maxNum": 10, "beginTimestamp": 0, "endTimestamp": FOREVER}
    assert bodies(client.call(QUERY, fields)) == [b"1"]
    assert bodies(client.call(QUERY, fields | {"indexType": "K"})) == [b"1"]


def test_numbers_are_limited_by_the_settings() -> None:
    broker = SteppedBroker(
        store_config=dataclasses.replace(SMALL, query_count=2, query_count_max=3)
    )
    client = broker.connect()
    for _ in range(5):
        send(client, 7, "k")
    assert len(bodies(query(client, "k", maxNum=64))) == 3
    assert len(bodies(query(client, "ID7", _UNIQUE_KEY_QUERY="true", maxNum=64))) == 2


def test_a_query_by_tag_says_what_to_do_instead(client: SteppedClient) -> None:
    answer = query(client, "A", indexType="T")
    assert (answer.code, "consume with a filter" in (answer.remark or "")) == (1, True)


def test_a_broker_without_an_index_says_which_setting_it_is() -> None:
    broker = SteppedBroker(store_config=dataclasses.replace(SMALL, index_enable=False))
    answer = query(broker.connect(), "k")
    assert (answer.code, "messageIndexEnable" in (answer.remark or "")) == (1, True)


def test_a_range_of_time_is_kept_to(broker: SteppedBroker, client: SteppedClient) -> None:
    for number in range(3):
        send(client, number, "k")
        broker.clock.advance(0.001)
    one = {"beginTimestamp": START_MS + 1, "endTimestamp": START_MS + 1}
    assert bodies(query(client, "k", **one)) == [b"1"]


def test_a_field_that_is_missing_is_named(client: SteppedClient) -> None:
    answer = client.call(QUERY, {"topic": "T", "key": "k"})
    assert (answer.code, answer.remark) == (1, "the custom field <maxNum> is null")


def test_a_message_found_by_key_is_viewed_by_its_place(client: SteppedClient) -> None:
    send(client, 1, "k")
    (message,) = decode_records(query(client, "k").body)
    viewed = client.call(VIEW, {"offset": message.physical_offset, "topic": "T"})
    assert decode_records(viewed.body) == [message]
    assert len(offset_message_id(bytes(8), message.physical_offset)) == 32
