"""Headers of our own request that commits an epoch of an exactly-once sink (docs/design/0007).

Only SluiceMQ brokers know it; docs/requests.md describes the body.
"""

from sluicemq.wire.declare import header, int32, int64, text


@header
class CommitEpochRequest:
    """900201. `step` is `prepare` (check what is staged and make it safe) or `commit`; `topics`
    are those that the staged messages go to, separated by commas: access rules look at them."""

    query: str = text("query")
    epoch: int = int64("epoch")
    step: str = text("step")
    topics: str = text("topics", default="")


@header
class CommitEpochResponse:
    """Answer to 900201. `state` is one of checking, checked, publishing, published; the counts are
    of this broker's messages of the epoch. The body holds what was decided once that is safe."""

    state: str = text("state")
    broker: str = text("brokerName")
    messages: int = int64("messages", default=0)
    published: int = int64("published", default=0)
    staging_topic: str = text("stagingTopic")
    staging_queues: int = int32("stagingQueues")
