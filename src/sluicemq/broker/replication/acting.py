"""A slave stands in for its master while that is away (enableSlaveActingMaster, spec/ha.md §6).

Nobody may write to a slave's log, and what falls due cannot wait until the master is back. So the
slave opens a *stand-in*: the broker that a restart would make of its files, over an overlay whose
changes stay in memory (`files/overlay.py`). That delivers delayed and timed messages, asks how
transactions ended and ends them, and gives back what was popped, all as ever; and what it stores
for somebody goes to another master of the cluster (enableRemoteEscape), message by message:

    slave's files --overlay--> stand-in: delays, timers, transactions, POP
                                 its log, from where the slave's ended
                                   --escape, 310--> another master's queues

What it stores for itself (prepared messages, timers, checkpoints) ends with it. Sends are refused
as ever: they would be promises that nobody keeps.

A master that comes back has the same messages falling due. Before it delivers any it asks its
slaves what has escaped (900305) and passes over each such message once, whatever brings it up
(`produce.intake.DeliveredElsewhere`). The slave answers when all that it has begun is there, and
stands in no more. A slave that dies on the way takes the list with it: then those messages come
twice, as they do with RocketMQ when its slave's marks are older.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.broker.produce.intake import Record, read_record
from sluicemq.clock import Clock
from sluicemq.errors import ProtocolError, SluiceError
from sluicemq.model.message import (
    BORN_HOST_IPV6,
    DELAY,
    PRODUCER_GROUP,
    REAL_QUEUE,
    REAL_TOPIC,
    STORE_HOST_IPV6,
    TIMER_PROPERTIES,
    TRAN_MSG,
    TRANSACTION_MASK,
    UNIQ_KEY,
)
from sluicemq.model.system_names import (
    INNER_PRODUCER_GROUP,
    SYSTEM_TOPIC_PREFIX,
    is_broker_written_topic,
)
from sluicemq.model.topic import DEFAULT_TOPIC, MASTER_ID, PERM_WRITE, RETRY_PREFIX
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.record.codec import as_text
from sluicemq.wire import fastjson
from sluicemq.wire.bodies import decode_topic_route
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import as_list, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import SendMessageRequestV2

log = logging.getLogger(__name__)

ROUTE_S: Final = 5.0
SEND_S: Final = 3.0
PAUSE_S: Final = 0.5
SWEEP_S: Final = 0.05
TRIES: Final = 5
"""Before what waits is left to the master."""
HAND_BACK_S: Final = 20.0
QUIET_S: Final = 30.0
"""After a master has asked for what escaped, the slave does not stand in again for so long."""
STORED: Final = frozenset({0, 10, 11, 12})
_QUEUES: Final = 8
_LEFT_OUT: Final = frozenset({
    DELAY, REAL_TOPIC, REAL_QUEUE, TRAN_MSG, *TIMER_PROPERTIES, "TIMER_OUT_MS", "TIMER_ROLL_TIMES",
    "TIMER_ENQUEUE_MS", "TIMER_DEQUEUE_MS",
})  # fmt: skip
"""What would put the message aside once more."""
Ask = Callable[[str, Command, float], Awaitable[Command]]
"""An exchange with an address, within so many seconds. Raises SluiceError."""
LookUp = Callable[[str], Awaitable[Command | None]]
"""The name servers' answer to 105; None when none answers."""


class Target(NamedTuple):
    """A queue of another master."""

    address: str
    broker: str
    queue_id: int


