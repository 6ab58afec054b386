"""The files of `config/` as the real broker wrote them: read, written again to the byte, kept.

The golden stores are Java's. What ours has no use for yet has to stay as it is; what it rewrites
has to be what Java would have written, and must not say less than the file that was read.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from simulation.stepped import ManualClock, SteppedBroker
from sluicemq.config import BrokerConfig
from sluicemq.model.topic import TopicConfig
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire import fastjson, tables
from sluicemq.wire.tables import decode_consumer_filters_file, encode_consumer_filters_file

pytestmark = pytest.mark.slow

STORES = Path(__file__).parent / "store"
ARCHIVES = {"golden1": "golden1", "golden2": "golden2", "golden3": "golden3_trans"}
NAMES = BrokerConfig(broker_name="golden-a", cluster_name="GoldenCluster", metrics_enable=False)
CONFIG = "/store/config"
WRITTEN_MS = 1_795_226_700_000
REWRITTEN = ("topics.json", "subscriptionGroup.json", "consumerOffset.json", "consumerFilter.json")
KEPT = (
    "delayOffset.json", "topicQueueMapping.json", "timercheck", "timermetrics",
    "transactionMetrics", "lmqConsumerOffset.json",
)  # fmt: skip
CODECS = {
    "topics.json": (tables.decode_topic_table_file, tables.encode_topic_table_file),
    "subscriptionGroup.json": (tables.decode_group_table_file, tables.encode_group_table_file),
    "consumerOffset.json": (
        tables.decode_consumer_offsets_file, tables.encode_consumer_offsets_file,
    ),
    "consumerFilter.json": (decode_consumer_filters_file, encode_consumer_filters_file),
    "consumerOrderInfo.json": (tables.decode_order_file, tables.encode_order_file),
}  # fmt: skip


def config_files(name: str) -> dict[str, bytes]:
    """The files of a golden store's config directory."""
    found = {}
    with tarfile.open(STORES / f"{ARCHIVES[name]}.tar.gz") as tar:
        for member in tar.getmembers():
            path = Path(member.name)
            content = tar.extractfile(member) if path.parent.name == "config" else None
            if content is not None:
                found[path.name] = content.read()
    assert len(found) > 10
    return found


@pytest.fixture(params=ARCHIVES)
def golden(request: pytest.FixtureRequest) -> dict[str, bytes]:
    return config_files(request.param)


def files_with(contents: dict[str, bytes]) -> CrashableFiles:
    files = CrashableFiles()
    for name, content in contents.items():
        files.put(f"{CONFIG}/{name}", content)
    return files


def broker_over(files: CrashableFiles, clock: ManualClock | None = None) -> SteppedBroker:
    return SteppedBroker(config=NAMES, files=files, clock=clock)


def save(broker: SteppedBroker) -> None:
    for document in broker.core.documents:
        document.changed = True
        document.save()


# --- to the byte


@pytest.mark.parametrize("name", CODECS)
def test_what_we_read_we_write_to_the_byte(golden: dict[str, bytes], name: str) -> None:
    decode, encode = CODECS[name]
    for edition in (name, f"{name}.bak"):
        if edition in golden:
            text = golden[edition].decode()
            assert encode(decode(text)) == text  # type: ignore[operator]


def test_a_broker_writes_the_tables_it_loaded_to_the_byte(golden: dict[str, bytes]) -> None:
    files = files_with(golden)
    broker = broker_over(files, ManualClock(WRITTEN_MS))
    save(broker)
    for name in (
        "topics.json", "subscriptionGroup.json", "consumerOffset.json", "consumerOrderInfo.json",
    ):  # fmt: skip
        if name in golden:
            assert files.content(f"{CONFIG}/{name}") == golden[name], name
            assert files.content(f"{CONFIG}/{name}.bak") == golden[name]


def test_a_filter_of_the_golden_store_is_dead_since_before_the_start(
    golden: dict[str, bytes],
) -> None:
    born = json.loads(golden["consumerFilter.json"])["filterDataByTopic"]["TopicA"][
        "groupFilterData"
    ]["GroupA"]["bornTime"]
    files, now = files_with(golden), born + 100_000
    broker = broker_over(files, ManualClock(now))
    broker.core.filters.document.save()
    text = files.content(f"{CONFIG}/consumerFilter.json").decode()
    dead = f'"dead":true,\n\t\t\t\t\t"deadTime":{now - 30_000},'
    alive = '"dead":false,\n\t\t\t\t\t"deadTime":0,'
    assert text == golden["consumerFilter.json"].decode().replace(alive, dead)


