"""Pipeline files: the options of a valid file, and the first problem of an invalid one."""

from pathlib import Path
from typing import Any

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.file import Pipeline, check_pipeline, load_pipeline, parse_pipeline

RIGHT = """\
name: late
cluster: {nameServers: "127.0.0.1:9876"}
source:
  topic: flights
  filter.sql: dep_delay > 60
  columns: [queue_offset, "prop:origin"]
  startingOffsets: {broker-a: {"0": 120}}
transform: |
  select origin, count(*) as n
  from source group by origin
sinks:
  - {kind: topic, topic: report, value: to_json(struct(*)), delivery: exactly-once}
  - {kind: parquet, path: out/late, partition_by: origin}
  - {kind: table, url: "sqlite:///late.db", table: late, key: [origin]}
"""
STREAM = RIGHT.replace(
    "name: late\n", "name: late\nmode: streaming\ntrigger: 10s\ncheckpoint: ck\n"
)
READY = """\
use: trace
cluster: {nameServers: "127.0.0.1:9876"}
with: {output: out/trace}
"""


def parsed(text: str, **environment: str) -> Pipeline:
    pipeline, problems = parse_pipeline(text, "p.yaml", environment)
    assert pipeline is not None, problems
    return pipeline


def first_line(text: str, **environment: str) -> str:
    """Return the text of the first problem."""
    pipeline, problems = parse_pipeline(text, "p.yaml", environment)
    assert pipeline is None
    return problems[0].describe("p.yaml")


def test_a_valid_file_becomes_the_options_of_source_and_sinks() -> None:
    pipeline = parsed(RIGHT)
    assert pipeline.source is not None
    assert dict(pipeline.source.options) == {
        "nameServers": "127.0.0.1:9876",
        "topic": "flights",
        "filter.sql": "dep_delay > 60",
        "columns": "queue_offset,prop:origin",
        "startingOffsets": '{"broker-a":{"0":120}}',
    }
    assert [sink.name for sink in pipeline.sinks] == ["topic-report", "parquet", "table-late"]
    topic, parquet, table = pipeline.sinks
    assert topic.options["delivery"] == "exactly-once"
    assert topic.fields == {"value": "to_json(struct(*))"}
    assert parquet.fields["partition_by"] == ["origin"]
    assert (table.fields["key"], table.fields["batch_rows"]) == (["origin"], 1_000)
    assert (pipeline.mode, pipeline.transform_line) == ("batch", 9)


def test_bad_rows_is_an_option_of_the_sink() -> None:
    text = RIGHT.replace("delivery: exactly-once", "badRows: BAD")
    topic = parsed(text.replace("BAD", '"topic:report-bad"')).sinks[0]
    assert topic.options["badRows"] == "topic:report-bad"
    assert "it must be fail, skip or topic:NAME" in first_line(text.replace("BAD", "drop"))


@pytest.mark.parametrize(
    ("text", "seconds"), [("available-now", None), ("10s", 10.0), ("500ms", 0.5), ("5m", 300.0)]
)
def test_a_trigger_is_a_duration_or_available_now(text: str, seconds: float | None) -> None:
    pipeline = parsed(STREAM.replace("10s", text))
    assert (pipeline.trigger_s, pipeline.is_streaming) == (seconds, True)
    assert pipeline.checkpoint_of(pipeline.sinks[0]) == "ck/topic-report"


