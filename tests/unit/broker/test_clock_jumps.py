"""The wall clock is set forward and back at random, and no message waits longer than its delay.

No message is lost or repeated. Each seed is one history of sends, pops, jumps, restarts and passing
time. Real time is the sum of the times that pass; the broker reads the wall clock. A message must
be delivered within `LATE_S` of its real due time. It may be early by at most the time by which the
wall clock was set forward meanwhile.
"""

import os
import random
from dataclasses import dataclass, field
from typing import Final

import pytest

from simulation.pops import POP, ack, fill, handles, numbers, pop_fields
from simulation.stepped import ManualClock, SteppedBroker, SteppedClient, send_fields
from sluicemq.model.topic import TopicConfig
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies

pytestmark = pytest.mark.slow

SEEDS: Final = int(os.environ.get("SLUICEMQ_EXAMPLES", "15"))
STEP_S: Final = 0.5
LATE_S: Final = 1.0 + 2 * STEP_S
JUMPS_S: Final = (0.4, 2, 30, 59, 61, 300, 3600, 86_400, 30 * 86_400)
LEVELS_S: Final = {1: 1, 2: 5, 3: 10, 4: 30, 5: 60}
TOPICS: Final = ("T", "P")


@dataclass
class World:
    """One history. `due_s` is in real time."""

    random: random.Random
    broker: SteppedBroker = field(default_factory=SteppedBroker)
    real_s: float = 0.0
    forward_s: float = 0.0
    """By how much the wall clock was set forward, all jumps together."""
    due: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Message -> its real due time, and what the wall clock had been set forward when sent."""
    seen: dict[str, float] = field(default_factory=dict)
    restarts: list[tuple[float, float]] = field(default_factory=list)
    """When the broker was back, and how long it had been down."""
    next_offset: int = 0
    client: SteppedClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.broker.connect()
        for topic in TOPICS:
            self.broker.core.topics.put(TopicConfig(topic, 1, 1))

    # --- what happens

    def passes(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.broker.run(STEP_S, STEP_S)
            self.real_s += STEP_S
            self.look()

    def jumps(self) -> None:
        seconds = self.random.choice(JUMPS_S) * self.random.choice((-1, 1))
        self.broker.clock.set_wall_clock(seconds)
        self.forward_s += max(seconds, 0)

    def restarts_after(self, down_s: float) -> None:
        """Stop in order, and start again. The clock may be set while the broker is down."""
        self.broker.core.run_every_second()
        self.broker.close()
        clock = ManualClock(self.broker.clock.now_ms())
        clock.advance(down_s)
        self.real_s += down_s
        if self.random.random() < 0.5:
            seconds = self.random.choice(JUMPS_S) * self.random.choice((-1, 1))
            clock.set_wall_clock(seconds)
            self.forward_s += max(seconds, 0)
        store = self.broker.settings.store
        self.broker = SteppedBroker(files=self.broker.files, clock=clock, store_config=store)
        self.client = self.broker.connect()
        self.restarts.append((self.real_s, down_s))

    def sends(self) -> None:
        name = f"m{len(self.due)}"
        kind = self.random.choice(("level", "seconds", "milliseconds", "deliver"))
        wait_s = self.random.choice((1, 3, 7.25, 40, 90))
        match kind:
            case "level":
                level = self.random.choice(list(LEVELS_S))
                wait_s, said = LEVELS_S[level], f"DELAY\x01{level}\x02"
            case "seconds":
                wait_s = int(wait_s)
                said = f"TIMER_DELAY_SEC\x01{wait_s}\x02"
            case "milliseconds":
                said = f"TIMER_DELAY_MS\x01{round(wait_s * 1000)}\x02"
            case _:
                time_ms = self.broker.clock.now_ms() + round(wait_s * 1000)
                said = f"TIMER_DELIVER_MS\x01{time_ms}\x02"
        fields = send_fields(properties=f"UNIQ_KEY\x01{name}\x02{said}")
        assert self.client.call(310, fields, name.encode()).code == 0
        self.due[name] = self.real_s + wait_s, self.forward_s

    def look(self) -> None:
        """Record the messages that were delivered since the last call."""
        found = self.broker.store.reader.read("T", 0, self.next_offset, 10_000, 1 << 26)
        for message in decode_records(b"".join(found.data)):
            name = message.body.decode()
            assert name not in self.seen, f"{name} came twice"
            self.seen[name] = self.real_s
            self.next_offset = message.queue_offset + 1

    # --- what is judged

    def judge(self) -> None:
        for name, (due_s, forward_s) in self.due.items():
            assert name in self.seen, f"{name}, due at {due_s} s, is lost at {self.real_s} s"
            came_s = self.seen[name]
            # How long it was down is not known to a broker whose clock was set back meanwhile.
            restarts = [down_s for at_s, down_s in self.restarts if due_s - 100 < at_s <= came_s]
            late_s = came_s - due_s - sum(restarts)
            assert late_s <= LATE_S, f"{name} came {late_s} s late"
            has_restarted = bool(restarts)
            early_s = due_s - came_s - (self.forward_s - forward_s)
            assert early_s <= LATE_S or has_restarted, f"{name} came {early_s} s early"


def play(seed: int, *, with_restarts: bool) -> World:
    world = World(random.Random(seed))
    for _ in range(40):
        what = world.random.random()
        if what < 0.45:
            world.sends()
        elif what < 0.6:
            world.jumps()
        elif what < 0.65 and with_restarts:
            world.restarts_after(world.random.choice((0.0, 2.0, 30.0)))
        else:
            world.passes(world.random.choice((0.5, 1, 3, 10)))
    world.passes(200)
    return world


@pytest.mark.parametrize("first", range(0, SEEDS, 5))
def test_no_message_waits_longer_than_its_delay(first: int) -> None:
    for seed in range(first, first + 5):
        try:
            play(seed, with_restarts=False).judge()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("first", range(0, SEEDS, 5))
def test_no_message_waits_longer_after_restarts(first: int) -> None:
    for seed in range(first, first + 5):
        try:
            play(seed, with_restarts=True).judge()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# ------------------------------------------------------------------- what else waits, one by one

STEPS: Final = pytest.mark.parametrize("step_s", [-3600, -30 * 86_400, 3600, 30 * 86_400])


@pytest.mark.parametrize("step_s", [-3600, -30 * 86_400])
@pytest.mark.parametrize("name", ["TIMER_DELAY_SEC", "DELAY"])
def test_a_message_waits_no_longer_when_a_killed_broker_starts_with_an_earlier_clock(
    step_s: float, name: str, broker: SteppedBroker, client: SteppedClient
) -> None:
    """Only the message contains the time of the clock: no document was saved before.

    A minute is delay level 5.
    """
    value = 60 if name == "TIMER_DELAY_SEC" else 5
    properties = f"UNIQ_KEY\x01A\x02{name}\x01{value}\x02"
    assert client.call(310, send_fields(properties=properties), b"x").code == 0
    broker.run(1.0, STEP_S)
    clock = ManualClock(broker.clock.now_ms() + round(step_s * 1000))
    again = SteppedBroker(
        files=broker.files.kill(), clock=clock, store_config=broker.settings.store
    )
    again.run(58.0, STEP_S)
    assert again.store.queue_offsets("T", 0) == (0, 0), "it is not early"
    again.run(4.0, STEP_S)
    assert again.store.queue_offsets("T", 0) == (0, 1)


@STEPS
def test_a_popped_message_comes_back_after_its_invisible_time(
    step_s: float, broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)
    assert numbers(client.call(POP, pop_fields(broker, invisibleTime=5000))) == [0]
    broker.clock.set_wall_clock(step_s)
    broker.run(7.0, STEP_S)
    assert numbers(client.call(POP, pop_fields(broker))) == [0]


@STEPS
def test_a_message_popped_after_the_step_can_be_acknowledged(
    step_s: float, broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)
    broker.clock.set_wall_clock(step_s)
    answer = client.call(POP, pop_fields(broker, invisibleTime=5000))
    broker.run(2.0, STEP_S)
    assert ack(client, handles(answer)[0]).code == 0
    broker.run(10.0, STEP_S)
    assert not client.call(POP, pop_fields(broker)).body


@STEPS
def test_an_ordered_queue_is_free_after_the_invisible_time(
    step_s: float, broker: SteppedBroker, client: SteppedClient
) -> None:
    fill(client, 1)

    def ordered() -> dict[str, object]:
        return pop_fields(broker, invisibleTime=5000, order="true")

    assert numbers(client.call(POP, ordered())) == [0]
    broker.clock.set_wall_clock(step_s)
    if step_s < 0:
        broker.run(3.0, STEP_S)
        assert not client.call(POP, ordered()).body, "it is still blocked"
    broker.run(4.0, STEP_S)
    assert numbers(client.call(POP, ordered())) == [0]


@STEPS
def test_a_pop_waits_for_its_polling_time(
    step_s: float, broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.clock.set_wall_clock(step_s)
    request = client.request(POP, pop_fields(broker, pollTime=5000))
    client.feed(request)
    broker.run(3.0, STEP_S)
    assert request.opaque not in client.answers
    broker.clock.set_wall_clock(step_s)
    broker.run(3.0, STEP_S)
    assert request.opaque in client.answers


@pytest.mark.parametrize("step_s", [-3600, -30 * 86_400, 3600])
def test_a_transaction_is_checked_when_its_time_is_over(
    step_s: float, broker: SteppedBroker, client: SteppedClient
) -> None:
    heartbeat = bodies.Heartbeat("c", ("P",))
    client.call(34, {}, bodies.encode_heartbeat(heartbeat))
    half = "UNIQ_KEY\x01H\x02TRAN_MSG\x01true\x02PGROUP\x01P\x02"
    assert client.call(310, send_fields("T", half, f=4), b"x").code == 0
    broker.run(1.0, STEP_S)
    broker.clock.set_wall_clock(step_s)
    broker.run(broker.settings.broker.transaction_timeout_ms / 1000 + 2, STEP_S)
    assert [request.code for request in client.requests] == [39]


@STEPS
def test_a_member_expires_by_its_silence_alone(
    step_s: float, broker: SteppedBroker, client: SteppedClient
) -> None:
    consumer = bodies.ConsumerData("G")
    client.call(34, {}, bodies.encode_heartbeat(bodies.Heartbeat("c", ("P",), (consumer,))))
    expiry_s = broker.settings.broker.client_expiry_ms / 1000
    broker.clock.set_wall_clock(step_s)
    broker.advance(expiry_s - 1)
    broker.core.expire_clients()
    assert not client.is_closed
    broker.advance(2)
    broker.core.expire_clients()
    assert client.is_closed


@STEPS
def test_a_mark_takes_back_a_message_of_before_and_of_after_the_step(
    step_s: float, broker: SteppedBroker, client: SteppedClient
) -> None:
    broker.change(recall_enable=True)
    answers = []
    for name in ("A", "B"):
        properties = f"UNIQ_KEY\x01{name}\x02TIMER_DELAY_SEC\x01{8 * 86_400 // 4}\x02"
        answers.append(client.call(310, send_fields(properties=properties), b"x"))
        broker.run(1.0, STEP_S)
        broker.clock.set_wall_clock(min(step_s, 3600))
        broker.run(1.0, STEP_S)
    for answer in answers:
        handle = (answer.fields or {})["recallHandle"]
        fields = {"producerGroup": "P", "topic": "T", "recallHandle": handle}
        assert client.call(370, fields).code == 0
    for _ in range(50):
        broker.pass_seconds(3600)
    assert not broker.store.reader.read("T", 0, 0, 10, 1 << 20).data
    assert broker.core.delayed.timers.recalled_count == 2
