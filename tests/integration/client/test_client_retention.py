"""Old messages are deleted under a consumer: it is told, and so is whoever asks for its lag."""

import json
import os
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from sluicemq import OffsetMoved, Sluice
from sluicemq.cli import main
from sluicemq.client.sync.admin import Admin
from sluicemq.model.topic import MessageQueue

HOUR_S = 3600
KEYS = {
    "mapedFileSizeCommitLog": "65536",
    "deleteWhen": ";".join(map(str, range(24))),
    "flushCommitLogThoroughInterval": "100",
    "flushIntervalCommitLog": "50",
    "flushIntervalConsumeQueue": "50",
}


def age(broker: Any, hours: float) -> None:
    """The log's files but the last were written so long ago."""
    for path in sorted(Path(broker.settings.store.commit_log_path).iterdir())[:-1]:
        time_s = path.stat().st_mtime - hours * HOUR_S
        os.utime(path, (time_s, time_s))


def clean(servers: Any, broker: Any) -> None:
    """What the broker's timer does, now."""

    async def run() -> None:
        store = broker.store
        while store.retention.removable_end() < store.written_offset:
            store._checkpoints._last_s = 0.0
            store.tick()
            await broker._jobs.run(store.sync)
        broker.core.retention._next_clean_up_s = broker.core.retention._next_survey_s = 0.0
        await broker._jobs.run_steps(broker.core.retention.run_due_jobs())

    servers.run(run())


def command(servers: Any, *arguments: str) -> Any:
    environment = {"NAMESRV_ADDR": ";".join(servers.addresses), "COLUMNS": "200"}
    return CliRunner().invoke(main, list(arguments), env=environment)


async def test_a_consumer_is_told_what_it_lost_and_the_lag_said_so_before(
    empty_cluster: Any, caplog: Any
) -> None:
    broker = empty_cluster.start_broker(**KEYS)
    moved: list[OffsetMoved] = []
    body = os.urandom(20_000)  # the client compresses what can be compressed
    async with Sluice(empty_cluster.addresses, on_moved=moved.append) as mq:
        await mq.admin.create_topic("t", queues=1)
        for n in range(10):
            await mq.send("t", b"%d " % n + body)
        async with mq.subscribe("t", group="late", prefetch_count=1) as stream:
            await (await stream.receive()).ack()

        records = [json.loads(line) for line in lag(empty_cluster).stdout.splitlines()]
        assert [(one["topic"], one["lag"], one["at_risk"]) for one in records] == [("t", 9, 0)]
        table = command(empty_cluster, "group", "lag", "late").output
        assert "┃ lag ┃" in table
        assert "at risk" not in table
        safe = command(empty_cluster, "group", "lag", "late", "--at-risk")
        assert safe.exit_code == 0
        assert safe.output == "The lag is 9 messages. None of them is about to be deleted.\n"
        age(broker, 60)
        clean(empty_cluster, broker)
        (record,) = [json.loads(line) for line in lag(empty_cluster).stdout.splitlines()]
        assert (record["committed"], record["lag"], record["lost"]) == (1, 9, 0)
        assert record["at_risk"] == 8
        assert record["loss_time_ms"] > 0
        assert "8 unread messages of topic t, which are deleted from" in caplog.text
        risky = command(empty_cluster, "group", "lag", "--at-risk")
        assert risky.exit_code == 1
        assert "8 of them will be deleted from" in risky.output
        assert "┃ at risk ┃ deleted from" in risky.output

        age(broker, 20)
        clean(empty_cluster, broker)
        (record,) = [json.loads(line) for line in lag(empty_cluster).stdout.splitlines()]
        assert (record["lag"], record["lost"], record["at_risk"]) == (1, 8, 0)
        with Admin(empty_cluster.addresses) as admin:
            (item,) = [item for item in admin.lag() if item.group == "late" and item.lag]
            assert (item.offset_min, item.offset_max) == (9, 10)
        async with mq.subscribe("t", group="late") as stream:
            message = await stream.receive()
            assert message.body.startswith(b"9 ")
            await message.ack()
    assert moved == [OffsetMoved("late", MessageQueue("t", "broker-a", 0), 1, 9, 8)]
    assert "group late: offset 1 of" in caplog.text
    assert "8 messages are lost" in caplog.text


def lag(servers: Any) -> Any:
    result = command(servers, "group", "lag", "late", "--json")
    assert result.exit_code == 0, result.output
    result.stdout_bytes = b"".join(
        line for line in result.stdout_bytes.splitlines(keepends=True) if b"%RETRY%" not in line
    )
    return result


def test_the_lag_of_a_group_that_is_not_there_says_who_is(cluster: Any) -> None:
    result = command(cluster, "group", "lag", "nobody")
    assert result.exit_code == 1
    assert "no broker knows the group 'nobody'" in result.output
    assert "The lag is 0 messages" in command(cluster, "group", "lag").output
