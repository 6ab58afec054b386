"""A master goes and another replica takes over, seen by a client: what is waited for, what is not,
and which name server is believed."""

from collections.abc import Callable

import pytest

from sluicemq.client.core.conversations import BlockingShell, Call
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.messages import make_message
from sluicemq.client.core.requests import SendResult, SendStatus
from sluicemq.client.core.sending import Sender
from sluicemq.errors import (
    ConnectionLostError,
    RequestError,
    RouteNotFoundError,
    SendError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model.topic import BrokerData, MessageQueue, QueueData, TopicRoute
from sluicemq.wire.bodies import encode_topic_route
from sluicemq.wire.frames import Command

MASTER, SLAVE, OTHER = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"
PAIR = BrokerData("a", "c", {0: MASTER, 1: SLAVE})
ALONE = BrokerData("a", "c", {0: MASTER})
PROMOTED = BrokerData("a", "c", {0: SLAVE})
HEADLESS = BrokerData("a", "c", {1: SLAVE})


class World(BlockingShell):
    """Brokers and name servers as functions of the time; a pause passes it."""

    def __init__(self, *name_servers: str) -> None:
        self.now_s = 100.0
        self.routes: Callable[[str], list[BrokerData] | None] = lambda _server: [PAIR]
        self.order: str | None = None
        self.down: Callable[[str], bool] = lambda _address: False
        self.answers: dict[str, Command] = {}
        self.written: list[tuple[str, int]] = []
        self.pauses: list[float] = []
        self.directory = Directory(list(name_servers or ("ns:1",)), self)

    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    def send_request(self, call: Call) -> Command:
        address, command = call.address, call.command
        if self.down(address):
            raise ConnectionLostError(f"nobody at {address}.")
        self.written.append((address, command.code))
        call.is_written = True
        if command.code == 105:
            brokers = self.routes(address)
            if brokers is None:
                return Command(17, remark="no route")
            queues = tuple(QueueData(data.broker, 2, 2, 6) for data in brokers)
            route = TopicRoute(tuple(brokers), queues, order_topic_config=self.order)
            return Command(0, body=encode_topic_route(route))
        if command.code == 106:
            return Command(1)
        return self.answers.get(address, Command(0, {"queueId": "0", "queueOffset": "7"}))

    def send(self, *, retry_unsafe: bool = False, **options: object) -> SendResult:
        sender = Sender(self.directory, "g", lambda: "id", retry_unsafe=retry_unsafe)
        key = options.pop("sharding_key", None)
        outgoing = sender.assign_id(make_message("T", b"x", sharding_key=key))  # type: ignore[arg-type]
        return self.run(sender.send_outgoing(outgoing, **options))  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    return World()


def fails_over_at(world: World, end_s: float) -> None:
    """The master is dead; its name server notices after a second, the slave is master later."""

    def routes(_server: str) -> list[BrokerData]:
        if world.now_s < 101:
            return [PAIR]
        return [HEADLESS] if world.now_s < end_s else [PROMOTED]

    world.routes = routes
    world.down = lambda address: address == MASTER


@pytest.mark.parametrize("how", [{}, {"sharding_key": "k"}, {"queue": MessageQueue("T", "a", 1)}])
def test_a_send_waits_for_the_new_master(world: World, how: dict[str, object]) -> None:
    fails_over_at(world, 105.0)
    assert world.send(**how).queue.broker == "a"
    assert 105.0 <= world.now_s < 106.0
    assert world.written[-1] == (SLAVE, 310)
    assert max(world.pauses) == 0.5


def test_a_strict_order_topic_keeps_its_queues_and_waits(world: World) -> None:
    world.order = "a:2"
    fails_over_at(world, 103.0)
    assert world.send(sharding_key="k").queue.broker == "a"
    assert world.now_s < 104.0


def test_a_send_waits_no_longer_than_its_time(world: World) -> None:
    fails_over_at(world, 1e9)
    with pytest.raises(RouteNotFoundError, match="master of its broker is not running"):
        world.send(timeout_ms=3000)
    assert 103.0 <= world.now_s < 103.6
    with pytest.raises(SluiceError):
        World.send(world, retries=0)
    assert world.now_s < 103.6, "without retries nobody waits"


def test_a_message_that_may_be_stored_stays_unknown_though_the_route_is_gone(world: World) -> None:
    def exchange(call: Call) -> Command:
        if call.command.code == 310:
            call.is_written = True
            world.routes = lambda _server: [HEADLESS]
            raise ConnectionLostError("cut.")
        return World.send_request(world, call)

    world.send_request = exchange  # type: ignore[method-assign]
    with pytest.raises(SendUnknownError, match="may be stored"):
        world.send(timeout_ms=1000)


def test_a_broker_without_replicas_is_not_waited_for(world: World) -> None:
    world.routes, world.down = lambda _server: [ALONE], lambda address: address == MASTER
    with pytest.raises(SendError):
        world.send()
    assert world.pauses == []


def test_another_broker_takes_the_message_at_once(world: World) -> None:
    world.routes = lambda _server: [PAIR, BrokerData("b", "c", {0: OTHER, 1: "10.0.0.4:1"})]
    world.down = lambda address: address == MASTER
    assert {world.send().queue.broker for _ in range(4)} == {"b"}
    assert world.pauses == []


def test_a_deposed_master_is_left_for_the_new_one(world: World) -> None:
    world.routes = lambda _server: [PAIR] if world.now_s < 102 else [PROMOTED]
    world.answers[MASTER] = Command(14, remark="not the master")
    world.send()
    assert world.written[-1][0] == SLAVE
    world.answers[SLAVE] = Command(16, remark="no permission")
    with pytest.raises(RequestError):
        world.send()
    assert world.now_s < 103, "a refusal is no reason to wait"


def test_an_unknown_topic_is_an_error_at_once(world: World) -> None:
    world.routes = lambda _server: None
    with pytest.raises(RouteNotFoundError, match="does not exist"):
        world.send()
    assert world.pauses == []


def test_a_lost_broker_makes_the_next_question_look_for_its_successor(world: World) -> None:
    queue = MessageQueue("T", "a", 0)
    world.run(world.directory.get_route("T"))
    world.routes = lambda _server: [PROMOTED]
    world.down = lambda address: address == MASTER
    for ask in (world.directory.call_master, world.directory.call):
        world.directory.routes.store("T", TopicRoute((PAIR,), ()), world.now_s)
        with pytest.raises(ConnectionLostError):
            world.run(ask(queue, Command(41)))
        world.run(ask(queue, Command(41)))
        assert world.written[-1] == (SLAVE, 41)


def test_a_queue_is_read_where_the_broker_says(world: World) -> None:
    queue = MessageQueue("T", "a", 0)

    def address(replica_id: int) -> str:
        return world.run(world.directory.get_read_address(queue, replica_id))

    assert [address(number) for number in (0, 1, 7)] == [MASTER, SLAVE, MASTER]
    world.now_s += 60
    world.routes = lambda _server: [HEADLESS]
    assert [address(number) for number in (0, 1, 7)] == [SLAVE, SLAVE, SLAVE]


def test_a_name_server_that_was_restarted_empty_is_not_believed() -> None:
    world = World("empty:1", "full:1")
    world.routes = lambda server: [PAIR] if server == "full:1" else None
    assert world.run(world.directory.get_route("T")).brokers == (PAIR,)
    world.now_s += 60
    world.written.clear()
    world.run(world.directory.get_route("T"))
    assert world.written == [("full:1", 105)], "the one that knew is asked first"
    world.routes = lambda _server: None
    assert world.run(world.directory.fetch_route("T")) is None


def test_a_dead_name_server_is_passed_by() -> None:
    world = World("dead:1", "live:1")
    world.down = lambda address: address == "dead:1"
    world.send()
    assert ("live:1", 105) in world.written


@pytest.mark.parametrize(
    ("retry_unsafe", "codes", "status", "tries"),
    [
        (False, (12, 0), SendStatus.FLUSH_SLAVE_TIMEOUT, 1),
        (True, (12, 0), SendStatus.OK, 2),
        (True, (11, 11), SendStatus.SLAVE_NOT_AVAILABLE, 3),
    ],
)
def test_what_is_stored_and_not_safe_goes_to_another_broker_if_that_is_wanted(
    world: World, retry_unsafe: bool, codes: tuple[int, int], status: SendStatus, tries: int
) -> None:
    world.routes = lambda _server: [ALONE, BrokerData("b", "c", {0: OTHER})]
    answers = iter([codes[0], *[codes[1]] * 5])
    asked: list[str] = []

    def exchange(call: Call) -> Command:
        if call.command.code != 310:
            return World.send_request(world, call)
        asked.append(call.address)
        return Command(next(answers), {"queueId": "0", "queueOffset": "7"})

    world.send_request = exchange  # type: ignore[method-assign]
    assert world.send(retry_unsafe=retry_unsafe).status is status
    assert len(asked) == tries
    assert tries == 1 or asked[0] != asked[1]
