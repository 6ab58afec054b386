"""A store (`store.store.Store`) that is used, crashed and looked at.

The world plays the broker's loop: appends, the end of a turn, fsyncs that end when they like,
ticks, readers that are woken. After every restart everything is read and compared with the ledger:
the log by a walk of its own, each queue by reading it, the key index by asking it.
"""

import random
import struct
from collections.abc import Callable
from typing import Final

from simulation.crashes.disk import Disk
from simulation.crashes.ledger import Entry, Found, Key, Ledger
from simulation.crashes.plan import Kind, Violation
from simulation.stepped import ManualClock
from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.model.message import PREPARED, StoredMessage
from sluicemq.record.codec import decode_record, decode_records
from sluicemq.record.layout import RECORD_BYTES_MIN
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import UNIT, Unit
from sluicemq.store.store import Store, VisibleOffsets
from sluicemq.testing.files import CrashableFiles, PowerLost

ROOT: Final = "/store"
IPV4: Final = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
IPV6: Final = bytes(15) + b"\x01" + struct.pack(">i", 10911)
QUEUES: Final[tuple[Key, ...]] = (("A", 0), ("A", 1), ("B", 0), ("%RETRY%" + "C" * 140, 0))
SIZES: Final = (4, 4, 60, 60, 60, 200, 500, 900)


