"""The format of a stream's checkpoints, and of tables with a value for each queue.

Spark stores checkpoints as JSON (version 1):

    {"version": 1, "topic": "flights", "filter": "TAG UA||AA", "queues": {"broker-a": {"0": 120}}}

`queues` has the offset of the next message to read for each queue. `topic` is there so that a
checkpoint of another topic is refused, and `filter` so that a change is noticed. A stream of
several topics writes version 2: `queues` by topic first, and `topic` is the list or the pattern.

    {…, "initial": true}              the start of a new stream, not read from a checkpoint
    {…, "from": {"broker-a": {…}}}    where the micro-batch began that ends here
    {…, "seen": {"broker-a": {"0": [119, 1795363635210]}}}    anchors, see `identity.TopicIdentity`

`from` contains the queues that the checkpoint before does not contain: those of a new stream, and
new queues. Spark does not store where a stream started. After a crash in the first micro-batch it
would ask again, and `latest` would mean another offset by then. `from` also contains the queues of
a topic that was deleted and created again. Checkpoints of older versions have no `seen`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sluicemq.client.core.identity import Anchor
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MessageQueue

CHECKPOINT_VERSION: Final = 1
CHECKPOINT_VERSION_TOPICS: Final = 2

Offsets = dict[MessageQueue, int]
Anchors = dict[MessageQueue, Anchor]


def make_checkpoint(
    label: str,
    expression: str,
    offsets: Mapping[MessageQueue, int],
    *,
    has_several_topics: bool = False,
    anchors: Anchors | None = None,
) -> dict[str, Any]:
    """Return a checkpoint of a stream, a JSON object.

    `label` is a text that names the topics. `expression` is the filter with its kind, such as `TAG
    UA||AA`. `offsets` has the next offset of each queue. With `has_several_topics`, the offsets are
    ordered by topic first. `anchors` are messages by which the queues are recognised later; without
    them, the part `seen` is left out.
    """
    checkpoint = {
        "version": CHECKPOINT_VERSION_TOPICS if has_several_topics else CHECKPOINT_VERSION,
        "topic": label,
        "filter": expression,
        "queues": offsets_to_table(offsets, by_topic=has_several_topics),
    }
    if anchors:
        positions = {queue: [anchor.offset, anchor.stored_ms] for queue, anchor in anchors.items()}
        checkpoint["seen"] = offsets_to_table(positions, by_topic=has_several_topics)
    return checkpoint


def offsets_to_table(offsets: Mapping[MessageQueue, Any], *, by_topic: bool) -> dict[str, Any]:
    """Return values of queues as the JSON object {"broker": {"queue id": value}}.

    With `by_topic`, the object has one more level: {"topic": {"broker": …}}. Without it, all queues
    must have the same topic.
    """
    topics: dict[str, dict[str, dict[str, Any]]] = {}
    for queue, offset in sorted(offsets.items()):
        brokers = topics.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker, {})[str(queue.queue_id)] = offset
    return topics if by_topic else next(iter(topics.values()), {})


def iterate_table(table: Mapping[str, Any]) -> Iterator[tuple[MessageQueue, Any]]:
    """Yield (queue, value) for each queue in {"topic": {"broker": {"queue id": value}}}."""
    for topic, brokers in table.items():
        for broker, queues in brokers.items():
            for queue_id, queue_value in queues.items():
                yield MessageQueue(topic, broker, int(queue_id)), queue_value


def parse_checkpoint(
    checkpoint: Mapping[str, Any], topic: str | None, section: str = "queues"
) -> Offsets:
    """Return the offsets in one section of a checkpoint, "queues" or "from".

    `topic` is the only topic of the stream. It is None for several topics, and then the caller
    checks the topics of the result. Raises ConfigurationError for a checkpoint of another topic,
    and for JSON that is not a checkpoint of this source.
    """
    version = checkpoint.get("version")
    is_known_version = version in (CHECKPOINT_VERSION, CHECKPOINT_VERSION_TOPICS)
    if not is_known_version or not isinstance(checkpoint.get("queues"), dict):
        raise ConfigurationError(
            f"the checkpoint contains an offset of version {version!r}, not {CHECKPOINT_VERSION}.",
            fix="Use another checkpointLocation; this one was written by another source or by a"
            " newer SluiceMQ.",
        )
    if topic is not None and (version != CHECKPOINT_VERSION or checkpoint.get("topic") != topic):
        raise wrong_topic_error(str(checkpoint.get("topic")), topic)
    return {queue: int(offset) for queue, offset in _iterate_section(checkpoint, section)}


def parse_anchors(checkpoint: Mapping[str, Any]) -> Anchors:
    """Return the anchors in a checkpoint: the messages by which the queues are recognised.

    A checkpoint of an older version has none.
    """
    return {
        queue: Anchor(offset, time_ms)
        for queue, (offset, time_ms) in _iterate_section(checkpoint, "seen")
    }


def _iterate_section(
    checkpoint: Mapping[str, Any], section: str
) -> Iterator[tuple[MessageQueue, Any]]:
    """Yield (queue, value) for one section of a checkpoint; nothing if it is missing."""
    table = checkpoint.get(section, {})
    if checkpoint.get("version") == CHECKPOINT_VERSION:  # of a single topic
        table = {str(checkpoint.get("topic")): table}
    return iterate_table(table)


def wrong_topic_error(topic: str, label: str) -> ConfigurationError:
    """Return the error for a checkpoint of `topic`, which the stream for `label` does not read."""
    return ConfigurationError(
        f"the checkpoint is of the topic {topic!r}, but the stream reads {label!r}.",
        fix="Use another checkpointLocation for another topic.",
    )
