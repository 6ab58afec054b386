"""The stream of state between a master and its slaves: request 900301, both sides.

A slave asks what comes after the last operation it has; the master answers at once, or when there
is something. An operation whose place in the log the slave has not reached waits, and the slave
asks on with `wantsNone` meanwhile: by asking it also says who it is and how far, and a master
counts nobody who has not (`InSync.claimed`).

A master that does not know the request is a Java broker: then its tables are asked for one by one
(`java_state.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.broker.group_commit import Postponed
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.replication.mirror import (
    Applier,
    Mirror,
    Operation,
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
CLAIM_S: Final = 3.0
"""A slave that waits for its log says so this often."""
LOOK_S: Final = 0.005
LOOK_MAX_S: Final = 0.1
PAUSE_S: Final = 1.0


class Claims(Protocol):
    """Who counts the slaves: `InSync`."""

    def claimed(
        self, replica_id: int, incarnation: str, life: str, log_end: int, state_number: int
    ) -> None: ...


class StateRequests:
    """The master's side. `log_start` tells where its log begins, `ticket` what opens the door to
    it."""

    def __init__(
        self,
        mirror: Mirror,
        claims: Claims,
        files: Files,
        clock: Clock,
        log_start: Callable[[], int],
        ticket: bytes = b"",
    ) -> None:
        self._mirror, self._claims, self._files = mirror, claims, files
        self._clock, self._log_start, self._ticket = clock, log_start, ticket
        self._waiting: dict[Peer, tuple[float, Command]] = {}

    def follow(
        self, header: FollowStateRequest, command: Command, peer: Peer
    ) -> Command | Postponed | None:
        """900301."""
        mirror, now_s = self._mirror, self._clock.monotonic_s()
        mirror.asked(header.replica_id, header.master_run_id, header.number, now_s)
        self._claims.claimed(
            header.replica_id, header.incarnation, header.run_id, header.log_end,
            mirror.number_of(header.replica_id),
        )  # fmt: skip
        if header.wants_none:
            return self._answer([])
        found = mirror.after(header.master_run_id, header.number)
        if found is None:
            return Postponed(self._snapshot())
        if found:
            return self._answer(found)
        self._waiting[peer] = now_s + STATE_WAIT_MS / 1000, command
        mirror.wait_for(mirror.number + 1, lambda: self._look(peer, command, header.number))
        return None

    def _answer(self, operations: list[Operation]) -> Command:
        fields = FollowStateResponse(
            run_id=self._mirror.life, log_start=self._log_start(), ticket=self._ticket.hex()
        )
        body = encode_operations(operations)
        return Command(ResponseCode.SUCCESS, encode_header(fields), body)

    def _snapshot(self) -> WorkItem[Command]:
        found: list[Operation] = yield lambda: self._mirror.snapshot(self._files)
        return self._answer(found)

    def _look(self, peer: Peer, command: Command, number: int) -> None:
        """There is something new, or the time is over."""
        waiting = self._waiting.get(peer)
        if waiting is not None and waiting[1] is command:
            del self._waiting[peer]
            answer = self._answer(self._mirror.after(self._mirror.life, number) or [])
            peer.write(encode_response_to(answer, command))

    def run(self, now_s: float) -> None:
        """A few times a second: who has waited long enough is answered."""
        for peer, (deadline_s, command) in list(self._waiting.items()):
            if deadline_s <= now_s or peer.closed:
                del self._waiting[peer]
                peer.write(encode_response_to(self._answer([]), command))
        self._mirror.settle()


class Claim(NamedTuple):
    """Who follows."""

    replica_id: int
    incarnation: str
    life: str


class StateFollower:
    """The slave's side.

    `log_end` is the end of the own log, `sync` makes it durable and returns it (blocking);
    `in_executor` does what blocks. `on_changed` gets the names of files that have changed, in the
    loop. `java` follows a master that is RocketMQ's, over a channel, until that breaks.
    """

    def __init__(
        self,
        applier: Applier,
        claim: Claim,
        *,
        log_end: Callable[[], int],
        sync: Callable[[], int],
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_changed: Callable[[set[str]], None] = lambda names: None,
        signed: Callable[[Command], Command] = lambda command: command,
        java: Callable[[Channel], Awaitable[None]] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.applier = applier
        self.master_log_start = -1
        """Where the master's log begins; -1: it has not said so, or is RocketMQ's."""
        self.ticket = b""
        """What opens the door to it."""
        self.is_java = False
        self._claim, self._log_end, self._sync = claim, log_end, sync
        self._in_executor, self._on_changed, self._signed = in_executor, on_changed, signed
        self._java = java
        self._outages = Outages(clock, log)
        self._address = ""

    async def run(self, pool: ChannelPool, master: Callable[[], str | None]) -> None:
        """Follows whoever is master, until it is cancelled. `master` tells its address."""
        while True:
            address = master()
            try:
                if address is not None:
                    self._address = address
                    await self.follow(await pool.get(address))
            except (SluiceError, OSError) as error:
                self._outages.report_failure(
                    f"the master {address}", "cannot follow the state of the master %s: %s",
                    address, error, kind=type(error),
                )  # fmt: skip
            await asyncio.sleep(PAUSE_S)

    async def follow(self, channel: Channel) -> None:
        """Until something breaks. Raises SluiceError or OSError."""
        while True:
            answer = await self._ask(channel)
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and self._java is not None:
                self.is_java = True
                await self._java(channel)
                return
            header = self._heard(answer, channel)
            self.applier.take(header.run_id, decode_operations(bytes(answer.body)))
            await self._apply(channel)

    async def _ask(self, channel: Channel, *, wants_none: bool = False) -> Command:
        applier, claim = self.applier, self._claim
        header = FollowStateRequest(
            replica_id=claim.replica_id, incarnation=claim.incarnation, run_id=claim.life,
            log_end=self._log_end(), master_run_id=applier.life, number=applier.number,
            wants_none=wants_none,
        )  # fmt: skip
        command = Command(RequestCode.SLUICE_FOLLOW_STATE, encode_header(header))
        return await channel.call(self._signed(command), ANSWER_WAIT_S)

    def _heard(self, answer: Command, channel: Channel) -> FollowStateResponse:
        if answer.code != ResponseCode.SUCCESS:
            raise RequestError(answer.code, answer.remark or "", address=channel.address)
        header = decode_header(FollowStateResponse, answer.fields)
        self.master_log_start, self.is_java = header.log_start, False
        try:
            self.ticket = bytes.fromhex(header.ticket)
        except ValueError as error:
            raise ProtocolError(f"the master's ticket: {error}") from error
        self._outages.report_success(f"the master {self._address}")
        return header

    async def _apply(self, channel: Channel) -> None:
        """What was taken, as the log comes to it."""
        applier, pause_s, silent_s = self.applier, LOOK_S, 0.0
        while (needed := applier.waits_for) is not None:
            if self._log_end() < needed:
                await asyncio.sleep(pause_s)
                silent_s += pause_s
                pause_s = min(pause_s * 1.5, LOOK_MAX_S)
                if silent_s >= CLAIM_S:
                    silent_s = 0.0
                    header = self._heard(await self._ask(channel, wants_none=True), channel)
                    if header.run_id != applier.life:
                        raise ProtocolError("the master has begun another life.")
                continue
            changed = await self._in_executor(lambda: applier.apply(self._sync()))
            if changed:
                self._on_changed(changed)


def refresh(topics: Topics, groups: Groups, offsets: Offsets, names: set[str]) -> None:
    """Tables that a slave serves from are read again. Raises StoreError, StoreDamagedError."""
    tables: tuple[Topics | Groups, ...] = (topics, groups)
    for table in tables:
        if any(name.startswith(_name(table.document.path)) for name in names):
            old = {item: table.config_of(item) for item in table.table}
            table.table.clear()
            table.load()
            for item in {*old, *table.table}:
                if old.get(item) != table.config_of(item):
                    table.on_change(item)
    if any(name.startswith("config/consumerOffset.json") for name in names):
        offsets.load()


def _name(path: str) -> str:
    return "config/" + path.rpartition("/")[2]
