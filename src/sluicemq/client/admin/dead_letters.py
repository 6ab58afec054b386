"""Dead letters: why messages of a group failed, and sending them again, edited or not.

The console and the dead-letters pipeline share this module.

A dead letter's properties say which topic it comes from (RETRY_TOPIC) and its message id there
(ORIGIN_MESSAGE_ID). RocketMQ's format does not contain why it failed. The reason is therefore taken
from the message itself: from the first property whose name looks like an error, with all numbers
replaced by #, or else from a body that is not UTF-8, or that looks like JSON and is not. Dead
letters with the same origin topic and the same reason form a cluster.

The message that replaces a dead letter in a replay has an id that follows from the dead letter's
place in its queue. A dead letter that is sent twice, by whatever tool and edited or not, is
therefore one message for consumers that process each message id once.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from sluicemq.client.admin.diagnose.message_rules import verdict_on
from sluicemq.client.admin.messages import read_range
from sluicemq.client.admin.subscriptions import GroupSubscriptions
from sluicemq.client.admin.subscriptions import subscriptions as group_subscriptions
from sluicemq.client.admin.topics import offset_by_time, offsets, queues
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX, add_properties
from sluicemq.client.core.names import (
    check_keys,
    check_properties,
    check_tag,
    check_topic_to_send,
)
from sluicemq.client.core.requests import SendResult
from sluicemq.client.core.sending import Sender
from sluicemq.errors import ConfigurationError, RouteNotFoundError, SluiceError
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.ids import Host, make_unique_id
from sluicemq.model.message import (
    KEYS,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    Message,
    StoredMessage,
)
from sluicemq.model.properties import settable_properties
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, MessageQueue

NO_REASON: Final = "no hint in the message"
NOT_UTF8: Final = "the body is not UTF-8"
NOT_JSON: Final = "the body is not JSON"
ORIGIN_TOPICS: Final = (RETRY_TOPIC, "DLQ_ORIGIN_TOPIC")
"""The properties that may contain the origin topic; the second is that of popped messages."""
ORIGIN_IDS: Final = (ORIGIN_MESSAGE_ID, "DLQ_ORIGIN_MESSAGE_ID")
"""The properties that may contain the message id in the origin topic."""
MATCHES = "matches"
UNCHECKED = "unchecked"
FILTERED = "filtered"
INVALID = "invalid"
SENDABLE: Final = (MATCHES, UNCHECKED)
"""The verdicts with which a message is sent."""
ORIGIN = "origin"
RETRY = "retry"
COUNT_MAX: Final = 2_000
"""The default number of newest dead letters that are read."""
BYTES_MAX: Final = 64 << 20
"""The default limit of the bodies that are read."""
EXAMPLES_MAX: Final = 3
CHANGES_SHOWN: Final = 3
AROUND_BYTES: Final = 40
_PAGE: Final = 32
_ERROR_NAME: Final = re.compile("exception|error|cause|reason|fail|stack", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"\b0x[0-9a-fA-F]+|[0-9a-fA-F-]{16,}|[0-9]+")
_REASON_MAX: Final = 100
_NO_HOST: Final = Host("0.0.0.0", 0)
_NAMED: Final = (TAGS, KEYS, SHARDING_KEY)
Verdict = tuple[str, str]
"""One of MATCHES, UNCHECKED, FILTERED and INVALID, and the reason for it ("" if it matches)."""


# ---------------------------------------------------------------------- reasons and clusters


def failure_reason(properties: Mapping[str, str], body: bytes) -> str:
    """Return why a message failed, as far as its own properties and its body show it.

    Return `NO_REASON` if they do not.
    """
    for name in sorted(properties):
        if properties[name] and _ERROR_NAME.search(name):
            first_line = properties[name].partition("\n")[0][: 4 * _REASON_MAX]
            text = _NUMBERS.sub("#", " ".join(first_line.split()))
            return f"{name}: {text[:_REASON_MAX]}"
    try:
        body.decode()
    except UnicodeDecodeError:
        return NOT_UTF8
    if body.lstrip()[:1] not in (b"{", b"["):
        return NO_REASON
    try:
        orjson.loads(body)
    except ValueError:
        return NOT_JSON
    return NO_REASON


def undecodable_reason(error: str) -> str:
    """Return why a message failed whose body cannot be decoded because of `error`."""
    return f"body: {error}"


def origin_of(dead_letter: StoredMessage, names: Iterable[str] = ORIGIN_TOPICS) -> str:
    """Return the topic from which a dead letter comes, "" if its properties do not say it.

    With `ORIGIN_IDS` as `names`, return its message id there instead.
    """
    properties = dead_letter.properties
    return next((properties[name] for name in names if properties.get(name)), "")


def cluster_key(dead_letter: StoredMessage) -> tuple[str, str]:
    """Return the origin topic and the failure reason of a dead letter, which name its cluster."""
    origin = origin_of(dead_letter)
    error = dead_letter.body_error
    if error is not None:
        return origin, undecodable_reason(error.reason)
    return origin, failure_reason(settable_properties(dead_letter.properties), dead_letter.body)


@dataclass(slots=True)
class DeadLetterCluster:
    """Dead letters with the same origin topic and the same failure reason.

    `first_ms` and `last_ms` are the times at which the oldest and the newest were stored, in
    milliseconds since 1970. `retries` is the highest number of retries. `examples` are the newest
    dead letters of the cluster.
    """

    origin: str
    reason: str
    messages: int = 0
    first_ms: int = 0
    last_ms: int = 0
    retries: int = 0
    examples: list[StoredMessage] = field(default_factory=list)


def cluster_dead_letters(dead_letters: Iterable[StoredMessage]) -> list[DeadLetterCluster]:
    """Return the clusters of dead letters, the largest first. The newest must come first."""
    found: dict[tuple[str, str], DeadLetterCluster] = {}
    for message in dead_letters:
        key = cluster_key(message)
        time_ms = message.store_time_ms
        cluster = found.setdefault(key, DeadLetterCluster(*key, first_ms=time_ms, last_ms=time_ms))
        cluster.messages += 1
        cluster.first_ms = min(cluster.first_ms, time_ms)
        cluster.last_ms = max(cluster.last_ms, time_ms)
        cluster.retries = max(cluster.retries, message.reconsume_times)
        if len(cluster.examples) < EXAMPLES_MAX:
            cluster.examples.append(message)
    return sorted(found.values(), key=lambda one: (-one.messages, one.origin, one.reason))


# ---------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class NewestDeadLetters:
    """The newest dead letters of a group, the newest first.

    `stored` is the number of all dead letters in the range of time. `older_ms` is a time at which
    reading can go on: dead letters that were not read are not younger. It is None if all were read.
    """

    messages: list[StoredMessage]
    stored: int
    older_ms: int | None


def no_dead_letters(group: str) -> RouteNotFoundError:
    """Return the error for a group that has no dead-letter topic."""
    topic = DLQ_PREFIX + group
    return RouteNotFoundError(
        f"the group {group!r} has no dead letters: the topic {topic!r} does not exist.",
        fix="Check the name. The topic is created with the first dead letter of a group.",
    )


def dead_letters(
    directory: Directory,
    group: str,
    *,
    until_ms: int | None = None,
    count_max: int = COUNT_MAX,
    bytes_max: int = BYTES_MAX,
) -> Conversation[NewestDeadLetters]:
    """Return the newest dead letters of a group, or the newest that were stored until `until_ms`.

    About `count_max` are read, with `bytes_max` bytes of bodies, both shared evenly by the queues.
    Raises RouteNotFoundError if the group has no dead letters, ConfigurationError if its
    dead-letter topic is not readable.
    """
    topic = DLQ_PREFIX + group
    try:
        readable = yield from queues(directory, topic)
    except RouteNotFoundError:
        raise no_dead_letters(group) from None
    if not readable:
        raise ConfigurationError(
            f"the topic {topic!r} is not readable.", fix="Give it read permission."
        )
    found: list[StoredMessage] = []
    stored = 0
    oldest_ms = []
    for queue in readable:
        low, high = yield from offsets(directory, queue)
        if until_ms is not None:
            # RocketMQ 4 returns the last message before a time, not the first after it.
            behind = yield from offset_by_time(directory, queue, until_ms + 1)
            high = min(high, behind + 1)
        begin = max(low, high - max(1, count_max // len(readable)))
        own, later, first = yield from _read_newest(
            directory, queue, (begin, high), until_ms, bytes_max // len(readable)
        )
        stored += max(0, high - low) - later
        if own and first > low:
            oldest_ms.append(own[-1].store_time_ms)
        found += own
    found.sort(key=lambda one: (-one.store_time_ms, one.broker, one.queue_id, -one.queue_offset))
    return NewestDeadLetters(found, stored, max(oldest_ms, default=None))


def _read_newest(
    directory: Directory,
    queue: MessageQueue,
    offset_range: tuple[int, int],
    until_ms: int | None,
    bytes_max: int,
) -> Conversation[tuple[list[StoredMessage], int, int]]:
    """Read the messages [begin, end) of a queue backwards, until `bytes_max` bytes are read.

    Returns (messages stored until `until_ms`, newest first; number of later messages; first offset
    that was read).
    """
    begin, end = offset_range
    own: list[StoredMessage] = []
    size = later = 0
    while end > begin and size < bytes_max:
        page: list[StoredMessage] = []

        def take(messages: list[StoredMessage], page: list[StoredMessage] = page) -> bool:
            page += messages
            return True

        low = max(begin, end - _PAGE)
        yield from read_range(directory, queue, low, end, take)
        wanted = [one for one in page if until_ms is None or one.store_time_ms <= until_ms]
        own += reversed(wanted)
        later += len(page) - len(wanted)
        size += sum(len(one.raw_body) for one in page)
        end = low
    return own, later, end


# --------------------------------------------------------------------------- edits and replays


@dataclass(frozen=True, slots=True)
class DeadLetterEdit:
    """What to change in dead letters before they are sent again.

    `find` is replaced by `replacement` in bodies. `properties` are set, or removed if the value is
    None; TAGS, KEYS and __SHARDINGKEY can be changed, too. `to` is "origin" for the topic of each
    message, from which all its groups receive it; "retry" for the retry topic of the group, from
    which only this group receives it; or a topic.
    """

    find: bytes = b""
    replacement: bytes = b""
    properties: Mapping[str, str | None] = field(default_factory=dict)
    to: str = ORIGIN


@dataclass(frozen=True, slots=True)
class DeadLetterReplay:
    """A dead letter, and the message that is sent in its place.

    Filters of consumers see the message as one of the topic `read_as`. `system_properties` are
    properties that applications may not set.
    """

    dead_letter: StoredMessage
    message: Message
    message_id: str
    read_as: str
    system_properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """The argument of `ReplayJudge.verdict`."""
        message = self.message
        return {
            "target": message.topic,
            "read_as": self.read_as,
            "tags": message.tag,
            "keys": " ".join(message.keys),
            "properties": message.properties,
            "new_id": self.message_id,
            "size": len(message.body),
            "body_error": str(self.dead_letter.body_error or ""),
        }


def replay_id(topic: str, broker: str, queue_id: int, queue_offset: int, stored_ms: int) -> str:
    """Return the id of the message that is sent in place of the dead letter at this place.

    The same place has always the same id. It has the form of ids that producers make.
    """
    queue = hashlib.sha256(f"{topic} {broker} {queue_id}".encode()).hexdigest()
    return make_unique_id(queue, stored_ms, queue_offset)


def editable_properties(dead_letter: StoredMessage) -> dict[str, str]:
    """Return the properties that an edit may change.

    They are the producer's own properties, and TAGS, KEYS and __SHARDINGKEY if they are set.
    """
    properties = dead_letter.properties
    named = {name: properties[name] for name in _NAMED if properties.get(name)}
    return named | settable_properties(properties)


def prepare_replay(
    dead_letter: StoredMessage, edit: DeadLetterEdit, group: str
) -> DeadLetterReplay:
    """Return the replay of a dead letter of `group` with the changes of `edit`.

    A body that cannot be decoded stays as it is stored. `ReplayJudge` rejects such messages.
    """
    origin = origin_of(dead_letter)
    body = dead_letter.body_or_raw
    target = {ORIGIN: origin, RETRY: RETRY_PREFIX + group}.get(edit.to, edit.to)
    changed = {**editable_properties(dead_letter), **edit.properties}
    properties = {name: text for name, text in changed.items() if text}
    tag, keys, sharding_key = (properties.pop(name, "") for name in _NAMED)
    message = Message(
        target,
        body.replace(edit.find, edit.replacement) if edit.find else body,
        tag or None,
        tuple(keys.split()),
        properties,
        dead_letter.flag,
        sharding_key=sharding_key or None,
    )
    message_id = replay_id(
        dead_letter.topic,
        dead_letter.broker,
        dead_letter.queue_id,
        dead_letter.queue_offset,
        dead_letter.store_time_ms,
    )
    system_properties = {}
    if target.startswith(RETRY_PREFIX):
        origin_id = origin_of(dead_letter, ORIGIN_IDS) or dead_letter.message_id
        system_properties = {RETRY_TOPIC: origin, ORIGIN_MESSAGE_ID: origin_id}
    read_as = origin if edit.to == RETRY else target
    return DeadLetterReplay(dead_letter, message, message_id, read_as, system_properties)


def send_replay(sender: Sender, replay: DeadLetterReplay) -> Conversation[SendResult]:
    """Send the message of a replay under its own id. Raises the errors of a send."""
    outgoing = sender.make_outgoing(replay.message, replay.message_id)
    if replay.system_properties:
        outgoing = add_properties(outgoing, replay.system_properties, "a retry")
    return (yield from sender.send_outgoing(outgoing))


def body_changes(body: bytes, edit: DeadLetterEdit) -> Iterator[tuple[str, str]]:
    """Yield what an edit changes in a body, with some bytes around each change.

    Yields ("same", text), ("gone", text) and ("new", text) for the first `CHANGES_SHOWN` changes,
    and nothing if the body stays the same.
    """
    end = 0
    position = body.find(edit.find) if edit.find else -1
    for _ in range(CHANGES_SHOWN):
        if position < 0:
            break
        begin = max(end, position - AROUND_BYTES)
        before = body[begin:position].decode(errors="replace")
        yield "same", ("…" if begin > end else "") + before
        yield "gone", edit.find.decode(errors="replace")
        yield "new", edit.replacement.decode(errors="replace")
        end = position + len(edit.find)
        position = body.find(edit.find, end)
    if end:
        after = body[end : end + AROUND_BYTES].decode(errors="replace")
        yield "same", after + ("…" if len(body) > end + AROUND_BYTES else "")


def property_changes(
    dead_letter: StoredMessage, edit: DeadLetterEdit
) -> list[tuple[str, str, str]]:
    """Return (name, old value, new value) of each property that an edit changes.

    The value of a missing property is "".
    """
    before = editable_properties(dead_letter)
    return [
        (name, before.get(name, ""), value or "")
        for name, value in sorted(edit.properties.items())
        if before.get(name, "") != (value or "")
    ]


# --------------------------------------------------------------------------------- verdicts


def known_subscriptions(
    found: GroupSubscriptions, topics: Iterable[str]
) -> dict[str, tuple[Subscription, ...]] | None:
    """Return topic -> all subscriptions of a group, None if they are unknown.

    The tags of each subscription follow from its expression: brokers do not report them.
    """
    if not found.is_online and not found.remembered:
        return None
    return {
        topic: tuple(
            parse_subscription(topic, one.expression, one.kind) for one in found.all_of(topic)
        )
        for topic in topics
    }


def dead_letter_judge(
    directory: Directory,
    group: str,
    targets: Iterable[str],
    topics: Iterable[str],
    subscriptions: Mapping[str, tuple[Subscription, ...]] | None = None,
) -> Conversation["ReplayJudge"]:
    """Return the judge of messages of a group that will be sent to `targets`.

    The judge knows which of `targets` do not exist. `subscriptions` by topic are those to judge by;
    None means the present subscriptions of the group to `topics`.
    """
    missing = set()
    for target in sorted(targets):
        if (yield from directory.fetch_route(target)) is None:
            missing.add(target)
    if subscriptions is None:
        found = yield from group_subscriptions(directory, group)
        subscriptions = known_subscriptions(found, topics)
    return ReplayJudge(subscriptions, frozenset(missing))


@dataclass(frozen=True, slots=True)
class ReplayJudge:
    """Decides whether messages can be sent, and whether a group would receive them.

    `subscriptions` are those of the group by topic, None if they are unknown. `missing_topics` do
    not exist.
    """

    subscriptions: Mapping[str, tuple[Subscription, ...]] | None
    missing_topics: frozenset[str] = frozenset()

    def verdict(self, row: Mapping[str, Any]) -> Verdict:
        """Return the verdict on a message, which `DeadLetterReplay.row` describes.

        The verdict is INVALID for a message that no broker would accept, FILTERED for one that the
        filter of any member does not match, UNCHECKED if the subscriptions are unknown, and MATCHES
        otherwise. Never raises a SluiceError.
        """
        try:
            self._check(row)
        except SluiceError as error:
            return INVALID, str(error)
        if self.subscriptions is None:
            return UNCHECKED, "no member of the group is online, and its filter is unknown"
        wanted = self.subscriptions.get(row["read_as"], ())
        if not wanted:
            return FILTERED, f"the group does not subscribe to {row['read_as']!r}"

        message = _as_filters_see_it(row)
        for subscription in wanted:
            _, finding = verdict_on(message, subscription)
            if finding is not None:
                return FILTERED, finding.what
        return MATCHES, ""

    def _check(self, row: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if no broker would accept the message."""
        target = row["target"]
        size = row["size"] or 0
        if not target:
            raise ConfigurationError("its origin topic is unknown.", fix="Set its topic.")
        if row.get("body_error"):
            raise ConfigurationError(
                f"its body cannot be sent. {row['body_error']}",
                fix="Read it from the dead letters with a consumer that can decode it.",
            )
        check_topic_to_send(target)
        if target in self.missing_topics:
            raise ConfigurationError(f"the topic {target!r} does not exist.", fix="Create it.")
        if not 1 <= size <= BODY_BYTES_MAX:
            raise ConfigurationError(
                f"the body has {size:,} bytes, but must have 1 to {BODY_BYTES_MAX:,}.",
                fix="Edit the body.",
            )
        if row["tags"]:
            check_tag(row["tags"])
        check_keys(tuple((row["keys"] or "").split()))
        check_properties(row["properties"])
        total = sum(len(f"{name}{text}".encode()) + 2 for name, text in row["properties"].items())
        if total > PROPERTIES_BYTES_MAX:
            raise ConfigurationError(
                f"the properties have {total:,} bytes, but may have {PROPERTIES_BYTES_MAX:,}.",
                fix="Remove or shorten properties.",
            )


def _as_filters_see_it(row: Mapping[str, Any]) -> StoredMessage:
    """Return a message with the properties that filters read; its other fields are empty."""
    named = {TAGS: row["tags"], KEYS: row["keys"], UNIQ_KEY: row["new_id"], "WAIT": "true"}
    properties = {**row["properties"], **{name: text for name, text in named.items() if text}}
    return StoredMessage(
        topic=row["read_as"],
        queue_id=0,
        queue_offset=0,
        physical_offset=0,
        size_bytes=0,
        raw_body=b"",
        properties=properties,
        flag=0,
        sys_flag=0,
        born_time_ms=0,
        born_host=_NO_HOST,
        store_time_ms=0,
        store_host=_NO_HOST,
        reconsume_times=0,
        prepared_offset=0,
        body_crc=0,
    )
