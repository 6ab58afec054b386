"""Integers that no field holds, in every integer field of every request: the broker answers or
refuses, nothing fails in a way that was not meant, and afterwards an orderly stop saves every
document, and each of them loads again."""

import json
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from fuzz import corpus
from fuzz.corpus import Template
from simulation.stepped import START_MS, ManualClock, SteppedBroker, SteppedClient, send_fields
from sluicemq.broker.table import TABLE
from sluicemq.config import BrokerConfig
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.wire.declare import _READ_INT32, _READ_INT64, _TABLES
from sluicemq.wire.frames import Command, encode

pytestmark = pytest.mark.slow

TRAFFIC: Final = Path(__file__).parents[2] / "golden" / "traffic"
EXAMPLES: Final = int(os.environ.get("SLUICEMQ_EXAMPLES", "3"))
EDGES: Final = tuple(
    sign * (1 << bits) + more
    for bits in (15, 31, 32, 63, 64)
    for sign in (1, -1)
    for more in (-1, 0, 1)
)
WILD: Final = (*EDGES, 10**20, -(10**20), 10**40, 0, -1)
PLAUSIBLE: Final = {
    "topic": "T", "consumerGroup": "G", "producerGroup": "P", "group": "G", "groupName": "G",
    "defaultTopic": "TBW102", "clientID": "c", "clientId": "c", "key": "K",
    "brokerName": "broker-a", "bname": "broker-a",
    "srcGroup": "G", "destGroup": "H", "msgId": "AB12",
    "msgQueueId": "0",
    "properties": "UNIQ_KEY\x01AB12\x02", "extraInfo": "0 1700000000000 60000 0 0 broker-a 0 0",
    "isForce": "true", "statsName": "TOPIC_PUT_NUMS", "statsKey": "T",
    "method": "getTopicStatsInfo",
    "query": "q", "step": "commit", "topics": "T", "accessKey": "account1", "name": "T",
    "startOffsetInfo": "", "lang": "JAVA",
}  # fmt: skip
"""Texts of headers, by the field's name on the wire."""
QUEUE: Final = {"topic": "T", "brokerName": "broker-a", "queueId": 0}
LOCKS: Final = {"clientId": "c", "consumerGroup": "G", "mqSet": [QUEUE]}
SUBSCRIPTION: Final = {
    "topic": "T", "subString": "a > 1", "expressionType": "SQL92", "subVersion": 1,
    "codeSet": [65], "tagsSet": ["A"],
}  # fmt: skip
CONSUMER: Final = {
    "groupName": "G2", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [SUBSCRIPTION],
}  # fmt: skip
TOPIC: Final = {
    "topicName": "B", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "topicSysFlag": 0,
    "topicFilterType": "SINGLE_TAG",
}  # fmt: skip
GROUP: Final = {
    "groupName": "G3", "consumeEnable": True, "retryQueueNums": 1, "retryMaxTimes": 16,
    "brokerId": 0, "whichBrokerWhenConsumeSlowly": 1, "groupSysFlag": 0,
    "consumeTimeoutMinute": 15,
}  # fmt: skip
BODIES: Final[dict[int, Any]] = {
    18: {"topicConfigList": [TOPIC]},
    34: {
        "clientID": "c2",
        "heartbeatFingerprint": 0,
        "consumerDataSet": [CONSUMER],
        "producerDataSet": [],
    },
    41: LOCKS,
    42: LOCKS,
    200: GROUP,
    225: {"groupConfigList": [GROUP]},
    401: {"topic": "T", "consumerGroup": "G", "mode": "POP", "popShareQueueNum": 1},
    900201: {"ranges": [{"queue": 0, "first": 0, "count": 1}]},
}
"""What bodies look like, of requests that have one."""


def templates() -> Iterator[Template]:
    """One or more requests for each code of the table."""
    for code, row in TABLE.items():
        fields: dict[str, str] = {}
        for _, wire, read, _, _ in _TABLES[row.header] if row.header is not None else ():
            is_number = read in (_READ_INT32, _READ_INT64)
            fields[wire] = "0" if is_number else PLAUSIBLE.get(wire, "x")
        body = json.dumps(BODIES[code]).encode() if code in BODIES else b""
        yield Template(int(code), fields, body)
    if TRAFFIC.exists():
        yield from corpus.load(TRAFFIC)


