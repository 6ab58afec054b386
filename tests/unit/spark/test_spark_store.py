"""A store directory read without Spark: planning, options, filters, and what is in the way."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.config import StoreConfig
from sluicemq.errors import (
    ConfigurationError,
    FilterSyntaxError,
    OffsetOutOfRangeError,
    StoreDamagedError,
    StoreError,
)
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.model.ids import Host, encode_host, tag_code
from sluicemq.record.codec import encode_properties
from sluicemq.spark import source
from sluicemq.spark.options import OPTIONS, STORE_ONLY_OPTIONS, STORE_OPTIONS, render_options_table
from sluicemq.spark.schema import BASE_TYPES
from sluicemq.spark.source import StoreSource
from sluicemq.spark.sources.reader import StorePartition
from sluicemq.store.store import Store
from thorough import seeds

HOST = encode_host(Host("127.0.0.1", 10911))
TIME_MS = 1_790_000_000_000
LOG_BYTES, QUEUE_BYTES = 16_384, 2_000
TAGS = ("AaAa", "BBBB", "C", None)
"""The first two have one hash."""


def properties_of(number: int) -> dict[str, str]:
    """The user's properties of message `number`; a delay that is a word, absent or a number."""
    delay = {0: {}, 1: {"delay": "late"}}.get(number % 7, {"delay": str(number % 90 - 30)})
    return {"origin": ("EWR", "JFK", "LGA")[number % 3]} | delay


def stored_properties(number: int) -> dict[str, str]:
    tag = TAGS[number % len(TAGS)]
    named = {} if tag is None else {"TAGS": tag}
    return {"UNIQ_KEY": f"u{number}"} | named | properties_of(number)


def config(root: Path, **changes: Any) -> StoreConfig:
    return StoreConfig(
        root=str(root), commit_log_file_bytes=LOG_BYTES, consume_queue_file_bytes=QUEUE_BYTES,
        **changes,
    )  # fmt: skip


