"""Replicas that are whole brokers: `failover.replica` with the `Broker` of production.

`node.ReplicatedStore` is a broker reduced to its replication. Here nothing is reduced: timers,
tables and the restart in a new role are those of the product, over the same network, disks and
consensus.
"""

import asyncio
import contextvars
import random
from typing import Any, Final

from simulation.cluster.processes import Process
from simulation.replicas.node import ReplicaNode, watch
from sluicemq.broker.failover.broker_replica import BrokerRoleExecutor, start_replica
from sluicemq.broker.failover.replica import BrokerClosedError, Replica
from sluicemq.broker.replication.sides import SlaveSide
from sluicemq.broker.server import SWEEP_S, Broker
from sluicemq.config import load_broker_config
from sluicemq.errors import SluiceError
from sluicemq.net.dispatch import Dispatcher
from sluicemq.store.store import Store
from sluicemq.testing.embedded import InlineExecutor

INDEX_STRETCH: Final = 5
"""Indexes and columns follow more slowly than in production: no history asks for them."""
RESTART_S: Final = 1.0
FLUSH: Final = {"timerFlushIntervalMs": "1000", "recallMessageEnable": "true"}


class SimulatedRoleExecutor(BrokerRoleExecutor):
    """A role executor that leaves the priority of the test's own thread alone."""

    def on_role_opening(self, dispatcher: Dispatcher) -> None:
        super().on_role_opening(dispatcher)
        quieten(self.broker)


class BrokerReplica(ReplicaNode):
    """One whole broker and its disk, restarted by a supervisor when it cannot take a role."""

    broker: Broker | None = None
    _task: asyncio.Task[None] | None = None

    async def _begin(self, process: Process) -> None:
        rng = random.Random(f"{self.name} {self._starts}")
        overrides = {**self.settings, **FLUSH}
        config, store, _ = load_broker_config("", overrides=overrides, environment={})

        def make_run_id() -> str:
            return f"{self.id}-{rng.getrandbits(32):08x}"

        replica, broker = await start_replica(
            config, store, self.consensus, role_executor=SimulatedRoleExecutor(), files=self.files,
            network=self.network.of(process), boot=str(self.boot), make_run_id=make_run_id,
            clock=self.clock, executor=InlineExecutor(), stretch_pause=stretch,
        )  # fmt: skip
        self.replica, self.broker = replica, broker
        self._task = watch(process.spawn(self._run(replica, process)))

    async def _run(self, replica: Replica, process: Process) -> None:
        try:
            await replica.run()
        except BrokerClosedError:
            if self.files.free_bytes is None:
                raise
            loop = asyncio.get_running_loop()
            restart = self._restart(process)
            loop.call_later(
                RESTART_S, lambda: loop.create_task(restart), context=contextvars.Context()
            )

    async def _restart(self, process: Process) -> None:
        """Start again after a full disk has closed the broker, as a supervisor does."""
        while self.process is process:
            await self.crash(random.Random(self.name), "kill")
            try:
                await self.start()
            except (SluiceError, OSError):
                if (started := self.process) is not None:
                    process = started
                await asyncio.sleep(RESTART_S)

    async def crash(self, rng: random.Random, how: str) -> None:
        self.broker = None
        self.consensus.is_disconnected = True
        await super().crash(rng, how)

    async def stop(self, rng: random.Random) -> None:
        """Stop in order: a master hands over first if another replica can take over."""
        replica, broker = self.replica, self.broker
        if self.process is None or replica is None or broker is None:
            return
        if self._task is not None:
            self._task.cancel()
        self.replica = self.broker = None
        try:
            await self.process.run(_close(replica, broker))
        except OSError:  # as good as killed
            if self.files.free_bytes is None:
                raise
        self.files = self.files.kill()
        self.files.clock = self.clock
        await self.end(rng)

    @property
    def store(self) -> Store:
        assert self.broker is not None
        return self.broker.store

    def topics(self) -> frozenset[str]:
        assert self.broker is not None
        return frozenset(self.broker.core.topics.table)


def quieten(broker: Broker) -> None:
    """Leave the priority of the test's own thread alone while a slave catches up."""
    if isinstance(broker.replication_side, SlaveSide):
        broker.replication_side.log_receiver.on_catch_up = lambda is_low: None


def stretch(period_s: float) -> float:
    """Return the pause of a broker's chore whose usual pause is `period_s`."""
    return period_s if period_s >= SWEEP_S else period_s * INDEX_STRETCH


async def _close(replica: Replica, broker: Broker) -> Any:
    await replica.close()
    await broker.close()
