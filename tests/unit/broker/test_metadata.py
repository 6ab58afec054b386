"""Topics and groups as tools change and read them, and the files they are kept in."""

import json
import random

import pytest

from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.errors import StoreDamagedError
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire import bodies, tables
from sluicemq.wire.fastjson import loads

CREATE, CREATE_LIST, DELETE, ALL_TOPICS, TOPIC, SYSTEM_TOPICS = 17, 18, 215, 21, 351, 305
CREATE_GROUP, CREATE_GROUPS, DELETE_GROUP, ALL_GROUPS, GROUP = 200, 225, 207, 201, 352
ALL_OFFSETS = 43
NEW = {
    "topic": "New", "defaultTopic": "TBW102", "readQueueNums": 3, "writeQueueNums": 2, "perm": 6,
    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false", "attributes": "",
    "force": "false",
}  # fmt: skip


def test_a_topic_is_created_changed_and_read(broker: SteppedBroker, client: SteppedClient) -> None:
    made = client.call(CREATE, NEW | {"attributes": "+message.type=FIFO"})
    assert (made.code, made.remark) == (0, "not set any response code")
    config = tables.decode_topic_config(client.call(TOPIC, {"topic": "New", "lo": "true"}).body)
    assert config == TopicConfig("New", 3, 2, 6, attributes={"message.type": "FIFO"})
    client.call(CREATE, NEW | {"perm": 4, "attributes": "-message.type,+reserve.time=7"})
    config = tables.decode_topic_config(client.call(TOPIC, {"topic": "New"}).body)
    assert (config.perm, config.attributes) == (4, {"reserve.time": "7"})
    assert client.call(TOPIC, {"topic": "nosuch"}).code == 17


def test_the_same_topic_again_changes_nothing(broker: SteppedBroker, client: SteppedClient) -> None:
    client.call(CREATE, NEW)
    version = broker.core.topics.version
    client.call(CREATE, NEW)
    assert broker.core.topics.version == version
    client.call(CREATE, NEW | {"perm": 4})
    assert broker.core.topics.version.counter == version.counter + 1


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"topic": "bad topic"}, 29, "illegal characters"),
        ({"topic": ""}, 29, "blank"),
        ({"topic": "TBW102"}, 29, "system topic"),
        ({"topic": "DefaultCluster"}, 29, "system topic"),
        ({"topic": "broker-a"}, 29, "system topic"),
        ({"topic": "rmq_sys_wheel_timer"}, 29, "system topic"),
        ({"readQueueNums": -1}, 29, "limit is 65536"),
        ({"writeQueueNums": 1 << 20}, 29, "limit is 65536"),
        ({"topicFilterType": "X"}, 1, "topicFilterType = [X] value invalid"),
        ({"attributes": "message.type=FIFO"}, 1, "write +key=value"),
        ({"attributes": "+message.type=LITE"}, 1, "value is not in set: [UNSPECIFIED, TRANSACTION"),
        ({"attributes": "+message.type=PRIORITY"}, 1, "message.type=PRIORITY"),
        ({"attributes": "+message.type=MIXED"}, 29, "MIXED message type is not supported."),
        ({"attributes": "+message.type=fifo"}, 1, "value is not in set"),
        ({"attributes": "+message.type"}, 1, "delete attribute format is wrong"),
        ({"attributes": "+message.type=FIFO,+message.type=DELAY"}, 1, "key duplication"),
        ({"attributes": "+=x"}, 1, "kv string format wrong"),
        ({"attributes": "+foo=bar"}, 1, "unsupported key: foo. The attributes are"),
        ({"attributes": "+queue.type=BatchCQ"}, 29, "set queue.type=SimpleCQ"),
        ({"attributes": "+queue.type=XX"}, 1, "value is not in set: [SimpleCQ, BatchCQ]"),
        ({"attributes": "+reserve.time=abc"}, 1, 'For input string: "abc"'),
        ({"attributes": "+reserve.time=-5"}, 1, "value is not in range(-1, 9223372036854775807)"),
        ({"attributes": "-message.type"}, 1, "only add attribute is supported"),
        ({"attributes": "+cleanup.policy=COMPACTION"}, 29, "cleanup.policy=DELETE"),
    ],
)
def test_a_topic_that_cannot_be_is_refused(
    broker: SteppedBroker, client: SteppedClient, changes: dict[str, object], code: int, text: str
) -> None:
    before = set(broker.core.topics.table)
    answer = client.call(CREATE, NEW | changes)
    assert answer.code == code
    assert text in (answer.remark or "")
    assert set(broker.core.topics.table) == before