class Escape:
    """Messages on their way to other masters. Those of one topic arrive in their order; a topic
    that no other master takes holds nobody up."""

    def __init__(self, broker: str, cluster: str, ask: Ask, look_up: LookUp, clock: Clock) -> None:
        self._broker, self._cluster = broker, cluster
        self._ask, self._look_up, self._clock = ask, look_up, clock
        self._routes: dict[str, tuple[float, list[Target]]] = {}
        self._waiting: dict[str, deque[Record]] = {}
        self._next = 0
        self.done: list[tuple[str, str]] = []
        """(topic, message id) of what is stored elsewhere."""

    def put(self, record: Record) -> None:
        self._waiting.setdefault(record.topic, deque()).append(record)

    @property
    def count(self) -> int:
        """How many are not there yet."""
        return sum(map(len, self._waiting.values()))

    async def flush(self) -> bool:
        """Tries each topic until one message of it fails; True when nothing waits any more."""
        await asyncio.gather(*map(self._flush, tuple(self._waiting)))
        return not self._waiting

    async def _flush(self, topic: str) -> None:
        waiting = self._waiting[topic]
        while waiting:
            if not await self.send(topic, waiting[0]):
                self._routes.pop(topic, None)
                return
            record = waiting.popleft()
            self.done.append((topic, record.get_text(UNIQ_KEY)))
        del self._waiting[topic]

    async def send(self, topic: str, record: Record) -> bool:
        """One message; False when it has to wait."""
        targets = await self.targets(topic)
        if not targets:
            return False
        self._next += 1
        target = targets[self._next % len(targets)]
        try:
            answer = await self._ask(target.address, request(topic, record, target), SEND_S)
        except SluiceError as error:
            log.warning("a message of %s does not reach %s: %s", topic, target.broker, error)
            return False
        if answer.code not in STORED:
            log.warning(
                "a message of %s is refused by %s: %s %s",
                topic, target.broker, answer.code, answer.remark,
            )  # fmt: skip
        return answer.code in STORED

    async def targets(self, topic: str) -> list[Target]:
        """Where messages of a topic may go, at most 5 s old."""
        now_s = self._clock.monotonic_s()
        since_s, targets = self._routes.get(topic, (-ROUTE_S, []))
        if now_s - since_s < ROUTE_S:
            return targets
        targets = self._in_route(await self._look_up(topic))
        if not targets and topic.startswith(RETRY_PREFIX):
            # Brokers make it when a message comes; each has a topic of the cluster's name.
            everywhere = self._in_route(await self._look_up(self._cluster))
            targets = [target for target in everywhere if target.queue_id == 0]
        if not targets:
            log.warning("no other master takes messages of %s: they wait", topic)
        self._routes[topic] = now_s, targets
        return targets

    def _in_route(self, answer: Command | None) -> list[Target]:
        if answer is None or answer.code != ResponseCode.SUCCESS:
            return []
        route = decode_topic_route(answer.body)
        masters = {
            data.broker: data.addresses[MASTER_ID]
            for data in route.brokers
            if MASTER_ID in data.addresses and data.broker != self._broker
        }
        return [
            Target(masters[queues.broker], queues.broker, queue_id)
            for queues in route.queues
            if queues.broker in masters and queues.perm & PERM_WRITE
            for queue_id in range(queues.write_queues)
        ]


def request(topic: str, record: Record, target: Target) -> Command:
    """310, with the message as it would lie in its topic."""
    properties = record.decode_properties()
    kept = {name: value for name, value in properties.items() if name not in _LEFT_OUT}
    header = SendMessageRequestV2(
        group=properties.get(PRODUCER_GROUP) or INNER_PRODUCER_GROUP,
        topic=topic,
        default_topic=DEFAULT_TOPIC,
        default_topic_queues=_QUEUES,
        queue_id=target.queue_id,
        sys_flag=record.sys_flag & ~(TRANSACTION_MASK | BORN_HOST_IPV6 | STORE_HOST_IPV6),
        born_time_ms=record.born_time_ms,
        flag=record.flag,
        properties=as_text(kept),
        reconsume_times=record.reconsume_times,
        unit_mode=False,
        batch=False,
        broker=target.broker,
    )
    return Command(RequestCode.SEND_MESSAGE_V2, encode_header(header), bytes(record.body))


class StandIn(Protocol):
    """What this needs of the broker over the overlay: a `BrokerState`."""

    store: Any
    delayed: Any
    transactions: Any
    group_commit: Any
    producers: Any


def is_for_somebody(topic: str) -> bool:
    """Whether consumers read it: not what a broker keeps for itself."""
    return not (is_broker_written_topic(topic) or topic.startswith(SYSTEM_TOPIC_PREFIX))


