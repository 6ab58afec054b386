"""Sends messages back to the broker for a group, so that they come again later.

    36 at the broker that has the message
     └─ fails: the copy is sent by this client to %RETRY%group, at any broker that takes it
         └─ fails: SluiceError, and the message is still the consumer's

When a call returns the copy is stored: only then the original may count as done.
"""

import logging

from sluicemq.client.aio.cluster import Cluster
from sluicemq.client.aio.producer import Producer
from sluicemq.client.core import requests
from sluicemq.client.core.answers import expect_success
from sluicemq.client.core.retrying import INNER_GROUP, first_topic, retry_copy, times_so_far
from sluicemq.errors import SluiceError
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import MessageQueue

_log = logging.getLogger("sluicemq.client")


class SendBack:
    """The failures of one group. `times_max`: None leaves it to the broker."""

    def __init__(self, cluster: Cluster, group: str, times_max: int | None) -> None:
        self._cluster = cluster
        self._group = group
        self._times_max = times_max
        self._producer: Producer | None = None

    async def send_back(self, record: StoredMessage, level: int) -> None:
        """A copy comes again after `level`, or is a dead letter. Raises SluiceError."""
        queue = MessageQueue(record.topic, record.broker, record.queue_id)
        command = requests.send_back(
            self._group, record, first_topic(record), level, self._times_max
        )
        try:
            await self._cluster.route(queue.topic)
            address = self._cluster.master(queue)
            expect_success(await self._cluster.call(address, command), address)
        except SluiceError as error:
            _log.warning(
                "group %s: message %s cannot be sent back (%s); sending a copy to the retry topic",
                self._group, record.message_id, error.fact,
            )  # fmt: skip
            await self.send_copy(record, times_so_far(record), level)

    async def send_copy(self, record: StoredMessage, times: int, level: int) -> None:
        """The same without 36; `times` says how often it has come again. Raises SluiceError."""
        if self._producer is None:
            self._producer = Producer(self._cluster, group=INNER_GROUP)
        outgoing = retry_copy(record, self._group, times, level, self._times_max)
        await self._producer.send_copy(outgoing)