@pytest.mark.parametrize("perm", [-(2**31), -1, 0, 2, 4, 6, 7, 8, 100])
@pytest.mark.parametrize(
    ("read", "write"), [(8, 8), (8, 4), (4, 8), (0, 0), (0, 4), (4, 0), (1, 65_536)]
)
def test_numbers_of_queues_and_permissions_are_taken_as_by_rocketmq(
    broker: SteppedBroker, client: SteppedClient, read: int, write: int, perm: int
) -> None:
    """RocketMQ 5.3.3 and 5.5.0 check neither (seen in their byte code). They keep what they are
    told; a send may name a queue below the larger number, a reader one below the number of queues
    to read, and only readers are asked for the topic's permission."""
    numbers = {"readQueueNums": read, "writeQueueNums": write, "perm": perm}
    assert client.call(CREATE, NEW | numbers).code == 0
    client.call(GROUP, {"group": "G"})
    config = TopicConfig("New", read, write, perm)
    for document in broker.core.documents:
        document.save()
    after = restarted(broker)
    assert after.core.topics.config_of("New") == config
    client = after.connect()
    shown = tables.decode_topic_config(client.call(TOPIC, {"topic": "New", "lo": "true"}).body)
    assert shown == config
    for queue_id in (0, 3, 4, 7, 8):
        is_there = queue_id < max(read, write)
        sent = client.call(310, send_fields("New", e=queue_id), b"x")
        assert sent.code == (0 if is_there else 29), queue_id
        pulled = client.call(11, pull_fields("New", queueId=queue_id))
        code = 16 if not perm & 4 else 0 if queue_id < read else 29
        assert pulled.code == code, queue_id
    chosen = client.call(310, send_fields("New", e=-1), b"x")
    if write:
        assert int((chosen.fields or {})["queueId"]) < write
    else:  # RocketMQ: an arithmetic error
        assert (chosen.code, "queueId[-1]" in (chosen.remark or "")) == (29, True)
    if max(read, write) <= 8:
        stats = bodies.decode_topic_stats(client.call(202, {"topic": "New"}).body)
        assert [queue.queue_id for queue in stats.queues] == list(range(max(read, write)))


