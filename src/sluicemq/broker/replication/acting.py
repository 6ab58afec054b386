"""An acting master: a slave that delivers messages of its unreachable master (spec/ha.md §6).

This is RocketMQ's `enableSlaveActingMaster`. Nothing may write to a slave's log, but messages that
become due cannot wait until the master is back. The slave therefore opens a second broker, the
*acting broker*: the broker that a restart as master would make of the slave's files, on top of an
overlay whose changes stay in memory (`files/overlay.py`). The acting broker delivers delayed and
timed messages, checks and ends transactions, and makes popped messages visible again, as usual. The
messages that it stores for consumers are sent to other masters of the cluster, one by one
(`enableRemoteEscape`):

    slave's files --overlay--> acting broker: delays, timers, transactions, POP
                                 its log, from the end of the slave's log on
                                   --EscapeBridge, SEND_MESSAGE_V2 (310)--> another master's queues

Messages that the acting broker stores for itself (prepared messages, timers, checkpoints) are lost
when it is closed. Sends of clients are still refused: the acting broker could not keep them.

When the master comes back, the same messages become due there. Before it delivers any, it asks its
slaves which messages have escaped (SLUICE_HAND_BACK, 900305), and skips each of these once, however
it becomes due (`produce.intake.DeliveredElsewhere`). A slave answers when all messages that it has
taken are stored elsewhere, and then it stops acting. If a slave dies meanwhile, its list is lost.
Then these messages are delivered twice, as in RocketMQ if the checkpoints of the slave are older.
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
from sluicemq.record.codec import format_property_text
from sluicemq.wire import fastjson
from sluicemq.wire.bodies import decode_topic_route
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.fastjson import as_list
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import SendMessageRequestV2

log = logging.getLogger(__name__)

ROUTE_S: Final = 5.0
"""The time for which a route is used, in seconds."""
SEND_S: Final = 3.0
"""The timeout of sending one message, in seconds."""
PAUSE_S: Final = 0.5
"""The pause after a message could not be sent, in seconds."""
SWEEP_S: Final = 0.05
"""The pause between two deliveries of due messages, in seconds."""
TRIES: Final = 5
"""When the slave stops acting, it tries this often to send what waits. The rest stays with the
master."""
HAND_BACK_S: Final = 20.0
"""The timeout of SLUICE_HAND_BACK, in seconds."""
QUIET_S: Final = 30.0
"""After a master has asked what has escaped, the slave does not act again for this time, in
seconds."""
STORED_CODES: Final = frozenset({0, 10, 11, 12})
"""The response codes that mean that a message is stored."""
_QUEUES: Final = 8
_REMOVED_PROPERTIES: Final = frozenset(
    {
        DELAY,
        REAL_TOPIC,
        REAL_QUEUE,
        TRAN_MSG,
        *TIMER_PROPERTIES,
        "TIMER_OUT_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS",
    }
)
"""Properties that would make the other master delay the message again."""

SendRequest = Callable[[str, Command, float], Awaitable[Command]]
"""Sends a request to an address and returns the response. The last argument is the timeout in
seconds. Raises SluiceError."""
LookUpRoute = Callable[[str], Awaitable[Command | None]]
"""Returns a name server's answer to GET_ROUTEINFO_BY_TOPIC (105) for a topic; None if there is no
answer."""


class EscapeTarget(NamedTuple):
    """A queue of another master."""

    address: str
    broker: str
    queue_id: int


class EscapeBridge:
    """Sends messages that an acting broker has stored to other masters of the cluster.

    RocketMQ's class has the same name. `add` queues a message, and `flush` sends the queued ones.
    Messages of one topic are sent in their order. A topic that no other master accepts does not
    delay the other topics.
    """

    def __init__(
        self,
        broker: str,
        cluster: str,
        send_request: SendRequest,
        look_up: LookUpRoute,
        clock: Clock,
    ) -> None:
        """Create a bridge that sends messages to masters with other broker names.

        A slave that acts for its master uses it, because it must not store messages itself.
        `broker` is the broker name of the slave, and `cluster` the name of its cluster.
        `send_request(address, command, timeout_s)` returns the answer of a master. `look_up(topic)`
        returns a name server's answer about the route of a topic, or None.
        """
        self._broker = broker
        self._cluster = cluster
        self._send_request = send_request
        self._look_up = look_up
        self._clock = clock
        self._routes: dict[str, tuple[float, list[EscapeTarget]]] = {}
        self._waiting: dict[str, deque[Record]] = {}
        self._next_target = 0
        self.delivered: list[tuple[str, str]] = []
        """The topic and message id of each message that another master has stored."""

    def add(self, record: Record) -> None:
        """Queue a message. `flush` sends it."""
        self._waiting.setdefault(record.topic, deque()).append(record)

    @property
    def pending_count(self) -> int:
        """The number of messages that are not stored by another master yet."""
        return sum(map(len, self._waiting.values()))

    async def flush(self) -> bool:
        """Send the queued messages of all topics, those of one topic in their order.

        When a message of a topic fails, it and the rest of the topic stay queued. Return whether
        no message is queued any more.
        """
        await asyncio.gather(*map(self._flush_topic, tuple(self._waiting)))
        return not self._waiting

    async def _flush_topic(self, topic: str) -> None:
        """Send the queued messages of `topic` to other masters until one of them fails.

        Each message that was stored is removed from the queue and added to `delivered`. After a
        failure the known route of the topic is forgotten, so that the next attempt looks it up.
        """
        waiting = self._waiting[topic]
        while waiting:
            if not await self.send_message(topic, waiting[0]):
                self._routes.pop(topic, None)
                return
            record = waiting.popleft()
            self.delivered.append((topic, record.get_text(UNIQ_KEY)))
        del self._waiting[topic]

    async def send_message(self, topic: str, record: Record) -> bool:
        """Send one message to another master, and return whether it was stored.

        Successive calls use the queues of all other masters in turn. Return False if no other
        master has a queue for the topic, if the master cannot be reached, or if it refuses the
        message. A failure is logged.
        """
        targets = await self.find_targets(topic)
        if not targets:
            return False
        self._next_target += 1
        target = targets[self._next_target % len(targets)]
        request = make_send_request(topic, record, target)
        try:
            answer = await self._send_request(target.address, request, SEND_S)
        except SluiceError as error:
            log.warning("Cannot send a message of topic %s to %s: %s", topic, target.broker, error)
            return False
        if answer.code not in STORED_CODES:
            log.warning(
                "A message of topic %s was refused by %s: %s %s",
                topic,
                target.broker,
                answer.code,
                answer.remark,
            )
        return answer.code in STORED_CODES

    async def find_targets(self, topic: str) -> list[EscapeTarget]:
        """Return the writable queues of a topic on other masters, or [] if there are none.

        If a retry topic has no queues, queue 0 of every other master in the cluster is returned,
        because brokers create a retry topic when its first message arrives. The result is kept for
        ROUTE_S seconds. If it is empty, a warning is logged.
        """
        now_s = self._clock.monotonic_s()
        looked_up_s, targets = self._routes.get(topic, (-ROUTE_S, []))
        if now_s - looked_up_s < ROUTE_S:
            return targets
        targets = self._find_targets_in(await self._look_up(topic))
        if not targets and topic.startswith(RETRY_PREFIX):
            # Each broker has a topic with the name of the cluster.
            cluster_targets = self._find_targets_in(await self._look_up(self._cluster))
            targets = [target for target in cluster_targets if target.queue_id == 0]
        if not targets:
            log.warning("No other master accepts messages of topic %s. They wait.", topic)
        self._routes[topic] = now_s, targets
        return targets

    def _find_targets_in(self, answer: Command | None) -> list[EscapeTarget]:
        """Return the writable queues of other masters in the answer to a route request.

        Return [] if `answer` is None or an error.
        """
        if answer is None or answer.code != ResponseCode.SUCCESS:
            return []
        route = decode_topic_route(answer.body)
        master_addresses: dict[str, str] = {}
        for broker in route.brokers:
            if broker.broker != self._broker and MASTER_ID in broker.addresses:
                master_addresses[broker.broker] = broker.addresses[MASTER_ID]

        targets = []
        for queues in route.queues:
            address = master_addresses.get(queues.broker)
            if address is not None and queues.perm & PERM_WRITE:
                targets += [
                    EscapeTarget(address, queues.broker, queue_id)
                    for queue_id in range(queues.write_queues)
                ]
        return targets


def make_send_request(topic: str, record: Record, target: EscapeTarget) -> Command:
    """Return a SEND_MESSAGE_V2 request (310) that stores the message of `record` at `target`.

    Properties and flags that belong to a delayed message or a transaction are left out, so that the
    message is delivered at once in `topic`.
    """
    properties = record.decode_properties()
    sent_properties = properties.copy()
    for name in _REMOVED_PROPERTIES:
        sent_properties.pop(name, None)
    removed_flags = TRANSACTION_MASK | BORN_HOST_IPV6 | STORE_HOST_IPV6
    header = SendMessageRequestV2(
        group=properties.get(PRODUCER_GROUP) or INNER_PRODUCER_GROUP,
        topic=topic,
        default_topic=DEFAULT_TOPIC,
        default_topic_queues=_QUEUES,
        queue_id=target.queue_id,
        sys_flag=record.sys_flag & ~removed_flags,
        born_time_ms=record.born_time_ms,
        flag=record.flag,
        properties=format_property_text(sent_properties),
        reconsume_times=record.reconsume_times,
        unit_mode=False,
        batch=False,
        broker=target.broker,
    )
    return Command(RequestCode.SEND_MESSAGE_V2, encode_header(header), bytes(record.body))


class ActingBroker(Protocol):
    """The components of the acting broker (`BrokerState`) that are used here."""

    store: Any
    delayed: Any
    transactions: Any
    group_commit: Any
    producers: Any


def is_consumer_topic(topic: str) -> bool:
    """Return whether consumers read the topic: it is not one that a broker uses for itself."""
    return not (is_broker_written_topic(topic) or topic.startswith(SYSTEM_TOPIC_PREFIX))


class ActingMaster:
    """The component of a slave that decides when it acts for its master, and then acts.

    `broker` is the acting broker; None while the slave does not act.
    """

    def __init__(
        self,
        replica_id: int,
        *,
        open_broker: Callable[[], Awaitable[ActingBroker]],
        close_broker: Callable[[ActingBroker], Awaitable[None]],
        make_escape_bridge: Callable[[], EscapeBridge],
        fetch_members: Callable[[], Awaitable[Mapping[int, str] | None]],
        clock: Clock,
        period_s: Callable[[], float],
    ) -> None:
        """Create the component of the slave with the id `replica_id` that acts for its master.

        - `open_broker()` opens the acting broker: a master that reads the slave's files and keeps
          all changes in memory. `close_broker(broker)` closes it.
        - `make_escape_bridge()` returns a new bridge to other masters. It is called each time the
          slave starts to act.
        - `fetch_members()` returns the addresses of the live brokers with this broker name by id.
          It returns None if no name server answers.
        - `period_s` returns the time between two calls of `start_or_stop`, in seconds.
        """
        self._id = replica_id
        self._open = open_broker
        self._close = close_broker
        self._make_escape_bridge = make_escape_bridge
        self._fetch_members = fetch_members
        self._clock = clock
        self._period_s = period_s
        self._quiet_until_s = 0.0
        self._position = 0  # the log of the acting broker was read up to here
        self._changing = asyncio.Lock()
        self._wake_up = asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self._escape_bridge: EscapeBridge | None = None
        self.broker: ActingBroker | None = None

    def check_soon(self) -> None:
        """Let `run` call `start_or_stop` at once: the live replicas have changed (request 905)."""
        self._wake_up.set()

    async def run(self) -> None:
        """Start and stop acting for the master as necessary, until cancelled. Then stop acting.

        Whether to act is checked every `period_s` seconds, and at once after `check_soon`. While
        the slave acts, due messages are delivered.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.deliver_repeatedly())
                while True:
                    await self.start_or_stop()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._period_s()):
                            await self._wake_up.wait()
                    self._wake_up.clear()
        finally:
            await self.stop_acting()

    async def start_or_stop(self) -> None:
        """Start to act if this slave has the lowest id of the live brokers, else stop acting.

        The master has the id 0, so a slave has the lowest id only while the master is not alive.
        Do nothing if no name server says which brokers are alive. Do not start within QUIET_S
        seconds after a master has come back and has asked which messages were sent for it.
        """
        members = await self._fetch_members()
        if not members:
            return
        is_first = min({*members, self._id}) == self._id
        is_quiet = self._clock.monotonic_s() < self._quiet_until_s
        if is_first and not is_quiet and self.broker is None:
            await self.start_acting()
        elif not is_first and self.broker is not None:
            await self.stop_acting()

    async def start_acting(self) -> None:
        """Open the acting broker, with a new bridge to other masters, and log a warning.

        From now on, delayed messages that become due are sent to other masters.
        """
        async with self._changing:
            self._escape_bridge = self._make_escape_bridge()
            broker = await self._open()
            self._position = broker.store.written_offset
            self.broker = broker
            log.warning(
                "The master is not reachable: this slave acts for it. Messages that become due are "
                "sent to other masters. Sends are refused."
            )

    async def stop_acting(self) -> None:
        """Stop the acting broker, send what it has stored to other masters, and close it.

        Up to TRIES attempts are made. Messages that cannot be sent are left to the master. The
        bridge remains, so that `hand_back` can list the messages that were sent. Do nothing if the
        slave does not act.
        """
        async with self._changing:
            broker = self.broker
            self.broker = None
            if broker is None:
                return
            assert self._escape_bridge is not None
            broker.delayed.stop()
            broker.transactions.stop()
            broker.group_commit.commit()
            self._add_stored_messages(broker)
            for _ in range(TRIES):
                if await self._escape_bridge.flush():
                    break
                await asyncio.sleep(PAUSE_S)

            unsent_count = self._escape_bridge.pending_count
            log.warning(
                "This slave does not act for its master any more. %d messages were sent to other "
                "masters%s",
                len(self._escape_bridge.delivered),
                f", {unsent_count} still wait for the master." if unsent_count else ".",
            )
            await self._close(broker)

    async def hand_back(self) -> Command:
        """Stop acting for at least QUIET_S seconds, and return the answer to SLUICE_HAND_BACK.

        The answer lists the messages that were sent to other masters since the slave last started
        to act. A master that has come back asks for it (900305), to not deliver them again.
        """
        self._quiet_until_s = self._clock.monotonic_s() + QUIET_S
        await self.stop_acting()
        delivered = [] if self._escape_bridge is None else self._escape_bridge.delivered
        return Command(ResponseCode.SUCCESS, {}, encode_escaped(delivered))

    def answer_hand_back(self, command: Command, peer: Peer) -> None:
        """Start `hand_back` for the request `command`, and write the answer to `peer` later."""

        async def answer() -> None:
            peer.write(encode_response_to(await self.hand_back(), command))

        task = asyncio.get_running_loop().create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    # --- delivery

    async def deliver_due(self) -> bool:
        """Let the acting broker deliver due messages, and send these to other masters.

        Return False if a message could not be sent, so that it waits for the next call. Return True
        otherwise, also if the slave does not act.
        """
        async with self._changing:
            broker = self.broker
            escape_bridge = self._escape_bridge
            if broker is None or escape_bridge is None:
                return True
            broker.delayed.run_slice()
            broker.transactions.run_slice()
            self._add_stored_messages(broker)
            return not escape_bridge.pending_count or await escape_bridge.flush()

    async def deliver_repeatedly(self) -> None:
        """Call `deliver_due` until cancelled, with pauses of SWEEP_S or PAUSE_S seconds."""
        while True:
            is_all_sent = await self.deliver_due()
            await asyncio.sleep(SWEEP_S if is_all_sent else PAUSE_S)

    def _add_stored_messages(self, broker: ActingBroker) -> None:
        """Queue the messages that the acting broker has stored since the last call at the bridge.

        Only messages in topics of consumers are queued. The others are internal to the broker.
        """
        assert self._escape_bridge is not None
        reader = broker.store.reader
        for scanned in reader.scan(self._position):
            self._position = scanned.end
            record = read_record(reader.view_at(scanned.position))
            if record is not None and is_consumer_topic(record.topic):
                self._escape_bridge.add(record)


