"""The ready pipeline `audit`: what is wrong, or about to be, with subscriptions, tags and lag.

    groups, members, brokers --requests--> who wants what, lag       (`subscribed`)
    topics' recent messages  --Spark-----> what that means           (`audit_history`)

Findings: groups whose members subscribe differently, with what they would lose on a RocketMQ
broker; lag by group and topic, exact behind filters where the broker counts; tags that nobody
takes; tags that share a hash; expressions that fail on messages. Only RocketMQ's own requests are
needed; what a Java broker cannot say (how much of a lag matches; what a group that is away wants)
is reported as not known, never guessed.

    found = audit(spark, {"nameServers": "127.0.0.1:9876"})
    found.figures, found.unwanted_tags
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sluicemq.client.core.operations.topics import QueueLag
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import RouteNotFoundError, SluiceError
from sluicemq.files import SYSTEM_FILES, replace_text
from sluicemq.model.topic import RETRY_PREFIX
from sluicemq.spark.cluster import open_admin
from sluicemq.spark.options import parse_options
from sluicemq.spark.pipelines.audit_history import (
    EXPRESSIONS_MAX,
    Collision,
    Failing,
    History,
    Loss,
    UnwantedTag,
    as_record,
    collisions,
    failing,
    history,
    loss,
    unwanted_tags,
)
from sluicemq.spark.pipelines.printing import table_lines
from sluicemq.spark.pipelines.ready import (
    DURATION,
    FLAG,
    INTEGER,
    LIST,
    TEXT,
    Field,
    Ready,
    Report,
    Task,
)
from sluicemq.spark.pipelines.subscribed import (
    GroupSubscriptions,
    known_groups,
    subscriptions_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        lists = ("unequal", "lag", "unwanted_tags", "collisions", "failing")
        return {
            "figures": self.figures,
            **{name: [as_record(one) for one in getattr(self, name)] for name in lists},
            "not_known": self.not_known,
        }

    def lines(self, rows_max: int) -> list[str]:
        """As tables."""
        unequal = [
            (one.group, one.topic, f"{client_id}: {text}", one.wanted, one.certain,
             f"{one.lost_min:,} to {one.lost_max:,}")
            for one in self.unequal for client_id, text in sorted(one.members.items())
        ]  # fmt: skip
        lag = [
            (one.group, one.topic, "online" if one.is_online else "away", one.lag,
             "not known" if one.matching is None else one.matching, one.at_risk)
            for one in self.lag
        ]  # fmt: skip
        return [
            *_shown("Members that subscribe differently (what a RocketMQ broker would lose)",
                    ("group", "topic", "member", "wanted", "certain", "lost"), unequal, rows_max),
            *_shown("Lag", ("group", "topic", "members", "lag", "matching", "at risk"), lag,
                    rows_max),
            *_shown("Tags that no known subscription takes", ("topic", "tag", "messages"),
                    [(one.topic, one.tag or "(none)", one.messages) for one in self.unwanted_tags],
                    rows_max),
            *_shown("Tags with the same hash", ("topic", "tags", "code", "messages"),
                    [(one.topic, ", ".join(one.tags), str(one.code), one.messages)
                     for one in self.collisions], rows_max),
            *_shown("Filters that fail on messages", ("topic", "expression", "failed", "of"),
                    [(one.topic, one.expression, one.messages, one.of) for one in self.failing],
                    rows_max),
            *(f"Not known: {text}" for text in self.not_known),
        ]  # fmt: skip


def _shown(
    title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], rows_max: int
) -> list[str]:
    lines = table_lines(title, names, rows[:rows_max])
    left = len(rows) - rows_max
    return [*lines, f"  … and {left:,} more"] if left > 0 else lines


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
        named = sorted(topics) or _topics_of(known, lags)
        chosen = [topic for topic in named if _is_readable(admin, topic)]
        # Whoever reads a topic matters for its tags, also groups that were not asked about.
        everyone = known if not groups else subscriptions_of(admin, known_groups(admin))
        readers = {topic: _readers(admin, topic, everyone) for topic in chosen}
    found.groups, found.topics = len(known), len(chosen)
    found.not_known += [
        f"what {topic} holds: no broker has a readable queue of it"
        for topic in named if topic not in chosen
    ]  # fmt: skip
    found.lag = [one for one in lags if one.lag and (not topics or one.topic in chosen)]
    _say_unknown(found, known)
    begin_ms = None if recent_s is None else SYSTEM_CLOCK.now_ms() - int(recent_s * 1000)
    for topic in chosen:
        if stopping():
            break
        say(f"looking at {topic}")
        _look_at(found, spark, connection, topic, known, readers[topic], begin_ms)
    found.unwanted_tags.sort(key=lambda one: -one.messages)
    return found


def _look_at(
    found: Audit,
    spark: "SparkSession",
    connection: Mapping[str, str],
    topic: str,
    known: Sequence[GroupSubscriptions],
    readers: Sequence[GroupSubscriptions],
    begin_ms: int | None,
) -> None:
    wanted = {(s.kind, s.expression): s for one in readers for s in one.wanted(topic)}
    expressions = [wanted[key] for key in sorted(wanted)]
    if len(expressions) > EXPRESSIONS_MAX:
        found.not_known.append(
            f"{topic} is subscribed with {len(expressions)} expressions, of which the first "
            f"{EXPRESSIONS_MAX} are looked at."
        )
    told = history(spark, connection, topic, expressions, begin_ms)
    found.messages += told.messages
    if not told.is_whole:
        found.not_known.append(f"{topic} has too many tags: the rarest are left out.")
    for one in known:
        lost = loss(told, one.group, one.said(topic)) if topic in one.topics else None
        if lost is not None:
            found.unequal.append(lost)
    found.collisions += collisions(told)
    found.failing += failing(told)
    _add_unwanted(found, told, readers)


def _add_unwanted(found: Audit, told: History, readers: Sequence[GroupSubscriptions]) -> None:
    unwanted = unwanted_tags(told)
    silent = [one.group for one in readers if not one.wanted(told.topic)]
    if unwanted and silent:
        found.not_known.append(
            f"whether {', '.join(silent)} take tags of {told.topic} that nobody else takes: away, "
            "and no broker remembers what they subscribed."
        )
    found.unwanted_tags += unwanted


def _lags(admin: Admin, known: Iterable[GroupSubscriptions]) -> list[GroupLag]:
    found = []
    for one in known:
        by_topic: dict[str, list[QueueLag]] = defaultdict(list)
        for item in admin.lag(one.group):
            by_topic[item.queue.topic].append(item)
        for topic, items in sorted(by_topic.items()):
            counts = [item.matching for item in items if item.lag]
            is_exact = None not in counts
            matching = sum(count or 0 for count in counts) if is_exact else None
            found.append(GroupLag(
                one.group, topic, sum(item.lag for item in items), matching,
                sum(item.messages_at_risk for item in items), one.is_online,
            ))  # fmt: skip
    return sorted(found, key=lambda item: (-item.lag, item.group, item.topic))


def _topics_of(known: Iterable[GroupSubscriptions], lags: Iterable[GroupLag]) -> list[str]:
    """Topics that somebody reads, or has read."""
    names = {topic for one in known for topic in one.topics} | {one.topic for one in lags}
    return sorted(name for name in names if not name.startswith((RETRY_PREFIX, "%DLQ%")))


def _is_readable(admin: Admin, topic: str) -> bool:
    try:
        return bool(admin.queues(topic))
    except RouteNotFoundError:
        return False


def _readers(
    admin: Admin, topic: str, known: Sequence[GroupSubscriptions]
) -> list[GroupSubscriptions]:
    """Groups that subscribe the topic, or have offsets in it."""
    try:
        names = set(admin.groups_of_topic(topic))
    except SluiceError:
        names = set()
    return [one for one in known if one.group in names or topic in one.topics]


def _say_unknown(found: Audit, known: Iterable[GroupSubscriptions]) -> None:
    for one in known:
        mute = sorted(client_id for client_id, said in one.members.items() if said is None)
        if mute:
            found.not_known.append(
                f"what {', '.join(mute)} of {one.group} subscribe: no answer; the brokers' view of "
                "the group stands for them."
            )
    inexact = sorted({one.group for one in found.lag if one.matching is None})
    if inexact:
        found.not_known.append(
            f"how much of the lag of {', '.join(inexact)} matches: a RocketMQ broker does not "
            "count, and of a group that is away tags are not remembered."
        )


# ------------------------------------------------------------------------- the ready pipeline


def _run(task: Task) -> Report:
    options = task.options
    found = audit(
        task.spark, task.connection, topics=options["topics"], groups=options["groups"],
        recent_s=options["recent"], say=task.say, stopping=task.stopping,
    )  # fmt: skip
    report = Report(found.figures, [], found.lines(options["rows"]))
    report.is_failure = options["fail_on_findings"] and report.figures["findings"] > 0
    if options["output"]:
        text = json.dumps(found.record(), indent=1, ensure_ascii=False)
        replace_text(SYSTEM_FILES, str(Path(options["output"]).absolute()), text + "\n")
        report.files.append(options["output"])
    for line in report.lines:
        task.say(line)
    return report


def _plan(task: Task) -> list[str]:
    options = task.options
    with open_admin(parse_options(task.connection)) as admin:
        groups = options["groups"] or known_groups(admin)
    lines = [
        f"ask brokers and members of {len(groups)} groups",
        f"read tags (properties too, where a filter is SQL92) of "
        f"{', '.join(options['topics']) or 'their topics'}, the last {options['recent']:,.0f} s",
    ]
    return [*lines, f"write {options['output']}"] if options["output"] else lines


AUDIT: Final = Ready(
    "audit",
    "Unequal subscriptions, lag, tags that nobody takes, hash collisions, failing filters.",
    (
        Field("topics", LIST, "Only these topics; without, all that a group reads.", ()),
        Field("groups", LIST, "Only these groups; without, all.", ()),
        Field("recent", DURATION, "Messages of the last time are looked at.", 86_400.0),
        Field("output", TEXT, "A JSON file for the findings.", None),
        Field("rows", INTEGER, "Rows shown of each table.", 20),
        Field("fail_on_findings", FLAG, "Exit code 1 when something is found.", False),
    ),
    _plan,
    _run,
)
