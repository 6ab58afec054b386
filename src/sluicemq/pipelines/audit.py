"""The ready pipeline `audit`: what is wrong, or about to be, with subscriptions, tags and lag.

    groups, members, brokers --requests--> who wants what, lag
    topics' recent messages  --Spark-----> what that means

Findings: groups whose members subscribe differently, with what they would lose on a RocketMQ
broker; lag by group and topic, exact behind filters where the broker counts; tags that nobody
takes; tags that share a hash; expressions that fail on messages. Only RocketMQ's own requests (203,
307) are needed; what a Java broker cannot say (how much of a lag matches; what a group that is away
wants) is reported as not known, never guessed. A SluiceMQ broker remembers SQL92 expressions of a
group that is away for a day (900131).

Every expression that anybody subscribes a topic with is a bit of a number that each message gets:
which of them take it. Spark counts messages by tag and that number (and by which expressions failed
on them), so the driver gets one row for each combination that occurs, whatever the topic holds. All
else follows from those rows.

    found = audit(spark, {"nameServers": "127.0.0.1:9876"})
    found.figures, found.unwanted_tags
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sluicemq.client.admin.groups import QueueLag
from sluicemq.client.admin.subscriptions import GroupSubscriptions
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import (
    FilterSyntaxError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.files import SYSTEM_FILES, replace_text
from sluicemq.filter.subscriptions import compile_sql92, is_tag_kind
from sluicemq.model.ids import tag_code
from sluicemq.model.subscription import Subscription
from sluicemq.model.system_names import is_group_topic, is_system_group
from sluicemq.pipelines.ready import (
    DURATION,
    FLAG,
    INTEGER,
    LIST,
    TEXT,
    Field,
    Ready,
    Report,
    Task,
    load_messages,
    table_lines,
)
from sluicemq.spark.options import parse_options
from sluicemq.spark.sources.offsets import open_admin

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

EXPRESSIONS_MAX: Final = 60
"""Bits of a bigint; a topic with more expressions is judged by the first ones, and that is said."""
COMBINATIONS_MAX: Final = 20_000


# ---- who subscribes to what


def known_groups(admin: Admin) -> list[str]:
    """Every consumer group that any master knows, without the system's."""
    return sorted(name for name in admin.groups() if not is_system_group(name))


def subscriptions_of(admin: Admin, groups: Iterable[str]) -> list[GroupSubscriptions]:
    """Asks brokers and members. A member that does not answer is not known, never an error."""
    masters = admin.masters()
    return [admin.subscriptions(group, brokers=masters) for group in groups]


# ---- a topic's recent messages


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
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - not for a list of pipelines

    chosen = tuple(expressions[:EXPRESSIONS_MAX])
    names: set[str] = set()
    for said in chosen:
        with contextlib.suppress(FilterSyntaxError):
            if not is_tag_kind(said.kind):
                names |= compile_sql92(said.expression).property_names
    columns = "tags,properties,keys" if names - {"TAGS"} else "tags"
    options = {"startingTimestamp": str(begin_ms)} if begin_ms is not None else {}
    messages = load_messages(spark, connection, topic=topic, columns=columns, **options)
    none = F.lit(0).cast("bigint")
    taken = failed = none
    for index, said in enumerate(chosen):
        bit = F.lit(1 << index).cast("bigint")
        match, error = _verdict(said, columns)
        taken = taken + F.when(match, bit).otherwise(none)
        if error is not None:
            failed = failed + F.when(error, bit).otherwise(none)
    found = messages.select("tags", taken.alias("taken_by"), failed.alias("failed_by"))
    found = found.groupBy("tags", "taken_by", "failed_by").count()
    ordered = found.orderBy(F.desc("count"), "tags", "taken_by")
    rows = ordered.limit(COMBINATIONS_MAX + 1).collect()
    seen = tuple(Seen(*row) for row in rows[:COMBINATIONS_MAX])
    return History(topic, chosen, seen, len(rows) <= COMBINATIONS_MAX)


