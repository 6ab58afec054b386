"""A replica of the simulated world: its disk, its consensus client, and a process while it runs.

What runs is the replication of the product: the store with its receiver, both ends of the HA
protocol, the in-sync set, the file of terms, the state log, the election. The broker around them
is reduced to `ReplicatedStore`: three requests of clients, and what it takes to change roles. So
a history costs a tenth of one with whole brokers, and thousands of seeds fit into minutes.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final

from simulation.cluster.network import FaultyNetwork
from simulation.cluster.nodes import HOST, SMALL, Node
from simulation.cluster.processes import Process
from sluicemq.broker.failover.election import INCOMPLETE
from sluicemq.broker.failover.replica import Replica
from sluicemq.broker.failover.role_executor import LogEnd
from sluicemq.broker.group_commit import Postponed
from sluicemq.broker.replication.admission import AddressCheck
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.broker.replication.log_receiver import LogReceiver, keep_connected
from sluicemq.broker.replication.log_sender import LogSenders
from sluicemq.broker.replication.state_applier import StateApplier
from sluicemq.broker.replication.state_log import RecordingFiles, ReplicatedPaths, StateLog
from sluicemq.broker.replication.state_transfer import ReplicaIdentity, StateReceiver, StateSender
from sluicemq.broker.replication.terms import LogTerms
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.config import load_broker_config
from sluicemq.errors import SluiceError
from sluicemq.files import read_text, replace_text
from sluicemq.files.incarnation import Incarnation
from sluicemq.model.ids import encode_host, parse_host
from sluicemq.net.channel import ChannelPool
from sluicemq.net.dispatch import Dispatcher, Peer, encode_response_to
from sluicemq.net.work.background import offload_inline
from sluicemq.store.store import Store
from sluicemq.testing.consensus import MemoryConsensus
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.replicas import FollowStateRequest

CLUSTER: Final = "simulated"
BROKER: Final = "broker"
TOPIC: Final = "history"
PORT: Final = 10911
ROOT: Final = "/store"
TOPICS: Final = f"{ROOT}/config/topics.json"
CONFIRMED: Final = f"{ROOT}/config/sluiceReplicas.json"
INCOMPLETE_MARK: Final = f"{ROOT}/incomplete"
TICK_S: Final = 0.2
SYNC_S: Final = (0.0005, 0.02)


class ReplicatedStore:
    """A broker as far as replication goes. It is a `RoleExecutor`."""

    def __init__(self, node: "ReplicaNode", process: Process, rng: random.Random) -> None:
        config, store, _ = load_broker_config("", overrides=node.settings, environment={})
        self.settings = Settings(config, store)
        self.is_dead = lambda: not process.is_alive
        self.files, self.clock, self.network = node.files, node.clock, node.network.of(process)
        self.address, self.ha_address = node.address, f"{HOST}:{node.port + 1}"
        self.rng, self.id = rng, node.id
        self.incarnation = Incarnation(self.files, ROOT, boot=str(node.boot))
        self.pool = ChannelPool(clock=self.clock, connect=self.network.dial)
        self.in_sync: InSyncReplicas | None = None
        self.topics: set[str] = set()
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_paused = False
        self._term: Term | None = None
        self._applier: StateApplier | None = None
        self._receiver: LogReceiver | None = None
        self._confirmed = 0
        self._has_failed = False
        self._sync_timer: asyncio.TimerHandle | None = None

    # --- RoleExecutor

    @property
    def log_end(self) -> LogEnd:
        if self._is_incomplete():
            return LogEnd(0, INCOMPLETE)
        return LogEnd(max(self.log_terms.last.number, 0), self.store.written_offset)

    @property
    def has_failed_disk(self) -> bool:
        """Whether the disk can no longer be written."""
        return self._has_failed

    def pause_requests(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def update_term(self, term: Term) -> None:
        assert self.in_sync is not None, "a slave becomes the master by `change_role`"
        self.in_sync.set_term(term)

    def depose(self, reason: str) -> None:
        if self.in_sync is not None:
            self.in_sync.depose(reason)

    async def change_role(self, term: Term, life: str) -> None:
        await self._end_role()
        self._term = term
        self._open(term, life)
        if term.master_id == self.id:
            await self._lead(term, life)
        elif term.master_id:
            self._follow(term, life)

    # --- roles

    async def start(self, life: str) -> None:
        handlers: dict[int, Callable[[Command, Peer], Any]] = {
            RequestCode.SEND_MESSAGE_V2: self._send,
            RequestCode.PULL_MESSAGE: self._pull,
            RequestCode.GET_MAX_OFFSET: self._end,
            RequestCode.UPDATE_AND_CREATE_TOPIC: self._topic,
            RequestCode.SLUICE_FOLLOW_STATE: self._follow_state,
            RequestCode.SLUICE_SWITCH_MASTER: self._switch,
            RequestCode.SLUICE_ELECT_MASTER: self._elect,
        }
        self._open(None, life)
        port = parse_host(self.address).port
        self._listener = self.network.listener(Dispatcher(handlers))
        await self._listener.start(HOST, [port])

    def _open(self, term: Term | None, life: str) -> None:
        is_master = term is not None and term.master_id == self.id
        places = ReplicatedPaths({"config": f"{ROOT}/config"})
        text = read_text(self.files, CONFIRMED)
        self._confirmed = json.loads(text)["confirmed"] if text else 0
        self._applier = None if is_master else StateApplier(self.files, places)
        if self._applier is not None:
            self._applier.finish_snapshot()
        self.state_log = StateLog(places, run_id=life)
        self.recording_files = RecordingFiles(self.files, self.state_log)
        self.store = Store.open(
            self.settings.store, files=self.files, clock=self.clock, is_gated=is_master,
            confirmed=self._confirmed, incarnation=self.incarnation,
        )  # fmt: skip
        self.state_log.log_end = lambda: self.store.written_offset
        path = f"{ROOT}/epochFileCheckpoint"
        self.log_terms = LogTerms(self.files, path, self.store.written_offset)

    async def _lead(self, term: Term, life: str) -> None:
        store, settings = self.store, self.settings
        self.log_terms.start_term(term.number, store.log_start, store.written_offset)
        self.topics = set(json.loads(read_text(self.files, TOPICS) or "[]"))
        is_sync = settings.store.flush_sync
        self.in_sync = in_sync = InSyncReplicas(
            settings, self.clock,
            lambda: store.synced_offset if is_sync else store.written_offset,
            confirmed=self._confirmed, local_id=self.id, term=term, propose=self.steering.propose,
        )  # fmt: skip
        in_sync.last_state_number = lambda: self.state_log.last_number
        loop = asyncio.get_running_loop()
        self.log_senders = LogSenders(
            store, in_sync, self.log_terms, settings, self.clock, call_soon=loop.call_soon,
            offload=offload_inline, address_check=AddressCheck(settings),
        )  # fmt: skip
        in_sync.on_confirmed += [self._show, lambda end: self.log_senders.send_pending()]
        self._requests = StateSender(
            self.state_log, in_sync, self.files, self.clock, lambda: store.log_start
        )
        self._ha = self.network.stream_listener(self.log_senders.accept)
        await self._ha.start(HOST, [parse_host(self.ha_address).port])
        self._tasks.append(watch(loop.create_task(self._chores())))
        if is_sync:
            store.sync()
        in_sync.tick()

    def _follow(self, term: Term, life: str) -> None:
        assert self._applier is not None
        receiver = self._receiver = LogReceiver(
            self.store, self.store.start_following(), self.log_terms, self.settings, self.clock
        )
        receiver.replica_id = self.id
        receiver.is_sluicemq_master = True
        receiver.confirmed = self._confirmed
        receiver.is_unclean = term.is_unclean
        receiver.on_confirmed = self._note_confirmed
        receiver.on_appended = self._sync_soon
        receiver.on_truncation = lambda: replace_text(self.files, INCOMPLETE_MARK, "")
        state = StateReceiver(
            self._applier, ReplicaIdentity(self.id, self.incarnation.text, life),
            log_end=lambda: self.store.written_offset, sync=self.store.sync,
            in_executor=_inline,
        )  # fmt: skip
        loop = asyncio.get_running_loop()

        def ha_address() -> str:
            return term.ha_address if state.master_log_start >= 0 else ""

        work = (
            keep_connected(self.network, receiver, ha_address),
            state.run(self.pool, lambda: term.address),
            self._chores(),
        )
        self._tasks += [watch(loop.create_task(one)) for one in work]

    async def _end_role(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self.in_sync is not None:
            self.in_sync.depose("another role")
            await self._ha.close()
        self.in_sync = self._receiver = None
        self._is_paused = False
        if self._sync_timer is not None:
            self._sync_timer.cancel()
            self._sync_timer = None
        self._save()
        self.store.close()

    async def _chores(self) -> None:
        for _ in iter(int, 1):
            await asyncio.sleep(TICK_S)
            if self.in_sync is not None:
                self.in_sync.tick()
                self.log_senders.tick()
                self._requests.tick(self.clock.monotonic_s())
            self._save()
            self.store.tick()

    def _is_incomplete(self) -> bool:
        """It has cut its log, and not got all of a master's state, or what is confirmed, since."""
        receiver, applier = self._receiver, self._applier
        is_marked = self.files.exists(INCOMPLETE_MARK)
        if is_marked and receiver is not None and applier is not None:
            is_marked = not (receiver.is_caught_up and applier.has_snapshot)
            if not is_marked:
                self.files.remove(INCOMPLETE_MARK)
                self.files.sync_directory(ROOT)
        return is_marked

    # --- the log

    def _show(self, end: int) -> None:
        self.store.confirm(end)
        self._note_confirmed(end)

    def _note_confirmed(self, end: int) -> None:
        self._confirmed = max(self._confirmed, end)

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # it may lag
            replace_text(self.files, CONFIRMED, json.dumps({"confirmed": self._confirmed}))

    def _sync_soon(self) -> None:
        if self.settings.store.flush_sync and self._sync_timer is None:
            loop = asyncio.get_running_loop()
            self._sync_timer = loop.call_later(self.rng.uniform(*SYNC_S), self._sync)

    def _sync(self) -> None:
        self._sync_timer = None
        try:
            self.store.sync()
        except SluiceError:
            self._has_failed = True
            return
        if self._receiver is not None:
            self._receiver.report_synced()
        elif self.in_sync is not None:
            self.in_sync.tick()

    # --- requests

    @property
    def _serves(self) -> bool:
        in_sync = self.in_sync
        return in_sync is not None and self._has_served(in_sync) and in_sync.refusal is None

    def _has_served(self, in_sync: InSyncReplicas) -> bool:
        start = self.log_terms.last.start
        return in_sync.confirmed >= start

    def _send(self, command: Command, peer: Peer) -> Command | None:
        in_sync = self.in_sync
        if in_sync is None or not self._serves or self._is_paused:
            return Command(ResponseCode.SYSTEM_BUSY)
        queue_id, host = int((command.fields or {})["e"]), encode_host(parse_host(self.address))
        _, offset = self.store.writer.append(
            TOPIC, queue_id, bytes(command.body), b"", 0, 0, 0, self.clock.now_ms(), host, host
        )
        end = self.store.commit()
        self._sync_soon()
        self.log_senders.send_pending()

        def done(result: int | BaseException) -> None:
            is_ok = not isinstance(result, BaseException)
            fields = {"queueOffset": str(offset), "queueId": str(queue_id), "msgId": ""}
            code = ResponseCode.SUCCESS if is_ok else ResponseCode.SYSTEM_ERROR
            peer.write(encode_response_to(Command(code, fields), command))

        in_sync.wait(end, done)
        return None

    def _pull(self, command: Command, peer: Peer) -> Command:
        fields = command.fields or {}
        queue_id, offset = int(fields["queueId"]), int(fields["queueOffset"])
        if self.in_sync is not None and not self._has_served(self.in_sync):
            return Command(ResponseCode.SYSTEM_BUSY)
        found = self.store.reader.read(TOPIC, queue_id, offset, 1000, 1 << 20)
        answer = {
            "nextBeginOffset": str(found.next_offset), "minOffset": str(found.offset_min),
            "maxOffset": str(found.offset_max), "suggestWhichBrokerId": "0",
        }  # fmt: skip
        body = b"".join(bytes(piece) for piece in found.data)
        code = ResponseCode.SUCCESS if body else ResponseCode.PULL_NOT_FOUND
        return Command(code, answer, body)

    def _end(self, command: Command, peer: Peer) -> Command:
        if not self._serves:
            return Command(ResponseCode.SYSTEM_BUSY)
        queue_id = int((command.fields or {})["queueId"])
        return Command(
            ResponseCode.SUCCESS, {"offset": str(self.store.queue_offsets(TOPIC, queue_id)[1])}
        )

    def _topic(self, command: Command, peer: Peer) -> Command | None:
        """Answered when the log, which it belongs to, and the state are everywhere."""
        in_sync = self.in_sync
        if in_sync is None or not self._serves:
            return Command(ResponseCode.SYSTEM_BUSY)
        self.topics.add((command.fields or {})["topic"])
        replace_text(self.recording_files, TOPICS, json.dumps(sorted(self.topics)))

        def members() -> list[int]:
            return [member for member in in_sync.awaited_members() if member != self.id]

        def kept() -> None:
            in_sync.wait(end, lambda result: peer.write(answer(result)))

        def answer(result: int | BaseException) -> bytes:
            is_ok = not isinstance(result, BaseException)
            code = ResponseCode.SUCCESS if is_ok else ResponseCode.SYSTEM_ERROR
            return encode_response_to(Command(code), command)

        end = self.store.written_offset
        self.state_log.call_when_replicated(members, kept)
        return None

    def _follow_state(self, command: Command, peer: Peer) -> Any:
        if self.in_sync is None:
            return Command(ResponseCode.SYSTEM_BUSY)
        header = decode_header(FollowStateRequest, command.fields)
        outcome = self._requests.follow_state(header, command, peer)
        return _finish(outcome.steps) if isinstance(outcome, Postponed) else outcome

    def _switch(self, command: Command, peer: Peer) -> Command:
        text = (command.fields or {}).get("brokerId")
        try:
            self.steering.switch(None if text is None else int(text))
        except SluiceError:
            return Command(ResponseCode.SYSTEM_ERROR)
        return Command(ResponseCode.SUCCESS)

    def _elect(self, command: Command, peer: Peer) -> Command:
        try:
            self.steering.elect()
        except SluiceError:
            return Command(ResponseCode.SYSTEM_ERROR)
        return Command(ResponseCode.SUCCESS)

    steering: Replica