def test_a_compaction_topic_that_java_made_can_be_changed(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    attributes = {"cleanup.policy": "COMPACTION"}
    broker.core.topics.put(TopicConfig("New", attributes=attributes))
    client.call(CREATE, NEW | {"perm": 4})
    config = tables.decode_topic_config(client.call(TOPIC, {"topic": "New"}).body)
    assert (config.perm, config.attributes) == (4, attributes)


def test_a_list_of_topics_with_one_of_compaction_is_refused(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    topics = [TopicConfig("One"), TopicConfig("Two", attributes={"+cleanup.policy": "COMPACTION"})]
    entries = [json.loads(tables.encode_topic_config(topic)) for topic in topics]
    answer = client.call(CREATE_LIST, None, json.dumps({"topicConfigList": entries}).encode())
    assert (answer.code, "cleanup.policy" in (answer.remark or "")) == (29, True)
    assert "One" not in broker.core.topics


def test_a_list_of_topics_is_created_as_a_whole(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    def body(*names: str) -> bytes:
        topics = [json.loads(tables.encode_topic_config(TopicConfig(name))) for name in names]
        return json.dumps({"topicConfigList": topics}).encode()

    assert client.call(CREATE_LIST, None, body("One", "bad name")).code == 29
    assert "One" not in broker.core.topics
    assert client.call(CREATE_LIST, None, body("One", "Two")).code == 0
    assert {"One", "Two"} <= set(broker.core.topics.table)


def test_a_deleted_topic_takes_its_queues_and_offsets_along(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.call(310, send_fields(), b"x")
    client.call(11, pull_fields(commitOffset=1, sysFlag=5))
    assert client.call(DELETE, {"topic": "T"}).code == 0
    assert client.call(11, pull_fields()).code == 17
    assert broker.core.offsets.committed("G", "T", 0) == -1
    assert ("T", 0) not in broker.store.queues()
    broker.core.topics.put(TopicConfig("T", 1, 1))
    assert (client.call(310, send_fields(), b"x").fields or {})["queueOffset"] == "0"


def test_sends_of_the_turn_in_which_a_topic_is_deleted_are_answered_by_their_own_commit(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    """The deletion commits too: if the disk is full then, the sends before it must not be told
    that they are stored."""
    sends = [client.request(310, send_fields("BenchmarkTest"), b"x") for _ in range(2)]
    deletion = client.request(DELETE, {"topic": "T"})
    broker.files.fail_next("write", 28, path_part="commitlog")
    client.feed(*sends, deletion)
    broker.step()
    assert [client.answers[send.opaque].code for send in sends] == [14, 14]
    assert client.answers[deletion.opaque].code == 0


@pytest.mark.parametrize("name", ["TBW102", "SCHEDULE_TOPIC_XXXX", ""])
def test_system_topics_are_not_deleted(client: SteppedClient, name: str) -> None:
    assert client.call(DELETE, {"topic": name}).code == 29


def test_all_topics_come_at_once_and_tools_that_page_are_told_the_total(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    answer = client.call(ALL_TOPICS)
    assert answer.fields is None
    table = tables.decode_topic_table(answer.body)
    assert table.topics == broker.core.topics.configs()
    assert table.data_version == broker.core.topics.version
    paged = client.call(ALL_TOPICS, {"topicSeq": 0, "maxTopicNum": 10, "dataVersion": ""})
    assert paged.fields == {"totalTopicNum": str(len(table.topics))}
    groups = client.call(ALL_GROUPS, {"groupSeq": 0, "maxGroupNum": 10})
    assert groups.fields == {"totalGroupNum": str(len(broker.core.groups))}


def test_the_system_topics_that_tools_expect_are_there(client: SteppedClient) -> None:
    names = set(bodies.decode_topic_list(client.call(SYSTEM_TOPICS).body))
    assert names >= {
        "SELF_TEST_TOPIC", "TBW102", "BenchmarkTest", "DefaultCluster", "broker-a",
        "OFFSET_MOVED_EVENT", "SCHEDULE_TOPIC_XXXX", "DefaultCluster_REPLY_TOPIC",
        "rmq_sys_REVIVE_LOG_DefaultCluster", "rmq_sys_SYNC_BROKER_MEMBER_broker-a",
        "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "rmq_sys_wheel_timer",
    }  # fmt: skip
    assert "T" not in names


# ------------------------------------------------------------------------------------- groups


def test_a_group_is_created_read_and_deleted(broker: SteppedBroker, client: SteppedClient) -> None:
    config = GroupConfig("G", retry_times_max=3, consume_message_orderly=True)
    assert client.call(CREATE_GROUP, None, tables.encode_group_config(config)).code == 0
    assert tables.decode_group_config(client.call(GROUP, {"group": "G"}).body) == config
    assert tables.decode_group_table(client.call(ALL_GROUPS).body).groups["G"] == config
    client.call(15, {"topic": "T", "queueId": 0, "consumerGroup": "G", "commitOffset": 4})
    client.call(DELETE_GROUP, {"groupName": "G", "cleanOffset": "false"})
    assert broker.core.offsets.committed("G", "T", 0) == 4
    client.call(DELETE_GROUP, {"groupName": "G", "cleanOffset": "true"})
    assert broker.core.offsets.committed("G", "T", 0) == -1
    assert "G" not in broker.core.groups


def test_an_unknown_group_is_made_when_asked_for_only_where_groups_are_made(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert client.call(GROUP, {"group": "H"}).code == 0
    broker.change(auto_create_group=False)
    assert client.call(GROUP, {"group": "I"}).code == 26


@pytest.mark.parametrize("name", ["", "bad name", "x" * 121])
def test_a_group_needs_a_name(client: SteppedClient, name: str) -> None:
    body = json.dumps({"groupName": name}).encode()
    assert client.call(CREATE_GROUP, None, body).code == 29


def test_a_list_of_groups(broker: SteppedBroker, client: SteppedClient) -> None:
    body = json.dumps({"groupConfigList": [{"groupName": "A"}, {"groupName": "B"}]}).encode()
    assert client.call(CREATE_GROUPS, None, body).code == 0
    assert {"A", "B"} <= set(broker.core.groups.table)


# -------------------------------------------------------------------------------------- files


def restarted(broker: SteppedBroker, files: CrashableFiles | None = None) -> SteppedBroker:
    broker.store.close()
    return SteppedBroker(files=files or broker.files.kill())


def test_tables_survive_a_restart(broker: SteppedBroker, client: SteppedClient) -> None:
    client.call(CREATE, NEW)
    client.call(GROUP, {"group": "G"})
    client.call(11, pull_fields(commitOffset=7, sysFlag=5, queueId=2))
    broker.core.groups.forbidden = {"G": {"T": 4}}
    for document in broker.core.documents:
        document.save()
    after = restarted(broker)
    assert after.core.topics.configs() == broker.core.topics.configs()
    assert after.core.topics.version == broker.core.topics.version
    assert after.core.groups.table == broker.core.groups.table
    assert after.core.groups.forbidden == {"G": {"T": 4}}
    assert after.core.offsets.table == {"T@G": {2: 7}}


def test_a_broken_file_is_replaced_by_the_one_before(broker: SteppedBroker) -> None:
    broker.core.topics.document.save()
    broker.core.topics.put(TopicConfig("Later", 1, 1))
    broker.core.topics.document.save()
    broker.files.put("/store/config/topics.json", b"{broken")
    after = restarted(broker)
    assert "T" in after.core.topics
    assert "Later" not in after.core.topics


def test_two_broken_files_are_an_error_that_names_them(broker: SteppedBroker) -> None:
    for name in ("topics.json", "topics.json.bak"):
        broker.files.put(f"/store/config/{name}", b"{broken")
    with pytest.raises(StoreDamagedError, match=r"topics\.json"):
        restarted(broker)


def test_files_that_fastjson_wrote_are_read() -> None:
    files = CrashableFiles()
    files.make_directory("/store/config")
    files.put(
        "/store/config/consumerOffset.json",
        b'{\n\t"dataVersion":{"counter":3,"stateVersion":0,"timestamp":5},\n'
        b'\t"groupTopicMap":{"G":["T"]},\n\t"offsetTable":{"T@G":{0:5,1:6\n\t\t}\n\t}\n}',
    )
    broker = SteppedBroker(files=files)
    assert broker.core.offsets.table == {"T@G": {0: 5, 1: 6}}
    answer = broker.connect().call(ALL_OFFSETS)
    assert loads(answer.body)["offsetTable"] == {"T@G": {0: 5, 1: 6}}


def test_a_file_survives_a_crash_as_it_was_saved_last(broker: SteppedBroker) -> None:
    for seed in range(20):
        broker.core.topics.put(TopicConfig(f"Topic{seed}", 1, 1))
        broker.core.topics.document.save()
        broker.core.topics.put(TopicConfig(f"Unsaved{seed}", 1, 1))
        after = broker.files.crash(random.Random(seed)).content("/store/config/topics.json")
        assert f'"Topic{seed}"'.encode() in after
        assert f'"Unsaved{seed}"'.encode() not in after


def test_a_file_that_cannot_be_written_stays_changed(broker: SteppedBroker) -> None:
    document = broker.core.topics.document
    document.save()
    assert document.prepare_write() is None
    broker.core.topics.put(TopicConfig("Later", 1, 1))
    broker.files.fail_next("write", 28, path_part="topics.json")
    with pytest.raises(OSError, match="space"):
        document.save()
    document.save()
    assert "Later" in SteppedBroker(files=broker.files.kill()).core.topics


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ("-cleanup.policy", "attempt to delete a nonexistent key: cleanup.policy"),
        ("-foo", "attempt to delete a nonexistent key: foo"),
        ("+foo=1", "unsupported key: foo"),
        ("+queue.type=SimpleCQ", "attempt to update an unchangeable attribute. key: queue.type"),
        ("-message.type=FIFO", "add/alter attribute format is wrong: -message.type"),
        ("+message.type=A=B", "value is not in set"),
    ],
)
def test_a_change_of_attributes_that_rocketmq_refuses_is_refused_with_its_words(
    client: SteppedClient, changes: str, remark: str
) -> None:
    assert client.call(CREATE, NEW | {"attributes": "+message.type=FIFO"}).code == 0
    answer = client.call(CREATE, NEW | {"attributes": changes})
    assert answer.code == 1
    assert (answer.remark or "").startswith(remark)


def test_attributes_that_another_broker_wrote_stay_as_they_are(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    theirs = {"message.type": "LITE", "lite.topic.expiration": "30"}
    broker.core.topics.put(TopicConfig("New", attributes=theirs))
    assert client.call(CREATE, NEW | {"perm": 4}).code == 0
    config = broker.core.topics.table["New"].config
    assert (config.perm, config.attributes) == (4, theirs)


def test_a_group_has_no_attributes_but_ours(client: SteppedClient) -> None:
    for attributes, code in (({"+foo": "1"}, 1), ({"+sluice.contract": "strict"}, 0)):
        body = tables.encode_group_config(GroupConfig("Readers", attributes=attributes))
        assert client.call(200, body=body).code == code
