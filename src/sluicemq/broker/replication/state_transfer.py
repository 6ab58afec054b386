"""Copying a master's state to its slaves with request SLUICE_FOLLOW_STATE (900301), both ends.

A slave asks for the operations after the last one that it has applied (`state_log.py`). The master
answers immediately if there are any, and otherwise parks the request until there are, for
STATE_WAIT_MS at most.

An operation must wait until the slave's commit log is long enough. Meanwhile the slave sends
requests with `wantsNone`, which are answered with no operations. Each request also identifies the
slave and reports how far its state is. A master counts only slaves that have sent such a report
(`InSyncReplicas.record_state_report`).

A master that does not know the request is a Java broker. Then its tables are requested one by one
(`java_state.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.broker.group_commit import Postponed
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.replication.state_applier import StateApplier
from sluicemq.broker.replication.state_log import (
    Operation,
    StateLog,
    decode_operations,
    encode_operations,
)
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ProtocolError, RequestError, SluiceError
from sluicemq.files import Files
from sluicemq.net.channel import Channel, ChannelPool
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.work.background import WorkItem
from sluicemq.outages import Outages
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.replicas import STATE_WAIT_MS, FollowStateRequest, FollowStateResponse

log = logging.getLogger(__name__)

ANSWER_WAIT_S: Final = STATE_WAIT_MS / 1000 + 10.0
"""The timeout of a request, in seconds."""
REPORT_S: Final = 3.0
"""A slave that waits for its commit log sends a request with `wantsNone` this often."""
POLL_S: Final = 0.005
"""The first pause before the slave looks again at the end of its commit log, in seconds."""
POLL_MAX_S: Final = 0.1
"""The longest such pause."""
PAUSE_S: Final = 1.0
"""The pause before a slave tries to follow its master again, in seconds."""


class StateReportRecorder(Protocol):
    """The method of `InSyncReplicas` that the master's end uses."""

    def record_state_report(
        self, replica_id: int, incarnation: str, run_id: str, log_end: int, state_number: int
    ) -> None: ...


class StateSender:
    """The master's end: answers SLUICE_FOLLOW_STATE (900301)."""

    def __init__(
        self,
        state_log: StateLog,
        in_sync: StateReportRecorder,
        files: Files,
        clock: Clock,
        log_start: Callable[[], int],
        ticket: bytes = b"",
    ) -> None:
        """Create the master's end of the transfer of tables.

        `state_log` has the operations on the tables' files, and `in_sync` records the reports of
        slaves. Snapshots are made of `files`. `log_start()` returns the first position of the
        commit log. `ticket` is the secret that a slave must send at the port for slaves; it is b""
        if none is required.
        """
        self._state_log = state_log
        self._in_sync = in_sync
        self._files = files
        self._clock = clock
        self._log_start = log_start
        self._ticket = ticket
        self._parked: dict[Peer, tuple[float, Command]] = {}
        """The deadline, in monotonic seconds, and the parked request of each slave."""

    def follow_state(
        self, header: FollowStateRequest, command: Command, peer: Peer
    ) -> Command | Postponed | None:
        """Answer SLUICE_FOLLOW_STATE (900301) with the operations that the slave does not have yet.

        The request also reports how far the slave is, which is recorded first. Then one of these is
        returned:

        - A response, if there are operations, or if the slave asks for none (`wants_none`).
        - A Postponed, if a snapshot of the tables has to be made first.
        - None, if there are no operations yet. Then the response is written to `peer` when there is
          one, or after STATE_WAIT_MS.
        """
        state_log = self._state_log
        now_s = self._clock.monotonic_s()
        state_log.record_progress(header.replica_id, header.master_run_id, header.number, now_s)
        self._in_sync.record_state_report(
            header.replica_id,
            header.incarnation,
            header.run_id,
            header.log_end,
            state_log.acked_number(header.replica_id),
        )
        if header.wants_none:
            return self._make_response([])
        operations = state_log.operations_after(header.master_run_id, header.number)
        if operations is None:
            return Postponed(self._make_snapshot())
        if operations:
            return self._make_response(operations)
        self._parked[peer] = now_s + STATE_WAIT_MS / 1000, command
        state_log.call_when_recorded(
            state_log.last_number + 1, lambda: self._answer_parked(peer, command, header.number)
        )
        return None

    def _make_response(self, operations: list[Operation]) -> Command:
        """Return a response with `operations`, this run id, the start of the log and the ticket."""
        fields = FollowStateResponse(
            run_id=self._state_log.run_id, log_start=self._log_start(), ticket=self._ticket.hex()
        )
        body = encode_operations(operations)
        return Command(ResponseCode.SUCCESS, encode_header(fields), body)

    def _make_snapshot(self) -> WorkItem[Command]:
        """Make a snapshot on another thread, and return the response with its first operations.

        This is a work item: it yields the function that the other thread calls, and is sent the
        result of that function.
        """
        operations: list[Operation] = yield lambda: self._state_log.make_snapshot(self._files)
        return self._make_response(operations)

    def _answer_parked(self, peer: Peer, command: Command, last_number: int) -> None:
        """Answer the parked request `command` with the operations after `last_number`.

        Do nothing if it was answered meanwhile, for example because its time was over.
        """
        _, parked_command = self._parked.get(peer, (0.0, None))
        if parked_command is command:
            del self._parked[peer]
            operations = self._state_log.operations_after(self._state_log.run_id, last_number) or []
            peer.write(encode_response_to(self._make_response(operations), command))

    def tick(self, now_s: float) -> None:
        """Answer the waiting requests whose deadline has passed, without operations.

        `now_s` is the monotonic time. Requests of closed connections are removed. Then the state
        log checks whether the slaves have what callers wait for, because a slave may have left. The
        broker calls this a few times a second.
        """
        for peer, (deadline_s, command) in list(self._parked.items()):
            if deadline_s <= now_s or peer.closed:
                del self._parked[peer]
                peer.write(encode_response_to(self._make_response([]), command))
        self._state_log.check_replicated()


