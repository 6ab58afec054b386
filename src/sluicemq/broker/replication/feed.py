"""A slave, as its master sees it: asks for the log from some place on, gets it, says what it has.

    received -> what it has -> InSync.acknowledged
    grown    -> frames of the log, as far as there is room -> one write
    fetch    -> in another thread: what lies further back, READ_BYTES of it

Both protocols of `wire.ha`: plain without `epochs`, else that of failover, where a slave has to
introduce itself first and truncates its own log before it asks (design/0022).

A slave that has much to catch up with slows nobody down: a feed sends TURN_BYTES at once and goes
on in the next turn of the loop; never more than WINDOW_BYTES that are not acknowledged; and stops
while the socket takes nothing. What was written last is in memory, and sent from where it lies.
What is older than NEAR_BYTES may have to come from the disk, and a page of a map that is not there
holds the whole process: another thread reads it.

Plain, under SYNC_FLUSH, it sends what is on the disk alone: there nothing tells a slave that what
it has is not the master's any more.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from sluicemq.acl.rules import address_numbers, parse_pattern
from sluicemq.broker.replication.epochs import Epochs
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import ConfigurationError, ProtocolError
from sluicemq.model.ids import Host
from sluicemq.net.stream import ByteStream
from sluicemq.net.work.background import Offload
from sluicemq.wire.ha import (
    FROM_START,
    LogTerm,
    MasterHandshake,
    SlaveFrameReader,
    SlaveHandshake,
    encode_log_header,
    encode_master_handshake,
)

log = logging.getLogger(__name__)

TURN_BYTES: Final = 128 * 1024
"""A tenth of a millisecond of the loop."""
NEAR_BYTES: Final = 4 * 1024 * 1024
READ_BYTES: Final = 1024 * 1024
WINDOW_BYTES: Final = 16 * 1024 * 1024

CallSoon = Callable[[Callable[[], None]], object]


class Log(Protocol):
    """What is asked of the store."""

    @property
    def log_start(self) -> int: ...

    @property
    def written_offset(self) -> int: ...

    @property
    def synced_offset(self) -> int: ...

    def view_log(self, position: int, size_max: int) -> memoryview:
        """Written bytes of one file, no more than that; none: there is nothing."""
        ...

    def read_log(self, position: int, size_max: int) -> bytes:
        """The same, read from the disk; in any thread."""
        ...


class Gate(Protocol):
    """What a feed tells: see `insync.InSync`."""

    @property
    def confirmed(self) -> int: ...

    def joined(self, link: "Feed") -> None: ...

    def left(self, link: "Feed") -> None: ...

    def acknowledged(self, link: "Feed", offset: int) -> None: ...


class Rate:
    """Bytes a second: of this one and of the last."""

    __slots__ = ("_bytes", "_second", "per_s")

    def __init__(self) -> None:
        self._bytes = self._second = self.per_s = 0

    def add(self, size: int, now_s: float) -> int:
        """So many more now; returns those of this second."""
        if int(now_s) != self._second:
            self.per_s = self._bytes if int(now_s) == self._second + 1 else 0
            self._bytes, self._second = 0, int(now_s)
        self._bytes += size
        return self._bytes


class Feed:
    """The user of a slave's stream. `offset` is what it was sent up to (-1: it has not asked),
    `acknowledged` what it says to have, `replica_id` who it says to be (None: plain)."""

    def __init__(
        self,
        stream: ByteStream,
        store: Log,
        in_sync: Gate,
        epochs: Epochs | None,
        settings: Settings,
        clock: Clock,
        *,
        call_soon: CallSoon,
        offload: Offload,
        on_lost: Callable[["Feed"], None] = lambda feed: None,
    ) -> None:
        self._stream = stream
        self._store = store
        self._in_sync = in_sync
        self._epochs = epochs
        self._settings = settings
        self._clock = clock
        self._call_soon = call_soon
        self._offload = offload
        self._on_lost = on_lost
        self._reader = SlaveFrameReader(failover=epochs is not None)
        self._greeting = SlaveHandshake(-1)
        self._epoch: LogTerm | None = None
        self._epoch_end = 0  # where the next one begins; 0: look again
        self._floor = 0  # what it had before, or needs not
        self._told = -1  # what it knows to be confirmed
        self._read_s = self._written_s = clock.monotonic_s()
        self._is_scheduled = False
        self._fetched = memoryview(b"")  # what comes next, as far as it has been read already
        self._is_fetching = False
        self.rate = Rate()
        self.replica_id: int | None = None
        self.offset = -1
        self.acknowledged = -1

    @property
    def remote(self) -> Host:
        return self._stream.remote

    @property
    def is_learner(self) -> bool:
        """It wants the log, and never to be waited for."""
        return self._greeting.is_learner

    # ------------------------------------------------------------------------- what it says

    def data_received(self, data: bytes) -> None:
        """Raises ProtocolError."""
        self._read_s = self._clock.monotonic_s()
        for said in self._reader.feed(data):
            if isinstance(said, SlaveHandshake):
                self._greet(said)
            else:
                self._reported(said)
        self.grown()

    def _greet(self, greeting: SlaveHandshake) -> None:
        if self.replica_id is not None or self._epochs is None:
            raise ProtocolError(f"Replica {greeting.replica_id} introduces itself twice.")
        self._greeting, self.replica_id = greeting, greeting.replica_id
        epochs = self._epochs
        self._write(
            encode_master_handshake(MasterHandshake(self._end, epochs.last.number, epochs.entries))
        )
        if not greeting.is_learner:
            self._in_sync.joined(self)

    def _reported(self, end: int) -> None:
        if self._epochs is not None and self.replica_id is None:
            raise ProtocolError("A slave reports what it has before it has introduced itself.")
        if end > self._store.written_offset:
            raise ProtocolError(
                f"The slave has the log up to {end}, its master up to "
                f"{self._store.written_offset}: it has other bytes, of another master or such "
                "as this one has lost. Empty the slave's store, so that it begins anew."
            )
        if self.offset < 0:
            # From where it gets the log, as RocketMQ's masters decide it (spec/ha.md §1, §7), but
            # never from before the log's first byte.
            start, is_plain, begin = self._store.log_start, self._epochs is None, end
            if end == 0 and (is_plain or self._greeting.from_last_file):
                written = self._store.written_offset
                begin = written - written % self._settings.store.commit_log_file_bytes
            self.offset = self._floor = start if end == FROM_START else max(begin, start)
            log.info("slave %s has the log up to %d, and gets it from %d on",
                     self.remote, end, self.offset)  # fmt: skip
            if self._epochs is None:
                self._in_sync.joined(self)
        elif end > self.offset:
            raise ProtocolError(f"The slave has {end}, and was sent what is before {self.offset}.")
        self.acknowledged = end
        if end >= 0 and not self.is_learner:
            self._in_sync.acknowledged(self, end)

    # -------------------------------------------------------------------------- what it gets

    def resume_writing(self) -> None:
        self.grown()

    def grown(self) -> None:
        """The log may have more, or more of it is confirmed. HOT."""
        self._is_scheduled = False
        stream = self._stream
        if self.offset < 0 or stream.closed:
            return
        if self.offset < self._store.log_start:
            log.warning("slave %s is slower than the log is deleted: it has to begin anew",
                        self.remote)  # fmt: skip
            self.close()
            return
        confirmed = self._in_sync.confirmed
        pieces: list[bytes | memoryview] = []
        room = size = self._room()
        while room > 0:
            data = self._next(min(room, self._settings.broker.ha_batch_bytes))
            if not data:
                break
            pieces += encode_log_header(self.offset, len(data), self._epoch, confirmed), data
            self.offset += len(data)
            room -= len(data)
        size -= room
        if pieces:
            self._write(b"".join(pieces))
            self.rate.add(size, self._written_s)
            if room <= 0:
                self._again()
        elif confirmed > self._told and self._epochs is not None:
            self._beat()
        self._told = confirmed

    def _again(self) -> None:
        """In the loop's next turn."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self.grown)

    def _room(self) -> int:
        """Bytes that may be sent now."""
        if self._stream.unsent_bytes > TURN_BYTES:
            return 0
        waiting = self.offset - max(self.acknowledged, self._floor)
        room = min(TURN_BYTES, WINDOW_BYTES - waiting)
        broker = self._settings.broker
        if broker.ha_flow_control:
            sent = self.rate.add(0, self._clock.monotonic_s())
            room = min(room, broker.ha_bytes_per_s - sent)
        return room

    def _next(self, size_max: int) -> memoryview | None:
        """What comes next, of one file and one epoch; None: nothing yet."""
        if self._epochs is not None:
            if self.offset >= self._epoch_end:
                self._epoch, end = self._epochs.at(self.offset)
                self._epoch_end = 1 << 63 if end is None else end
            size_max = min(size_max, self._epoch_end - self.offset)
        if self._fetched:
            data, self._fetched = self._fetched[:size_max], self._fetched[size_max:]
            return data
        left = self._end - self.offset
        if left > NEAR_BYTES:
            self._fetch()
            return None
        return self._store.view_log(self.offset, min(size_max, left)) if left > 0 else None

    def _fetch(self) -> None:
        """Lets another thread read on."""
        if self._is_fetching:
            return
        self._is_fetching, position = True, self.offset

        def done(found: bytes | Exception) -> None:
            self._is_fetching = False
            if isinstance(found, bytes):
                if position == self.offset:  # else it went on without
                    self._fetched = memoryview(found)
            elif not self._stream.closed and position >= self._store.log_start:
                log.error("the log cannot be read for the slave %s: %s", self.remote, found)
                self.close()
            self._again()

        self._offload(lambda: self._store.read_log(position, READ_BYTES), done)

    @property
    def _end(self) -> int:
        """Up to where the log may be sent."""
        store = self._store
        is_sure = self._epochs is None and self._settings.store.flush_sync
        return store.synced_offset if is_sure else store.written_offset

    def _beat(self) -> None:
        if self._epochs is not None and self._epoch is None:
            self._epoch = self._epochs.at(self.offset)[0]
        self._write(encode_log_header(self.offset, 0, self._epoch, self._in_sync.confirmed))

    def _write(self, data: bytes) -> None:
        self._written_s = self._clock.monotonic_s()
        self._stream.write(data)

    # ----------------------------------------------------------------------------- its time

    def run(self) -> None:
        """A few times a second: heartbeats, house-keeping, and what flow control kept back."""
        now_s, broker = self._clock.monotonic_s(), self._settings.broker
        self.rate.add(0, now_s)
        if (now_s - self._read_s) * 1000 > broker.ha_housekeeping_ms:
            log.warning("slave %s has said nothing for %.1f s", self.remote, now_s - self._read_s)
            self.close()
            return
        self.grown()
        if self.offset >= 0 and (now_s - self._written_s) * 1000 >= broker.ha_heartbeat_ms:
            self._beat()

    def close(self) -> None:
        self._stream.close()

    def connection_lost(self) -> None:
        self._in_sync.left(self)
        self._on_lost(self)


