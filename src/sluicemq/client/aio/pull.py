"""Raw pulls: one request, one outcome, no background work and no group membership.

The caller keeps the offset: RocketMQ's DefaultMQPullConsumer.
"""

from dataclasses import dataclass
from typing import Final

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.offsets import BrokerOffsets
from sluicemq.client.aio.sendback import SendBack
from sluicemq.client.core import requests
from sluicemq.client.core.answers import PullStatus, number, pull_answer
from sluicemq.client.core.names import check_group
from sluicemq.client.core.routing import read_queues
from sluicemq.client.core.subscriptions import make_subscription
from sluicemq.filter.tags import tag_matches
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records

READ_GROUP: Final = "TOOLS_CONSUMER"


@dataclass(frozen=True, slots=True)
class PullResult:
    """`next_offset` is where to go on (for OFFSET_ILLEGAL: where the broker says); the queue holds
    `offset_min` up to, not including, `offset_max`."""

    status: PullStatus
    next_offset: int
    offset_min: int
    offset_max: int
    messages: tuple[StoredMessage, ...]


class PullConsumer:
    """Pulls from queues that the caller names. Made by `Sluice.pull_consumer`."""

    def __init__(self, cluster: Cluster, group: str = READ_GROUP) -> None:
        self.group = check_group(group)
        self._cluster = cluster
        self._subscriptions: dict[tuple[str, str | None, str | None], Subscription] = {}

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        count_max: int = 32,
        tags: str | None = None,
        where: str | None = None,
        wait_s: float = 0.0,
    ) -> PullResult:
        """Messages from `offset` on; with `wait_s` the broker holds the request until some come.

        Raises FilterSyntaxError, RouteNotFoundError, RequestError, ConnectionLostError and
        RequestTimeoutError. An offset outside the queue is no error: status OFFSET_ILLEGAL.
        """
        subscription = self._subscription(queue.topic, tags, where)
        address = await self._cluster.address(queue)
        command = requests.pull(
            self.group,
            queue,
            offset,
            count_max=count_max,
            subscription=subscription,
            suspend_timeout_ms=int(wait_s * 1000),
        )
        # The broker looks at its parked pulls every 5 s (spec/remoting.md §13): so late at most.
        answer = await self._cluster.call(address, command, self._cluster.timeout_s + wait_s + 5.0)
        pulled = pull_answer(answer, address)
        messages = tuple(
            record
            for record in decode_records(pulled.data, broker=queue.broker)
            if tag_matches(subscription, record.tag)
        )
        return PullResult(
            pulled.status, pulled.next_offset, pulled.offset_min, pulled.offset_max, messages
        )

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic."""
        return read_queues(topic, await self._cluster.route(topic))

    async def offsets(self, queue: MessageQueue) -> tuple[int, int]:
        """(the first stored offset, the offset that the next message will get)."""
        first = await self._cluster.ask(queue, requests.offset_min(queue))
        following = await self._cluster.ask(queue, requests.offset_max(queue))
        return number(first, "offset"), number(following, "offset")

    async def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first offset stored at `time_ms` (milliseconds since 1970) or later."""
        command = requests.offset_by_time(queue, time_ms)
        return number(await self._cluster.ask(queue, command), "offset")

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's offset at the broker, None when there is none."""
        return await BrokerOffsets(self._cluster, self.group).read(queue)

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Keeps an offset for the group at the broker; nothing else commits here."""
        await BrokerOffsets(self._cluster, self.group).write(queue, offset)

    async def send_back(self, message: StoredMessage, delay_level: int = 0) -> None:
        """A message shall come to the group again, by its retry topic; see
        `ReceivedMessage.reject` for the levels. Raises SluiceError."""
        await SendBack(self._cluster, self.group, None).send_back(message, delay_level)

    def _subscription(self, topic: str, tags: str | None, where: str | None) -> Subscription:
        key = (topic, tags, where)
        known = self._subscriptions.get(key)
        if known is None:
            known = make_subscription(topic, tags=tags, where=where)
            self._subscriptions[key] = known
        return known
