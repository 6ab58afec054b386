"""A heartbeat that comes again costs a look, and does what a first one would: nothing more."""

from typing import Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given

from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.broker.consume import heartbeat
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.net.dispatch import Peer
from sluicemq.wire import bodies
from sluicemq.wire.bodies import ConsumerData, Heartbeat
from sluicemq.wire.frames import Command, encode

SAID = [
    (("T", "A", TAG),), (("T", "B", TAG),), (("T", "n > 1", SQL92),),
    (("T", "A", TAG), ("U", "*", TAG)),
]  # fmt: skip
CLIENTS, GROUPS = range(2), ("G", "H")

beats = st.tuples(
    st.just("beat"), st.sampled_from(CLIENTS), st.sampled_from(GROUPS), st.sampled_from(SAID),
    st.sampled_from([0, 7]), st.booleans(),
)  # fmt: skip
again = st.tuples(st.just("again"), st.sampled_from(CLIENTS))
others = st.one_of(
    st.tuples(st.just("leave"), st.sampled_from(CLIENTS), st.sampled_from(GROUPS)),
    st.tuples(st.just("reconnect"), st.sampled_from(CLIENTS)),
    st.tuples(
        st.just("contract"), st.sampled_from(GROUPS),
        st.sampled_from(["compatible", "lanes", "strict"]),
    ),
    st.tuples(st.just("delete topic"), st.sampled_from(["%RETRY%G", "T"])),
    st.tuples(st.just("delete group"), st.sampled_from(GROUPS)),
    st.tuples(st.just("wait"), st.sampled_from([1, 70])),
)  # fmt: skip


class World:
    """A broker, two clients, and what they see of it."""

    def __init__(self) -> None:
        self.broker = SteppedBroker()
        self.clients = [self.broker.connect() for _ in CLIENTS]
        self.seen: list[object] = []
        self.last = [b"{}" for _ in CLIENTS]

    def do(self, word: str, *what: object) -> None:
        getattr(self, word.replace(" ", "_"))(*what)
        for number, client in enumerate(self.clients):
            self.seen.append((number, [it.code for it in client.requests]))
            client.requests.clear()
        core = self.broker.core
        for group in GROUPS:
            found = core.consumers.groups.get(group)
            watches = {} if found is None else found.subscriptions
            self.seen.append((
                None if found is None else sorted(found.client_ids),
                {topic: watch.subscription.expression for topic, watch in watches.items()},
                sorted(core.consumers.filters.table.get(group, {})),
                f"%RETRY%{group}" in core.topics,
            ))  # fmt: skip

    def call(self, number: int, code: int, fields: dict[str, object], body: bytes = b"") -> Command:
        answer = self.clients[number].call(code, fields, body)
        self.seen.append((answer.code, answer.fields, answer.remark))
        return answer

    def beat(
        self,
        number: int,
        group: str,
        said: tuple[tuple[str, str, str], ...],
        mark: int,
        short: bool,
    ) -> None:
        subscriptions = tuple(Subscription(*one, version=1) for one in said)
        data = ConsumerData(group, subscriptions=() if short else subscriptions)
        beat = Heartbeat(f"c{number}", ("P",), (data,), mark, short)
        self.last[number] = bodies.encode_heartbeat(beat)
        self.again(number)

    def again(self, number: int) -> None:
        self.call(number, 34, {}, self.last[number])

    def leave(self, number: int, group: str) -> None:
        self.call(number, 35, {"clientID": f"c{number}", "consumerGroup": group})

    def reconnect(self, number: int) -> None:
        self.clients[number].disconnect()
        self.clients[number] = self.broker.connect()

    def contract(self, group: str, contract: str) -> None:
        body = b'{"groupName":"%s","attributes":{"+sluice.contract":"%s"}}'
        self.call(0, 200, {}, body % (group.encode(), contract.encode()))

    def delete_topic(self, topic: str) -> None:
        self.call(0, 215, {"topic": topic})

    def delete_group(self, group: str) -> None:
        self.call(0, 207, {"groupName": group})

    def wait(self, seconds: int) -> None:
        self.broker.clock.advance(seconds)
        self.broker.core.consumers.expire(120_000)
        self.broker.core.producers.expire(120_000)


