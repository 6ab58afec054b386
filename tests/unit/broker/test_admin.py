"""What tools ask about the running broker."""

import math
import re

import pytest

from simulation.stepped import START_MS, SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import bodies, tables

CHANGE, CONFIG, RUNTIME, TOPIC_STATS, CONSUME_STATS = 25, 26, 28, 202, 208
CONSUMERS, PRODUCERS, GROUPS_OF_TOPIC = 203, 204, 300
# As the real broker's `mqadmin brokerStatus` printed them (spec/traffic/mqadmin/brokerStatus.txt);
# the two of delay levels and the one that holds a path are left out.
KEYS = re.findall(
    r"\w+",
    """
    EndTransactionQueueSize EndTransactionThreadPoolQueueCapacity ackThreadPoolQueueCapacity
    ackThreadPoolQueueHeadWaitTimeMills ackThreadPoolQueueSize bootTimestamp brokerActive
    brokerVersion brokerVersionDesc commitLogDirCapacity commitLogDiskRatio commitLogMaxOffset
    commitLogMinOffset consumeQueueDiskRatio dispatchBehindBytes dispatchMaxBuffer
    earliestMessageTimeStamp getFoundTps getMessageEntireTimeMax getMissTps getTotalTps
    getTransferredTps litePullThreadPoolQueueCapacity litePullThreadPoolQueueHeadWaitTimeMills
    litePullThreadPoolQueueSize msgGetTotalTodayMorning msgGetTotalTodayNow
    msgGetTotalYesterdayMorning msgPutTotalTodayMorning msgPutTotalTodayNow
    msgPutTotalYesterdayMorning pageCacheLockTimeMills pullThreadPoolQueueCapacity
    pullThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize putLatency99 putLatency999
    putMessageAverageSize putMessageDistributeTime putMessageEntireTimeMax putMessageFailedTimes
    putMessageSizeTotal putMessageTimesTotal putTps queryThreadPoolQueueCapacity
    queryThreadPoolQueueHeadWaitTimeMills queryThreadPoolQueueSize remainHowManyDataToFlush
    remainTransientStoreBufferNumbs runtime sendThreadPoolQueueCapacity
    sendThreadPoolQueueHeadWaitTimeMills sendThreadPoolQueueSize startAcceptSendRequestTimeStamp
    timerCongestNum timerDequeueTps timerEnqueueTps timerOffsetBehind timerReadBehind
    """,
)


def table(client: SteppedClient) -> dict[str, str]:
    return bodies.decode_kv_table(client.call(RUNTIME).body)


def join(client: SteppedClient) -> None:
    subscription = Subscription("T", "A", codes=frozenset([65]), version=3)
    data = bodies.ConsumerData("G", subscriptions=(subscription,))
    beat = bodies.Heartbeat("the client", ("P",), (data,))
    client.call(34, {}, bodies.encode_heartbeat(beat))


def test_every_key_that_tools_read_is_there(client: SteppedClient) -> None:
    assert set(KEYS) - set(table(client)) == set()