def test_what_we_do_not_build_yet_is_kept_as_found(golden: dict[str, bytes]) -> None:
    golden["topicQueueMapping.json"] = b'{\n\t"dataVersion":{},\n\t"topicQueueMappingInfoMap":{}\n}'
    files = files_with(golden)
    broker = broker_over(files)
    broker.core.topics.put(TopicConfig("Another"))
    broker.core.offsets.commit("G", "Another", 0, 5)
    save(broker)
    broker.store.close()
    kept = [name for name in golden if name.removesuffix(".bak") in KEPT]
    assert len(kept) > 7
    for name in kept:
        assert files.content(f"{CONFIG}/{name}") == golden[name], name


def test_light_offsets_of_a_broker_that_had_only_those_are_taken_over() -> None:
    golden = config_files("golden2")
    assert "consumerOffset.json" not in golden
    table = fastjson.loads(golden["lmqConsumerOffset.json"])
    table["lmqOffsetTable"] = {"%LMQ%q1@%LMQ%g": 7}
    golden["lmqConsumerOffset.json"] = fastjson.dumps_pretty(table).encode()
    files = files_with(golden)
    broker = broker_over(files)
    assert broker.core.offsets.committed("GroupA", "TopicA", 1) == 2
    assert broker.core.offsets.committed("%LMQ%g", "%LMQ%q1", 0) == 7
    broker.core.offsets.document.save()
    assert b"lmqOffsetTable" not in files.content(f"{CONFIG}/consumerOffset.json")


# --- nothing is lost


def changed(golden: dict[str, bytes], name: str, change: Any) -> dict[str, bytes]:
    table = fastjson.loads(golden[name])
    change(table)
    return {name: fastjson.dumps_pretty(table).encode()}


def test_unknown_fields_of_topics_survive_rewriting_and_changes() -> None:
    def add(table: dict[str, Any]) -> None:
        table["rack"] = {"r": [1, {"x": None, "y": "z"}]}
        table["topicConfigTable"]["TopicA"]["owner"] = {"mail": "a@b"}
        table["topicConfigTable"]["TopicA"]["attributes"] = {"queue.type": "BatchCQ", "a.b": "1"}

    files = files_with(changed(config_files("golden1"), "topics.json", add))
    broker = broker_over(files)
    broker.core.topics.put(
        TopicConfig("TopicA", 8, 8, attributes=broker.core.topics.table["TopicA"].config.attributes)
    )
    save(broker)
    again = fastjson.loads(files.content(f"{CONFIG}/topics.json"))
    topic = again["topicConfigTable"]["TopicA"]
    assert again["rack"] == {"r": [1, {"y": "z"}]}
    assert topic["owner"] == {"mail": "a@b"}
    assert topic["attributes"] == {"queue.type": "BatchCQ", "a.b": "1"}
    assert topic["readQueueNums"] == 8
    assert list(topic) == sorted(topic)
    broker.core.topics.remove("TopicA")
    broker.core.topics.put(TopicConfig("TopicA"))
    save(broker)
    again = fastjson.loads(files.content(f"{CONFIG}/topics.json"))
    assert "owner" not in again["topicConfigTable"]["TopicA"], "it is another topic"


POLICIES: list[dict[str, Any]] = [
    {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 5000]}},
    {
        "exponentialRetryPolicy": {"initial": 5000, "max": 7_200_000, "multiplier": 2},
        "type": "EXPONENTIAL",
    },
    {"type": "OF_A_LATER_RELEASE", "every": {"hour": True}},
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: str(policy["type"]))
def test_retry_policies_and_unknown_fields_of_groups_survive(policy: dict[str, Any]) -> None:
    def add(table: dict[str, Any]) -> None:
        table["subscriptionGroupTable"]["GroupA"] |= {"groupRetryPolicy": policy, "liteMax": 5}
        table["forbiddenTable"] = {"GroupA": {"TopicA": 4}}
        table["later"] = 1

    files = files_with(changed(config_files("golden1"), "subscriptionGroup.json", add))
    broker = broker_over(files)
    answer = broker.connect().call(352, {"group": "GroupA"})
    assert json.loads(bytes(answer.body))["groupRetryPolicy"] == policy
    broker.core.groups.get_or_create("a new one")
    save(broker)
    again = fastjson.loads(files.content(f"{CONFIG}/subscriptionGroup.json"))
    group = again["subscriptionGroupTable"]["GroupA"]
    assert (group["groupRetryPolicy"], group["liteMax"]) == (policy, 5)
    assert (again["forbiddenTable"], again["later"]) == ({"GroupA": {"TopicA": 4}}, 1)


