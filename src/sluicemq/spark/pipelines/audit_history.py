"""What a topic's recent messages say of the filters on them, counted by Spark.

Every expression that anybody subscribes a topic with is a bit of a number that each message gets:
which of them take it. Messages are counted by tag and that number (and by which expressions failed
on them), so the driver gets one row for each combination that occurs, whatever the topic holds. All
else follows from those rows: tags that nobody takes, what a group of unequal members loses, tags
that share a hash.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter.parser import compile_sql92
from sluicemq.filter.subscriptions import is_tag_kind
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import Subscription

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

EXPRESSIONS_MAX: Final = 60
"""Bits of a bigint; a topic with more expressions is judged by the first ones, and that is said."""
COMBINATIONS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class Seen:
    """Messages with one tag (None: without) that the same expressions take, and fail on."""

    tag: str | None
    taken_by: int
    failed_by: int
    count: int


@dataclass(frozen=True, slots=True)
class History:
    """A topic's recent messages. `expressions` in the order of their bits; `is_whole`: all
    combinations of tag and expressions came; without, the rarest are left out."""

    topic: str
    expressions: tuple[Subscription, ...] = ()
    seen: tuple[Seen, ...] = ()
    is_whole: bool = True

    @property
    def messages(self) -> int:
        return sum(one.count for one in self.seen)

    def bit(self, said: Subscription) -> int:
        """The number with the bit of an expression, 0 when it has none."""
        for index, one in enumerate(self.expressions):
            if (one.kind, one.expression) == (said.kind, said.expression):
                return 1 << index
        return 0


def history(
    spark: "SparkSession",
    connection: Mapping[str, str],
    topic: str,
    expressions: Sequence[Subscription],
    begin_ms: int | None,
) -> History:
    """Reads the topic from `begin_ms` on: tags alone, unless an expression needs properties."""
    chosen = tuple(expressions[:EXPRESSIONS_MAX])
    names = sorted({name for one in chosen for name in _properties(one)} - {"TAGS"})
    columns = ",".join(["tags", *(["properties", "keys"] if names else [])])
    options = {"topic": topic, "columns": columns} | dict(connection)
    options |= {"startingTimestamp": str(begin_ms)} if begin_ms is not None else {}
    messages = spark.read.format("rocketmq").options(**options).load()
    rows = _counted(messages, chosen, columns).limit(COMBINATIONS_MAX + 1).collect()
    seen = tuple(Seen(*row) for row in rows[:COMBINATIONS_MAX])
    return History(topic, chosen, seen, len(rows) <= COMBINATIONS_MAX)


def _properties(said: Subscription) -> frozenset[str]:
    if is_tag_kind(said.kind):
        return frozenset()
    try:
        return compile_sql92(said.expression).property_names
    except FilterSyntaxError:
        return frozenset()


def _counted(
    messages: "DataFrame", expressions: Sequence[Subscription], columns: str
) -> "DataFrame":
    from pyspark.sql import functions  # noqa: PLC0415 - not for a list of pipelines

    none = functions.lit(0).cast("bigint")
    taken = failed = none
    for index, said in enumerate(expressions):
        bit = functions.lit(1 << index).cast("bigint")
        match, error = _verdict(said, columns)
        taken = taken + functions.when(match, bit).otherwise(none)
        if error is not None:
            failed = failed + functions.when(error, bit).otherwise(none)
    rows = messages.select("tags", taken.alias("taken_by"), failed.alias("failed_by"))
    found = rows.groupBy("tags", "taken_by", "failed_by").count()
    return found.orderBy(functions.desc("count"), "tags", "taken_by")


def _verdict(said: Subscription, columns: str) -> "tuple[Column, Column | None]":
    """Whether a message is taken, and whether the expression fails on it."""
    from pyspark.sql import functions  # noqa: PLC0415

    from sluicemq.spark.selectors import compiled  # noqa: PLC0415 - pyspark

    if is_tag_kind(said.kind):
        if said.is_everything:
            return functions.lit(True), None
        match = functions.col("tags").isin(sorted(said.tags)) if said.tags else functions.lit(False)
        return functions.coalesce(match, functions.lit(False)), None
    try:
        found = compiled(compile_sql92(said.expression), columns=columns)
    except FilterSyntaxError:
        return functions.lit(False), None
    return found.match, found.verdict == "ERROR"


# ---------------------------------------------------------------------------------- findings


@dataclass(frozen=True, slots=True)
class UnwantedTag:
    """A tag that no known subscription takes, with its messages."""

    topic: str
    tag: str | None
    messages: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What a group of unequal members misses on a RocketMQ broker, which keeps one subscription of
    it. `wanted`: messages that one of them wants; `certain`: those delivered whichever wins and
    whoever reads the queue; `lost_min`, `lost_max`: of the wanted, by which subscription wins, with
    queues shared evenly."""

    group: str
    topic: str
    members: Mapping[str, str] = field(default_factory=dict)
    messages: int = 0
    wanted: int = 0
    certain: int = 0
    lost_min: int = 0
    lost_max: int = 0