class Acting:
    """One slave. `open_stand_in` makes the broker over the overlay and `close` ends it; `members`
    asks who of the broker's name lives (id -> address), None when no name server tells."""

    def __init__(
        self,
        replica_id: int,
        *,
        open_stand_in: Callable[[], Awaitable[StandIn]],
        close: Callable[[StandIn], Awaitable[None]],
        escape: Callable[[], Escape],
        members: Callable[[], Awaitable[Mapping[int, str] | None]],
        clock: Clock,
        period_s: Callable[[], float],
    ) -> None:
        self._id = replica_id
        self._open, self._close = open_stand_in, close
        self._make_escape, self._members = escape, members
        self._clock, self._period_s = clock, period_s
        self._quiet_until_s = 0.0
        self._position = 0
        self._changing = asyncio.Lock()
        self._news = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self._escape: Escape | None = None
        self.stand_in: StandIn | None = None

    def look(self) -> None:
        """Something has changed among the replicas (905)."""
        self._news.set()

    async def run(self) -> None:
        """Stands in when it has to, until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.work())
                while True:
                    await self.decide()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._period_s()):
                            await self._news.wait()
                    self._news.clear()
        finally:
            await self.end()

    async def decide(self) -> None:
        """A master that nobody can tell of changes nothing."""
        members = await self._members()
        if not members:
            return
        is_first = min({*members, self._id}) == self._id
        is_quiet = self._clock.monotonic_s() < self._quiet_until_s
        if is_first and not is_quiet and self.stand_in is None:
            await self.begin()
        elif not is_first and self.stand_in is not None:
            await self.end()

    async def begin(self) -> None:
        """From now on what falls due is delivered elsewhere."""
        async with self._changing:
            self._escape = self._make_escape()
            stand_in = await self._open()
            self._position = stand_in.store.written_offset
            self.stand_in = stand_in
            log.warning(
                "there is no master: this slave stands in for it. What falls due goes to other "
                "masters; sends are refused."
            )

    async def end(self) -> None:
        """Stops, and waits for what is under way."""
        async with self._changing:
            stand_in, self.stand_in = self.stand_in, None
            if stand_in is None:
                return
            assert self._escape is not None
            stand_in.delayed.stop()
            stand_in.transactions.stop()
            stand_in.group_commit.commit()
            self._collect(stand_in)
            for _ in range(TRIES):
                if await self._escape.flush():
                    break
                await asyncio.sleep(PAUSE_S)
            left = self._escape.count
            log.warning(
                "this slave stands in no more: %d messages are with other masters%s",
                len(self._escape.done),
                f", {left} wait for the master as before" if left else "",
            )
            await self._close(stand_in)

    async def hand_back(self) -> Command:
        """900305: what has escaped since this slave stood in last."""
        self._quiet_until_s = self._clock.monotonic_s() + QUIET_S
        await self.end()
        done = [] if self._escape is None else self._escape.done
        return Command(ResponseCode.SUCCESS, {}, encode_escaped(done))

    def answer(self, command: Command, peer: Peer) -> None:
        """The same, when it is known."""

        async def reply() -> None:
            peer.write(encode_response_to(await self.hand_back(), command))

        task = asyncio.get_running_loop().create_task(reply())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    # ------------------------------------------------------------------------------ inside

    async def step(self) -> bool:
        """What is due now goes its way; False when something has to wait for another master."""
        async with self._changing:
            stand_in, escape = self.stand_in, self._escape
            if stand_in is None or escape is None:
                return True
            stand_in.delayed.run()
            stand_in.transactions.run_slice()
            self._collect(stand_in)
            return not escape.count or await escape.flush()

    async def work(self) -> None:
        """Step after step."""
        while True:
            is_done = await self.step()
            await asyncio.sleep(SWEEP_S if is_done else PAUSE_S)

    def _collect(self, stand_in: StandIn) -> None:
        """What the stand-in has stored for somebody."""
        assert self._escape is not None
        reader = stand_in.store.reader
        for found in reader.scan(self._position):
            self._position = found.end
            record = read_record(reader.view_at(found.position))
            if record is not None and is_for_somebody(record.topic):
                self._escape.put(record)


# ------------------------------------------------------------------------------- the master


def encode_escaped(done: Iterable[tuple[str, str]]) -> bytes:
    """The body of 900305's answer: a list of topic and message id in turn."""
    return fastjson.dumps({"escaped": [part for pair in done for part in pair]})


def decode_escaped(body: bytes | memoryview) -> list[tuple[str, str]]:
    """Raises ProtocolError."""
    values = fastjson.loads(bytes(body))
    if not isinstance(values, dict):
        raise ProtocolError("What has escaped is no object.")
    parts = [str(part) for part in as_list(values.get("escaped", []), "What has escaped")]
    return list(zip(parts[::2], parts[1::2], strict=False))


async def ask_escaped(addresses: Iterable[str], ask: Ask) -> list[tuple[str, str]]:
    """What a master that comes back asks of its slaves. One that knows no such request, or is not
    there, has nothing to say."""
    found: list[tuple[str, str]] = []
    for address in addresses:
        try:
            answer = await ask(address, Command(RequestCode.SLUICE_HAND_BACK, {}), HAND_BACK_S)
            if answer.code == ResponseCode.SUCCESS:
                found += decode_escaped(answer.body)
        except SluiceError as error:
            log.info("the slave at %s hands nothing back: %s", address, error)
    return found
