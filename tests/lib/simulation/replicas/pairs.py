"""A plain pair, SYNC_MASTER and SLAVE by their files, whose roles an operator exchanges.

    python -m simulation.cluster --kind pairs --seeds 200

No consensus is involved: both brokers stop in order, `brokerRole` and `brokerId` change places, and
both start again. A history has several exchanges, so each broker is master more than once (A→B→A).
Brokers are killed and restarted in their role in between. Timed messages are sent all the time, and
the checker of `histories` judges what is left.
"""

import random
from typing import Final

from histories.history import TermSeen
from simulation.cluster.nodes import NameServerNode
from simulation.cluster.processes import Process
from simulation.replicas.brokers import BrokerReplica, quieten, stretch
from simulation.replicas.node import ReplicaNode
from simulation.replicas.timed import TIMED_WEIGHTS, TimedWorld
from sluicemq.broker.replication.sides import MasterSide, SlaveSide
from sluicemq.broker.server import Broker
from sluicemq.config import load_broker_config
from sluicemq.testing.embedded import InlineExecutor

NAMES: Final = "127.0.0.1:9876"
SYNC_S: Final = 90.0
"""Silence lasts up to 90 s, and a slave asks the name server for its master every 10 s."""
STEPS: Final = ("send", "read", "end", "timed", "recall", "cut", "silence")
PAIR_WEIGHTS: Final = {
    **{name: TIMED_WEIGHTS[name] for name in STEPS}, "wait": 25, "kill": 3,
    "circle": 8, "exchange": 4, "stop": 3,
}  # fmt: skip


class PairNode(BrokerReplica):
    """One broker of the pair. `is_master` is what its file says when it starts."""

    is_master = False

    async def _begin(self, process: Process) -> None:
        settings = {
            **self.settings, "brokerRole": "SYNC_MASTER" if self.is_master else "SLAVE",
            "brokerId": "0" if self.is_master else "1", "sluiceConsensus": "",
            "namesrvAddr": NAMES, "registerNameServerPeriod": "10000", "slaveReadEnable": "true",
        }  # fmt: skip
        config, store, _ = load_broker_config("", overrides=settings, environment={})
        broker = Broker(
            config, store, clock=self.clock, files=self.files, network=self.network.of(process),
            executor=InlineExecutor(), stretch_pause=stretch,
        )  # fmt: skip
        broker.on_opening = lambda dispatcher: quieten(broker)
        await broker.start()
        self.broker = broker

    async def stop(self, rng: random.Random) -> None:
        """Stop in order."""
        if self.process is None or self.broker is None:
            return
        broker, self.broker = self.broker, None
        await self.process.run(broker.close())
        await self.end(rng)

    @property
    def log_end(self) -> int:
        return -1 if self.broker is None else self.broker.store.written_offset


class PairWorld(TimedWorld):
    """One history of a pair."""

    make_node = PairNode
    nodes: list[PairNode]  # type: ignore[assignment]
    counts = (2,)

    async def _start(self) -> None:
        self.clock.drive()
        self._epoch = 0
        await NameServerNode(0, self.clock, self.network).start()
        self.nodes[0].is_master = True
        for node in self.nodes:
            await self._begin(node)
        for client in self.clients:
            await client.start()
        await self._make_first_topic()

    async def _begin(self, node: ReplicaNode) -> None:
        assert isinstance(node, PairNode)
        if not node.is_up:
            await node.start()
            if node.is_master:
                self._epoch += 1
                self.history.terms.append(
                    TermSeen(self._epoch, node.id, str(self._epoch), {}, at_ms=self.clock.now_ms())
                )

    def _master(self) -> ReplicaNode:
        return next(node for node in self.nodes if node.is_master)

    def _is_lost(self) -> bool:
        return False

    def _is_whole(self) -> bool:
        """Whether the slave has the log and the state of its master."""
        if not all(node.is_up for node in self.nodes):
            return False
        master, slave = sorted(self.nodes, key=lambda node: not node.is_master)
        assert master.broker is not None
        assert slave.broker is not None
        side, other = master.broker.replication_side, slave.broker.replication_side
        assert isinstance(side, MasterSide)
        assert isinstance(other, SlaveSide)
        state_log = side._state_log
        has_state = (
            other.state_receiver.applier.has_snapshot
            and state_log.acked_number(1) == state_log.last_number
        )
        return other.is_connected() and has_state and master.log_end == slave.log_end

    async def _crash(self, rng: random.Random, how: str) -> str:
        node, away_s = self._one(rng), rng.choice((0.0, 0.3, 3.0))
        await node.crash(rng, how)
        await self.clock.advance(away_s)
        await self._begin(node)
        return f"{node.name}: {how}, back after {away_s:.1f} s"

    # --- roles

    async def do_exchange(self, rng: random.Random) -> str:
        """The two brokers exchange their roles once."""
        done = await self._exchange(rng)
        return f"{self._master().name} is master, {'exchanged' if done else 'as before'}"

    async def do_circle(self, rng: random.Random) -> str:
        """The brokers exchange their roles twice, with timed messages in between."""
        first = self._master()
        for _ in range(2):
            if not await self._exchange(rng):
                return f"no exchange: {self._master().name} stays master"
            await self.do_timed(rng)
            await self.clock.advance(rng.choice((0.1, 2.0, 4.0)))
        self.history.returns += 1
        return f"{first.name} is master again"

    async def _exchange(self, rng: random.Random) -> bool:
        """Stop master and slave in order when the slave has everything, and start each in the
        other's role. Return False, with the roles as before, if the slave stays behind."""
        master = self._master()
        slave = next(node for node in self.nodes if node is not master)
        assert isinstance(master, PairNode)
        end_s = self.clock.monotonic_s() + SYNC_S
        while not self._is_whole():
            if self.clock.monotonic_s() > end_s:
                return False
            await self.clock.advance(0.1)
            self._look()
        assert master.broker is not None
        store = master.broker.store
        await master.stop(rng)
        if store.written_offset != slave.log_end:  # delivered while it stopped
            await self._begin(master)
            return False
        await slave.stop(rng)
        master.is_master, slave.is_master = False, True
        await self._begin(slave)
        await self._begin(master)
        return True
