"""Dead letters: why a group gave up on them, what would become of them if they were sent now, and
what is sent in their place.

A letter says by its properties where it comes from (RETRY_TOPIC) and how it was called there
(ORIGIN_MESSAGE_ID); why it failed is nowhere in RocketMQ's format, so its cause is what the message
itself tells: the first property that is named like one, with numbers made equal, else a body that
is no text, or looks like JSON and is none. A cluster is an origin topic with a cause.

What is sent in a letter's place has an id that follows from the letter's place alone. So who sends
it twice, edited or not, by whatever tool, sends one message for all readers that know ids.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from sluicemq.client.admin.explain import GroupSubscriptions
from sluicemq.client.admin.messages import read_range
from sluicemq.client.admin.rules import verdict_on
from sluicemq.client.admin.topics import offset_by_time, offsets, queues
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX
from sluicemq.client.core.names import (
    check_keys,
    check_properties,
    check_tag,
    check_topic_to_send,
)
from sluicemq.errors import ConfigurationError, RouteNotFoundError, SluiceError
from sluicemq.filter.subscriptions import subscribe
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
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX

NO_HINT: Final = "no hint in the message"
NO_TEXT: Final = "the body is not UTF-8"
NO_JSON: Final = "the body is no JSON"
ORIGIN_TOPICS: Final = (RETRY_TOPIC, "DLQ_ORIGIN_TOPIC")
ORIGIN_IDS: Final = (ORIGIN_MESSAGE_ID, "DLQ_ORIGIN_MESSAGE_ID")
"""The properties that tell where a letter comes from; the second are those of POP."""
MATCHES, UNCHECKED, FILTERED, INVALID = "matches", "unchecked", "filtered", "invalid"
SENDABLE: Final = (MATCHES, UNCHECKED)
ORIGIN, RETRY = "origin", "retry"
LETTERS_MAX: Final = 2_000
LETTERS_BYTES_MAX: Final = 64 << 20
"""So many of the newest letters are looked at, and so many bytes of their bodies."""
EXAMPLES_MAX: Final = 3
_PAGE: Final = 32
_HINT: Final = re.compile("exception|error|cause|reason|fail|stack", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"\b0x[0-9a-fA-F]+|[0-9a-fA-F-]{16,}|[0-9]+")
_TEXT_MAX: Final = 100
_NOWHERE: Final = Host("0.0.0.0", 0)
_NAMED: Final = (TAGS, KEYS, SHARDING_KEY)


# ---- why


def cause_of(own: Mapping[str, str], body: bytes) -> str:
    """Why it died, as its own properties and its body tell."""
    for name in sorted(own):
        if own[name] and _HINT.search(name):
            first_line = " ".join(own[name].partition("\n")[0][: 4 * _TEXT_MAX].split())
            return f"{name}: {_NUMBERS.sub('#', first_line)[:_TEXT_MAX]}"
    try:
        body.decode()
    except UnicodeDecodeError:
        return NO_TEXT
    if body.lstrip()[:1] not in (b"{", b"["):
        return NO_HINT
    try:
        orjson.loads(body)
    except ValueError:
        return NO_JSON
    return NO_HINT


def undecodable_cause(reason: str) -> str:
    """Return the cause of a letter whose body cannot be decoded for `reason`."""
    return f"body: {reason}"


def origin_of(letter: StoredMessage, names: Iterable[str] = ORIGIN_TOPICS) -> str:
    """The topic it comes from, or by `ORIGIN_IDS` its id there; "" when it does not say."""
    return next((letter.properties[one] for one in names if letter.properties.get(one)), "")


@dataclass(slots=True)
class Cluster:
    """Letters of one origin with one cause. Times are ms since 1970; `examples` the newest."""

    origin: str
    cause: str
    messages: int = 0
    first_ms: int = 0
    last_ms: int = 0
    retries: int = 0
    examples: list[StoredMessage] = field(default_factory=list)


def kind_of(letter: StoredMessage) -> tuple[str, str]:
    """Origin topic and cause: which cluster it belongs to."""
    if (error := letter.body_error) is not None:
        return origin_of(letter), undecodable_cause(error.reason)
    return origin_of(letter), cause_of(settable_properties(letter.properties), letter.body)


def clusters(letters: Iterable[StoredMessage]) -> list[Cluster]:
    """Of letters, the newest first; the largest cluster first."""
    found: dict[tuple[str, str], Cluster] = {}
    for letter in letters:
        kind, time_ms = kind_of(letter), letter.store_time_ms
        one = found.setdefault(kind, Cluster(*kind, first_ms=time_ms, last_ms=time_ms))
        one.messages += 1
        one.first_ms, one.last_ms = min(one.first_ms, time_ms), max(one.last_ms, time_ms)
        one.retries = max(one.retries, letter.reconsume_times)
        if len(one.examples) < EXAMPLES_MAX:
            one.examples.append(letter)
    return sorted(found.values(), key=lambda one: (-one.messages, one.origin, one.cause))


@dataclass(frozen=True, slots=True)
class Letters:
    """The newest letters, the newest first, of so many that are stored. `older_ms`: what was not
    looked at is no younger; None when all was."""

    letters: list[StoredMessage]
    stored: int
    older_ms: int | None


def no_letters(group: str) -> RouteNotFoundError:
    """The error for a group without a topic of dead letters."""
    return RouteNotFoundError(
        f"the group {group!r} has no dead letters: there is no topic {DLQ_PREFIX + group!r}.",
        fix="A group gets one with its first dead letter.",
    )


def dead_letters(
    directory: Directory,
    group: str,
    *,
    until_ms: int | None = None,
    count_max: int = LETTERS_MAX,
    bytes_max: int = LETTERS_BYTES_MAX,
) -> Conversation[Letters]:
    """The newest letters of a group, or the newest that were stored until a time. Raises
    RouteNotFoundError when it has none, ConfigurationError when they may not be read."""
    topic = DLQ_PREFIX + group
    try:
        readable = yield from queues(directory, topic)
    except RouteNotFoundError:
        raise no_letters(group) from None
    if not readable:
        raise ConfigurationError(
            f"the topic {topic!r} may not be read.", fix="Give it the permission to read."
        )
    found: list[StoredMessage] = []
    stored, borders = 0, []
    for queue in readable:
        low, high = yield from offsets(directory, queue)
        if until_ms is not None:  # RocketMQ 4 tells the last one before that time
            behind = yield from offset_by_time(directory, queue, until_ms + 1)
            high = min(high, behind + 1)
        own: list[StoredMessage] = []
        end, last = high, max(low, high - max(1, count_max // len(readable)))
        size = later = 0
        while end > last and size < bytes_max // len(readable):
            page: list[StoredMessage] = []

            def take(messages: list[StoredMessage], page: list[StoredMessage] = page) -> bool:
                page += messages
                return True

            begin = max(last, end - _PAGE)
            yield from read_range(directory, queue, begin, end, take)
            wanted = [one for one in page if until_ms is None or one.store_time_ms <= until_ms]
            own += reversed(wanted)
            later += len(page) - len(wanted)
            end, size = begin, size + sum(len(one.raw_body) for one in page)
        stored += max(0, high - low) - later
        borders += [own[-1].store_time_ms] if own and end > low else []
        found += own
    found.sort(key=lambda one: (-one.store_time_ms, one.broker, one.queue_id, -one.queue_offset))
    return Letters(found, stored, max(borders, default=None))


# ---- what is sent in their place


@dataclass(frozen=True, slots=True)
class Edit:
    """What to change: `find` in bodies becomes `put`; `properties` set (None: taken away), TAGS,
    KEYS and __SHARDINGKEY among them. `to`: "origin" is the topic each comes from, for all its
    readers, "retry" the group's retry topic, for this group alone; or a topic."""

    find: bytes = b""
    put: bytes = b""
    properties: Mapping[str, str | None] = field(default_factory=dict)
    to: str = ORIGIN


