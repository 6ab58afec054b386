"""An acting master: messages that become due are delivered once, by another master."""

import pytest

from simulation.stepped import ManualClock, SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.broker.replication.acting import (
    ActingMaster,
    EscapeBridge,
    decode_escaped,
    encode_escaped,
    fetch_escaped,
)
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConnectionLostError, ProtocolError
from sluicemq.model.topic import BrokerData, QueueData, TopicConfig, TopicRoute, pop_retry_topic
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.bodies import encode_topic_route
from sluicemq.wire.frames import Command

MASTERS = {"broker-a": "10.0.0.1:1", "broker-b": "10.0.0.2:1"}
CONFIG = BrokerConfig(broker_name="broker-a", metrics_enable=False, transaction_timeout_ms=3000)


class World:
    """The complete slave of broker-a, whose master was killed, and the master of broker-b."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.master = SteppedBroker(config=CONFIG, clock=self.clock)
        self.other = SteppedBroker(
            config=BrokerConfig(broker_name="broker-b", metrics_enable=False), clock=self.clock
        )
        for broker in (self.master, self.other):
            broker.core.topics.put(TopicConfig("T", 1, 1))
        self.client = self.master.connect()
        self.there = self.other.connect()
        self.is_away = False
        self.members: dict[int, str] | None = {1: "10.0.0.1:2"}
        self.stand_in: SteppedBroker | None = None
        self.acting = ActingMaster(
            1, open_broker=self.open, close_broker=self.close, make_escape_bridge=self.escape,
            fetch_members=self.ask_members, clock=self.clock, period_s=lambda: 1.0,
        )  # fmt: skip

    def escape(self) -> EscapeBridge:
        return EscapeBridge("broker-a", "c", self.ask, self.look_up, self.clock)

    async def open(self):
        self.stand_in = SteppedBroker(config=CONFIG, files=self.left.kill(), clock=self.clock)
        return self.stand_in.core

    async def close(self, _core: object) -> None:
        self.stand_in = None

    async def ask_members(self) -> dict[int, str] | None:
        return self.members

    async def look_up(self, topic: str) -> Command:
        if topic not in {"T", "c"}:
            return Command(17)
        brokers = tuple(BrokerData(name, "c", {0: at}) for name, at in MASTERS.items())
        queues = tuple(QueueData(name, 1, 1, 6) for name in MASTERS)
        return Command(0, body=encode_topic_route(TopicRoute(brokers, queues)))

    async def ask(self, address: str, command: Command, _timeout_s: float) -> Command:
        if self.is_away:
            raise ConnectionLostError("away.")
        assert address == MASTERS["broker-b"]
        return self.there.call(command.code, command.fields, bytes(command.body))

    def send(self, number: int, properties: str = "", **fields: object) -> Command:
        text = f"UNIQ_KEY\x01ID{number}\x02{properties}"
        answer = self.client.call(310, send_fields(properties=text, **fields), b"%d" % number)
        assert answer.code == 0, answer
        return answer

    def master_dies(self) -> None:
        """Give the slave the files that a killed master leaves."""
        self.left: CrashableFiles = self.master.files.kill()

    async def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.clock.advance(0.25)
            await self.acting.deliver_due()
            if self.stand_in is not None:
                self.stand_in.settle()

    def master_returns(self, escaped: list[tuple[str, str]]) -> SteppedClient:
        self.master = SteppedBroker(config=CONFIG, files=self.master.files.kill(), clock=self.clock)
        self.master.core.intake.delivered_elsewhere.remaining.update(escaped)
        self.master.run(10, 0.25)
        return self.master.connect()


def bodies(client: SteppedClient, topic: str = "T") -> list[bytes]:
    answer = client.call(11, pull_fields(topic, sysFlag=4))
    if answer.code != 0:
        return []
    from sluicemq.record.codec import decode_records

    return [record.body for record in decode_records(answer.body, broker="b")]


@pytest.fixture
def world() -> World:
    return World()


async def test_due_messages_are_sent_to_another_master_only(world: World) -> None:
    world.send(0)
    world.send(1, "DELAY\x011\x02")
    world.send(2, "TIMER_DELAY_MS\x012000\x02")
    world.send(3, "DELAY\x015\x02")  # a minute
    world.master_dies()
    await world.acting.start_acting()
    await world.pass_time(6)
    assert sorted(bodies(world.there)) == [b"1", b"2"]
    answer = await world.acting.hand_back()
    escaped = decode_escaped(answer.body)
    assert sorted(escaped) == [("T", "ID1"), ("T", "ID2")]
    back = world.master_returns(escaped)
    assert bodies(back) == [b"0"], "they are passed over here"
    world.master.run(60, 0.5)
    assert bodies(back) == [b"0", b"3"]
    assert sorted(bodies(world.there)) == [b"1", b"2"]


async def test_a_transaction_ends_at_the_acting_master(world: World) -> None:
    world.send(1, "TRAN_MSG\x01true\x02PGROUP\x01P\x02", f=4)
    world.master_dies()
    await world.acting.start_acting()
    assert world.stand_in is not None
    producer = world.stand_in.connect()
    beat = b'{"clientID":"me","consumerDataSet":[],"producerDataSet":[{"groupName":"P"}]}'
    assert producer.call(34, {}, beat).code == 0
    await world.pass_time(20)
    asked = next(one for one in producer.requests if one.code == 39)
    fields = asked.fields or {}
    end = {
        "producerGroup": "P", "commitOrRollback": 8, "fromTransactionCheck": "true",
        "tranStateTableOffset": fields["tranStateTableOffset"],
        "commitLogOffset": fields["commitLogOffset"], "msgId": fields["msgId"],
        "transactionId": fields["transactionId"],
    }  # fmt: skip
    producer.feed(producer.request(37, end, flag=2))
    await world.pass_time(2)
    assert bodies(world.there) == [b"1"]
    escaped = decode_escaped((await world.acting.hand_back()).body)
    assert escaped == [("T", "ID1")]


async def test_a_popped_message_is_redelivered_by_another_master(world: World) -> None:
    world.send(1)
    world.send(2)
    pop = {
        "consumerGroup": "G", "topic": "T", "queueId": 0, "maxMsgNums": 2, "invisibleTime": 10_000,
        "pollTime": 0, "bornTime": world.clock.now_ms(), "initMode": 0, "order": "false",
    }  # fmt: skip
    assert world.client.call(200050, pop).code == 0
    world.master.settle()
    world.master_dies()
    await world.acting.start_acting()
    await world.pass_time(12)
    retry = pop_retry_topic("G", "T", is_v2=False)
    assert sorted(bodies(world.there, retry)) == [b"1", b"2"]
    escaped = decode_escaped((await world.acting.hand_back()).body)
    back = world.master_returns(escaped)
    assert bodies(back, retry) == []


async def test_messages_that_no_other_master_accepts_wait_in_order(world: World) -> None:
    for number in range(4):
        world.send(number, "DELAY\x011\x02")
    world.master_dies()
    world.is_away = True
    await world.acting.start_acting()
    await world.pass_time(3)
    assert bodies(world.there) == []
    world.is_away = False
    await world.pass_time(7)
    assert bodies(world.there) == [b"0", b"1", b"2", b"3"]


async def test_a_message_that_has_not_escaped_is_delivered_by_the_master(world: World) -> None:
    world.send(1, "DELAY\x011\x02")
    world.master_dies()
    await world.acting.start_acting()
    answer = await world.acting.hand_back()
    assert decode_escaped(answer.body) == []
    assert bodies(world.master_returns([])) == [b"1"]


async def test_the_live_slave_with_the_lowest_id_acts(world: World) -> None:
    world.master_dies()
    acting = world.acting

    async def is_acting(members: dict[int, str] | None) -> bool:
        world.members = members
        await acting.start_or_stop()
        return acting.broker is not None

    assert not await is_acting({0: "m", 1: "s"})
    assert not await is_acting(None), "nobody can tell"
    assert await is_acting({1: "s", 2: "t"})
    assert await is_acting(None), "as before"
    assert not await is_acting({0: "m", 1: "s"})
    assert await is_acting({2: "t"}), "itself, whatever name servers say"
    await acting.hand_back()
    assert not await is_acting({1: "s"}), "a master is on its way"
    world.clock.advance(31)
    assert await is_acting({1: "s"})
    await acting.stop_acting()


async def test_the_list_of_escaped_messages_round_trips(world: World) -> None:
    done = [("T", "1"), ("%RETRY%g", "2")]
    assert decode_escaped(encode_escaped(done)) == done
    with pytest.raises(ProtocolError):
        decode_escaped(b"[]")

    async def ask(address: str, _command: Command, _timeout_s: float) -> Command:
        if address == "java":
            return Command(3)
        if address == "away":
            raise ConnectionLostError("away.")
        return Command(0, body=encode_escaped(done))

    assert await fetch_escaped(["java", "away", "ours"], ask) == done
