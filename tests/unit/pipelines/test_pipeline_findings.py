"""The parts of `trace`, `audit` and `dedup` that need no Spark: events, findings and inserts."""

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("sqlalchemy")

import pyarrow as pa
import sqlalchemy as sa

from sluicemq.client.admin.subscriptions import GroupSubscriptions
from sluicemq.client.ledger import make_blocking_engine
from sluicemq.errors import ConfigurationError
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.trace_records import (
    ConsumeOutcome,
    ConsumeTrace,
    MessageKind,
    SendTrace,
    encode_trace_records,
)
from sluicemq.pipelines.audit import (
    AUDIT,
    Audit,
    MessageCount,
    TopicSample,
    compute_loss,
    find_collisions,
    find_failing_filters,
    find_unwanted_tags,
)
from sluicemq.pipelines.dedup import DEDUP, build_source_options
from sluicemq.pipelines.file import check_pipeline
from sluicemq.pipelines.ready import find_ready_pipeline, format_table
from sluicemq.pipelines.sinks.databases import Target, create_table, insert_chunks
from sluicemq.pipelines.trace import TRACE, decode_bodies

TESTS = Path(__file__).parents[2]
TAG_A, TAG_B = parse_subscription("orders", "A"), parse_subscription("orders", "B||C")
DEAR = parse_subscription("orders", "price > 30", SQL92)
BIT_A, BIT_B, BIT_DEAR = 1, 2, 4


def seen(*rows: tuple[str | None, int, int, int]) -> TopicSample:
    return TopicSample("orders", (TAG_A, TAG_B, DEAR), tuple(MessageCount(*row) for row in rows))


def test_ready_pipelines_are_found_by_name() -> None:
    assert (
        find_ready_pipeline("trace"),
        find_ready_pipeline("audit"),
        find_ready_pipeline("dedup"),
    ) == (TRACE, AUDIT, DEDUP)


# ------------------------------------------------------------------------------------- trace


def test_each_record_is_an_event_and_a_java_batch_has_one_for_each_message() -> None:
    batch = SendTrace(
        5, "r", "g", "orders", "b1,b2", "A", None, "host", 3, 1, MessageKind.ORDERED, "p1,p2", True
    )
    cloud = ConsumeTrace("q", "b1", 3, False, None, ConsumeOutcome.FAILED)
    bodies = pa.array([encode_trace_records([batch, cloud]) + b"Odd\x01\x02", b"", None])
    first, second, third = decode_bodies(bodies).to_pylist()
    assert [(e["kind"], e["message_id"], e["offset_message_id"]) for e in first] == [
        ("Pub", "b1", "p1"), ("Pub", "b2", "p2"), ("SubAfter", "b1", None), ("Unread", None, None),
    ]  # fmt: skip
    assert first[0]["message_kind"] == "ordered"
    assert (first[2]["time_ms"], first[2]["outcome"], first[2]["success"]) == (
        None, "failed", False,
    )  # fmt: skip
    assert second == third == []


# ------------------------------------------------------------------------------------- audit


def test_unwanted_tags_are_found_with_their_messages() -> None:
    found = seen(("A", BIT_A, 0, 5), ("Z", 0, 0, 3), ("Z", BIT_DEAR, 0, 1), ("Y", 0, 0, 7),
                 (None, 0, 0, 2))  # fmt: skip
    assert [(one.tag, one.messages) for one in find_unwanted_tags(found)] == [("Y", 7), (None, 2)]


def test_the_loss_depends_on_the_subscription_that_the_broker_keeps() -> None:
    """There are ten messages with the tag A, and twenty with B or C.

    A broker that keeps A delivers ten. Half of them are in queues of the other member, which
    compares the tag again and drops them, so 25 of 30 are lost. With B||C, 20 of 30 are lost.
    """
    found = seen(("A", BIT_A, 0, 10), ("B", BIT_B, 0, 20), ("Z", 0, 0, 4))
    lost = compute_loss(found, "billing", {"one": TAG_A, "two": TAG_B})
    assert lost is not None
    assert (lost.wanted, lost.certain, lost.lost_min, lost.lost_max) == (30, 0, 20, 25)
    assert lost.members == {"one": "A", "two": "B||C"}


