"""Each message that a member wants is delivered once, for each seed.

Members of one group join, leave, change their subscription, and the broker restarts.
"""

import random
from dataclasses import dataclass, field

import pytest

from simulation.lanes import ModelConsumer, Shared, Wanted, balance, work
from simulation.stepped import SteppedBroker, send_fields
from sluicemq.broker.consume.filter_diagnostics import FilterHandlers
from sluicemq.broker.lanes import idle_lanes as idle_lanes_module
from sluicemq.broker.lanes.assignments import MOVE_WAIT_MS
from sluicemq.broker.lanes.rules import split_key
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.topic import CONTRACT, GroupConfig, TopicConfig
from thorough import seeds

pytestmark = pytest.mark.slow

SEEDS = seeds(30, 90)
WISHES: list[Wanted] = [
    {"T": (TAG, "tag1 || tag2")},
    {"T": (TAG, "tag3")},
    {"T": (TAG, "tag2||tag3")},
    {"T": (TAG, "*")},
    {"T": (SQL92, "n > 5")},
    {"T": (TAG, "tag1"), "U": (TAG, "*")},
    {"U": (TAG, "tag2")},
]
TAGS = ("tag1", "tag2", "tag3", "tag4")
STAYS: Wanted = {"T": (TAG, "tag1")}
ROLLING = (*TAGS, *(f"r{number}" for number in range(40)))


@dataclass
class Message:
    topic: str
    tag: str
    number: int
    wanted_by: list[Wanted] = field(default_factory=list)

    def is_for(self, wanted: Wanted) -> bool:
        if self.topic not in wanted:
            return False
        kind, text = wanted[self.topic]
        if kind == SQL92:
            return compile_sql92(text).matches({"n": str(self.number), "TAGS": self.tag})
        return text == "*" or self.tag in {tag.strip() for tag in text.split("||")}


