"""The SQL92 expressions of groups: their life, and their file."""

import json

import pytest

from simulation.stepped import START_MS, SteppedBroker, SteppedClient
from sluicemq.broker.consume.filters import bloom_shape, murmur3_64
from sluicemq.config import BrokerConfig
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.tables import ConsumerFilter

PATH = "/store/config/consumerFilter.json"
DAY_S = 24 * 3600


def heartbeat(client: SteppedClient, group: str = "G", /, **topics: tuple[str, int] | None) -> None:
    """SQL92 expressions with their versions, by topic; None: all messages."""
    wanted = [
        {
            "topic": topic,
            "subString": what[0] if what else "*",
            "expressionType": "SQL92" if what else "TAG",
            "subVersion": what[1] if what else 1,
        }
        for topic, what in topics.items()
    ]
    consumer = {
        "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": wanted,
        "unitMode": False,
    }  # fmt: skip
    body = {"clientID": f"{group}@1", "consumerDataSet": [consumer], "producerDataSet": []}
    client.call(34, {}, json.dumps(body).encode())


def kept(broker: SteppedBroker, group: str = "G", topic: str = "T") -> ConsumerFilter | None:
    return broker.core.filters.table.get(group, {}).get(topic)


def saved(broker: SteppedBroker) -> str:
    broker.core.filters.remove_expired()
    broker.core.filters.document.save()
    return broker.files.content(PATH).decode()


def restarted(broker: SteppedBroker, config: BrokerConfig | None = None) -> SteppedBroker:
    saved(broker)
    broker.store.close()
    return SteppedBroker(files=broker.files, clock=broker.clock, config=config)


def test_an_expression_is_kept_as_rocketmq_writes_it(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat(client, "GroupA", TopicA=("a > 5", 1_700_000_000_001), Other=None)
    assert saved(broker) == (
        '{\n\t"filterDataByTopic":{\n\t\t"TopicA":{\n\t\t\t"groupFilterData":{\n\t\t\t\t"GroupA":{'
        '\n\t\t\t\t\t"bloomFilterData":{\n\t\t\t\t\t\t"bitNum":112,'
        '\n\t\t\t\t\t\t"bitPos":[29,107,11]\n\t\t\t\t\t},'
        f'\n\t\t\t\t\t"bornTime":{START_MS},\n\t\t\t\t\t"clientVersion":1700000000001,'
        '\n\t\t\t\t\t"consumerGroup":"GroupA",\n\t\t\t\t\t"dead":false,\n\t\t\t\t\t"deadTime":0,'
        '\n\t\t\t\t\t"expression":"a > 5",\n\t\t\t\t\t"expressionType":"SQL92",'
        '\n\t\t\t\t\t"topic":"TopicA"\n\t\t\t\t}\n\t\t\t},\n\t\t\t"topic":"TopicA"\n\t\t}\n\t}\n}'
    )


def test_a_group_that_goes_leaves_its_expression_dead_and_revives_it(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat(client, T=("a = 1", 5))
    broker.advance(10)
    client.disconnect()
    found = kept(broker)
    assert found is not None
    assert found.is_dead
    assert found.dead_ms == START_MS + 10_000
    heartbeat(broker.connect(), T=("a = 1", 5))
    found = kept(broker)
    assert found is not None
    assert not found.is_dead
    assert found.born_ms == START_MS, "it is the same filter"


def test_a_topic_that_a_heartbeat_lacks_is_dead(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat(client, T=("a = 1", 5), U=("b = 1", 5))
    broker.advance(1)
    heartbeat(client, T=("a = 1", 5))
    first, second = kept(broker), kept(broker, topic="U")
    assert first is not None
    assert second is not None
    assert (first.is_dead, second.is_dead) == (False, True)


@pytest.mark.parametrize(
    ("expression", "version", "found"),
    [
        ("a = 2", 4, "a = 1"),
        ("a = 2", 5, "a = 1"),
        ("a = 2", 6, "a = 2"),
        ("a = ", 6, None),
        ("a = ", 5, "a = 1"),
    ],
    ids=["older", "as old", "newer", "newer and broken", "as old and broken"],
)
def test_the_newest_version_of_an_expression_counts(
    broker: SteppedBroker, client: SteppedClient, expression: str, version: int, found: str | None
) -> None:
    heartbeat(client, T=("a = 1", 5))
    broker.advance(1)
    heartbeat(client, T=(expression, version))
    item = kept(broker)
    assert (item.expression if item else None) == found
    if item is not None:
        assert (item.born_ms > START_MS) == (found == "a = 2")


def test_an_expression_that_does_not_compile_is_not_kept(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat(client, T=("a =", 5), U=None)
    assert broker.core.filters.table == {}
    assert not broker.core.filters.document.changed


def test_expressions_live_on_over_a_restart_and_are_dead_until_their_group_is_back(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat(client, T=("a = 1", 5))
    broker.advance(100)
    again = restarted(broker)
    found = kept(again)
    assert found is not None
    assert found.dead_ms == again.clock.now_ms() - 30_000
    assert found.is_dead
    heartbeat(again.connect(), T=("a = 1", 6))
    found = kept(again)
    assert found is not None
    assert (found.is_dead, found.version) == (False, 6)


def test_a_filter_younger_than_half_a_minute_is_dead_since_it_was_made(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat(client, T=("a = 1", 5))
    broker.advance(1)
    found = kept(restarted(broker))
    assert found is not None
    assert found.dead_ms == found.born_ms == START_MS
    assert found.is_dead


def test_what_is_dead_for_a_day_is_forgotten(broker: SteppedBroker, client: SteppedClient) -> None:
    heartbeat(client, T=("a = 1", 5))
    client.disconnect()
    broker.advance(DAY_S - 1)
    assert '"a = 1"' in saved(broker)
    broker.advance(1)
    assert saved(broker) == '{\n\t"filterDataByTopic":{}\n}'


def test_filters_made_with_another_bloom_filter_are_dropped(
    broker: SteppedBroker, client: SteppedClient, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat(client, T=("a = 1", 5))
    other = BrokerConfig(broker_name="broker-a", metrics_enable=False, filter_groups_expected=64)
    assert restarted(broker, other).core.filters.table == {}
    assert "expectConsumerNumUseFilter" in caplog.text


def test_a_broken_file_is_read_from_its_bak(broker: SteppedBroker, client: SteppedClient) -> None:
    heartbeat(client, T=("a = 1", 5))
    files = CrashableFiles()
    files.put(f"{PATH}.bak", saved(broker).encode())
    files.put(PATH, b'{"filterDataByTopic":[]}')
    assert kept(SteppedBroker(files=files)) is not None


def test_the_shape_of_the_bitmap_is_rocketmqs() -> None:
    assert bloom_shape(32, 20) == (112, 3)
    assert bloom_shape(32, 1) == (312, 7)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("hello", 0xCBD8A7B341BD9B02),
        ("The quick brown fox jumps over the lazy dog", 0xE34BBC7BBC071B6C),
    ],
)
def test_murmur_hashes_are_the_published_ones(text: str, code: int) -> None:
    assert murmur3_64(text.encode()) == code


def test_columns_are_made_of_a_topic_from_a_heartbeat_with_sql92_on(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat(client, T=None)
    assert not broker.store.columns.has_work
    heartbeat(client, T=("a > 1", 2))
    assert broker.store.columns.has_work
    broker = restarted(broker)
    assert not broker.store.columns.has_work  # its consumers may not come back
    heartbeat(broker.connect(), T=("a > 1", 2))
    assert broker.store.columns.has_work
