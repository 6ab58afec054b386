"""The ready pipeline `audit`: find problems with subscriptions, tags, filters and lag.

    groups, members, brokers --requests--> subscriptions and lag
    topics' recent messages  --Spark-----> how often each tag occurs, and what matches it

The findings are groups whose members subscribe differently, with what such a group would lose on a
RocketMQ broker; lag by group and topic, with the exact number of matching messages if the broker
counts them; tags that no subscription matches; tags with the same hash; and expressions that fail
on messages. Only requests of RocketMQ are needed: GET_CONSUMER_CONNECTION_LIST (203) and
GET_CONSUMER_RUNNING_INFO (307). What a RocketMQ broker cannot report is listed as not known and
never guessed: how much of a lag matches, and what a group without members subscribes. A SluiceMQ
broker remembers the SQL92 expressions of such a group for a day (request 900131).

Each distinct expression of a topic has a bit of an integer. For each message, Spark computes the
integer of the expressions that match it, and that of the expressions that fail on it. It counts the
messages by tag and these two integers. So the driver gets one row for each combination that occurs,
whatever the size of the topic, and all findings follow from these rows.

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
    ReadyPipeline,
    Report,
    Task,
    format_table,
    load_messages,
)
from sluicemq.spark.options import parse_options
from sluicemq.spark.sources.offsets import open_admin

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

EXPRESSIONS_MAX: Final = 60
"""The number of expressions of a topic that are examined, limited by the bits of a bigint."""
COMBINATIONS_MAX: Final = 20_000
"""The number of combinations of tag and expressions that come to the driver."""


# ---- groups and their subscriptions


def list_groups(admin: Admin) -> list[str]:
    """Return the sorted consumer groups that any master knows, without system groups."""
    return sorted(name for name in admin.groups() if not is_system_group(name))


def fetch_subscriptions(admin: Admin, groups: Iterable[str]) -> list[GroupSubscriptions]:
    """Return the subscriptions of each of `groups`, as brokers and members report them.

    A member that does not answer is reported as unknown, and raises no error. Raises the client's
    errors if a broker does not respond.
    """
    masters = admin.masters()
    return [admin.subscriptions(group, brokers=masters) for group in groups]


# ---- a topic's recent messages


@dataclass(frozen=True, slots=True)
class MessageCount:
    """The number of messages with one tag that the same expressions match and fail on.

    `tag` is None for messages without a tag. `matched_by` and `failed_by` have a bit for each
    expression, in the order of `TopicSample.expressions`.
    """

    tag: str | None
    matched_by: int
    failed_by: int
    count: int


@dataclass(frozen=True, slots=True)
class TopicSample:
    """The counted recent messages of a topic.

    `expressions` are in the order of their bits. If `is_complete` is False, there are more than
    `COMBINATIONS_MAX` combinations, and the rarest are left out.
    """

    topic: str
    expressions: tuple[Subscription, ...] = ()
    counts: tuple[MessageCount, ...] = ()
    is_complete: bool = True

    @property
    def message_count(self) -> int:
        """The number of messages."""
        return sum(one.count for one in self.counts)

    def bit_of(self, subscription: Subscription) -> int:
        """Return the integer in which only the bit of this expression is set; 0 if it has no bit.

        An expression has no bit if it is not among `expressions`.
        """
        for index, one in enumerate(self.expressions):
            if (one.kind, one.expression) == (subscription.kind, subscription.expression):
                return 1 << index
        return 0


def sample_topic(
    spark: "SparkSession",
    connection: Mapping[str, str],
    topic: str,
    expressions: Sequence[Subscription],
    begin_ms: int | None,
) -> TopicSample:
    """Count the messages of a topic by tag, matching expressions and failing expressions.

    Messages stored from `begin_ms` on (milliseconds since 1970) are read; None means all. Only tags
    are read, unless an expression needs properties. If there are more than `EXPRESSIONS_MAX`
    expressions, only the first ones are evaluated.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - usual name, slow import

    chosen = tuple(expressions[:EXPRESSIONS_MAX])
    names: set[str] = set()
    for subscription in chosen:
        with contextlib.suppress(FilterSyntaxError):
            if not is_tag_kind(subscription.kind):
                names |= compile_sql92(subscription.expression).property_names
    columns = "tags,properties,keys" if names - {"TAGS"} else "tags"
    options = {"startingTimestamp": str(begin_ms)} if begin_ms is not None else {}
    messages = load_messages(spark, connection, topic=topic, columns=columns, **options)

    no_bit = F.lit(0).cast("bigint")
    matched = failed = no_bit
    for index, subscription in enumerate(chosen):
        bit = F.lit(1 << index).cast("bigint")
        is_match, is_error = _evaluate(subscription, columns)
        matched = matched + F.when(is_match, bit).otherwise(no_bit)
        if is_error is not None:
            failed = failed + F.when(is_error, bit).otherwise(no_bit)
    found = messages.select("tags", matched.alias("matched_by"), failed.alias("failed_by"))
    found = found.groupBy("tags", "matched_by", "failed_by").count()
    ordered = found.orderBy(F.desc("count"), "tags", "matched_by")
    rows = ordered.limit(COMBINATIONS_MAX + 1).collect()
    counts = tuple(MessageCount(*row) for row in rows[:COMBINATIONS_MAX])
    return TopicSample(topic, chosen, counts, len(rows) <= COMBINATIONS_MAX)


