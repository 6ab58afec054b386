"""One pull under way, and the reasons that end it early."""

from collections.abc import Mapping

from sluicemq.broker.delivered import Delivered
from sluicemq.model.subscription import MessageFilter
from sluicemq.net.server import Peer
from sluicemq.protocol.headers import PullMessageRequest, decode_header


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
