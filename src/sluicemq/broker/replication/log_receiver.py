"""The slave's end of the connection on which it copies its master's commit log.

    data_received -> ReceivedLog.append (bytes into the log)
                  -> ReceivedLog.dispatch (records into queues)
                  -> report

Received bytes are written to the log before the next read, in as few pieces as they came in; frames
may end anywhere. A report follows each read immediately. It contains the position up to which the
log is written, or under SYNC_FLUSH synced (`report_synced` is called after each sync). In failover,
which is the protocol with `terms`, records are dispatched up to the confirmed position. In the
plain protocol all complete records are dispatched.

If the logs of slave and master differ, the rules are those of design/0022, "What holds, and why":

- If the own log ends before the master's log begins, it starts again, empty, where the master's log
  begins: the master has deleted everything older.
- If the end of the own log was written by another master (failover only), it is cut off, but never
  below the position that is known to be confirmed.
- In every other case the connection is closed with an error. The next connection tries again.

In failover, which master wrote the end of the log is known by the number of its term. If the
consensus service has lost its data, two masters may have had the same number. So the slave also
compares bytes: it asks for the last COMPARED_BYTES of its own log again, and goes on only if the
master has the same.

If the master is a Java broker, an empty log begins with the master's last file, as on RocketMQ's
slaves.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

from sluicemq.broker.replication.log_sender import ByteRate
from sluicemq.broker.replication.terms import LogTerms
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

COMPARED_BYTES: Final = 4096
"""The number of bytes before the end of the own log that each connection in failover compares with
the master's. A record contains its position and the time at which it was stored, so the records of
two masters differ."""
RETRY_S: Final = 1.0
"""The pause before the next attempt to connect to the master."""
TICK_S: Final = 0.2
BEHIND_BYTES: Final = 64 << 10
"""If reads have at least this size on average, the slave is behind. The reads of a slave that is
caught up have the size of one group commit of its master."""
LEVEL_BYTES: Final = 16 << 10
"""If reads of a slave that was behind become smaller than this on average, it has caught up."""
READS: Final = 8
"""The number of reads in the average. A single small read says nothing: it may be the remainder of
a large write of the master."""
BULK_BYTES: Final = 4 << 20
"""While a slave is behind, it dispatches this many bytes of the log at a time."""
LONG_BYTES: Final = 64 << 20
"""A slave that received this many bytes while it was behind will need long to catch up."""


class ReceivingStore(Protocol):
    """The methods of the store that a receiver uses."""

    @property
    def log_start(self) -> int: ...

    @property
    def synced_offset(self) -> int: ...

    def sync(self) -> int: ...

    def view_log(self, position: int, size_max: int) -> memoryview:
        """Return written bytes of one file from `position` on, at most `size_max`."""
        ...


class ReceivedLog(Protocol):
    """The log that a master writes: `store.follow.LogFollower`."""

    @property
    def end(self) -> int: ...

    def append(self, position: int, data: bytes | memoryview) -> None: ...

    def dispatch(self, confirmed: int | None) -> None: ...

    def truncate(self, end: int) -> None: ...


class ReceiverStatus(NamedTuple):
    """The state of a slave's HA connection, for tools.

    - `end` is the end of the slave's log, and `log_start` its first position.
    - `confirmed` is the position that the master has confirmed. In the plain protocol, in which the
      master does not say it, it is the end of the log.
    - `read_ms` and `written_ms` are the times of the last bytes in each direction, in ms since
      1970; 0 means never.
    - `last_error` says why replication does not go on. It is "" if there was no error.
    """

    state: ConnectionState
    end: int
    confirmed: int
    log_start: int
    bytes_per_s: int
    read_ms: int
    written_ms: int
    last_error: str


class CatchUpDetector:
    """Detects from the sizes of reads whether a slave is behind its master.

    A plain master does not say where its log ends. If the slave reads large pieces, more bytes are
    waiting in the socket.
    """

    __slots__ = ("_average", "_bytes")

    def __init__(self) -> None:
        """Create a detector that has counted no reads: the slave is not behind."""
        self._average = 0  # the size of the last reads
        self._bytes = 0  # read since the slave got behind; 0: it is not behind

    def add_read(self, size: int) -> None:
        """Count a read of `size` bytes.

        The slave gets behind when the average of its reads reaches BEHIND_BYTES, and stays behind
        until the average falls below LEVEL_BYTES.
        """
        self._average += (size - self._average) // READS
        average_min = LEVEL_BYTES if self._bytes else BEHIND_BYTES
        self._bytes = self._bytes + size if self._average >= average_min else 0

    def reset(self) -> None:
        """Forget all reads, because nothing came for a while or the connection has ended."""
        self._average = self._bytes = 0

    @property
    def is_behind(self) -> bool:
        """Whether more bytes are waiting in the socket."""
        return self._bytes > 0

    @property
    def is_far_behind(self) -> bool:
        """Whether the slave has read LONG_BYTES or more since it got behind."""
        return self._bytes >= LONG_BYTES


class LogReceiver:
    """The protocol of a slave's HA connection to its master. It is reused for each connection.

    The creator may set these attributes before a connection is made:

    - `replica_id`: the id of this replica (failover only).
    - `is_sluicemq_master`: whether the master is a SluiceMQ broker, so that an empty log gets the
      whole log of the master.
    - `ticket`: the ticket for the master's HA port; b"" if none is required.
    - `confirmed`: the position that is known to be confirmed.
    - `is_unclean`: an operator has accepted the loss of messages, so that confirmed bytes may be
      cut off.
    - `on_truncation`: called before the log is truncated or emptied.
    - `on_confirmed`: called with the new confirmed position, after the records before it were added
      to their queues.
    - `on_appended`: called when the log has grown, so that it may have to be synced.
    - `on_catch_up`: called with True when the slave becomes far behind its master, so that it will
      need long to catch up, and with False when it is not far behind any more.
    """

    def __init__(
        self,
        store: ReceivingStore,
        received_log: ReceivedLog,
        terms: LogTerms | None,
        settings: Settings,
        clock: Clock,
    ) -> None:
        """Create a receiver of a slave, which writes the master's bytes to `received_log`.

        `received_log` is the commit log of `store`. `terms` says which term wrote which part of the
        log. If it is given, the failover protocol is used. None selects the plain protocol, which
        is RocketMQ's.
        """
        self._store = store
        self._log = received_log
        self._terms = terms
        self._settings = settings
        self._clock = clock
        self._stream: ByteStream | None = None
        self._reader = MasterFrameReader(failover=terms is not None)
        self._reported = 0  # the position in the last report
        self._has_received_bytes = False  # over the current connection
        self._compared_end: int | None = None
        """The position up to which the own log was compared with the master's over this connection,
        while that is going on; None before it and afterwards."""
        self._master_confirmed: int | None = None  # as the master said over this connection
        self._read_s = self._written_s = 0.0
        self._read_ms = self._written_ms = 0
        self._rate = ByteRate()
        self._dispatched = 0  # the end of the log at the last dispatch
        self._catch_up = CatchUpDetector()
        self.state = ConnectionState.READY
        self.last_error = ""
        self.replica_id = 0
        self.is_sluicemq_master = False
        self.ticket = b""
        self.confirmed = 0
        self.is_unclean = False
        self.on_truncation: Callable[[], None] = lambda: None
        self.on_confirmed: Callable[[int], None] = lambda end: None
        self.on_appended: Callable[[], None] = lambda: None
        self.on_catch_up: Callable[[bool], None] = lambda is_far_behind: None

    @property
    def is_caught_up(self) -> bool:
        """Whether the slave has everything that the master has confirmed over this connection.

        A plain master does not send a confirmed position. Its heartbeats, which contain the end of
        its log, are used instead.
        """
        return self._master_confirmed is not None and self._log.end >= self._master_confirmed

    def status(self) -> ReceiverStatus:
        """Return the state of the connection and the positions of the log.

        Its `bytes_per_s` is the number of bytes that were received in the last full second.
        """
        self._rate.add(0, self._clock.monotonic_s())
        end = self._log.end
        return ReceiverStatus(
            state=self.state,
            end=end,
            confirmed=end if self._terms is None else self.confirmed,
            log_start=self._store.log_start,
            bytes_per_s=self._rate.per_s,
            read_ms=self._read_ms,
            written_ms=self._written_ms,
            last_error=self.last_error,
        )

    # --------------------------------------------------------------------- what the slave sends

    def start(self, stream: ByteStream) -> None:
        """Start to receive over `stream`, a connection to the master, and send the first frames.

        The ticket (the secret of the master's port) is sent if there is one. Then the handshake is
        sent in the failover protocol, or in the plain protocol a report, which says up to where
        this slave has the log. Under SYNC_FLUSH the log is synced first, because a report counts
        only synced bytes. Blocks meanwhile.
        """
        self._stream = stream
        self._reader = MasterFrameReader(failover=self._terms is not None)
        self._has_received_bytes = False
        self._compared_end = None
        self._master_confirmed = None
        self._read_s = self._clock.monotonic_s()
        if self._settings.store.flush_sync:
            self._store.sync()  # the first report also says from where on the slave needs the log
        if self.ticket:
            self._write(encode_ticket(self.ticket))
        if self._terms is not None:
            self.state = ConnectionState.HANDSHAKE
            self._write(encode_slave_handshake(SlaveHandshake(self.replica_id)))
        else:
            self.state = ConnectionState.TRANSFER
            self._report()

    def report_synced(self) -> None:
        """Send a report if more of the log may be reported than the last report said.

        Called after the log was synced.
        """
        if self.state == ConnectionState.TRANSFER and self._reportable_end > self._reported:
            self._report()

    def _report(self) -> None:
        """Report to the master up to which position this slave has the log.

        For an empty log, the report is FROM_START if the master is a SluiceMQ broker and the
        protocol is the plain one. It asks the master for its whole log. Otherwise the report is 0.
        The position is kept in `_reported`.
        """
        end = self._reported = self._reportable_end
        if self._is_empty:
            end = FROM_START if self.is_sluicemq_master and self._terms is None else 0
        self._write(encode_slave_report(end, failover=self._terms is not None))

    def _write(self, frame: bytes) -> None:
        """Write to the connection, and record the time. Do nothing if there is no connection."""
        if self._stream is not None:
            self._written_s = self._clock.monotonic_s()
            self._written_ms = self._clock.now_ms()
            self._stream.write(frame)

    @property
    def _reportable_end(self) -> int:
        """The position up to which a report may say that the slave has the log."""
        is_sync = self._settings.store.flush_sync
        end = self._store.synced_offset if is_sync else self._log.end
        return end if self._compared_end is None else min(end, self._compared_end)

    @property
    def _is_empty(self) -> bool:
        """Whether the log has no bytes."""
        return self._log.end <= self._store.log_start

    # -------------------------------------------------------------------- what the master sends

    def data_received(self, data: bytes) -> None:
        """Append received bytes to the log, add their records to queues, and report to the master.

        `data` may begin and end within a frame. A SluiceError or OSError, for example because the
        disk is full, is not raised: it closes the connection and is kept in `last_error`. Runs for
        every read of the connection: keep it cheap.
        """
        self._read_s = self._clock.monotonic_s()
        self._read_ms = self._clock.now_ms()
        self._rate.add(len(data), self._read_s)
        try:
            for frame in self._reader.feed(data):
                if isinstance(frame, MasterHandshake):
                    self._handle_handshake(frame)
                else:
                    self._handle_chunk(frame)
            self._count_read(len(data))
            self._dispatch()
            self.report_synced()
        except (SluiceError, OSError) as error:
            self._fail(str(error))

    def _handle_handshake(self, handshake: MasterHandshake) -> None:
        """Cut off the part of the log that the master does not have, and ask for the rest.

        The logs are compared by their terms. The log is cut off where it begins to differ from the
        master's. If it ends before the master's log begins, it is emptied. Later terms are removed.
        Then a report is sent, after which the master sends its log from the reported position on.
        That is up to COMPARED_BYTES before the end of this log, so that these bytes are compared.

        Raises ProtocolError if this is not the first frame of the connection, or if the master's
        term is older than the last term of this log. Raises StoreError if confirmed bytes, which
        enough replicas had, would be cut off. Raises OSError.
        """
        terms = self._terms
        end = self._log.end
        if self.state != ConnectionState.HANDSHAKE or terms is None:
            raise ProtocolError("The master sent a second handshake.")
        if handshake.term_number < terms.last.number:
            raise ProtocolError(
                f"The master is in term {handshake.term_number}, but the log of this replica has "
                f"term {terms.last.number}."
            )

        shared_end = 0
        if not self._is_empty:
            shared_end = common_end(terms.entries, end, handshake.terms, handshake.end)
            shares_nothing = shared_end < 0  # the two logs have no term in common
            master_start = handshake.terms[0].start if handshake.terms else None
            if shares_nothing and master_start is not None and end <= master_start:
                self._start_again(master_start)
            elif shared_end < end:
                self._truncate(max(shared_end, 0))
        terms.truncate(shared_end)  # also terms in which nothing was written
        self.state = ConnectionState.TRANSFER
        if not self._is_empty:
            self._compared_end = max(self._log.end - COMPARED_BYTES, self._store.log_start)
        self._report()

    def _truncate(self, end: int) -> None:
        """Cut off the log and its terms at the position `end`, and lower `confirmed` to `end`.

        `on_truncation` is called first. If `end` is at or before the first byte of the log, the log
        is empty afterwards.

        Raises StoreError if `end` is before `confirmed`, except if an operator has forced the
        election of the master (`is_unclean`). Raises OSError.
        """
        if end < self.confirmed and not self.is_unclean:
            raise StoreError(
                f"The master has the log of this replica only up to {end}, but the log up to "
                f"{self.confirmed} is known to be confirmed.",
                fix="Check whether the consensus service has lost its data, or whether its address "
                "belongs to another cluster. To discard the messages of this replica, empty its "
                "store.",
            )
        log.warning(
            "The log is truncated from %d to %d, where it begins to differ from the master's log.",
            self._log.end,
            end,
        )
        self.on_truncation()
        start = self._store.log_start
        self._log.truncate(max(end, start))
        if self._terms is not None:
            self._terms.truncate(end if end > start else 0)
        self.confirmed = min(self.confirmed, end)
        self._dispatched = 0

    def _start_again(self, master_start: int) -> None:
        """Empty the log, because it ends before the master's log begins, at `master_start`.

        Confirmed bytes are discarded too, because the master had them and has deleted them.
        """
        log.warning(
            "The log is emptied, because it ends at %d and the master's log begins at %d or later.",
            self._log.end,
            master_start,
        )
        self.confirmed = 0  # else `_truncate` would refuse to cut off confirmed bytes
        self._truncate(0)

    def _handle_chunk(self, chunk: LogChunk) -> None:
        """Append the bytes of `chunk` to the log. A chunk without bytes is a heartbeat.

        At the beginning of a connection in failover, bytes that the log has already are compared
        instead. Heartbeats are ignored until that is done.

        If the chunk begins after the end of this log, the master has deleted the bytes in between,
        and the log is emptied first. That is accepted only for the first bytes of a connection, and
        only from a SluiceMQ master. The position that the master has confirmed is stored.

        Raises ProtocolError if bytes come before the handshake, StoreError if the chunk begins at
        any other position than the end of this log, and OSError.
        """
        if self.state != ConnectionState.TRANSFER:
            raise ProtocolError("The master sent bytes of the log before its handshake.")
        if self._compared_end is not None:
            chunk = self._compare(chunk)
            if self._compared_end is not None:
                return
        if chunk.position != self._log.end and not self._is_empty:
            self._skip_to(chunk.position)

        if chunk.term is not None:
            self._handle_term(chunk)
        elif not chunk.data:  # a plain heartbeat: its position is the end of the master's log
            self._master_confirmed = chunk.position
        if chunk.data:
            self._has_received_bytes = True
            self._log.append(chunk.position, chunk.data)

    def _compare(self, chunk: LogChunk) -> LogChunk:
        """Compare the bytes of `chunk` with those that this log has, and return the rest.

        The rest begins at the end of this log, and may be empty. `_compared_end` becomes None when
        the end of this log is reached, or if the chunk begins behind it. Raises StoreError if a
        byte differs.
        """
        end = self._log.end
        size = min(len(chunk.data), end - chunk.position)
        if size < 0:
            self._compared_end = None
            return chunk

        own_bytes = b""
        while len(own_bytes) < size:
            position = chunk.position + len(own_bytes)
            own_bytes += self._store.view_log(position, size - len(own_bytes))
        if own_bytes != chunk.data[:size]:
            raise StoreError(
                f"The log of this replica differs from the master's between {chunk.position} and "
                f"{chunk.position + size}, although both were written in the same term. The "
                "consensus service has lost its data, and two replicas became the master in this "
                "term.",
                fix="If the master's log counts, empty the store of this replica. If this log "
                "counts, stop the master, and elect this replica: sluice cluster elect ID "
                "--unclean.",
            )
        compared_end = chunk.position + size
        self._compared_end = compared_end if compared_end < end else None
        return chunk._replace(position=compared_end, data=chunk.data[size:])

    def _skip_to(self, position: int) -> None:
        """Empty the log, because the master continues at `position`, where the log does not end.

        Raises StoreError if `position` is before the end of the log, if bytes were received over
        this connection already, or if the master is a Java broker. Raises OSError.
        """
        end = self._log.end
        is_sluicemq = self.is_sluicemq_master or self._terms is not None
        are_first_bytes = not self._has_received_bytes
        if not (is_sluicemq and are_first_bytes and position > end):
            raise StoreError(
                f"The log of this replica ends at {end}, but the master continues at {position}.",
                fix="The master's log has other bytes at this position, or does not have them "
                "any more. Empty the store of this replica, so that it copies everything from "
                "its master.",
            )
        self._start_again(position)

    def _handle_term(self, chunk: LogChunk) -> None:
        """Store the term and the confirmed position of `chunk`, before its bytes are written.

        Raises ProtocolError if the number of the term is lower than that of the last term of this
        log, or if it is the same and the terms begin at different positions. Raises OSError.
        """
        terms = self._terms
        term = chunk.term
        assert terms is not None, "plain chunks have no term"
        assert term is not None, "chunks of the failover protocol have a term"
        last_term = terms.last
        if term.number < last_term.number or (
            term.number == last_term.number and term != last_term
        ):
            raise ProtocolError(
                f"The master sent bytes of {term}, but the last term of this log is {last_term}."
            )
        terms.append(term)
        if chunk.confirmed is not None:
            self._master_confirmed = max(chunk.confirmed, self._master_confirmed or 0)

    def _count_read(self, size: int) -> None:
        """Count a read of `size` bytes, to detect whether this slave is far behind its master.

        A size of 0 means that nothing was read for a while, or that the connection has ended. Then
        the slave does not count as behind. If the slave becomes far behind, `on_catch_up(True)` is
        called. If it stops being far behind, `on_catch_up(False)` is called.
        """
        was_far_behind = self._catch_up.is_far_behind
        if size:
            self._catch_up.add_read(size)
        else:
            self._catch_up.reset()
        is_far_behind = self._catch_up.is_far_behind
        if is_far_behind != was_far_behind:
            self.on_catch_up(is_far_behind)

    def _dispatch(self) -> None:
        """Add the records that may become visible to their consume queues.

        In the plain protocol these are all complete records in the log. In the failover protocol
        they are the records up to the position that the master has confirmed. If that has
        increased, `confirmed` is set, and `on_confirmed` is called.

        `on_appended` is called first, in any case. While the slave is behind, the records are
        collected until there are BULK_BYTES, because that takes a third of the time.
        """
        end = self._log.end
        self.on_appended()
        if self._catch_up.is_behind and end - self._dispatched < BULK_BYTES:
            return
        self._dispatched = end
        if self._terms is None:
            self._log.dispatch(None)
            return
        confirmed = min(self._master_confirmed or 0, end)
        if confirmed > self.confirmed:
            self.confirmed = confirmed
            self._log.dispatch(confirmed)
            self.on_confirmed(confirmed)

    # ------------------------------------------------------------------------------------ timers

    def resume_writing(self) -> None:
        """Do nothing: reports are small, and are never held back."""

    def tick(self) -> None:
        """Do the periodic work of a connection: check for silence, dispatch records, and report.

        Called every TICK_S seconds. If the master has sent nothing for `haHousekeepingInterval`,
        the connection is closed. If nothing came for TICK_S seconds, the slave has caught up, and
        the records that were held back are added to their queues. A report is sent if more of the
        log may be reported, and in any case every `haSendHeartbeatInterval`.
        """
        stream = self._stream
        now_s = self._clock.monotonic_s()
        broker = self._settings.broker
        if stream is None:
            return
        if (now_s - self._read_s) * 1000 > broker.ha_housekeeping_ms:
            self._fail(f"The master has sent nothing for {now_s - self._read_s:.1f} s.")
        elif self.state == ConnectionState.TRANSFER:
            if now_s - self._read_s >= TICK_S:
                self._count_read(0)
            if self._dispatched < self._log.end:
                self._dispatch()
            if (now_s - self._written_s) * 1000 >= broker.ha_heartbeat_ms:
                self._report()
            else:
                self.report_synced()

    def stop(self) -> None:
        """Close the connection and send no more reports."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _fail(self, error: str) -> None:
        """Close the connection because of `error`, a text that is kept in `last_error`.

        It is logged, unless the last error had the same text.
        """
        if error != self.last_error:
            log.warning("The connection to the master is closed: %s", error)
        self.last_error = error
        if self._stream is not None:
            self._stream.close()

    def connection_lost(self) -> None:
        """Become ready for the next connection."""
        self._count_read(0)
        self.state = ConnectionState.READY
        self._stream = None


class StreamDialer(Protocol):
    """The method of `net.network.Network` that is used here."""

    async def dial_stream(self, address: str, user: StreamProtocol) -> ByteStream: ...


class ReceiverConnection:
    """One connection of a receiver, until it ends.

    The end of an old connection may be reported late, when the receiver already has a new one: a
    socket with unsent bytes ends only when the kernel stops retrying. Such a report must not end
    the new connection, so everything that comes after the end of this connection is ignored.
    """

    __slots__ = ("_is_over", "_receiver")

    def __init__(self, receiver: LogReceiver) -> None:
        """Create the protocol of one connection of `receiver`."""
        self._receiver = receiver
        self._is_over = False

    def data_received(self, data: bytes) -> None:
        """Pass bytes of the master on to the receiver."""
        if not self._is_over:
            self._receiver.data_received(data)

    def resume_writing(self) -> None:
        """Tell the receiver that most of the unsent bytes were sent."""
        if not self._is_over:
            self._receiver.resume_writing()

    def connection_lost(self) -> None:
        """Tell the receiver, once, that this connection is over."""
        if not self._is_over:
            self._is_over = True
            self._receiver.connection_lost()


async def keep_connected(
    network: StreamDialer, receiver: LogReceiver, address: Callable[[], str]
) -> None:
    """Keep `receiver` connected to the master until cancelled.

    `address()` returns the address of the master's port for slaves as "host:port", or "" if it is
    not known. If it changes, the connection is closed and a new one is opened. While connected,
    `receiver.tick` is called every TICK_S seconds. After a connection has ended or failed, the next
    attempt is made after RETRY_S seconds.
    """
    while True:
        target = address()
        if target:
            connection = ReceiverConnection(receiver)
            try:
                stream = await network.dial_stream(target, connection)
            except SluiceError as error:
                receiver.last_error = str(error)
            else:
                try:
                    receiver.start(stream)
                    while not stream.closed and address() == target:
                        await asyncio.sleep(TICK_S)
                        receiver.tick()
                finally:
                    stream.close()
                    connection.connection_lost()
        await asyncio.sleep(RETRY_S)
