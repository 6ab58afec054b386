"""The master's end of the connections on which slaves copy the commit log.

    data_received    the slave reports a position    -> InSyncReplicas.record_ack
    send_pending     the log has grown               -> frames of the log, in one write
    _read_ahead      the slave is far behind         -> READ_BYTES are read on another thread

`LogSender` speaks both protocols of `wire.ha`. Without `terms` it is the plain one. With `terms` it
is the failover protocol, in which a slave first sends a handshake and truncates its own log before
it asks for more (design/0022).

A slave that has much to catch up with must not slow down the clients of the master:

- A sender writes at most TURN_BYTES in one iteration of the event loop.
- At most WINDOW_BYTES are sent and not yet acknowledged.
- Nothing is sent while the socket is full.
- The newest bytes are in memory, and are sent directly from the memory map of the log. Bytes that
  are further back than NEAR_BYTES may have to be read from disk. Reading a page that is not in
  memory blocks the whole process, so another thread reads these.

In the plain protocol under SYNC_FLUSH, only synced bytes are sent. The plain protocol has no way to
tell a slave that its last bytes differ from the master's, which would happen if the master lost
unsynced bytes.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from sluicemq.broker.replication.admission import AddressCheck
from sluicemq.broker.replication.terms import LogTerms
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError
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
"""The most log bytes that are sent in one iteration of the event loop. That takes a tenth of a
millisecond."""
NEAR_BYTES: Final = 4 * 1024 * 1024
"""Bytes of the log that are further back from its end than this are read on another thread."""
READ_BYTES: Final = 1024 * 1024
"""The size of one read on another thread, in bytes."""
WINDOW_BYTES: Final = 16 * 1024 * 1024
"""The most log bytes that are sent and not acknowledged."""
_NO_END: Final = 1 << 63
"""The end of the last term, which has none yet."""

CallSoon = Callable[[Callable[[], None]], object]
"""Calls a function in the next iteration of the event loop."""


class SendableLog(Protocol):
    """The methods of the store that a sender uses."""

    @property
    def log_start(self) -> int: ...

    @property
    def written_offset(self) -> int: ...

    @property
    def synced_offset(self) -> int: ...

    def view_log(self, position: int, size_max: int) -> memoryview:
        """Return written bytes of one file from `position` on, without copying them.

        At most `size_max` bytes are returned, and none if there are none.
        """
        ...

    def read_log(self, position: int, size_max: int) -> bytes:
        """Read the same bytes from the disk. May be called on any thread."""
        ...


class AckRecorder(Protocol):
    """What a sender tells `in_sync.InSyncReplicas` about its slave."""

    @property
    def confirmed(self) -> int: ...

    def add_slave(self, link: "LogSender") -> None: ...

    def remove_slave(self, link: "LogSender") -> None: ...

    def record_ack(self, link: "LogSender", position: int) -> None: ...


class ByteRate:
    """Counts the bytes that are transferred in each second.

    `per_s` is the number of bytes in the last complete second.
    """

    __slots__ = ("_bytes", "_second", "per_s")

    def __init__(self) -> None:
        self.per_s = 0
        self._second = 0
        """The current second of the monotonic clock."""
        self._bytes = 0
        """The bytes that were counted in `_second` so far."""

    def add(self, size: int, now_s: float) -> int:
        """Count `size` bytes, and return how many were counted in the current second so far.

        `now_s` is the monotonic time. When a new second has begun, `per_s` is set to the number of
        bytes in the second before it.
        """
        if int(now_s) != self._second:
            self.per_s = self._bytes if int(now_s) == self._second + 1 else 0
            self._bytes = 0
            self._second = int(now_s)
        self._bytes += size
        return self._bytes


class LogSender:
    """The protocol of one slave's HA connection, on the master.

    - `replica_id` is the id in the slave's handshake; None in the plain protocol.
    - `sent_end` is the position up to which the log was sent; -1 until the slave has reported.
    - `acked_end` is the position up to which the slave reports to have the log; -1 at first.
    """

    def __init__(
        self,
        stream: ByteStream,
        store: SendableLog,
        in_sync: AckRecorder,
        terms: LogTerms | None,
        settings: Settings,
        clock: Clock,
        *,
        call_soon: CallSoon,
        offload: Offload,
        on_lost: Callable[["LogSender"], None] = lambda sender: None,
    ) -> None:
        """Create the sender for `stream`, the connection of a slave.

        - `store` contains the log that is sent.
        - `in_sync` records up to which position the slave has the log.
        - `terms` says which term wrote which part of the log. If it is given, the failover protocol
          is used. None selects the plain protocol, which is RocketMQ's.
        - `call_soon(function)` calls a function in the next iteration of the event loop.
        - `offload(function, done)` calls `function` on another thread, then `done` in the event
          loop with its result or error.
        - `on_lost(sender)` is called when the connection has ended.
        """
        self._stream = stream
        self._store = store
        self._in_sync = in_sync
        self._terms = terms
        self._settings = settings
        self._clock = clock
        self._call_soon = call_soon
        self._offload = offload
        self._on_lost = on_lost
        self._reader = SlaveFrameReader(failover=terms is not None)
        self._handshake = SlaveHandshake(-1)
        self._term: LogTerm | None = None
        self._term_end = 0  # where the next term begins; 0: not looked up yet
        self._start = 0  # sending began here: earlier bytes count as acknowledged
        self._sent_confirmed = -1  # the confirmed position that the slave was sent last
        self._read_s = self._written_s = clock.monotonic_s()
        self._is_scheduled = False
        self._read_bytes = memoryview(b"")  # read on another thread, to be sent next
        self._is_reading = False
        self.rate = ByteRate()
        self.replica_id: int | None = None
        self.sent_end = -1
        self.acked_end = -1

    @property
    def remote(self) -> Host:
        """The address of the slave."""
        return self._stream.remote

    @property
    def is_learner(self) -> bool:
        """Whether the slave copies the log without ever counting as in sync."""
        return self._handshake.is_learner

    # ------------------------------------------------------------------- what the slave sends

    def data_received(self, data: bytes) -> None:
        """Handle the handshakes and reports in `data`, then send more of the log to the slave.

        `data` may begin and end within a frame. Raises ProtocolError if the slave breaks the
        protocol, or has bytes that the master lacks.
        """
        self._read_s = self._clock.monotonic_s()
        for frame in self._reader.feed(data):
            if isinstance(frame, SlaveHandshake):
                self._answer_handshake(frame)
            else:
                self._handle_report(frame)
        self.send_pending()

    def _answer_handshake(self, handshake: SlaveHandshake) -> None:
        """Answer the handshake of a slave with the terms and the end of this log.

        From now on the slave counts as a replica that confirms messages, unless it is a learner,
        which only copies the log. Raises ProtocolError if the slave has sent a handshake before, or
        if this is the plain protocol.
        """
        if self.replica_id is not None or self._terms is None:
            raise ProtocolError(f"Replica {handshake.replica_id} sent a second handshake.")
        self._handshake = handshake
        self.replica_id = handshake.replica_id
        terms = self._terms
        answer = MasterHandshake(self._sendable_end, terms.last.number, terms.entries)
        self._write(encode_master_handshake(answer))
        if not handshake.is_learner:
            self._in_sync.add_slave(self)

    def _handle_report(self, end: int) -> None:
        """Handle the slave's report that it has the log up to position `end`.

        The position is recorded as acknowledged, unless the slave is a learner, which only copies
        the log. The first report also says from where on the slave needs the log, so that sending
        can begin. `end` is FROM_START if the slave needs the log from its first byte.

        Raises ProtocolError if a report comes before the handshake, or if `end` is behind the end
        of this log or behind what was sent.
        """
        if self._terms is not None and self.replica_id is None:
            raise ProtocolError("The slave sent a report before its handshake.")
        if end > self._store.written_offset:
            raise ProtocolError(
                f"The slave has the log up to {end}, but the log of this master ends at "
                f"{self._store.written_offset}. The slave's last bytes are from another master, or "
                "this master has lost them. Empty the store of the slave, so that it copies "
                "everything from this master."
            )
        if self.sent_end < 0:
            self._start_sending(end)
        elif end > self.sent_end:
            raise ProtocolError(
                f"The slave reports position {end}, but was sent the log only up to "
                f"{self.sent_end}."
            )
        self.acked_end = end
        if end >= 0 and not self.is_learner:  # FROM_START is -1
            self._in_sync.record_ack(self, end)

    def _start_sending(self, end: int) -> None:
        """Set `sent_end`, the position from which on the log is sent to the slave.

        `end` is the position in the slave's first report. Sending begins there, with these
        exceptions, which are those of a RocketMQ master (spec/ha.md §1, §7):

        - If `end` is FROM_START, it begins at the first byte of the log.
        - If `end` is 0, it begins at the last file of the log. In the failover protocol the slave
          must have asked for that in its handshake.
        - It never begins before the first byte of the log.

        In the plain protocol, the slave counts from now on as a replica that confirms messages.
        """
        log_start = self._store.log_start
        is_plain = self._terms is None
        first_position = end
        if end == 0 and (is_plain or self._handshake.from_last_file):
            written = self._store.written_offset
            first_position = written - written % self._settings.store.commit_log_file_bytes
        if end == FROM_START:
            first_position = log_start
        self.sent_end = self._start = max(first_position, log_start)
        log.info(
            "Slave %s has the log up to %d, and is sent the log from %d on.",
            self.remote,
            end,
            self.sent_end,
        )
        if self._terms is None:
            self._in_sync.add_slave(self)

    # ---------------------------------------------------------------- what is sent to the slave

    def resume_writing(self) -> None:
        """Continue to send, because the socket accepts more bytes."""
        self.send_pending()

    def send_pending(self) -> None:
        """Send the log bytes that the slave has not been sent yet, in one write.

        Called when the log has grown, or when more of it is confirmed. Only a limited number of
        bytes is sent at once; the rest follows in the next iterations of the event loop. In the
        failover protocol, a heartbeat with the confirmed position is sent if only that has
        increased. If the next bytes were deleted from the log, the connection is closed.

        Do nothing before the slave's first report. Runs after every group commit: keep it cheap.
        """
        self._is_scheduled = False
        stream = self._stream
        if self.sent_end < 0 or stream.closed:
            return
        if self.sent_end < self._store.log_start:
            self._close_outrun()
            return

        confirmed = self._in_sync.confirmed
        frame_parts: list[bytes | memoryview] = []
        allowed_bytes = unused_bytes = self._allowed_bytes()
        while unused_bytes > 0:
            log_bytes = self._next_bytes(min(unused_bytes, self._settings.broker.ha_batch_bytes))
            if not log_bytes:
                break
            header = encode_log_header(self.sent_end, len(log_bytes), self._term, confirmed)
            frame_parts += header, log_bytes
            self.sent_end += len(log_bytes)
            unused_bytes -= len(log_bytes)

        if frame_parts:
            self._write(b"".join(frame_parts))
            self.rate.add(allowed_bytes - unused_bytes, self._written_s)
            if unused_bytes <= 0:  # the limit has ended the loop, not the end of the log
                self._schedule()
        elif confirmed > self._sent_confirmed and self._terms is not None:
            self._send_heartbeat()
        self._sent_confirmed = confirmed

    def _close_outrun(self) -> None:
        """Close the connection, because the bytes that the slave needs next are deleted."""
        log.warning(
            "The log is deleted faster than slave %s copies it. The slave has to start again "
            "from the first byte of the log.",
            self.remote,
        )
        self.close()

    def _schedule(self) -> None:
        """Call `send_pending` in the next iteration of the event loop."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self.send_pending)

    def _allowed_bytes(self) -> int:
        """Return how many log bytes may be sent now. 0 or a negative number means none.

        At most TURN_BYTES are sent at once, and at most WINDOW_BYTES may be unacknowledged. Flow
        control, if it is enabled, limits the bytes of a second. Nothing may be sent while the
        socket has more than TURN_BYTES to send.
        """
        if self._stream.unsent_bytes > TURN_BYTES:
            return 0
        unacked_bytes = self.sent_end - max(self.acked_end, self._start)
        allowed_bytes = min(TURN_BYTES, WINDOW_BYTES - unacked_bytes)
        broker = self._settings.broker
        if broker.ha_flow_control:
            sent_this_second = self.rate.add(0, self._clock.monotonic_s())
            allowed_bytes = min(allowed_bytes, broker.ha_bytes_per_s - sent_this_second)
        return allowed_bytes

    def _next_bytes(self, size_max: int) -> memoryview | None:
        """Return the log bytes to send next, at most `size_max`, of one file and one term.

        None or an empty view means that there is nothing to send now. Either the slave has been
        sent everything, or another thread reads the bytes, and `send_pending` is called when it is
        done. In the failover protocol, `_term` is set to the term of the bytes.
        """
        if self._terms is not None:
            if self.sent_end >= self._term_end:
                self._term, end = self._terms.find(self.sent_end)
                self._term_end = _NO_END if end is None else end
            size_max = min(size_max, self._term_end - self.sent_end)

        if self._read_bytes:
            next_bytes = self._read_bytes[:size_max]
            self._read_bytes = self._read_bytes[size_max:]
            return next_bytes
        unsent_bytes = self._sendable_end - self.sent_end
        if unsent_bytes > NEAR_BYTES:
            # These bytes are probably not in memory, and reading them would block.
            self._read_ahead()
            return None
        if unsent_bytes <= 0:
            return None
        return self._store.view_log(self.sent_end, min(size_max, unsent_bytes))

    def _read_ahead(self) -> None:
        """Start to read the next READ_BYTES of the log on another thread, and then send them.

        Do nothing if a read is in progress. If the read fails, the error is logged and the
        connection is closed. If the bytes were deleted meanwhile, `send_pending` closes it.
        """
        if self._is_reading:
            return
        self._is_reading = True
        position = self.sent_end

        def on_read(result: bytes | Exception) -> None:
            """Keep the bytes that were read from `position` on, or handle the error."""
            self._is_reading = False
            if isinstance(result, bytes):
                if position == self.sent_end:  # otherwise the sender went on without these bytes
                    self._read_bytes = memoryview(result)
            elif not self._stream.closed and position >= self._store.log_start:
                log.error("Cannot read the log for slave %s: %s", self.remote, result)
                self.close()
            self._schedule()

        self._offload(lambda: self._store.read_log(position, READ_BYTES), on_read)

    @property
    def _sendable_end(self) -> int:
        """The position up to which the log may be sent."""
        store = self._store
        only_synced = self._terms is None and self._settings.store.flush_sync
        return store.synced_offset if only_synced else store.written_offset

    def _send_heartbeat(self) -> None:
        """Send a frame without log bytes, with the position and term of the next frame."""
        if self._terms is not None and self._term is None:
            self._term = self._terms.find(self.sent_end)[0]
        self._write(encode_log_header(self.sent_end, 0, self._term, self._in_sync.confirmed))

    def _write(self, frames: bytes) -> None:
        """Write to the connection, and record the time."""
        self._written_s = self._clock.monotonic_s()
        self._stream.write(frames)

    # ------------------------------------------------------------------------------------ timers

    def tick(self) -> None:
        """Do the periodic work of a connection: check for silence, send delayed bytes, heartbeat.

        If the slave has sent nothing for `haHousekeepingInterval`, the connection is closed.
        Otherwise log bytes that flow control has delayed are sent, and a heartbeat if nothing was
        written for `haSendHeartbeatInterval`. The broker calls this a few times a second.
        """
        now_s = self._clock.monotonic_s()
        broker = self._settings.broker
        self.rate.add(0, now_s)
        if (now_s - self._read_s) * 1000 > broker.ha_housekeeping_ms:
            log.warning(
                "Slave %s has sent nothing for %.1f s. Its connection is closed.",
                self.remote,
                now_s - self._read_s,
            )
            self.close()
            return
        self.send_pending()
        if self.sent_end >= 0 and (now_s - self._written_s) * 1000 >= broker.ha_heartbeat_ms:
            self._send_heartbeat()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def connection_lost(self) -> None:
        """Stop counting the slave, because its connection has ended, and call `on_lost`."""
        self._in_sync.remove_slave(self)
        self._on_lost(self)