# ------------------------------------------------------------------------------- the master


def encode_escaped(delivered: Iterable[tuple[str, str]]) -> bytes:
    """Encode the body of the answer to SLUICE_HAND_BACK (900305).

    `delivered` has a tuple (topic, message id) for each message. [("t", "1"), ("t", "2")] becomes
    the JSON text {"escaped": ["t", "1", "t", "2"]}.
    """
    topics_and_ids: list[str] = []
    for topic, message_id in delivered:
        topics_and_ids += (topic, message_id)
    return fastjson.dumps({"escaped": topics_and_ids})


def decode_escaped(body: bytes | memoryview) -> list[tuple[str, str]]:
    """Decode the body of an answer to SLUICE_HAND_BACK (900305).

    Return a tuple (topic, message id) for each message. A topic without an id at the end is
    ignored. Raises ProtocolError if the body is invalid.
    """
    values = fastjson.loads(bytes(body))
    if not isinstance(values, dict):
        raise ProtocolError("The list of escaped messages must be a JSON object.")
    escaped = as_list(values.get("escaped", []), "The list of escaped messages")
    topics_and_ids = list(map(str, escaped))
    topics = topics_and_ids[::2]
    message_ids = topics_and_ids[1::2]
    return list(zip(topics, message_ids, strict=False))


async def fetch_escaped(
    addresses: Iterable[str], send_request: SendRequest
) -> list[tuple[str, str]]:
    """Ask slaves which messages they have sent to other masters, and make them stop acting.

    A master that has come back calls this with the addresses of its slaves. Return a tuple (topic,
    message id) for each message. A slave that cannot be reached, which is logged, or that answers
    with an error adds none.
    """
    escaped: list[tuple[str, str]] = []
    for address in addresses:
        command = Command(RequestCode.SLUICE_HAND_BACK, {})
        try:
            answer = await send_request(address, command, HAND_BACK_S)
            if answer.code == ResponseCode.SUCCESS:
                escaped += decode_escaped(answer.body)
        except SluiceError as error:
            log.info("The slave at %s does not return any messages: %s", address, error)
    return escaped