def test_the_values_that_cluster_list_parses_parse(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    client.call(310, send_fields(), b"x")
    for _ in range(3):
        broker.clock.advance(1)
        broker.core.run_every_second()
    values = table(client)
    for name in ("putTps", "getTransferredTps", "getTotalTps", "getFoundTps", "getMissTps"):
        parts = [float(part) for part in values[name].split(" ")]
        assert len(parts) == 3
        assert all(math.isfinite(part) for part in parts)
    for name in KEYS:
        if name.endswith(("Size", "Mills", "Behind", "Num", "TimeStamp")) and "Average" not in name:
            int(values[name])
    assert 0 <= float(values["commitLogDiskRatio"]) <= 1
    assert values["brokerActive"] == "true"
    assert values["earliestMessageTimeStamp"] == str(START_MS)


def test_messages_are_counted(broker: SteppedBroker, client: SteppedClient) -> None:
    broker.core.run_every_second()
    for _ in range(5):
        client.call(310, send_fields(), b"x")
    client.call(11, pull_fields())
    client.call(310, send_fields("SCHEDULE_TOPIC_XXXX"), b"x")
    broker.clock.advance(1)
    broker.core.run_every_second()
    values = table(client)
    assert values["putMessageTimesTotal"] == values["msgPutTotalTodayNow"] == "5"
    assert values["msgGetTotalTodayNow"] == "5"
    assert values["putMessageFailedTimes"] == "1"
    assert values["putTps"].split()[0] == "5.0"
    assert int(values["putMessageSizeTotal"]) == broker.store.written_offset
    assert "[<=0ms]:0 [0~10ms]:5 " in values["putMessageDistributeTime"]


def test_yesterdays_messages_are_told_from_todays(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.core.run_every_second()
    client.call(310, send_fields(), b"x")
    for _ in range(2):
        broker.clock.advance(86_400)
        broker.core.run_every_second()
        client.call(310, send_fields(), b"x")
    values = table(client)
    assert [values[f"msgPutTotal{when}"] for when in ("YesterdayMorning", "TodayMorning")] == [
        "1", "2",
    ]  # fmt: skip


def test_topic_statistics(client: SteppedClient) -> None:
    for _ in range(2):
        client.call(310, send_fields(e=1), b"x")
    stats = bodies.decode_topic_stats(client.call(TOPIC_STATS, {"topic": "T"}).body)
    assert len(stats.queues) == 4
    assert stats.queues[MessageQueue("T", "broker-a", 1)] == bodies.QueueStats(0, 2, START_MS)
    assert stats.queues[MessageQueue("T", "broker-a", 0)] == bodies.QueueStats(0, 0, 0)
    assert client.call(TOPIC_STATS, {"topic": "nosuch"}).code == 17


def test_how_far_a_group_is(client: SteppedClient) -> None:
    for _ in range(5):
        client.call(310, send_fields(), b"x")
    client.call(11, pull_fields(offset=0, maxMsgNums=3, commitOffset=2, sysFlag=5))
    for fields in ({}, {"topic": "T"}, {"topicList": "T;other"}):
        body = client.call(CONSUME_STATS, {"consumerGroup": "G"} | fields).body
        stats = bodies.decode_consume_stats(body)
        assert len(stats.queues) == 4
        progress = stats.queues[MessageQueue("T", "broker-a", 0)]
        assert progress == bodies.QueueProgress(5, 2, START_MS, 3)


def test_connections(client: SteppedClient) -> None:
    offline = client.call(CONSUMERS, {"consumerGroup": "G"})
    assert (offline.code, offline.remark) == (206, "the consumer group[G] not online")
    assert client.call(PRODUCERS, {"topic": "T", "producerGroup": "P"}).code == 1
    join(client)
    found = bodies.decode_consumer_connections(client.call(CONSUMERS, {"consumerGroup": "G"}).body)
    here = bodies.Connection("the client", str(client.peer.remote), "JAVA", 479)
    assert found.connections == (here,)
    assert found.subscriptions["T"].expression == "A"
    producers = client.call(PRODUCERS, {"topic": "T", "producerGroup": "P"})
    assert bodies.decode_consumer_connections(producers.body).connections == (here,)


def test_groups_of_a_topic_are_those_online_and_those_with_offsets(client: SteppedClient) -> None:
    join(client)
    client.call(11, pull_fields(consumerGroup="H", commitOffset=1, sysFlag=5))
    groups = bodies.decode_group_list(client.call(GROUPS_OF_TOPIC, {"topic": "T"}).body)
    assert groups == ("G", "H")


# ----------------------------------------------------------------------------- configuration


def config(client: SteppedClient) -> dict[str, str]:
    answer = client.call(CONFIG)
    assert answer.fields is not None
    tables.decode_data_version(answer.fields["version"])
    lines = bytes(answer.body).decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_settings_are_read_and_changed_and_take_effect(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    assert config(client)["traceOn"] == "true"
    assert client.call(CHANGE, None, b'traceOn=false\nregionId=Mars "%d"\n').code == 0
    assert config(client)["traceOn"] == "false"
    answer = client.call(310, send_fields(), b"x")
    assert answer.fields is not None
    assert answer.fields["TRACE_ON"] == "false"
    assert answer.fields["MSG_REGION"] == 'Mars "%d"'


def test_a_change_of_settings_is_kept_in_the_file(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(config_path="/conf/broker.conf")
    broker.files.make_directory("/conf")
    broker.files.put("/conf/broker.conf", b"# mine\nbrokerName=broker-a\ntraceOn=true\n")
    client.call(CHANGE, None, b"traceOn=false\n")
    text = broker.files.content("/conf/broker.conf").decode()
    assert "# mine" in text
    assert "traceOn=false" in text.replace(" ", "")
    assert broker.files.exists("/conf/broker.conf.bak")


def test_the_file_of_changes_is_private_and_keeps_its_rights(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(config_path="/conf/broker.conf")
    broker.files.make_directory("/conf")
    client.call(CHANGE, None, b"traceOn=false\n")
    assert broker.files.access("/conf/broker.conf").mode == 0o600
    client.call(CHANGE, None, b"traceOn=true\n")
    assert broker.files.access("/conf/broker.conf").mode == 0o600


def test_a_request_reads_nothing_of_the_environment(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    answer = client.call(CHANGE, None, b"tls.server.trustCertPath=/x/${PATH}\n")
    assert answer.code == 1
    assert "must not use variables" in (answer.remark or "")
    assert config(client)["tls.server.trustCertPath"] == ""


def test_what_waits_for_the_next_start_is_shown_as_pending_and_not_in_force(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(config_path="/conf/broker.conf")
    root = broker.settings.store.root
    answer = client.call(CHANGE, None, b"storePathRootDir=/other\nbrokerClusterName=c2\n")
    assert answer.code == 0
    assert (answer.remark or "").startswith("in effect at the next start: brokerClusterName")
    shown = config(client)
    assert (shown["storePathRootDir"], shown["sluicePending.storePathRootDir"]) == (root, "/other")
    assert shown["brokerClusterName"] == "DefaultCluster"
    assert shown["sluicePending.brokerClusterName"] == "c2"
    assert broker.settings.store.root == root
    assert broker.settings.broker.cluster_name == "DefaultCluster"
    broker.clean()
    assert b"storePathRootDir=/other" in broker.files.content("/conf/broker.conf")
    client.call(CHANGE, None, f"storePathRootDir={root}\nbrokerClusterName=\n".encode())
    assert not [name for name in config(client) if name.startswith("sluicePending.")]


@pytest.mark.parametrize(
    "text",
    [
        "brokerClusterName=../../etc",
        "tls.server.certPath=/no/such/file.pem",
        "tls.server.need.client.auth=require",
        "aclEnable=true",
        "innerClientAuthenticationCredentials=secret",
    ],
)
def test_a_change_with_which_the_broker_would_not_start_again_is_refused(
    client: SteppedClient, text: str
) -> None:
    before = config(client)
    answer = client.call(CHANGE, None, text.encode())
    assert answer.code == 1
    assert answer.remark
    assert config(client) == before


@pytest.mark.parametrize(
    ("text", "code"),
    [(b"brokerConfigPath=x\n", 16), (b"traceOn=maybe\n", 1), (b"defaultTopicQueueNums=0\n", 1)],
)
def test_a_change_that_cannot_be_is_refused(
    broker: SteppedBroker, client: SteppedClient, text: bytes, code: int
) -> None:
    before = broker.settings.broker
    assert client.call(CHANGE, None, text).code == code
    assert broker.settings.broker == before


def test_unknown_requests_are_answered_not_supported(client: SteppedClient) -> None:
    for code in (9999, 13, 301, 39, 221, 1005):
        answer = client.call(code)
        assert (answer.code, answer.remark) == (3, f" request type {code} not supported")
