"""A master, as its slave sees it: the log comes from there, and what it is worth.

    received -> Following.append (bytes into the log) -> dispatch (records into queues) -> report

What has come is written before the next read, in as few pieces as it came in; frames end anywhere.
A report follows each of them at once, with what is written, or under SYNC_FLUSH what is synced
(`synced` tells). In failover (with `epochs`) what is confirmed is dispatched, plain everything.

When the two logs are not one, see the sections of design/0022 ("What holds"):

    own log ends before the master's begins    begin anew: the master keeps nothing so old
    own tail is another master's (failover)    cut it, but never what is known to be confirmed
    anything else                              stop and say so; tried again with each connection

Behind a Java master an empty log begins with the master's last file, as RocketMQ's slaves do.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from sluicemq.broker.replication.epochs import Epochs
from sluicemq.broker.replication.feed import Rate
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, SluiceError, StoreError
from sluicemq.net.stream import ByteStream, StreamProtocol
from sluicemq.wire.ha import (
    FROM_START,
    ConnectionState,
    LogChunk,
    MasterFrameReader,
    MasterHandshake,
    SlaveHandshake,
    common_end,
    encode_slave_handshake,
    encode_slave_report,
    encode_ticket,
)

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
TICK_S: Final = 0.2
BEHIND_BYTES: Final = 64 << 10
"""Reads of so much on the average say that there is more: a slave that is level gets a turn of its
master's."""
LEVEL_BYTES: Final = 16 << 10
"""And of less, that it is level again."""
READS: Final = 8
"""Single ones say nothing: what is left of a turn of the master's comes alone."""
BULK_BYTES: Final = 4 << 20
LONG_BYTES: Final = 64 << 20
"""Who has got so much without being level has to catch up, which takes a while."""


class FollowedLog(Protocol):
    """What is asked of the store."""

    @property
    def log_start(self) -> int: ...

    @property
    def synced_offset(self) -> int: ...

    def sync(self) -> int: ...


class Following(Protocol):
    """The log as a master writes it: `store.follow.Following`."""

    @property
    def end(self) -> int: ...

    def append(self, position: int, data: bytes | memoryview) -> None: ...

    def dispatch(self, confirmed: int | None) -> None: ...

    def truncate(self, end: int) -> None: ...


class FollowerStatus(NamedTuple):
    """`confirmed` is what the master has said (plain: the end). Times are ms since 1970, 0: never.
    `fault` says why it does not go on; `begins_at` where the log begins here."""

    state: ConnectionState
    end: int
    confirmed: int
    begins_at: int
    bytes_per_s: int
    read_ms: int
    written_ms: int
    fault: str


class Pace:
    """How far behind a slave is, by the sizes of its reads: a plain master does not say.

    `is_behind`: more is in the socket. `is_long`: and so it was for the last LONG_BYTES."""

    __slots__ = ("_average", "_bytes")

    def __init__(self) -> None:
        self._average = self._bytes = 0

    def read(self, size: int) -> None:
        self._average += (size - self._average) // READS
        least = LEVEL_BYTES if self._bytes else BEHIND_BYTES
        self._bytes = self._bytes + size if self._average >= least else 0

    def rest(self) -> None:
        """Nothing came for a while, or the connection is gone."""
        self._average = self._bytes = 0

    @property
    def is_behind(self) -> bool:
        return self._bytes > 0

    @property
    def is_long(self) -> bool:
        return self._bytes >= LONG_BYTES