def _evaluate(subscription: Subscription, columns: str) -> "tuple[Column, Column | None]":
    """Return two columns: whether a message matches, and whether the expression fails on it.

    The second is None if the expression cannot fail. `columns` is the option `columns` with which
    the messages are read. An expression that does not compile matches nothing.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as in sample_topic

    from sluicemq.spark.selectors import compiled  # noqa: PLC0415 - imports pyspark

    if is_tag_kind(subscription.kind):
        if subscription.is_everything:
            return F.lit(True), None
        tags = sorted(subscription.tags)
        is_match = F.col("tags").isin(tags) if tags else F.lit(False)
        return F.coalesce(is_match, F.lit(False)), None
    try:
        found = compiled(compile_sql92(subscription.expression), columns=columns)
    except FilterSyntaxError:
        return F.lit(False), None
    return found.match, found.verdict == "ERROR"


# ---- findings


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group on a topic.

    `matching` messages of the lag match the group's filter; None means unknown. `at_risk` messages
    will be deleted next.
    """

    group: str
    topic: str
    lag: int
    matching: int | None
    at_risk: int
    is_online: bool


@dataclass(frozen=True, slots=True)
class UnwantedTag:
    """A tag that no known subscription matches, with the number of its messages.

    `tag` is None for messages without a tag.
    """

    topic: str
    tag: str | None
    messages: int


@dataclass(frozen=True, slots=True)
class Loss:
    """What a group of members with different subscriptions loses on a RocketMQ broker.

    Such a broker keeps one subscription for the group, that of the newest heartbeat. `members` has
    the expression of each client id. `messages` is the number of messages that were counted, and
    `wanted` the number that any member's subscription matches. `certain` messages are delivered
    whichever subscription the broker keeps and whichever member reads the queue. If the queues are
    shared evenly, `lost_min` to `lost_max` of the wanted messages are lost, depending on which
    subscription the broker keeps.
    """

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
    """Tags of a topic that a broker cannot distinguish: their `String.hashCode` is `code`.

    `messages` is the number of messages with any of these tags.
    """

    topic: str
    code: int
    tags: tuple[str, ...]
    messages: int


@dataclass(frozen=True, slots=True)
class FailingFilter:
    """An expression that fails on `messages` of `of` messages, which therefore do not match."""

    topic: str
    expression: str
    messages: int
    of: int


def find_unwanted_tags(found: TopicSample) -> list[UnwantedTag]:
    """Return the tags whose messages no expression matches, the most frequent first.

    A tag is left out if an expression matches some of its messages.
    """
    messages: dict[str | None, int] = defaultdict(int)
    for one in found.counts:
        messages[one.tag] += one.count
    wanted = {one.tag for one in found.counts if one.matched_by}
    unwanted = [
        UnwantedTag(found.topic, tag, count) for tag, count in messages.items() if tag not in wanted
    ]
    return sorted(unwanted, key=lambda one: (-one.messages, one.tag or ""))