@dataclass(frozen=True, slots=True)
class Replay:
    """A letter and the message that is sent in its place. Its readers' filters see it as one of
    the topic `read_as`; `system` are properties that no producer may set."""

    letter: StoredMessage
    message: Message
    message_id: str
    read_as: str
    system: Mapping[str, str] = field(default_factory=dict)

    @property
    def row(self) -> dict[str, Any]:
        """As a `Judge` takes it."""
        message = self.message
        return {
            "target": message.topic, "read_as": self.read_as, "tags": message.tag,
            "keys": " ".join(message.keys), "properties": message.properties,
            "new_id": self.message_id, "size": len(message.body),
            "body_error": str(self.letter.body_error or ""),
        }  # fmt: skip


def replay_id(topic: str, broker: str, queue_id: int, queue_offset: int, stored_ms: int) -> str:
    """The id of what is sent in place of a letter: always the same, and of its form."""
    place = hashlib.sha256(f"{topic} {broker} {queue_id}".encode()).hexdigest()
    return make_unique_id(place, stored_ms, queue_offset)


def named_properties(letter: StoredMessage) -> dict[str, str]:
    """What an edit may change: the producer's own, tag, keys and sharding key."""
    named = {name: letter.properties[name] for name in _NAMED if letter.properties.get(name)}
    return named | settable_properties(letter.properties)


