"""Explain, the filter lab and exact lag of our client against the real broker and against ours: the
same answers as far as RocketMQ's requests tell, and where they do not, that is said."""

import asyncio
from collections.abc import Callable

import pytest
from peer.clusters import Cluster
from peer.names import own

from sluicemq import Sluice
from sluicemq.client.admin.diagnose.findings import Code, Fate
from sluicemq.model.topic import MessageQueue
from waiting import limit

KINDS = ["sluicemq", "rocketmq"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
async def test_explain_and_the_filter_lab_work_on_both_brokers(
    kind: str, cluster: Callable[[str], Cluster]
) -> None:
    is_ours = kind == "sluicemq"
    topic = group = own(f"explained-{kind}")
    async with Sluice(cluster(kind).name_server) as mq:
        await mq.admin.create_topic(topic, queues=1)
        ids = []
        for price in ("7", "31", "30.5"):
            sent = await mq.send(topic, b"x", properties={"price": price})
            ids.append(sent.message_id)
        (trial,) = await mq.admin.try_filter(topic, "price > 30")
        assert (trial.rows, trial.report["matched"], trial.report["errors"]) == (3, 1, 1)
        assert trial.is_read_here is not is_ours
        _, (unknown,) = await mq.admin.explain_message(ids[0], group="nobody", topic=topic)
        assert unknown.cause is not None
        assert unknown.cause.code is Code.NO_SUCH_GROUP
        async with mq.subscribe(topic, group=group, where="price > 30") as messages:
            async with asyncio.timeout(limit(30)):
                got = await messages.receive()
            assert got.message_id == ids[1]
            told = {}
            for message_id in ids:
                _, (found,) = await mq.admin.explain_message(message_id, group=group, topic=topic)
                told[message_id] = (found.fate, found.cause.code if found.cause else None)
            assert told[ids[0]] == (Fate.FILTERED, Code.FILTER_FALSE)
            assert told[ids[2]] == (Fate.FILTERED, Code.FILTER_ERROR)
            assert told[ids[1]] == (Fate.WAITING, Code.NOT_ACKNOWLEDGING)
            (lag,) = [item for item in await mq.admin.lag(group) if item.queue.topic == topic]
            assert lag.matching == (1 if is_ours else None)
            await got.ack()
        broker = next(iter(await mq.admin.masters()))
        await mq.admin.commit_offset(group, MessageQueue(topic, broker, 0), 3)
        _, (past,) = await mq.admin.explain_message(ids[1], group=group, topic=topic)
        assert (past.fate, past.cause.code if past.cause else None) == (
            Fate.CONSUMED, Code.OFFSET_PAST,
        )  # fmt: skip
        codes = {finding.code for finding in (await mq.admin.explain_group(group)).findings}
        assert Code.NO_MEMBER in codes
