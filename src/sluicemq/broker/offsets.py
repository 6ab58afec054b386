"""How far each group has consumed each queue, and its file (config/consumerOffset.json).

The key is `topic@group`, as in RocketMQ's file. Any value is taken, also one below the last
(spec/delivery.md §5). `pulled` is how far a group has fetched; it is shown by tools and kept in
memory only. The file is written every few seconds: after a crash a group may see messages again.

An offset that is reset (222) while consumers go on reading does not last if it is only written into
the table: they have messages under way and commit them over it. So each reset stays *pending* until
the consumer knows:

    pending   every commit of the group on that queue is dropped; the next pull is answered with 21
              (OFFSET_RESET) and the new offset                     -> told
    told      commits are still dropped, they may have left before the answer came; a pull from the
              new offset, or from anywhere but where it was told, is the proof that it was heard
              -> forgotten, commits count again

RocketMQ forgets a reset with the answer 21; a commit on its way then undoes it, and so does an
answer that gets lost. A pull that repeats the place where it was told has not heard: it is told
again, `TELLS_MAX` times, because a program that pulls where it likes is not to be held for ever.

What is pending stands in `config/sluiceOffsetResets.json` before 222 is answered, so that a broker
that dies tells the consumers when it is back (RocketMQ forgets it, and ignores the file). One that
dies just after a consumer has heard tells it once more: messages repeat.

A topic that is deleted and created again begins at offset 0. Its consumers do not know that: they
pull from their old positions, commit them, and would miss what lies before. So the broker remembers
which groups had committed offsets when a topic was deleted. When the topic is created again each of
them is reset to offset 0 of every queue, by the same rules as an operator's reset. This also covers
offsets that outlived their topic, after a crash or in a store of RocketMQ 4.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.broker.documents import Document
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import DataVersion
from sluicemq.wire import tables
from sluicemq.wire.tables import Unknown

log = logging.getLogger(__name__)

SEPARATOR: Final = "@"
COMMITS_PER_VERSION: Final = 500  # spec/store.md §11
TELLS_MAX: Final = 3
DELETED_TOPICS_MAX: Final = 10_000
"""Deleted topics whose groups are remembered. The oldest deletions are forgotten first."""

Key = tuple[str, str, int]
"""(group, topic, queue id)"""


class UnfinishedMessages(NamedTuple):
    """What a group has before it in a queue: all from `start` on (-1: it has no offset), and
    `extra` messages besides, below 0 when some of those are done. `in_flight`: how many it has
    popped and neither acknowledged nor to get again."""

    start: int
    in_flight: int = 0
    extra: int = 0


@dataclass(slots=True)
class _Reset:
    offset: int
    client_id: str = ""
    asked_at: int = -1
    tells: int = 0


class Resets:
    """The resets that some consumer does not know of yet."""

    __slots__ = ("_on_change", "table")

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.table: dict[Key, _Reset] = {}
        self._on_change = on_change

    def __bool__(self) -> bool:
        return bool(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def add(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """From now on; an earlier one of the queue is replaced."""
        self.table[group, topic, queue_id] = _Reset(offset)
        self._on_change()

    def raise_offset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """What is before `offset` is done meanwhile: one that is pending is not told to go there.
        Commits are dropped until it is heard, so this is a broker that moved on by itself."""
        reset = self.table.get((group, topic, queue_id))
        if reset is not None and reset.offset < offset:
            reset.offset = offset
            self._on_change()

    def blocks_commits(self, group: str, topic: str, queue_id: int) -> bool:
        """Is a commit of this group on the queue to be dropped?"""
        return (group, topic, queue_id) in self.table

    def redirect(
        self,
        group: str,
        topic: str,
        queue_id: int,
        offset: int,
        client_id: str = "",
        *,
        is_parked: bool = False,
    ) -> int | None:
        """A pull from `offset` came in: where it has to go on, None when it may go on there. With a
        `client_id` it is that client who has to hear, whoever was told before. A pull that waits
        was sent before it: it proves nothing."""
        key = (group, topic, queue_id)
        reset = self.table.get(key)
        if reset is None:
            return None
        if reset.client_id != client_id:
            reset.client_id, reset.asked_at, reset.tells = client_id, -1, 0
        has_heard = reset.tells and (offset == reset.offset or offset != reset.asked_at)
        if not is_parked and (has_heard or reset.tells >= TELLS_MAX):
            del self.table[key]
            self._on_change()
            return None
        reset.asked_at = offset
        reset.tells += not is_parked or not reset.tells
        return reset.offset

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """The topic, or the group, is deleted."""
        for key in [key for key in self.table if group == key[0] or topic == key[1]]:
            del self.table[key]
            self._on_change()

    def discard(self, group: str, topic: str, queue_id: int) -> None:
        """Its consumer begins anew there."""
        if self.table.pop((group, topic, queue_id), None) is not None:
            self._on_change()

    def to_objects(self) -> list[dict[str, Any]]:
        """What is pending, for the file."""
        return [
            {"group": group, "offset": reset.offset, "queueId": queue_id, "topic": topic}
            for (group, topic, queue_id), reset in self.table.items()
        ]

    def load(self, objects: Iterable[Any]) -> None:
        """The inverse. Raises ValueError."""
        try:
            for item in objects:
                key = (str(item["group"]), str(item["topic"]), int(item["queueId"]))
                self.table[key] = _Reset(int(item["offset"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a reset lacks a field: {error}") from error


class Offsets:
    """topic@group -> queue id -> next offset to consume."""

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        self._clock = clock
        self.table: dict[str, dict[int, int]] = {}
        self.pulled: dict[str, dict[int, int]] = {}

        def reset_changed() -> None:
            self.resets_document.changed = True

        self.resets = Resets(reset_changed)
        # What is known of messages that groups have been given goes with their offsets.
        self.on_reset: list[Callable[[str, str, int, int], None]] = []
        self.on_forget: list[Callable[..., None]] = []
        self.must_save_now = False
        """A reset is to be on disk before it is answered."""
        self.groups_by_deleted_topic: dict[str, set[str]] = {}
        """By deleted topic, in the order of deletion: the groups that had consumed it."""
        self.on_save: Callable[[], None] = lambda: None
        """Called when the table is about to be copied for the file."""
        self.version = DataVersion()
        self._unknown = Unknown()
        self._commits = 0
        directory = f"{settings.store.root}/config"

        def render() -> str:
            self.on_save()
            return tables.encode_consumer_offsets_file(self.snapshot())

        def render_resets() -> str:
            found: dict[str, Any] = {"resets": self.resets.to_objects()}
            if self.groups_by_deleted_topic:
                found["deletedTopics"] = [
                    {"topic": topic, "groups": sorted(groups)}
                    for topic, groups in self.groups_by_deleted_topic.items()
                ]
            return orjson.dumps(found).decode()

        self.document = Document(files, f"{directory}/consumerOffset.json", render)
        self.resets_document = Document(
            files, f"{directory}/sluiceOffsetResets.json", render_resets
        )
        self._light_document = Document(files, f"{directory}/lmqConsumerOffset.json", render)

    def load(self) -> None:
        """A broker with light queues (enableLmq) had it all in another file: that one is read when
        ours is missing. Raises StoreDamagedError."""
        found = self.document.load(tables.decode_consumer_offsets_file)
        if found is None:
            found = self._light_document.load(tables.decode_consumer_offsets_file)
            self.document.changed = found is not None
        if found is not None:
            self.version, self._unknown = found.data_version, found.unknown
            self.table = {key: dict(queues) for key, queues in found.offsets.items()}
        if self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last: it was removed, is an older copy or of"
                " another store, or RocketMQ has had the store meanwhile. Groups go on at the"
                " offsets in it, so messages may come again or be skipped. If you replaced the"
                " file, put back the right one, or reset the offsets of groups.",
                self.document.path,
            )

        pending = self.resets_document.load(orjson.loads)
        if self.resets_document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last (removed, an older copy, or of another"
                " store): the resets in it are ignored. Repeat resets of offsets that consumers"
                " have not followed yet.", self.resets_document.path,
            )  # fmt: skip
            self.resets_document.changed = True
        elif pending is not None:
            self.resets.load(pending.get("resets", ()))
            for item in pending.get("deletedTopics", ()):
                self.groups_by_deleted_topic[str(item["topic"])] = set(map(str, item["groups"]))

    def snapshot(self) -> tables.ConsumerOffsets:
        """The table as 43 and the file carry it."""
        return tables.ConsumerOffsets(self.table, self.version, self._unknown)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """A consumer's commit: dropped while it does not know of a reset (`Resets`). HOT."""
        if (group, topic, queue_id) not in self.resets.table:
            self.put(group, topic, queue_id, offset)

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The group goes on at `offset`, whatever its consumers commit meanwhile."""
        self.resets.add(group, topic, queue_id, offset)
        self.must_save_now = True
        self.put(group, topic, queue_id, offset)
        for follow in self.on_reset:
            follow(group, topic, queue_id, offset)

    def put(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Where the group is, whoever says so. HOT."""
        key = f"{topic}@{group}"
        queues = self.table.get(key)
        if queues is None:
            queues = self.table[key] = {}
        old = queues.get(queue_id, -1)
        if offset < old:
            log.info("group %s goes back on %s:%d: %d -> %d", group, topic, queue_id, old, offset)
        queues[queue_id] = offset
        self.document.changed = True
        self._commits += 1
        if self._commits % COMMITS_PER_VERSION == 0:
            self.version = self.version.next(self._clock.now_ms())

    def clamp_to_queue_ends(self, end_of: Callable[[str, int], int | None]) -> None:
        """Nobody has consumed behind the end of a queue (None: there is no such queue). So begins a
        broker whose log is shorter than it was, after a power loss or as another one's successor:
        what it stores there next would be passed over."""
        for key, queues in self.table.items():
            topic = key.partition(SEPARATOR)[0]
            for queue_id, offset in queues.items():
                end = end_of(topic, queue_id)
                if end is not None and offset > end:
                    log.warning(
                        "%s: %d of queue %d is behind its end %d", key, offset, queue_id, end
                    )
                    queues[queue_id] = end
                    self.document.changed = True

    def committed(self, group: str, topic: str, queue_id: int) -> int:
        """The offset, -1 when there is none."""
        return self.table.get(f"{topic}@{group}", {}).get(queue_id, -1)

    def pulled_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Queue id -> everything below it is fetched; the table itself, for the pulls to fill."""
        return self.pulled.setdefault(f"{topic}@{group}", {})

    def fetched(self, group: str, topic: str, queue_id: int) -> int:
        """How far the group has fetched since this broker started, -1 when it has not."""
        return self.pulled.get(f"{topic}@{group}", {}).get(queue_id, -1)

    def topics_of(self, group: str) -> set[str]:
        """Topics on which the group has committed."""
        return {topic for topic, name in self._keys() if name == group}

    def groups_of(self, topic: str) -> set[str]:
        """Groups that have committed on the topic."""
        return {group for name, group in self._keys() if name == topic}

    def groups_by_topic(self) -> dict[str, list[str]]:
        """For every topic the groups that have committed on it."""
        found: dict[str, list[str]] = {}
        for topic, group in self._keys():
            found.setdefault(topic, []).append(group)
        return found

    def _keys(self) -> Iterator[tuple[str, str]]:
        """Keys with more than one separator are not ours (spec/delivery.md §5)."""
        for key in self.table:
            topic, separator, group = key.partition(SEPARATOR)
            if separator and SEPARATOR not in group:
                yield topic, group

    def iter_offsets(self) -> Iterator[tuple[str, str, int, int]]:
        """Every (group, topic, queue id, offset)."""
        for topic, group in list(self._keys()):
            for queue_id, offset in self.table.get(f"{topic}@{group}", {}).items():
                yield group, topic, queue_id, offset

    def delete_topic(self, topic: str) -> None:
        """Forget the offsets of a deleted topic and remember the groups that had any, until the
        topic is created again (`take_deleted`)."""
        groups = self.groups_by_deleted_topic.pop(topic, set()) | self.groups_of(topic)
        self.forget(topic=topic)
        if groups:
            self.groups_by_deleted_topic[topic] = groups
            while len(self.groups_by_deleted_topic) > DELETED_TOPICS_MAX:
                del self.groups_by_deleted_topic[next(iter(self.groups_by_deleted_topic))]
            self.resets_document.changed = True
        self.must_save_now = True

    def mark_missing_as_deleted(self, exists: Callable[[str], bool]) -> None:
        """Treat each topic that has offsets and does not exist as deleted, for `take_deleted`. Such
        offsets are left by a crash during a deletion, and by RocketMQ 4, which deletes topics
        without them. They stay in the table until the topic is created.

        A deleted topic that exists was created before a crash, or by a RocketMQ broker that had the
        store meanwhile: groups that have committed offsets on it since are not reset."""
        for topic, groups in self.groups_by_topic().items():
            if not exists(topic):
                self.groups_by_deleted_topic.setdefault(topic, set()).update(groups)
            elif topic in self.groups_by_deleted_topic:
                self.groups_by_deleted_topic[topic].difference_update(groups)

    def take_groups_of_deleted(self, topic: str) -> list[str]:
        """Return the names of the groups that had consumed `topic` before it was deleted, sorted,
        and forget them."""
        groups = self.groups_by_deleted_topic.pop(topic, None)
        if groups is None:
            return []
        self.resets_document.changed = True
        return sorted(groups)

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """The topic, or the group, is deleted."""
        self.resets.forget(topic=topic, group=group)
        for known in list(self.groups_by_deleted_topic) if group else ():
            self.groups_by_deleted_topic[known].discard(group or "")
            if not self.groups_by_deleted_topic[known]:
                del self.groups_by_deleted_topic[known]
            self.resets_document.changed = True
        for follow in self.on_forget:
            follow(topic=topic, group=group)
        prefix, suffix = f"{topic}@" if topic else "", f"@{group}" if group else ""

        def meant(table: dict[str, dict[int, int]]) -> list[str]:
            return [key for key in table if key.startswith(prefix) and key.endswith(suffix)]

        for key in meant(self.table):
            del self.table[key]
            self.document.changed = True
        for key in meant(self.pulled):
            self.pulled[key].clear()  # the pulls hold it
