"""A change of a topic must not hide queues that hold messages, unless it is told to."""

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock


async def test_fewer_queues_are_refused_while_those_that_go_hold_messages():
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=4)
        for queue_id in (1, 3, 3):
            await mq.send("t", b"x", queue=MessageQueue("t", "broker-a", queue_id))
        for queues in (1, 2, 3):
            with pytest.raises(ConfigurationError) as error:
                await mq.admin.create_topic("t", queues=queues)
            stored, places = (3, "broker-a:1, broker-a:3") if queues == 1 else (2, "broker-a:3")
            assert f"no consumer would read {stored} stored messages of topic t ({places})" in str(
                error.value
            )
            assert "--force" in str(error.value)
            assert len(await mq.admin.queues("t")) == 4, "nothing has changed"
        assert await mq.admin.create_topic("t", queues=3, force=True) == ["broker-a"]
        assert len(await mq.admin.queues("t")) == 3
        await mq.admin.create_topic("t", queues=2)  # queue 2 is empty, queue 3 is hidden already
        await mq.admin.create_topic("t", queues=4)
        found = await mq.admin.offset_max(MessageQueue("t", "broker-a", 3))
        assert found == 2, "hidden messages come back"


async def test_what_hides_no_message_is_allowed():
    async with embedded(clock=VirtualClock()) as mq:
        await mq.admin.create_topic("t", queues=4)
        await mq.send("t", b"x", queue=MessageQueue("t", "broker-a", 0))
        await mq.admin.create_topic("t", queues=4, write_queues=1)  # they are still read
        await mq.admin.create_topic("t", queues=8, perm=4)
        await mq.admin.create_topic("t", queues=1)
        assert len(await mq.admin.queues("t")) == 1
