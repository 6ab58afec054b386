"""Whole brokers as replicas, with timed messages and masters whose role returns to them.

    python -m simulation.cluster --kind timed --seeds 200

To the steps of `ReplicaWorld` come messages by delay level and by each of the three timer
properties, messages that are taken back, replicas that stop in order, and circles: planned switches
and kills that lead the role away from a master and back to it (A→B→A, A→B→C→A), with timed messages
sent on the way. After the last fault the master's list of pending messages has to be complete; then
time passes until all of them are due, and each is looked for.
"""

import contextlib
import gc
import random
from collections.abc import Callable
from typing import Final

from histories import timed
from histories.history import Outcome, Timed
from simulation.replicas.brokers import BrokerReplica
from simulation.replicas.node import BROKER, ReplicaNode
from simulation.replicas.world import QUEUES, TOPIC, WEIGHTS, ClientNode, ReplicaWorld
from sluicemq.client.core import requests
from sluicemq.errors import SluiceError
from sluicemq.wire.codes import ResponseCode

HOP_S: Final = 25.0
"""How long a hop of a circle may take: a lease ends after 3 s, a slave catches up within 5 s."""
JUMP_MAX_MS: Final = 600_000
LAST_MS: Final = 20_000
DUE_S: Final = 3.0
"""A message that is due is delivered and in sync after this time."""
LOSS_STEPS: Final = ("elect", "lose")
TIMED_WEIGHTS: Final = {
    **{name: weight for name, weight in WEIGHTS.items() if name not in LOSS_STEPS},
    "send": 15, "read": 6, "end": 4, "timed": 30, "recall": 5, "circle": 5, "stop": 3,
    "switch": 4, "jump": 1,
}  # fmt: skip
LOSS_WEIGHTS: Final = {**TIMED_WEIGHTS, "elect": 4, "lose": 8}


