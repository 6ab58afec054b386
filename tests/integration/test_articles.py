"""What docs/articles.md says of a broker over remoting and of the files of its store.

The other rows of that page are held by the tests of the pages that they link to.
"""

import itertools
import os

import pytest

from sluicemq import Message
from sluicemq.testing.embedded import embedded
from sluicemq.testing.virtual import VirtualClock

ROOT = "/sluicemq/broker-a"
NOT_WRITTEN = {"compaction", "consumequeue_ext", "batchconsumequeue", "abort.bak"}
TIMER_FILES = {"timerwheel", "timerlog"}


@pytest.fixture
async def mq():
    async with embedded(clock=VirtualClock()) as mq:
        yield mq


async def bodies(mq, topic: str, **options) -> list[bytes]:
    """Read `topic` with a new group until nothing comes for two seconds; return the bodies."""
    async with mq.subscribe(topic, group="reader", **options) as stream:
        got = []
        while messages := await stream.receive_many(100, timeout_s=2):
            got += [message.body for message in messages]
            for message in messages:
                await message.ack()
    return got


def written(mq, place: str = "") -> list[str]:
    """Return the names in the broker's store, or in a directory of it."""
    return mq.servers.files["broker-a"].names(f"{ROOT}/{place}".rstrip("/"))


async def test_over_remoting_a_topic_of_any_type_takes_every_message(mq) -> None:
    for kind in ("NORMAL", "FIFO", "DELAY", "TRANSACTION"):
        await mq.admin.create_topic(kind, queues=1, attributes={"message.type": kind})
        await mq.send(kind, b"plain")
        await mq.send(kind, b"keyed", sharding_key="k")
        await mq.send(kind, b"delayed", delay=1)
        async with mq.transaction(kind, b"prepared"):
            pass
        await mq.clock.advance(seconds=2)
        assert sorted(await bodies(mq, kind)) == [b"delayed", b"keyed", b"plain", b"prepared"]


async def test_a_batch_above_one_mib_is_several_requests_and_a_key_keeps_it_in_one_queue(mq):
    await mq.admin.create_topic("t", queues=4)
    for key in (None, "k"):
        sent = [
            Message("t", b"%02d" % n + os.urandom(300_000), sharding_key=key) for n in range(10)
        ]
        results = await mq.send_batch(sent)
        queues = [result.queue for result in results]
        assert [len(list(run)) for _, run in itertools.groupby(queues)] == (
            [10] if key else [3, 3, 3, 1]
        )
        got = await bodies(mq, "t")
        assert sorted(got) == sorted(message.body for message in sent)
        if key:
            assert got == [message.body for message in sent]


async def test_a_store_has_the_files_of_what_was_used_and_no_others(mq) -> None:
    await mq.send("t", b"x", tag="a", keys=["k"])
    assert await bodies(mq, "t", where="TAGS = 'a'") == [b"x"]
    await mq.clock.advance(minutes=1)
    assert written(mq, "commitlog") == ["0" * 20]
    assert {"abort", "checkpoint", "config", "consumequeue", "index", "lock"} <= set(written(mq))
    assert not TIMER_FILES & set(written(mq))
    await mq.send("t", b"later", delay=30)
    await mq.clock.advance(minutes=1)
    assert set(written(mq)) >= TIMER_FILES
    assert "timercheck" in written(mq, "config")
    await mq.servers.restart_broker()
    assert not NOT_WRITTEN & set(written(mq))
