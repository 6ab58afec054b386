"""What handlers ask of the guard: those that learn on their way which topic a request is about.

A request names a place in the log (33, 36, 37), and only the message there says whose it is. The
topics in which messages wait (delayed, timed, in a transaction) hold those of all topics: there the
topic that a message is bound for counts too.
"""

from sluicemq.acl.guard import Guard, refusal
from sluicemq.acl.rules import Permission
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.model.message import REAL_TOPIC
from sluicemq.record import codec as text
from sluicemq.record.codec import parse_head
from sluicemq.wire.codes import ResponseCode

SUB, PUB = Permission.SUB, Permission.PUB


class Access:
    """Without a guard everything is allowed."""

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard

    @property
    def is_open(self) -> bool:
        """Whether whoever asks now may do everything."""
        return self.guard is None or self.guard.account is None

    def require(self, topic: str, need: Permission) -> None:
        """Raises RequestError as a refusal at the door would be answered."""
        if self.guard is None:
            return
        verdict = self.guard.may(topic, need)
        if not verdict.is_allowed:
            raise RequestError(ResponseCode.SYSTEM_ERROR, refusal(verdict))

    def require_record(self, data: bytes, need: Permission) -> None:
        """For the message in a stored record: its topic, and the one that it is bound for."""
        if self.is_open:
            return
        try:
            head = parse_head(data)
        except ProtocolError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        self.require(bytes(data[head.topic]).decode("utf-8", "replace"), need)
        bound_for = text.value_of(bytes(data[head.properties]), REAL_TOPIC.encode())
        if bound_for:
            self.require(bound_for.decode("utf-8", "replace"), need)
