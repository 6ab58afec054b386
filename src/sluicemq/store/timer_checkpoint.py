"""`config/timercheck`: how far the timer has come (spec/store.md §11).

A file of 4096 bytes of which RocketMQ uses 56: seven big-endian longs. The wheel and the timer log
agree up to `log_end`; all messages of the timer's queue below `queue_offset` are in them;
everything due before `read_ms` is delivered. Written in place: one sector arrives whole or not at
all.

Behind them stands what only we have: `done_ms`, up to which the second of `read_ms` is delivered,
with the time and the counter of the seven longs. When these are others, RocketMQ has written since.
"""

import struct
from typing import Final, NamedTuple

from sluicemq.files import Files

CHECKPOINT_BYTES: Final = 4096
_FIELDS: Final = struct.Struct(">7q")
_OWN: Final = struct.Struct(">8s3q")
_OWN_MAGIC: Final = b"sluice1\0"


class TimerCheckpoint(NamedTuple):
    """The seven numbers. `read_ms` is the first second that may hold undelivered messages."""

    read_ms: int = 0
    log_end: int = 0
    queue_offset: int = 0
    master_queue_offset: int = 0
    state_version: int = 0
    time_ms: int = 0
    counter: int = 0
    done_ms: int = 0

    def encode(self) -> bytes:
        """RocketMQ's 56 bytes, as request 60 answers them too."""
        return _FIELDS.pack(*self[:7])

    def encode_own(self) -> bytes:
        """What stands behind them."""
        return _OWN.pack(_OWN_MAGIC, self.time_ms, self.counter, self.done_ms)


def read_timer_checkpoint(files: Files, path: str) -> TimerCheckpoint | None:
    """None when there is none, or nothing in it."""
    if not files.exists(path):
        return None
    file = files.open(path)
    try:
        data = file.pread(_FIELDS.size + _OWN.size, 0)
    finally:
        file.close()
    if len(data) < _FIELDS.size + _OWN.size or not any(data):
        return None
    fields = _FIELDS.unpack_from(data)
    magic, time_ms, counter, done_ms = _OWN.unpack_from(data, _FIELDS.size)
    is_ours = magic == _OWN_MAGIC and (time_ms, counter) == fields[5:7]
    return TimerCheckpoint._make((*fields, done_ms if is_ours else 0))


def write_timer_checkpoint(files: Files, path: str, checkpoint: TimerCheckpoint) -> None:
    """Durable on return. Raises OSError."""
    directory = path.rpartition("/")[0]
    files.make_directory(directory)
    file = files.open(path, create=True)
    try:
        is_new = file.size() < CHECKPOINT_BYTES
        if is_new:
            file.truncate(CHECKPOINT_BYTES)
        file.pwrite(checkpoint.encode() + checkpoint.encode_own(), 0)
        file.sync()
    finally:
        file.close()
    if is_new:
        files.sync_directory(directory)
