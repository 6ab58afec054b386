"""What `verify` collects, and its checks of files: names, sizes, checkpoint, documents in config/.

    error     messages are lost, unreadable, or found at the wrong place
    warning   not as it should be; no message is lost, or the next start of a broker mends it
    note      worth knowing, and in order

Of each kind as many findings are kept as anyone will read; all are counted. Sizes are compared with
each other, since the settings are not known: a broker does not start when a file has another size
than it expects (spec/store.md §1).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.store.directory import CHECKPOINT_BYTES, SLOTS, slots_of
from sluicemq.store.log import SCHEDULE_TOPIC
from sluicemq.store.segments import is_segment_name
from sluicemq.store.tools.layout import (
    QueueKey,
    Series,
    StoreLayout,
    file_size,
    read_file,
    usual_size,
)
from sluicemq.wire.fastjson import loads

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"
KEPT_PER_KIND: Final = 100


class Finding(NamedTuple):
    """`place` is a file, a position in the log, or a queue; `kind` is a word for scripts."""

    severity: str
    kind: str
    place: str
    text: str


class Findings:
    """A collection that stays small."""

    def __init__(self, kept_per_kind: int = KEPT_PER_KIND) -> None:
        self.kept: list[Finding] = []
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self._kept_per_kind = kept_per_kind

    def add(self, severity: str, kind: str, place: str, text: str) -> None:
        self.by_kind[severity, kind] += 1
        if self.by_kind[severity, kind] <= self._kept_per_kind:
            self.kept.append(Finding(severity, kind, place, text))

    def has_room(self, severity: str, kind: str) -> bool:
        """False when one more would only be counted: no need to make up its text."""
        return self.by_kind[severity, kind] < self._kept_per_kind

    def count(self, severity: str, kind: str, number: int) -> None:
        """So many more that are not described."""
        self.by_kind[severity, kind] += number

    def total(self, severity: str) -> int:
        return sum(count for (of, _), count in self.by_kind.items() if of == severity)

    @property
    def is_clean(self) -> bool:
        """Notes do not count."""
        return not self.total(ERROR) and not self.total(WARNING)

    @property
    def hidden(self) -> dict[str, int]:
        """How many of each kind are counted and not kept."""
        return {
            kind: count - self._kept_per_kind
            for (_, kind), count in self.by_kind.items()
            if count > self._kept_per_kind
        }


JSON_DOCUMENTS: Final = ("transactionMetrics", "timermetrics")
"""Documents in config/ that are JSON without saying so in their names."""
_LONG_BYTES: Final = 8
_SLOT_BYTES: Final = 1024


def check_series(layout: StoreLayout, findings: Findings) -> None:
    """Sizes and names of all files of log and queues."""
    for directory in layout.log_paths:
        for name in layout.files.names(directory):
            path = f"{directory}/{name}"
            if is_segment_name(name) and not file_size(layout.files, path):
                findings.add(
                    NOTE, "empty-file", layout.name_of(path),
                    "it has no bytes: the trace of a crash at its creation",
                )  # fmt: skip
    _check_sizes(layout, findings, "commitlog", [layout.log], gaps=False)
    for kind, queues in (
        ("consumequeue", layout.queues),
        ("batchconsumequeue", layout.batch_queues),
        ("consumequeue_ext", layout.extensions),
    ):
        _check_sizes(layout, findings, kind, queues.values(), gaps=True)


def _check_sizes(
    layout: StoreLayout, findings: Findings, kind: str, all_series: Iterable[Series], *, gaps: bool
) -> None:
    """`gaps`: say where files are missing (of the log the walk says it)."""
    every = list(all_series)
    usual = usual_size(every)
    for series in every:
        end = None
        for item in series.items:
            name = layout.name_of(item.path)
            if item.size != usual:
                findings.add(
                    ERROR, "file-size", name,
                    f"it has {item.size} bytes, files of {kind} have {usual}: no broker starts",
                )  # fmt: skip
            if item.base % usual:
                findings.add(
                    ERROR, "file-name", name,
                    f"its name is no multiple of the size of its kind, {usual}",
                )  # fmt: skip
            if gaps and end is not None and item.base > end:
                findings.add(
                    ERROR, "missing-file", name, f"the file {end:020d} before it is missing"
                )
            if end is not None and item.base < end:
                findings.add(ERROR, "file-name", name, "it begins inside the file before it")
            end = item.end


def check_checkpoint(
    layout: StoreLayout, findings: Findings, log_end: int, last_time_ms: int
) -> None:
    """`log_end` is where the log goes on, `last_time_ms` the latest store time in it (0: none)."""
    data = read_file(layout.files, layout.checkpoint_path)
    if data is None:
        findings.add(NOTE, "checkpoint", "checkpoint", "there is none: the next start scans more")
        return
    if len(data) != CHECKPOINT_BYTES:
        findings.add(
            WARNING, "checkpoint", "checkpoint",
            f"it has {len(data)} bytes instead of {CHECKPOINT_BYTES}",
        )  # fmt: skip
        data = data.ljust(CHECKPOINT_BYTES, b"\0")
    for number, name in enumerate(("log", "queue", "index")):
        time_ms = int.from_bytes(data[number * _LONG_BYTES :][:_LONG_BYTES], "big", signed=True)
        if time_ms < 0 or (last_time_ms and time_ms > last_time_ms):
            findings.add(
                WARNING, "checkpoint", "checkpoint",
                f"its {name} time {time_ms} is later than the last record ({last_time_ms}):"
                " the next start may trust too much",
            )  # fmt: skip
    _check_marks(data, findings, layout.log.start, log_end)


def _check_marks(data: bytes, findings: Findings, log_start: int, log_end: int) -> None:
    marks = slots_of(data)
    for at, mark in zip(SLOTS, marks, strict=True):
        if mark is None and any(data[at : at + _SLOT_BYTES]):
            findings.add(
                WARNING, "checkpoint", f"checkpoint byte {at}",
                "the mark there is torn; the other one counts" if any(marks)
                else "the marks there are damaged: the next start scans more",
            )  # fmt: skip
    mark = max((mark for mark in marks if mark is not None), default=None)
    if mark is not None and 0 <= mark.log_start < log_start:
        findings.add(
            ERROR, "missing-file", "commitlog",
            f"the log begins at {log_start}, but no retention has deleted what lies before: at the"
            f" last checkpoint it began at {mark.log_start}",
        )  # fmt: skip
    if mark is not None and mark.log_offset > log_end:
        findings.add(
            ERROR, "checkpoint", "checkpoint",
            f"it says that everything before {mark.log_offset} was safely on disk, but the log"
            f" ends at {log_end}",
        )  # fmt: skip


def read_document(layout: StoreLayout, path: str) -> Any:
    """The value of a JSON document, None when it is not there or empty. Raises ProtocolError."""
    data = read_file(layout.files, path)
    return loads(data) if data and data.strip() else None


def known_topics(layout: StoreLayout) -> set[str] | None:
    """The topics in topics.json; None when it cannot be read."""
    for edition in ("", ".bak"):
        try:
            value = read_document(layout, f"{layout.root}/config/topics.json{edition}")
        except ProtocolError:
            continue
        if isinstance(value, dict) and isinstance(value.get("topicConfigTable"), dict):
            return set(value["topicConfigTable"])
    return None


def check_documents(layout: StoreLayout, findings: Findings, ends: Mapping[QueueKey, int]) -> None:
    """Each document can be read, and progress in it does not lie behind a queue's end."""
    for path in layout.documents():
        name = layout.name_of(path)
        if not name.endswith((".json", *JSON_DOCUMENTS)):
            continue
        try:
            value = read_document(layout, path)
        except ProtocolError as error:
            try:
                has_backup = read_document(layout, f"{path}.bak") is not None
            except ProtocolError:
                has_backup = False
            backup = "its .bak can be read" if has_backup else "there is no .bak that can be read"
            severity = WARNING if has_backup else ERROR
            findings.add(severity, "document", name, f"{error.fact}; {backup}")
            continue
        for who, queue, offset in _progress(name, value):
            end = ends.get(queue)
            if end is not None and isinstance(offset, int) and offset > end:
                text = f"{who} is at {offset} of {queue[0]}/{queue[1]}, which ends at {end}"
                findings.add(WARNING, "progress", name, text)


def _progress(name: str, value: Any) -> Iterator[tuple[str, QueueKey, Any]]:
    """(who, queue, offset) of the documents that say how far somebody is."""
    table = value.get("offsetTable") if isinstance(value, dict) else None
    if not isinstance(table, dict):
        return
    if name.endswith("/consumerOffset.json"):
        for key, offsets in table.items():
            topic, _, group = str(key).partition("@")
            for queue_id, offset in offsets.items() if isinstance(offsets, dict) else ():
                yield f"group {group}", (topic, int(queue_id)), offset
    elif name.endswith("/delayOffset.json"):
        for level, offset in table.items():
            yield f"delay level {level}", (SCHEDULE_TOPIC, int(level) - 1), offset
