"""How far a read of topics goes: the offsets of each queue, and how many messages that is.

A batch is pinned to one range before it begins. All its sinks then write the same messages, the
dry run's numbers are those of the run, and there is something to count progress against.
"""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from sluicemq.client.sync.admin import Admin
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.model.subscription import SQL92
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.cluster import (
    check_selector,
    ending_offsets,
    open_admin,
    queue_bounds,
    starting_offsets,
)
from sluicemq.spark.filter_findings import (
    MESSAGES_MAX,
    filter_findings,
    tried_at_brokers,
    tried_here,
)
from sluicemq.spark.filters import Pushed, subscription_of
from sluicemq.spark.offsets import Offsets, from_checkpoint, place, to_table
from sluicemq.spark.options import READ, STREAM, Options, parse_options
from sluicemq.spark.pipelines.pipeline import ROCKETMQ, Pipeline
from sluicemq.spark.store_options import DECLARED
from sluicemq.spark.store_plan import StorePlace, newest_properties, snapshot
from sluicemq.spark.topics import topics_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Reach:
    """Offsets start <= offset < end by queue; `selector`: what the broker filters by, in words."""

    topics: tuple[str, ...]
    start: Offsets
    end: Offsets
    selector: str | None

    @property
    def messages(self) -> int:
        return sum(max(0, self.end[queue] - first) for queue, first in self.start.items())

    def pinned(self) -> dict[str, str]:
        """Source options for exactly this range."""
        several = len(self.topics) > 1
        ends = {"startingOffsets": self.start, "endingOffsets": self.end}
        table = {
            name: orjson.dumps(to_table(offsets, several=several)).decode()
            for name, offsets in ends.items()
        }
        return table | ({"topics": ",".join(self.topics)} if several else {"topic": self.topics[0]})

    def rows(self) -> list[tuple[str, str, int, int]]:
        """Topic, queue, first offset and end of each queue."""
        return [(queue.topic, place(queue), self.start[queue], self.end[queue])
                for queue in sorted(self.start)]  # fmt: skip


def reach_of(pipeline: Pipeline, *, checkpoint: str | None = None) -> Reach | None:
    """What a run that begins now would read; None for sources that are no topics.

    A stream begins where its checkpoint ends. Raises the client's errors and ConfigurationError.
    """
    source = pipeline.source
    if source is None or source.kind != ROCKETMQ:
        return None
    options = parse_options(source.options, STREAM if pipeline.is_streaming else READ)
    with open_admin(options) as admin:
        topics = tuple(topics_of(options).found(admin))
        selector = _selector(admin, options, topics)
        bounds = queue_bounds(admin, topics)
        if not pipeline.is_streaming:
            start = starting_offsets(admin, options, bounds, "earliest")
            return Reach(topics, start, ending_offsets(admin, options, bounds), selector)
        end = {queue: highest for queue, (_, highest) in bounds.items()}
        known = None if checkpoint is None else committed_offsets(checkpoint)
        if known is None:
            return Reach(topics, starting_offsets(admin, options, bounds, "latest"), end, selector)
        start = {queue: known.get(queue, lowest) for queue, (lowest, _) in bounds.items()}
        return Reach(topics, start, end, selector)


def lost_by_filter(pipeline: Pipeline) -> list[str]:
    """What the source's `filter.sql` loses by mistake (`filter_findings`). Raises as `reach_of`,
    and StoreError."""
    source = pipeline.source
    sql = None if source is None else source.options.get("filter.sql")
    if source is None or sql is None:
        return []
    if source.kind == ROCKETMQ:
        options = parse_options(source.options, STREAM if pipeline.is_streaming else READ)
        with open_admin(options) as admin:
            topics = topics_of(options).found(admin)
            return filter_findings(sql, lambda text: tried_at_brokers(admin, topics, text))
    options = parse_options(source.options, READ, DECLARED)
    reader, seen = snapshot(StorePlace.of(options), options)
    try:
        newest = list(newest_properties(reader, seen.bounds, MESSAGES_MAX))
    finally:
        reader.close()
    return filter_findings(sql, lambda text: tried_here(newest, text))


def pinned_options(reach: Reach, options: "dict[str, str]") -> dict[str, str]:
    """The source's options with the range in place of what named it."""
    gone = ("topic", "topics", "topicsPattern", "startingOffsets", "endingOffsets",
            "startingTimestamp", "endingTimestamp")  # fmt: skip
    return {name: text for name, text in options.items() if name not in gone} | reach.pinned()


def _selector(admin: Admin, options: Options, topics: "Sequence[str]") -> str | None:
    """The broker's filter in words; asks every broker whether it evaluates it."""
    found = subscription_of(
        topics_of(options).label, options["filter.tags"], options["filter.sql"], Pushed()
    )
    if found is None:
        return "nothing matches"
    subscription, _ = found
    if subscription.kind == SQL92:
        group = options["group"] or "sluice-pipeline"
        check_selector(admin, topics, group, subscription.expression)
        return f"SQL92 {subscription.expression}"
    return None if subscription.expression == "*" else f"tags {subscription.expression}"


def committed_offsets(checkpoint: str) -> dict[MessageQueue, int] | None:
    """Where a query with this checkpoint directory goes on; None when it would begin anew, or the
    directory is none of this machine."""
    directory = checkpoint.removeprefix("file://")
    done = [name for name in SYSTEM_FILES.names(f"{directory}/commits") if name.isdigit()]
    if not done:
        return None
    text = read_text(SYSTEM_FILES, f"{directory}/offsets/{max(done, key=int)}")
    if text is None:
        return None
    found: Any = json.loads(text.splitlines()[2])
    return from_checkpoint(found, None) if isinstance(found, dict) and "queues" in found else None
