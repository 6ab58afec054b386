"""A committed offset beyond the end of a queue is shown by `group lag`, `explain` and `doctor`."""

import asyncio
import json
from typing import Any

from click.testing import CliRunner

from sluicemq.cli import main
from sluicemq.testing.embedded import embedded


async def test_a_committed_offset_beyond_the_end_is_shown_with_its_cause() -> None:
    async with embedded(tcp=True) as mq:
        names = mq.servers.name_server_address

        async def told(*arguments: str) -> Any:
            environment = {"NAMESRV_ADDR": names, "COLUMNS": "300"}
            return await asyncio.to_thread(
                CliRunner().invoke, main, list(arguments), env=environment
            )

        await mq.admin.create_topic("t", queues=1)
        async with mq.subscribe("t", group="late"):
            await mq.send("t", b"one")
        mq.servers.broker.core.offsets.put("late", "t", 0, 1)
        fine = await told("group", "lag", "late")
        assert "beyond" not in fine.output
        mq.servers.broker.core.offsets.put("late", "t", 0, 50)
        shown = await told("group", "lag", "late")
        assert "The committed offset 50 of late is beyond the end 1 of t queue 0" in shown.output
        told_lines = (await told("group", "lag", "late", "--json")).output.splitlines()
        (line,) = (one for one in map(json.loads, told_lines) if one["topic"] == "t")
        assert (line["beyond_end"], line["lag"], line["committed"]) == (49, 0, 50)
        explained = await told("explain", "group", "late")
        assert "is 50, beyond the end of the queue at 1" in explained.output
        assert "sluice group reset late --topic t --to earliest" in explained.output
        doctor = await told("doctor", "-n", names, "-g", "late", "--json")
        assert "offset-beyond-end" in doctor.output
