"""A cluster that lives through a history: what each step does, and what is looked at after it.

Nobody waits for an answer within a step: sends and joins go on by themselves, over whatever
happens next. Time passes in the steps that wait. `finish` ends all faults, starts whatever does not
run, and gives the cluster time until everything that was promised has arrived.
"""

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from typing import Any, Final

from simulation.cluster.history import World
from simulation.cluster.ledger import Fate, Ledger, Sent
from simulation.cluster.nodes import HOST, BrokerNode, ClientNode, NameServerNode
from simulation.crashes.plan import Violation
from sluicemq.client.core.messages import MessageOptions
from sluicemq.client.core.requests import SendResult, SendStatus
from sluicemq.client.core.transactions import TransactionState
from sluicemq.errors import SluiceError
from sluicemq.model.message import Message

TOPIC: Final = "plain"
ORDERED_TOPIC: Final = "rows"
DELAYS_S: Final = (1, 5, 10, 30, 60)
DRAIN_S: Final = 90 * 60
CALM_S: Final = 150.0
"""After the last fault: calls have timed out, dead clients are expired, silence is over."""
LEASE_S: Final = 60.0
CLIENTS_MAX: Final = 3
WEIGHTS: Final = {
    "send": 30,
    "order": 10,
    "pay": 8,
    "delay": 6,
    "wait": 30,
    "cut": 8,
    "silence": 3,
    "slow": 4,
    "part": 3,
    "pause": 4,
    "jump": 2,
    "restart": 2,
    "crash": 3,
    "names": 2,
    "kill": 3,
    "join": 4,
    "leave": 3,
}


