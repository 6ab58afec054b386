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
    """Guess why consumers failed on a message, from its properties and its body.

    The first property, by name, that looks like an error (`exception`, `error_message`) gives
    `"name: first line of its value"`, shortened, with each number replaced by `#`. Without one the
    result is `NOT_UTF8` if the body is not UTF-8, `NOT_JSON` if it begins like JSON and is not, and
    otherwise `NO_REASON`.
    """
    for name in sorted(properties):
        if properties[name] and _ERROR_NAME.search(name):
            first_line = properties[name].partition("\n")[0][: 4 * _REASON_MAX]
            error = _NUMBERS.sub("#", " ".join(first_line.split()))
            return f"{name}: {error[:_REASON_MAX]}"
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
    """Return the topic that a dead letter was sent to, or "" if its properties do not contain it.

    `names` are the properties to look up; the first that is not empty counts. Pass `ORIGIN_IDS` to
    get the id of the original message instead of its topic.
    """
    for name in names:
        if dead_letter.properties.get(name):
            return dead_letter.properties[name]
    return ""


def cluster_key(dead_letter: StoredMessage) -> tuple[str, str]:
    """Return (origin topic, failure reason) of a dead letter.

    Dead letters with the same pair belong to the same cluster. The origin topic is "" if it is
    unknown.
    """
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
    """Group dead letters by origin topic and failure reason, and return the largest cluster first.

    `dead_letters` must begin with the newest, because each cluster keeps its first `EXAMPLES_MAX`
    messages as examples.
    """
    clusters_by_key: dict[tuple[str, str], DeadLetterCluster] = {}
    for message in dead_letters:
        key = cluster_key(message)
        time_ms = message.store_time_ms
        cluster = clusters_by_key.setdefault(
            key, DeadLetterCluster(*key, first_ms=time_ms, last_ms=time_ms)
        )
        cluster.messages += 1
        cluster.first_ms = min(cluster.first_ms, time_ms)
        cluster.last_ms = max(cluster.last_ms, time_ms)
        cluster.retries = max(cluster.retries, message.reconsume_times)
        if len(cluster.examples) < EXAMPLES_MAX:
            cluster.examples.append(message)
    return sorted(
        clusters_by_key.values(),
        key=lambda cluster: (-cluster.messages, cluster.origin, cluster.reason),
    )


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
    """Return the newest dead letters of a group, the newest first.

    With `until_ms`, only dead letters that were stored at this time or earlier are returned. About
    `count_max` messages, or messages with about `bytes_max` bytes of bodies, are read. Each queue
    may use an equal share of both limits.

    Raises RouteNotFoundError if the group has no dead letters, ConfigurationError if its
    dead-letter topic is not readable.
    """
    dead_letter_queues = yield from _find_queues(directory, group)
    count_per_queue = max(1, count_max // len(dead_letter_queues))
    bytes_per_queue = bytes_max // len(dead_letter_queues)
    newest: list[StoredMessage] = []
    stored = 0
    older_times_ms: list[int] = []  # of each queue that has older dead letters than were read
    for queue in dead_letter_queues:
        newest_in_queue = yield from _read_queue(
            directory, queue, until_ms, count_per_queue, bytes_per_queue
        )
        newest += newest_in_queue.messages
        stored += newest_in_queue.stored
        if newest_in_queue.older_ms is not None:
            older_times_ms.append(newest_in_queue.older_ms)
    newest.sort(key=_newest_first)
    return NewestDeadLetters(newest, stored, max(older_times_ms, default=None))


def _newest_first(message: StoredMessage) -> tuple[int, str, int, int]:
    """Return what dead letters are sorted by: the newest come first."""
    return -message.store_time_ms, message.broker, message.queue_id, -message.queue_offset


def _find_queues(directory: Directory, group: str) -> Conversation[list[MessageQueue]]:
    """Return the readable queues of a group's dead-letter topic, at least one.

    Raises RouteNotFoundError if the topic does not exist, ConfigurationError if none of its queues
    is readable.
    """
    topic = DLQ_PREFIX + group
    try:
        readable_queues = yield from queues(directory, topic)
    except RouteNotFoundError:
        raise no_dead_letters(group) from None
    if not readable_queues:
        raise ConfigurationError(
            f"the topic {topic!r} is not readable.", fix="Give it read permission."
        )
    return readable_queues


def _read_queue(
    directory: Directory,
    queue: MessageQueue,
    until_ms: int | None,
    count_max: int,
    bytes_max: int,
) -> Conversation[NewestDeadLetters]:
    """Return the newest dead letters of one queue, at most about `count_max` or `bytes_max` bytes.

    The result also has the number of stored dead letters up to `until_ms` (None means all), and the
    time of the oldest one that was read if there are older ones.
    """
    start, end = yield from offsets(directory, queue)
    if until_ms is not None:
        # RocketMQ 4 returns the last message before a time, not the first after it.
        offset_behind = yield from offset_by_time(directory, queue, until_ms + 1)
        end = min(end, offset_behind + 1)
    offset_range = max(start, end - count_max), end
    newest, later_count, first_read_offset = yield from _read_newest(
        directory, queue, offset_range, until_ms, bytes_max
    )
    stored = max(0, end - start) - later_count
    has_older = bool(newest) and first_read_offset > start
    return NewestDeadLetters(newest, stored, newest[-1].store_time_ms if has_older else None)


def _read_newest(
    directory: Directory,
    queue: MessageQueue,
    offset_range: tuple[int, int],
    until_ms: int | None,
    bytes_max: int,
) -> Conversation[tuple[list[StoredMessage], int, int]]:
    """Read a range of a queue backwards, page by page, until about `bytes_max` bytes are read.

    `offset_range` is (first offset, offset after the last). Returns (messages that were stored at
    `until_ms` or earlier, the newest first; number of messages that were stored later; lowest
    offset that was read).
    """
    begin, end = offset_range
    newest: list[StoredMessage] = []
    later_count = 0
    bytes_read = 0
    while end > begin and bytes_read < bytes_max:
        page: list[StoredMessage] = []

        # The default argument binds the page of this round.
        def take(messages: list[StoredMessage], page: list[StoredMessage] = page) -> bool:
            page += messages
            return True

        page_start = max(begin, end - _PAGE)
        yield from read_range(directory, queue, page_start, end, take)
        end = page_start
        for message in reversed(page):
            bytes_read += len(message.raw_body)
            if until_ms is None or message.store_time_ms <= until_ms:
                newest.append(message)
            else:
                later_count += 1
    return newest, later_count, end


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
        """The replay as a dictionary, which is what `ReplayJudge.verdict` takes.

        `target` is the topic to which the message is sent, and `read_as` the topic whose
        subscription decides whether the group receives it. `size` is the number of bytes of the
        body. `body_error` is "" if the body could be decoded.
        """
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
    """Return the message that replays a dead letter of `group`, with the changes of `edit`.

    `edit.to` is the target: `ORIGIN` means the topic of the original message, `RETRY` the retry
    topic of the group, any other text a topic. The message id of the replay depends only on the
    dead letter, so two replays have the same id. A body that cannot be decoded is sent as it is
    stored; `ReplayJudge` rejects such a message.
    """
    origin = origin_of(dead_letter)
    if edit.to == ORIGIN:
        target = origin
    elif edit.to == RETRY:
        target = RETRY_PREFIX + group
    else:
        target = edit.to
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
    return DeadLetterReplay(
        dead_letter,
        _edit_message(dead_letter, edit, target),
        message_id,
        read_as=origin if edit.to == RETRY else target,
        system_properties=system_properties,
    )


def _edit_message(dead_letter: StoredMessage, edit: DeadLetterEdit, target: str) -> Message:
    """Return a new message for the topic `target`: the dead letter with the changes of `edit`.

    Every occurrence of `edit.find` in the body is replaced. A property with an empty value in
    `edit.properties` is removed.
    """
    body = dead_letter.body_or_raw
    if edit.find:
        body = body.replace(edit.find, edit.replacement)
    edited_properties = {**editable_properties(dead_letter), **edit.properties}
    properties = {
        name: property_value for name, property_value in edited_properties.items() if property_value
    }
    # The message has attributes for these properties.
    tag = properties.pop(TAGS, None)
    keys = properties.pop(KEYS, "")
    sharding_key = properties.pop(SHARDING_KEY, None)
    return Message(
        target,
        body,
        tag,
        tuple(keys.split()),
        properties,
        dead_letter.flag,
        sharding_key=sharding_key,
    )


def send_replay(sender: Sender, replay: DeadLetterReplay) -> Conversation[SendResult]:
    """Send the message of a replay with the replay's message id, and return the result of the send.

    For a retry topic, the topic and id of the original message are added as properties. Raises the
    errors of a send.
    """
    outgoing = sender.make_outgoing(replay.message, replay.message_id)
    if replay.system_properties:
        outgoing = add_properties(outgoing, replay.system_properties, "a retry")
    return (yield from sender.send_outgoing(outgoing))


def body_changes(body: bytes, edit: DeadLetterEdit) -> Iterator[tuple[str, str]]:
    """Yield the parts of a body that an edit changes, each with a few bytes of context.

    Yields pairs: ("same", text) for context, ("gone", text) for replaced bytes and ("new", text)
    for their replacement. "…" stands for context that is left out. Only the first `CHANGES_SHOWN`
    changes are yielded. Nothing is yielded if the body does not change.
    """
    last_end = 0  # the end of the last change
    position = body.find(edit.find) if edit.find else -1
    for _ in range(CHANGES_SHOWN):
        if position < 0:
            break
        context_start = max(last_end, position - AROUND_BYTES)
        before = body[context_start:position].decode(errors="replace")
        yield "same", f"…{before}" if context_start > last_end else before
        yield "gone", edit.find.decode(errors="replace")
        yield "new", edit.replacement.decode(errors="replace")
        last_end = position + len(edit.find)
        position = body.find(edit.find, last_end)

    if last_end:
        context_end = last_end + AROUND_BYTES
        after = body[last_end:context_end].decode(errors="replace")
        yield "same", f"{after}…" if len(body) > context_end else after


def property_changes(
    dead_letter: StoredMessage, edit: DeadLetterEdit
) -> list[tuple[str, str, str]]:
    """Return (name, old value, new value) of each property that an edit changes, sorted by name.

    "" means that the property is missing, before or after the edit.
    """
    present_properties = editable_properties(dead_letter)
    changes = []
    for name, edited_value in sorted(edit.properties.items()):
        old_value = present_properties.get(name, "")
        new_value = edited_value or ""
        if old_value != new_value:
            changes.append((name, old_value, new_value))
    return changes


# --------------------------------------------------------------------------------- verdicts


def known_subscriptions(
    group_state: GroupSubscriptions, topics: Iterable[str]
) -> dict[str, tuple[Subscription, ...]] | None:
    """Return topic -> every different subscription of the group to the topic.

    The result is None if the subscriptions are unknown, because no member is online and no broker
    remembers them. Brokers report expressions without parsed tags, so each expression is parsed
    here.
    """
    if not group_state.is_online and not group_state.remembered:
        return None
    parsed_by_topic = {}
    for topic in topics:
        parsed_by_topic[topic] = tuple(
            parse_subscription(topic, subscription.expression, subscription.kind)
            for subscription in group_state.all_of(topic)
        )
    return parsed_by_topic


def dead_letter_judge(
    directory: Directory,
    group: str,
    targets: Iterable[str],
    topics: Iterable[str],
    subscriptions: Mapping[str, tuple[Subscription, ...]] | None = None,
) -> Conversation["ReplayJudge"]:
    """Return a judge of messages that will be sent to `targets` for a group.

    The judge says whether the group would receive them. It knows which of the topics `targets` do
    not exist. `subscriptions` maps topics to the filters to judge by; None means the group's
    present subscriptions to `topics`.
    """
    missing = set()
    for target in sorted(targets):
        if (yield from directory.fetch_route(target)) is None:
            missing.add(target)
    if subscriptions is None:
        group_state = yield from group_subscriptions(directory, group)
        subscriptions = known_subscriptions(group_state, topics)
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
        """Judge whether the group would receive a replayed message, which `row` describes.

        `row` has the keys of `DeadLetterReplay.row`. Returns (verdict, reason). The verdict is
        INVALID if no broker would accept the message, UNCHECKED if the subscriptions of the group
        are unknown, FILTERED if the filter of at least one member does not match the message, and
        otherwise MATCHES, whose reason is "". Never raises a SluiceError.
        """
        try:
            self._check(row)
        except SluiceError as error:
            return INVALID, str(error)
        if self.subscriptions is None:
            return UNCHECKED, "no member of the group is online, and its filter is unknown"
        subscriptions = self.subscriptions.get(row["read_as"], ())
        if not subscriptions:
            return FILTERED, f"the group does not subscribe to {row['read_as']!r}"

        message = _make_message_for_filter(row)
        for subscription in subscriptions:
            _, finding = verdict_on(message, subscription)
            if finding is not None:
                return FILTERED, finding.what
        return MATCHES, ""

    def _check(self, row: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if no broker would accept the message that `row` describes.

        This is the case if the target is unknown or does not exist, or if the body, tag, keys or
        properties are invalid or too large.
        """
        target = row["target"]
        body_bytes = row["size"] or 0  # a row of a table may have no value
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
        if not 1 <= body_bytes <= BODY_BYTES_MAX:
            raise ConfigurationError(
                f"the body has {body_bytes:,} bytes, but must have 1 to {BODY_BYTES_MAX:,}.",
                fix="Edit the body.",
            )
        if row["tags"]:
            check_tag(row["tags"])
        check_keys(tuple((row["keys"] or "").split()))
        check_properties(row["properties"])
        _check_properties_size(row["properties"])


def _check_properties_size(properties: Mapping[str, str]) -> None:
    """Raise ConfigurationError if the encoded properties of a message would be too large."""
    # Two separators are sent with each property.
    properties_bytes = sum(len(f"{name}{text}".encode()) + 2 for name, text in properties.items())
    if properties_bytes > PROPERTIES_BYTES_MAX:
        raise ConfigurationError(
            f"the properties have {properties_bytes:,} bytes, but may have "
            f"{PROPERTIES_BYTES_MAX:,}.",
            fix="Remove or shorten properties.",
        )


def _make_message_for_filter(row: Mapping[str, Any]) -> StoredMessage:
    """Return a message with the topic and properties of `row`, to evaluate a filter on it.

    Filters read only properties, so the body is empty and the other fields are 0.
    """
    properties = dict(row["properties"])
    for name, column in ((TAGS, "tags"), (KEYS, "keys"), (UNIQ_KEY, "new_id")):
        if row[column]:
            properties[name] = row[column]
    properties["WAIT"] = "true"
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