def test_a_sql92_member_does_not_filter_again() -> None:
    found = seen(("A", BIT_A | BIT_DEAR, 0, 10), ("A", BIT_A, 0, 10))
    lost = compute_loss(found, "billing", {"one": TAG_A, "two": DEAR})
    assert lost is not None
    assert (lost.wanted, lost.certain, lost.lost_min, lost.lost_max) == (20, 10, 0, 10)


def test_a_member_without_the_topic_makes_a_group_unequal() -> None:
    found = seen(("A", BIT_A, 0, 10))
    lost = compute_loss(found, "billing", {"one": TAG_A, "two": None})
    assert lost is not None
    assert (lost.certain, lost.lost_min, lost.lost_max) == (0, 5, 5)
    assert compute_loss(found, "billing", {"one": TAG_A, "two": TAG_A}) is None
    assert compute_loss(found, "billing", {}) is None


def test_tags_with_the_same_java_hash_collide_even_if_only_subscribed() -> None:
    found = TopicSample(
        "orders", (parse_subscription("orders", "BB"),), (MessageCount("Aa", 0, 0, 4),)
    )
    (pair,) = find_collisions(found)
    assert (pair.tags, pair.code, pair.messages) == (("Aa", "BB"), 2112, 4)
    assert find_collisions(seen(("A", 0, 0, 1), (None, 0, 0, 1))) == []


def test_expressions_of_the_audited_groups_that_fail_are_counted() -> None:
    found = seen(("A", BIT_A, BIT_DEAR, 3), ("A", BIT_A, 0, 4))
    newer = replace(DEAR, version=5)
    groups = [
        GroupSubscriptions("billing", {"one": {"orders": newer}, "two": {"orders": TAG_A}}),
        GroupSubscriptions("packing", {"three": {"orders": TAG_A}}),
    ]
    (one,) = find_failing_filters(found, groups)
    assert (one.expression, one.messages, one.of) == ("price > 30", 3, 7)
    assert one.groups == ("billing",)
    assert find_failing_filters(found, groups[1:]) == []


def test_different_subscriptions_of_a_group_with_lanes_are_shown_and_are_no_finding() -> None:
    """Each lane has committed offsets of its own, so the group loses nothing."""
    loss = compute_loss(
        seen(("A", BIT_A, 0, 10), ("B", BIT_B, 0, 20)), "billing", {"one": TAG_A, "two": TAG_B}
    )
    assert loss is not None
    for has_lanes, expected in ((False, (1, 1, 0)), (True, (0, 0, 1))):
        found = Audit(unequal=[replace(loss, has_lanes=has_lanes)])
        names = ("findings", "unequal_groups", "groups_with_lanes")
        assert tuple(found.figures[name] for name in names) == expected
        assert ("0 (lanes)" in "\n".join(found.format_lines(10))) is has_lanes


def test_each_expression_of_a_topic_counts_once() -> None:
    retry = Subscription("%RETRY%g")
    known = GroupSubscriptions(
        "g", {"one": {"orders": TAG_A}, "two": {"orders": TAG_B, "%RETRY%g": retry}, "mute": None},
        {"orders": TAG_B, "%RETRY%g": retry}, {"bills": DEAR},
    )  # fmt: skip
    assert known.all_of("orders") == [TAG_A, TAG_B]
    assert known.topics == {"orders", "bills"}
    assert known.by_member("bills") == {"one": None, "two": None}


def test_findings_are_counted_and_lag_is_not_a_finding() -> None:
    found = Audit(unwanted_tags=find_unwanted_tags(seen(("Z", 0, 0, 4))))
    assert found.figures["findings"] == 1
    assert found.figures["unwanted_messages"] == 4
    assert "orders  Z           4" in "\n".join(found.format_lines(10))
    assert found.to_json()["unwanted_tags"] == [{"topic": "orders", "tag": "Z", "messages": 4}]


# ------------------------------------------------------------------------------------- dedup


def rows(*numbers: int | None) -> list[dict[str, Any]]:
    return [
        {"sluice_key": None if number is None else f"k{number}", "note": f"n{number}"}
        for number in numbers
    ]


