"""The ready pipeline `audit`: find problems with subscriptions, tags, filters and lag.

    groups, members, brokers --requests--> subscriptions and lag
    topics' recent messages  --Spark-----> how often each tag occurs, and what matches it

The findings are groups whose members subscribe differently, with what such a group loses without
lanes; lag by group and topic, with the exact number of matching messages if the broker counts them;
tags that no subscription matches; tags with the same hash; and expressions that fail on messages.
Only GET_CONSUMER_CONNECTION_LIST (203) and GET_CONSUMER_RUNNING_INFO (307) are needed. What a
RocketMQ broker cannot report is listed as not known and never guessed: how much of a lag matches,
and what a group without members subscribes. A SluiceMQ broker remembers the SQL92 expressions of
such a group for a day (request 900131).

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
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sluicemq.client.admin.groups import QueueLag
from sluicemq.client.admin.subscriptions import GroupSubscriptions
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import FilterSyntaxError, RouteNotFoundError, SluiceError
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
        return sum(counted.count for counted in self.counts)

    def bit_of(self, subscription: Subscription) -> int:
        """Return the bit that stands for an expression in the sample, as `1 << index`.

        Return 0 if the expression is not in `expressions`.
        """
        for index, sampled in enumerate(self.expressions):
            if (sampled.kind, sampled.expression) == (subscription.kind, subscription.expression):
                return 1 << index
        return 0


def sample_topic(
    spark: "SparkSession",
    connection: Mapping[str, str],
    topic: str,
    expressions: Sequence[Subscription],
    begin_ms: int | None,
) -> TopicSample:
    """Count the messages of a topic by their tag and by the expressions that match or fail on them.

    Messages stored from `begin_ms` on (milliseconds since 1970) are read; None means all.
    Properties are only read if an expression needs them. Only the first `EXPRESSIONS_MAX`
    expressions are evaluated.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - usual name, slow import

    evaluated = tuple(expressions[:EXPRESSIONS_MAX])
    source_columns = _choose_source_columns(evaluated)
    options = {}
    if begin_ms is not None:
        options["startingTimestamp"] = str(begin_ms)
    messages = load_messages(spark, connection, topic=topic, columns=source_columns, **options)
    matched_by, failed_by = _build_bit_columns(evaluated, source_columns)
    bits = messages.select("tags", matched_by.alias("matched_by"), failed_by.alias("failed_by"))

    # Count the messages of each combination. One row above the limit shows that there are more.
    combinations = bits.groupBy("tags", "matched_by", "failed_by").count()
    most_frequent = combinations.orderBy(F.desc("count"), "tags", "matched_by")
    rows = most_frequent.limit(COMBINATIONS_MAX + 1).collect()
    counts = tuple(MessageCount(*row) for row in rows[:COMBINATIONS_MAX])
    return TopicSample(topic, evaluated, counts, is_complete=len(rows) <= COMBINATIONS_MAX)