class World:
    def __init__(self, seed: int, contract: str) -> None:
        self.rng = random.Random(seed)
        self.broker = SteppedBroker()
        self.prepare(contract)
        self.producer = self.broker.connect()
        self.shared = Shared("G")
        self.consumers: list[ModelConsumer] = []
        self.messages: dict[str, Message] = {}
        self.versions = 0
        self.story: list[str] = []
        self.moving: list[tuple[float, ModelConsumer, list[str]]] = []
        self.tags = TAGS
        self.late: set[str] = set()
        """Messages that a member which had changed lanes held for more than `MOVE_MS`."""

    def prepare(self, contract: str) -> None:
        for topic in ("T", "U"):
            self.broker.core.topics.put(TopicConfig(topic, 2, 2))
        self.broker.core.groups.put(GroupConfig("G", attributes={CONTRACT: contract}))

    def join(self, wanted: Wanted) -> None:
        self.versions += self.rng.choice([-1, 1, 2])
        name = f"c{len(self.story)}"
        self.story.append(f"join {name} {wanted}")
        made = ModelConsumer(self.broker, self.shared, name, wanted, 100 + self.versions)
        if made.refusal:
            self.story.append("refused")
            made.connection.disconnect()
        else:
            self.consumers.append(made)
        balance(self.consumers)

    def leave(self) -> None:
        if len(self.consumers) > 1:
            gone = self.consumers.pop(self.rng.randrange(len(self.consumers)))
            self.story.append(f"leave {gone.client_id}")
            gone.leave(says_so=self.rng.random() < 0.5)
            balance(self.consumers)

    def change(self, wishes: list[Wanted]) -> None:
        """Change the subscription of a running member.

        Sometimes it notices its new queues late. It finishes the messages that it has in flight.
        """
        if len(self.consumers) < 2:
            return
        consumer = self.rng.choice(self.consumers)
        self.versions += self.rng.choice([-1, 1, 2])
        wanted = self.rng.choice(wishes)
        self.story.append(f"change {consumer.client_id} {wanted}")
        consumer.change(wanted, 100 + self.versions)
        others = [other for other in self.consumers if other is not consumer]
        if consumer.refusal:
            self.story.append("refused")
            self.consumers.remove(consumer)
            consumer.leave(says_so=False)
            balance(self.consumers)
            return
        until_s = self.broker.clock.monotonic_s() + MOVE_WAIT_MS / 1000
        self.moving.append((until_s, consumer, consumer.in_hand))
        if self.rng.random() < 0.5:
            balance(others)
            for _ in range(self.rng.randint(0, 4)):
                self.produce()
                work(self.rng.choice([others, self.consumers]), self.rng, 0.1)
                self.pass_time(self.rng.choice([0.2, 1.0]))
        balance(self.consumers)

    def restart(self) -> None:
        self.story.append("restart")
        self.broker.close()
        self.broker = SteppedBroker(files=self.broker.files, clock=self.broker.clock)
        self._reconnect()

    def crash(self) -> None:
        """Restart with the whole log, and with documents as they were last saved, some time ago."""
        self.story.append("crash")
        self.broker.store.sync()
        files = self.broker.files.crash(self.rng)
        self.broker = SteppedBroker(files=files, clock=self.broker.clock)
        self._reconnect()

    def save(self) -> None:
        for document in self.broker.core.documents:
            document.save()

    def _reconnect(self) -> None:
        self.producer = self.broker.connect()
        self.rng.shuffle(self.consumers)
        for consumer in self.consumers:
            consumer.connect(self.broker)
        balance(self.consumers)

    def produce(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            number = len(self.messages)
            name = f"m{number}"
            message = Message(self.rng.choice("TTTU"), self.rng.choice(self.tags), number % 11)
            message.wanted_by = [c.wanted for c in self.consumers if message.is_for(c.wanted)]
            properties = f"UNIQ_KEY\x01{name}\x02TAGS\x01{message.tag}\x02n\x01{message.number}\x02"
            fields = send_fields(message.topic, properties, e=self.rng.randrange(2))
            assert self.producer.call(310, fields, name.encode()).code == 0
            self.messages[name] = message

    def step(self, failures: float = 0.1) -> None:
        work(self.consumers, self.rng, failures)
        self.pass_time(self.rng.choice([0.2, 1.0]))

    def pass_time(self, seconds: float) -> None:
        now_s = self.broker.clock.monotonic_s() + seconds
        for item in [item for item in self.moving if item[0] <= now_s]:
            self.moving.remove(item)
            self.late.update(set(item[2]) & set(item[1].in_hand))
        self.broker.advance(seconds)
        self.broker.settle()
        self.broker.core.run_every_second()
        self.broker.settle()

    def drain(self) -> None:
        for consumer in self.consumers:
            consumer.beat()
        for _ in range(60):
            self.pass_time(1.0)
            balance(self.consumers)
            work(self.consumers, self.rng)
        for _ in range(6):
            for consumer in self.consumers:
                for queue in list(consumer.readings):
                    consumer.pull(queue)
                    if queue in consumer.readings:
                        consumer.finish(queue, len(consumer.readings[queue].in_hand))
                consumer.commit()
            self.pass_time(1.0)

    def roll(self) -> Wanted:
        """Return a subscription that probably no member had before."""
        pick = self.rng.choice
        text = f"{pick(ROLLING)} || {pick(ROLLING)}" if self.rng.random() < 0.3 else pick(ROLLING)
        topic = pick("TTTU")
        if self.rng.random() < 0.3:
            return {topic: (SQL92, f"TAGS = '{pick(ROLLING)}' OR n = {self.rng.randrange(11)}")}
        return {topic: (TAG, text)} | ({"U": (TAG, pick(ROLLING))} if topic == "T" else {})

    def all_come_back(self, known: list[Wanted]) -> None:
        """Let a successor of each former member read all messages that wait, one after another."""
        for wanted in known:
            if all(consumer.wanted != wanted for consumer in self.consumers):
                self.join(wanted)
                assert self.story[-1] != "refused", "\n".join(self.story)
        self.drain()

    def check(self, *, repeats: bool = False) -> None:
        present = [consumer.wanted for consumer in self.consumers]
        lost, doubled = [], []
        for name, message in self.messages.items():
            got = self.shared.deliveries[name]
            due = 1 + self.shared.sent_back[name]
            if got > due and not repeats and name not in self.late:
                doubled.append((name, got, due, message, self.shared.takers[name]))
            if got < due and message.wanted_by and any(message.is_for(w) for w in present):
                lost.append((name, got, due, message, self.shared.takers.get(name)))
        story = "\n".join(self.story)
        assert not lost, f"lost {lost}\n{story}"
        assert not doubled, f"doubled {doubled}\n{story}"


def live(world: World, turns: int, wishes: list[Wanted], *, changes: bool = False) -> None:
    rng = world.rng
    for _ in range(turns):
        event = rng.random()
        if event < 0.12 or not world.consumers:
            world.join(rng.choice(wishes))
        elif event < 0.2:
            world.leave()
        elif event < 0.23:
            world.restart()
        elif event < 0.27:
            world.pass_time(31)
        elif event < 0.30 and changes:
            world.change(wishes)
        world.produce()
        world.step()
    world.drain()


@pytest.mark.parametrize("contract", ["compatible", "lanes", "strict"])
def test_no_message_is_lost_or_repeated_under_joins_and_leaves(contract: str) -> None:
    for seed in range(SEEDS // 3):
        world = World(seed, contract)
        live(world, 30, WISHES)
        world.check()


@pytest.mark.parametrize("contract", ["lanes", "strict"])
def test_no_message_is_lost_or_repeated_when_members_change_their_subscription(
    contract: str,
) -> None:
    """Messages that a changed member keeps for over half a minute are an exception."""
    for seed in range(SEEDS // 3):
        world = World(seed, contract)
        live(world, 30, WISHES, changes=True)
        world.check()


def test_no_message_is_lost_when_the_broker_is_killed() -> None:
    for seed in range(SEEDS // 3):
        world = World(seed, "lanes")
        world.save()
        for _ in range(3):
            for _ in range(8):
                if world.rng.random() < 0.3 or not world.consumers:
                    world.join(world.rng.choice(WISHES))
                elif world.rng.random() < 0.2:
                    world.leave()
                world.produce()
                world.step()
                if world.rng.random() < 0.3:
                    world.save()
            world.crash()
        world.drain()
        world.check(repeats=True)


@pytest.mark.parametrize("contract", ["compatible", "lanes"])
def test_many_changing_filters_are_accepted_and_their_unread_messages_wait(
    contract: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member stays. Others join with new subscriptions, change them, and leave.

    In the end each subscription is back. Each message that one of them wanted when it was sent is
    delivered once.
    """
    monkeypatch.setattr(
        FilterHandlers, "survey_if_due", lambda _: None
    )  # figures have tests of their own
    merged = 0
    for seed in range(max(SEEDS // 45, 1)):
        world = World(seed, contract)
        monkeypatch.setattr(idle_lanes_module, "IDLE_LANES_MAX", (1, 4, 16)[seed % 3])
        world.tags = ROLLING
        known: list[Wanted] = []

        def come(wanted: Wanted, world: World = world, known: list[Wanted] = known) -> None:
            world.join(wanted)
            known.append(wanted)

        come(STAYS)
        come(world.roll())
        stays, rng = world.consumers[0], world.rng
        for _ in range(40):
            event = rng.random()
            if event < 0.3 or len(world.consumers) < 3:
                come(world.roll())
            elif event < 0.55:
                gone = rng.choice([one for one in world.consumers if one is not stays])
                world.story.append(f"leave {gone.client_id}")
                world.consumers.remove(gone)
                gone.leave(says_so=rng.random() < 0.5)
                balance(world.consumers)
            elif event < 0.9:
                wanted = world.roll()
                world.consumers.remove(stays)
                world.change([wanted])
                world.consumers.append(stays)
                known.append(wanted)
            elif event < 0.94:
                world.restart()
            else:
                world.pass_time(31)
            assert "refused" not in world.story, "\n".join(world.story)
            world.produce()
            for message in list(world.messages.values())[-6:]:
                message.wanted_by = [one for one in known if message.is_for(one)]
            world.step()
        world.drain()
        lanes = world.broker.core.lanes.table["G"].lanes
        merged += sum(len(split_key(key)) > 1 for key in lanes)
        world.all_come_back(known)
        world.check()
    assert merged