@given(st.lists(st.one_of(beats, again, again, others), min_size=10, max_size=40))
def test_it_makes_no_difference_whether_heartbeats_are_remembered(
    history: list[tuple[str, ...]],
) -> None:
    remembering, forgetting = World(), World()
    with pytest.MonkeyPatch.context() as patch:
        for one in history:
            remembering.do(*one)
            patch.setattr(heartbeat.HeartbeatHandlers, "_renew_if_repeated", lambda *_: False)
            forgetting.do(*one)
            patch.undo()
    assert remembering.seen == forgetting.seen


def test_whoever_left_is_there_again() -> None:
    world = World()
    said = (("T", "A", TAG),)
    world.do("beat", 0, "G", said, 7, False)
    for word in ("again", "again", "leave", "again"):
        world.do(word, 0, *(("G",) if word == "leave" else ()))
    assert world.broker.core.consumers.groups["G"].client_ids == ["c0"]


def test_the_second_one_is_known_and_counts(
    broker: SteppedBroker, client: SteppedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat = Heartbeat("c", ("P",), (ConsumerData("G", subscriptions=(Subscription("T"),)),), 7)
    body = bodies.encode_heartbeat(beat)
    client.call(34, {}, body)  # the group is made
    settled = client.call(34, {}, body)
    monkeypatch.setattr(heartbeat.HeartbeatHandlers, "_process_heartbeat", None)
    for _ in range(3):
        broker.clock.advance(100)
        answer = client.call(34, {}, body)
        assert (answer.code, answer.fields) == (0, settled.fields)
        assert not broker.core.consumers.expire(120_000)
        assert not broker.core.producers.expire(120_000)


@pytest.mark.parametrize(
    ("said", "is_quick"),
    [({}, True), ({"flag": 2}, False), ({"fields": {"a": "b"}}, False), ({"version": 1}, False)],
)
def test_the_quick_way_answers_the_same_and_takes_nothing_else(
    broker: SteppedBroker, client: SteppedClient, said: dict[str, Any], is_quick: bool
) -> None:
    beat = Heartbeat("c", ("P",), (ConsumerData("G", subscriptions=(Subscription("T"),)),), 7)
    body = bodies.encode_heartbeat(beat)
    for _ in range(2):  # the group is made by the first one
        client.call(34, {}, body)
    taken: list[bool] = []
    quick, seen = broker.dispatcher.fast_handlers, []

    def watched(header: dict[str, Any], body: bytes, peer: Peer) -> bool | bytes:
        answer = known(header, body, peer)
        taken.append(bool(answer))
        return answer

    known = quick[34]
    for quick[34] in (watched, lambda *_: False):
        client.log.clear()
        command = Command(34, said.get("fields", {}), body, 77)
        command.flag, command.version = said.get("flag", 0), said.get("version", 479)
        client.feed(command)
        seen.append([encode(it) for it in client.log])
    assert taken == [is_quick]
    assert seen[0] == seen[1]


def test_a_heartbeat_of_many_groups_waits_for_its_turn(
    broker: SteppedBroker, client: SteppedClient
) -> None:
    names = [f"G{number}" for number in range(heartbeat.FAST_PATH_GROUPS_MAX + 1)]
    again = broker.dispatcher.fast_handlers[34]
    for count in (len(names) - 1, len(names)):
        groups = tuple(map(ConsumerData, names[:count]))
        body = bodies.encode_heartbeat(Heartbeat("c", (), groups, 7))
        for _ in range(2):
            client.call(34, {}, body)
        header = orjson.loads(encode(client.request(34, {}))[8:])
        assert bool(again(header, body, client.peer)) == (count < len(names))
