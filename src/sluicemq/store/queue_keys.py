"""Which topics and queue ids can be directories of a store."""

from sluicemq.errors import MessageIllegalError
from sluicemq.model.topic import RETRY_PREFIX, RETRY_TOPIC_LENGTH_MAX, TOPIC_LENGTH_MAX


def is_possible(key: tuple[str, int]) -> bool:
    """Whether there can be a directory for such a queue: what a record says may be damaged."""
    topic, queue_id = key
    is_name = topic not in ("", ".", "..") and "/" not in topic and "\0" not in topic
    return is_name and queue_id >= 0


def check_topic(topic: str, *, long_topics: bool = True) -> None:
    """Raises MessageIllegalError when the topic cannot be stored (spec/store.md §2.1)."""
    is_retry = long_topics and topic.startswith(RETRY_PREFIX)
    limit = RETRY_TOPIC_LENGTH_MAX if is_retry else TOPIC_LENGTH_MAX
    size = len(topic.encode())
    if not 0 < size <= limit:
        raise MessageIllegalError(
            f"The topic has {size} bytes, the limit is {limit}.", cure="Use a shorter name."
        )
    if "/" in topic or "\0" in topic or topic in (".", ".."):
        raise MessageIllegalError(
            f"The topic {topic!r} cannot name a directory.",
            cure="Use letters, digits, and the characters _ - | %.",
        )


def check_queue(key: tuple[str, int], *, long_topics: bool = True) -> None:
    """Raises MessageIllegalError when nothing can be stored in such a queue."""
    check_topic(key[0], long_topics=long_topics)
    if key[1] < 0:
        raise MessageIllegalError(
            f"The queue id {key[1]} is negative.", cure="Queue ids begin at 0."
        )
