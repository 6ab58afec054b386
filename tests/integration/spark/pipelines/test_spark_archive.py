"""The ready pipelines `archive` and `replay`: messages are complete, none is lost or duplicated."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.errors import ConfigurationError, OffsetOutOfRangeError, StoreDamagedError
from sluicemq.pipelines.archive import archive, read_archive, replay
from sluicemq.pipelines.ready import Folder
from sluicemq.pipelines.sinks.archive_runs import ArchiveRun, ArchiveRuns
from sluicemq.pipelines.sinks.verify import COLUMNS

pytestmark = pytest.mark.timeout(300)

Publish = Callable[[int, int], None]


@pytest.fixture
def connection(name_server: str) -> dict[str, str]:
    return {"nameServers": name_server}


def quiet(line: str) -> None:
    """Ignore a line of a pipeline."""


def rows(frame: Any) -> list[tuple[Any, ...]]:
    """Every column of every message, in order."""
    found = frame.select(*COLUMNS).orderBy("topic", "queue_id", "queue_offset").collect()
    return [tuple(row) for row in found]


def bodies(frame: Any) -> Counter[bytes]:
    return Counter(bytes(row.body) for row in frame.select("body").collect())


def expected(*parts: range) -> Counter[bytes]:
    return Counter(f"body-{number}".encode() for part in parts for number in part)


def test_an_archive_contains_whole_messages_and_each_run_adds_new_ones(
    spark: Any, connection: dict[str, str], topic: str, publish: Publish, read: Any, tmp_path: Path
) -> None:
    path, said = str(tmp_path / "archive"), list[str]()
    options: dict[str, Any] = {"path": path, "topics": [topic]}
    publish(0, 60)
    task = archive.build_task(spark, connection, options)
    assert archive.plan(task) == [f"archive 60 messages of 2 queues of {topic!r}"]
    report = archive(spark, connection, **options, say=said.append)
    assert report.figures == {"rows": 60, "verified": 60}
    assert said[0].startswith("run 1: archived 60 rows of 1 topics in 2 files, verified 60 rows")
    publish(60, 30)
    report = archive(spark, connection, **options, verify="all", say=said.append)
    assert report.figures == {"rows": 30, "verified": 90}
    assert archive(spark, connection, **options, say=said.append).figures["rows"] == 0
    stored = read(columns=",".join(COLUMNS), properties="all")
    assert rows(read_archive(spark, path)) == rows(stored)
    row = read_archive(spark, path).where("keys = 'k7 all'").first()
    assert (row.properties["TAGS"], row.properties["UNIQ_KEY"]) == ("B", row.msg_id)
    assert row.born_host.startswith("127.0.0.1:")
    assert row.day == row.store_time.date()
    visible = [one.name for one in (tmp_path / "archive").iterdir() if one.name[0] not in "_."]
    assert visible == [f"topic={topic}"]


def test_a_planted_difference_is_found_and_named(
    spark: Any, connection: dict[str, str], topic: str, publish: Publish, tmp_path: Path
) -> None:
    """A body is changed, and a row removed."""
    path = str(tmp_path / "archive")
    publish(0, 40)
    archive(spark, connection, path=path, topics=[topic], say=quiet)
    (file,) = (tmp_path / "archive").glob("topic=*/day=*/part-00000-*.parquet")
    changed = spark.read.parquet(str(file)).selectExpr(
        "* except (body)", "if(queue_offset = 7, cast('planted' as binary), body) as body"
    )
    changed.where("queue_offset <> 9").coalesce(1).write.parquet(str(tmp_path / "changed"))
    (other,) = (tmp_path / "changed").glob("part-*.parquet")
    file.with_name(f".{file.name}.crc").unlink()
    other.replace(file)
    with pytest.raises(StoreDamagedError) as caught:
        archive(spark, connection, path=path, topics=[topic], verify="all", say=quiet)
    found = str(caught.value)
    assert "1 ranges of 10,000 offsets differ: 40 rows at the brokers, 39 in the archive" in found
    assert "offset 7: body differs" in found
    assert "offset 9: not in the archive" in found


@pytest.mark.parametrize("step", ["before the commit", "after the commit"])
def test_a_crash_neither_loses_nor_duplicates_a_row(
    spark: Any, connection: dict[str, str], topic: str, publish: Publish, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, step: str,
) -> None:  # fmt: skip
    path = str(tmp_path / "archive")
    publish(0, 20)
    options: dict[str, Any] = {"path": path, "topics": [topic], "say": quiet, "verify": "none"}
    archive(spark, connection, **options)
    publish(20, 20)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owner, name = (ArchiveRuns, "commit") if step.startswith("before") else (Folder, "move")
        patch.setattr(owner, name, die)
        with pytest.raises(KeyboardInterrupt):
            archive(spark, connection, **options)
    is_committed = step.startswith("after")
    kept = range(40) if is_committed else range(20)
    assert bodies(read_archive(spark, path)) == expected(kept)
    publish(40, 10)
    assert archive(spark, connection, **options).figures["rows"] == (10 if is_committed else 30)
    assert bodies(read_archive(spark, path)) == expected(range(50))
    assert list((tmp_path / "archive" / "_sluice" / "staging").iterdir()) == []


@pytest.mark.thorough
def test_messages_that_cannot_be_archived_are_reported(
    spark: Any, connection: dict[str, str], topic: str, publish: Publish, tmp_path: Path
) -> None:
    path = str(tmp_path / "archive")
    publish(0, 10)
    with pytest.raises(ConfigurationError, match=r"no option 'topic'.*Did you mean 'topics'"):
        archive(spark, connection, path=path, topic=topic)
    with pytest.raises(ConfigurationError, match="no topic is named"):
        archive(spark, connection, path=path)
    with pytest.raises(ConfigurationError, match="there is no archive at"):
        read_archive(spark, path)
    archive(spark, connection, path=path, topics=[topic], say=quiet)
    run = tmp_path / "archive" / "_sluice" / "runs" / "00000001.json"
    known = json.loads(run.read_text())

    def pretend(offset: int) -> None:
        """The last run ended at another offset of queue 0."""
        (broker,) = known["next"][topic]
        known["next"][topic][broker]["0"] = offset
        run.with_name(f".{run.name}.crc").unlink(missing_ok=True)
        run.write_text(json.dumps(known))

    pretend(99)
    with pytest.raises(ConfigurationError, match="created again, or messages were lost"):
        archive(spark, connection, path=path, topics=[topic], say=quiet)
    pretend(-3)  # offsets -3 to -1 were deleted before anybody archived them
    with pytest.raises(OffsetOutOfRangeError, match=r"3 messages were deleted.*on_gap: note"):
        archive(spark, connection, path=path, topics=[topic], say=quiet)


def test_a_replay_sends_the_selected_messages_once_even_after_a_kill(
    spark: Any, connection: dict[str, str], topic: str, publish: Publish, read: Any, tmp_path: Path
) -> None:
    """The first run stops after a step that its state does not contain, like a killed one."""
    path, target = str(tmp_path / "archive"), f"{topic}-again"
    publish(0, 60)
    archive(spark, connection, path=path, topics=[topic], say=quiet, verify="none")
    options: dict[str, Any] = {
        "path": path, "name": f"{topic}-1", "to": target, "where": "tags in ('A', 'B')",
        "ids": "same", "queues": "same", "step": 15, "say": quiet,
    }  # fmt: skip
    asked = iter([False, False, True])
    report = replay(spark, connection, **options, stopping=lambda: next(asked))
    sent = report.figures["rows"]
    assert 0 < sent < 40
    file = tmp_path / "archive" / "_sluice" / "replays" / f"{topic}-1.json"
    state = json.loads(file.read_text())
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    file.write_text(json.dumps(state | {"steps": state["steps"] - 1}))
    publish(60, 10)  # and the archive grows in between
    archive(spark, connection, path=path, topics=[topic], say=quiet, verify="none")
    replay(spark, connection, **options)
    back = read(topic=target)
    wanted = read().where("tags in ('A', 'B') and queue_offset < 30")
    names = ["msg_id", "keys", "tags", "properties", "body", "queue_id"]
    assert sorted(map(str, back.select(*names).collect())) == sorted(
        map(str, wanted.select(*names).collect())
    )
    assert replay(spark, connection, **options).figures["rows"] == 0
    with pytest.raises(ConfigurationError, match="was started with where="):
        replay(spark, connection, **options | {"where": "tags = 'A'"})


def test_of_two_concurrent_runs_the_second_to_commit_fails(spark: Any, tmp_path: Path) -> None:
    folder = Folder(spark, str(tmp_path / "archive"))
    runs = [ArchiveRuns(folder), ArchiveRuns(folder)]
    made = []
    for turn, one in enumerate(runs):
        number, staging = one.new_staging()
        (tmp_path / "archive" / staging / "day=1").mkdir(parents=True)
        (tmp_path / "archive" / staging / "day=1" / f"rows-{turn}.parquet").write_text("rows")
        files = (f"day=1/rows-{turn}.parquet",)
        made.append(ArchiveRun(number, "now", (), {}, {}, 1, False, files, staging))
    ArchiveRuns(folder).recover()  # a third that begins takes nothing away from them
    runs[1].commit(made[1])
    with pytest.raises(ConfigurationError, match="another run has archived to"):
        runs[0].commit(made[0])
    assert ArchiveRuns(folder).last == made[1]
    assert [path.name for path in (tmp_path / "archive" / "day=1").glob("*.parquet")] == [
        "rows-1.parquet"
    ]
