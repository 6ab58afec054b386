"""A cluster whose group has members with different subscriptions: joins, leaves, rolling upgrades.

The members of the group `split` want tags of one topic, under a contract that the seed chooses. A
step replaces a member by one with another expression, towards a target that changes, forward and
back, while messages flow and handlers fail. In half of the worlds the network fails too; in the
others, the calm ones, time passes instead. What is checked:

    lost      at the end every message that a member wanted when it was sent, and that one wants
              who is there, was finished
    doubled   no record is given to a second handler, but one whose handler failed and one that was
              *loose*: not committed in its lane while members came, went or were cut off (and for
              `SETTLE_S` after that), or committed so shortly before its broker was killed that the
              offset may not have been written
    both      in a calm world no record is given to members with different subscriptions that are
              both there, whatever is committed

What is committed in a lane is read from the brokers at each step, as the group's offsets are.
"""

import random
from typing import Any, Final

from sluicemq.broker.lane_rules import subscription_key
from sluicemq.client.aio import groups
from sluicemq.filter.tags import subscribe
from sluicemq.model.message import Message, StoredMessage
from sluicemq.model.topic import CONTRACT, CONTRACTS, GroupConfig
from sluicemq.testing.cluster.ledger import Group, Ledger, Place, Sent, place_of
from sluicemq.testing.cluster.nodes import BrokerNode, ClientNode
from sluicemq.testing.cluster.world import ClusterWorld

TAGGED: Final = "tagged"
SPLIT: Final = "split"
TAGS: Final = ("t1", "t2", "t3")
WISHES: Final = ("t1", "t1||t2", "t2||t3", "t3", "*")
SETTLE_S: Final = 60.0
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
        self.wants: dict[str, str] = {}
        """Of every client that ever was."""
        self.wishes: dict[str, str] = {}
        """Client -> what it wants, of those that are there."""
        self.given: set[Record] = set()
        self.waiting: dict[Record, str] = {}
        """Given and not committed -> what the client that has it wants."""
        self.done_s: dict[Record, float] = {}
        self.loose: set[Record] = set()
        self.loose_until_s = 0.0
        self.is_calm = False
        self.takers: dict[Record, tuple[str, str]] = {}
        """Who was given a record last, and what it wanted."""

    def begins(
        self, group: Group, client: str, message: StoredMessage, now_s: float
    ) -> Sent | None:
        sent = super().begins(group, client, message, now_s)
        record = (place_of(message), message.queue_offset, bytes(message.body))
        if record in self.given and record not in self.loose:
            self.wrong.append(f"doubled: {record} is given to {client} again, at {now_s:.3f}")
        mine = self.wants.get(client, "")
        taker, theirs = self.takers.get(record, ("", mine))
        if self.is_calm and theirs != mine and taker in self.wishes:
            self.wrong.append(f"both: {taker} ({theirs}) and {client} ({mine}) have {record}")
        self.takers[record] = (client, mine)
        self.loose.discard(record)
        self.given.add(record)
        self.waiting[record] = mine
        if now_s < self.loose_until_s:
            self.loose.add(record)
        return sent

    def ends(self, group: Group, client: str, message: StoredMessage, *, well: bool) -> None:
        super().ends(group, client, message, well=well)
        if not well:
            record = (place_of(message), message.queue_offset, bytes(message.body))
            self.loose.add(record)

    def loosen(self, until_s: float) -> None:
        """What is not committed may come again from now on, and so may what is begun until then."""
        self.loose_until_s = max(self.loose_until_s, until_s)
        self.loose.update(self.waiting)

    def forgets(self, broker: str, now_s: float) -> None:
        """The broker was killed: what it committed lately may not be written."""
        self.loose.update(
            record
            for record, done_s in self.done_s.items()
            if record[0][1] == broker and done_s > now_s - WRITTEN_S
        )

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

    def enter(self, *_: object) -> None: ...

    def change(self, *_: object) -> None: ...

    def leave(self, *_: object) -> None: ...


class SplitWorld(ClusterWorld):
    """One history of such a group."""

    def __init__(self, rng: random.Random) -> None:
        self.contract = rng.choice(CONTRACTS)
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
        node.tags = self.told.wants[node.name] = self._target
        await node.start()
        self.members[group].append(node)
        self._go_on(node, node.consume(self.ledger.groups[group]))
        return node

    async def _drain(self) -> None:
        """Somebody wants everything at the end, where the contract lets him."""
        self._target = "*"
        await self._join(SPLIT)
        await self.clock.advance(2)
        await super()._drain()

    # --- steps

    async def do_tag(self, rng: random.Random) -> str:
        """A few messages with tags."""
        node = rng.choice(self.senders)
        sents = [self.ledger.send(TAGGED, "tagged") for _ in range(rng.choice((1, 3, 8)))]
        for sent in sents:
            tag = self.told.tag_of[sent.number] = rng.choice(TAGS)
            if any(is_wanted(tag, tags) for tags in self.told.wishes.values()):
                self.told.was_wanted.add(sent.number)
            message = Message(TAGGED, sent.body, tag=tag)
            self._spawn(node, [sent], node.mq.send(message, timeout_ms=3000))
        tags = ",".join(self.told.tag_of[sent.number] for sent in sents)
        return f"{node.name} sends {sents[0].number} to {sents[-1].number} ({tags})"

    async def do_upgrade(self, rng: random.Random) -> str:
        """One member is replaced; sometimes the target changes, perhaps back."""
        members = self.members[SPLIT]
        old = [node for node in members if node.tags != self._target]
        if not old:
            self._target = rng.choice(WISHES)
            return f"the target is {self._target} now"
        node = rng.choice(old)
        self._disturb()
        new = await self._join(SPLIT)
        await self.clock.advance(rng.choice((0.1, 3.0, 20.0)))
        if node in members:
            members.remove(node)
        self._disturb(10)
        self._go_on(node, node.leave(rng))
        return f"{node.name} ({node.tags}) is replaced by {new.name} ({new.tags})"

    async def do_join(self, rng: random.Random) -> str:
        text = await super().do_join(rng)
        return f"{text}, wants {self._target}"

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
        settle_s = CALM_SETTLE_S if self.is_calm else for_s + SETTLE_S
        self.told.loosen(self.network.now_s() + settle_s)

    def _look_at_members(self) -> None:
        """Who is there, and what is committed."""
        self.told.wishes = {
            node.name: node.tags or "*" for node in self.members[SPLIT] if node.is_member
        }
        now_s = self.network.now_s()
        for record, tags in list(self.told.waiting.items()):
            (_, broker, _), offset, _ = record
            node = next(node for node in self.brokers if node.name == broker)
            if offset < _committed(node, record[0], tags):
                del self.told.waiting[record]
                self.told.done_s[record] = now_s

    def _look(self) -> None:
        self._look_at_members()
        super()._look()

    def _behind(self) -> list[str]:
        """What only an idle lane wants stays before the group."""
        return []


def _committed(node: BrokerNode, place: Place, tags: str) -> int:
    """Of the lane that wants these tags; of the group where there is none."""
    if node.broker is None:
        return -1
    core: Any = node.broker.core
    topic, _, queue_id = place
    lanes = core.lanes.table.get(SPLIT)
    lane = None
    if lanes is not None:
        key = subscription_key(SPLIT, [subscribe(TAGGED, tags)])
        lane = lanes.lanes.get(key)
    found = lane.places.get((topic, queue_id)) if lane is not None else None
    if found is not None:
        return int(found.position)
    return int(core.offsets.committed(SPLIT, topic, queue_id))
