"""A store directory goes to and fro between our broker and the real one, 5.3 and 4.9, after orderly
stops and after kill -9, and nothing of it is lost, doubled or changed on the way.

The journeys (peer/journeys.py) run side by side, since most of their time is waiting for brokers to
start and stop. Here is what has to hold at each border: what the next broker says right after its
start is what the one before said at its end, message by message with all fields, as the real client
decodes them; and what a send was answered is where the message lies.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from peer.drivers import DriverFailedError, Event
from peer.journeys import (
    FOREIGN,
    FOREIGN_COUNT,
    GROUP,
    LONG,
    MANY,
    MANY_QUEUES,
    ODD,
    ODD_QUEUES,
    QUEUES,
    TOPIC,
    Journey,
    Stage,
    travel,
)
from peer.stores import KILL, NORMAL
from peer.toolchain import HERE, java_classes

from conftest import missing_tool_is_a_reason
from thorough import ALL

log = logging.getLogger("sluicemq.test")
TWICE = [
    ("sluice", NORMAL), ("java", NORMAL), ("sluice", KILL), ("java", KILL), ("sluice", NORMAL),
    ("java", KILL),
]  # fmt: skip
# Each journey: release, plan, settings of both kinds of broker.
CHECKED = {
    "enabledAppendPropCRC": "true",
    "forceVerifyPropCRC": "true",
    "enableConsumeQueueExt": "true",
}
JOURNEYS: dict[str, tuple[str, list[tuple[str, Any]], dict[str, str]]] = {
    "5.3": ("5.3.3", TWICE, {}),
    "4.9": ("4.9.7", TWICE, {}),
    "5.3-restored": (
        "5.3.3",
        [("saved", KILL), ("java", NORMAL), ("sluice", NORMAL), ("java", KILL)],
        {},
    ),
    "5.3-checksums": (
        "5.3.3",
        [("sluice", KILL), ("java", KILL), ("sluice", NORMAL), ("java", KILL)],
        CHECKED,
    ),
}
if not ALL:
    del JOURNEYS["5.3-checksums"], JOURNEYS["5.3"]
BORDERS = [
    pytest.param(name, number, id=f"{name}-{number}-{plan[number - 1][0]}-to-{plan[number][0]}")
    for name, (_, plan, _) in JOURNEYS.items()
    for number in range(1, len(plan))
]
STAGES = [
    pytest.param(name, number, id=f"{name}-{number}-{plan[number][0]}")
    for name, (_, plan, _) in JOURNEYS.items()
    for number in range(len(plan))
]
ODD_MESSAGES = {TOPIC: 0, MANY: 0, ODD: 40 * 10, LONG: 40}


AT_ONCE = 2
"""Journeys at a time: each has a Java broker and a Java client, whose timeouts are 3 s."""
TRIES = 3
"""A journey begins again, in another directory, when a driver fails. All of its tests would fail
otherwise, and a test that runs again would find the same journey."""


@pytest.fixture(scope="module")
def journeys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Journey]]]:
    """Return all journeys by name; AT_ONCE of them are under way at a time."""
    with missing_tool_is_a_reason():
        for release in {release for release, _, _ in JOURNEYS.values()}:
            java_classes(f"server-{release}", [HERE / "java" / "Auditor.java"])
    base = tmp_path_factory.mktemp("exchange")
    with ThreadPoolExecutor(AT_ONCE) as executor:
        yield {
            name: executor.submit(_travel, base, name, release, plan, settings)
            for name, (release, plan, settings) in JOURNEYS.items()
        }


def _travel(
    base: Path, name: str, release: str, plan: list[tuple[str, Any]], settings: dict[str, str]
) -> Journey:
    for number in range(1, TRIES):
        try:
            return travel(base / f"{name}-{number}", release, plan, **settings)
        except DriverFailedError as error:
            log.warning("journey %s begins again: %s", name, error)
    return travel(base / f"{name}-{TRIES}", release, plan, **settings)


@pytest.fixture
def journey(journeys: dict[str, Future[Journey]], name: str) -> Journey:
    return journeys[name].result()


@pytest.fixture
def stage(journey: Journey, number: int) -> Stage:
    return journey.stages[number]


@pytest.fixture
def former(journey: Journey, number: int) -> Stage:
    return journey.stages[number - 1]


@pytest.mark.parametrize(("name", "number"), BORDERS)
def test_every_message_is_what_it_was_before(stage: Stage, former: Stage) -> None:
    """Topic, queue, queue offset, place, size, ids, hosts, times, flags, CRC, body, properties."""
    found, expected = stage.first.messages, former.last.messages
    assert found.keys() == expected.keys()
    changed = [(expected[key], found[key]) for key in found if found[key] != expected[key]]
    assert not changed
    assert stage.first.queues == former.last.queues


@pytest.mark.parametrize(("name", "number"), STAGES)
def test_all_that_was_ever_sent_is_there_and_nothing_else(
    journey: Journey, stage: Stage, number: int
) -> None:
    sent = journey.sent_before(number) + stage.sent
    by_place = {(event["topic"], event["queue"], event["offset"]): event for event in sent}
    assert len(by_place) == len(sent)
    messages = stage.last.messages
    assert by_place.keys() == {key for key in messages if key[0] in (TOPIC, MANY)}
    for key, event in by_place.items():
        message = messages[key]
        properties = message["properties"]
        assert message["body"] == event["body"]
        assert message["offset_id"] == event["offset_id"]
        assert properties["name"] == event["name"]
        assert properties["用户"] == event["user"]
        assert properties["KEYS"] == event["keys"]
        assert properties.get("TAGS") == event["tag"]
        if not event["batch"]:  # Java stores the batch's id in each of its messages
            assert message["id"] == event["id"] == properties["UNIQ_KEY"]


@pytest.mark.parametrize(("name", "number"), STAGES)
def test_queues_have_no_gap_and_their_limits_are_those_of_their_messages(stage: Stage) -> None:
    counts = {TOPIC: QUEUES, MANY: MANY_QUEUES, ODD: ODD_QUEUES, LONG: 1}
    queues = stage.last.queues
    topics = {topic for topic, _ in queues}
    assert queues.keys() == {(topic, queue) for topic in topics for queue in range(counts[topic])}
    for (topic, queue), event in queues.items():
        messages = [m for key, m in stage.last.messages.items() if key[:2] == (topic, queue)]
        offsets = [message["offset"] for message in messages]
        assert offsets == list(range(event["low"], event["high"]))
        assert event["low"] == 0
        assert event["earliest"] == min(message["stored_ms"] for message in messages)
        assert [m["stored_ms"] for m in messages] == sorted(m["stored_ms"] for m in messages)


@pytest.mark.parametrize(("name", "number"), STAGES)
def test_records_of_every_kind_stay(stage: Stage) -> None:
    """IPv6 hosts, compressed, retried, of transactions, without properties, V2: oddities.py."""
    odd = [message for key, message in stage.last.messages.items() if key[0] in (ODD, LONG)]
    topics = {message["topic"] for message in odd}
    assert len(odd) == sum(ODD_MESSAGES[topic] for topic in topics)
    bodies = {message["body"] for message in odd}
    assert "half" not in bodies, "a prepared message stands in no queue"
    assert {message["reconsumed"] for message in odd} == {0, 3}
    assert {message["prepared"] for message in odd} == {0, 17}
    assert {message["sys_flag"] & 0x30 for message in odd} == {0, 0x10, 0x20, 0x30}
    packed = [message["size"] for message in odd if message["body"].endswith(" 10800")]
    assert (len(packed), max(packed) < 500) == (40, True), "stored compressed, read whole"
    assert {message["born"] for message in odd} == {"127.0.0.1 10911", "0:0:0:0:0:0:0:1 10912"}
    assert {len(message["offset_id"]) for message in odd} == {32, 56}


@pytest.mark.parametrize(("name", "number"), BORDERS)
def test_messages_are_found_by_key_and_by_id(
    journey: Journey, stage: Stage, former: Stage, number: int
) -> None:
    places = {}
    for event in journey.sent_before(number):
        places[event["keys"].split()[0]] = event["offset_id"]
        places[event["id"]] = event["offset_id"]
    assert stage.found == {key: places.get(key, "") for key in stage.found}
    assert len(stage.found) > 15
    assert stage.found["nosuch"] == ""
    by_id = {event["offset_id"]: event for event in former.last.messages.values()}
    assert stage.viewed
    for name, event in stage.viewed.items():
        assert same_message(event, by_id[name])


def same_message(one: Event, other: Event) -> bool:
    return {**one, "event": ""} == {**other, "event": ""}


@pytest.mark.parametrize(("name", "number"), BORDERS)
def test_topics_groups_and_consumer_offsets_stay(stage: Stage, former: Stage, number: int) -> None:
    assert stage.first.topics.items() >= former.last.topics.items()
    assert stage.first.groups == former.last.groups
    assert stage.first.offsets == former.last.offsets
    group = stage.first.groups[GROUP]
    assert (group["retries"], group["retry_queues"], group["broadcast"]) == (7, 2, False)
    offsets = stage.first.offsets.items()
    consumed = {queue: e["consumed"] for (topic, queue), e in offsets if topic == TOPIC}
    added = number - 1
    assert consumed == {q: 3 * added + q + 1 if q < QUEUES // 2 else 0 for q in range(QUEUES)}


@pytest.mark.parametrize(("name", "number"), STAGES)
def test_files_that_only_java_knows_are_kept_as_found(stage: Stage) -> None:
    """Timer, compaction, queue extensions, filters, whatever a release may bring."""
    assert stage.changed == []


@pytest.mark.parametrize("name", [name for name in JOURNEYS if name != "4.9"])
def test_topics_that_only_java_can_have_are_the_same_whenever_it_is_back(journey: Journey) -> None:
    """Of compaction, of batch queues: ours keeps their records, attributes and files."""
    first, *later = [stage.foreign for stage in journey.stages if stage.kind == "java"]
    counts = Counter(event["topic"] for event in first if event["event"] == "message")
    assert counts == dict.fromkeys(FOREIGN, FOREIGN_COUNT)
    assert later
    for events in later:
        assert events == first


@pytest.mark.parametrize(("name", "number"), STAGES)
def test_stopped_store_is_clean_and_our_reader_finds_the_same(stage: Stage) -> None:
    assert stage.verified == ""
    told = {(*key, message["offset_id"]) for key, message in stage.last.messages.items()}
    found = {entry for entry in stage.offline if entry[0] in (TOPIC, MANY, ODD, LONG)}
    if stage.kind == "sluice" and stage.stop == KILL:  # queue files are written once a second
        assert found <= told
    else:
        assert found == told


@pytest.mark.parametrize("name", [name for name in JOURNEYS if name != "5.3-checksums"])
@pytest.mark.parametrize("number", [1, 3])
def test_mqadmin_shows_what_was_stored(journey: Journey, number: int) -> None:
    """The real tools on the real broker, over a store that ours wrote last."""
    event = journey.stages[number - 1].sent[0]
    by_id = journey.printed[f"{number} queryMsgById"]
    assert re.search(rf"Topic:\s+{TOPIC}", by_id)
    assert re.search(rf"Queue Offset:\s+{event['offset']}\b", by_id)
    assert event["id"] in by_id
    first = journey.stages[0].sent[0]
    assert first["id"] in journey.printed[f"{number} queryMsgByKey"]
    rows = [line.split() for line in journey.printed[f"{number} consumerProgress"].splitlines()]
    consumed = {int(row[2]): int(row[4]) for row in rows if row and row[0] == TOPIC}
    assert consumed[3] == 3 * (number - 1) + 4
