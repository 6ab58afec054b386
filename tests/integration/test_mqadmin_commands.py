"""Tests of `sluice mqadmin` against a cluster, one test for each family of commands."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.model.message import StoredMessage
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from waiting import limit

TOPIC = "T"
GROUP = "G"
MESSAGES = 6


class Tool:
    """mqadmin and a cluster with topic T, which has two queues with six messages."""

    def __init__(self, mq: EmbeddedSluice, broker: str) -> None:
        self.mq = mq
        self.broker = broker

    async def __call__(self, line: str, code: int = 0) -> str:
        """Run a command line and return its standard output and standard error.

        The command runs in another thread, because the cluster runs on the event loop of this one.
        """
        environment = {"NAMESRV_ADDR": self.mq.servers.name_server_address}
        words = ["mqadmin", *line.split()]
        async with asyncio.timeout(limit(30)):
            done = await asyncio.to_thread(CliRunner().invoke, main, words, env=environment)
        assert done.exit_code == code, done.output
        return done.stdout + done.stderr

    async def rows(self, line: str) -> list[list[str]]:
        """Return the words of each line of the output that is not a heading."""
        lines = (await self(line)).splitlines()
        return [words for one in lines if (words := one.split()) and not one.startswith("#")]


@pytest.fixture
async def tool() -> AsyncIterator[Tool]:
    async with embedded(tcp=True) as mq:
        await mq.admin.create_topic(TOPIC, queues=2)
        for index in range(MESSAGES):
            await mq.send(TOPIC, f"body {index}", tag=f"tag{index % 2}", keys=f"key{index}")
        (broker,) = (await mq.admin.masters()).values()
        yield Tool(mq, broker)


@contextlib.asynccontextmanager
async def member(tool: Tool) -> AsyncIterator[None]:
    """Keep a member of G online that has consumed everything."""
    left, is_done = set(range(MESSAGES)), asyncio.Event()

    async def handle(message: StoredMessage) -> None:
        left.discard(int(message.body.split()[1]))
        if not left:
            is_done.set()

    consumer = tool.mq.consumer(GROUP, handle)
    consumer.subscribe(TOPIC)
    await consumer.start()
    try:
        async with asyncio.timeout(limit(30)):
            await is_done.wait()
        yield
    finally:
        await consumer.close()


async def test_topics_are_made_changed_shown_and_deleted(tool: Tool, tmp_path: Path) -> None:
    made = await tool(f"updateTopic -b {tool.broker} -t Ta -r 3 -w 2 -a +message.type=FIFO")
    assert made.splitlines() == [
        f"create topic to {tool.broker} success.",
        "TopicConfig [topicName=Ta, readQueueNums=3, writeQueueNums=2, perm=RW-, topicFilterType="
        "SINGLE_TAG, topicSysFlag=0, order=false, attributes={+message.type=FIFO}]",
    ]
    assert "Ta" in (await tool("topicList")).split()
    assert ["DefaultCluster", "Ta"] in await tool.rows("topicList -c")
    changed = await tool("updateTopicPerm -c DefaultCluster -t Ta -p 4")
    assert changed == f"update topic perm from 6 to 4 in {tool.broker} success.\n"
    again = f"updateTopicPerm -b {tool.broker} -t Ta -p 4"
    assert await tool(again) == "new perm equals to the old one!\n"
    assert "is not master" in await tool("updateTopicPerm -b 127.0.0.1:1 -t Ta -p 4")
    route = json.loads((await tool("topicRoute -t Ta")).replace("0:", '"0":'))
    assert route["queueDatas"][0] | {"perm": 4, "readQueueNums": 3} == route["queueDatas"][0]
    assert (await tool.rows("topicRoute -t Ta -l"))[-1] == ["Total:", "1", "3", "2"]
    assert await tool("topicClusterList -t Ta") == "DefaultCluster\n"
    assert json.loads(await tool("allocateMQ -t T -i a,b"))["result"]["b"][0]["queueId"] == 1
    path = tmp_path / "topics.json"
    path.write_text('[{"topicName":"Tl","readQueueNums":1,"writeQueueNums":1,"perm":6}]')
    assert "submit batch" in await tool(f"updateTopicList -b {tool.broker} -f {path}")
    assert "does not exists" in await tool(f"updateTopicList -b {tool.broker} -f /no/such")
    assert [row[1:4] for row in (await tool.rows("topicStatus -t T"))[:2]] == [
        ["0", "0", "3"], ["1", "0", "3"],
    ]  # fmt: skip
    await tool("deleteTopic -c DefaultCluster -t Ta")
    assert "CODE: 17  DESC: No topic route info" in await tool("topicRoute -t Ta")


async def test_the_order_of_a_topic_is_a_value_of_the_name_servers(tool: Tool) -> None:
    made = await tool(f"updateTopic -b {tool.broker} -t To -w 4 -o true")
    assert "set broker orderConf. isOrder=true, orderConf=[broker-a:4]" in made
    assert "orderConf=[broker-a:4]" in await tool("updateOrderConf -t To -m get")
    await tool("updateOrderConf -t To -m put -v broker-a:2")
    assert "orderConf=[broker-a:2]" in await tool("updateOrderConf -t To -m get")
    await tool("updateOrderConf -t To -m delete")
    assert "CODE: 22" in await tool("updateOrderConf -t To -m get")
    await tool("updateKvConfig -s N -k a -v b")
    assert await tool("deleteKvConfig -s N -k a") == "delete kv config from namespace success.\n"
    assert "set cluster orderConf" in await tool("updateTopic -c DefaultCluster -t To -o true")


async def test_a_flag_that_chooses_nothing_is_refused(tool: Tool) -> None:
    assert await tool("topicStatus -t T -c DefaultCluster") == await tool("topicStatus -t T")
    assert await tool("topicStatus -t T -c other", 1) == (
        "topicStatus -c <arg> is not supported: the command covers all clusters (DefaultCluster), "
        "and lite topics do not exist. Remove the flag.\n"
    )
    assert await tool("queryMsgByOffset -t T -b broker-a -i 0 -o 0 -r P", 1) == (
        "queryMsgByOffset -r <arg> is not supported: it has no effect in SluiceMQ. "
        "Remove the flag.\n"
    )


async def test_groups_are_made_shown_and_deleted(tool: Tool, tmp_path: Path) -> None:
    made = await tool("updateSubGroup -c DefaultCluster -g Gc -r 3 -o true")
    assert f"create subscription group to {tool.broker} success.\n" in made
    assert "retryMaxTimes=3" in made
    config = await tool("getConsumerConfig -g Gc")
    assert "=" * 29 + "DefaultCluster:broker-a" + "=" * 29 in config
    assert "retryMaxTimes                           =  3\n" in config
    assert "consumeMessageOrderly                   =  true\n" in config
    path = tmp_path / "groups.json"
    path.write_text('[{"groupName":"Gl","retryMaxTimes":5},{"groupName":"Gm"}]')
    await tool(f"updateSubGroupList -c DefaultCluster -f {path}")
    assert "=  5\n" in await tool("getConsumerConfig -g Gl")
    mode = await tool("setConsumeMode -c DefaultCluster -t T -g Gc -m POP -q 2")
    assert mode.endswith("topic[T] group[Gc] consume mode[POP] popShareQueueNum[2]")
    deleted = await tool(f"deleteSubGroup -b {tool.broker} -g Gc -r true")
    assert deleted == f"delete subscription group [Gc] from broker [{tool.broker}] success.\n"
    assert "in cluster [DefaultCluster] success" in (
        await tool("deleteSubGroup -c DefaultCluster -g Gl")
    )


async def test_who_consumes_and_how_far_they_are(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what members say is written where one stands
    async with member(tool):
        listed = await tool(f"consumerStatus -g {GROUP}")
        assert listed.startswith("#Index     #ClientId ")
        assert listed.endswith("Rebalance OK\n")
        (written,) = tmp_path.glob("*/*")
        assert written.read_text().startswith("#Consumer Properties#")
        connections = await tool(f"consumerConnection -g {GROUP}")
        assert "Below is subscription:" in connections
        assert "ConsumeType: CONSUME_PASSIVELY\nMessageModel: CLUSTERING\n" in connections
        client_id = next(
            row[0] for row in await tool.rows(f"consumerConnection -g {GROUP}") if "@" in row[0]
        )
        status = await tool(f"consumerStatus -g {GROUP} -i {client_id}")
        assert "#Consumer Properties#" in status
        assert "#Consumer RT&TPS#" in status
        progress = await tool.rows(f"consumerProgress -g {GROUP} -s true")
        of_topic = [row for row in progress if row[0] == TOPIC]
        assert [row[2:4] for row in of_topic] == [["0", "3"], ["1", "3"]]
        assert await tool.rows("consumerProgress")
        tracked = await tool("queryMsgByOffset -t T -b broker-a -i 0 -o 0")
        assert f"MessageTrack [consumerGroup={GROUP}, trackType=" in tracked
    assert "CODE: 17" in await tool("consumerProgress -g Gnowhere")
    assert "CODE: 1  DESC: the producer group[P]" in await tool("producerConnection -g P -t T")


async def test_groups_are_sent_elsewhere(tool: Tool) -> None:
    await tool(f"updateSubGroup -b {tool.broker} -g Go")
    begin = await tool("resetOffsetByTime -g Go -t T -s 0")
    assert "force[true], timestamp(string)[0], timestamp(long)[0]\n#brokerName" in begin
    rows = await tool.rows("skipAccumulatedMessage -g Go -t T")
    assert rows == [["broker-a", "0", "3"], ["broker-a", "1", "3"]]
    one = await tool(f"resetOffsetByTime -g Go -t T -s 0 -b {tool.broker} -q 1 -o 2")
    assert one.endswith("reset consumer offset to 2\n")
    queue = (await tool.mq.admin.queues(TOPIC))[1]
    assert await tool.mq.admin.committed_offset("Go", queue) == 2
    assert "CODE: 17" in await tool("resetOffsetByTime -g Go -t Tnowhere -s -1")


async def test_messages_are_found_and_shown(tool: Tool) -> None:
    (row,) = await tool.rows("queryMsgByKey -t T -k key3")
    shown = await tool(f"queryMsgByUniqueKey -t T -i {row[0]}")
    assert "Keys:                [key3]\n" in shown
    assert "WARN: No Consumer" in shown
    by_id = await tool(f"queryMsgById -t T -i {row[0]} -f UTF-8")
    assert "Message Body:        body 3\n" in by_id
    place = dict(line.split(":", 1) for line in by_id.splitlines() if ":" in line)
    offset_id = place["OffsetID"].strip()
    assert f"OffsetID:            {offset_id}" in await tool(f"queryMsgById -t T -i {offset_id}")
    assert Path(place["Message Body Path"].strip()).read_text() == "body 3"
    at = await tool(f"queryMsgByOffset -t T -b broker-a -i {row[1]} -o {row[2]}")
    assert "MIN_OFFSET=0" in at
    units = await tool("queryCq -t T -q 0 -i 0 -c 2")
    assert units.count("ConsumeQueueData{physicOffset=") == 2
    assert "eval=true" in units
    assert "CODE: 208" in await tool("queryMsgByKey -t T -k none")
    assert "also index tags" in await tool("queryMsgByKey -t T -k tag1 -p T")


async def test_queues_are_read_through(tool: Tool) -> None:
    printed = await tool("printMsg -t T -s tag1 -d false")
    assert printed.count("MSGID: ") == MESSAGES // 2
    assert "NOT PRINT BODY" in printed
    counted = await tool("printMsgByQueue -t T -a broker-a -i 0 -f true")
    assert [line.split()[0] for line in counted.splitlines()] == ["Tag:"] * len(
        counted.splitlines()
    )
    assert (await tool("consumeMessage -t T -b broker-a -i 0 -c 2")).count("MSGID: ") == 2
    assert (await tool("consumeMessage -t T")).count("print msg finished") == 2
    assert "Please set the brokerName" in await tool("consumeMessage -t T -i 0")


async def test_messages_are_sent(tool: Tool) -> None:
    assert (await tool.rows("sendMessage -t T -p hello -k k -c tag"))[0][2] == "SEND_OK"
    assert (await tool.rows("sendMessage -t T -p hello -b broker-a -i 1"))[0][1] == "1"
    assert "Broker name must be set" in await tool("sendMessage -t T -p x -i 1")
    assert (await tool("checkMsgSendRT -t T -a 2")).splitlines()[-1].startswith("Avg RT: ")
    assert (await tool("sendMsgStatus -b broker-a -c 2")).count("sendStatus=SEND_OK") == 2


async def test_brokers_and_name_servers_are_shown_and_set(tool: Tool) -> None:
    (row,) = await tool.rows("clusterList")
    assert row[:4] == ["DefaultCluster", "broker-a", "0", tool.broker]
    assert (await tool.rows("clusterList -m"))[0][4] == str(MESSAGES)
    assert f"msgPutTotalTodayNow             : {MESSAGES}" in (
        await tool(f"brokerStatus -b {tool.broker}")
    )
    assert tool.broker in await tool("brokerStatus -c DefaultCluster")
    set_one = f"updateBrokerConfig -b {tool.broker} -k fileReservedTime -v 48"
    assert await tool(set_one) == f"update broker config success, {tool.broker}\n"
    settings = await tool("getBrokerConfig -c DefaultCluster")
    assert f"============Master: {tool.broker}============\n" in settings
    assert "fileReservedTime" + " " * 34 + "=  48\n" in settings
    assert "CODE: 1" in await tool(f"updateBrokerConfig -b {tool.broker} -k listenPort -v soon")
    assert "enableTopicList" in await tool("getNamesrvConfig")
    said = await tool("updateNamesrvConfig -k enableTopicList -v true")
    assert said == "update name server config success!\nenableTopicList : true\n"
    wiped = await tool("wipeWritePerm -b broker-a")
    assert "wipe write perm of broker[broker-a] in name server[" in wiped
    assert " OK, " in await tool("addWritePerm -b broker-a")
    for command in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        assert await tool(f"{command} -b {tool.broker}") == "success"
        assert await tool(f"{command} -c DefaultCluster") == "success"
    assert f"#MasterAddr\t{tool.broker}\n" in await tool(f"haStatus -b {tool.broker}")
    (row,) = await tool.rows("statsAll -t T")
    assert row[0] == TOPIC


async def test_a_cluster_is_exported(tool: Tool, tmp_path: Path) -> None:
    await tool("updateSubGroup -c DefaultCluster -g Ge")
    said = await tool(f"exportMetadata -c DefaultCluster -f {tmp_path}/out")
    assert said == f"export {tmp_path}/out/metadata.json success\n"
    found = json.loads((tmp_path / "out/metadata.json").read_text())
    assert list(found["topicConfigTable"]) == [TOPIC]
    assert "Ge" in found["subscriptionGroupTable"]
    await tool(f"exportMetadata -b {tool.broker} -g -f {tmp_path}")
    assert "dataVersion" in json.loads((tmp_path / "subscriptionGroup.json").read_text())
    await tool(f"exportConfigs -c DefaultCluster -f {tmp_path}")
    configs = json.loads((tmp_path / "configs.json").read_text())
    assert configs["clusterScale"]["masterBrokerSize"] == 1
    assert configs["brokerConfigs"]["broker-a"]["brokerId"] == "0"
    await tool(f"exportMetrics -c DefaultCluster -f {tmp_path}")
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["evaluateReport"]["broker-a"]["runtimeQuota"]["topicSize"] == 1


RULES = """
accounts:
- {accessKey: operator, secretKey: operator-secret, admin: true}
"""


async def test_access_rules_are_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(RULES)
    monkeypatch.setenv("SLUICE_ACCESS_KEY", "operator")
    monkeypatch.setenv("SLUICE_SECRET_KEY", "operator-secret")
    settings = {"aclEnable": "true", "plainAclFile": str(path)}
    async with embedded(
        tcp=True, store=tmp_path / "store", settings=settings,
        credentials=("operator", "operator-secret"),
    ) as mq:  # fmt: skip
        (broker,) = (await mq.admin.masters()).values()
        tool = Tool(mq, broker)
        made = await tool(f"updateAclConfig -b {broker} -a reader9 -s reader-secret -t T=SUB")
        assert made.startswith(f"create or update plain access config to {broker} success.\n")
        assert "accessKey='reader9'" in made
        assert "topicPerms=[T=SUB]" in made
        shown = await tool("getAclConfig -c DefaultCluster")
        assert "  accessKey         : reader9\n" in shown
        assert "reader-secret" not in shown
        await tool(f"updateGlobalWhiteAddr -b {broker} -g 10.0.0.9")
        assert "[10.0.0.9]" in await tool(f"getAclConfig -b {broker}")
        assert str(path) in await tool("clusterAclConfigVersion -c DefaultCluster")
        await tool("deleteAclConfig -c DefaultCluster -a reader9")
        assert "reader9" not in await tool(f"getAclConfig -b {broker}")
