"""A history of replicas: what each step does, and what is looked at when everything rests.

Clients speak to replicas directly, one try a call, most of them to whom the record names. Nobody
waits for an answer within a step; time passes in the steps that wait.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

from histories.checker import check
from histories.history import Change, End, History, Left, Outcome, Seen, Send, TermSeen
from simulation.cluster.history import World
from simulation.cluster.nodes import Node
from simulation.crashes.plan import Violation
from simulation.replicas.node import BROKER, CLUSTER, ReplicaNode
from sluicemq.broker.failover import election
from sluicemq.broker.failover.consensus import Entries, Entry
from sluicemq.client.core import requests
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.errors import SluiceError
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue, TopicConfig
from sluicemq.net.channel import ChannelPool
from sluicemq.record.codec import decode_records
from sluicemq.testing.consensus import MemoryConsensus
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

TOPIC: Final = "history"
QUEUES: Final = [MessageQueue(TOPIC, BROKER, number) for number in range(2)]
PREFIX: Final = election.key_prefix(CLUSTER, BROKER)
TIMEOUT_S: Final = 4.0
REST_S: Final = 300.0
FULL_BYTES: Final = 20_000
WEIGHTS: Final = {
    "send": 40, "read": 16, "end": 10, "topic": 3, "wait": 40, "cut": 6, "silence": 2, "slow": 3,
    "part": 6, "deaf": 4, "consensus": 5, "pause": 3, "jump": 2, "kill": 6, "power": 2, "wipe": 2,
    "full": 1, "switch": 2, "elect": 2, "lose": 2,
}  # fmt: skip
KNOWN_S: Final = 5.0
"""An election must consider the records of replicas that have been there for this time."""
OPERATOR_S: Final = 60.0
"""How long the operator repeats an election that a loss of all records has made necessary."""


class ClientNode(Node):
    """Connections to replicas; every call has one try."""

    pool: ChannelPool

    async def start(self) -> None:
        process = self.begin()
        network = self.network.of(process)
        self.pool = ChannelPool(clock=self.clock, connect=network.dial, timeout_s=TIMEOUT_S)

    async def call(self, node: ReplicaNode, command: Command) -> Command:
        """Raises SluiceError."""
        channel = await self.pool.get(node.address)
        return await channel.call(command, TIMEOUT_S)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        assert self.process is not None
        self.process.spawn(work)


class ReplicaWorld(World):
    """One history."""

    make_node: Callable[..., ReplicaNode] = ReplicaNode
    counts: Sequence[int] = (2, 3, 3)
    """How many replicas there may be."""
    is_order_random = True
    """Whether answers and events of the consensus service overtake each other without a fault."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.history = History()
        self.service = MemoryConsensus()
        self._is_sync_flush = rng.random() < 0.5
        settings = {"flushDiskType": "SYNC_FLUSH" if self._is_sync_flush else "ASYNC_FLUSH"}
        self.nodes = [
            self.make_node(index, self.clock, self.network, settings, self.service)
            for index in range(1, rng.choice(self.counts) + 1)
        ]
        self.clients = [ClientNode(f"client-{i}", self.clock, self.network) for i in range(3)]
        self._values = 0
        self._last_state: Entry | None = None
        self._is_record_lost = False
        """Whether the service has lost its newest state, and has got no new one since."""
        self._running_since_s: dict[tuple[int, str], float] = {}
        """Since when the service has had a record of a replica (id, run id)."""
        self._old_copies: list[tuple[Entries, int]] = []
        """The entries of the service, and its revision, each time when the state had changed."""
        if self.is_order_random:
            self.service.latency_rng = random.Random(rng.getrandbits(32))
        self._run(self._start())

    # ------------------------------------------------------------------------------- life

    @property
    def ledger(self) -> "ReplicaWorld":
        return self

    @property
    def deliveries(self) -> int:
        return len(self.history.seen)

    def finish(self) -> None:
        """Rest, and the checker. Raises Violation."""
        self._run(self._rest())
        wrong = check(self.history)
        if wrong:
            raise Violation(f"{wrong[0]} ({len(wrong)} in all)")

    async def _start(self) -> None:
        self.clock.drive()
        self._note_terms()
        for node in self.nodes:
            await node.start()
        for client in self.clients:
            await client.start()
        await self._until(self._is_whole, 60, "the first master")
        await self._make_first_topic()

    async def _make_first_topic(self) -> None:
        first = self.clients[0]
        await self._until_done(lambda: self._make_topic(first, TOPIC), 60, "the first topic")

    def _note_terms(self) -> None:
        """Each value of the record, at its change. An unclean election must be necessary."""
        real, key = self.service.apply, election.state_key(PREFIX)

        def apply(*arguments: Any, **named: Any) -> bool:
            before = self.view
            is_done = real(*arguments, **named)
            entry = self.service.entries.get(key)
            self._note_running()
            if is_done and entry is not None and entry != self._last_state:
                self._last_state = entry
                self._old_copies.append((dict(self.service.entries), self.service.revision))
                state = self.view.state
                assert state is not None
                seen = TermSeen(
                    state.term,
                    state.master_id,
                    state.run_id,
                    dict(state.in_sync),
                    state.is_unclean,
                    self.clock.now_ms(),
                )
                self.history.terms.append(seen)
                is_needed = self._is_record_lost
                self._is_record_lost = False
                if state.is_unclean and not is_needed and before.state is not None:
                    self._check_necessity(before, before.state, state)
            return is_done

        self.service.apply = apply  # type: ignore[method-assign]

    def _note_running(self) -> None:
        now_s = self.clock.monotonic_s()
        present = {(member.id, member.run_id) for member in self.view.members.values()}
        self._running_since_s = {
            replica: self._running_since_s.get(replica, now_s) for replica in present
        }

    def _check_necessity(
        self, before: election.View, before_state: election.State, elected: election.State
    ) -> None:
        """Note a Violation if an operator has elected a replica although another one was running
        that was the master, or that had everything while the elected one had not."""
        if elected.term == before_state.term:
            return

        def has_everything(member: election.Member) -> bool:
            is_member = before_state.in_sync.get(member.id) == member.incarnation
            return is_member and member.log_end != election.INCOMPLETE

        elected_member = before.members.get(elected.master_id)
        is_known = elected_member is not None and has_everything(elected_member)
        for member in before.members.values():
            since_s = self._running_since_s.get((member.id, member.run_id), math.inf)
            is_running = self.clock.monotonic_s() - since_s > KNOWN_S
            is_master = (member.id, member.run_id) == (before_state.master_id, before_state.run_id)
            is_better = is_master or (has_everything(member) and not is_known)
            if is_running and is_better and member.id != elected.master_id:
                self._failure = Violation(
                    f"needless: {elected.master_id} is elected in term {elected.term} although"
                    f" {member.id} is running, {before_state}"
                )

    @property
    def view(self) -> election.View:
        return election.parse_view(PREFIX, self.service.find(PREFIX))

    def _master(self) -> ReplicaNode:
        state = self.view.state
        return self.nodes[(state.master_id if state else 1) - 1]

    def _is_whole(self) -> bool:
        """All are in the set, in the incarnation that lives, and the master lives."""
        view = self.view
        return (
            view.state is not None
            and view.master is not None
            and len(view.members) == len(self.nodes)
            and all(view.is_in_sync(member) for member in view.members.values())
        )

    def _is_lost(self) -> bool:
        """Is there no disk any more that the record trusts? A proposal that was under way when its
        master's disk was wiped can do that: its master was the last one who knew."""
        state = self.view.state
        return state is not None and not any(
            state.in_sync.get(node.id) == node.incarnation for node in self.nodes
        )

    async def _until(self, is_so: Callable[[], bool], seconds: float, what: str) -> None:
        end_s = self.clock.monotonic_s() + seconds
        while not is_so():
            if self.clock.monotonic_s() > end_s:
                view = self.view
                reasons = [f"{n.name}: {n.reason}" for n in self.nodes if n.is_up]
                raise Violation(f"stuck: {what}; {view.state}, {view.members}, {reasons}")
            await self.clock.advance(0.5)
            if self._failure is not None:
                raise self._failure

    async def _until_done(
        self, work: Callable[[], Coroutine[Any, Any, bool]], seconds: float, what: str
    ) -> None:
        """Tries again until it says so."""
        done: list[bool] = []

        async def go_on() -> None:
            while not await work():
                await asyncio.sleep(0.3)
            done.append(True)

        self.clients[0].spawn(go_on())
        await self._until(lambda: bool(done), seconds, what)

    # ----------------------------------------------------------------------------- clients

    def _target(self, rng: random.Random) -> ReplicaNode:
        return self._master() if rng.random() < 0.85 else rng.choice(self.nodes)

    async def do_send(self, rng: random.Random) -> str:
        client, node, count = rng.choice(self.clients), self._target(rng), rng.choice((1, 1, 3, 20))
        for _ in range(count):
            self._values += 1
            client.spawn(self._send(client, node, rng.choice(QUEUES), f"v{self._values}"))
        return f"{client.name} sends {count}, up to v{self._values}, to {node.name}"

    async def _send(
        self, client: ClientNode, node: ReplicaNode, queue: MessageQueue, value: str
    ) -> bool:
        place = (queue.topic, queue.queue_id)
        send = Send(value, place, self.network.now_s())
        self.history.sends.append(send)
        outgoing = OutgoingMessage(TOPIC, value.encode(), "", "", 0, 0, wait_store_ok=True)
        try:
            command = requests.send("senders", queue, outgoing, self.clock.now_ms())
            answer = await client.call(node, command)
        except SluiceError:
            return False
        if answer.code == ResponseCode.SUCCESS:
            offset = requests.int_field(answer, "queueOffset")
            send.acknowledge(place, offset, self.network.now_s())
        return answer.code == ResponseCode.SUCCESS

    async def do_read(self, rng: random.Random) -> str:
        client, node, queue = rng.choice(self.clients), self._target(rng), rng.choice(QUEUES)
        back = rng.choice((1, 5, 1000))
        client.spawn(self._read(client, node, queue, back))
        return f"{client.name} reads the last {back} of queue {queue.queue_id} from {node.name}"

    async def _read(
        self, client: ClientNode, node: ReplicaNode, queue: MessageQueue, back: int
    ) -> None:
        with contextlib.suppress(SluiceError):
            answer = await client.call(node, requests.offset_max(queue))
            end = requests.int_field(requests.expect_success(answer), "offset")
            await self._pull(client, node, queue, max(end - back, 0))

    async def _pull(
        self, client: ClientNode, node: ReplicaNode, queue: MessageQueue, offset: int
    ) -> list[Seen]:
        found: list[Seen] = []
        while True:
            subscription = Subscription(TOPIC, "*")
            command = requests.pull("readers", queue, offset, subscription=subscription, lite=True)
            answer = requests.parse_pull_response(await client.call(node, command), "")
            for message in decode_records(answer.data):
                place = (queue.topic, queue.queue_id)
                value, now_s = message.body.decode(), self.network.now_s()
                stored_ms = message.store_time_ms
                found.append(Seen(place, message.queue_offset, value, now_s, node.name, stored_ms))
                offset = message.queue_offset + 1
            if offset >= answer.offset_max or not answer.data:
                self.history.seen += found
                return found

    async def do_end(self, rng: random.Random) -> str:
        client, node, queue = rng.choice(self.clients), self._master(), rng.choice(QUEUES)
        client.spawn(self._ask_end(client, node, queue))
        return f"{client.name} asks {node.name} where queue {queue.queue_id} ends"

    async def _ask_end(self, client: ClientNode, node: ReplicaNode, queue: MessageQueue) -> None:
        """Only where the same master was there before and after is it known who has answered."""
        before, called_s = self.view.state, self.network.now_s()
        with contextlib.suppress(SluiceError):
            answer = await client.call(node, requests.offset_max(queue))
            end, after = (
                requests.int_field(requests.expect_success(answer), "offset"),
                self.view.state,
            )
            if before and after and before.term == after.term and before.master_id == node.id:
                place, returned_s = (queue.topic, queue.queue_id), self.network.now_s()
                self.history.ends.append(End(place, end, called_s, returned_s, before.term))

    async def do_topic(self, rng: random.Random) -> str:
        client = rng.choice(self.clients)
        self._values += 1
        client.spawn(self._make_topic(client, f"topic-{self._values}"))
        return f"{client.name} makes topic-{self._values}"

    async def _make_topic(self, client: ClientNode, name: str) -> bool:
        config = TopicConfig(name, 2, 2)
        with contextlib.suppress(SluiceError):
            answer = await client.call(self._master(), requests.update_topic(config, {}))
            if answer.code == ResponseCode.SUCCESS:
                self.history.changes.append(Change(name, Outcome.OK))
                return True
        return False

    # ------------------------------------------------------------------------------ faults

    async def do_wait(self, rng: random.Random) -> str:
        seconds = rng.choice((0.001, 0.01, 0.1, 0.5, 2.0, rng.uniform(0, 15)))
        await self.clock.advance(seconds)
        return f"{seconds:.3f} s pass"

    def _one(self, rng: random.Random) -> ReplicaNode:
        """The master more often than others."""
        return self._master() if rng.random() < 0.5 else rng.choice(self.nodes)

    async def do_cut(self, rng: random.Random) -> str:
        links = list(self.network.links)
        cut = rng.sample(links, min(len(links), rng.choice((1, 2, len(links)))))
        for link in cut:
            link.cut(rng)
        return f"{len(cut)} of {len(links)} connections break"

    async def do_silence(self, rng: random.Random) -> str:
        links = list(self.network.links)
        if not links:
            return "nothing is connected"
        link = rng.choice(links)
        link.fall_silent(rng)
        return f"silence between {link.client.name} and {link.server.name}"

    async def do_slow(self, rng: random.Random) -> str:
        for_s, latency_s = rng.uniform(0.1, 20), rng.choice((0.05, 0.5, 3.0))
        self.network.slow(for_s, latency_s)
        return f"chunks take up to {latency_s} s, for {for_s:.1f} s"

    async def do_part(self, rng: random.Random) -> str:
        one, for_s = self._one(rng), rng.uniform(0.5, 30)
        others = [node for node in [*self.nodes, *self.clients] if node is not one]
        apart: Iterable[Node] = rng.sample(others, rng.randint(1, len(others)))
        for other in apart:
            self.network.part(one.name, other.name, for_s)
        names = ", ".join(sorted(other.name for other in apart))
        return f"{one.name} and {names} do not reach each other for {for_s:.1f} s"

    async def do_deaf(self, rng: random.Random) -> str:
        one, for_s = self._one(rng), rng.uniform(0.5, 20)
        other = rng.choice([node for node in self.nodes if node is not one])
        self.network.deafen(one.name, other.name, for_s)
        return f"{other.name} hears nothing of {one.name} for {for_s:.1f} s"

    async def do_consensus(self, rng: random.Random) -> str:
        node, for_s = self._one(rng), rng.uniform(0.5, 15)
        kind = rng.choice(("is_cut", "is_deaf", "unlucky", "is_down"))
        if kind == "is_down":
            self.service.is_down = True
            self.loop.call_later(for_s, setattr, self.service, kind, False)
            return f"the consensus service is down for {for_s:.1f} s"
        value, later = (random.Random(for_s), None) if kind == "unlucky" else (True, False)
        setattr(node.consensus, kind, value)
        self.loop.call_later(for_s, setattr, node.consensus, kind, later)
        return f"consensus of {node.name}: {kind} for {for_s:.1f} s"

    async def do_pause(self, rng: random.Random) -> str:
        """Nothing goes in or out."""
        node, for_s = self._one(rng), rng.choice((0.5, 5.0, 20.0))
        if node.process is None:
            return f"{node.name} does not run"
        self.network.pause(node.process, for_s)
        node.consensus.is_disconnected = True
        self.loop.call_later(for_s, setattr, node.consensus, "is_cut", False)
        return f"{node.name} pauses for {for_s} s"

    async def do_jump(self, rng: random.Random) -> str:
        node, jump_s = self._one(rng), rng.choice((-600, -30, -1, 1, 30, 600))
        node.clock.wrong_ms += 1000 * jump_s
        return f"the clock of {node.name} jumps by {jump_s} s"

    async def do_kill(self, rng: random.Random) -> str:
        return await self._crash(rng, "kill")

    async def do_power(self, rng: random.Random) -> str:
        return await self._crash(rng, "power")

    async def do_wipe(self, rng: random.Random) -> str:
        return await self._crash(rng, "wipe")

    async def _crash(self, rng: random.Random, how: str) -> str:
        node, away_s = self._one(rng), rng.choice((0.0, 0.3, 3.0, rng.uniform(0, 20)))
        state = self.view.state
        loses = how == "wipe" or (how == "power" and not self._is_sync_flush)
        others = [other for other in self.nodes if other is not node and state is not None
                  and state.in_sync.get(other.id) == other.incarnation]  # fmt: skip
        if loses and not others:
            how = "kill"  # nobody promises anything for the last disk that has everything
        await node.crash(rng, how)
        await self.clock.advance(away_s)
        await self._begin(node)
        return f"{node.name}: {how}, back after {away_s:.1f} s"

    async def _begin(self, node: ReplicaNode) -> None:
        if not node.is_up:
            try:
                await node.start()
            except (SluiceError, OSError) as error:  # its disk is full, say
                if node.files.free_bytes is None:
                    raise
                await node.crash(random.Random(str(error)), "kill")

    async def do_full(self, rng: random.Random) -> str:
        node, for_s = self._one(rng), rng.uniform(1, 20)
        node.files.free_bytes = rng.randrange(FULL_BYTES)
        self.loop.call_later(for_s, setattr, node.files, "free_bytes", None)
        return f"the disk of {node.name} is full for {for_s:.1f} s"

    async def do_switch(self, rng: random.Random) -> str:
        client, master = rng.choice(self.clients), self._master()
        others = [node.id for node in self.nodes if node is not master]
        to = rng.choice([None, *others])

        async def switch() -> None:
            with contextlib.suppress(SluiceError):
                await client.call(master, requests.switch_master(to))

        client.spawn(switch())
        return f"{client.name} wants another master than {master.name}: {to}"

    # ------------------------------------------------------------------- an operator's elections

    async def do_elect(self, rng: random.Random) -> str:
        """An operator elects a replica although no election is necessary: it is refused."""
        node, view = rng.choice(self.nodes), self.view
        others = [
            member
            for member in view.members.values()
            if view.is_in_sync(member)
            and member.log_end != election.INCOMPLETE
            and self.nodes[member.id - 1].is_up
            and member.id != node.id
        ]
        if not others:
            return "no election would be needless"
        await self._ask_for_election(node)
        return f"an operator elects {node.name}, which is not necessary"

    async def _ask_for_election(self, node: ReplicaNode) -> bool:
        """Return whether the replica has begun to elect itself. The connection is a new one."""
        process = self.clients[0].process
        assert process is not None
        dial = self.network.of(process).dial

        async def ask() -> Command:
            channel = await dial(node.address)
            try:
                return await channel.call(requests.elect_master(), TIMEOUT_S)
            finally:
                await channel.close()

        with contextlib.suppress(SluiceError):
            return (await process.run(ask())).code == ResponseCode.SUCCESS
        return False

    async def do_lose(self, rng: random.Random) -> str:
        """The service loses its data, or is restored from an old copy, and an operator elects the
        replica whose log counts: the last master if it runs, else the one with the longest log.

        Nothing acknowledged may be lost then. Nobody can promise that if a disk is missing, or if
        an old copy is all that a replica knows, so both are left out.
        """
        if self._is_lost() or self.view.state is None or not self._are_all_well():
            return "the service keeps its data"
        how = rng.choice(("empty", "old copy", "all stopped"))
        entries, revision = rng.choice(self._old_copies)
        is_old = how == "old copy" and entries[election.state_key(PREFIX)] != self._last_state
        if how == "all stopped":
            for node in rng.sample(self.nodes, len(self.nodes)):
                await node.crash(rng, "kill")
        if is_old:
            self.service.restore(entries, revision)
        else:
            self.service.restore({}, rng.choice((0, self.service.revision)))
        self._last_state = self.service.entries.get(election.state_key(PREFIX))
        self._is_record_lost = True
        self._old_copies.clear()
        for node in self.nodes:
            await self._begin(node)
        await self.clock.advance(rng.choice((0.0, 0.5, 3.0, 12.0)))
        return f"the service: {'old copy' if is_old else how}; {await self._operate()}"

    def _are_all_well(self) -> bool:
        """Do all replicas run, with whole disks, and know the present record?"""
        is_service_well = not self.service.is_down
        return is_service_well and all(
            node.is_up
            and node.replica is not None
            and node.replica.view.state == self.view.state
            and node.files.free_bytes is None
            and not (node.consensus.is_disconnected or node.consensus.loses_responses)
            for node in self.nodes
        )

    async def _operate(self) -> str:
        """Elect the replica whose log counts, until the service has a record of it."""
        end_s = self.clock.monotonic_s() + OPERATOR_S
        before = self.view.state
        while self.clock.monotonic_s() < end_s:
            chosen = self._whose_log_counts()
            if chosen is not None:
                await self._ask_for_election(chosen)
            await self.clock.advance(0.5)
            self._look()
            state = self.view.state
            if state is not None and (before is None or state.term > before.term):
                return f"{self._master().name} is elected in term {state.term}"
        raise Violation(f"stuck: nobody can be elected, {[node.reason for node in self.nodes]}")

    def _whose_log_counts(self) -> ReplicaNode | None:
        """The master of the latest term that runs, else the replica with the longest log: of those
        that say to be in sync, if there are any."""
        running = [
            (node.replica, node.replica.member)
            for node in self.nodes
            if node.is_up and node.replica is not None
        ]
        masters = [
            (replica.status()["epoch"], member.id)
            for replica, member in running
            if replica.status()["role"] == "master"
        ]
        whole = [
            (replica.view.is_in_sync(member), member.log_term, member.log_end, -member.id)
            for replica, member in running
            if member.log_end != election.INCOMPLETE
        ]
        if masters:
            return self.nodes[max(masters)[1] - 1]
        return self.nodes[-max(whole)[-1] - 1] if whole else None

    # --------------------------------------------------------------------------------- end

    async def _rest(self) -> None:
        network = self.network
        network.heal()
        self.service.is_down = False
        for node in self.nodes:
            node.clock.wrong_ms, node.files.free_bytes = 0, None
            node.consensus.is_disconnected = node.consensus.loses_responses = False
            node.consensus.fault_rng = None
        await self.clock.advance(max(0.0, network.rests_at_s - network.now_s()) + 30)
        for node in self.nodes:
            node.clock.wrong_ms, node.files.free_bytes = 0, None
            await self._begin(node)
        await self._until(lambda: self._is_whole() or self._is_lost(), REST_S, "all in sync again")
        if self._is_lost():
            return  # the last disk that has everything is gone: nobody may take over
        client = self.clients[0]
        for queue in QUEUES:
            await self._until_done(lambda queue=queue: self._last(client, queue), 60, "a send")  # type: ignore[misc]
        await self.clock.advance(10)
        assert client.process is not None
        await client.process.run(self._leave(client))

    async def _last(self, client: ClientNode, queue: MessageQueue) -> bool:
        self._values += 1
        return await self._send(client, self._master(), queue, f"v{self._values}")

    async def _leave(self, client: ClientNode) -> None:
        master = self._master()
        nodes = [master, *(node for node in self.nodes if node is not master)]
        for node in nodes:
            log, start = node.log()
            self.history.left.append(Left(node.name, log=log, log_start=start))
        left = self.history.left[0]
        left.changes = master.topics()
        for queue in QUEUES:
            values = await self._pull(client, master, queue, 0)
            found = {seen.offset: seen.value for seen in values}
            left.queues[queue.topic, queue.queue_id] = found
