"""Consumers of a stepped broker that behave like Java's push consumer, for simulations.

A `ModelConsumer` sends heartbeats, asks for the members of its group (38), takes its share of the
queues, asks for offsets (14), pulls (11), delivers, commits (15) and follows redirects (21). The
caller decides on time and order. `deliveries` contains each message that a consumer received.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.message import RETRY_TOPIC, StoredMessage
from sluicemq.model.subscription import SQL92, TAG, Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue, allocate_average
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies
from sluicemq.wire.frames import FLAG_ONEWAY

Wanted = dict[str, tuple[str, str]]
"""topic -> (kind, expression)"""


@dataclass
class Shared:
    """The state that all consumers of a simulation share."""

    group: str
    deliveries: Counter[str] = field(default_factory=Counter)
    sent_back: Counter[str] = field(default_factory=Counter)
    takers: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class _Reading:
    position: int
    done: int
    """What was handed out and is finished: the committed offset."""
    in_hand: list[StoredMessage] = field(default_factory=list)


class ModelConsumer:
    """One member of a group."""

    def __init__(
        self, broker: SteppedBroker, shared: Shared, client_id: str, wanted: Wanted, version: int
    ) -> None:
        self.shared = shared
        self.client_id = client_id
        self.wanted = wanted
        self.version = version
        self.readings: dict[MessageQueue, _Reading] = {}
        self.refusal = ""
        self.connect(broker)

    # ------------------------------------------------------------------------- what a test does

    def connect(self, broker: SteppedBroker) -> None:
        """Connect to a broker, or again after its restart. Messages in flight remain so."""
        self.broker = broker
        self.connection: SteppedClient = broker.connect()
        self.beat()

    def change(self, wanted: Wanted, version: int) -> None:
        """Change the subscription while running. As in Java, the queues remain the same."""
        self.wanted, self.version = wanted, version
        self.beat()

    def beat(self) -> None:
        data = bodies.ConsumerData(
            self.shared.group,
            consume_from_where=bodies.FROM_FIRST_OFFSET,
            subscriptions=self._subscriptions(),
        )
        heartbeat = bodies.Heartbeat(self.client_id, (), (data,))
        answer = self.connection.call(34, {}, bodies.encode_heartbeat(heartbeat))
        self.refusal = answer.remark or "" if answer.code else ""

    def drop(self) -> None:
        """Do the first half of a rebalance: finish and release lost queues."""
        mine = set(self._share())
        for queue in [queue for queue in self.readings if queue not in mine]:
            self.finish(queue, len(self.readings[queue].in_hand))
            self._commit(queue)
            del self.readings[queue]

    def take(self) -> None:
        """Do the second half of a rebalance: read new queues from their offset on."""
        for queue in self._share():
            if queue not in self.readings:
                self._begin(queue)

    def begin_at(self, queue: MessageQueue, offset: int) -> None:
        """Read a queue from an offset that is known from before."""
        self.readings[queue] = _Reading(offset, offset)

    def pull(self, queue: MessageQueue, count: int = 32) -> None:
        reading = self.readings[queue]
        answer = self.connection.call(
            11,
            {
                "consumerGroup": self.shared.group, "topic": queue.topic,
                "queueId": queue.queue_id, "queueOffset": reading.position, "maxMsgNums": count,
                "sysFlag": 1 if reading.done >= 0 else 0, "commitOffset": max(reading.done, 0),
                "suspendTimeoutMillis": 0, "subVersion": self.version, "expressionType": TAG,
            },
        )  # fmt: skip
        if answer.code == 21:
            self._sent_elsewhere(queue)
        elif answer.code in {0, 19, 20}:
            reading.position = int((answer.fields or {})["nextBeginOffset"])
            for message in decode_records(answer.body):
                self._got(reading, message)
            if not reading.in_hand:
                reading.done = reading.position

    def finish(self, queue: MessageQueue, count: int) -> None:
        """Acknowledge the oldest messages in flight."""
        reading = self.readings[queue]
        del reading.in_hand[:count]
        last = reading.in_hand[0].queue_offset if reading.in_hand else reading.position
        reading.done = max(reading.done, last)

    @property
    def in_hand(self) -> list[str]:
        """The bodies of the messages that were received and not finished."""
        return [m.body.decode() for reading in self.readings.values() for m in reading.in_hand]

    def commit(self) -> None:
        for queue in self.readings:
            self._commit(queue)

    def leave(self, *, says_so: bool) -> None:
        """Stop in order: finish and commit all messages in flight."""
        for queue, reading in self.readings.items():
            self.finish(queue, len(reading.in_hand))
        self.commit()
        if says_so:
            fields = {"clientID": self.client_id, "consumerGroup": self.shared.group}
            self.connection.call(35, fields)
        self.connection.disconnect()

    # ---------------------------------------------------------------------------- inside

    def _subscriptions(self) -> tuple[Subscription, ...]:
        retry = RETRY_PREFIX + self.shared.group
        own = [
            parse_subscription(t, text, kind, self.version)
            for t, (kind, text) in self.wanted.items()
        ]
        return (*own, parse_subscription(retry, "*", TAG, self.version))

    def _share(self) -> list[MessageQueue]:
        answer = self.connection.call(38, {"consumerGroup": self.shared.group})
        if answer.code:
            return []
        members = bodies.decode_consumer_list(answer.body)
        found: list[MessageQueue] = []
        for topic in (*self.wanted, RETRY_PREFIX + self.shared.group):
            known = self.broker.core.topics.get(topic)
            count = known.config.read_queues if known is not None else 0
            queues = [MessageQueue(topic, "broker-a", queue_id) for queue_id in range(count)]
            if self.client_id in members:
                found += allocate_average(self.client_id, queues, members)
        return found

    def _place(self, queue: MessageQueue) -> dict[str, object]:
        return {
            "consumerGroup": self.shared.group,
            "topic": queue.topic,
            "queueId": queue.queue_id,
        }

    def _begin(self, queue: MessageQueue) -> None:
        answer = self.connection.call(14, self._place(queue))
        offset = int((answer.fields or {}).get("offset", 0)) if answer.code == 0 else 0
        self.readings[queue] = _Reading(offset, offset if answer.code == 0 else -1)

    def _sent_elsewhere(self, queue: MessageQueue) -> None:
        """Follow a redirect like Java: drop the queue, rebalance, and read it if assigned.

        The messages in flight are finished, but their commits are ignored.
        """
        if queue in self._share():
            self._begin(queue)
        else:
            del self.readings[queue]

    def _got(self, reading: _Reading, message: StoredMessage) -> None:
        kind, text = self.wanted.get(message.properties.get(RETRY_TOPIC, message.topic), (TAG, "*"))
        if (
            kind != SQL92
            and not message.topic.startswith(RETRY_PREFIX)
            and text != "*"
            and message.tag not in {tag.strip() for tag in text.split("||")}
        ):
            return  # Java's clients compare the tag again
        reading.in_hand.append(message)
        name = message.body.decode()
        self.shared.deliveries[name] += 1
        self.shared.takers.setdefault(name, []).append(self.client_id)

    def send_back(self, queue: MessageQueue) -> None:
        """Send the oldest message in flight back: it is delivered again after a second."""
        message = self.readings[queue].in_hand[0]
        answer = self.connection.call(
            36,
            {
                "group": self.shared.group, "offset": message.physical_offset, "delayLevel": 1,
                "originMsgId": "", "originTopic": message.topic, "unitMode": "false",
                "maxReconsumeTimes": 16,
            },
        )  # fmt: skip
        if answer.code == 0:
            self.shared.sent_back[message.body.decode()] += 1
            self.finish(queue, 1)

    def _commit(self, queue: MessageQueue) -> None:
        reading = self.readings[queue]
        if reading.done >= 0:
            fields = self._place(queue) | {"commitOffset": reading.done}
            self.connection.feed(self.connection.request(15, fields, flag=FLAG_ONEWAY))
            self.broker.step()


def balance(consumers: list[ModelConsumer]) -> None:
    """Rebalance all members: queues are released before others take them."""
    for consumer in consumers:
        consumer.drop()
    for consumer in consumers:
        consumer.take()


def work(consumers: list[ModelConsumer], rng: random.Random, failures: float = 0.0) -> None:
    """Let each member pull, finish some messages, and commit from time to time."""
    for consumer in consumers:
        for queue in list(consumer.readings):
            if rng.random() < 0.7:
                consumer.pull(queue, rng.choice([1, 3, 32]))
            if queue not in consumer.readings:  # it was sent elsewhere, and is another's now
                continue
            in_hand = len(consumer.readings[queue].in_hand)
            if in_hand and rng.random() < failures:
                consumer.send_back(queue)
                in_hand -= 1
            consumer.finish(queue, rng.randint(0, in_hand))
        if rng.random() < 0.4:
            consumer.commit()


def read_all(consumers: list[ModelConsumer], rounds: int) -> None:
    """Rebalance, then read, finish and commit all messages, in the given number of rounds."""
    balance(consumers)
    for _ in range(rounds):
        for consumer in consumers:
            for queue in list(consumer.readings):
                consumer.pull(queue)
                consumer.finish(queue, len(consumer.readings[queue].in_hand))
            consumer.commit()