def append(store: Store, number: int, topic: str = "flights") -> None:
    tag = TAGS[number % len(TAGS)]
    store.writer.append(
        topic, number % 2, b"body-%d" % number,
        encode_properties(stored_properties(number)),
        0 if tag is None else tag_code(tag), 0, 0, TIME_MS + number, HOST, HOST,
    )  # fmt: skip


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 messages in the two queues of `flights`, 10 in `delays`; stopped in order."""
    root = tmp_path_factory.mktemp("filled") / "store"
    store = Store.open(config(root))
    for number in range(600):
        append(store, number)
        if number < 10:
            append(store, number, "delays")
    store.commit()
    store.close()
    return root


@pytest.fixture
def copy(filled: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(filled, tmp_path / "copy"))


def reader(root: Path, **options: str) -> Any:
    given = {"path": str(root), "topic": "flights"}
    given |= {name.replace("__", "."): value for name, value in options.items()}
    if "topics" in given or "topicsPattern" in given:
        del given["topic"]
    found = StoreSource(given)
    return found.reader(found.schema())


def read(root: Path, **options: str) -> list[dict[str, Any]]:
    made = reader(root, **options)
    rows: list[dict[str, Any]] = []
    for part in made.partitions():
        for batch in made.read(part):
            rows += batch.to_pylist()
    return rows


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return sorted(int(row["body"][5:]) for row in rows)


def test_every_message_is_read_with_every_column(filled: Path) -> None:
    rows = read(filled)
    assert numbers(rows) == list(range(600))
    assert list(rows[0]) == list(BASE_TYPES)
    row = next(row for row in rows if row["body"] == b"body-8")
    assert (row["topic"], row["broker"], row["queue_id"], row["queue_offset"]) == (
        "flights", "store", 0, 4,
    )  # fmt: skip
    assert (row["msg_id"], row["tags"], dict(row["properties"])) == ("u8", "AaAa", properties_of(8))


def test_partitions_are_ranges_of_queues(filled: Path) -> None:
    parts = reader(filled, maxRecordsPerPartition="100").partitions()
    assert all(isinstance(part, StorePartition) and not part.tail for part in parts)
    ranges = [(part.queue.queue_id, part.start, part.end) for part in parts]
    assert ranges == [(queue, at, at + 100) for queue in (0, 1) for at in (0, 100, 200)]
    assert len(reader(filled, minPartitions="8").partitions()) == 8
    assert numbers(read(filled, maxRecordsPerPartition="7")) == list(range(600))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": '{"b": {"0": 10, "1": "latest"}}', "brokerName": "b"},
         range(20, 600, 2)),
        ({"endingOffsets": '{"store": {"0": 5, "1": 0}}'}, range(0, 10, 2)),
        ({"startingTimestamp": "4000000000000"}, ()),
        ({"startingTimestamp": "0"}, range(600)),
        ({"endingTimestamp": "0"}, ()),
        ({"topics": "delays,flights"}, sorted([*range(600), *range(10)])),
        ({"topicsPattern": "de.*"}, range(10)),
    ],
)  # fmt: skip
def test_ranges_and_topics_are_chosen(filled: Path, options: dict[str, str], expected: Any) -> None:
    assert numbers(read(filled, **options)) == list(expected)


def test_columns_properties_and_bodies_are_as_in_the_other_source(filled: Path) -> None:
    rows = read(filled, columns="prop:delay:auto,prop:origin as o,body", bodyFormat="utf-8")
    assert rows[0] == {"delay": None, "o": "EWR", "body": "body-0", "_error": None}
    assert {type(row["delay"]) for row in rows} == {str, type(None)}, "late is no number"
    (row,) = read(filled, columns="prop:delay:int,body", filter__sql="delay = 59", topic="flights")[
        :1
    ]
    assert row["delay"] == 59


def test_tags_are_compared_exactly(filled: Path) -> None:
    assert numbers(read(filled, filter__tags="AaAa")) == list(range(0, 600, 4))
    assert numbers(read(filled, filter__tags="BBBB||C")) == [
        number for number in range(600) if number % 4 in (1, 2)
    ]


def test_predicates_of_spark_are_decided_by_the_reader(filled: Path) -> None:
    predicates = json.dumps([
        {"is": "EqualTo", "column": "tags", "value": "C"},
        {"is": "GreaterThan", "column": "delay", "value": 50},
        {"is": "EqualTo", "column": "queue_id", "value": 0},
    ])  # fmt: skip
    rows = read(filled, predicates=predicates, columns="body,tags,queue_id,prop:delay:int")
    assert numbers(rows) == matching("TAGS = 'C' AND delay > 50", range(0, 600, 2))


def matching(sql: str, some: Any = range(600)) -> list[int]:
    """Brute force: the scalar evaluator on every message."""
    matches = compile_sql92(sql).matches
    return [number for number in some if matches(stored_properties(number))]


CONDITIONS = st.one_of(
    st.builds("delay {} {}".format, st.sampled_from(["<", "<=", ">", ">=", "=", "<>"]),
              st.integers(-40, 70)),
    st.builds("origin {} ('{}')".format, st.sampled_from(("IN", "NOT IN")),
              st.sampled_from(("EWR", "JFK", "none"))),
    st.sampled_from(("delay IS NULL", "TAGS IS NOT NULL", "delay = 'late'", "UNIQ_KEY = 'u7'",
                     "TAGS = 'AaAa'", "origin CONTAINS 'W'")),
)  # fmt: skip
SELECTORS = st.recursive(
    CONDITIONS,
    lambda part: st.one_of(
        st.builds("({} {} {})".format, part, st.sampled_from(("AND", "OR")), part),
        st.builds("NOT ({})".format, part),
    ),
    max_leaves=4,
)


@settings(max_examples=seeds(20), deadline=None)
@given(SELECTORS, st.integers(0, 300), st.integers(0, 300), st.sampled_from((None, "60")))
def test_selectors_choose_what_brute_force_chooses(
    filled: Path, sql: str, low: int, high: int, records_max: str | None
) -> None:
    low, high = sorted((low, high))
    ends = {"store": {"0": high, "1": high}}
    options = {"startingOffsets": json.dumps({"store": {"0": low, "1": low}})}
    options |= {} if records_max is None else {"maxRecordsPerPartition": records_max}
    rows = read(filled, filter__sql=sql, endingOffsets=json.dumps(ends), **options)
    assert numbers(rows) == matching(sql, range(2 * low, 2 * high))


def test_selectors_use_columns_and_so_do_stores_without_them(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = "delay > 20 AND origin = 'JFK'"
    expected = matching(sql)
    assert numbers(read(filled, filter__sql=sql)) == expected
    monkeypatch.setattr("sluicemq.store.read.LogReader.column_scan", lambda *_: None)
    assert numbers(read(filled, filter__sql=sql)) == expected


# --- a store that is in use, or was


def test_a_filter_that_loses_rows_by_mistake_is_told_at_planning(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader(filled, filter__sql="delay > -999").partitions()
    (line,) = (one for one in caplog.messages if "filter.sql" in one)
    assert "values of delay cannot be read as Integer ('late')" in line
    assert "'delay > -999'" in line


def test_running_store_is_read_up_to_now_and_not_disturbed(tmp_path: Path) -> None:
    store = Store.open(config(tmp_path / "store"))
    for number in range(40):
        append(store, number)
    store.commit()
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    made = reader(tmp_path / "store")
    parts = made.partitions()  # nothing is in the queue files yet
    assert [len(part.tail) for part in parts] == [400, 400]
    for number in range(40, 80):
        append(store, number)
    store.commit()
    rows = [row for part in parts for batch in made.read(part) for row in batch.to_pylist()]
    assert numbers(rows) == list(range(40)), "the snapshot is of the moment of planning"
    assert before.keys() == dict.fromkeys(tmp_path.rglob("*"), 0).keys()
    store.close()
    assert numbers(read(tmp_path / "store")) == list(range(80))


def test_copy_whose_log_ends_before_its_queues_ends_there(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a running store, the log copied first."""
    (copy / "abort").write_text("1")
    log = sorted((copy / "commitlog").iterdir())
    data = bytearray(log[-1].read_bytes())
    log[-1].write_bytes(bytes(len(data)))
    found = numbers(read(copy))
    assert found == list(range(len(found))), "a whole beginning"
    assert 400 < len(found) < 600