def _build_bit_columns(
    subscriptions: Sequence[Subscription], source_columns: str
) -> "tuple[Column, Column]":
    """Return two columns of integers: which subscriptions match a message, and which fail on it.

    Bit `1 << index` is set for the subscription at this index. `source_columns` is the option
    `columns` with which the messages are read.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as in sample_topic

    no_bit = F.lit(0).cast("bigint")
    matched_by = failed_by = no_bit
    for index, subscription in enumerate(subscriptions):
        bit = F.lit(1 << index).cast("bigint")
        is_match, is_error = _build_conditions(subscription, source_columns)
        matched_by = matched_by + F.when(is_match, bit).otherwise(no_bit)
        if is_error is not None:
            failed_by = failed_by + F.when(is_error, bit).otherwise(no_bit)
    return matched_by, failed_by


def _choose_source_columns(subscriptions: Iterable[Subscription]) -> str:
    """Return the option `columns` of the source, with what these subscriptions need.

    It is "tags" if no expression reads another property. Invalid SQL92 expressions are ignored.
    """
    property_names: set[str] = set()
    for subscription in subscriptions:
        if is_tag_kind(subscription.kind):
            continue
        with contextlib.suppress(FilterSyntaxError):
            property_names |= compile_sql92(subscription.expression).property_names
    return "tags,properties,keys" if property_names - {"TAGS"} else "tags"


def _build_conditions(
    subscription: Subscription, source_columns: str
) -> "tuple[Column, Column | None]":
    """Return two Spark conditions: that a message matches, and that the expression fails on it.

    The second is None if the expression cannot fail. Only SQL92 expressions can fail, for example
    if they compare text with a number. `source_columns` is the option `columns` with which the
    messages are read. An expression that does not compile matches nothing.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - as in sample_topic

    from sluicemq.spark.selectors import compiled  # noqa: PLC0415 - imports pyspark

    if is_tag_kind(subscription.kind):
        if subscription.is_everything:
            return F.lit(True), None
        tags = sorted(subscription.tags)
        has_tag = F.col("tags").isin(tags) if tags else F.lit(False)
        # The comparison is null for a message without a tag, which does not match.
        return F.coalesce(has_tag, F.lit(False)), None

    try:
        filter_columns = compiled(compile_sql92(subscription.expression), columns=source_columns)
    except FilterSyntaxError:
        return F.lit(False), None
    return filter_columns.match, filter_columns.verdict == "ERROR"


# ---- findings


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group on a topic.

    `matching` messages of the lag match the group's filter; None means unknown. `at_risk` messages
    will be deleted next. `has_lanes` says whether the group has lanes in all its queues.
    """

    group: str
    topic: str
    lag: int
    matching: int | None
    at_risk: int
    is_online: bool
    has_lanes: bool = False


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
    subscription the broker keeps. If `has_lanes` is True, SluiceMQ's lanes prevent the loss.
    """

    group: str
    topic: str
    members: Mapping[str, str]
    messages: int
    wanted: int
    certain: int
    lost_min: int
    lost_max: int
    has_lanes: bool = False


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
    """An expression of `groups` that fails on `messages` of `of` messages, so they do not match."""

    topic: str
    expression: str
    messages: int
    of: int
    groups: tuple[str, ...] = ()


def find_unwanted_tags(sample: TopicSample) -> list[UnwantedTag]:
    """Return the tags whose messages no expression matches, the most frequent first."""
    count_by_tag: dict[str | None, int] = defaultdict(int)
    matched_tags = set()
    for counted in sample.counts:
        count_by_tag[counted.tag] += counted.count
        if counted.matched_by:
            matched_tags.add(counted.tag)
    unwanted_tags = [
        UnwantedTag(sample.topic, tag, count)
        for tag, count in count_by_tag.items()
        if tag not in matched_tags
    ]
    return sorted(unwanted_tags, key=lambda unwanted: (-unwanted.messages, unwanted.tag or ""))


def compute_loss(
    sample: TopicSample, group: str, subscription_by_member: Mapping[str, Subscription | None]
) -> Loss | None:
    """Return how many messages a group may lose on a topic, or None if it cannot lose any.

    It can if its members have different subscriptions, because the broker uses one of these.
    `subscription_by_member` maps client ids to subscriptions, None for a member that has none.
    """
    all_subscriptions = list(subscription_by_member.values())
    if len({known and (known.kind, known.expression) for known in all_subscriptions}) < 2:
        return None
    expression_by_member = {
        client_id: "nothing" if subscription is None else subscription.expression
        for client_id, subscription in subscription_by_member.items()
    }
    subscriptions = [known for known in all_subscriptions if known is not None]

    bits = [sample.bit_of(subscription) for subscription in subscriptions]
    # Wanted: a member's expression matches the message. Certain: those of all members match it.
    all_subscribe = len(subscriptions) == len(subscription_by_member)
    wanted_count = certain_count = 0
    for counted in sample.counts:
        if any(counted.matched_by & bit for bit in bits):
            wanted_count += counted.count
        if all_subscribe and all(counted.matched_by & bit for bit in bits):
            certain_count += counted.count
    # For each subscription that the broker may keep: how many messages reach a handler.
    delivered_counts = [
        _count_delivered(sample, kept_bit, subscriptions, len(subscription_by_member))
        for kept_bit in bits
    ]
    return Loss(
        group=group,
        topic=sample.topic,
        members=expression_by_member,
        messages=sample.message_count,
        wanted=wanted_count,
        certain=certain_count,
        lost_min=round(wanted_count - max(delivered_counts)),
        lost_max=round(wanted_count - min(delivered_counts)),
    )