class LogSenders:
    """The senders of all slaves that are connected to a master."""

    def __init__(
        self,
        store: SendableLog,
        in_sync: AckRecorder,
        terms: LogTerms | None,
        settings: Settings,
        clock: Clock,
        *,
        call_soon: CallSoon,
        offload: Offload,
        address_check: AddressCheck,
    ) -> None:
        """Create an empty table of the connections of a master's slaves.

        `address_check` decides which addresses may connect. All other arguments are passed on to
        the `LogSender` of each connection, where they are described.
        """
        self._store = store
        self._in_sync = in_sync
        self._terms = terms
        self._settings = settings
        self._clock = clock
        self._call_soon = call_soon
        self._offload = offload
        self.address_check = address_check
        self.senders: dict[LogSender, None] = {}
        """The senders as keys, in the order of their connections."""

    def accept(self, stream: ByteStream) -> LogSender:
        """Create the sender for the connection of a slave, and keep it until the connection ends.

        Raises ConfigurationError if its address is not in `sluiceReplicaPeers`.
        """
        self.address_check.check(stream.remote)
        sender = LogSender(
            stream,
            self._store,
            self._in_sync,
            self._terms,
            self._settings,
            self._clock,
            call_soon=self._call_soon,
            offload=self._offload,
            on_lost=self._forget,
        )
        self.senders[sender] = None
        return sender

    def _forget(self, sender: LogSender) -> None:
        """Remove a sender whose connection has ended."""
        self.senders.pop(sender, None)

    def send_pending(self) -> None:
        """Send to each slave what it does not have yet.

        Called when the log has grown (under SYNC_FLUSH: is synced), or when more is confirmed.
        Runs after every group commit: keep it cheap.
        """
        for sender in tuple(self.senders):
            sender.send_pending()

    def tick(self) -> None:
        """Call `LogSender.tick` for each slave. The broker calls this a few times a second."""
        for sender in tuple(self.senders):
            sender.tick()