class StoreWorld:
    """One store on a disk of its own, and its ledger."""

    def __init__(self, rng: random.Random) -> None:
        self.config = StoreConfig(
            root=ROOT,
            commit_log_file_bytes=rng.choice((1536, 2048, 4096, 16_384)),
            consume_queue_file_bytes=rng.choice((60, 200, 2000)),
            index_slots=rng.choice((1, 20, 100)),
            index_entries=rng.choice((5, 20, 400)),
            flush_sync=rng.random() < 0.6,
            flush_thorough_interval_ms=rng.choice((500, 2000, 10_000)),
            consume_queue_flush_pages_min=rng.choice((0, 2)),
            consume_queue_flush_thorough_interval_ms=rng.choice((500, 2000, 60_000)),
            checksum_property=rng.random() < 0.2,
        )
        self.clock = ManualClock()
        self.ledger = Ledger()
        self.is_over = False
        self.serial = 0
        self.unpublished = 0
        self.disk = Disk(CrashableFiles(), self._open)
        self._open()

    @property
    def files(self) -> CrashableFiles:
        return self.disk.files

    def _open(self) -> None:
        self.files.clock = self.clock
        self.store = Store.open(self.config, files=self.files, clock=self.clock)
        self.store.on_visible = self._woken

    def take(self, kind: str, rng: random.Random) -> str:
        """One step. Whatever it does, the power may fail in it."""
        try:
            text: str = getattr(self, f"do_{kind}")(rng)
        except PowerLost as lost:
            self._restart(rng)
            text = f"interrupted at {lost}"
        except StoreDamagedError:
            raise
        except (StoreError, OSError) as error:
            if not self.disk.is_troubled:
                raise
            text = f"refused: {error}"
        return text

    def finish(self) -> None:
        """Cut the power once more and look."""
        self.files.power_fails_after = None
        self._restart(random.Random(0), power=True)

    # --- what the broker's loop does

    def _append(self, rng: random.Random, key: Key) -> str:
        self.serial += 1
        body = self._body(rng)
        unique = f"U{self.serial}"
        word = f"k{self.serial % 5}"
        properties = f"UNIQ_KEY\x01{unique}\x02KEYS\x01{word}\x02".encode()
        host = IPV6 if rng.random() < 0.1 else IPV4
        prepared = rng.random() < 0.05
        flag = PREPARED if prepared else 0
        position, offset = self.store.writer.append(
            *key, body, properties, rng.choice((0, 5)), 0, flag, 1, host, IPV4
        )
        self.ledger.turn.append(
            Entry(None if prepared else key, body, position, offset, key[0], unique, word)
        )
        return f"{key[0][:3]}:{key[1]}:{offset} at {position}"

    def _body(self, rng: random.Random) -> bytes:
        """Its number, then zeros or other bytes."""
        fill = rng.choice((b"\0", bytes([self.serial % 256])))
        return struct.pack(">i", self.serial) + fill * rng.choice(SIZES)

    def do_append(self, rng: random.Random) -> str:
        return ", ".join(self._append(rng, rng.choice(QUEUES)) for _ in range(rng.randint(1, 3)))

    def do_batch(self, rng: random.Random) -> str:
        key = rng.choice(QUEUES)
        bodies = []
        for _ in range(rng.randint(1, 4)):
            self.serial += 1
            bodies.append(struct.pack(">i", self.serial) + bytes(rng.choice((0, 60))))
        positions, first = self.store.writer.append_batch(
            *key, [(0, body, b"", 0) for body in bodies], 0, 1, IPV4, IPV4
        )
        for index, (position, body) in enumerate(zip(positions, bodies, strict=True)):
            self.ledger.turn.append(Entry(key, body, position, first + index, key[0]))
        return f"{key[0][:3]}:{key[1]}:{first} x {len(bodies)}"

    def do_commit(self, rng: random.Random) -> str:
        """The end of a turn. One that failed has never been."""
        self._commit()
        return f"end {self.store.written_offset}"

    def _commit(self) -> None:
        try:
            end = self.store.commit()
        except StoreError:
            is_broken = self.store._log.failure is not None  # a sync failed while it was wiped
            self.ledger.sync_failed |= is_broken
            self.ledger.refused(may_be_there=is_broken)
            raise
        self.ledger.committed(end)

    def do_sync(self, rng: random.Random) -> str:
        """An fsync; its end is told now or later."""
        self._sync()
        if rng.random() < 0.8:
            self.store.publish(self.unpublished)
        return f"end {self.unpublished}"

    def _sync(self) -> None:
        try:
            self.unpublished = self.store.sync()
        except (StoreError, OSError):
            self.ledger.sync_failed = True
            raise
        self.ledger.synced_end = max(self.ledger.synced_end, self.unpublished)

    def do_publish(self, rng: random.Random) -> str:
        self.store.publish(self.unpublished)
        return f"up to {self.unpublished}"

    def do_tick(self, rng: random.Random) -> str:
        seconds = rng.choice((0.0, 0.5, 1.0, 3.0, 61.0))
        self.clock.advance(seconds)
        if self.store.tick():
            self._sync()
            self.store.publish(self.unpublished)
            return f"{seconds} s later, synced {self.unpublished}"
        self.store.keys.flush_due()
        return f"{seconds} s later"

    def do_delete(self, rng: random.Random) -> str:
        """A topic goes. After an error nobody knows how far: start again."""
        topic = rng.choice(QUEUES)[0]
        self._commit()
        self.ledger.deleting(topic)
        try:
            self.store.delete_topic(topic)
        except (StoreError, OSError) as error:
            if not self.disk.is_troubled:
                raise
            self.ledger.sync_failed = True
            self._restart(rng)
            return f"{topic[:3]} failed: {error}"
        self.ledger.deleted(topic)
        return topic[:3]

    def do_read(self, rng: random.Random) -> str:
        """A reader looks at a queue: it sees what the log says, or a part of it."""
        key = rng.choice(QUEUES)
        found = self._read(key)
        self._check_visible(key, found)
        return f"{key[0][:3]}:{key[1]} has {len(found)}"

    def _woken(self, queues: VisibleOffsets) -> None:
        for topic, queue_id, _ in queues:
            key = (topic, queue_id)
            self._saw(key, self._read(key))

    def _check_visible(self, key: Key, found: list[Found]) -> None:
        live = self.ledger.live(key)
        if any(e.is_doubtful for e in self.ledger.entries if e.key == key):
            return
        if [(m.position, m.body) for m in found] != [
            (e.position, e.body) for e in live[: len(found)]
        ]:
            raise Violation(f"queue {key} shows {found}, it should begin like {live}")
        self._saw(key, found)

    def _saw(self, key: Key, found: list[Found]) -> None:
        self.ledger.saw(key, 0, [message.body for message in found])

    def _read(self, key: Key) -> list[Found]:
        low, high = self.store.queue_offsets(*key)
        found: list[Found] = []
        while low + len(found) < high:
            result = self.store.reader.read(*key, low + len(found), 1000, 1 << 20)
            if not result.count:
                raise Violation(f"queue {key} has {high} messages, {len(found)} of them readable")
            found += map(_found, decode_records(b"".join(result.data)))
        if [m.offset for m in found] != list(range(low, high)):
            raise Violation(f"queue {key} shows the offsets {[m.offset for m in found]}")
        return found

    def _places(self, key: Key) -> list[int]:
        """Return where the units of a queue lead to. Call it before `_read`: a reader finds a
        message whose unit is lost and writes the unit again, which hides the loss."""
        low, high = self.store.queue_offsets(*key)
        units = (self.store.committed_units(*key, offset, 1) for offset in range(low, high))
        return [Unit(*UNIT.unpack(data)).physical_offset for data in units]

    # --- what the world does

    def do_arm(self, rng: random.Random) -> str:
        return self.disk.arm(rng)

    def do_fault(self, rng: random.Random) -> str:
        return self.disk.inject(rng) if rng.random() < 0.8 else self.disk.fill(rng)

    def do_mend(self, rng: random.Random) -> str:
        return self.disk.mend()

    def do_crash(self, rng: random.Random) -> str:
        self._restart(rng, power=True)
        return f"{len(self.ledger.entries)} messages are there"

    def do_kill(self, rng: random.Random) -> str:
        self._restart(rng, power=False)
        return f"{len(self.ledger.entries)} messages are there"

    def do_stop(self, rng: random.Random) -> str:
        """In order; then the power may fail: everything is on disk."""
        try:
            self.store.close()
        except (StoreError, OSError):
            if not self.disk.is_troubled:
                raise
            self.ledger.sync_failed = True
            self._restart(rng)
            return "failed"
        if self.store._log.failure is None:
            self.ledger.committed(0)
            self.ledger.synced_end = max(self.ledger.synced_end, self.store.written_offset)
        else:
            self.ledger.sync_failed = True
        damage = rng.choice((None, None, self._stale_tail, self._lose_queues))
        self._restart(rng, power=rng.random() < 0.5, damage=damage)
        return f"and {damage.__name__ if damage else 'no damage'}"

    def do_damage(self, rng: random.Random) -> str:
        """Killed, and then somebody does something to the files."""
        damage = rng.choice((self._stale_tail, self._lose_queues, self._lose_checkpoint))
        self._restart(rng, power=False, damage=damage)
        return damage.__name__

    def do_rot(self, rng: random.Random) -> str:
        """A bit turns over while nobody runs. Told, or harmless; a traceback is neither."""
        self.disk.files = self.files.kill()
        path = rng.choice(self.disk.all_paths(ROOT))
        place = self.disk.files.rot(path, rng) if self.files.content(path) else 0
        self.is_over = True
        text = f"{path} at {place}"
        try:
            self._open()
            for key in self.store.queues():
                low, high = self.store.queue_offsets(*key)
                if low < high:
                    self.store.reader.read(*key, low, 1000, 1 << 20)
        except StoreDamagedError as error:
            if not error.fix or ROOT not in str(error):
                raise Violation(f"{error} names no path or no cure") from error
            return f"{text}: {error}"
        return f"{text}: opens"

    def _restart(
        self,
        rng: random.Random,
        *,
        power: bool | None = None,
        damage: Callable[[random.Random], None] | None = None,
    ) -> None:
        self.disk.restart(
            rng, power=power, meanwhile=None if damage is None else lambda: damage(rng)
        )
        self._check()

    # --- damage from outside

    def _stale_tail(self, rng: random.Random) -> None:
        """Behind the end lie bytes of an earlier life, or anything: RocketMQ does not zero."""
        log = self._log()
        records = list(log.scan(log.start))
        if not records:
            return
        end = log.skip_blank(records[-1].end)
        segment = log.segments.at(end)
        old = rng.choice(records)
        data = bytes(log.record_view(old.position, old.size_bytes) or b"")
        if rng.random() < 0.3:
            data = rng.randbytes(len(data))
        if segment is not None and segment.end - end > len(data) + RECORD_BYTES_MIN:
            segment.write(data, end)
            segment.file().sync()

    def _lose_queues(self, rng: random.Random) -> None:
        """Somebody removes queues, or the last file of one: they are built again."""
        topics = self.files.names(f"{ROOT}/consumequeue")
        if not topics:
            return
        lost = f"{ROOT}/consumequeue/{rng.choice(topics)}"
        for _ in range(rng.randrange(3)):  # the topic, a queue, or the queue's last file
            names = self.files.names(lost)
            if names:
                lost = f"{lost}/{names[-1]}"
        self.disk.remove_tree(lost)
        self.ledger.may_return = True

    def _lose_checkpoint(self, rng: random.Random) -> None:
        if self.files.exists(f"{ROOT}/checkpoint"):
            self.files.remove(f"{ROOT}/checkpoint")
            self.files.sync_directory(ROOT)
            self.ledger.may_return = True

    # --- looking

    def _check(self) -> None:
        ledger = self.ledger
        floor = ledger.floor(power_lost=self.disk.power_lost)
        found = self._walk()
        ledger.check_log(found, floor)
        ledger.recovered(len(found))
        keys = {key for key in self.store.queues() if self.store.queue_offsets(*key)[1]}
        for key in keys | set(QUEUES):
            places = self._places(key)
            messages = self._read(key)
            if [m.position for m in messages] != places:
                raise Violation(f"queue {key} leads to {places}, its messages are {messages}")
            if self.config.flush_sync:
                ledger.check_seen(key, messages)
            ledger.check_queue(key, messages)
            ledger.seen[key] = {}
            self._saw(key, messages)
        self._check_index()
        self.unpublished = 0

    def _log(self) -> CommitLog:
        log = CommitLog(self.files, self.config.commit_log_path, self.config.commit_log_file_bytes)
        log.segments.load()
        return log

    def _walk(self) -> list[Found]:
        """The log by itself."""
        log = self._log()
        return [
            _found(decode_record(bytes(log.record_view(record.position, record.size_bytes) or b"")))
            for record in log.scan(log.start)
        ]

    def _check_index(self) -> None:
        """Every key finds exactly its messages."""
        index = self.store.keys
        if not index.is_enabled:
            return
        index.catch_up(1 << 40)
        keyed = [entry for entry in self.ledger.entries if entry.unique]
        for entry in keyed:
            found = list(index.find_candidates(entry.topic, entry.unique, 0, 1 << 60))
            if found != [entry.position]:
                raise Violation(f"the index finds {entry.unique} at {found}, not {entry.position}")
        for word in {(entry.topic, entry.word) for entry in keyed}:
            places = [e.position for e in keyed if (e.topic, e.word) == word]
            found = list(index.find_candidates(*word, 0, 1 << 60))
            if found != places[::-1]:
                raise Violation(f"the index finds {word} at {found}, the log has {places}")


def _found(message: StoredMessage) -> Found:
    return Found(
        message.physical_offset, message.topic, message.queue_id, message.queue_offset,
        message.body,
    )  # fmt: skip


STORE: Final = Kind(
    "store",
    StoreWorld,
    {
        "append": 12, "batch": 3, "commit": 9, "sync": 4, "publish": 1, "tick": 5, "read": 3,
        "delete": 1, "arm": 2, "fault": 1, "mend": 2, "crash": 2, "kill": 1, "stop": 1,
        "damage": 1, "rot": 0,
    },
)  # fmt: skip
STORM: Final = Kind(
    "storm",
    StoreWorld,
    {
        **STORE.weights, "fault": 4, "mend": 4, "arm": 5, "tick": 8, "crash": 3, "kill": 2,
        "stop": 3, "damage": 2, "read": 1,
    },
)  # fmt: skip
ROT: Final = Kind("rot", StoreWorld, {**STORE.weights, "rot": 1, "crash": 1, "fault": 0})