def _count_delivered(
    sample: TopicSample, kept_bit: int, subscriptions: Sequence[Subscription], member_count: int
) -> float:
    """Return how many messages are processed if the broker uses the expression of `kept_bit`.

    `subscriptions` has the subscription of each member that subscribes to the topic. A delivered
    message goes to any of the `member_count` members with the same probability. It is lost if this
    member does not accept it.
    """
    delivered_count = 0.0
    for counted in sample.counts:
        if not counted.matched_by & kept_bit:
            continue
        # A member that subscribes by tags compares the tag again. The broker also assigns queues to
        # a member that does not subscribe to the topic, and that member does not read them.
        accepting_members = 0
        for subscription in subscriptions:
            compares_tag = is_tag_kind(subscription.kind)
            if not compares_tag or counted.matched_by & sample.bit_of(subscription):
                accepting_members += 1
        delivered_count += counted.count * accepting_members / member_count
    return delivered_count


def find_collisions(sample: TopicSample) -> list[Collision]:
    """Return the groups of tags of messages or subscriptions that have the same hash."""
    count_by_tag: dict[str, int] = defaultdict(int)
    for counted in sample.counts:
        count_by_tag[counted.tag or ""] += counted.count
    for subscription in sample.expressions:
        for tag in subscription.tags:
            count_by_tag.setdefault(tag, 0)

    tags_by_code: dict[int, list[str]] = defaultdict(list)
    for tag in sorted(count_by_tag):
        tags_by_code[tag_code(tag)].append(tag)

    collisions = []
    for code, tags in sorted(tags_by_code.items()):
        if len(tags) > 1:
            message_count = sum(count_by_tag[tag] for tag in tags)
            collisions.append(Collision(sample.topic, code, tuple(tags), message_count))
    return collisions


