"""Making the file of a sealed block in another process than the one that owns the store.

    asked    a line of JSON (`Job`), then the units of each slot
    told     a line of JSON: the file's name and size, or what went wrong

The process maps the log's files by itself and needs nothing but where the records lie.
`broker.columns_helper` runs it.
"""

import json
from collections.abc import Sequence
from typing import IO, Any, Final, NamedTuple, Protocol

import numpy as np

from sluicemq.files import SYSTEM_FILES
from sluicemq.record.columns_build import LogPiece
from sluicemq.store.columns_seal import Sealing
from sluicemq.store.columns_source import Source, files_of
from sluicemq.store.segments import NAME_DIGITS, map_file

LOG_FILES_KEPT: Final = 4


class Job(NamedTuple):
    """One file to be made: of which queue, where to, and the slots' first offsets and sizes."""

    directory: str
    topic: str
    queue_id: int
    columns_max: int
    disk_percent: int
    log_directory: str
    log_file_bytes: int
    starts: Sequence[int]
    sizes: Sequence[int]


class Sealer(Protocol):
    """Somebody who does jobs elsewhere."""

    def seal(self, job: Job, units: Sequence[bytes]) -> tuple[str, int]:
        """The file's name and size. Any thread. Raises OSError; then there is no file."""
        ...

    def rest(self, now_s: float) -> None:
        """Asked now and then, between jobs: it may give up what it does not need."""
        ...

    def close(self) -> None: ...


def serve(asked: IO[bytes], told: IO[bytes]) -> None:
    """Do one job after the other until there is none."""
    log_files = _LogFiles()
    for line in asked:
        job = Job(**json.loads(line))
        units = [asked.read(size) for size in job.sizes]
        try:
            answer = _done(job, units, log_files)
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        told.write(json.dumps(answer).encode() + b"\n")
        told.flush()


def _done(job: Job, units: Sequence[bytes], log_files: "_LogFiles") -> dict[str, Any]:
    sources = [
        Source(start, part, log_files.pieces(job, part))
        for start, part in zip(job.starts, units, strict=True)
    ]
    sealing = Sealing(
        SYSTEM_FILES, job.directory, (job.topic, job.queue_id), job.columns_max, job.disk_percent
    )
    sealing.run([source.block(job.columns_max) for source in sources], sources)
    return {"name": sealing.name, "size": sealing.size_bytes}


class _LogFiles:
    """Mapped files of the log, the last few."""

    def __init__(self) -> None:
        self._known: dict[str, memoryview] = {}

    def pieces(self, job: Job, units: bytes) -> list[LogPiece]:
        """Those that the units point into, as far as they are there."""
        found = []
        for number in files_of(units, job.log_file_bytes):
            base = number * job.log_file_bytes
            data = self._mapped(f"{job.log_directory}/{base:0{NAME_DIGITS}d}")
            if data is not None:
                found.append(LogPiece(base, np.frombuffer(data, np.uint8)))
        return found

    def _mapped(self, path: str) -> memoryview | None:
        known = self._known.get(path)
        if known is None:
            try:
                file = SYSTEM_FILES.open(path)
            except FileNotFoundError:
                return None
            try:
                known = map_file(file, file.size())
            finally:
                file.close()
            if len(self._known) >= LOG_FILES_KEPT:
                del self._known[next(iter(self._known))]
            self._known[path] = known
        return known