class ReplicaIdentity(NamedTuple):
    """The identity of a replica: its id, and those of its store and its process.

    `incarnation` is the id of the store, and `run_id` that of the run of the broker.
    """

    replica_id: int
    incarnation: str
    run_id: str


class StateReceiver:
    """The slave's end: requests operations and lets `applier` apply them."""

    def __init__(
        self,
        applier: StateApplier,
        identity: ReplicaIdentity,
        *,
        log_end: Callable[[], int],
        sync: Callable[[], int],
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_changed: Callable[[set[str]], None] = lambda names: None,
        sign: Callable[[Command], Command] = lambda command: command,
        java: Callable[[Channel], Awaitable[None]] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Create the slave's end of the transfer of tables.

        - `applier` applies the operations, and `identity` identifies this replica to the master.
        - `log_end` returns the end of this replica's commit log.
        - `sync` makes the commit log durable and returns its end. It blocks.
        - `in_executor` runs a blocking function on another thread.
        - `on_changed` is called in the event loop with the names of the files that have changed.
        - `sign` signs a request.
        - `java` follows a Java master over a channel until an error ends it. If it is None, a Java
          master is an error.
        """
        self.applier = applier
        self.master_log_start = -1
        """The first position of the master's log. -1 means that the master has not said it yet, or
        is a Java broker."""
        self.ticket = b""
        """The ticket for the master's HA port; b"" if none is required."""
        self.is_java = False
        """Whether the master is a Java broker."""
        self._identity = identity
        self._log_end = log_end
        self._sync = sync
        self._in_executor = in_executor
        self._on_changed = on_changed
        self._sign = sign
        self._java = java
        self._outages = Outages(clock, log)
        self._address = ""
        """The master's address, for log lines."""

    async def run(self, pool: ChannelPool, master: Callable[[], str | None]) -> None:
        """Copy the tables of the master until cancelled.

        `master()` returns the master's address as "host:port", or None if there is no master. It is
        called before each attempt to connect. After an error, which is logged, or without a master,
        the next attempt comes after PAUSE_S seconds.
        """
        while True:
            address = master()
            try:
                if address is not None:
                    self._address = address
                    await self.follow(await pool.get(address))
            except (SluiceError, OSError) as error:
                self._outages.report_failure(
                    f"the master {address}",
                    "Cannot copy the state of the master %s: %s",
                    address,
                    error,
                    kind=type(error),
                )
            await asyncio.sleep(PAUSE_S)

    async def follow(self, channel: Channel) -> None:
        """Request and apply operations of the master at the other end of `channel` until an error.

        If the master does not know the request, it is a Java broker. Then `is_java` is set, and the
        function `java` copies its tables; return when it returns. Raises SluiceError or OSError.
        """
        while True:
            answer = await self._request(channel)
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and self._java is not None:
                self.is_java = True
                await self._java(channel)
                return
            header = self._handle_response(answer, channel)
            self.applier.enqueue(header.run_id, decode_operations(bytes(answer.body)))
            await self._apply(channel)

    async def _request(self, channel: Channel, *, wants_none: bool = False) -> Command:
        """Send SLUICE_FOLLOW_STATE (900301) to the master, and return the response.

        The request reports which operations this replica has. With `wants_none`, the master answers
        at once and without operations. Raises SluiceError if there is no response.
        """
        applier = self.applier
        identity = self._identity
        header = FollowStateRequest(
            replica_id=identity.replica_id,
            incarnation=identity.incarnation,
            run_id=identity.run_id,
            log_end=self._log_end(),
            master_run_id=applier.run_id,
            number=applier.applied_number,
            wants_none=wants_none,
        )
        command = Command(RequestCode.SLUICE_FOLLOW_STATE, encode_header(header))
        return await channel.call(self._sign(command), ANSWER_WAIT_S)

    def _handle_response(self, answer: Command, channel: Channel) -> FollowStateResponse:
        """Store the master's log start and ticket from a response, and return its header.

        `is_java` is set to False. Raises RequestError if the response is an error, and
        ProtocolError if it is invalid.
        """
        if answer.code != ResponseCode.SUCCESS:
            raise RequestError(answer.code, answer.remark or "", address=channel.address)
        header = decode_header(FollowStateResponse, answer.fields)
        self.master_log_start = header.log_start
        self.is_java = False
        try:
            self.ticket = bytes.fromhex(header.ticket)
        except ValueError as error:
            raise ProtocolError(f"The master sent an invalid ticket: {error}") from error
        self._outages.report_success(f"the master {self._address}")
        return header

    async def _apply(self, channel: Channel) -> None:
        """Apply all operations that wait in the applier, each when the commit log is long enough.

        An operation may need a part of the log that this slave has not received yet. Meanwhile, a
        report is sent to the master every REPORT_S seconds. `on_changed` is called with the names
        of the changed files.

        Raises ProtocolError if the master was restarted meanwhile or an operation is invalid,
        OSError, and SluiceError if a report fails.
        """
        applier = self.applier
        pause_s = POLL_S
        silent_s = 0.0  # since the last report
        while (needed_log_end := applier.next_log_end) is not None:
            if self._log_end() < needed_log_end:
                await asyncio.sleep(pause_s)
                silent_s += pause_s
                pause_s = min(pause_s * 1.5, POLL_MAX_S)
                if silent_s >= REPORT_S:
                    silent_s = 0.0
                    await self._report_progress(channel)
                continue
            changed = await self._in_executor(lambda: applier.apply(self._sync()))
            if changed:
                self._on_changed(changed)

    async def _report_progress(self, channel: Channel) -> None:
        """Send a state report to the master, without asking for operations.

        Raises ProtocolError if the master was restarted since it sent the operations that wait, and
        what the request raises.
        """
        answer = await self._request(channel, wants_none=True)
        header = self._handle_response(answer, channel)
        if header.run_id != self.applier.run_id:
            raise ProtocolError("The master was restarted while this slave applied its operations.")


def reload_tables(topics: Topics, groups: Groups, offsets: Offsets, names: set[str]) -> None:
    """Reload the tables of a slave whose files have changed.

    `names` are the names of the changed files, such as `config/topics.json`. Journals and backups
    of a table count as well. `on_change` of the table is called for each topic or group that was
    added, changed or removed. Raises StoreError or StoreDamagedError.
    """
    tables: tuple[Topics | Groups, ...] = (topics, groups)
    for table in tables:
        file_name = _name_of(table.document.path)
        if any(name.startswith(file_name) for name in names):
            _reload_table(table)
    if any(name.startswith("config/consumerOffset.json") for name in names):
        offsets.load()


def _reload_table(table: Topics | Groups) -> None:
    """Load a table from its file, and call its `on_change` for each changed topic or group."""
    old_configs = {name: table.config_of(name) for name in table.table}
    table.table.clear()
    table.load()
    for name in {*old_configs, *table.table}:
        if old_configs.get(name) != table.config_of(name):
            table.on_change(name)


def _name_of(path: str) -> str:
    """Return the name of the replicated file at `path`, which is in the directory `config`."""
    return "config/" + path.rpartition("/")[2]
