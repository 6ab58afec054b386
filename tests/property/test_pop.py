"""Pops against a model.

A message is in flight for one consumer at a time. It is delivered again when its invisible time is
over, and never after it was acknowledged.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from simulation.pops import POP, ack, fields_of, handles, pop_fields
from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.model.topic import TopicConfig
from sluicemq.wire.popping import ReceiptHandle

CHANGE = 200053
GROUPS, QUEUES, TIMES_MS = ("G", "H"), 3, (1000, 5000, 30_000)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, QUEUES - 1), st.integers(1, 4)),
        st.tuples(
            st.just("pop"), st.sampled_from(GROUPS), st.integers(-1, QUEUES - 1),
            st.integers(1, 5), st.sampled_from(TIMES_MS),
        ),
        st.tuples(st.just("ack"), st.sampled_from(GROUPS), st.integers(0, 20)),
        st.tuples(
            st.just("change"), st.sampled_from(GROUPS), st.integers(0, 20),
            st.sampled_from(TIMES_MS),
        ),
        st.tuples(st.just("wait"), st.sampled_from([0.5, 2.0, 10.0])),
    ),
    max_size=25,
)  # fmt: skip


class Model:
    """The messages sent so far, by group: which are in flight, and which are acknowledged."""

    def __init__(self) -> None:
        self.broker = SteppedBroker()
        self.broker.core.topics.put(TopicConfig("T", QUEUES, QUEUES))
        self.client: SteppedClient = self.broker.connect()
        self.sent = 0
        self.held: dict[str, dict[int, ReceiptHandle]] = {group: {} for group in GROUPS}
        self.done: dict[str, set[int]] = {group: set() for group in GROUPS}

    def send(self, queue_id: int, count: int) -> None:
        for _ in range(count):
            properties = f"n\x01{self.sent}\x02"
            self.client.call(310, send_fields(properties=properties, e=queue_id), b"")
            self.sent += 1

    def pop(self, group: str, queue_id: int, count: int, invisible_ms: int) -> None:
        fields = pop_fields(
            self.broker, consumerGroup=group, queueId=queue_id, maxMsgNums=count,
            invisibleTime=invisible_ms,
        )  # fmt: skip
        answer = self.client.call(POP, fields)
        now_ms, held = self.broker.clock.now_ms(), self.held[group]
        got = handles(answer)
        assert len(got) <= count
        for number, handle in got.items():
            assert number not in self.done[group]
            assert number not in held or held[number].deadline_ms <= now_ms
            assert handle.deadline_ms == now_ms + invisible_ms
            held[number] = handle

    def chosen(self, group: str, index: int) -> tuple[int, ReceiptHandle] | None:
        held = sorted(self.held[group].items())
        return held[index % len(held)] if held else None

    def ack(self, group: str, index: int) -> None:
        found = self.chosen(group, index)
        if found is None:
            return
        number, handle = found
        in_time = self.broker.clock.now_ms() < handle.deadline_ms
        assert (
            ack(self.client, handle, consumerGroup=group, topic=topic_of(group, handle)).code == 0
        )
        if in_time:
            self.done[group].add(number)
            del self.held[group][number]

    def change(self, group: str, index: int, invisible_ms: int) -> None:
        found = self.chosen(group, index)
        if found is None or self.broker.clock.now_ms() >= found[1].deadline_ms:
            return
        number, handle = found
        fields = {
            "consumerGroup": group, "topic": topic_of(group, handle), "queueId": handle.queue_id,
            "offset": handle.offset, "extraInfo": handle.encode(), "invisibleTime": invisible_ms,
        }  # fmt: skip
        answer = fields_of(self.client.call(CHANGE, fields))
        self.held[group][number] = handle._replace(
            start_offset=handle.offset, pop_ms=int(answer["popTime"]),
            invisible_ms=int(answer["invisibleTime"]), revive_queue=int(answer["reviveQid"]),
        )  # fmt: skip

    def wait(self, seconds: float) -> None:
        self.broker.run(seconds, 0.25)

    def finish(self) -> None:
        """Pop until each group has all messages that it has not acknowledged."""
        self.wait(max(TIMES_MS) / 1000 + 1)
        for group in GROUPS:
            for _ in range(self.sent + 1):
                self.pop(group, -1, 32, 60_000)
            missing = set(range(self.sent)) - self.done[group] - self.held[group].keys()
            assert not missing


def topic_of(group: str, handle: ReceiptHandle) -> str:
    return f"%RETRY%{group}_T" if handle.kind else "T"


@settings(max_examples=40, deadline=None)
@given(steps)
def test_a_message_is_with_one_consumer_until_its_time_is_over(
    script: list[tuple[object, ...]],
) -> None:
    model = Model()
    for name, *arguments in script:
        getattr(model, str(name))(*arguments)
    model.finish()
