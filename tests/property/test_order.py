"""Ordered pops against a model.

No consumer gets a message that is invisible, no message is invisible for longer than promised, and
the offset passes no message that is not acknowledged; also after crashes that lose the last
seconds.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.stepped import ManualClock, SteppedBroker
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.wire.tables import OrderInfo, decode_order_file, encode_order_file

pytestmark = pytest.mark.slow

G, T, END = "G", "T", 30

STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("pop"), st.sampled_from(["a", "b", ""]), st.integers(1, 5),
            st.sampled_from([1, 500, 2000]),
        ),
        st.tuples(st.just("ack"), st.integers(0, 9), st.integers(0, 5)),
        st.tuples(st.just("change"), st.integers(0, 5), st.sampled_from([1, 300, 4000])),
        st.tuples(st.just("wait"), st.integers(1, 3000)),
        st.tuples(st.just("save")),
        st.tuples(st.just("crash")),
    ),
    max_size=40,
)  # fmt: skip


@dataclass
class World:
    """One queue with END messages, its broker, and the answers that consumers received."""

    broker: SteppedBroker = field(default_factory=SteppedBroker)
    pops: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    attempt: str = ""
    pop_ms: int = 0
    hidden_ms: dict[int, int] = field(default_factory=dict)
    """Until when the last pop hides each of its messages."""
    done: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.broker.core.topics.put(TopicConfig(T, 1, 1))
        self.broker.core.groups.put(GroupConfig(G))
        self.broker.core.offsets.put(G, T, 0, 0)

    @property
    def now_ms(self) -> int:
        return self.broker.clock.now_ms()

    @property
    def committed(self) -> int:
        return self.broker.core.offsets.committed(G, T, 0)

    def pop(self, attempt: str, count: int, hidden_ms: int) -> None:
        order = self.broker.core.order
        is_hidden = any(until_ms > self.now_ms for until_ms in self.hidden_ms.values())
        may = order.can_pop(G, T, 0, attempt, self.now_ms)
        assert may or is_hidden, "invisible for longer than promised"
        is_same = bool(attempt) and attempt == self.attempt
        assert not (may and is_hidden) or is_same, "delivered to two consumers"
        start = self.committed
        offsets = tuple(range(start, min(start + count, END)))
        if not may or not offsets:
            return
        self.broker.clock.advance(0.001)  # no two pops of a queue have one time
        order.record_pop(G, T, 0, offsets, attempt, self.now_ms, hidden_ms)
        self.pops.append((self.now_ms, offsets))
        self.attempt, self.pop_ms = attempt, self.now_ms
        self.hidden_ms = dict.fromkeys(offsets, self.now_ms + hidden_ms)

    def ack(self, back: int, index: int) -> None:
        if back >= len(self.pops):
            return
        pop_ms, offsets = self.pops[-1 - back]
        offset = offsets[index % len(offsets)]
        self.broker.core.order.acknowledge(G, T, 0, offset, pop_ms)
        self.done.add(offset)
        if pop_ms == self.pop_ms:
            self.hidden_ms.pop(offset, None)
        self.check()

    def change(self, index: int, hidden_ms: int) -> None:
        if self.pops:
            pop_ms, offsets = self.pops[-1]
            offset, until_ms = offsets[index % len(offsets)], self.now_ms + hidden_ms
            self.broker.core.order.set_visible_time(G, T, 0, offset, pop_ms, until_ms)
            if offset in self.hidden_ms and pop_ms == self.pop_ms:
                self.hidden_ms[offset] = until_ms

    def wait(self, pause_ms: int) -> None:
        self.broker.advance(pause_ms / 1000)

    def save(self) -> None:
        for document in self.broker.core.documents:
            document.save()

    def crash(self) -> None:
        """Restart without the last seconds of the files: the queue may be as it was then."""
        files, now_ms = self.broker.files, self.now_ms
        self.broker = SteppedBroker(files=files.kill(), clock=ManualClock(now_ms))
        self.broker.core.groups.put(GroupConfig(G))
        if self.committed < 0:
            self.broker.core.offsets.put(G, T, 0, 0)
        info = self.broker.core.order.table.get(f"{T}@{G}", {}).get(0, OrderInfo((), 0, 0, 0))
        self.attempt, self.pop_ms = info.attempt_id or "", info.pop_ms
        self.hidden_ms = {
            offset: info.visible_ms.get(offset, info.pop_ms + info.invisible_ms)
            for index, offset in enumerate(info.offsets)
            if not info.done >> index & 1
        }
        self.check()

    def check(self) -> None:
        assert set(range(self.committed)) <= self.done, "the offset passed what is not done"


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_ordered_pops_deliver_in_order(steps: list[tuple[object, ...]]) -> None:
    world = World()
    for name, *arguments in steps:
        getattr(world, str(name))(*arguments)
    world.wait(10_000)
    world.pop("last", END, 1000)
    for _ in range(END):
        for index in range(END):
            if world.pops:
                world.ack(0, index)
        world.pop("last", END, 1000)
    assert world.committed == END


INFOS = st.builds(
    OrderInfo,
    offsets=st.lists(st.integers(0, 2**62), max_size=32).map(lambda it: tuple(sorted(it))),
    pop_ms=st.integers(0, 2**45),
    invisible_ms=st.integers(0, 2**40),
    taken_ms=st.integers(0, 2**45),
    attempt_id=st.none() | st.text(),
    done=st.integers(0, 2**32 - 1),
    visible_ms=st.dictionaries(st.integers(0, 2**62), st.integers(0, 2**45)),
    counts=st.none() | st.dictionaries(st.integers(0, 2**62), st.integers(0, 100)),
)


@settings(max_examples=50)
@given(
    st.dictionaries(st.text(), st.dictionaries(st.integers(0, 100), INFOS, max_size=3), max_size=3)
)
def test_the_file_says_everything(table: dict[str, dict[int, OrderInfo]]) -> None:
    assert decode_order_file(encode_order_file(table)) == table