class Follower:
    """The user of the stream to the master. Who makes it may set, before it connects:

    `replica_id`      who we are (failover)
    `master_is_ours`  an empty log gets the master's whole one
    `ticket`          what opens the master's door, if it has one
    `confirmed`       what is known to be
    `is_unclean`      a person has put up with a loss: confirmed bytes may be cut
    `on_incomplete`   called before the log is cut or begun anew
    `on_confirmed`    called when more is confirmed, after it is in the queues
    `on_appended`     called when the log has grown: a sync may be due
    `on_pace`         called with True when it has long to catch up, with False when it is level
    """

    def __init__(
        self,
        store: FollowedLog,
        following: Following,
        epochs: Epochs | None,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._store = store
        self._following = following
        self._epochs = epochs
        self._settings = settings
        self._clock = clock
        self._stream: ByteStream | None = None
        self._reader = MasterFrameReader(failover=epochs is not None)
        self._reported = 0
        self._has_begun = False  # bytes have come over this stream
        self._told: int | None = None  # what the master says is confirmed
        self._read_s = self._written_s = 0.0
        self._read_ms = self._written_ms = 0
        self._rate = Rate()
        self._shown = 0  # up to where the queues have been asked to look
        self._pace = Pace()
        self.state = ConnectionState.READY
        self.fault = ""
        self.replica_id = 0
        self.master_is_ours = False
        self.ticket = b""
        self.confirmed = 0
        self.is_unclean = False
        self.on_incomplete: Callable[[], None] = lambda: None
        self.on_confirmed: Callable[[int], None] = lambda end: None
        self.on_appended: Callable[[], None] = lambda: None
        self.on_pace: Callable[[bool], None] = lambda is_long: None

    @property
    def is_level(self) -> bool:
        """Has it, over this connection, everything that the master has confirmed? A plain master
        does not say; there the log is level when its master's heartbeats say where it ends."""
        return self._told is not None and self._following.end >= self._told

    def status(self) -> FollowerStatus:
        now_s = self._clock.monotonic_s()
        self._rate.add(0, now_s)
        end = self._following.end
        return FollowerStatus(
            self.state, end, end if self._epochs is None else self.confirmed,
            self._store.log_start, self._rate.per_s, self._read_ms, self._written_ms, self.fault,
        )  # fmt: skip

    # ------------------------------------------------------------------------------ what it says

    def connected(self, stream: ByteStream) -> None:
        """A stream to the master is open, and this is its user."""
        self._stream = stream
        self._reader = MasterFrameReader(failover=self._epochs is not None)
        self._has_begun, self._told = False, None
        self._read_s = self._clock.monotonic_s()
        if self._settings.store.flush_sync:
            self._store.sync()  # the first report says from where on, too
        if self.ticket:
            self._write(encode_ticket(self.ticket))
        if self._epochs is not None:
            self.state = ConnectionState.HANDSHAKE
            self._write(encode_slave_handshake(SlaveHandshake(self.replica_id)))
        else:
            self.state = ConnectionState.TRANSFER
            self._report()

    def synced(self) -> None:
        """More of the log is on the disk."""
        if self.state == ConnectionState.TRANSFER and self._durable_end > self._reported:
            self._report()

    def _report(self) -> None:
        end = self._reported = self._durable_end
        if self._is_empty:
            end = FROM_START if self.master_is_ours and self._epochs is None else 0
        self._write(encode_slave_report(end, failover=self._epochs is not None))

    def _write(self, data: bytes) -> None:
        if self._stream is not None:
            self._written_s, self._written_ms = self._clock.monotonic_s(), self._clock.now_ms()
            self._stream.write(data)

    @property
    def _durable_end(self) -> int:
        """Up to where a report may say that the log is here."""
        is_sync = self._settings.store.flush_sync
        return self._store.synced_offset if is_sync else self._following.end

    @property
    def _is_empty(self) -> bool:
        return self._following.end <= self._store.log_start

    # ------------------------------------------------------------------------------ what it gets

    def data_received(self, data: bytes) -> None:
        """HOT."""
        self._read_s, self._read_ms = self._clock.monotonic_s(), self._clock.now_ms()
        self._rate.add(len(data), self._read_s)
        try:
            for found in self._reader.feed(data):
                if isinstance(found, MasterHandshake):
                    self._welcome(found)
                else:
                    self._take(found)
            self._went_on(len(data))
            self._show()
            self.synced()
        except (SluiceError, OSError) as error:  # also of a disk that is full
            self._fail(str(error))

    def _welcome(self, welcome: MasterHandshake) -> None:
        """The master's handshake: cut what is not its, then ask for the rest."""
        epochs, end = self._epochs, self._following.end
        if self.state != ConnectionState.HANDSHAKE or epochs is None:
            raise ProtocolError("The master introduces itself twice.")
        if welcome.term_number < epochs.last.number:
            raise ProtocolError(
                f"The master is of epoch {welcome.term_number}; "
                f"this log has epoch {epochs.last.number}."
            )
        point = 0
        if not self._is_empty:
            point = common_end(epochs.entries, end, welcome.terms, welcome.end)
            if point < 0 and welcome.terms and end <= welcome.terms[0].start:
                self._begin_anew(welcome.terms[0].start)
            elif point < end:
                self._cut(max(point, 0))
        epochs.truncate(point)  # of reigns, too, in which nothing was written
        self.state = ConnectionState.TRANSFER
        self._report()

    def _cut(self, end: int) -> None:
        if end < self.confirmed and not self.is_unclean:
            raise StoreError(
                f"The master has this log up to {end} alone, and {self.confirmed} is known to be "
                "confirmed.",
                fix="Has the consensus lost its data, or another cluster the same address? To "
                "give up what is here, empty this replica's store.",
            )
        log.warning("the log is cut from %d to %d, where the master's begins to be another",
                    self._following.end, end)  # fmt: skip
        self.on_incomplete()
        start = self._store.log_start
        self._following.truncate(max(end, start))
        if self._epochs is not None:
            self._epochs.truncate(end if end > start else 0)
        self.confirmed = min(self.confirmed, end)
        self._shown = 0

    def _begin_anew(self, start: int) -> None:
        log.warning("the log begins anew: it ends at %d, the master's begins at %d or later",
                    self._following.end, start)  # fmt: skip
        self.confirmed = 0
        self._cut(0)

    def _take(self, chunk: LogChunk) -> None:
        """Bytes of the log, or a heartbeat."""
        if self.state != ConnectionState.TRANSFER:
            raise ProtocolError("The master sends the log before it has introduced itself.")
        end = self._following.end
        if chunk.position != end and not self._is_empty:
            is_ours = self.master_is_ours or self._epochs is not None
            if self._has_begun or not is_ours or chunk.position < end:
                raise StoreError(
                    f"The log ends at {end} here, and the master goes on at {chunk.position}.",
                    fix="Its log has other bytes, or none there any more. Empty this replica's "
                    "store, so that it begins anew.",
                )
            self._begin_anew(chunk.position)
        if chunk.term is not None:
            self._enter(chunk)
        elif not chunk.data:
            self._told = chunk.position
        if chunk.data:
            self._has_begun = True
            self._following.append(chunk.position, chunk.data)

    def _enter(self, chunk: LogChunk) -> None:
        """The epoch's line before its bytes."""
        epochs, epoch = self._epochs, chunk.term
        assert epochs is not None, "plain chunks have no epoch"
        assert epoch is not None, "and those of failover have one"
        last = epochs.last
        if epoch.number < last.number or (epoch.number == last.number and epoch != last):
            raise ProtocolError(f"The master sends {epoch}, and the last one here is {last}.")
        epochs.begin(epoch)
        if chunk.confirmed is not None:
            self._told = max(chunk.confirmed, self._told or 0)

    def _went_on(self, size: int) -> None:
        """So much came in one read; 0: nothing for a while."""
        was_long = self._pace.is_long
        self._pace.read(size) if size else self._pace.rest()
        if self._pace.is_long != was_long:
            self.on_pace(not was_long)

    def _show(self) -> None:
        """Hands on to the queues what may be seen; while more is in the socket already, much at a
        time, which costs a third."""
        end = self._following.end
        self.on_appended()
        if self._pace.is_behind and end - self._shown < BULK_BYTES:
            return
        self._shown = end
        if self._epochs is None:
            self._following.dispatch(None)
            return
        confirmed = min(self._told or 0, end)
        if confirmed > self.confirmed:
            self.confirmed = confirmed
            self._following.dispatch(confirmed)
            self.on_confirmed(confirmed)

    # -------------------------------------------------------------------------------- its time

    def resume_writing(self) -> None:
        """Reports are small."""

    def run(self) -> None:
        """A few times a second: reports that are due, and the end of a silent connection."""
        stream, now_s, broker = self._stream, self._clock.monotonic_s(), self._settings.broker
        if stream is None:
            return
        if (now_s - self._read_s) * 1000 > broker.ha_housekeeping_ms:
            self._fail(f"The master has said nothing for {now_s - self._read_s:.1f} s.")
        elif self.state == ConnectionState.TRANSFER:
            if now_s - self._read_s >= TICK_S:
                self._went_on(0)
            if self._shown < self._following.end:
                self._show()
            is_due = (now_s - self._written_s) * 1000 >= broker.ha_heartbeat_ms
            self._report() if is_due else self.synced()

    def leave(self) -> None:
        """The connection is closed, and nothing more is reported."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _fail(self, fault: str) -> None:
        if fault != self.fault:
            log.warning("the connection to the master is closed: %s", fault)
        self.fault = fault
        if self._stream is not None:
            self._stream.close()

    def connection_lost(self) -> None:
        self._went_on(0)
        self.state, self._stream = ConnectionState.READY, None


class Dialler(Protocol):
    """The part of `net.network.Network` that is needed."""

    async def dial_stream(self, address: str, user: StreamProtocol) -> ByteStream: ...


class Connection:
    """One connection of a follower, until it ends.

    The end of a connection that the follower has given up may be told much later, when another one
    is open already: a socket with unsent bytes ends when the kernel gives up. It must not end the
    connection of now.
    """

    __slots__ = ("_follower", "_is_over")

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._is_over = False

    def data_received(self, data: bytes) -> None:
        """Pass on bytes of the master. Raises SluiceError."""
        if not self._is_over:
            self._follower.data_received(data)

    def resume_writing(self) -> None:
        """Pass on that most of what was unsent has left."""
        if not self._is_over:
            self._follower.resume_writing()

    def connection_lost(self) -> None:
        """Tell the follower, once, that this connection is over."""
        if not self._is_over:
            self._is_over = True
            self._follower.connection_lost()


async def follow(network: Dialler, follower: Follower, address: Callable[[], str]) -> None:
    """Keeps a follower connected to the master's HA address, which may change or be unknown (""),
    and gives it its time; until cancelled."""
    while True:
        target = address()
        if target:
            connection = Connection(follower)
            try:
                stream = await network.dial_stream(target, connection)
            except SluiceError as error:
                follower.fault = str(error)
            else:
                try:
                    follower.connected(stream)
                    while not stream.closed and address() == target:
                        await asyncio.sleep(TICK_S)
                        follower.run()
                finally:
                    stream.close()
                    connection.connection_lost()
        await asyncio.sleep(RETRY_S)
