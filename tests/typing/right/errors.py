"""Errors and results, by their types."""

from collections.abc import Mapping

import sluicemq
from sluicemq import (
    ClientError,
    ConfigurationError,
    FilterSyntaxError,
    Message,
    MessageFilter,
    RequestError,
    SendResult,
    SendStatus,
    SluiceError,
    StoredMessage,
    TopicConfig,
)


def fix_of(error: SluiceError) -> str:
    if isinstance(error, RequestError):
        return f"{error.code}: {error.remark}"
    if isinstance(error, FilterSyntaxError):
        return f"at {error.position}"
    return error.fix if isinstance(error, ClientError | ConfigurationError) else error.fact


def shown(result: SendResult) -> str:
    match result.status:
        case SendStatus.OK:
            return "stored"
        case SendStatus.FLUSH_DISK_TIMEOUT | SendStatus.FLUSH_SLAVE_TIMEOUT:
            return "stored, not yet everywhere"
        case SendStatus.SLAVE_NOT_AVAILABLE:
            return "stored on one broker"


def copy(record: StoredMessage, topic: TopicConfig) -> Message:
    return Message(topic.name, record.body, record.tag, record.keys, delay_ms=5000)


class OnlyPaid:
    """A filter of one's own for a broker."""

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def by_consume_queue(self, tag_code: int) -> bool:
        return True

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        return properties.get("paid") == "yes"


paid: MessageFilter = OnlyPaid()
version: str = sluicemq.__version__