def test_a_store_that_is_damaged_is_refused_or_said(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopped in order, it has all of its messages, or something is wrong."""
    min((copy / "consumequeue/flights/1").iterdir()).unlink()
    with pytest.raises(StoreDamagedError, match=r"store repair.*failOnDataLoss=false"):
        read(copy)
    found = numbers(read(copy, failOnDataLoss="false"))
    assert found
    assert "shorter than the checkpoint says" in caplog.text


def test_retention_after_planning_is_loss(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    strict, lenient = reader(copy), reader(copy, failOnDataLoss="false")
    parts = strict.partitions()
    min((copy / "commitlog").iterdir()).unlink()
    with pytest.raises(OffsetOutOfRangeError, match="failOnDataLoss=false"):
        list(strict.read(parts[0]))
    rows = [row for part in parts for batch in lenient.read(part) for row in batch.to_pylist()]
    found = numbers(rows)
    assert found == list(range(found[0], 600))
    assert found[0] > 0
    assert "offsets of copy:0 of 'flights' are gone" in caplog.text


def spoil(root: Path, number: int, at: int, data: bytes) -> None:
    """Writes over byte `at` of the record of message `number`."""
    queue = root / "consumequeue/flights" / str(number % 2)
    position = (number // 2) * 20
    units = (queue / f"{position - position % QUEUE_BYTES:020d}").read_bytes()
    place, _, _ = struct.unpack_from(">qiq", units, position % QUEUE_BYTES)
    path = root / "commitlog" / f"{place - place % LOG_BYTES:020d}"
    file = bytearray(path.read_bytes())
    file[place % LOG_BYTES + at : place % LOG_BYTES + at + len(data)] = data
    path.write_bytes(file)


def test_damaged_record_is_named_or_passed_over(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(copy, 101, 4, b"\1\2\3\4")
    with pytest.raises(
        StoreDamagedError, match=r"at offset 50 of queue 1 of 'flights'.*magic.*failOnDataLoss"
    ):
        read(copy)
    rows = read(copy, failOnDataLoss="false")
    assert numbers(rows) == [number for number in range(600) if number != 101]
    assert "1 damaged messages of copy:1" in caplog.text
    assert len(read(copy, filter__tags="C")) == 150, "what does not match is not looked at"


def test_lengths_that_disagree_are_damage(copy: Path) -> None:
    spoil(copy, 100, 84, struct.pack(">i", 1000))
    with pytest.raises(StoreDamagedError, match=r"queue 0 of 'flights'.*queue offset 50.*damaged"):
        read(copy)
    rows = read(copy, failOnDataLoss="false", checkBodies="true")
    assert numbers(rows) == [number for number in range(600) if number != 100]


def test_bodies_are_checked_when_asked_for(copy: Path) -> None:
    spoil(copy, 100, 88, b"X")
    assert len(read(copy)) == 600
    with pytest.raises(StoreDamagedError, match="the body's CRC"):
        read(copy, checkBodies="true")


# --- what is refused


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"topic": "flight"}, ConfigurationError, r"no topic 'flight'. Did you mean 'flights'\?"),
        ({"topic": "zzz"}, ConfigurationError, "The topics are: delays, flights"),
        ({"topicsPattern": "x.*"}, ConfigurationError, "no topic matches"),
        ({"startingOffsets": '{"store": {"0": 900, "1": 0}}'}, ConfigurationError,
         "asks for offset 900 of store:0, which holds 0 to 300"),
        ({"startingOffsets": '{"other": {"0": 9, "1": 0}}'}, ConfigurationError, "names other:0"),
        ({"endingOffsets": "earliest"}, ConfigurationError, "nothing would be read"),
        ({"filter__sql": "delay >"}, FilterSyntaxError, "delay >"),
        ({"nameServers": "localhost:9876"}, ConfigurationError, "unknown option 'nameServers'"),
        ({"filter__tag": "A"}, ConfigurationError, r"Did you mean 'filter.tags'\?"),
        ({"columns": "bdy"}, ConfigurationError, "Did you mean 'body'"),
        ({"commitLogPath": "/a,/b"}, ConfigurationError, "copy its files into one"),
        ({"path": "hdfs://cluster/store"}, ConfigurationError, "mount it"),
        ({"path": "/nowhere/at/all"}, StoreError, "does not exist"),
    ],
)  # fmt: skip
def test_wrong_options_say_what_is_right(
    filled: Path, options: dict[str, str], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        read(filled, **options)


def test_directories_that_are_no_store_say_what_they_are(filled: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, str]] = [
        (tmp_path, "contains no commit log"),
        (filled / "commitlog", "the files of one part of a store"),
        (filled.parent, f"Specify {filled}, which is one"),
    ]
    for path, text in cases:
        with pytest.raises(StoreError, match=text):
            read(path)


def test_formats_that_are_not_read_are_named(copy: Path) -> None:
    (copy / "batchconsumequeue/batched/0").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"'batched'.*BatchCQ"):
        read(copy, topic="batched")
    (copy / "consumequeue_r").mkdir()
    (copy / "consumequeue_r/CURRENT").write_text("x")
    with pytest.raises(StoreError, match="RocksDB"):
        read(copy)


def test_log_and_queues_may_lie_elsewhere(copy: Path, tmp_path: Path) -> None:
    for name in ("commitlog", "consumequeue"):
        (copy / name).rename(tmp_path / name)
    with pytest.raises(StoreError, match="the option commitLogPath"):
        read(copy)
    places = {
        "commitLogPath": f"{tmp_path}/commitlog",
        "consumeQueuePath": f"{tmp_path}/consumequeue",
    }
    assert len(read(copy, **places)) == 600
    assert len(read(Path(f"file://{copy}"), **places)) == 600


def test_declared_topic_without_messages_is_empty(copy: Path) -> None:
    (copy / "config").mkdir(exist_ok=True)
    (copy / "config/topics.json").write_text('{"topicConfigTable": {"quiet": {}}}')
    assert read(copy, topic="quiet") == []


@pytest.mark.parametrize("method", ["writer", "streamWriter"])
def test_only_batch_reads_are_offered(filled: Path, method: str) -> None:
    found = StoreSource({"path": str(filled), "topic": "flights"})
    call: Callable[..., Any] = getattr(found, method)
    with pytest.raises(ConfigurationError, match="rocketmq_store is read-only"):
        call(found.schema(), False)
    stream = found.streamReader(found.schema())
    with pytest.raises(ConfigurationError, match=r'readStream.format\("rocketmq"\)'):
        stream.initialOffset()


def test_options_mean_the_same_as_in_the_other_source() -> None:
    others = {option.name: option for option in OPTIONS}
    shared = [option for option in STORE_OPTIONS if option.name in others]
    assert len(shared) == 23
    for option in shared:
        assert (option.parse, option.default) == (
            others[option.name].parse, others[option.name].default,
        )  # fmt: skip
    assert source.RocketSource.name() != StoreSource.name()


def test_page_has_the_options_as_they_are_declared() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "spark-stores.md").read_text()
    section = page.partition("\n## Options\n")[2].partition("\n## ")[0]
    assert render_options_table(STORE_ONLY_OPTIONS) in section
    missing = [option.name for option in STORE_OPTIONS if f"`{option.name}`" not in section]
    assert not missing


@pytest.fixture(autouse=True)
def no_trace() -> Iterator[None]:
    """`errors_without_traceback` sets a variable of the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HIDE_TRACEBACK", "0")
        yield