def integers_of(template: Template) -> list[str]:
    """The names of the header fields that are integers, by their declaration or their value."""
    row = TABLE.get(template.code)  # type: ignore[call-overload]
    declared = _TABLES[row.header] if row is not None and row.header is not None else ()
    named = {wire for _, wire, read, _, _ in declared if read in (_READ_INT32, _READ_INT64)}
    return [
        name for name, value in template.fields.items()
        if name in named or value.lstrip("-").isdigit()
    ]  # fmt: skip


def numbers_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all integers of a JSON value."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers_in(item, (*at, key))
    elif isinstance(value, int) and not isinstance(value, bool):
        yield at


def changed(value: Any, path: tuple[Any, ...], number: object) -> Any:
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = number
    return copy


def variants(template: Template, dice: random.Random) -> Iterator[tuple[dict[str, str], bytes]]:
    """The request as it is, and with each of its integers wild in turn."""
    yield template.fields, template.body
    for name in integers_of(template):
        for number in dice.choices(WILD, k=EXAMPLES):
            yield template.fields | {name: str(number)}, template.body
    try:
        body = json.loads(template.body) if template.body else None
    except ValueError:
        return
    for path in numbers_in(body):
        for number in dice.choices(WILD, k=EXAMPLES):
            yield template.fields, json.dumps(changed(body, path, number)).encode()


def made() -> SteppedBroker:
    broker = SteppedBroker(config=BrokerConfig(broker_name="broker-a", metrics_enable=False))
    for topic in ("T", "bystander"):
        broker.core.topics.put(TopicConfig(topic, 4, 4))
    for group in ("G", "bystander"):
        broker.core.groups.put(GroupConfig(group))
    return broker


def feed(broker: SteppedBroker, client: SteppedClient, request: Command) -> None:
    data = encode(request)
    used, answers = broker.dispatcher.handle_frames(data, client.peer)
    assert used == len(data)
    client._received(answers)
    broker.settle()


def saves_all_and_loads(broker: SteppedBroker) -> SteppedBroker:
    """Stop as a server does, and start again."""
    for document in broker.core.documents:
        document.changed = True
        document.save()
    broker.close()
    clock = ManualClock(max(broker.clock.now_ms(), START_MS))
    again = SteppedBroker(
        files=broker.files, clock=clock, store_config=broker.settings.store,
        config=broker.settings.broker,
    )  # fmt: skip
    assert again.core.offsets.committed("bystander", "bystander", 0) == 1
    return again


SHARDS: Final = 4


@pytest.mark.parametrize("shard", range(SHARDS))
def test_no_integer_fails_and_all_is_saved(shard: int, caplog: pytest.LogCaptureFixture) -> None:
    dice = random.Random(shard)
    caplog.set_level(logging.WARNING)
    broker = made()
    client = broker.connect()
    other = broker.connect()
    assert other.call(310, send_fields("bystander"), b"x").code == 0
    place = {"consumerGroup": "bystander", "topic": "bystander", "queueId": 0, "commitOffset": 1}
    assert other.call(15, place).code == 0
    count = 0
    for number, template in enumerate(templates()):
        if number % SHARDS != shard:
            continue
        for fields, body in variants(template, dice):
            client = broker.connect() if client.is_closed else client
            request = client.request(template.code, fields, body)
            caplog.clear()
            feed(broker, client, request)
            count += 1
            if count % 10 == 0:
                broker.run(0.2, 0.1)
            bugs = [one for one in caplog.records if one.exc_info]
            assert not bugs, (template.code, fields, body, bugs[0].getMessage())
            assert not broker.core.supervisor.failures, (template.code, fields, body)
    assert count > 300
    caplog.clear()
    again = saves_all_and_loads(broker)
    again.run(1.0, 0.5)
    assert not again.core.supervisor.failures
    assert not [one for one in caplog.records if one.exc_info]
