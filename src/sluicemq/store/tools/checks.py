"""Collect the findings of `sluice store verify`, and check files, checkpoint and documents.

A finding has one of three severities:

    error     messages are lost, unreadable, or found at the wrong position
    warning   something is wrong, but no message is lost, or the next start of a broker repairs it
    note      worth knowing, and in order

The settings of the broker are not known. Therefore the sizes of files are compared with each other:
a broker does not start if a file has another size than its settings say (spec/store.md §1).

`index_check` checks the index files, `verify` the log and the queues, `timers` the timer files.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.files import read_text
from sluicemq.files.identity import is_last_text, read_identity
from sluicemq.model.system_names import SCHEDULE_TOPIC
from sluicemq.store.directory import CHECKPOINT_BYTES, SLOTS, Checkpoint, parse_slots
from sluicemq.store.segments import is_segment_name
from sluicemq.store.tools.layout import (
    FileSequence,
    QueueKey,
    StoreLayout,
    file_size,
    find_usual_file_bytes,
    read_file,
)
from sluicemq.wire.fastjson import loads

ERROR: Final = "error"
WARNING: Final = "warning"
NOTE: Final = "note"
LISTED_PER_KIND_MAX: Final = 100


class Finding(NamedTuple):
    """One thing that verify has found.

    `severity` is ERROR, WARNING or NOTE. `kind` is a code for scripts, such as "body-crc". `place`
    is a file, a position of the log, or an offset of a queue. `text` says what is wrong there.
    """

    severity: str
    kind: str
    place: str
    text: str


class Findings:
    """The findings of one run of verify.

    All findings are counted in `by_kind`, by severity and kind. Only the first
    `listed_per_kind_max` of each are listed in `listed`, so that a badly damaged store does not
    fill the memory.
    """

    def __init__(self, listed_per_kind_max: int = LISTED_PER_KIND_MAX) -> None:
        """Begin without findings."""
        self.listed: list[Finding] = []
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self._listed_per_kind_max = listed_per_kind_max

    def add(self, severity: str, kind: str, place: str, text: str) -> None:
        """Count a finding, and list it unless the list has enough of its severity and kind."""
        self.by_kind[severity, kind] += 1
        if self.by_kind[severity, kind] <= self._listed_per_kind_max:
            self.listed.append(Finding(severity, kind, place, text))

    def count_unlisted(self, severity: str, kind: str, count: int) -> None:
        """Count `count` findings without listing them."""
        self.by_kind[severity, kind] += count

    def total(self, severity: str) -> int:
        """Return the number of findings with a severity, over all kinds."""
        total = 0
        for (counted_severity, _), count in self.by_kind.items():
            if counted_severity == severity:
                total += count
        return total

    @property
    def is_clean(self) -> bool:
        """Whether there are neither errors nor warnings. There may be notes."""
        return not self.total(ERROR) and not self.total(WARNING)

    @property
    def unlisted_by_kind(self) -> dict[str, int]:
        """The number of findings that are counted and not listed, by kind."""
        unlisted: dict[str, int] = {}
        for (_, kind), count in self.by_kind.items():
            if count > self._listed_per_kind_max:
                unlisted[kind] = count - self._listed_per_kind_max
        return unlisted


JSON_DOCUMENTS: Final = ("transactionMetrics", "timermetrics")
"""Documents in config/ that contain JSON although their names do not end with `.json`."""
_LONG_BYTES: Final = 8
_SLOT_BYTES: Final = 1024


def check_files(layout: StoreLayout, findings: Findings) -> None:
    """Check the sizes and names of all files of the commit log and the queues.

    Each problem is added to `findings`.
    """
    for directory in layout.log_paths:
        for name in layout.files.names(directory):
            path = f"{directory}/{name}"
            if is_segment_name(name) and not file_size(layout.files, path):
                findings.add(
                    NOTE,
                    "empty-file",
                    layout.shorten_path(path),
                    "the file is empty: a crash interrupted its creation",
                )
    _check_sizes(layout, findings, "commitlog", [layout.log], reports_gaps=False)
    for directory_name, queues in (
        ("consumequeue", layout.queues),
        ("batchconsumequeue", layout.batch_queues),
        ("consumequeue_ext", layout.extensions),
    ):
        _check_sizes(layout, findings, directory_name, queues.values(), reports_gaps=True)


def _check_sizes(
    layout: StoreLayout,
    findings: Findings,
    directory_name: str,
    sequences: Iterable[FileSequence],
    *,
    reports_gaps: bool,
) -> None:
    """Check that files of one type have the same size, and follow each other without overlap.

    `directory_name` is for the texts of the findings. If `reports_gaps`, a missing file is a
    finding too. For the commit log it is not, because `LogWalk` reports it.
    """
    all_sequences = list(sequences)
    usual_bytes = find_usual_file_bytes(all_sequences)
    for sequence in all_sequences:
        previous_end = None
        for segment in sequence.segments:
            name = layout.shorten_path(segment.path)
            if segment.size != usual_bytes:
                text = (
                    f"the file has {segment.size} bytes, but files of {directory_name} have"
                    f" {usual_bytes}: no broker starts"
                )
                findings.add(ERROR, "file-size", name, text)
            if segment.base % usual_bytes:
                text = (
                    "the name of the file is not a multiple of the size of files of its kind,"
                    f" {usual_bytes}"
                )
                findings.add(ERROR, "file-name", name, text)
            if reports_gaps and previous_end is not None and segment.base > previous_end:
                text = f"the file {previous_end:020d} before it is missing"
                findings.add(ERROR, "missing-file", name, text)
            if previous_end is not None and segment.base < previous_end:
                findings.add(ERROR, "file-name", name, "the file begins inside the file before it")
            previous_end = segment.end


def check_checkpoint(
    layout: StoreLayout, findings: Findings, log_end: int, last_time_ms: int
) -> None:
    """Check that the checkpoint does not claim more than the commit log contains.

    `log_end` is the position at which the log is continued, and `last_time_ms` the latest store
    time of its records (0 if it has none).
    """
    content = read_file(layout.files, layout.checkpoint_path)
    if content is None:
        findings.add(
            NOTE,
            "checkpoint",
            "checkpoint",
            "there is no checkpoint: the next start scans more of the log",
        )
        return
    if len(content) != CHECKPOINT_BYTES:
        findings.add(
            WARNING,
            "checkpoint",
            "checkpoint",
            f"the file has {len(content)} bytes instead of {CHECKPOINT_BYTES}",
        )
        content = content.ljust(CHECKPOINT_BYTES, b"\0")

    _check_checkpoint_times(findings, content, last_time_ms)
    _check_checkpoint_slots(layout, findings, content, log_end)


def _check_checkpoint_times(findings: Findings, content: bytes, last_time_ms: int) -> None:
    """Check the three times at the beginning of the checkpoint file.

    `content` contains the bytes of the file. A time is wrong if it is negative, or later than
    `last_time_ms`, the latest store time in the log. If that is 0 (unknown), only negative times
    are wrong.
    """
    for index, name in enumerate(("log", "queue", "index")):
        time_bytes = content[index * _LONG_BYTES : (index + 1) * _LONG_BYTES]
        time_ms = int.from_bytes(time_bytes, "big", signed=True)
        is_too_late = last_time_ms != 0 and time_ms > last_time_ms
        if time_ms < 0 or is_too_late:
            findings.add(
                WARNING,
                "checkpoint",
                "checkpoint",
                f"its {name} time {time_ms} is later than the last record ({last_time_ms}):"
                " the next start may trust too much",
            )


def _check_checkpoint_slots(
    layout: StoreLayout, findings: Findings, content: bytes, log_end: int
) -> None:
    """Check the two checkpoints that SluiceMQ writes into RocketMQ's checkpoint file.

    They are written alternately, each into its own part of the file with a checksum. The newest
    valid one counts: the log must begin and end where it says. `content` contains the bytes of the
    file, and `log_end` is the end of the log.
    """
    checkpoints = parse_slots(content)
    _report_torn_slots(findings, content, checkpoints)
    valid_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint is not None]
    if not valid_checkpoints:
        return

    newest = max(valid_checkpoints)
    if 0 <= newest.log_start < layout.log.start:
        findings.add(
            ERROR,
            "missing-file",
            "commitlog",
            f"the log begins at {layout.log.start}, but no retention has deleted the files before"
            f" it: at the last checkpoint the log began at {newest.log_start}",
        )
    if newest.log_offset > log_end:
        findings.add(
            ERROR,
            "checkpoint",
            "checkpoint",
            f"it says that the log was durable up to {newest.log_offset}, but the log ends at"
            f" {log_end}",
        )


def _report_torn_slots(
    findings: Findings, content: bytes, checkpoints: Sequence[Checkpoint | None]
) -> None:
    """Add a finding for each of the two slots that is not empty, but has no valid checkpoint.

    `checkpoints` has the checkpoint of each slot, or None if it is not valid.
    """
    if any(checkpoint is not None for checkpoint in checkpoints):
        damage = "the checkpoint there is torn; the other one is used"
    else:
        damage = "the checkpoints there are damaged: the next start scans more of the log"
    for slot_start, checkpoint in zip(SLOTS, checkpoints, strict=True):
        is_written = any(content[slot_start : slot_start + _SLOT_BYTES])
        if is_written and checkpoint is None:
            findings.add(WARNING, "checkpoint", f"checkpoint byte {slot_start}", damage)


def read_document(layout: StoreLayout, path: str) -> Any:
    """Read a JSON document; return None if it does not exist or is empty.

    Raises ProtocolError if the file is not JSON.
    """
    content = read_file(layout.files, path)
    if content is None or not content.strip():
        return None
    return loads(content)


def read_topic_names(layout: StoreLayout) -> set[str] | None:
    """Return the names of all topics in topics.json.

    If that cannot be read, use its backup topics.json.bak. Return None if neither can be read.
    """
    for suffix in ("", ".bak"):
        try:
            document = read_document(layout, f"{layout.root}/config/topics.json{suffix}")
        except ProtocolError:
            continue
        if isinstance(document, dict) and isinstance(document.get("topicConfigTable"), dict):
            return set(document["topicConfigTable"])
    return None


def check_documents(
    layout: StoreLayout, findings: Findings, queue_ends: Mapping[QueueKey, int]
) -> None:
    """Check the JSON documents in config/, and add the problems to `findings`.

    Each document must be readable. If SluiceMQ has noted the text of a document in an identity
    file, the document must still have that text. A committed offset must not be greater than the
    end of its queue. `queue_ends` maps (topic, queue id) to the end of the queue.
    """
    for path in layout.document_paths():
        name = layout.shorten_path(path)
        if not name.endswith((".json", *JSON_DOCUMENTS)):
            continue
        try:
            document = read_document(layout, path)
        except ProtocolError as error:
            _add_unreadable_document(layout, findings, path, error)
            continue

        _check_document_identity(layout, findings, path)
        for reader, queue, offset in _iter_committed_offsets(name, document):
            end = queue_ends.get(queue)
            if end is not None and isinstance(offset, int) and offset > end:
                text = f"{reader} is at {offset} of {queue[0]}/{queue[1]}, which ends at {end}"
                findings.add(WARNING, "progress", name, text)


def _add_unreadable_document(
    layout: StoreLayout, findings: Findings, path: str, error: ProtocolError
) -> None:
    """Add a finding for a document that is not JSON.

    The finding is a warning if the backup PATH.bak can be read, else an error.
    """
    try:
        has_backup = read_document(layout, f"{path}.bak") is not None
    except ProtocolError:
        has_backup = False
    backup = "its .bak can be read" if has_backup else "there is no .bak that can be read"
    severity = WARNING if has_backup else ERROR
    findings.add(severity, "document", layout.shorten_path(path), f"{error.fact}; {backup}")


def _check_document_identity(layout: StoreLayout, findings: Findings, path: str) -> None:
    """Add a note if a document is not the text that SluiceMQ wrote last.

    The identity file of the document identifies that text. Without one, there is no note.
    """
    identity = read_identity(layout.files, path)
    if identity is not None and not is_last_text(identity, read_text(layout.files, path)):
        # The first of these causes is common, and harmless.
        text = (
            "the file is not what SluiceMQ wrote last: RocketMQ has used the store since, or"
            " this is an older copy, or the file of another store"
        )
        findings.add(NOTE, "document", layout.shorten_path(path), text)


def _iter_committed_offsets(name: str, document: Any) -> Iterator[tuple[str, QueueKey, Any]]:
    """Yield (reader, queue, offset) for each committed offset in a document.

    `reader` is a text such as "group G" or "delay level 3", and `queue` is a (topic, queue id).
    Only consumerOffset.json and delayOffset.json contain offsets; for another `name`, nothing is
    yielded.
    """
    table = document.get("offsetTable") if isinstance(document, dict) else None
    if not isinstance(table, dict):
        return
    if name.endswith("/consumerOffset.json"):
        for key, offsets in table.items():
            topic, _, group = str(key).partition("@")
            if not isinstance(offsets, dict):
                continue
            for queue_id, offset in offsets.items():
                yield f"group {group}", (topic, int(queue_id)), offset
    elif name.endswith("/delayOffset.json"):
        for level, offset in table.items():
            yield f"delay level {level}", (SCHEDULE_TOPIC, int(level) - 1), offset
