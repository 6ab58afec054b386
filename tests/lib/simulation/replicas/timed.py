"""Whole brokers as replicas, with timed messages and masters whose role returns to them.

    python -m simulation.cluster --kind timed --seeds 200

To the steps of `ReplicaWorld` come messages by delay level and by each of the three timer
properties, messages that are taken back, replicas that stop in order, and circles: planned switches
and kills that lead the role away from a master and back to it (A→B→A, A→B→C→A), with timed messages
sent on the way. After the last fault the master's list of pending messages has to be complete; then
time passes until all of them are due, and each is looked for.
"""

import contextlib
import random
from collections.abc import Callable
from typing import Final

from histories.history import Listed, Outcome, Timed
from simulation.replicas.brokers import BrokerReplica
from simulation.replicas.node import BROKER, ReplicaNode
from simulation.replicas.world import QUEUES, TOPIC, WEIGHTS, ClientNode, ReplicaWorld
from sluicemq.client.core import requests
from sluicemq.client.core.messages import Outgoing
from sluicemq.errors import SluiceError
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode

LEVELS_S: Final = (1, 5, 10, 30)
"""Delays of the first levels of messageDelayLevel."""
TIMERS: Final = ("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC")
HOP_S: Final = 25.0
"""How long a hop of a circle may take: a lease ends after 3 s, a slave catches up within 5 s."""
JUMP_MAX_MS: Final = 600_000
DUE_S: Final = 3.0
"""A message that is due is delivered and in sync after this time."""
TIMED_WEIGHTS: Final = {
    **WEIGHTS, "send": 15, "read": 6, "end": 4, "timed": 30, "recall": 5, "circle": 5, "stop": 3,
    "switch": 4, "jump": 1,
}  # fmt: skip


class TimedWorld(ReplicaWorld):
    """One history of whole brokers with timed messages."""

    make_node = BrokerReplica
    nodes: list[BrokerReplica]  # type: ignore[assignment]

    # --- clients

    async def do_timed(self, rng: random.Random) -> str:
        client, node, count = rng.choice(self.clients), self._target(rng), rng.choice((1, 2, 5))
        delay_s = 0.0
        for _ in range(count):
            delay_s = rng.choice((1, 3, 10, rng.uniform(0.2, 60)))
            self._values += 1
            timed = self._timed(rng, f"v{self._values}", delay_s)
            client.spawn(self._send_timed(client, node, timed))
        return f"{client.name} sends {count} timed, up to v{self._values} in {delay_s:.1f} s"

    def _timed(self, rng: random.Random, value: str, delay_s: float) -> Timed:
        kind, queue = rng.choice(("DELAY", *TIMERS)), rng.choice(QUEUES)
        due_ms = self.clock.now_ms() + delay_s * 1000
        return Timed(value, (queue.topic, queue.queue_id), due_ms, kind)

    async def _send_timed(self, client: ClientNode, node: ReplicaNode, timed: Timed) -> bool:
        now_ms = self.clock.now_ms()
        number, timed.due_ms = delay_of(timed.kind, timed.due_ms, now_ms)
        self.history.timed.append(timed)
        properties = f"UNIQ_KEY\1{timed.value}\2{timed.kind}\1{number}\2"
        outgoing = Outgoing(
            TOPIC, timed.value.encode(), properties, "", 0, 0, wait_store_ok=True
        )  # fmt: skip
        queue = MessageQueue(TOPIC, BROKER, timed.queue[1])
        with contextlib.suppress(SluiceError):
            answer = await client.call(node, requests.send("senders", queue, outgoing, now_ms))
            if answer.code == ResponseCode.SUCCESS:
                timed.outcome = Outcome.OK
        return timed.outcome is Outcome.OK

    async def do_recall(self, rng: random.Random) -> str:
        client, luck = rng.choice(self.clients), random.Random(rng.random())
        client.spawn(self._recall(client, self._master(), luck))
        return f"{client.name} takes back one of the messages that wait"

    async def _recall(self, client: ClientNode, node: ReplicaNode, luck: random.Random) -> None:
        with contextlib.suppress(SluiceError):
            found = await self._list(client, node)
            by_value = {timed.value: timed for timed in self.history.timed}
            if not found:
                return
            waiting = luck.choice(found)
            timed = by_value[waiting.unique_id]
            timed.recall = timed.recall or Outcome.UNSURE
            command = requests.cancel_delayed(handle=waiting.handle)
            answer = await client.call(node, command)
            is_early = self.clock.now_ms() < timed.due_ms
            if answer.code == ResponseCode.SUCCESS and is_early and self.history.has_true_clocks:
                timed.recall = Outcome.OK

    async def _list(self, client: ClientNode, node: ReplicaNode) -> list[bodies.WaitingMessage]:
        """Return all pages of the list of pending messages. Raises SluiceError."""
        found: list[bodies.WaitingMessage] = []
        cursor: str | None = None
        while True:
            command = requests.list_delayed(topic=TOPIC, cursor=cursor)
            answer = requests.expect_success(await client.call(node, command))
            found += bodies.decode_waiting(answer.body)
            cursor = (answer.fields or {}).get("cursor")
            if cursor is None:
                return found

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

    async def _until_last_sends(self, client: ClientNode) -> None:
        """One more timed message of each kind, then the list of all that wait."""
        self.history.calm_ms = self.clock.now_ms()
        for kind in ("DELAY", *TIMERS):
            self._values += 1
            due_ms = self.clock.now_ms() + 20_000
            timed = Timed(f"v{self._values}", (TOPIC, 0), due_ms, kind)
            await self._until_done(
                lambda timed=timed: self._send_timed(client, self._master(), timed),  # type: ignore[misc]
                60, f"a timed send ({kind})",
            )  # fmt: skip
        assert client.process is not None
        at_ms = self.clock.now_ms()
        found = await client.process.run(self._list(client, self._master()))
        values = frozenset(waiting.unique_id for waiting in found)
        if self.history.has_true_clocks:
            self.history.listed.append(Listed(at_ms, values))
        last_ms = max(timed.due_ms for timed in self.history.timed)
        last_ms += 0 if self.history.has_true_clocks else JUMP_MAX_MS
        await self.clock.advance(max(last_ms - self.clock.now_ms(), 0) / 1000 + DUE_S)

    async def _leave(self, client: ClientNode) -> None:
        await self._until_last_sends(client)
        await super()._leave(client)


def delay_of(kind: str, due_ms: float, now_ms: int) -> tuple[int, float]:
    """Return the value of the property `kind` for a message due at `due_ms`, and the time at which
    a message with this property is due."""
    delay_ms = max(due_ms - now_ms, 1)
    if kind == "DELAY":
        level = min(range(len(LEVELS_S)), key=lambda at: abs(LEVELS_S[at] * 1000 - delay_ms))
        return level + 1, now_ms + LEVELS_S[level] * 1000
    if kind == "TIMER_DELAY_SEC":
        seconds = max(round(delay_ms / 1000), 1)
        return seconds, now_ms + seconds * 1000
    return (int(due_ms), int(due_ms)) if kind == "TIMER_DELIVER_MS" else (int(delay_ms), due_ms)
