"""Batch reads through Spark from a real broker process: every row, every option, every error."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.model.message import Message
from sluicemq.spark.references import load_where
from sluicemq.spark.report import pushdown
from sluicemq.spark.source import RocketSource

pytestmark = pytest.mark.timeout(300)

Read = Callable[..., Any]
Publish = Callable[[int, int], None]


def numbers(frame: Any) -> list[int]:
    """The message numbers of a frame with bodies, sorted."""
    return sorted(
        int(bytes(row.body).decode().split("-")[1]) for row in frame.select("body").collect()
    )


def test_every_column_of_every_message_arrives(read: Read, publish: Publish, topic: str) -> None:
    publish(0, 100)
    rows = {row.queue_offset * 2 + row.queue_id: row for row in read().collect()}
    assert sorted(rows) == list(range(100))
    row = rows[33]
    assert (row.topic, row.queue_id, row.queue_offset) == (topic, 1, 16)
    assert (row.keys, row.tags, bytes(row.body)) == ("k33 all", "A", b"body-33")
    assert row.properties["delay"] == "late"
    assert row.properties == {"origin": "EWR", "number": "33", "delay": "late"}
    assert row.reconsume_times == 0
    assert abs(row.store_time - row.born_time) < datetime.timedelta(minutes=1)


def test_the_properties_that_all_messages_have_can_be_read_too(
    read: Read, publish: Publish
) -> None:
    publish(0, 10)
    for row in read(properties="all").collect():
        assert row.properties["UNIQ_KEY"] == row.msg_id
        assert row.properties["TAGS"] == row.tags


def test_start_and_end_may_be_chosen_by_offset(
    read: Read, publish: Publish, admin: Admin, topic: str
) -> None:
    publish(0, 100)
    broker = admin.queues(topic)[0].broker
    frame = read(
        startingOffsets=f'{{"{broker}": {{"0": 40, "1": "earliest"}}}}',
        endingOffsets=f'{{"{broker}": {{"0": "latest", "1": 3}}}}',
    )
    assert numbers(frame) == sorted([*range(80, 100, 2), 1, 3, 5])


def test_start_and_end_may_be_chosen_by_time(read: Read, publish: Publish) -> None:
    publish(0, 20)
    first = read().selectExpr("max(unix_millis(store_time)) t").first().t
    while first >= _now_ms():
        pass
    publish(20, 20)
    frame = read(startingTimestamp=str(first + 1))
    assert numbers(frame) == list(range(20, 40))
    assert numbers(read(endingTimestamp=str(first + 1))) == list(range(20))


def _now_ms() -> int:
    from sluicemq.clock import SYSTEM_CLOCK

    return SYSTEM_CLOCK.now_ms()


def test_ranges_are_split_into_partitions(read: Read, publish: Publish) -> None:
    publish(0, 100)
    assert read().rdd.getNumPartitions() == 2
    frame = read(maxRecordsPerPartition="20")
    assert frame.rdd.getNumPartitions() == 6
    assert numbers(frame) == list(range(100))
    assert read(minPartitions="5").rdd.getNumPartitions() >= 5


def test_the_broker_filters_by_tags_and_the_reader_compares_them_again(
    read: Read, producer: Producer, topic: str, publish: Publish
) -> None:
    publish(0, 30)
    # "Aa" and "BB" have the same Java hash: the broker delivers both
    producer.send_batch(
        [Message(topic, b"body-900", tag="Aa"), Message(topic, b"body-901", tag="BB")]
    )
    assert numbers(read(filter__tags="A||Aa")) == [*range(0, 30, 3), 900]


def test_a_filter_that_loses_rows_by_mistake_is_told_at_planning(
    name_server: str, topic: str, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without Spark: of what it starts for planning, the log is its own."""
    producer.send_batch([Message(topic, b"x", properties={"latitude": f"{n}.5"}) for n in range(9)])
    given = {"nameServers": name_server, "topic": topic, "filter.sql": "latitude > 5"}
    made = RocketSource(given)
    made.reader(made.schema()).partitions()
    stream = made.streamReader(made.schema())
    stream.reportLatestOffset()
    stream.reportLatestOffset()
    stream.stop()
    batch, once_a_stream = (line for line in caplog.messages if "filter.sql" in line)
    assert batch == once_a_stream
    assert "0 match. 9 of 9 values of latitude cannot be read as Integer" in batch
    assert batch.endswith("Write 5.0.")


def test_the_broker_filters_by_sql92(read: Read, publish: Publish) -> None:
    publish(0, 100)
    frame = read(filter__sql="origin = 'JFK' AND delay BETWEEN 0 AND 20")
    assert numbers(frame) == [n for n in range(50, 71) if n % 3 == 1 and n % 10]
    both = read(filter__sql="delay > 0", filter__tags="B")
    assert numbers(both) == [n for n in range(51, 100) if n % 3 == 1 and n % 10]