@pytest.fixture
def table(tmp_path: Path) -> tuple[Any, Target]:
    target = Target(
        f"sqlite:///{tmp_path / 'shop.db'}", "orders", ("sluice_key",),
        (("sluice_key", "string"), ("note", "string")),
    )  # fmt: skip
    engine = make_blocking_engine(target.url)
    create_table(engine, target)
    yield engine, target
    engine.dispose()


def keys_of(engine: Any) -> list[str]:
    with engine.connect() as connection:
        return sorted(connection.execute(sa.text("select sluice_key from orders")).scalars())


def test_existing_rows_are_left_unchanged(table: tuple[Any, Target]) -> None:
    engine, target = table
    assert insert_chunks(engine, target, [rows(1, 2), rows(2, 3)]) == (4, 3)
    with engine.begin() as connection:
        connection.execute(sa.text("update orders set note = 'mine' where sluice_key = 'k1'"))
    assert insert_chunks(engine, target, [rows(1, 2, 3, 4)]) == (4, 1)
    assert keys_of(engine) == ["k1", "k2", "k3", "k4"]
    with engine.connect() as connection:
        found = connection.execute(sa.text("select note from orders where sluice_key = 'k1'"))
        assert found.scalar_one() == "mine"


def test_a_task_that_fails_has_written_nothing(table: tuple[Any, Target]) -> None:
    engine, target = table

    def chunks():
        yield rows(1, 2)
        raise OSError("the worker is gone")

    with pytest.raises(OSError, match="gone"):
        insert_chunks(engine, target, chunks())
    with pytest.raises(ConfigurationError, match="no value in the key column"):
        insert_chunks(engine, target, [rows(1, 2), rows(None)])
    assert keys_of(engine) == []


def test_the_source_reads_the_columns_that_the_key_needs() -> None:
    options = build_source_options(
        {"nameServers": "n"}, "orders", "position", {"columns": "body, topic"}
    )
    assert options["columns"] == "body,topic,broker,queue_id,queue_offset,store_time"
    options = build_source_options({}, "orders", "dedup-key", {})
    assert options["columns"].endswith("reconsume_times,prop:SLUICE_DEDUP_KEY")


# ---------------------------------------------------------------------------------- printing


def test_numbers_in_a_table_are_aligned_to_the_right() -> None:
    assert format_table("Lag", ("group", "lag"), [("billing", 1200), (None, 3)]) == [
        "Lag", "  group      lag", "  billing  1,200", "  -            3",
    ]  # fmt: skip
    assert format_table("Lag", ("group", "lag"), []) == ["Lag: none"]


# ---------------------------------------------------------------------- Java, and the examples


@pytest.mark.parametrize("name", ["java49-trace", "java53-trace"])
def test_traces_of_java_clients_become_the_same_events(name: str) -> None:
    bodies = pa.array(java_traces(name))
    events = {event["kind"]: event for told in decode_bodies(bodies).to_pylist() for event in told}
    assert set(events) == {"Pub", "SubBefore", "SubAfter"}
    assert len({event["message_id"] for event in events.values()}) == 1
    assert events["SubBefore"]["request_id"] == events["SubAfter"]["request_id"]
    assert events["Pub"]["topic"].endswith("_trace")
    assert events["SubBefore"]["time_ms"] > events["Pub"]["time_ms"]
    assert events["SubAfter"]["outcome"] == "success"


def java_traces(name: str) -> list[bytes]:
    """Bodies of the trace messages that a Java client sent."""
    with gzip.open(TESTS / f"golden/traffic/{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return [
        base64.b64decode(record["body_b64"])
        for record in records
        if record["dir"] == ">" and record["header"]["code"] == 310
        if record["header"]["extFields"]["b"] == "RMQ_SYS_TRACE_TOPIC"
    ]


@pytest.mark.parametrize("name", ["trace", "audit", "dedup"])
def test_the_example_and_the_documentation_name_existing_fields(name: str) -> None:
    pipeline, problems = check_pipeline(str(TESTS.parent / f"examples/pipelines/{name}.yaml"), {})
    assert problems == []
    assert pipeline is not None
    page = (TESTS.parent / f"docs/pipelines-{name}.md").read_text()
    missing = [
        field.name for field in find_ready_pipeline(name).fields if f"`{field.name}`" not in page
    ]
    assert not missing, f"docs/pipelines-{name}.md lacks {missing}"