@dataclass(frozen=True, slots=True)
class Collision:
    """Tags of a topic that a broker cannot tell apart: their `String.hashCode` is the same."""

    topic: str
    code: int
    tags: tuple[str, ...]
    messages: int


@dataclass(frozen=True, slots=True)
class Failing:
    """An expression that cannot be evaluated on messages: no match, whatever they hold."""

    topic: str
    expression: str
    messages: int
    of: int


def unwanted_tags(found: History) -> list[UnwantedTag]:
    """Tags none of whose messages anybody takes, the most frequent first."""
    messages: dict[str | None, int] = defaultdict(int)
    taken: set[str | None] = set()
    for one in found.seen:
        messages[one.tag] += one.count
        if one.taken_by:
            taken.add(one.tag)
    unwanted = [
        UnwantedTag(found.topic, tag, count) for tag, count in messages.items() if tag not in taken
    ]
    return sorted(unwanted, key=lambda one: (-one.messages, one.tag or ""))


def loss(found: History, group: str, said: Mapping[str, Subscription | None]) -> Loss | None:
    """Of a group whose members say different things of the topic; None when they agree."""
    texts = {
        client_id: "nothing" if one is None else one.expression for client_id, one in said.items()
    }
    if len({(one and (one.kind, one.expression)) for one in said.values()}) < 2:
        return None
    readers = list(said.values())
    expressions = [one for one in readers if one is not None]
    bits = [found.bit(one) for one in expressions]
    wanted = sum(one.count for one in found.seen if any(one.taken_by & bit for bit in bits))
    certain = sum(
        one.count for one in found.seen
        if len(expressions) == len(readers) and all(one.taken_by & bit for bit in bits)
    )  # fmt: skip
    kept = [_delivered(found, winner, readers) for winner in expressions]
    return Loss(
        group, found.topic, texts, found.messages, wanted, certain,
        round(wanted - max(kept)), round(wanted - min(kept)),
    )  # fmt: skip


def _delivered(
    found: History, winner: Subscription, readers: Sequence[Subscription | None]
) -> float:
    """Messages that reach a handler when the broker has the winner's subscription. A member that
    subscribes by tags looks at the tag again; one that does not subscribe the topic reads no queue
    of it, and its queues are given to it all the same."""
    total = 0.0
    for one in found.seen:
        if not one.taken_by & found.bit(winner):
            continue
        getting = sum(
            1 for said in readers
            if said is not None and (not is_tag_kind(said.kind) or one.taken_by & found.bit(said))
        )  # fmt: skip
        total += one.count * getting / len(readers)
    return total


def collisions(found: History) -> list[Collision]:
    """Among tags that messages have and tags that are subscribed to."""
    counts: dict[str, int] = defaultdict(int)
    for one in found.seen:
        counts[one.tag or ""] += one.count
    for said in found.expressions:
        for tag in said.tags:
            counts[tag] += 0
    by_code: dict[int, list[str]] = defaultdict(list)
    for tag in sorted(counts):
        by_code[tag_code(tag)].append(tag)
    return [
        Collision(found.topic, code, tuple(tags), sum(counts[tag] for tag in tags))
        for code, tags in sorted(by_code.items())
        if len(tags) > 1
    ]


def failing(found: History) -> list[Failing]:
    """Expressions that failed on messages, with how many of all."""
    result = []
    for index, said in enumerate(found.expressions):
        count = sum(one.count for one in found.seen if one.failed_by >> index & 1)
        if count:
            result.append(Failing(found.topic, said.expression, count, found.messages))
    return result


def as_record(value: Any) -> dict[str, Any]:
    """A finding as JSON takes it."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