def test_properties_become_typed_columns(read: Read, publish: Publish) -> None:
    publish(0, 40)
    frame = read(
        columns="queue_id,queue_offset,prop:delay:int,prop:origin as place,prop:number:double"
    )
    assert frame.dtypes == [
        ("queue_id", "int"), ("queue_offset", "bigint"), ("delay", "int"), ("place", "string"),
        ("number", "double"),
    ]  # fmt: skip
    rows = {row.queue_offset * 2 + row.queue_id: row for row in frame.collect()}
    assert (rows[7].delay, rows[7].place, rows[7].number) == (-43, "JFK", 7.0)
    assert rows[10].delay is None
    assert rows[33].delay is None


def test_a_property_that_does_not_parse_can_be_an_error(read: Read, publish: Publish) -> None:
    publish(0, 40)
    with pytest.raises(Exception, match="'delay' has the value 'late', which is not a valid int"):
        read(columns="prop:delay:int", badProperties="fail").collect()


def test_a_schema_of_the_user_narrows_and_promotes(
    spark: Any, name_server: str, topic: str, publish: Publish
) -> None:
    publish(0, 10)
    reader = spark.read.format("rocketmq").schema("delay int, tags string, queue_offset bigint")
    frame = reader.options(nameServers=name_server, topic=topic).load()
    assert frame.columns == ["delay", "tags", "queue_offset"]
    assert sorted(row.delay for row in frame.collect() if row.delay is not None) == list(
        range(-49, -40)
    )


COLUMNS = "tags,queue_id,queue_offset,store_time,body,prop:delay:int,prop:origin"


@pytest.mark.parametrize(
    ("predicate", "wanted"),
    [
        ("tags = 'A'", lambda n: n % 3 == 0),
        ("tags in ('A', 'C') and queue_id = 1", lambda n: n % 3 != 1 and n % 2),
        ("queue_offset between 10 and 19", lambda n: 20 <= n < 40),
        ("delay > 10", lambda n: n % 10 and n > 60),
        ("delay = 1 or delay = 2", lambda n: n in (51, 52)),
        ("not (delay in (1, 2)) and origin <> 'JFK'",
         lambda n: n % 10 and n % 3 != 1 and n not in (51, 52, 33)),
        ("delay is null", lambda n: n % 10 == 0 or n == 33),
        ("delay is not null and origin = 'EWR'", lambda n: n % 10 and n % 3 == 0 and n != 33),
        ("origin like 'J%' and tags = 'B' and delay < 0",
         lambda n: n % 3 == 1 and n % 10 and n < 50),
        ("store_time >= '2020-01-01' and store_time < '2100-01-01'", lambda _: True),
        ("store_time < '2020-01-01'", lambda _: False),
        ("tags = 'A' and tags = 'B'", lambda _: False),
    ],
)  # fmt: skip
def test_predicates_give_the_same_rows_pushed_down_or_not(
    read: Read, read_where: Read, publish: Publish, predicate: str,
    wanted: Callable[[int], object],
) -> None:  # fmt: skip
    publish(0, 100)
    expected = [n for n in range(100) if wanted(n)]
    assert numbers(read_where(predicate, columns=COLUMNS)) == expected
    assert numbers(read(columns=COLUMNS).where(predicate)) == expected


@pytest.fixture
def read_where(spark: Any, name_server: str, topic: str) -> Read:
    """`load_where` on the topic, with a condition and further options."""

    def load(condition: str, **options: str) -> Any:
        return load_where(spark, condition, nameServers=name_server, topic=topic, **options)

    return load


def test_an_empty_topic_gives_no_rows(read: Read) -> None:
    assert read().count() == 0


@pytest.mark.parametrize(
    ("options", "first_line"),
    [
        ({"topc": "x"}, "unknown option 'topc'. Did you mean 'topic'?"),
        ({"topic": "no-such-topic"}, "the topic 'no-such-topic' does not exist"),
        ({"nameServers": "127.0.0.1:1"}, "no name server responded (127.0.0.1:1"),
        ({"columns": "boddy"},
         "'boddy' in the option 'columns' is not a column. Did you mean 'body'?"),
        ({"filter__sql": "delay > 'x'"}, "The SQL92 expression does not compile at character 9"),
        ({"startingOffsets": '{"nobody": {"0": 1}}'},
         "the option 'startingOffsets' names nobody:0"),
        ({"startingOffsets": '{"nobody": 1}'}, "must be earliest, latest or JSON"),
        ({"maxOffsetsPerTrigger": "5"}, "'maxOffsetsPerTrigger' is not supported for a batch read"),
    ],
)  # fmt: skip
def test_a_mistake_stands_in_the_first_line_of_the_exception(
    read: Read, options: dict[str, str], first_line: str
) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark's own classes differ by version
        read(**options).count()
    assert first_line in str(caught.value).splitlines()[0]


