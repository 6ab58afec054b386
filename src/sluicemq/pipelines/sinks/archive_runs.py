"""The committed runs of an archive, and the files in its directory that record them.

    PATH/_sluice/runs/00000007.json       the commit of run 7: its ranges, its files, and the
                                          offsets where run 8 begins
    PATH/_sluice/staging/00000007-…/      rows of a run that is not committed, or was just now

A run writes its rows to a staging directory, where readers do not look. The run file is the commit:
before it exists, the rows do not count. After that, their files are moved to their final paths, by
the run itself or by the next one. `pipelines.archive` has the runs.
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql.types import DateType, StringType, StructField, StructType

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue
from sluicemq.pipelines.ready import Folder
from sluicemq.pipelines.sinks.verify import COLUMNS
from sluicemq.spark.schema import BASE_TYPES, ERROR_NAME, EXTRA_TYPES
from sluicemq.spark.sources.checkpoints import Offsets, iterate_table, offsets_to_table
from sluicemq.spark.sources.offsets import QueueRange

VERSION: Final = 1
"""The version of the format of run files."""
RUNS: Final = "_sluice/runs"
STAGING: Final = "_sluice/staging"
_TYPES: Final = BASE_TYPES | EXTRA_TYPES | {ERROR_NAME: StringType()}
SCHEMA: Final = StructType(
    [StructField(name, _TYPES[name]) for name in COLUMNS if name != "topic"]
    + [StructField("topic", BASE_TYPES["topic"]), StructField("day", DateType())]
)
"""The schema of an archive. The last two columns are directories."""


@dataclass(frozen=True, slots=True)
class ArchiveRun:
    """One committed run of an archive.

    `ranges` are the offsets that it archived, and `gaps` those that were deleted at the brokers
    before it could. For every queue that was ever archived, `first_offsets` has the offset where
    the archive begins, and `next_offsets` the one where the next run begins. `time` is in ISO 8601.
    `files` are relative to the archive, and to `staging` until they have been moved.
    """

    number: int
    time: str
    ranges: tuple[QueueRange, ...]
    first_offsets: Offsets
    next_offsets: Offsets
    rows: int
    is_verified: bool
    files: tuple[str, ...]
    staging: str
    gaps: tuple[QueueRange, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the run as the JSON object of its run file.

        {"version": 1, "run": 7, "time": "…", "rows": 120, "verified": true,
         "first": {TOPIC: {BROKER: {QUEUE: OFFSET}}}, "next": {…},
         "ranges": [[TOPIC, BROKER, QUEUE, START, END], …], "gaps": […],
         "staging": "_sluice/staging/…", "files": ["topic=…/day=…/part-….parquet", …]}
        """
        return {
            "version": VERSION,
            "run": self.number,
            "time": self.time,
            "rows": self.rows,
            "verified": self.is_verified,
            "first": offsets_to_table(self.first_offsets, by_topic=True),
            "next": offsets_to_table(self.next_offsets, by_topic=True),
            "ranges": _ranges_to_lists(self.ranges),
            "gaps": _ranges_to_lists(self.gaps),
            "staging": self.staging,
            "files": list(self.files),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any], path: str) -> "ArchiveRun":
        """Return the run that the JSON object of a run file describes.

        `document` has the keys that `to_json` writes, and `path` is the archive's path, for the
        texts of errors. Raises ConfigurationError if the version is not `VERSION`, or if a key is
        missing or has a wrong type.
        """
        try:
            if document["version"] != VERSION:
                raise ConfigurationError(
                    f"the archive {path} has version {document['version']!r}, not {VERSION}.",
                    fix="Use the SluiceMQ that wrote it, or a newer one.",
                )
            return cls(
                number=document["run"],
                time=document["time"],
                ranges=_lists_to_ranges(document["ranges"]),
                first_offsets=dict(iterate_table(document["first"])),
                next_offsets=dict(iterate_table(document["next"])),
                rows=document["rows"],
                is_verified=document["verified"],
                files=tuple(document["files"]),
                staging=document["staging"],
                gaps=_lists_to_ranges(document["gaps"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the last run of the archive {path} cannot be read: {error!r}.",
                fix="Restore the file, or use another path.",
            ) from None


def _ranges_to_lists(ranges: Iterable[QueueRange]) -> list[list[Any]]:
    """Return each range of offsets as a JSON list [topic, broker, queue id, start, end]."""
    return [[*queue_range.queue, queue_range.start, queue_range.end] for queue_range in ranges]


def _lists_to_ranges(lists: Iterable[Iterable[Any]]) -> tuple[QueueRange, ...]:
    """Return the ranges of offsets in lists of (topic, broker, queue id, start, end).

    Raises TypeError or ValueError for a list of another form.
    """
    return tuple(
        QueueRange(MessageQueue(topic, broker, queue_id), start, end)
        for topic, broker, queue_id, start, end in lists
    )


@dataclass(slots=True)
class ArchiveRuns:
    """The committed runs of an archive.

    `last` is the last of them, None if there is none; the others are not held in memory. The
    constructor reads it, and raises ConfigurationError if its file cannot be read.
    """

    folder: Folder
    last: ArchiveRun | None = field(init=False)

    def __post_init__(self) -> None:
        """Read the newest run file, and store its run as `last`; None if there is none."""
        run_files = [name for name in self.folder.list_names(RUNS) if name.endswith(".json")]
        self.last = None
        if run_files and not run_files[-1].startswith("."):
            document = self.folder.read_json(f"{RUNS}/{run_files[-1]}")
            self.last = ArchiveRun.from_json(document or {}, self.folder.path)

    @property
    def number(self) -> int:
        """The number of the last run, or 0 if there is none."""
        return 0 if self.last is None else self.last.number

    @property
    def first_offsets(self) -> Offsets:
        """The first archived offset of each queue. Empty before the first run."""
        return {} if self.last is None else self.last.first_offsets

    @property
    def next_offsets(self) -> Offsets:
        """The offset of each queue where the next run begins. Empty before the first run."""
        return {} if self.last is None else self.last.next_offsets

    def recover(self) -> None:
        """Complete the last run, and remove directories of staged files that are not needed.

        Files of the last run that are still staged are moved to their final paths. Then the staging
        directories of this run and of earlier ones are removed. Directories of the next run stay,
        because it may be in progress.
        """
        self.finish_last_run()
        for name in self.folder.list_names(STAGING):
            run_number = name.partition("-")[0]
            if run_number.isdigit() and int(run_number) <= self.number:
                self.folder.remove(f"{STAGING}/{name}")

    def finish_last_run(self) -> None:
        """Move the files of the last run that are still staged to their final paths.

        Does nothing if they have been moved. Readers may call this at any time.
        """
        if self.last is not None and self.folder.exists(self.last.staging):
            for name in self.last.files:
                self.folder.move(f"{self.last.staging}/{name}", name)

    def new_staging(self) -> tuple[int, str]:
        """Return the number of a new run, and an unused name for its staging directory."""
        run_number = self.number + 1
        return run_number, f"{STAGING}/{run_number:08d}-{uuid.uuid4().hex[:8]}"

    def commit(self, run: ArchiveRun) -> None:
        """Write the run file of `run`, which makes its rows part of the archive.

        Then its files are moved to their final paths, and `run` becomes the last run. If another
        run with this number was committed before, the staged rows are removed and
        ConfigurationError is raised.
        """
        if not self.folder.publish(f"{RUNS}/{run.number:08d}.json", run.to_json()):
            self.folder.remove(run.staging)
            raise ConfigurationError(
                f"another run has archived to {self.folder.path} in the meantime; the rows of this"
                " run are discarded, and nothing is lost.",
                fix="Run one archive pipeline at a time for each archive.",
            )
        self.last = run
        self.recover()