def edited(letter: StoredMessage, edit: Edit, group: str) -> Replay:
    """The letter as it would be sent; a `Judge` lets none be sent whose body cannot be decoded."""
    origin, body = origin_of(letter), letter.body_or_raw
    target = {ORIGIN: origin, RETRY: RETRY_PREFIX + group}.get(edit.to, edit.to)
    all_of_them = {**named_properties(letter), **edit.properties}
    own = {name: text for name, text in all_of_them.items() if text}
    tag, keys, sharding_key = (own.pop(name, "") for name in _NAMED)
    message = Message(
        target,
        body.replace(edit.find, edit.put) if edit.find else body,
        tag or None,
        tuple(keys.split()),
        own,
        letter.flag,
        sharding_key=sharding_key or None,
    )
    place = letter.topic, letter.broker, letter.queue_id, letter.queue_offset
    system = {
        RETRY_TOPIC: origin, ORIGIN_MESSAGE_ID: origin_of(letter, ORIGIN_IDS) or letter.message_id
    }  # fmt: skip
    is_retry = target.startswith(RETRY_PREFIX)
    return Replay(
        letter, message, replay_id(*place, letter.store_time_ms),
        origin if edit.to == RETRY else target, system if is_retry else {},
    )  # fmt: skip


# ---- what becomes of it


def wanted_of(
    found: GroupSubscriptions, topics: Iterable[str]
) -> dict[str, tuple[Subscription, ...]] | None:
    """Topic -> what the group wants of it now, with the tags, which brokers do not tell; None when
    that is not known."""
    if not found.is_online and not found.kept:
        return None
    return {
        topic: tuple(subscribe(topic, one.expression, one.kind) for one in found.wanted(topic))
        for topic in topics
    }


@dataclass(frozen=True, slots=True)
class Judge:
    """What becomes of a message that is sent: `subscriptions` of the group by topic (None: not
    known), and the topics that are not there."""

    subscriptions: Mapping[str, tuple[Subscription, ...]] | None
    missing: frozenset[str] = frozenset()

    def verdict(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """(verdict, reason). Never raises a SluiceError."""
        try:
            self._check(row)
        except SluiceError as error:
            return INVALID, str(error)
        if self.subscriptions is None:
            return UNCHECKED, "no member of the group is online, and its filter is not known"
        wanted = self.subscriptions.get(row["read_as"], ())
        if not wanted:
            return FILTERED, f"the group does not subscribe to {row['read_as']!r}"
        named = {TAGS: row["tags"], KEYS: row["keys"], UNIQ_KEY: row["new_id"], "WAIT": "true"}
        properties = {**row["properties"], **{name: text for name, text in named.items() if text}}
        message = StoredMessage(  # as a filter will see it
            row["read_as"], 0, 0, 0, 0, b"", properties, 0, 0, 0, _NOWHERE, 0, _NOWHERE, 0, 0, 0
        )
        for said in wanted:
            _, finding = verdict_on(message, said)
            if finding is not None:
                return FILTERED, finding.what
        return MATCHES, ""

    def _check(self, row: Mapping[str, Any]) -> None:
        target, size = row["target"], row["size"]
        if not target:
            raise ConfigurationError("its origin topic is not known.", fix="Edit its topic.")
        if row.get("body_error"):
            raise ConfigurationError(
                f"its body cannot be sent. {row['body_error']}",
                fix="A consumer that can decode it may read it from the dead letters.",
            )
        check_topic_to_send(target)
        if target in self.missing:
            raise ConfigurationError(f"the topic {target!r} does not exist.", fix="Create it.")
        if not size or size > BODY_BYTES_MAX:
            raise ConfigurationError(
                f"the body has {size or 0:,} bytes.", fix=f"It takes 1 to {BODY_BYTES_MAX:,}."
            )
        if row["tags"]:
            check_tag(row["tags"])
        check_keys(tuple((row["keys"] or "").split()))
        check_properties(row["properties"])
        total = sum(len(f"{name}{text}".encode()) + 2 for name, text in row["properties"].items())
        if total > PROPERTIES_BYTES_MAX:
            raise ConfigurationError(
                f"the properties have {total:,} bytes.", fix=f"At most {PROPERTIES_BYTES_MAX:,}."
            )
