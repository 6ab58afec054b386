"""`sluice sql` and its tables: names to topics, narrow reads, predicates at the broker, errors."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from sluicemq.cli.spark import credential_options, parse_moment, to_json_value, write_frame
from sluicemq.client.core.names import Credentials
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import Message
from sluicemq.pipelines.tables import Tables, narrow_columns
from sluicemq.spark.errors import summarize_spark_error
from sluicemq.spark.options import parse_options
from sluicemq.spark.references import UsedColumns
from sluicemq.spark.report import pushdown

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def tables(spark: Any, name_server: str, admin: Any) -> Tables:
    return Tables(spark, {"nameServers": name_server, "reportPushdown": "false"}, admin.topics)


def test_a_topic_is_counted_by_a_property_with_the_tag_at_the_broker(
    tables: Tables, topic: str, publish: Callable[..., None]
) -> None:
    publish(0, 30)
    frame = tables.query(
        f"select properties['origin'], count(*) from `{topic}` where tags = 'A' "
        "and properties['origin'] = 'EWR' group by 1"
    )
    assert [tuple(row) for row in frame.collect()] == [("EWR", 10)]
    found = pushdown(frame)
    assert "EqualTo(tags, 'A')" in found.broker
    assert "EqualTo(properties['origin'], 'EWR')" in found.broker
    assert not found.spark


def test_everything_is_there_where_the_query_wants_everything(
    tables: Tables, topic: str, publish: Callable[..., None]
) -> None:
    publish(0, 4)
    row = tables.query(f"select * from topics.`{topic}` where keys = 'k3 all'").collect()[0]
    assert row.body == b"body-3"
    assert row.properties["number"] == "3"
    both = f"select body from (select * from `{topic}` union all select * from `{topic}`)"
    assert sorted(one.body for one in tables.query(both).collect())[:2] == [b"body-0"] * 2
    left = [one.name for one in tables.spark.catalog.listTables()]
    assert not [name for name in left if topic in name], left


def test_names_keep_their_alias_wherever_they_stand(
    tables: Tables, topic: str, publish: Callable[..., None]
) -> None:
    publish(0, 6)
    for query, count in (
        (f"select `{topic}`.tags from `{topic}` tablesample (100 percent)", 6),
        (f"select f.tags from `{topic}` tablesample (3 rows) f", 3),
        (f"select f.tags from `{topic}` as f, topics.`{topic}` g where f.keys = g.keys", 6),
        (f"select `{topic}`.tags from `{topic}` left join `{topic}` f using (keys)", 6),
        (f"select 1 from (table `{topic}`) where exists (select * from `{topic}`)", 6),
    ):
        assert tables.query(query).count() == count, query


def test_what_is_wrong_is_said_with_a_cure(tables: Tables, topic: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Did you mean {topic!r}"):
        tables.query(f"select * from `{topic}x`")
    with pytest.raises(ConfigurationError, match="%DLQ%nobody"):
        tables.query("select * from dead_letters.nobody")
    with pytest.raises(ConfigurationError, match="only queries"):
        tables.query("create table x (a int)")


def test_topics_that_differ_in_case_alone_are_two(
    tables: Tables, topic: str, publish: Callable[..., None], admin: Any, producer: Any
) -> None:
    publish(0, 2)
    other = topic.upper()
    admin.create_topic(other, queues=1)
    producer.send(Message(other, b"other"))
    query = f"""select count(a.queue_id), count(b.queue_id)
        from `{topic}` a full join topics.`{other}` b on a.body = b.body"""
    assert tuple(tables.query(query).collect()[0]) == (2, 1)
    query = f"select `{other}`.body from `{other}` where tags is null"
    assert tables.query(query).collect()[0].body == b"other"


def test_traces_and_dead_letters_are_tables(tables: Tables, admin: Any) -> None:
    if "%DLQ%spark-tables" not in admin.topics():
        admin.create_topic("%DLQ%spark-tables", queues=1)
    assert tables.query("select * from dead_letters.`spark-tables`").collect() == []
    assert tables.query("select count(*) from traces").collect()[0][0] >= 0


def test_after_a_mistake_pyspark_says_its_own_error(spark: Any, tables: Tables, topic: str) -> None:
    """Its logger is of a class of its own, which looking for names must not spoil."""
    tables.query(f"select count(*) from `{topic}`")
    with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql("select * from nothing_at_all")


def test_parquet_is_written_by_spark_and_credentials_are_options(spark: Any, tmp_path: Any) -> None:
    path = str(tmp_path / "rows")
    assert write_frame(spark.range(3), "parquet", path) == 3
    assert spark.read.parquet(path).count() == 3
    keys = credential_options(("me", "secret"))
    options = parse_options({"nameServers": "127.0.0.1:1", "topic": "t", **keys})
    assert options.credentials == Credentials("me", "secret")


def test_an_archive_is_a_directory_of_parquet(
    spark: Any, tables: Tables, tmp_path: Any, topic: str
) -> None:
    path = str(tmp_path / "old")
    spark.range(3).selectExpr("id", f"'{topic}' as topic").write.parquet(path)
    tables.archives = {"": path, "old": path}
    for name in ("old", "archive.old", "archive", f"archive.`{topic}`"):
        assert tables.query(f"select count(*) from {name}").collect()[0][0] == 3


def test_json_and_csv_come_row_by_row(spark: Any, tmp_path: Any) -> None:
    frame = spark.createDataFrame(
        [("é", b"\xff", {"a": 1})], "t string, b binary, m map<string,int>"
    )
    assert write_frame(frame, "json", str(tmp_path / "rows.json")) == 1
    assert json.loads((tmp_path / "rows.json").read_text()) == {"t": "é", "b": "ff", "m": {"a": 1}}
    write_frame(frame, "csv", str(tmp_path / "rows.csv"))
    assert (tmp_path / "rows.csv").read_text() == 't,b,m\né,ff,"{""a"":1}"\n'


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_query_that_fails_prints_no_rows(
    spark: Any, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    text = "int(case when id = 77 then '120.50' else '3' end) as pieces"
    frame = spark.range(0, 100, 1, 4).selectExpr(text)
    with pytest.raises(Exception, match="getResult") as caught:
        write_frame(frame, form, None)
    assert capsys.readouterr().out == ""
    summary = summarize_spark_error(caught.value)
    assert summary.startswith("[CAST_INVALID_INPUT] The value '120.50'")
    assert "\tat " not in summary


def test_a_narrow_read_has_every_column_still() -> None:
    columns, shown = narrow_columns(UsedColumns(frozenset({"tags"}), frozenset({"origin"})))
    assert columns == "tags,prop:`origin`:string as __property_0"
    assert "map('origin', __property_0) AS properties" in shown
    assert "CAST(NULL AS binary) AS body" in shown
    assert narrow_columns(UsedColumns(frozenset()))[0] == "queue_id"


def test_times_and_values_are_plain() -> None:
    assert parse_moment("1700000000000", "--since") == 1_700_000_000_000
    assert to_json_value({"a": [b"x", None, True]}) == {"a": ["x", None, True]}
    with pytest.raises(ConfigurationError, match="--since 'soon'"):
        parse_moment("soon", "--since")


def test_wrong_usage_is_said_before_spark_starts() -> None:
    from sluicemq.cli import main

    done = CliRunner().invoke(main, ["sql", "select 1", "--format", "parquet"])
    assert done.exit_code == 2
    assert "--output" in done.output
