"""What an archive knows of itself: a small JSON file a run, written when its rows are all there.

    PATH/topic=T/day=D/part-….parquet     committed rows
    PATH/_sluice/runs/00000007.json       run 7 is committed: its ranges, its files, where 8 begins
    PATH/_sluice/staging/00000007-…/      rows of a run that is not committed, or just has been

A run writes its Parquet files into a staging directory, where no reader looks, and verifies them.
The run file is the commit: before it the rows do not count and the next run removes them; after it
they do, and are moved to their places, by the next run too if this one dies in between. So a
crash at any point neither loses nor doubles a row. Two runs at once: the one that is second to
commit fails, and its rows do not count.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.offsets import Offsets, QueueRange, to_table
from sluicemq.spark.pipelines.folders import Folder

VERSION: Final = 1
RUNS: Final = "_sluice/runs"
STAGING: Final = "_sluice/staging"


@dataclass(frozen=True, slots=True)
class Run:
    """One committed run. `following` says of every queue ever archived where the next begins,
    `first` where its archive begins; `files` are relative to the archive."""

    number: int
    time: str
    ranges: tuple[QueueRange, ...]
    first: Offsets
    following: Offsets
    rows: int
    verified: bool
    files: tuple[str, ...]
    staging: str
    gaps: tuple[QueueRange, ...] = ()


@dataclass(slots=True)
class Runs:
    """The runs of an archive, the last one in memory."""

    folder: Folder
    last: Run | None = field(init=False)

    def __post_init__(self) -> None:
        names = [name for name in self.folder.names(RUNS) if name.endswith(".json")]
        self.last = None
        if names and not names[-1].startswith("."):
            found = self.folder.load(f"{RUNS}/{names[-1]}")
            self.last = _run(found or {}, self.folder.path)

    @property
    def following(self) -> Offsets:
        """Where the next run begins, by queue; empty before the first."""
        return {} if self.last is None else self.last.following

    def settle(self) -> None:
        """Completes what a run that died has committed, and removes what can never be.

        What a run of the next number has staged stays: it may be at work. When that number is
        committed, by itself or by another, the rest of it goes.
        """
        self.settle_last()
        number = 0 if self.last is None else self.last.number
        for name in self.folder.names(STAGING):
            if name.partition("-")[0].isdigit() and int(name.partition("-")[0]) <= number:
                self.folder.remove(f"{STAGING}/{name}")

    def settle_last(self) -> None:
        """Completes what the last run has committed; readers may do so at any time."""
        if self.last is not None:
            self._move(self.last)

    def begin(self) -> tuple[int, str]:
        """Number and staging directory of a new run."""
        number = 1 if self.last is None else self.last.number + 1
        return number, f"{STAGING}/{number:08d}-{uuid.uuid4().hex[:8]}"

    def commit(self, run: Run) -> None:
        """From now on its rows are in the archive. Raises ConfigurationError when another run
        has committed since this one began."""
        if not self.folder.publish(f"{RUNS}/{run.number:08d}.json", _document(run)):
            self.folder.remove(run.staging)
            raise ConfigurationError(
                f"another run has archived into {self.folder.path} meanwhile; nothing of this one"
                " is kept, and nothing is lost.",
                cure="Let one run at a time write an archive.",
            )
        self.last = run
        self.settle()

    def _move(self, run: Run) -> None:
        if not self.folder.exists(run.staging):
            return
        for name in run.files:
            self.folder.move(f"{run.staging}/{name}", name)


def _document(run: Run) -> dict[str, Any]:
    return {
        "version": VERSION, "run": run.number, "time": run.time, "rows": run.rows,
        "verified": run.verified, "first": to_table(run.first, several=True),
        "next": to_table(run.following, several=True),
        "ranges": _range_list(run.ranges), "gaps": _range_list(run.gaps),
        "staging": run.staging, "files": list(run.files),
    }  # fmt: skip


def _run(found: Mapping[str, Any], path: str) -> Run:
    try:
        if found["version"] != VERSION:
            raise ConfigurationError(
                f"the archive {path} is of version {found['version']!r}, not {VERSION}.",
                cure="Use the SluiceMQ that wrote it, or a newer one.",
            )
        return Run(
            found["run"], found["time"], _ranges(found["ranges"]), offsets_of(found["first"]),
            offsets_of(found["next"]), found["rows"], found["verified"], tuple(found["files"]),
            found["staging"], _ranges(found["gaps"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the last run of the archive {path} cannot be read: {error!r}.",
            cure="Restore the file, or use another path.",
        ) from None


def offsets_of(table: Mapping[str, Any]) -> Offsets:
    """The inverse of `to_table(…, several=True)`."""
    return {
        MessageQueue(topic, broker, int(queue_id)): int(offset)
        for topic, brokers in table.items()
        for broker, queues in brokers.items()
        for queue_id, offset in queues.items()
    }


def _range_list(ranges: tuple[QueueRange, ...]) -> list[list[Any]]:
    return [[*one.queue, one.start, one.end] for one in ranges]


def _ranges(listed: list[list[Any]]) -> tuple[QueueRange, ...]:
    return tuple(
        QueueRange(MessageQueue(topic, broker, queue_id), start, end)
        for topic, broker, queue_id, start, end in listed
    )