def test_a_retry_policy_that_a_tool_sets_is_kept() -> None:
    broker = broker_over(CrashableFiles())
    body = json.dumps({"groupName": "G", "groupRetryPolicy": POLICIES[1]}).encode()
    broker.connect().call(200, {}, body)
    save(broker)
    text = broker.files.content(f"{CONFIG}/subscriptionGroup.json")
    table = fastjson.loads(text)["subscriptionGroupTable"]
    assert table["G"]["groupRetryPolicy"] == POLICIES[1]
    assert table["SELF_TEST_C_GROUP"]["groupRetryPolicy"] == {"type": "CUSTOMIZED"}


# --- older spellings, strict JSON, .bak

TOPICS_4X = """{
\t"dataVersion":{
\t\t"counter":3,
\t\t"timestamp":1700000000000
\t},
\t"topicConfigTable":{
\t\t"Old":{
\t\t\t"order":true,
\t\t\t"perm":6,
\t\t\t"readQueueNums":3,
\t\t\t"topicFilterType":"MULTI_TAG",
\t\t\t"topicName":"Old",
\t\t\t"topicSysFlag":1,
\t\t\t"writeQueueNums":2
\t\t}
\t}
}"""


def test_files_of_a_4x_broker_are_read() -> None:
    group = {"brokerId": 0, "consumeEnable": False, "groupName": "OldGroup", "retryMaxTimes": 3}
    files = files_with(
        {
            "topics.json": TOPICS_4X.encode(),
            "subscriptionGroup.json": fastjson.dumps_pretty(
                {"dataVersion": {}, "subscriptionGroupTable": {"OldGroup": group}}
            ).encode(),
            "consumerOffset.json": b'{\n\t"offsetTable":{\n\t\t"Old@OldGroup":{2:7,0:5}}}',
        }
    )
    core = broker_over(files).core
    assert core.topics.table["Old"].config == TopicConfig("Old", 3, 2, 6, "MULTI_TAG", 1, True)
    found = core.groups.table["OldGroup"]
    assert (found.consume_enable, found.retry_times_max, found.retry_policy) == (False, 3, None)
    assert core.offsets.committed("OldGroup", "Old", 2) == 7


@pytest.mark.parametrize("name", CODECS)
def test_strict_json_is_read_as_fastjson_is(name: str) -> None:
    decode, _ = CODECS[name]
    text = config_files("golden1")[name].decode()
    strict = json.dumps(fastjson.loads(text), indent=1)
    assert '"0": 1' in strict or name != "consumerOffset.json"
    assert decode(strict) == decode(text)  # type: ignore[operator]


@pytest.mark.parametrize("broken", ["", " \n", "{", '{"topicConfigTable":[]}', "\xff\xfe{}"])
def test_a_broken_table_is_read_from_its_bak(golden: dict[str, bytes], broken: str) -> None:
    wanted = tables.decode_topic_table_file(golden["topics.json"].decode()).topics
    files = files_with(
        {"topics.json": broken.encode("latin-1"), "topics.json.bak": golden["topics.json"]}
    )
    table = broker_over(files).core.topics.configs()
    assert wanted.items() <= table.items()


def test_a_rewritten_table_keeps_the_one_before_as_bak() -> None:
    files = CrashableFiles()
    broker = broker_over(files)
    for number in range(3):
        before = files.content(f"{CONFIG}/topics.json")
        broker.core.topics.put(TopicConfig(f"T{number}"))
        broker.core.topics.document.save()
        assert files.content(f"{CONFIG}/topics.json.bak") == before
    assert not files.exists(f"{CONFIG}/topics.json.tmp")
