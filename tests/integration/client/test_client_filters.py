"""Exact lag, counters and the filter lab, through the admin API and the command line."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from click.testing import CliRunner, Result

from sluicemq.cli import main
from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.model.subscription import TAG
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from waiting import limit

PRICES = ["30.5", "31", "7", "40", "free"]


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(tcp=True) as cluster:
        await cluster.admin.create_topic("T", queues=1)
        await cluster.admin.create_group(GroupConfig("G"))
        for number, price in enumerate(PRICES):
            tag = "AB"[number % 2]
            await cluster.send("T", b"x", tag=tag, properties={"price": price, "region": "hz"})
        yield cluster


async def sluice(mq: EmbeddedSluice, *words: str) -> Result:
    """In a thread: the cluster needs this one."""
    environment = {"NAMESRV_ADDR": mq.servers.name_server_address, "COLUMNS": "240"}
    async with asyncio.timeout(limit(30)):
        return await asyncio.to_thread(CliRunner().invoke, main, list(words), env=environment)


async def test_lag_counts_what_the_filter_lets_through(mq: EmbeddedSluice) -> None:
    async with mq.subscribe("T", group="G", where="price > 30") as messages:
        got = [await messages.receive() for _ in range(2)]
        assert [message.properties["price"] for message in got] == ["31", "40"]
        (lag,) = [item for item in await mq.admin.lag("G") if item.queue.topic == "T"]
        assert lag.matching == 2
        assert lag.lag >= 4, "what the filter drops counts until it is passed"
        shown = await sluice(mq, "group", "lag", "G", "--json")
        records = [json.loads(line) for line in shown.stdout.splitlines()]
        assert [one["matching"] for one in records if one["topic"] == "T"] == [2]
        table = (await sluice(mq, "group", "lag", "G")).stdout
        assert "matching" in table
        assert "2 messages match the groups' filters." in table


async def test_group_show_tells_what_the_filter_did(mq: EmbeddedSluice) -> None:
    async with mq.subscribe("T", group="G", where="price > 30") as messages:
        [await messages.receive() for _ in range(2)]
        shown = await sluice(mq, "group", "show", "G", "--json")
        assert shown.exit_code == 0, shown.output
        told = [one for one in json.loads(shown.stdout)["filters"] if one["topic"] == "T"]
        assert len(told) == 1
        assert (told[0]["matched"], told[0]["filtered"], told[0]["matching"]) == (2, 3, 2)
        assert sum(told[0]["errors"].values()) == 2
        assert [one["offset"] for one in told[0]["last_errors"]] == [0, 4]
        table = (await sluice(mq, "group", "show", "G")).stdout
        assert "filtered out" in table
        assert "the filter failed on 2 messages: price is not a whole number" in table
        assert "queue 0 offset 4: property price is 'free'" in table


async def test_a_message_on_which_two_lanes_fail_counts_once(mq: EmbeddedSluice) -> None:
    other = mq.servers.client()
    async with (
        mq.subscribe("T", group="G", where="price > 30.0") as messages,
        other.subscribe("T", group="G", where="price > 20.0") as others,
    ):
        await messages.receive()
        await mq.send("T", b"x", properties={"price": "25"})
        async with asyncio.timeout(limit(30)):
            assert (await others.receive()).properties["price"] == "25"
        (told,) = [one for one in await mq.admin.matching("G") if one.topics]
        (counts,) = [one for one in told.topics if one.topic == "T"]
        assert len(counts.lanes) == 2
        assert sum(counts.errors.values()) == 1
        assert [failure.offset for failure in counts.failures] == [4]


async def test_of_a_group_away_with_tags_it_is_said_that_nobody_knows(mq: EmbeddedSluice) -> None:
    await mq.admin.commit_offset("G", MessageQueue("T", "broker-a", 0), 1)
    table = (await sluice(mq, "group", "lag", "G")).stdout
    assert "is unknown" in table
    (lag,) = await mq.admin.lag("G")
    assert (lag.lag, lag.matching) == (4, None)


async def test_an_expression_is_tried_on_what_is_stored(mq: EmbeddedSluice) -> None:
    (trial,) = await mq.admin.try_filter("T", "price > 30 AND region = 'hz'")
    report = trial.report
    assert (trial.broker, trial.rows, trial.stored) == ("broker-a", 5, 5)
    assert (report["matched"], report["false"], report["errors"]) == (2, 1, 2)
    assert report["match_rate"] == 0.4
    assert [atom["selectivity"] for atom in report["atoms"]] == [0.4, 1.0]
    place = (report["samples"][0]["source"], report["samples"][0]["offset"])
    assert trial.messages[place]["price"] == "31"
    assert report["cost"]["cost_class"] == "columns"
    assert {finding["code"] for item in report["properties"] for finding in item["findings"]}
    offsets = await mq.admin.progress("G")
    assert not offsets, "nothing is consumed"


async def test_the_command_shows_the_difference_from_the_group(mq: EmbeddedSluice) -> None:
    async with mq.subscribe("T", group="G", where="price > 35"):
        words = ("filter", "test", "price > 30.0", "-t", "T", "--since", "1h", "-g", "G")
        shown = await sluice(mq, *words)
        assert shown.exit_code == 1, "one value is no number"
        assert "3 of 5 messages on broker-a match price > 30.0: 60.0000%." in shown.stdout
        assert "'free'" in shown.stdout
        assert "1 messages match both, 2 only the new one" in shown.stdout
        record = json.loads((await sluice(mq, *words, "--json")).stdout)
        assert record["difference"]["only_here"] == 2
        assert record["matched"] == 3
    assert "price=31" in shown.stdout


async def test_tags_can_be_tried(mq: EmbeddedSluice) -> None:
    (trial,) = await mq.admin.try_filter("T", "A || C", TAG)
    assert trial.report["matched"] == 3
    shown = await sluice(mq, "filter", "test", "A", "--tags", "-t", "T", "--since", "all")
    assert shown.exit_code == 0, shown.output
    assert "3 of 5" in shown.stdout


async def test_a_time_without_messages_is_explained(mq: EmbeddedSluice) -> None:
    await mq.admin.create_topic("Empty")
    shown = await sluice(mq, "filter", "test", "price > 30.0", "-t", "Empty")
    assert shown.exit_code == 0, shown.output
    assert "0 of 0 messages" in shown.stdout
    assert "Evaluate all messages with --since all." in shown.stdout


async def test_of_many_messages_the_newest_are_looked_at(mq: EmbeddedSluice) -> None:
    (trial,) = await mq.admin.try_filter("T", "price = '40'", count_max=2)
    assert (trial.rows, trial.stored, trial.report["matched"]) == (2, 5, 1)


async def test_what_cannot_be_tried_is_said(mq: EmbeddedSluice) -> None:
    with pytest.raises(FilterSyntaxError):
        await mq.admin.try_filter("T", "price >")
    with pytest.raises(FilterSyntaxError, match="not valid at character 11"):
        await mq.admin.try_filter("T", "price > 1 )")
    with pytest.raises(ConfigurationError, match="is unknown"):
        await mq.admin.try_filter("T", "price > 1", group="G")


async def test_explain_speaks(mq: EmbeddedSluice) -> None:
    sent = await mq.send("T", b"x", properties={"price": "7"})
    async with mq.subscribe("T", group="G", where="price > 30"):
        shown = await sluice(mq, "explain", "message", sent.message_id, "-g", "G")
        assert shown.exit_code == 0, shown.output
        assert "Group G: filtered" in shown.stdout
        assert "filter-false: The filter price > 30 is false for the message" in shown.stdout
        shown = await sluice(mq, "explain", "message", sent.message_id, "--json")
        record = json.loads(shown.stdout)
        assert [(one["group"], one["fate"]) for one in record["groups"]] == [("G", "filtered")]
        table = (await sluice(mq, "explain", "message", sent.message_id)).stdout
        assert "filtered" in table
        shown = await sluice(mq, "explain", "group", "G", "--json")
        assert "filter-error" in [one["code"] for one in json.loads(shown.stdout)["findings"]]
    shown = await sluice(mq, "explain", "group", "nobody")
    assert shown.exit_code == 1
    assert "no-such-group" in shown.stdout