def _verdict(said: Subscription, columns: str) -> "tuple[Column, Column | None]":
    """Whether a message is taken, and whether the expression fails on it."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    from sluicemq.spark.selectors import compiled  # noqa: PLC0415 - pyspark

    if is_tag_kind(said.kind):
        if said.is_everything:
            return F.lit(True), None
        match = F.col("tags").isin(sorted(said.tags)) if said.tags else F.lit(False)
        return F.coalesce(match, F.lit(False)), None
    try:
        found = compiled(compile_sql92(said.expression), columns=columns)
    except FilterSyntaxError:
        return F.lit(False), None
    return found.match, found.verdict == "ERROR"


# ---- findings


@dataclass(frozen=True, slots=True)
class GroupLag:
    """A group behind on a topic: messages that are there and not committed, how many of them its
    filter lets through (None: not known), how many are deleted next."""

    group: str
    topic: str
    lag: int
    matching: int | None
    at_risk: int
    is_online: bool


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
    members: Mapping[str, str]
    messages: int
    wanted: int
    certain: int
    lost_min: int
    lost_max: int


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
    for one in found.seen:
        messages[one.tag] += one.count
    taken = {one.tag for one in found.seen if one.taken_by}
    unwanted = [
        UnwantedTag(found.topic, tag, count) for tag, count in messages.items() if tag not in taken
    ]
    return sorted(unwanted, key=lambda one: (-one.messages, one.tag or ""))


def loss(found: History, group: str, said: Mapping[str, Subscription | None]) -> Loss | None:
    """Of a group whose members say different things of the topic; None when they agree."""
    if len({(one and (one.kind, one.expression)) for one in said.values()}) < 2:
        return None
    texts = {
        client_id: "nothing" if one is None else one.expression for client_id, one in said.items()
    }
    readers = list(said.values())
    expressions = [one for one in readers if one is not None]
    bits = [found.bit(one) for one in expressions]
    wanted = sum(one.count for one in found.seen if any(one.taken_by & bit for bit in bits))
    certain = sum(
        one.count for one in found.seen
        if len(expressions) == len(readers) and all(one.taken_by & bit for bit in bits)
    )  # fmt: skip
    delivered = []
    for winner in bits:
        # Messages that reach a handler when the broker has the winner's subscription. A member that
        # subscribes by tags looks at the tag again; one that does not subscribe the topic reads no
        # queue of it, and its queues are given to it all the same.
        total = 0.0
        for one in found.seen:
            if one.taken_by & winner:
                getting = sum(
                    1 for reader in expressions
                    if not is_tag_kind(reader.kind) or one.taken_by & found.bit(reader)
                )  # fmt: skip
                total += one.count * getting / len(readers)
        delivered.append(total)
    return Loss(
        group, found.topic, texts, found.messages, wanted, certain,
        round(wanted - max(delivered)), round(wanted - min(delivered)),
    )  # fmt: skip


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
    counts = [
        (said.expression, sum(one.count for one in found.seen if one.failed_by >> index & 1))
        for index, said in enumerate(found.expressions)
    ]
    return [Failing(found.topic, text, count, found.messages) for text, count in counts if count]


# ---- the audit


@dataclass(slots=True)
class Audit:
    """All findings. `not_known`: what could not be learned, a sentence each."""

    groups: int = 0
    topics: int = 0
    messages: int = 0
    unequal: list[Loss] = field(default_factory=list)
    lag: list[GroupLag] = field(default_factory=list)
    unwanted_tags: list[UnwantedTag] = field(default_factory=list)
    collisions: list[Collision] = field(default_factory=list)
    failing: list[Failing] = field(default_factory=list)
    not_known: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, int | float]:
        """Numbers for scripts; `findings` is 0 when nothing is wrong (lag alone is no fault)."""
        parts: tuple[Sequence[Any], ...] = (
            self.unequal, self.unwanted_tags, self.collisions, self.failing,
        )  # fmt: skip
        return {
            "findings": sum(len(part) for part in parts),
            "groups": self.groups, "topics": self.topics, "messages": self.messages,
            "unequal_groups": len(self.unequal),
            "lag": sum(one.lag for one in self.lag),
            "unwanted_tags": len(self.unwanted_tags),
            "unwanted_messages": sum(one.messages for one in self.unwanted_tags),
            "collisions": len(self.collisions),
            "failing_filters": len(self.failing),
            "not_known": len(self.not_known),
        }  # fmt: skip

    def judge(
        self,
        seen: History,
        known: Sequence[GroupSubscriptions],
        readers: Sequence[GroupSubscriptions],
        expressions: int,
    ) -> None:
        """Adds what is found in a topic's messages; `expressions`: how many there are of it."""
        topic = seen.topic
        if expressions > EXPRESSIONS_MAX:
            self.not_known.append(
                f"{topic} is subscribed with {expressions} expressions, of which the first "
                f"{EXPRESSIONS_MAX} are looked at."
            )
        self.messages += seen.messages
        if not seen.is_whole:
            self.not_known.append(f"{topic} has too many tags: the rarest are left out.")
        losses = [
            loss(seen, one.group, one.by_member(topic)) for one in known if topic in one.topics
        ]
        self.unequal += [one for one in losses if one is not None]
        self.collisions += collisions(seen)
        self.failing += failing(seen)
        unwanted = unwanted_tags(seen)
        silent = [one.group for one in readers if not one.all_of(topic)]
        if unwanted and silent:
            self.not_known.append(
                f"whether {', '.join(silent)} take tags of {topic} that nobody else takes: away, "
                "and no broker remembers what they subscribed."
            )
        self.unwanted_tags += unwanted

    def add_unknown(self, known: Iterable[GroupSubscriptions]) -> None:
        """Adds what nobody tells of groups and their lag."""
        for one in known:
            mute = sorted(client_id for client_id, said in one.members.items() if said is None)
            if mute:
                self.not_known.append(
                    f"what {', '.join(mute)} of {one.group} subscribe: no answer; the brokers' view"
                    " of the group stands for them."
                )
        inexact = sorted({one.group for one in self.lag if one.matching is None})
        if inexact:
            self.not_known.append(
                f"how much of the lag of {', '.join(inexact)} matches: a RocketMQ broker does not "
                "count, and of a group that is away tags are not remembered."
            )

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        lists = {name: [asdict(one) for one in getattr(self, name)] for name in _TABLES}
        return {"figures": self.figures, **lists, "not_known": self.not_known}

    def lines(self, rows_max: int) -> list[str]:
        """As tables."""
        lines = []
        for name, (title, columns, rows_of) in _TABLES.items():
            rows = [row for one in getattr(self, name) for row in rows_of(one)]
            lines += table_lines(title, columns, rows, rows_max)
        return lines + [f"Not known: {text}" for text in self.not_known]


