"""Units that the log implies and the files of the queues do not hold yet, added in memory alone.

A running broker of ours keeps new units in memory for a second (`consumequeue`), and one that was
killed never wrote them. Its next start would find them in the log behind the mark (`recovery`). So
does this for who only reads: units that directly follow what a queue has are appended to its tail
in memory; nothing else is believed and no file is touched.
"""

from collections.abc import Callable

from sluicemq.files import Files
from sluicemq.store.checkpoint import read_checkpoint
from sluicemq.store.commitlog import CommitLog
from sluicemq.store.consumequeue import UNIT, ConsumeQueues
from sluicemq.store.scan import Scanned
from sluicemq.store.walking import sweep_records

Wanted = Callable[[str, int], bool]


def add_tail(root: str, log: CommitLog, queues: ConsumeQueues, wanted: Wanted) -> None:
    """Let the wanted queues end where the log says. Nothing for a store that was stopped in order,
    and for one without a mark: RocketMQ writes its units at once."""
    files = log.segments.files
    if not files.exists(f"{root}/abort"):
        return
    start = _start(files, f"{root}/checkpoint", log)
    for found in sweep_records(log, start) if start is not None else ():
        if isinstance(found, Scanned):
            if found.is_queued:
                unit = UNIT.pack(found.position, found.size_bytes, found.tag_code())
                key = (found.topic.decode(errors="replace"), found.queue_id)
                _add(queues, key, found.queue_offset, unit, wanted)
            continue
        for group in found.groups:
            if group.is_row:
                key = (group.topic.decode(errors="replace"), group.queue_id)
                _add(queues, key, int(group.offsets[0]), group.units.tobytes(), wanted)


def _start(files: Files, path: str, log: CommitLog) -> int | None:
    """From where on units may be missing; a young store has no checkpoint yet."""
    mark = read_checkpoint(files, path).mark
    if mark is not None:
        return max(mark.log_offset, log.start)
    return None if files.exists(path) else log.start


def _add(
    queues: ConsumeQueues, key: tuple[str, int], offset: int, units: bytes, wanted: Wanted
) -> None:
    position = UNIT.unpack_from(units)[0]
    if not wanted(*key) or not queues.deleted.counts(key[0], position):
        return
    queue = queues.by_key.get(key)
    if queue is None:
        queue = queues.open(key)
        queue.reset(offset)
    queue.extend(offset, units)