class Admission:
    """Who may connect to the HA port, beside what the listening rule says (design/0011).

    With sluiceReplicaPeers those alone that it names. Without, everybody; but under access control
    see `admission.py`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def check(self, host: Host) -> None:
        """Raises ConfigurationError."""
        peers, numbers = self._settings.broker.ha_peers, address_numbers(host.address)
        if peers and not any(parse_pattern(text).matches(numbers) for text in peers):
            raise ConfigurationError(
                f"{host.address} is no replica that this broker knows.",
                fix="Name its address in sluiceReplicaPeers.",
            )


class Feeds:
    """All slaves of a master: `accept` is for `Network.stream_listener`."""

    def __init__(
        self,
        store: Log,
        in_sync: Gate,
        epochs: Epochs | None,
        settings: Settings,
        clock: Clock,
        *,
        call_soon: CallSoon,
        offload: Offload,
        admission: Admission,
    ) -> None:
        self._store = store
        self._in_sync = in_sync
        self._epochs = epochs
        self._settings = settings
        self._clock = clock
        self._call_soon = call_soon
        self._offload = offload
        self.admission = admission
        self.all: set[Feed] = set()

    def accept(self, stream: ByteStream) -> Feed:
        """Raises ConfigurationError."""
        self.admission.check(stream.remote)
        feed = Feed(
            stream, self._store, self._in_sync, self._epochs, self._settings, self._clock,
            call_soon=self._call_soon, offload=self._offload, on_lost=self.all.discard,
        )  # fmt: skip
        self.all.add(feed)
        return feed

    def grown(self) -> None:
        """The log has more (under SYNC_FLUSH: on the disk), or more is confirmed. HOT."""
        for feed in tuple(self.all):
            feed.grown()

    def run(self) -> None:
        """A few times a second."""
        for feed in tuple(self.all):
            feed.run()