def compute_loss(
    found: TopicSample, group: str, subscription_by_member: Mapping[str, Subscription | None]
) -> Loss | None:
    """Return the loss of a group on a topic; None if its members have the same subscription.

    `subscription_by_member` maps client ids to subscriptions of the topic, None for members that do
    not subscribe to it. See `Loss` for the numbers.
    """
    readers = list(subscription_by_member.values())
    if len({(one and (one.kind, one.expression)) for one in readers}) < 2:
        return None
    texts = {
        client_id: "nothing" if one is None else one.expression
        for client_id, one in subscription_by_member.items()
    }
    subscriptions = [one for one in readers if one is not None]
    bits = [found.bit_of(one) for one in subscriptions]
    wanted = sum(one.count for one in found.counts if any(one.matched_by & bit for bit in bits))
    certain = sum(
        one.count
        for one in found.counts
        if len(subscriptions) == len(readers) and all(one.matched_by & bit for bit in bits)
    )

    delivered = []
    for kept_bit in bits:
        # Messages that reach a handler if the broker keeps this subscription. A member that
        # subscribes by tags compares the tag again. The broker also assigns queues to a member that
        # does not subscribe to the topic, and that member does not read them.
        total = 0.0
        for one in found.counts:
            if one.matched_by & kept_bit:
                receiving = sum(
                    1
                    for reader in subscriptions
                    if not is_tag_kind(reader.kind) or one.matched_by & found.bit_of(reader)
                )
                total += one.count * receiving / len(readers)
        delivered.append(total)
    return Loss(
        group=group,
        topic=found.topic,
        members=texts,
        messages=found.message_count,
        wanted=wanted,
        certain=certain,
        lost_min=round(wanted - max(delivered)),
        lost_max=round(wanted - min(delivered)),
    )


def find_collisions(found: TopicSample) -> list[Collision]:
    """Return the groups of tags with the same hash, ordered by the hash.

    Tags of messages and tags of subscriptions are compared.
    """
    counts: dict[str, int] = defaultdict(int)
    for one in found.counts:
        counts[one.tag or ""] += one.count
    for subscription in found.expressions:
        for tag in subscription.tags:
            counts[tag] += 0
    tags_by_code: dict[int, list[str]] = defaultdict(list)
    for tag in sorted(counts):
        tags_by_code[tag_code(tag)].append(tag)
    return [
        Collision(found.topic, code, tuple(tags), sum(counts[tag] for tag in tags))
        for code, tags in sorted(tags_by_code.items())
        if len(tags) > 1
    ]


def find_failing_filters(found: TopicSample) -> list[FailingFilter]:
    """Return the expressions that failed on at least one message, in the order of the sample."""
    counts = [
        (
            subscription.expression,
            sum(one.count for one in found.counts if one.failed_by >> index & 1),
        )
        for index, subscription in enumerate(found.expressions)
    ]
    return [
        FailingFilter(found.topic, text, count, found.message_count)
        for text, count in counts
        if count
    ]


# ---- the audit