BAD: list[tuple[str, str, str]] = [
    ("no YAML", "name: [a",
     "p.yaml:1: the file is not valid YAML: expected ',' or ']', but got '<stream end>'."),
    ("no mapping", "- a",
     "p.yaml:1: a pipeline must be a mapping. Begin with name:, source: and sinks:."),
    ("unknown key", "sink: []\n" + RIGHT,
     "p.yaml:1: sink: there is no such key. Did you mean 'sinks'?"),
    ("key twice", RIGHT + "name: other\n",
     "p.yaml:15: name: the key is repeated. Line 1 has it already; keep one."),
    ("option twice by an alias", RIGHT.replace("filter.sql:", "Topic: x\n  filter.sql:"),
     "p.yaml:5: source.Topic: this is the option 'topic' again."
     " Line 4 sets topic already; keep one."),
    ("unknown option", RIGHT.replace("filter.sql", "filter.sq"),
     "p.yaml:5: source.filter.sq: a source has no such key. Did you mean 'filter.sql'?"),
    ("option of another use", RIGHT.replace("filter.sql: dep_delay >", "maxOffsetsPerTrigger:"),
     "p.yaml:5: source.maxOffsetsPerTrigger: this is not supported for a batch read."
     " It is for: stream read."),
    ("value that does not parse", RIGHT.replace("filter.sql: dep_delay > 60", "batchBytes: 5"),
     "p.yaml:5: source.batchBytes: invalid value '5':"
     " it must be a whole number from 65,536 to 8,388,608."),
    ("SQL92 that does not compile", RIGHT.replace("> 60", ">"),
     "p.yaml:5: source.filter.sql: at character 12: Unexpected end of expression."
     " Add a number or the name of a property after >, as in dep_delay > 3."),
    ("SQL92 with a tail that is ignored", RIGHT.replace("> 60", "> 60 ) x"),
     "p.yaml:5: source.filter.sql: at character 16: RocketMQ ignores everything from here on: no"
     " parenthesis is open here. Remove the parenthesis, or open one."),
    ("no topic", RIGHT.replace("  topic: flights\n", ""),
     "p.yaml:3: source: the option 'topic' is missing."),
    ("a column that is none", RIGHT.replace("prop:origin", "prop:origin:strin"),
     "p.yaml:6: source.columns: 'strin' in 'prop:origin:strin' is not a type of a property."
     " Use one of string, int, bigint, double, boolean, auto."),
    ("no field of a ready one", READY.replace("output", "outptu"),
     "p.yaml:3: with: the ready pipeline 'trace' needs the key 'output'."
     " Directory of the results; existing ones are replaced."),
    ("no name server", RIGHT.replace('cluster: {nameServers: "127.0.0.1:9876"}\n', ""),
     "p.yaml:2: source: the option 'nameServers' is missing."),
    ("half of the keys", RIGHT.replace('9876"}', '9876", accessKey: me}'),
     "p.yaml:2: cluster: the option 'secretKey' is missing. accessKey is given; it needs both."),
    ("a topic option in the cluster", RIGHT.replace('9876"}', '9876", topic: me}'),
     "p.yaml:2: cluster.topic: this option is not supported in a cluster."
     " Put it into source: or a sink."),
    ("variable that is not set", RIGHT.replace("late.db", "${HOME_OF_DB}/late.db"),
     "p.yaml:14: sinks[2].url: the variable HOME_OF_DB is not set."
     " Set it, as in: HOME_OF_DB=… sluice pipeline run …"),
    ("a transform of nothing", RIGHT.replace("from source", "from flights"),
     "p.yaml:8: transform: the query does not read the view 'source'. Write select … from source."),
    ("unknown sink", RIGHT.replace("kind: parquet", "kind: parket"),
     "p.yaml:13: sinks[1].kind: invalid value 'parket'. It can be topic or parquet or table."),
    ("no key of a table", RIGHT.replace(", key: [origin]", ""),
     "p.yaml:14: sinks[2]: a table sink needs the key 'key'."
     " Columns that identify a row: a row with the same key is replaced."),
    ("no URL of a database", RIGHT.replace("sqlite:///late.db", "late.db"),
     "p.yaml:14: sinks[2].url: this is not the URL of a database."
     " Write postgresql://user@host/name or sqlite:///file.db."),
    ("two sinks of one name", RIGHT + "  - {kind: parquet, path: out/b}\n",
     "p.yaml:15: sinks[3]: two sinks have the name 'parquet'."
     " Give one of them name: OTHER; the other begins in line 13."),
    ("a stream without checkpoint", STREAM.replace("checkpoint: ck\n", ""),
     "p.yaml:2: mode: mode: streaming needs the key 'checkpoint'."
     " Write checkpoint: DIR, where the stream stores its progress."),
    ("a batch with a trigger", STREAM.replace("mode: streaming\n", ""),
     "p.yaml:2: trigger: this requires mode: streaming. A batch reads once."),
    ("a trigger that is no time", STREAM.replace("10s", "often"),
     "p.yaml:3: trigger: invalid value 'often'. Write available-now, or a time such as 10s or 5m."),
    ("a name for the epoch of a stream", STREAM.replace("exactly-once", "exactly-once, queryId: x"),
     "p.yaml:15: sinks[0].queryId: this is not supported with mode: streaming."
     " The stream's checkpoint contains its id."),
    ("a name without epochs", RIGHT.replace("delivery: exactly-once", "queryId: x"),
     "p.yaml:12: sinks[0].queryId: this is not supported with delivery: at-least-once."
     " Write delivery: exactly-once."),
    ("a store that is a stream", STREAM.replace("topic: flights", "topic: flights\n  kind: store"),
     "p.yaml:6: source: a store source does not support streams. Write mode: batch."),
    ("a store without a path", RIGHT.replace("topic: flights", "topic: flights\n  kind: store"),
     "p.yaml:3: source: the option 'path' is missing."),
    ("unknown ready pipeline", READY.replace("trace", "trase"),
     "p.yaml:1: use: there is no ready pipeline 'trase'. Did you mean 'trace'?"),
    ("a ready one with a source", READY + "source: {topic: a}\n",
     "p.yaml:4: source: this is not supported with use:. Configure a ready pipeline in with:."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"), [row[1:] for row in BAD], ids=[row[0] for row in BAD]
)
def test_a_problem_has_a_line_a_key_and_a_fix(text: str, expected: str) -> None:
    assert first_line(text) == expected


def test_all_problems_are_found_in_one_reading() -> None:
    text = RIGHT.replace("filter.sql", "filter.sq").replace("parquet", "parket")
    text = text.replace("key: [origin]", "keys: [origin]")
    _, problems = parse_pipeline(text, "p.yaml", {})
    assert [one.line for one in problems] == [5, 13, 14, 14]


def test_an_odd_filter_is_a_warning() -> None:
    pipeline = parsed(RIGHT.replace("dep_delay > 60", "dep_delay > 60 and origin contains ''"))
    assert [(one.line, one.is_error) for one in pipeline.warnings] == [(5, False)]


def test_secrets_are_masked() -> None:
    text = RIGHT.replace('9876"}', '9876", accessKey: me, secretKey: "${SECRET}"}')
    text = text.replace("sqlite:///late.db", "postgresql://u:${PG_PASSWORD}@h/d")
    pipeline = parsed(text, SECRET="hunter2", PG_PASSWORD="swordfish")
    assert pipeline.cluster["secretKey"] == "hunter2"
    told = pipeline.secrets.mask("with hunter2 and swordfish")
    assert told == "with ${SECRET} and ${PG_PASSWORD}"
    wrong = text.replace("${SECRET}", "").replace("table: late", "table: [swordfish]")
    _, problems = parse_pipeline(wrong, "p.yaml", {"PG_PASSWORD": "swordfish"})
    assert problems
    assert not any("swordfish" in one.describe("") for one in problems)


def test_variables_are_replaced_anywhere_and_a_doubled_dollar_is_plain() -> None:
    text = RIGHT.replace("topic: flights", 'topic: "${ENV}-$${x}"')
    source = parsed(text, ENV="prod").source
    assert source is not None
    assert source.options["topic"] == "prod-${x}"


def test_load_raises_with_a_line_for_each_problem(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(RIGHT.replace("filter.sql", "filter.sq").replace("parquet", "parket"))
    with pytest.raises(ConfigurationError) as caught:
        load_pipeline(str(path))
    assert [line.partition(": ")[0] for line in str(caught.value).splitlines()] == [
        f"{path}:5", f"{path}:13",
    ]  # fmt: skip


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        check_pipeline(str(tmp_path / "no.yaml"))


@pytest.mark.parametrize(
    "junk", ["", "&a [*a]", "a: &x {b: *x}", "? [1]\n: 2", "\t", "name: !!int x"]
)
def test_invalid_yaml_is_a_problem_and_no_exception(junk: str) -> None:
    found: tuple[Any, Any] = parse_pipeline(junk, "p.yaml", {})
    assert found[0] is None
    assert found[1]