class ClusterWorld(World):
    """One history."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.ledger = self._ledger()
        self.names = [
            NameServerNode(index, self.clock, self.network) for index in range(rng.choice((1, 2)))
        ]
        self.name_addresses = [f"{HOST}:{node.port}" for node in self.names]
        self.is_synchronous = rng.random() < 0.6
        self.settings = {
            "namesrvAddr": ";".join(self.name_addresses),
            "flushDiskType": "SYNC_FLUSH" if self.is_synchronous else "ASYNC_FLUSH",
            "defaultTopicQueueNums": "2",
            "transactionTimeOut": rng.choice(("3000", "6000")),
            "transactionCheckInterval": rng.choice(("5000", "30000")),
        }
        self.brokers = [
            BrokerNode(i, self.clock, self.network, self.settings)
            for i in range(rng.choice((1, 1, 2)))
        ]
        self.senders: list[ClientNode] = []
        self.members: dict[str, list[ClientNode]] = self._groups()
        self._sizes = {name: rng.choice((1, 2, 3)) for name in self.members}
        self._numbers = 0
        self._disturbed_s = 0.0
        self._chores: set[asyncio.Task[Any]] = set()
        self._run(self._start())

    # ------------------------------------------------------------------------------- life

    def finish(self) -> None:
        """What was promised arrives. Raises Violation."""
        self._run(self._drain())

    def _ledger(self) -> Ledger:
        return Ledger()

    async def _prepare(self, first: ClientNode) -> None:
        """Topics and groups that have to be there before anybody consumes."""
        for topic in (TOPIC, ORDERED_TOPIC):
            await first.mq.admin.create_topic(topic, queues=2)

    def _groups(self) -> dict[str, list[ClientNode]]:
        """The consumer groups, without members."""
        self.ledger.group("crowd", TOPIC)
        self.ledger.group("queue", ORDERED_TOPIC, ordered=True)
        return {"crowd": [], "queue": []}

    def _consumers(self) -> list[ClientNode]:
        return [node for members in self.members.values() for node in members]

    def _look(self) -> None:
        super()._look()
        is_calm = self.network.now_s() - self._disturbed_s > CALM_S
        for group in self.ledger.groups.values():
            for node in self.brokers:
                for place, offset in node.committed(group.name).items():
                    self.ledger.commits(group, place, offset, is_calm=is_calm)
        self.ledger.check()

    def _disturb(self, for_s: float = 0.0) -> None:
        self._disturbed_s = max(self._disturbed_s, self.network.now_s() + for_s)

    async def _start(self) -> None:
        self.clock.drive()
        for name_server in self.names:
            await name_server.start()
        for broker in self.brokers:
            await broker.start()
        for index in range(2):
            sender = self._client(f"sender-{index}")
            await sender.start()
            self.senders.append(sender)
        first = self.senders[0]
        assert first.process is not None
        await first.process.run(self._prepare(first))
        for name, size in self._sizes.items():
            for _ in range(size):
                await self._join(name)
        await self.clock.advance(2)

    def _client(self, name: str) -> ClientNode:
        return ClientNode(name, self.clock, self.network, self.name_addresses, self.ledger)

    async def _join(self, group: str) -> ClientNode:
        self._numbers += 1
        node = self._client(f"{group}-{self._numbers}")
        await node.start()
        self.members[group].append(node)
        self._go_on(node, node.consume(self.ledger.groups[group]))
        return node

    def _go_on(self, node: ClientNode, work: Coroutine[Any, Any, Any]) -> None:
        """In the background; a join that fails because of a fault is a client that is gone."""

        async def chore() -> None:
            try:
                await work
            except SluiceError:
                for members in self.members.values():
                    if node in members:
                        members.remove(node)
                await node.end(random.Random(node.name))

        task = self.loop.create_task(chore())
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    # ----------------------------------------------------------------------------- sending

    async def do_send(self, rng: random.Random) -> str:
        """A few messages, one by one or as a batch."""
        node, count = rng.choice(self.senders), rng.choice((1, 1, 2, 5, 12))
        sents = [self.ledger.send(TOPIC, "message") for _ in range(count)]
        if count == 5:
            messages = [Message(TOPIC, sent.body) for sent in sents]
            self._spawn(node, sents, node.mq.send_batch(messages))
            return f"{node.name} sends {sents[0].number} and 4 more in a batch"
        for sent in sents:
            self._spawn(node, [sent], node.mq.send(TOPIC, sent.body, timeout_ms=3000))
        return f"{node.name} sends {', '.join(str(sent.number) for sent in sents)}"

    async def do_order(self, rng: random.Random) -> str:
        """Messages of a key, one after the other."""
        node, key = rng.choice(self.senders), rng.choice("xyz")
        sents = [self.ledger.send(ORDERED_TOPIC, "row") for _ in range(rng.choice((1, 3, 6)))]

        async def one_by_one() -> None:
            for sent in sents:
                await self._tell([sent], node.mq.send(ORDERED_TOPIC, sent.body, sharding_key=key))

        assert node.process is not None
        node.process.spawn(one_by_one())
        return f"{node.name} sends rows {sents[0].number} to {sents[-1].number} of {key}"

    async def do_delay(self, rng: random.Random) -> str:
        """By level or by time."""
        node, sent = rng.choice(self.senders), self.ledger.send(TOPIC, "delayed")
        level = rng.randrange(len(DELAYS_S))
        delay_s = DELAYS_S[level] if rng.random() < 0.5 else rng.randrange(1, 100)
        by_level = delay_s == DELAYS_S[level]
        sent.due_s = self.network.now_s() + delay_s
        option: MessageOptions = {"delay_level": level + 1} if by_level else {"delay": delay_s}
        self._spawn(node, [sent], node.mq.send(TOPIC, sent.body, **option))
        return f"{node.name} sends {sent.number} for in {delay_s} s{' by level' * by_level}"

    async def do_pay(self, rng: random.Random) -> str:
        """A transaction: commit, rollback, or decided at a check."""
        node = rng.choice(self.senders)
        state = rng.choice(list(TransactionState))
        sort = "decided later" if state is TransactionState.UNKNOWN else state.name.lower()
        sent = self.ledger.send(TOPIC, sort, is_transaction=True)

        async def pay() -> None:
            try:
                with contextlib.suppress(SluiceError):
                    await node.payer.send_in_transaction(Message(TOPIC, sent.body), state)
            finally:
                sent.runs = False

        assert node.process is not None
        node.process.spawn(pay())
        return f"{node.name} pays {sent.number}: {sort}"

    def _spawn(self, node: ClientNode, sents: list[Sent], work: Coroutine[Any, Any, Any]) -> None:
        assert node.process is not None
        node.process.spawn(self._tell(sents, work))

    async def _tell(self, sents: list[Sent], work: Coroutine[Any, Any, Any]) -> None:
        """What the sender of these messages is told."""
        for sent in sents:
            sent.fate = Fate.UNSURE
        try:
            told = await work
        except SluiceError:
            return
        results: list[SendResult] = told if isinstance(told, list) else [told]
        if all(result.status is SendStatus.OK for result in results):
            for sent in sents:
                sent.fate = Fate.STORED

    # ------------------------------------------------------------------------------ faults

    async def do_wait(self, rng: random.Random) -> str:
        seconds = rng.choice((0.001, 0.01, 0.3, 2.0, 10.0, rng.uniform(0, 60)))
        await self.clock.advance(seconds)
        return f"{seconds:.3f} s pass"

    async def do_cut(self, rng: random.Random) -> str:
        links = list(self.network.links)
        cut = rng.sample(links, min(len(links), rng.choice((1, 2, len(links)))))
        for link in cut:
            link.cut(rng)
        self._disturb()
        return f"{len(cut)} of {len(links)} connections break"

    async def do_silence(self, rng: random.Random) -> str:
        links = list(self.network.links)
        if not links:
            return "nothing is connected"
        link = rng.choice(links)
        link.fall_silent(rng)
        self._disturb(100)
        return f"silence between {link.client.name} and {link.server.name}"

    async def do_slow(self, rng: random.Random) -> str:
        for_s, latency_s = rng.uniform(0.1, 30), rng.choice((0.1, 2.0, 8.0))
        self.network.slow(for_s, latency_s)
        self._disturb(for_s)
        return f"frames take up to {latency_s} s, for {for_s:.1f} s"

    async def do_part(self, rng: random.Random) -> str:
        one = rng.choice([*self.senders, *self._consumers()])
        other, for_s = rng.choice([*self.brokers, *self.names]), rng.uniform(1, 100)
        self.network.part(one.name, other.name, for_s)
        self._disturb(for_s)
        return f"{one.name} and {other.name} do not reach each other for {for_s:.1f} s"

    async def do_pause(self, rng: random.Random) -> str:
        nodes = [*self.senders, *self._consumers(), *self.brokers]
        node, for_s = rng.choice(nodes), rng.choice((0.5, 5.0, 40.0))
        if node.process is None:
            return f"{node.name} does not run"
        self.network.pause(node.process, for_s)
        self._disturb(for_s)
        return f"{node.name} pauses for {for_s} s"

    async def do_jump(self, rng: random.Random) -> str:
        node = rng.choice([*self.brokers, *self.senders, *self.members["crowd"]])
        jump_s = rng.choice((-600, -30, -1, 1, 30, 600))
        node.clock.wrong_ms += 1000 * jump_s
        self.ledger.checks_delays = False
        return f"the clock of {node.name} jumps by {jump_s} s"

    async def do_restart(self, rng: random.Random) -> str:
        node, away_s = rng.choice(self.brokers), rng.choice((0.0, 0.5, 20.0))
        await node.stop(rng)
        await self.clock.advance(away_s)
        await self._start_broker(node)
        return f"{node.name} is restarted, it was away for {away_s} s"

    async def do_crash(self, rng: random.Random) -> str:
        node, away_s = rng.choice(self.brokers), rng.choice((0.0, 0.5, 20.0))
        power = self.is_synchronous and rng.random() < 0.6
        await node.crash(rng, power=power)
        await self.clock.advance(away_s)
        await self._start_broker(node)
        return f"{node.name} {'loses power' if power else 'is killed'}, back after {away_s} s"

    async def _start_broker(self, node: BrokerNode) -> None:
        await node.start()
        self.ledger.shared_until_s[node.name] = self.network.now_s() + 2 * LEASE_S
        self._disturb()

    async def do_names(self, rng: random.Random) -> str:
        node, away_s = rng.choice(self.names), rng.choice((0.0, 1.0, 40.0))
        await node.end(rng, is_silent=rng.random() < 0.3)
        await self.clock.advance(away_s)
        await node.start()
        self._disturb()
        return f"{node.name} is restarted, it was away for {away_s:g} s"

    async def do_kill(self, rng: random.Random) -> str:
        """A client dies; a sender is there again at once, by another name."""
        is_silent = rng.random() < 0.4
        index = rng.randrange(len(self.senders) + 2)
        self._disturb(100)
        if index < len(self.senders):
            node = self.senders[index]
            await node.end(rng, is_silent=is_silent)
            self._numbers += 1
            self.senders[index] = self._client(f"sender-{self._numbers}")
            await self.senders[index].start()
        else:
            names = tuple(self.members)
            members = self.members[names[index % len(names)]]
            if not members:
                return "there is nobody to kill"
            node = members.pop(rng.randrange(len(members)))
            await node.end(rng, is_silent=is_silent)
        return f"{node.name} is killed{', silently' * is_silent}"

    async def do_join(self, rng: random.Random) -> str:
        group = rng.choice(tuple(self.members))
        if len(self.members[group]) >= CLIENTS_MAX:
            return f"{group} is full"
        self._disturb()
        return f"{(await self._join(group)).name} joins"

    async def do_leave(self, rng: random.Random) -> str:
        members = self.members[rng.choice(tuple(self.members))]
        if not members:
            return "there is nobody to leave"
        node = members.pop(rng.randrange(len(members)))
        self._disturb(10)
        self._go_on(node, node.leave(rng))
        return f"{node.name} leaves"

    # --------------------------------------------------------------------------------- end

    async def _drain(self) -> None:
        self.network.heal()
        await self.clock.advance(max(0.0, self.network.rests_at_s - self.network.now_s()) + 1)
        for node in [*self.brokers, *self.senders, *self._consumers()]:
            node.clock.wrong_ms = 0
        end_s = self.network.now_s() + DRAIN_S
        step_s = 5.0
        while not await self._is_drained():
            if self.network.now_s() > end_s:
                raise Violation(self._what_is_left())
            await self._answer_checks()
            await self.clock.advance(step_s)
            step_s = min(step_s * 1.5, 120.0)
            self._look()

    async def _answer_checks(self) -> None:
        """A producer that has sent nothing says by itself that it can be asked; programs that start
        anew do that, or nobody could decide what their forerunners have left."""
        for node in self.senders:
            assert node.process is not None
            with contextlib.suppress(SluiceError):
                await node.process.run(node.payer.answer_checks(TOPIC))

    async def _is_drained(self) -> bool:
        for name, members in self.members.items():
            if not members:
                await self._join(name)
                await self.clock.advance(1)
        missing = any(self.ledger.missing(group) for group in self.ledger.groups.values())
        return not (missing or self._open() or self._behind())

    def _open(self) -> list[str]:
        """Brokers with transactions that are not decided."""
        return [
            node.name
            for node in self.brokers
            if node.broker is not None and node.broker.core.transactions.table
        ]

    def _behind(self) -> list[str]:
        """Queues that are not committed to their end."""
        return [
            f"{group.name} on {topic}:{node.name}:{queue}: {at} of {end}"
            for node in self.brokers
            for group in self.ledger.groups.values()
            for topic in sorted(group.topics)
            for queue in range(2)
            for at, end in [node.progress(group.name, topic, queue)]
            if at != end
        ]

    def _what_is_left(self) -> str:
        for group in self.ledger.groups.values():
            missing = self.ledger.missing(group)
            if missing:
                names = [f"{sent.sort} {sent.number}" for sent in missing[:5]]
                return f"lost: {group.name} never finished {len(missing)}: {', '.join(names)}"
        if self._open():
            return f"open: transactions are not decided on {self._open()}"
        return f"stuck: {'; '.join(self._behind())}"