_TABLES: Final[Mapping[str, tuple[str, Sequence[str], Callable[[Any], list[Sequence[Any]]]]]] = {
    "unequal": (
        "Members that subscribe differently (what a RocketMQ broker would lose)",
        ("group", "topic", "member", "wanted", "certain", "lost"),
        lambda one: [
            (one.group, one.topic, f"{client_id}: {text}", one.wanted, one.certain,
             f"{one.lost_min:,} to {one.lost_max:,}")
            for client_id, text in sorted(one.members.items())
        ],
    ),
    "lag": (
        "Lag", ("group", "topic", "members", "lag", "matching", "at risk"),
        lambda one: [
            (one.group, one.topic, "online" if one.is_online else "away", one.lag,
             "not known" if one.matching is None else one.matching, one.at_risk)
        ],
    ),
    "unwanted_tags": (
        "Tags that no known subscription takes", ("topic", "tag", "messages"),
        lambda one: [(one.topic, one.tag or "(none)", one.messages)],
    ),
    "collisions": (
        "Tags with the same hash", ("topic", "tags", "code", "messages"),
        lambda one: [(one.topic, ", ".join(one.tags), str(one.code), one.messages)],
    ),
    "failing": (
        "Filters that fail on messages", ("topic", "expression", "failed", "of"),
        lambda one: [(one.topic, one.expression, one.messages, one.of)],
    ),
}  # fmt: skip
"""Findings: title, columns, and the rows of each."""