def test_a_missing_option_is_named(spark: Any) -> None:
    with pytest.raises(Exception, match="the option 'topic' is missing"):
        spark.read.format("rocketmq").option("nameServers", "127.0.0.1:1").load().count()


def test_several_topics_by_list_and_by_pattern(
    spark: Any, name_server: str, topic: str, publish: Publish, admin: Admin, producer: Producer
) -> None:
    publish(0, 10)
    admin.create_topic(f"{topic}-more", queues=1)
    producer.send(Message(f"{topic}-more", b"body-77"))
    for name, value in (
        ("topics", f"{topic},{topic}-more"),
        ("topicsPattern", rf"{topic}(-more)?"),
    ):
        reader = spark.read.format("rocketmq").option("nameServers", name_server)
        frame = reader.option(name, value).load()
        assert numbers(frame) == [*range(10), 77]
        assert numbers(frame.where(f"topic = '{topic}-more'")) == [77]


def test_bodies_are_json_and_a_malformed_one_says_why(
    read: Read, producer: Producer, topic: str
) -> None:
    bodies = [b'{"n": 1, "legs": [{"to": "JFK"}]}', b"\xff", b'{"n": "x"}', b"{}"]
    producer.send_batch([Message(topic, body) for body in bodies])
    options = {"bodyFormat": "json", "bodySchema": "n int, legs array<struct<to:string>>"}
    rows = read(columns="body", **options).collect()
    good = [row.body for row in rows if row._error is None]
    assert sorted(body.n or 0 for body in good) == [0, 1]
    assert next(body for body in good if body.n).legs[0].to == "JFK"
    reasons = sorted(row._error for row in rows if row._error)
    assert reasons == [
        "not UTF-8: invalid start byte at byte 0", 'not of the schema: body.n is "x", not int',
    ]  # fmt: skip
    assert read(bodyFormat="utf-8").where("body like '{%'").count() == 3
    with pytest.raises(Exception, match=r"the body at offset \d+ of .* is not"):
        read(badBody="fail", **options).collect()


def test_types_are_inferred(read: Read, publish: Publish) -> None:
    publish(0, 40)
    frame = read(columns="queue_offset,prop:*", inferMessages="6")
    assert frame.dtypes == [
        ("queue_offset", "bigint"), ("delay", "int"), ("number", "int"), ("origin", "string"),
    ]  # fmt: skip
    assert frame.where("number < 5 and origin = 'JFK'").count() == 2


@pytest.mark.parametrize("selectors", [True, False])
def test_a_key_is_looked_up_in_the_index(
    read_where: Read, publish: Publish, selectors: bool
) -> None:
    publish(0, 100)
    options = {"columns": "body,keys,tags", "pushFilters": str(selectors)}
    one = read_where("keys = 'k33 all'", **options)
    assert numbers(one) == [33]
    wanted = "keys in ('k33 all', 'k34 all') and tags = 'A'"
    assert numbers(read_where(wanted, **options)) == [33]
    assert numbers(read_where("keys = 'k33'", **options)) == []
    assert ("EqualTo(keys, 'k33 all')" in pushdown(one).broker) == selectors


def test_a_plan_says_what_the_broker_decides(read_where: Read, publish: Publish) -> None:
    publish(0, 10)
    condition = "tags = 'A' and length(origin) > 2 and store_time > '2020-01-01' and delay < 5"
    found = pushdown(read_where(condition, columns=COLUMNS))
    assert {"EqualTo(tags, 'A')", "LessThan(delay, 5)"} <= set(found.broker)
    (left,) = found.spark
    assert "length(origin" in left
    assert "store_time" in left, "it only shortens the read"
    assert "tags" not in left


def test_a_plan_says_which_options_filter(read_where: Read, read: Read, publish: Publish) -> None:
    publish(0, 10)
    options = {"columns": COLUMNS, "FILTER.SQL": "delay > 5", "filter.tags": "A"}
    listed = ("filter.tags='A'", "filter.sql='delay > 5'")
    assert pushdown(read(**options)) == (listed, ())
    found = pushdown(read_where("tags = 'A'", **options))
    assert found.broker == (*listed, "IsNotNull(tags)", "EqualTo(tags, 'A')")
    assert pushdown(read(**options), with_options=False) == ((), ())


def test_times_and_json_bodies_go_through_the_option(
    read_where: Read, producer: Producer, topic: str
) -> None:
    producer.send(Message(topic, b'{"n": 1}', tag="A"))
    options = {"bodyFormat": "json", "bodySchema": "n int", "columns": "tags,store_time,body"}
    for since, count in (("2020-01-01 00:00:00.000001", 1), ("2100-01-01", 0)):
        frame = read_where(f"store_time >= '{since}' and body.n = 1 and tags = 'A'", **options)
        assert frame.count() == count
