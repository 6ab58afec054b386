"""Messages whose bodies cannot be decompressed: batch reads, streams, archives, dead letters."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq import Sluice
from sluicemq.client.core import requests
from sluicemq.client.core.requests import expect_success
from sluicemq.client.sync.admin import Admin
from sluicemq.model.topic import GroupConfig
from sluicemq.pipelines.archive import archive, read_archive, replay
from sluicemq.pipelines.deadletters import dead_letters
from stored_bodies import BAD, GOOD, send_stored

MIXED = [
    *(GOOD[name] for name in ("plain", "zlib", "lz4", "zstd", "zlib, random")),
    *(one for name, one in BAD.items() if "oversized" not in name),
    GOOD["plain"],
]
GOOD_ONES = [one.body for one in MIXED if one.body is not None]
BAD_COUNT = len(MIXED) - len(GOOD_ONES)
Read = Callable[..., Any]


@pytest.fixture
def mixed(name_server: str, topic: str) -> str:
    """The topic with `MIXED` in its two queues."""

    async def send() -> None:
        async with Sluice(name_server) as mq:
            for number, one in enumerate(MIXED):
                await send_stored(mq, topic, f"{number:032X}", one, number % 2, KEYS=f"k{number}")

    asyncio.run(send())
    return topic


def bodies(rows: list[Any]) -> list[bytes]:
    return sorted(bytes(row.body) for row in rows if row.body is not None)


def test_a_batch_read_goes_on_past_them(read: Read, mixed: str) -> None:
    assert len(read().select("tags").collect()) == len(MIXED)
    rows = read(columns="keys,body,_error").collect()
    assert bodies(rows) == sorted(GOOD_ONES)
    assert sum(row._error is not None for row in rows) == BAD_COUNT
    with pytest.raises(Exception, match=r"the body at offset \d+ of .* is not decodable: it"):
        read(badBody="fail").collect()


def test_a_stream_goes_on_past_them(
    spark: Any, name_server: str, mixed: str, tmp_path: Any
) -> None:
    stream = spark.readStream.format("rocketmq").options(
        nameServers=name_server, topic=mixed, startingOffsets="earliest",
        columns="keys,body,_error",
    )  # fmt: skip
    name = f"mixed_{abs(hash(mixed))}"
    query = (
        stream.load().writeStream.format("memory").queryName(name)
        .option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    )  # fmt: skip
    assert query.awaitTermination(120)
    rows = spark.table(name).collect()
    assert bodies(rows) == sorted(GOOD_ONES)
    assert sum(row._error is not None for row in rows) == BAD_COUNT


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_an_archive_keeps_their_bytes_and_a_replay_leaves_them_out(
    spark: Any, name_server: str, admin: Admin, mixed: str, read: Read, tmp_path: Path
) -> None:
    connection, path = {"nameServers": name_server}, str(tmp_path / "archive")
    said: list[str] = []
    report = archive(spark, connection, path=path, topics=[mixed], verify="all", say=said.append)
    assert report.figures == {"rows": len(MIXED), "verified": len(MIXED)}
    archived = read_archive(spark, path).where("_error is not null").collect()
    assert sorted(bytes(row.body) for row in archived) == sorted(
        one.raw for one in MIXED if one.body is None
    )
    assert all(row.sys_flag & 1 for row in archived)
    to = f"{mixed}-again"
    admin.create_topic(to, queues=1)
    report = replay(spark, connection, path=path, name="once", to=to, say=said.append)
    assert report.figures == {"rows": len(GOOD_ONES), "undecodable": BAD_COUNT}
    assert any(line.startswith(f"left out: {BAD_COUNT} messages") for line in said)
    again = spark.read.format("rocketmq").options(nameServers=name_server, topic=to).load()
    assert bodies(again.select("body").collect()) == sorted(GOOD_ONES)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_dead_letters_have_them_as_a_cause_and_do_not_send_them(
    spark: Any, name_server: str, admin: Admin, mixed: str, tmp_path: Path
) -> None:
    group, connection = f"{mixed}-group", {"nameServers": name_server}
    admin.create_group(GroupConfig(group))
    bad = next(number for number, one in enumerate(MIXED) if one is BAD["zlib, garbage"])
    for key in ("k0", f"k{bad}"):
        (stored,) = admin.messages_by_key(mixed, key)
        (address,) = admin.masters().values()
        expect_success(admin.call(address, requests.send_back(group, stored, mixed, -1, 16)))
    said: list[str] = []
    dead_letters(spark, connection, group=group, filter_tags="*", say=said.append)
    text = "\n".join(said)
    assert "body: not decodable: it is not valid zlib data" in text
    assert "invalid: its body cannot be sent." in text
    report = dead_letters(
        spark, connection, group=group, action="replay", filter_tags="*",
        edit={"body": "concat('new ', keys)"}, state=str(tmp_path / "state"),
    )  # fmt: skip
    assert report.figures["sent"] == 2, "an edit makes a new body"