@dataclass(slots=True)
class Audit:
    """The findings of an audit.

    `groups`, `topics` and `messages` are the numbers of those that were examined. `not_known` has a
    text for each thing that could not be found out.
    """

    groups: int = 0
    topics: int = 0
    messages: int = 0
    unequal: list[Loss] = field(default_factory=list)
    lag: list[GroupLag] = field(default_factory=list)
    unwanted_tags: list[UnwantedTag] = field(default_factory=list)
    collisions: list[Collision] = field(default_factory=list)
    failing: list[FailingFilter] = field(default_factory=list)
    not_known: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, int | float]:
        """Numbers for scripts. `findings` is 0 if nothing is wrong; lag is not counted there."""
        parts: tuple[Sequence[Any], ...] = (
            self.unequal,
            self.unwanted_tags,
            self.collisions,
            self.failing,
        )
        return {
            "findings": sum(len(part) for part in parts),
            "groups": self.groups,
            "topics": self.topics,
            "messages": self.messages,
            "unequal_groups": len(self.unequal),
            "lag": sum(one.lag for one in self.lag),
            "unwanted_tags": len(self.unwanted_tags),
            "unwanted_messages": sum(one.messages for one in self.unwanted_tags),
            "collisions": len(self.collisions),
            "failing_filters": len(self.failing),
            "not_known": len(self.not_known),
        }

    def add_findings(
        self,
        sample: TopicSample,
        known: Sequence[GroupSubscriptions],
        readers: Sequence[GroupSubscriptions],
        expression_count: int,
    ) -> None:
        """Add the findings about the messages of one topic, and what is not known about them.

        `sample` are the counted messages. `known` are the subscriptions of the audited groups, and
        `readers` those of all groups that read the topic. `expression_count` is the number of the
        topic's expressions, of which `sample` may have fewer.
        """
        topic = sample.topic
        if expression_count > EXPRESSIONS_MAX:
            self.not_known.append(
                f"{topic} is subscribed with {expression_count} expressions, of which only the"
                f" first {EXPRESSIONS_MAX} are examined."
            )
        self.messages += sample.message_count
        if not sample.is_complete:
            self.not_known.append(f"{topic} has too many tags: the rarest are left out.")
        losses = [
            compute_loss(sample, one.group, one.by_member(topic))
            for one in known
            if topic in one.topics
        ]
        self.unequal += [one for one in losses if one is not None]
        self.collisions += find_collisions(sample)
        self.failing += find_failing_filters(sample)
        unwanted = find_unwanted_tags(sample)
        unknown_readers = [one.group for one in readers if not one.all_of(topic)]
        if unwanted and unknown_readers:
            self.not_known.append(
                f"whether {', '.join(unknown_readers)} match tags of {topic} that no other group"
                " matches: they have no members, and no broker remembers their subscriptions."
            )
        self.unwanted_tags += unwanted

    def add_unknown(self, known: Iterable[GroupSubscriptions]) -> None:
        """Add to `not_known` what neither brokers nor members report about the groups `known`.

        That is what silent members subscribe to, and how much of a lag matches. The lag must have
        been set before.
        """
        for one in known:
            silent = sorted(
                client_id
                for client_id, subscriptions in one.members.items()
                if subscriptions is None
            )
            if silent:
                self.not_known.append(
                    f"what {', '.join(silent)} of {one.group} subscribe to: they did not answer;"
                    " the brokers' view of the group is used instead."
                )
        inexact = sorted({one.group for one in self.lag if one.matching is None})
        if inexact:
            self.not_known.append(
                f"how much of the lag of {', '.join(inexact)} matches: a RocketMQ broker does not"
                " count it, and the tags of a group without members are not remembered."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the findings as a JSON object: `figures`, a list for each kind, `not_known`."""
        lists = {name: [asdict(one) for one in getattr(self, name)] for name in _TABLES}
        return {"figures": self.figures, **lists, "not_known": self.not_known}

    def format_lines(self, rows_max: int) -> list[str]:
        """Return the findings as lines of text: a table for each kind, then what is not known.

        Each table has at most `rows_max` rows, and a last line with the number of further ones. A
        kind without findings is one line.
        """
        lines = []
        for name, (title, columns, rows_of) in _TABLES.items():
            rows = [row for one in getattr(self, name) for row in rows_of(one)]
            lines += format_table(title, columns, rows, rows_max)
        return lines + [f"Not known: {text}" for text in self.not_known]


_TABLES: Final[Mapping[str, tuple[str, Sequence[str], Callable[[Any], list[Sequence[Any]]]]]] = {
    "unequal": (
        "Members that subscribe differently (what a RocketMQ broker would lose)",
        ("group", "topic", "member", "wanted", "certain", "lost"),
        lambda one: [
            (
                one.group,
                one.topic,
                f"{client_id}: {text}",
                one.wanted,
                one.certain,
                f"{one.lost_min:,} to {one.lost_max:,}",
            )
            for client_id, text in sorted(one.members.items())
        ],
    ),
    "lag": (
        "Lag",
        ("group", "topic", "members", "lag", "matching", "at risk"),
        lambda one: [
            (
                one.group,
                one.topic,
                "online" if one.is_online else "offline",
                one.lag,
                "not known" if one.matching is None else one.matching,
                one.at_risk,
            )
        ],
    ),
    "unwanted_tags": (
        "Tags that no known subscription matches",
        ("topic", "tag", "messages"),
        lambda one: [(one.topic, one.tag or "(none)", one.messages)],
    ),
    "collisions": (
        "Tags with the same hash",
        ("topic", "tags", "code", "messages"),
        lambda one: [(one.topic, ", ".join(one.tags), str(one.code), one.messages)],
    ),
    "failing": (
        "Filters that fail on messages",
        ("topic", "expression", "failed", "of"),
        lambda one: [(one.topic, one.expression, one.messages, one.of)],
    ),
}
"""For each kind of finding: the title, the columns, and the function that returns its rows."""


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
    """Return the findings about groups and topics.

    An empty `topics` means all topics that a group reads, and an empty `groups` all groups.
    Messages of the last `recent_s` seconds are counted; None means all that are stored. `say` is
    called with lines about the progress. If `stopping()` is True, the remaining topics are skipped.
    Raises NameServerUnreachableError, and RequestError if a broker refuses a request.
    """
    found = Audit()
    with open_admin(parse_options(connection)) as admin:
        known = fetch_subscriptions(admin, groups or list_groups(admin))
        say(f"{len(known)} groups, {sum(one.is_online for one in known)} online")
        lags = _fetch_lags(admin, known)
        read = {topic for one in known for topic in one.topics} | {one.topic for one in lags}
        named = sorted(topics or (name for name in read if not is_group_topic(name)))
        # All readers of a topic count for its tags, including groups that are not audited.
        all_groups = known if not groups else fetch_subscriptions(admin, list_groups(admin))
        readers_by_topic = {}
        for topic in named:
            with contextlib.suppress(RouteNotFoundError):
                if admin.queues(topic):
                    readers_by_topic[topic] = _readers_of(admin, topic, all_groups)
    found.groups, found.topics = len(known), len(readers_by_topic)
    found.not_known += [
        f"what {topic} contains: no broker has a readable queue of it"
        for topic in named
        if topic not in readers_by_topic
    ]
    found.lag = [one for one in lags if one.lag and (not topics or one.topic in readers_by_topic)]
    found.add_unknown(known)

    begin_ms = None if recent_s is None else SYSTEM_CLOCK.now_ms() - int(recent_s * 1000)
    for topic, readers in readers_by_topic.items():
        if stopping():
            break
        say(f"reading {topic}")
        wanted = {(s.kind, s.expression): s for one in readers for s in one.all_of(topic)}
        expressions = [wanted[key] for key in sorted(wanted)]
        sample = sample_topic(spark, connection, topic, expressions, begin_ms)
        found.add_findings(sample, known, readers, len(expressions))
    found.unwanted_tags.sort(key=lambda one: -one.messages)
    return found


def _readers_of(
    admin: Admin, topic: str, groups: Iterable[GroupSubscriptions]
) -> list[GroupSubscriptions]:
    """Return those of `groups` that subscribe to the topic or have committed offsets in it.

    If the brokers do not tell which groups have offsets, only subscriptions count.
    """
    names: set[str] = set()
    with contextlib.suppress(SluiceError):
        names = set(admin.groups_of_topic(topic))
    return [one for one in groups if one.group in names or topic in one.topics]


def _fetch_lags(admin: Admin, known: Iterable[GroupSubscriptions]) -> list[GroupLag]:
    """Return the lag of each of the groups by topic, the largest first.

    `matching` is None if the broker does not know it for a queue with a lag.
    """
    found = []
    for one in known:
        by_topic: dict[str, list[QueueLag]] = defaultdict(list)
        for item in admin.lag(one.group):
            by_topic[item.queue.topic].append(item)
        for topic, items in sorted(by_topic.items()):
            counts = [item.matching for item in items if item.lag]
            matching = None if None in counts else sum(count or 0 for count in counts)
            found.append(
                GroupLag(
                    group=one.group,
                    topic=topic,
                    lag=sum(item.lag for item in items),
                    matching=matching,
                    at_risk=sum(item.messages_at_risk for item in items),
                    is_online=one.is_online,
                )
            )
    return sorted(found, key=lambda item: (-item.lag, item.group, item.topic))


# ---- the ready pipeline


class AuditPipeline(ReadyPipeline):
    """Run `audit`, print the findings, and write them to a file."""

    name = "audit"
    description = (
        "Unequal subscriptions, lag, tags that nothing matches, hash collisions, failing filters."
    )
    fields = (
        Field("topics", LIST, "Only these topics; the default is all that a group reads.", ()),
        Field("groups", LIST, "Only these groups; the default is all.", ()),
        Field("recent", DURATION, "Age of the oldest messages that are counted.", 86_400.0),
        Field("output", TEXT, "JSON file for the findings.", None),
        Field("rows", INTEGER, "Rows shown of each table.", 20),
        Field("fail_on_findings", FLAG, "Return exit code 1 if something is found.", False),
    )

    def plan(self, task: Task) -> list[str]:
        """Return lines that say which groups would be asked and which messages would be read."""
        options = task.options
        with open_admin(parse_options(task.connection)) as admin:
            groups = options["groups"] or list_groups(admin)
        lines = [
            f"ask brokers and members of {len(groups)} groups",
            "read tags (and properties, if a filter is SQL92) of"
            f" {', '.join(options['topics']) or 'their topics'}, the last"
            f" {options['recent']:,.0f} s",
        ]
        return [*lines, f"write {options['output']}"] if options["output"] else lines

    def run(self, task: Task) -> Report:
        """Run `audit`, write the findings to the option `output`, and report them as tables."""
        options = task.options
        found = audit(
            task.spark,
            task.connection,
            topics=options["topics"],
            groups=options["groups"],
            recent_s=options["recent"],
            say=task.say,
            stopping=task.stopping,
        )
        report = Report(found.figures)
        report.is_failure = options["fail_on_findings"] and report.figures["findings"] > 0
        if options["output"]:
            text = json.dumps(found.to_json(), indent=1, ensure_ascii=False)
            replace_text(SYSTEM_FILES, str(Path(options["output"]).absolute()), text + "\n")
            report.files.append(options["output"])
        task.report_lines(report, *found.format_lines(options["rows"]))
        return report


AUDIT: Final = AuditPipeline()
