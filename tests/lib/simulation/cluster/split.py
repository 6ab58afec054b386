"""A cluster whose group has members with different subscriptions: joins, leaves, rolling upgrades.

The members of the group `split` want tags of one topic, under the contract that is the seed's turn.
Steps replace a member by one with another expression, change what a running member wants, or roll
the whole group forward to another expression and often back, while messages flow and handlers
fail. In half of the worlds the network fails too; in the others, the calm ones, time passes
instead. What is checked:

    lost      at the end every message was finished that a member wanted when it was sent, and that
              one wants who is there. A group with one subscription is RocketMQ's: it passes over
              what that does not match, so then such a message is not asked for any more
    doubled   no record is given to a second handler, but one whose handler failed and one that was
              *loose*: not committed in its lane, while members came, went, changed or were cut off
              (and for `SETTLE_S` after that), or committed so shortly before its broker was killed
              that the offset may not have been written. What is committed for `SETTLE_S` is never
              loose else
    both      in a calm world no record is given to members with different subscriptions that are
              both there, whatever is committed; but what a member gave up that changed its own
    idle      every history has deliveries; in lanes, where the contract makes them

Who is a member and what is committed in a lane is asked of the brokers, at each step and when a
record comes again.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from simulation.cluster.ledger import Group, Ledger, Place, Sent, place_of
from simulation.cluster.nodes import BrokerNode, ClientNode
from simulation.cluster.world import ClusterWorld
from simulation.crashes.plan import Violation
from sluicemq.broker.consume.contracts import STRICT
from sluicemq.broker.lanes.rules import subscription_key
from sluicemq.client.aio import memberships as groups
from sluicemq.errors import SluiceError
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import Message, StoredMessage
from sluicemq.model.topic import CONTRACT, CONTRACTS, GroupConfig

TAGGED: Final = "select_tagged"
SPLIT: Final = "split"
TAGS: Final = ("t1", "t2", "t3")
WISHES: Final = ("t1", "t1||t2", "t2||t3", "t3", "*")
SETTLE_S: Final = 60.0
CHANGE_S: Final = 35.0
"""What a member had in hand when it changed may come again when it needs longer for it."""
RETRY_S: Final = 30.0
"""Clients try a broker that was away again after so long at most."""
CALM_SETTLE_S: Final = 8.0
"""Without faults all have balanced and committed so soon (commits are every 5 s)."""
FAULTS: Final = frozenset({"cut", "silence", "slow", "part", "pause", "crash", "kill", "names"})
WRITTEN_S: Final = 120.0
"""Offsets are written every 5 s, and less often while a simulated broker rests."""
SPLIT_WEIGHTS: Final = {
    "tag": 40,
    "wait": 30,
    "join": 6,
    "leave": 4,
    "upgrade": 8,
    "change": 5,
    "roll": 3,
    "cut": 4,
    "silence": 1,
    "slow": 2,
    "part": 2,
    "pause": 2,
    "restart": 2,
    "crash": 2,
    "names": 1,
    "kill": 3,
}
Record = tuple[Place, int, bytes]
"""A stored record: its queue, its offset, and its body, because a crash may free an offset."""


def is_wanted(tag: str, tags: str) -> bool:
    return tags == "*" or tag in tags.split("||")


class SplitLedger(Ledger):
    """What such a group was given."""

    def __init__(self) -> None:
        super().__init__()
        self.tag_of: dict[int, str] = {}
        self.was_wanted: set[int] = set()
        self.wants: dict[str, set[str]] = {}
        """Of every client that ever was; of one that changes, the new and the old."""
        self.lane_deliveries = 0
        self.wishes: dict[str, str] = {}
        """Client -> what it wants, of those that are there."""
        self.given: set[Record] = set()
        self.settle_s = SETTLE_S
        self.waiting: dict[Record, list[tuple[str, int]]] = {}
        """Given and not committed -> the lanes that it may be committed in (subscription, age)."""
        self.lanes_of: Callable[[Place, Iterable[str]], list[tuple[str, int]]] = lambda *_: []
        self.failed: set[Record] = set()
        self.done_s: dict[Record, float] = {}
        self.loose: set[Record] = set()
        self.loose_until_s = 0.0
        self.is_calm = False
        self.takers: dict[Record, tuple[str, frozenset[str]]] = {}
        """Who was given a record last, and what it wanted."""
        self.ask: Callable[[], None] = lambda: None
        """Looks at what is committed."""
        self.has_lanes: Callable[[], bool] = lambda: False

    def begins(
        self, group: Group, client: str, message: StoredMessage, now_s: float
    ) -> Sent | None:
        sent = super().begins(group, client, message, now_s)
        record = (place_of(message), message.queue_offset, bytes(message.body))
        if record in self.given:
            self.ask()
            if record not in self.loose or self._is_over(record, now_s):
                self.wrong.append(f"doubled: {record} is given to {client} again, at {now_s:.3f}")
        mine = frozenset(self.wants.get(client, ()))
        taker, theirs = self.takers.get(record, ("", mine))
        has_changed = theirs != self.wants.get(taker, theirs)  # it may give up what it has in hand
        if self.is_calm and not theirs & mine and taker in self.wishes and not has_changed:
            self.wrong.append(f"both: {taker} {[*theirs]} and {client} {[*mine]} have {record}")
        self.takers[record] = (client, mine)
        self.given.add(record)
        self.lane_deliveries += self.has_lanes()
        self.done_s.pop(record, None)
        self.loose.discard(record)
        self.waiting[record] = self.lanes_of(record[0], mine)
        if now_s < self.loose_until_s:
            self.loose.add(record)
        return sent

    def ends(self, group: Group, client: str, message: StoredMessage, *, well: bool) -> None:
        super().ends(group, client, message, well=well)
        if not well:
            record = (place_of(message), message.queue_offset, bytes(message.body))
            self.failed.add(record)
            self.loose.add(record)

    def is_done(self, record: Record, now_s: float) -> None:
        """It is committed."""
        del self.waiting[record]
        self.done_s[record] = now_s

    def _is_over(self, record: Record, now_s: float) -> bool:
        """Is it committed for so long that nobody can have it in hand from before?"""
        done_s = self.done_s.get(record, now_s)
        return record not in self.failed and now_s - done_s > self.settle_s

    def loosen(self, until_s: float) -> None:
        """What is not committed may come again from now on, and so may what is begun until then."""
        self.loose_until_s = max(self.loose_until_s, until_s)
        self.loose.update(self.waiting)

    def forgets(self, broker: str, now_s: float) -> None:
        """The broker was killed: what it committed lately may not be written."""
        for record, done_s in list(self.done_s.items()):
            if record[0][1] == broker and done_s > now_s - WRITTEN_S:
                del self.done_s[record]
                self.loose.add(record)

    def commits(self, group: Group, place: Place, offset: int, *, is_calm: bool) -> None:
        """A group with lanes goes back when one takes up what another left."""

    def missing(self, group: Group) -> list[Sent]:
        return [
            sent
            for sent in super().missing(group)
            if sent.number in self.was_wanted
            and any(is_wanted(self.tag_of[sent.number], tags) for tags in self.wishes.values())
        ]


class _Apart:
    """In place of the registry by which clients of one process may not subscribe differently: here
    each of them stands for a process of its own."""

    def add_user(self, *_: object, **__: object) -> None: ...

    def change_subscription(self, *_: object, **__: object) -> None: ...

    def remove_user(self, *_: object, **__: object) -> None: ...


class SplitWorld(ClusterWorld):
    """One history of such a group."""

    def __init__(self, rng: random.Random) -> None:
        self.contract = rng.choice(CONTRACTS)
        self._met: dict[str, set[str]] = {}
        """Client -> brokers at which it was a member."""
        self._target = rng.choice(WISHES)
        self.is_calm = rng.random() < 0.5
        self._luck = random.Random(rng.getrandbits(32))
        self._together = groups._registry
        groups._registry = _Apart()  # type: ignore[assignment, misc]
        super().__init__(rng)

    def close(self) -> None:
        super().close()
        groups._registry = self._together  # type: ignore[misc]

    def _ledger(self) -> Ledger:
        self.told = SplitLedger()
        self.told.is_calm = self.is_calm
        if self.is_calm:
            self.told.settle_s = CALM_SETTLE_S
        self.told.ask, self.told.lanes_of = self._look_at_offsets, self._lanes_of
        self.told.has_lanes = lambda: any(
            node.broker is not None and SPLIT in node.broker.core.lanes.table
            for node in self.brokers
        )
        return self.told

    def _groups(self) -> dict[str, list[ClientNode]]:
        self.ledger.group(SPLIT, TAGGED)
        return {SPLIT: []}

    async def _prepare(self, first: ClientNode) -> None:
        await first.mq.admin.create_topic(TAGGED, queues=2)
        config = GroupConfig(SPLIT, attributes={f"+{CONTRACT}": self.contract})
        await first.mq.admin.create_group(config)

    async def _join(self, group: str) -> ClientNode:
        if self._luck.random() < (0.1 if self.contract == "strict" else 0.6):
            self._target = self._luck.choice(WISHES)
        self._numbers += 1
        node = self._client(f"{group}-{self._numbers}")
        node.tags = self._target
        self.told.wants[node.name] = {node.tags}
        await node.start()
        self.members[group].append(node)
        self._go_on(node, node.consume(self.ledger.groups[group]))
        return node

    async def _start(self) -> None:
        """Two expressions from the beginning, and messages for both: a strict group refuses one."""
        await super()._start()
        wanted = {node.tags for node in self.members[SPLIT]}
        if len(wanted) == 1:
            self._target = next(tags for tags in WISHES if tags not in wanted)
            self._luck, luck = _Never(), self._luck
            await self._join(SPLIT)
            self._luck = luck
        else:
            await self._join(SPLIT)
        await self.clock.advance(2)
        self._disturb()
        self._look_at_members()
        await self._send(self.senders[0], [*TAGS, *TAGS])
        await self.clock.advance(8)

    async def _drain(self) -> None:
        """Somebody wants everything at the end, where the contract lets him."""
        self.network.heal()
        if self.contract != STRICT:
            self._target = "*"
            self._luck = _Never()
            self._disturb()
            await self._join(SPLIT)
            await self.clock.advance(2)
        await super()._drain()
        if not self.ledger.deliveries or (
            self.contract != STRICT and not self.told.lane_deliveries
        ):
            raise Violation("idle: nothing was delivered, or nothing in lanes")

    # --- steps

    async def do_tag(self, rng: random.Random) -> str:
        """A few messages with tags."""
        tags = [rng.choice(TAGS) for _ in range(rng.choice((1, 3, 8)))]
        return await self._send(rng.choice(self.senders), tags)

    async def _send(self, node: ClientNode, tags: Sequence[str]) -> str:
        sents = [self.ledger.send(TAGGED, "select_tagged") for _ in tags]
        for sent, tag in zip(sents, tags, strict=True):
            self.told.tag_of[sent.number] = tag
            if any(is_wanted(tag, wish) for wish in self.told.wishes.values()):
                self.told.was_wanted.add(sent.number)
            message = Message(TAGGED, sent.body, tag=tag)
            self._spawn(node, [sent], node.mq.send(message, timeout_ms=3000))
        return f"{node.name} sends {sents[0].number} to {sents[-1].number} ({','.join(tags)})"

    async def do_upgrade(self, rng: random.Random) -> str:
        """One member is replaced; sometimes the target changes, perhaps back."""
        members = self.members[SPLIT]
        old = [node for node in members if node.tags != self._target]
        if not old:
            self._target = rng.choice(WISHES)
            return f"the target is {self._target} now"
        node = rng.choice(old)
        new = await self._replace(node, rng)
        return f"{node.name} ({node.tags}) is replaced by {new.name} ({new.tags})"

    async def _replace(self, node: ClientNode, rng: random.Random) -> ClientNode:
        self._disturb()
        new = await self._join(SPLIT)
        await self.clock.advance(rng.choice((0.1, 3.0, 20.0)))
        if node in self.members[SPLIT]:
            self.members[SPLIT].remove(node)
        self._disturb(10)
        self._go_on(node, node.leave(rng))
        return new

    async def do_roll(self, rng: random.Random) -> str:
        """A rolling upgrade of the whole group, and often back."""
        before = self._target
        targets = [rng.choice([tags for tags in WISHES if tags != before])]
        if rng.random() < 0.6:
            targets.append(before)
        luck, self._luck = self._luck, _Never()
        for self._target in targets:
            for node in list(self.members[SPLIT]):
                await self._send(rng.choice(self.senders), [rng.choice(TAGS) for _ in range(3)])
                await self._replace(node, rng)
                self._look_at_members()
        self._luck = luck
        return f"the group is rolled from {before} to {' and to '.join(targets)}"

    async def do_change(self, rng: random.Random) -> str:
        """A member that runs wants something else."""
        nodes = [node for node in self.members[SPLIT] if node.is_member and node.is_up]
        if not nodes:
            return "there is nobody to change"
        node, tags = rng.choice(nodes), rng.choice(WISHES)
        before, node.tags = node.tags, tags
        self.told.wants[node.name].add(tags)
        self._met.pop(node.name, None)
        self._disturb(CHANGE_S)
        self._go_on(node, self._change(node, before, tags))
        return f"{node.name} wants {tags}, not {before}"

    async def _change(self, node: ClientNode, before: str | None, tags: str) -> None:
        """A strict group that has others refuses: then it wants what it did."""
        try:
            await node.change(tags)
        except SluiceError:
            if node.is_up and node.tags == tags:
                node.tags = before
        else:
            self._look_at_members()  # the next change may come before the next step

    async def do_join(self, rng: random.Random) -> str:
        text = await super().do_join(rng)
        return f"{text}, wants {self._target}"

    async def do_restart(self, rng: random.Random) -> str:
        """A broker that was away knows as members who has tried it again: some of them, for a
        while."""
        self._disturb(RETRY_S)
        text = await super().do_restart(rng)
        self._disturb(RETRY_S)
        return text

    async def do_crash(self, rng: random.Random) -> str:
        now_s = self.network.now_s()
        for node in self.brokers:
            self.told.forgets(node.name, now_s)
        return await super().do_crash(rng)

    # --- what is looked at

    def take(self, kind: str, rng: random.Random) -> str:
        self._look_at_members()
        return super().take("wait" if self.is_calm and kind in FAULTS else kind, rng)

    def _disturb(self, for_s: float = 0.0) -> None:
        super()._disturb(for_s)
        self._look_at_members()
        settle_s = for_s + (CALM_SETTLE_S if self.is_calm else SETTLE_S)
        self.told.loosen(self.network.now_s() + settle_s)

    def _look_at_members(self) -> None:
        """Who is there, and what is committed."""
        running = [node for node in self.brokers if node.broker is not None]
        self.told.wishes = {
            node.name: node.tags or "*"
            for node in self.members[SPLIT]
            if node.is_member and self._is_in(node, running)
        }
        for broker in running:
            self._pass_over(broker)
        self._look_at_offsets()

    def _is_in(self, node: ClientNode, running: list[BrokerNode]) -> bool:
        """Is it a member at every broker? Where there are lanes, it stays that while it is away."""
        met = self._met.setdefault(node.name, set())
        now = {broker.name for broker in running if _keys(broker).get(node.name) == node.tags}
        met |= now
        return len(now if self.contract == STRICT else met) == len(self.brokers)

    def _pass_over(self, broker: BrokerNode) -> None:
        """A group with one subscription passes over what that does not match, as in RocketMQ."""
        core: Any = broker.broker and broker.broker.core
        if SPLIT in core.lanes.table:
            return
        for tags in set(_keys(broker).values()):
            self.told.was_wanted -= {
                number
                for number in self.told.was_wanted - self.ledger.groups[SPLIT].finished
                if not is_wanted(self.told.tag_of[number], tags)
            }

    def _look_at_offsets(self) -> None:
        now_s = self.network.now_s()
        nodes = {node.name: node for node in self.brokers}
        for record, lanes in list(self.told.waiting.items()):
            (_, broker, _), offset, _ = record
            if offset < _committed(nodes[broker], record[0], lanes):
                self.told.is_done(record, now_s)

    def _lanes_of(self, place: Place, wishes: Iterable[str]) -> list[tuple[str, int]]:
        """The lanes that those who want this may read for now."""
        node = next(node for node in self.brokers if node.name == place[1])
        found = [(key, _lane(node, key)) for key in map(_key, sorted(wishes))]
        return [(key, lane.join_number if lane is not None else 0) for key, lane in found]

    def _look(self) -> None:
        self._look_at_members()
        super()._look()

    def _behind(self) -> list[str]:
        """What only an idle lane wants stays before the group."""
        return []


def _keys(node: BrokerNode) -> dict[str, str]:
    """Client -> what it wants, as a broker knows it."""
    core: Any = node.broker and node.broker.core
    group = core.consumers.groups.get(SPLIT) if core else None
    return {
        member.client_id.partition("@")[2]: member.subscriptions[TAGGED].expression.replace(" ", "")
        for member in (group.members.values() if group is not None else ())
        if TAGGED in member.subscriptions
    }


class _Never(random.Random):
    """No whim any more."""

    def random(self) -> float:
        return 1.0


def _key(tags: str) -> str:
    return subscription_key(SPLIT, [parse_subscription(TAGGED, tags)])


def _lane(node: BrokerNode, key: str) -> Any:
    core: Any = node.broker and node.broker.core
    lanes = core.lanes.table.get(SPLIT) if core else None
    return lanes.lanes.get(key) if lanes is not None else None


def _committed(node: BrokerNode, place: Place, lanes: Sequence[tuple[str, int]]) -> int:
    """By all of these lanes, as long as they are what they were; else by the group: the place of an
    idle lane moves on by itself, over what others took over and have not done."""
    if node.broker is None:
        return -1
    core: Any = node.broker.core
    topic, _, queue_id = place
    least = int(core.offsets.committed(SPLIT, topic, queue_id))
    found = [_lane(node, key) for key, _ in lanes]
    if any(
        lane is None
        or lane.is_idle
        or lane.join_number != number
        or (topic, queue_id) not in lane.queues
        for lane, (_, number) in zip(found, lanes, strict=True)
    ):
        return least
    return min((int(lane.queues[topic, queue_id].current_offset) for lane in found), default=least)