def watch(task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """What a task raises that nobody waits for is told to the loop: the product is at fault."""

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            loop = task.get_loop()
            loop.call_exception_handler({"message": "a task", "exception": error, "handle": task})

    task.add_done_callback(ended)
    return task


def _finish(steps: Generator[Callable[[], Any] | None, Any, Any]) -> Any:
    """All of a work in steps, at once."""
    result: Any = None
    try:
        while True:
            step = steps.send(result)
            result = step() if step is not None else None
    except StopIteration as end:
        return end.value


async def _inline(work: Callable[[], Any]) -> Any:
    return work()


class ReplicaNode(Node):
    """A replica and its disk."""

    def __init__(
        self, number: int, clock: Clock, network: FaultyNetwork, settings: Mapping[str, str],
        service: MemoryConsensus,
    ) -> None:  # fmt: skip
        super().__init__(f"replica-{number}", clock, network)
        self.id, self.port = number, PORT + 100 * number
        self.address = f"{HOST}:{self.port}"
        self.boot = 0
        self.service = service
        self.consensus = service.client()
        self.replicated: ReplicatedStore | None = None
        self.replica: Replica | None = None
        self.settings = {
            **SMALL, "brokerName": BROKER, "brokerClusterName": CLUSTER, "brokerId": str(number),
            "brokerRole": "SYNC_MASTER", "listenPort": str(self.port), "storePathRootDir": ROOT,
            "sluiceConsensus": "etcd://memory:1", "haMaxTimeSlaveNotCatchup": "5000", **settings,
        }  # fmt: skip
        self._starts = 0
        self._wipe()

    def _wipe(self) -> None:
        self.files = CrashableFiles()
        self.files.clock = self.clock

    @property
    def incarnation(self) -> str:
        """As it stands on the disk."""
        text = read_text(self.files, f"{ROOT}/replica.json")
        return str(json.loads(text)["incarnation"]) if text else ""

    @property
    def reason(self) -> str:
        return "" if self.replica is None else self.replica.reason

    async def start(self) -> None:
        """Raises SluiceError when it cannot recover."""
        self._starts += 1
        self.service.clients.remove(self.consensus)
        self.consensus = self.service.client()
        process = self.begin()
        await process.run(self._begin(process))

    async def _begin(self, process: Process) -> None:
        rng = random.Random(f"{self.name} {self._starts}")
        replicated = self.replicated = ReplicatedStore(self, process, rng)

        def make_run_id() -> str:
            return f"{self.id}-{rng.getrandbits(32):08x}"

        run_id = make_run_id()
        await replicated.start(run_id)
        replica = self.replica = Replica(
            replicated, self.consensus, cluster=CLUSTER, broker=BROKER, replica_id=self.id,
            incarnation=replicated.incarnation, make_run_id=make_run_id,
        )  # fmt: skip
        replicated.steering = replica
        watch(process.spawn(replica.run()))

    async def crash(self, rng: random.Random, how: str) -> None:
        """`kill` leaves the disk as it is, `power` what was synced, `wipe` nothing."""
        if self.process is None:
            return
        self.replicated = self.replica = None
        if how == "wipe":
            self._wipe()
        else:
            self.files = self.files.crash(rng) if how == "power" else self.files.kill()
            self.files.clock = self.clock
        self.boot += how == "power"
        await self.end(rng, is_silent=how == "power")
        self.consensus.is_disconnected = True
        await self.consensus.close()

    @property
    def store(self) -> Store:
        """The open store of a node that runs."""
        assert self.replicated is not None
        return self.replicated.store

    def log(self) -> tuple[bytes, int]:
        """The bytes of its log, and where they begin."""
        store = self.store
        position, end = store.log_start, store.written_offset
        pieces = []
        while position < end:
            piece = bytes(store.view_log(position, end - position))
            pieces.append(piece)
            position += len(piece)
        return b"".join(pieces), store.log_start

    def topics(self) -> frozenset[str]:
        """What it knows of them."""
        text = read_text(self.files, TOPICS)
        return frozenset(json.loads(text or "[]"))
