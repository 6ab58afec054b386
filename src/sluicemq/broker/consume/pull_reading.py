"""One pull under way, and the reasons that end it early."""

from collections.abc import Mapping
from typing import Final

from sluicemq.broker.consume.delivered import Delivered
from sluicemq.broker.groups import Groups
from sluicemq.broker.topics import Topic
from sluicemq.config import BrokerConfig
from sluicemq.model.subscription import MessageFilter
from sluicemq.model.topic import PERM_READ, GroupConfig
from sluicemq.net.peer import Peer
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.headers import PullMessageRequest

FAQ: Final = "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."


class RefusalError(Exception):
    """A pull that is answered with an error code."""

    def __init__(self, code: int, remark: str, forbidden_kind: int | None = None) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark
        self.forbidden_kind = forbidden_kind


class Reading:
    """One pull under way: what is asked, and what the checks made of it. A parked pull looks again
    with it."""

    __slots__ = (
        "bytes_max", "consumed", "count_max", "delivered", "fields", "filter", "flags", "group",
        "lane", "offset", "peer", "queue_id", "sys_flag", "topic",
    )  # fmt: skip

    filter: MessageFilter | None
    flags: tuple[int, int]
    bytes_max: int | None
    delivered: Delivered
    consumed: int | None
    lane: str
    """Of a pull in a lane: its subscription."""

    def __init__(self, fields: Mapping[str, str] | None, peer: Peer) -> None:
        """HOT: straight from the fields. Raises HeaderError for a missing or bad one."""
        try:
            self.group = fields["consumerGroup"]  # type: ignore[index]
            self.topic = fields["topic"]  # type: ignore[index]
            self.queue_id = int(fields["queueId"])  # type: ignore[index]
            self.offset = int(fields["queueOffset"])  # type: ignore[index]
            self.count_max = int(fields["maxMsgNums"])  # type: ignore[index]
            self.sys_flag = int(fields["sysFlag"])  # type: ignore[index]
        except (KeyError, TypeError, ValueError):
            decode_header(PullMessageRequest, fields)  # says which field it is
            raise
        self.fields: Mapping[str, str] = fields  # type: ignore[assignment]
        self.consumed = None
        self.lane = ""
        self.peer = peer

    def number(self, name: str) -> int:
        """A field that only some pulls need. Raises HeaderError."""
        try:
            return int(self.fields[name])
        except (KeyError, ValueError):
            decode_header(PullMessageRequest, self.fields)
            raise


def refuse(
    reading: Reading,
    config: BrokerConfig,
    groups: Groups,
    group: GroupConfig | None,
    topic: Topic | None,
) -> None:
    """Raises RefusalError for the first thing in the way; none may be."""
    name = reading.group
    if not config.broker_permission & PERM_READ:
        raise RefusalError(
            ResponseCode.NO_PERMISSION,
            f"the broker[{config.broker_name}] pulling message is forbidden",
            1,
        )
    if group is None:
        raise RefusalError(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group [{name}] does not exist, {FAQ}",
        )
    if not group.consume_enable:
        raise RefusalError(
            ResponseCode.NO_PERMISSION, f"subscription group no permission, {name}", 2
        )
    if topic is None:
        raise RefusalError(
            ResponseCode.TOPIC_NOT_EXIST,
            f"topic[{reading.topic}] not exist, apply first please! \n{FAQ}",
        )
    if not topic.is_readable:
        raise RefusalError(
            ResponseCode.NO_PERMISSION,
            f"the topic[{reading.topic}] pulling message is forbidden",
            3,
        )
    if not groups.may_read(name, reading.topic):
        raise RefusalError(
            ResponseCode.NO_PERMISSION,
            f"the consumer group[{name}] is forbidden for topic[{reading.topic}]",
            5,
        )
    if not 0 <= reading.queue_id < topic.config.read_queues:
        raise RefusalError(
            ResponseCode.INVALID_PARAMETER,
            f"queueId[{reading.queue_id}] is illegal, topic:[{reading.topic}] "
            f"topicConfig.readQueueNums:[{topic.config.read_queues}] "
            f"consumer:[/{reading.peer.remote}]",
        )
