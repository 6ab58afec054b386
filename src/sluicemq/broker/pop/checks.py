"""The checks of requests that pop: whether the broker, topic, queue and group allow it."""

from typing import Final

from sluicemq.broker.context import BrokerComponent
from sluicemq.broker.topics import FAQ, make_no_queue_error, make_no_topic_error
from sluicemq.errors import RequestError
from sluicemq.model.topic import PERM_READ
from sluicemq.net.dispatch import Peer
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.popping import PollingInfoRequest, PopMessageRequest

COUNT_MAX: Final = 32
"""The most messages that a pop may ask for."""
LATENESS_MAX_MS: Final = 500
"""A pop that is received this long after the end of its waiting time is refused."""


class PopChecks(BrokerComponent):
    """Decides whether a request of `pop.py` can be processed."""

    def check_pop(self, header: PopMessageRequest, peer: Peer, late_ms: int) -> None:
        """Raise RequestError if the pop cannot be processed.

        `late_ms` is the time in ms since the end of the pop's waiting time; it is negative before
        that. A pop is refused if it is too late, if it asks for more than COUNT_MAX messages, if
        the broker or the topic may not be read, or if timed messages are disabled. Called for each
        pop: keep it cheap.
        """
        if late_ms > LATENESS_MAX_MS:
            remark = f"the broker[{self._address}] pop message is timeout too much"
            raise RequestError(ResponseCode.POLLING_TIMEOUT, remark)
        self._check_broker_readable("pop")
        if header.count_max > COUNT_MAX:
            remark = f"the broker[{self._address}] pop message's num is greater than {COUNT_MAX}"
            raise RequestError(ResponseCode.INVALID_PARAMETER, remark)
        if not self.settings.store.timer_enable:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"the broker[{self._address}] pop message is forbidden because timerWheelEnable "
                "is false",
            )
        self.check_target(header, peer)

    @property
    def _address(self) -> str:
        """The address of this broker in errors."""
        return self.settings.broker.broker_ip1 or self.settings.host.address

    def _check_broker_readable(self, verb: str) -> None:
        """Raise RequestError (NO_PERMISSION) if the broker delivers no messages."""
        if not self.settings.broker.broker_permission & PERM_READ:
            remark = f"the broker[{self._address}] {verb} message is forbidden"
            raise RequestError(ResponseCode.NO_PERMISSION, remark)

    def check_target(self, header: PollingInfoRequest, peer: Peer) -> None:
        """Raise RequestError if the group may not read the topic or queue of `header`.

        A missing group is created if that is allowed. `peer` is the connection of the consumer, for
        the text of an error. Called for each pop: keep it cheap.
        """
        self._check_broker_readable("peeking")
        topic = self.topics.get(header.topic)
        if topic is None:
            raise make_no_topic_error(header.topic)
        if not topic.is_readable:
            remark = f"the topic[{header.topic}] peeking message is forbidden"
            raise RequestError(ResponseCode.NO_PERMISSION, remark)
        if header.queue_id >= topic.config.read_queues:
            code = ResponseCode.INVALID_PARAMETER
            raise make_no_queue_error(topic, header.queue_id, peer.remote, code)
        group = self.groups.table.get(header.group) or self.groups.get_or_create(header.group)
        if group is None:
            remark = f"subscription group [{header.group}] does not exist, \n{FAQ}"
            raise RequestError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if not group.consume_enable:
            remark = f"subscription group no permission, {header.group}"
            raise RequestError(ResponseCode.NO_PERMISSION, remark)