def audit(
    spark: "SparkSession",
    connection: Mapping[str, str],
    *,
    topics: Sequence[str] = (),
    groups: Sequence[str] = (),
    recent_s: float | None = 86_400.0,
    say: Callable[[str], None] = lambda line: None,
    stopping: Callable[[], bool] = lambda: False,
) -> Audit:
    """Looks at these groups and topics (without: all of them) and at messages of the last
    `recent_s` seconds (None: all that are stored). Raises NameServerUnreachableError and what the
    brokers refuse."""
    found = Audit()
    with open_admin(parse_options(connection)) as admin:
        known = subscriptions_of(admin, groups or known_groups(admin))
        say(f"{len(known)} groups, {sum(one.is_online for one in known)} online")
        lags = _lags(admin, known)
        read = {topic for one in known for topic in one.topics} | {one.topic for one in lags}
        named = sorted(topics or (
            name for name in read if not is_group_topic(name)
        ))  # fmt: skip
        # Whoever reads a topic matters for its tags, also groups that were not asked about.
        everyone = known if not groups else subscriptions_of(admin, known_groups(admin))
        readers = {}
        for topic in named:
            with contextlib.suppress(RouteNotFoundError):
                if admin.queues(topic):
                    names: set[str] = set()  # groups with offsets in it
                    with contextlib.suppress(SluiceError):
                        names = set(admin.groups_of_topic(topic))
                    readers[topic] = [
                        one for one in everyone if one.group in names or topic in one.topics
                    ]
    found.groups, found.topics = len(known), len(readers)
    found.not_known += [
        f"what {topic} holds: no broker has a readable queue of it"
        for topic in named if topic not in readers
    ]  # fmt: skip
    found.lag = [one for one in lags if one.lag and (not topics or one.topic in readers)]
    found.add_unknown(known)
    begin_ms = None if recent_s is None else SYSTEM_CLOCK.now_ms() - int(recent_s * 1000)
    for topic, those in readers.items():
        if stopping():
            break
        say(f"looking at {topic}")
        wanted = {(s.kind, s.expression): s for one in those for s in one.all_of(topic)}
        expressions = [wanted[key] for key in sorted(wanted)]
        seen = history(spark, connection, topic, expressions, begin_ms)
        found.judge(seen, known, those, len(expressions))
    found.unwanted_tags.sort(key=lambda one: -one.messages)
    return found


def _lags(admin: Admin, known: Iterable[GroupSubscriptions]) -> list[GroupLag]:
    found = []
    for one in known:
        by_topic: dict[str, list[QueueLag]] = defaultdict(list)
        for item in admin.lag(one.group):
            by_topic[item.queue.topic].append(item)
        for topic, items in sorted(by_topic.items()):
            counts = [item.matching for item in items if item.lag]
            matching = None if None in counts else sum(count or 0 for count in counts)
            found.append(GroupLag(
                one.group, topic, sum(item.lag for item in items), matching,
                sum(item.messages_at_risk for item in items), one.is_online,
            ))  # fmt: skip
    return sorted(found, key=lambda item: (-item.lag, item.group, item.topic))


# ---- the ready pipeline


class AuditPipeline(Ready):
    name = "audit"
    what = "Unequal subscriptions, lag, tags that nobody takes, hash collisions, failing filters."
    fields = (
        Field("topics", LIST, "Only these topics; without, all that a group reads.", ()),
        Field("groups", LIST, "Only these groups; without, all.", ()),
        Field("recent", DURATION, "Messages of the last time are looked at.", 86_400.0),
        Field("output", TEXT, "A JSON file for the findings.", None),
        Field("rows", INTEGER, "Rows shown of each table.", 20),
        Field("fail_on_findings", FLAG, "Exit code 1 when something is found.", False),
    )  # fmt: skip

    def plan(self, task: Task) -> list[str]:
        options = task.options
        with open_admin(parse_options(task.connection)) as admin:
            groups = options["groups"] or known_groups(admin)
        lines = [
            f"ask brokers and members of {len(groups)} groups",
            "read tags (properties too, where a filter is SQL92) of"
            f" {', '.join(options['topics']) or 'their topics'}, the last"
            f" {options['recent']:,.0f} s",
        ]
        return [*lines, f"write {options['output']}"] if options["output"] else lines

    def run(self, task: Task) -> Report:
        options = task.options
        found = audit(
            task.spark, task.connection, topics=options["topics"], groups=options["groups"],
            recent_s=options["recent"], say=task.say, stopping=task.stopping,
        )  # fmt: skip
        report = Report(found.figures)
        report.is_failure = options["fail_on_findings"] and report.figures["findings"] > 0
        if options["output"]:
            text = json.dumps(found.record(), indent=1, ensure_ascii=False)
            replace_text(SYSTEM_FILES, str(Path(options["output"]).absolute()), text + "\n")
            report.files.append(options["output"])
        task.tell(report, *found.lines(options["rows"]))
        return report


AUDIT: Final = AuditPipeline()