class TimedWorld(ReplicaWorld):
    """One history of whole brokers with timed messages."""

    make_node = BrokerReplica
    nodes: list[BrokerReplica]  # type: ignore[assignment]
    is_order_random = False

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        now_ms, now_s = self.clock.now_ms(), self.clock.monotonic_s()
        self.history.epoch_ms = now_ms - now_s * 1000
        self.history.timers_come_once = True

    def close(self) -> None:
        """End the history and give back the memory of its disks: a timer wheel has 38 MB."""
        super().close()
        gc.collect()

    # --- clients

    async def do_timed(self, rng: random.Random) -> str:
        client, node, count = rng.choice(self.clients), self._target(rng), rng.choice((1, 2, 5))
        delay_s = 0.0
        for _ in range(count):
            delay_s = rng.choice((1, 3, 10, rng.uniform(0.2, 60)))
            self._values += 1
            due_ms = self.clock.now_ms() + delay_s * 1000
            one = timed.draw(rng, f"v{self._values}", rng.choice(QUEUES), due_ms)
            client.spawn(self._send_timed(client, node, one))
        return f"{client.name} sends {count} timed, up to v{self._values} in {delay_s:.1f} s"

    async def _send_timed(self, client: ClientNode, node: ReplicaNode, one: Timed) -> bool:
        command = timed.send(one, BROKER, self.clock.now_ms())
        self.history.timed.append(one)
        with contextlib.suppress(SluiceError):
            answer = await client.call(node, command)
            if answer.code == ResponseCode.SUCCESS:
                one.outcome = Outcome.OK
        return one.outcome is Outcome.OK

    async def do_recall(self, rng: random.Random) -> str:
        client, luck = rng.choice(self.clients), random.Random(rng.random())
        asking = timed.take_back(self.history, TOPIC, luck, self.clock.now_ms)
        client.spawn(self._ask(client, self._master(), asking))
        return f"{client.name} takes back one of the messages that wait"

    async def _ask(self, client: ClientNode, node: ReplicaNode, asking: timed.Asking) -> bool:
        """Do what `asking` asks for; return whether it came to its end."""
        with contextlib.suppress(SluiceError):
            command = next(asking)
            with contextlib.suppress(StopIteration):
                while True:
                    command = asking.send(await client.call(node, command))
            return True
        return False

    # --- roles

    async def do_circle(self, rng: random.Random) -> str:
        """The role leaves the master and returns to it, over one or two others."""
        first = self._master()
        others = [node for node in self.nodes if node is not first]
        path = [*rng.sample(others, rng.randint(1, len(others))), first]
        hops = [first.name]
        for target in path:
            how = "kill" if rng.random() < 0.2 else "switch"
            if not await self._hop(rng, target, how):
                return f"{'→'.join(hops)}, {how} to {target.name} does not succeed"
            hops.append(target.name)
            await self.do_timed(rng)
            await self.clock.advance(rng.choice((0.1, 2.0, 4.0)))
        self.history.returns += 1
        return "→".join(hops)

    async def _hop(self, rng: random.Random, target: ReplicaNode, how: str) -> bool:
        """Make `target` the master by a planned switch, or by killing the others' master."""
        if not await self._passes(self._is_whole):
            return False
        master, client = self._master(), rng.choice(self.clients)
        if how == "kill":
            await master.crash(rng, "kill")
            if not await self._passes(lambda: self._master() is not master):
                await self._begin(master)
                return False
            await self._begin(master)
            if self._master() is target:
                return await self._passes(self._is_whole)
            master = self._master()
            if not await self._passes(self._is_whole):
                return False
        with contextlib.suppress(SluiceError):
            assert client.process is not None
            await client.process.run(client.call(master, requests.switch_master(target.id)))
        return await self._passes(lambda: self._master() is target and self._is_whole())

    async def _passes(self, is_so: Callable[[], bool]) -> bool:
        """Let up to HOP_S pass until `is_so()` holds; return whether it does."""
        end_s = self.clock.monotonic_s() + HOP_S
        while not is_so():
            if self.clock.monotonic_s() > end_s:
                return False
            await self.clock.advance(0.5)
            self._look()
        return True

    async def do_stop(self, rng: random.Random) -> str:
        node, away_s = self._one(rng), rng.choice((0.0, 1.0, 8.0))
        assert isinstance(node, BrokerReplica)
        await node.stop(rng)
        await self.clock.advance(away_s)
        await self._begin(node)
        return f"{node.name}: stopped in order, back after {away_s} s"

    async def do_jump(self, rng: random.Random) -> str:
        self.history.has_true_clocks = False
        return await super().do_jump(rng)

    # --- the end

    async def _last_timed(self, client: ClientNode) -> None:
        """Send one more timed message of each kind, and list all that wait."""
        for kind in timed.KINDS:
            await self._until_done(
                lambda kind=kind: self._try_timed(client, kind), 60, f"a timed send ({kind})"  # type: ignore[misc]
            )  # fmt: skip
        if self.history.has_true_clocks:
            await self._until_done(
                lambda: self._ask(
                    client, self._master(),
                    timed.note_pending(self.history, TOPIC, self.clock.now_ms()),
                ), 60, "the list of pending messages",
            )  # fmt: skip
        last_ms = max(one.due_ms for one in self.history.timed)
        last_ms += 0 if self.history.has_true_clocks else JUMP_MAX_MS
        await self.clock.advance(max(last_ms - self.clock.now_ms(), 0) / 1000 + DUE_S)

    async def _try_timed(self, client: ClientNode, kind: str) -> bool:
        self._values += 1
        due_ms = self.clock.now_ms() + LAST_MS
        one = Timed(f"v{self._values}", (TOPIC, 0), due_ms, kind)
        return await self._send_timed(client, self._master(), one)

    async def _leave(self, client: ClientNode) -> None:
        await self._last_timed(client)
        await super()._leave(client)


class LossWorld(TimedWorld):
    """One history in which the consensus service also loses its data, and an operator elects."""

    is_order_random = True