def find_failing_filters(
    sample: TopicSample, groups: Iterable[GroupSubscriptions]
) -> list[FailingFilter]:
    """Return the expressions of `groups` that failed on a message, in the order of the sample."""
    names_by_expression = defaultdict(list)
    for group in groups:
        for subscription in group.all_of(sample.topic):
            names_by_expression[subscription.expression].append(group.group)

    failing_filters = []
    for index, expression in enumerate(known.expression for known in sample.expressions):
        names = tuple(names_by_expression[expression])
        failed_count = sum(each.count for each in sample.counts if each.failed_by & (1 << index))
        if failed_count and names:
            failing_filters.append(
                FailingFilter(sample.topic, expression, failed_count, sample.message_count, names)
            )
    return failing_filters


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
        """Numbers for scripts. `findings` is 0 if nothing is wrong.

        A lag is not a finding, and neither are different subscriptions of a group with lanes.
        """
        unequal_count = sum(not loss.has_lanes for loss in self.unequal)
        other_count = len(self.unwanted_tags) + len(self.collisions) + len(self.failing)
        return {
            "findings": unequal_count + other_count,
            "groups": self.groups,
            "topics": self.topics,
            "messages": self.messages,
            "unequal_groups": unequal_count,
            "groups_with_lanes": len(self.unequal) - unequal_count,
            "lag": sum(group_lag.lag for group_lag in self.lag),
            "unwanted_tags": len(self.unwanted_tags),
            "unwanted_messages": sum(unwanted.messages for unwanted in self.unwanted_tags),
            "collisions": len(self.collisions),
            "failing_filters": len(self.failing),
            "not_known": len(self.not_known),
        }

    def add_findings(
        self,
        sample: TopicSample,
        audited_groups: Sequence[GroupSubscriptions],
        readers: Sequence[GroupSubscriptions],
        expression_count: int,
    ) -> None:
        """Add the findings about the messages of one topic, and what is not known about them.

        `audited_groups` are the subscriptions of the audited groups, and `readers` those of all
        groups that read the topic. The topic has `expression_count` expressions, of which `sample`
        may have fewer.
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
        for group in audited_groups:
            if topic in group.topics:
                loss = compute_loss(sample, group.group, group.by_member(topic))
                if loss is not None:
                    self.unequal.append(loss)
        self.collisions += find_collisions(sample)
        self.failing += find_failing_filters(sample, audited_groups)
        self._add_unwanted_tags(sample, readers)

    def _add_unwanted_tags(
        self, sample: TopicSample, readers: Sequence[GroupSubscriptions]
    ) -> None:
        """Add the tags that no expression matches, and the readers with unknown expressions."""
        topic = sample.topic
        unwanted_tags = find_unwanted_tags(sample)
        unknown_readers = [reader.group for reader in readers if not reader.all_of(topic)]
        if unwanted_tags and unknown_readers:
            self.not_known.append(
                f"whether {', '.join(unknown_readers)} match tags of {topic} that no other group"
                " matches: they have no members, and no broker remembers their subscriptions."
            )
        self.unwanted_tags += unwanted_tags

    def add_unknown(self, groups: Iterable[GroupSubscriptions]) -> None:
        """Add to `not_known` what neither brokers nor members report about the groups.

        It is the subscriptions of members that do not answer, and how much of a lag matches. `lag`
        must have been set before.
        """
        for group in groups:
            silent_members = sorted(name for name, known in group.members.items() if known is None)
            if silent_members:
                self.not_known.append(
                    f"what {', '.join(silent_members)} of {group.group} subscribe to: they did not"
                    " answer; the brokers' view of the group is used instead."
                )
        unmatched_groups = sorted({lag.group for lag in self.lag if lag.matching is None})
        if unmatched_groups:
            self.not_known.append(
                f"how much of the lag of {', '.join(unmatched_groups)} matches: RocketMQ brokers do"
                " not count it, and SluiceMQ brokers not for tags of groups without members."
            )

    def to_json(self) -> dict[str, Any]:
        """Return the findings as a JSON object: `figures`, a list for each kind, `not_known`."""
        findings_by_kind = {kind: list(map(asdict, getattr(self, kind))) for kind in _TABLES}
        return {"figures": self.figures, **findings_by_kind, "not_known": self.not_known}

    def format_lines(self, rows_max: int) -> list[str]:
        """Return the findings as lines of text: a table for each kind, then what is not known.

        Each table has at most `rows_max` rows, and a last line with the number of further ones. A
        kind without findings is one line.
        """
        lines = []
        for kind, (title, columns, rows_of) in _TABLES.items():
            rows = list(chain.from_iterable(map(rows_of, getattr(self, kind))))
            lines += format_table(title, columns, rows, rows_max)
        lines += [f"Not known: {unknown}" for unknown in self.not_known]
        return lines


_TABLES: Final[Mapping[str, tuple[str, Sequence[str], Callable[[Any], list[Sequence[Any]]]]]] = {
    "unequal": (
        "Members that subscribe differently",
        ("group", "topic", "member", "wanted", "certain", "lost"),
        lambda loss: [
            (
                loss.group,
                loss.topic,
                f"{client_id}: {expression}",
                loss.wanted,
                loss.certain,
                "0 (lanes)" if loss.has_lanes else f"{loss.lost_min:,} to {loss.lost_max:,}",
            )
            for client_id, expression in sorted(loss.members.items())
        ],
    ),
    "lag": (
        "Lag",
        ("group", "topic", "members", "lag", "matching", "at risk"),
        lambda group_lag: [
            (
                group_lag.group,
                group_lag.topic,
                "online" if group_lag.is_online else "offline",
                group_lag.lag,
                "not known" if group_lag.matching is None else group_lag.matching,
                group_lag.at_risk,
            )
        ],
    ),
    "unwanted_tags": (
        "Tags that no known subscription matches",
        ("topic", "tag", "messages"),
        lambda unwanted: [(unwanted.topic, unwanted.tag or "(none)", unwanted.messages)],
    ),
    "collisions": (
        "Tags with the same hash",
        ("topic", "tags", "code", "messages"),
        lambda clash: [(clash.topic, ", ".join(clash.tags), str(clash.code), clash.messages)],
    ),
    "failing": (
        "Filters that fail on messages",
        ("topic", "groups", "expression", "failed", "of"),
        lambda one: [(one.topic, ", ".join(one.groups), one.expression, one.messages, one.of)],
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
    """Examine groups and topics for lost, unwanted and failing messages, and return the findings.

    An empty `topics` means all topics that a group reads, and an empty `groups` all groups.
    Messages of the last `recent_s` seconds are counted; None means all that are stored. `say(line)`
    is called with lines about the progress. If `stopping()` is True, the remaining topics are
    skipped. Raises NameServerUnreachableError, and RequestError if a broker refuses a request.
    """
    with open_admin(parse_options(connection)) as admin:
        audited_groups = fetch_subscriptions(admin, groups or list_groups(admin))
        online_count = sum(group.is_online for group in audited_groups)
        say(f"{len(audited_groups)} groups, {online_count} online")
        lags = _fetch_lags(admin, audited_groups)
        audited_topics = sorted(topics or _topics_read(audited_groups, lags))
        # All readers of a topic count for its tags, including groups that are not audited.
        all_groups = audited_groups
        if groups:
            all_groups = fetch_subscriptions(admin, list_groups(admin))
        readers_by_topic = _find_readers(admin, audited_topics, all_groups)

    findings = Audit(groups=len(audited_groups), topics=len(readers_by_topic))
    findings.not_known += [
        f"what {topic} contains: no broker has a readable queue of it"
        for topic in audited_topics
        if topic not in readers_by_topic
    ]
    findings.lag = [
        lag for lag in lags if lag.lag and (not topics or lag.topic in readers_by_topic)
    ]
    findings.add_unknown(audited_groups)  # after the lag, of which it reports the unknown part

    begin_ms = None if recent_s is None else SYSTEM_CLOCK.now_ms() - int(recent_s * 1000)
    for topic, readers in readers_by_topic.items():
        if stopping():
            break
        say(f"reading {topic}")
        expressions = _distinct_expressions(readers, topic)
        sample = sample_topic(spark, connection, topic, expressions, begin_ms)
        findings.add_findings(sample, audited_groups, readers, len(expressions))
    findings.unwanted_tags.sort(key=lambda unwanted: -unwanted.messages)
    lanes = {(lag.group, lag.topic) for lag in lags if lag.has_lanes}
    findings.unequal = [
        replace(loss, has_lanes=(loss.group, loss.topic) in lanes) for loss in findings.unequal
    ]
    return findings


def _topics_read(groups: Iterable[GroupSubscriptions], lags: Iterable[GroupLag]) -> set[str]:
    """Return the topics that groups subscribe to or have a lag on.

    Retry topics and dead-letter topics are left out.
    """
    subscribed_topics = {topic for group in groups for topic in group.topics}
    read_topics = subscribed_topics | {lag.topic for lag in lags}
    return {topic for topic in read_topics if not is_group_topic(topic)}


def _distinct_expressions(readers: Iterable[GroupSubscriptions], topic: str) -> list[Subscription]:
    """Return one subscription for each expression of a topic, ordered by kind and expression."""
    subscription_by_key = {
        (subscription.kind, subscription.expression): subscription
        for reader in readers
        for subscription in reader.all_of(topic)
    }
    return [subscription_by_key[key] for key in sorted(subscription_by_key)]


def _find_readers(
    admin: Admin, topics: Iterable[str], groups: Iterable[GroupSubscriptions]
) -> dict[str, list[GroupSubscriptions]]:
    """Return the groups that read each topic, without topics that have no readable queue."""
    readers_by_topic = {}
    for topic in topics:
        with contextlib.suppress(RouteNotFoundError):
            if admin.queues(topic):
                readers_by_topic[topic] = _readers_of(admin, topic, groups)
    return readers_by_topic


def _readers_of(
    admin: Admin, topic: str, groups: Iterable[GroupSubscriptions]
) -> list[GroupSubscriptions]:
    """Return the groups that subscribe to the topic or have committed offsets in it.

    If the brokers do not say which groups have offsets, only subscriptions count.
    """
    groups_with_offsets: set[str] = set()
    with contextlib.suppress(SluiceError):
        groups_with_offsets = set(admin.groups_of_topic(topic))
    return [
        group for group in groups if group.group in groups_with_offsets or topic in group.topics
    ]


def _fetch_lags(admin: Admin, groups: Iterable[GroupSubscriptions]) -> list[GroupLag]:
    """Return the lag of each group on each of its topics, the largest lag first.

    `matching`, how much of the lag matches the subscription, is None if the broker does not know
    it.
    """
    group_lags = []
    for group in groups:
        lags_by_topic: dict[str, list[QueueLag]] = defaultdict(list)
        for queue_lag in admin.lag(group.group):
            lags_by_topic[queue_lag.queue.topic].append(queue_lag)
        for topic, queue_lags in sorted(lags_by_topic.items()):
            group_lags.append(_sum_queue_lags(group, topic, queue_lags))
    return sorted(group_lags, key=lambda lag: (-lag.lag, lag.group, lag.topic))


def _sum_queue_lags(group: GroupSubscriptions, topic: str, lags: Sequence[QueueLag]) -> GroupLag:
    """Return the lag of a group on a topic: the sum of the lags of the topic's queues."""
    matching: int | None = 0
    for queue_lag in lags:
        if queue_lag.lag and matching is not None:
            # One unknown number makes the sum unknown.
            matching = None if queue_lag.matching is None else matching + queue_lag.matching
    return GroupLag(
        group=group.group,
        topic=topic,
        lag=sum(queue_lag.lag for queue_lag in lags),
        matching=matching,
        at_risk=sum(queue_lag.messages_at_risk for queue_lag in lags),
        is_online=group.is_online,
        has_lanes=all(queue_lag.lanes for queue_lag in lags),
    )


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
        topics = ", ".join(options["topics"]) or "their topics"
        lines = [
            f"ask brokers and members of {len(groups)} groups",
            "read tags (and properties, if a filter is SQL92) of"
            f" {topics}, the last {options['recent']:,.0f} s",
        ]
        if options["output"]:
            lines.append(f"write {options['output']}")
        return lines

    def run(self, task: Task) -> Report:
        """Run `audit`, write the findings to the option `output`, and report them as tables."""
        options = task.options
        findings = audit(
            task.spark,
            task.connection,
            topics=options["topics"],
            groups=options["groups"],
            recent_s=options["recent"],
            say=task.say,
            stopping=task.stopping,
        )
        report = Report(findings.figures)
        report.is_failure = options["fail_on_findings"] and report.figures["findings"] > 0
        if options["output"]:
            document = json.dumps(findings.to_json(), indent=1, ensure_ascii=False)
            path = str(Path(options["output"]).absolute())
            replace_text(SYSTEM_FILES, path, document + "\n")
            report.files.append(options["output"])
        task.report_lines(report, *findings.format_lines(options["rows"]))
        return report


AUDIT: Final = AuditPipeline()
