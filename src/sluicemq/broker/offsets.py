"""Committed offsets: how far each group has consumed each queue (config/consumerOffset.json).

The table is keyed by `topic@group`, as in RocketMQ's file. A commit may have any value, also one
below the last (spec/delivery.md §5). The file is written every few seconds, so after a crash a
group may receive messages again. `Offsets.pulled` says how far a group has fetched. Tools show it;
it is kept in memory only.

*Resets.* An operator can reset the offset of a group (INVOKE_BROKER_TO_RESET_OFFSET, 222) while its
consumers run. They have messages in flight, and would commit them over the new offset. Therefore a
reset remains pending until the consumer of the queue knows it:

1. Every commit of the group on the queue is dropped. The next pull is answered with
   PULL_OFFSET_MOVED (21) and the new offset.
2. Commits are still dropped, because they may have been sent before that answer arrived. A pull
   proves that the consumer received the answer if it begins at the new offset, or anywhere but at
   the offset of the pull that was redirected. Then the reset is removed, and commits count again.

A pull that repeats the redirected offset proves nothing, and is redirected again. After
`REDIRECTS_MAX` times the reset is removed anyway, because a program may pull from where it likes.
RocketMQ forgets a reset as soon as it sends the answer, so that a commit in flight or a lost answer
undoes it.

Pending resets are saved in `config/sluiceOffsetResets.json` before 222 is answered, so that they
survive a crash of the broker. (RocketMQ loses them in a crash, and ignores the file.) A broker that
crashes just after a consumer learned of a reset redirects it again; then messages repeat.

*Deleted topics.* A topic that is deleted and created again begins at offset 0. Its consumers do not
know that: they pull from their old positions, commit them, and would miss the messages before. So
the broker remembers which groups had committed offsets when a topic was deleted. When the topic is
created again, each of these groups is reset to offset 0 of every queue, by the same rules as a
reset by an operator. This also covers offsets that outlived their topic, after a crash or in a
store of RocketMQ 4.
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
from sluicemq.wire.tables import UnknownFields

log = logging.getLogger(__name__)

SEPARATOR: Final = "@"
COMMITS_PER_VERSION: Final = 500
"""After this number of commits the version of the table changes (spec/store.md §11)."""
REDIRECTS_MAX: Final = 3
"""The number of times that a consumer is told about a reset."""
DELETED_TOPICS_MAX: Final = 10_000
"""Deleted topics whose groups are remembered. The oldest deletions are forgotten first."""

Key = tuple[str, str, int]
"""Group, topic and queue id."""


class UnfinishedMessages(NamedTuple):
    """The messages of a queue that a group has not finished."""

    start: int
    """All messages from this offset on are unfinished; -1 if the group has no offset."""
    in_flight: int = 0
    """Popped messages that are neither acknowledged nor due to be delivered again."""
    extra: int = 0
    """Further unfinished messages before `start`. Negative if some from `start` on are done."""


@dataclass(slots=True)
class _Reset:
    """A pending reset: the new offset, and what the consumer of the queue was told."""

    offset: int
    client_id: str = ""
    """The client that was redirected last."""
    redirected_from: int = -1
    """The offset of the pull that was redirected last; -1 for none."""
    redirects: int = 0
    """How often the client was redirected."""


class Resets:
    """The resets that a consumer may not know of yet, by group (or lane), topic and queue."""

    __slots__ = ("_on_change", "table")

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Create an empty table. `on_change` is called after each change of what the file says."""
        self.table: dict[Key, _Reset] = {}
        self._on_change = on_change

    def __bool__(self) -> bool:
        return bool(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def add(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Add a reset of the group's queue to `offset`. It replaces a pending one."""
        self.table[group, topic, queue_id] = _Reset(offset)
        self._on_change()

    def raise_offset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Raise the offset of the queue's pending reset to `offset`, if it is lower.

        Do nothing if no reset is pending. The broker calls this when it knows that the messages
        before `offset` are done. Consumers cannot raise the offset themselves, because their
        commits are dropped while the reset is pending.
        """
        reset = self.table.get((group, topic, queue_id))
        if reset is not None and reset.offset < offset:
            reset.offset = offset
            self._on_change()

    def blocks_commits(self, group: str, topic: str, queue_id: int) -> bool:
        """Return whether commits of the group on this queue are dropped."""
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
        """Return the offset to which a pull from `offset` must be redirected, or None.

        A reset is an offset that an operator has set, and that the consumer may not know yet. None
        means that the pull continues at `offset`. Either no reset of the queue is pending, or the
        consumer knows the reset. In the second case the reset is removed.

        The consumer knows the reset if it was redirected before, and this pull starts at the new
        offset, or at any offset but that of the redirected pull. After REDIRECTS_MAX redirects the
        reset is removed in any case. Redirects are counted for one client: if another `client_id`
        pulls, the count starts at 0.

        `is_parked` says that the pull has waited in the broker since before the redirect. Such a
        pull does not show what the consumer knows, so it never removes the reset.
        """
        key = (group, topic, queue_id)
        reset = self.table.get(key)
        if reset is None:
            return None
        if reset.client_id != client_id:
            reset.client_id = client_id
            reset.redirected_from = -1
            reset.redirects = 0

        # Remove a reset that the consumer knows.
        has_moved = offset == reset.offset or offset != reset.redirected_from
        is_known = reset.redirects > 0 and has_moved
        if not is_parked and (is_known or reset.redirects >= REDIRECTS_MAX):
            del self.table[key]
            self._on_change()
            return None

        # Otherwise redirect the pull.
        reset.redirected_from = offset
        if not is_parked or not reset.redirects:
            reset.redirects += 1
        return reset.offset

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Remove the resets of a deleted topic, or of a deleted group."""
        for key in [key for key in self.table if group == key[0] or topic == key[1]]:
            del self.table[key]
            self._on_change()

    def discard(self, group: str, topic: str, queue_id: int) -> None:
        """Remove the reset of a queue whose next reader begins at the new offset anyway."""
        if self.table.pop((group, topic, queue_id), None) is not None:
            self._on_change()

    def to_objects(self) -> list[dict[str, Any]]:
        """Return the pending resets as objects for the JSON file, which `load` reads.

        Each is a dict with the keys "group", "offset", "queueId" and "topic". The clients that were
        redirected are not saved.
        """
        return [
            {"group": group, "offset": reset.offset, "queueId": queue_id, "topic": topic}
            for (group, topic, queue_id), reset in self.table.items()
        ]

    def load(self, objects: Iterable[Any]) -> None:
        """Add the resets in `objects`, a list that `to_objects` returned.

        A pending reset of the same queue is replaced. Raises ValueError if a field is missing or
        invalid.
        """
        try:
            for reset_object in objects:
                group = str(reset_object["group"])
                topic = str(reset_object["topic"])
                queue_id = int(reset_object["queueId"])
                self.table[group, topic, queue_id] = _Reset(int(reset_object["offset"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"a reset has a missing or invalid field: {error}") from error


class Offsets:
    """The committed offsets of all groups, the pending resets, and their files."""

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        """Create empty tables. Their files are in `config` below the store's directory."""
        self._clock = clock
        self.table: dict[str, dict[int, int]] = {}
        """By `topic@group` and queue id: the next offset to consume."""
        self.pulled: dict[str, dict[int, int]] = {}
        """By `topic@group` and queue id: the next offset to fetch."""

        self.resets = Resets(self._mark_resets_changed)
        self.on_reset: list[Callable[[str, str, int, int], None]] = []
        """Called with group, topic, queue id and new offset after each reset."""
        self.on_forget: list[Callable[..., None]] = []
        """Called with `topic=` and `group=` when the offsets of one of them are forgotten."""
        self.must_save_now = False
        """Whether a reset must be on disk before its request is answered."""
        self.groups_by_deleted_topic: dict[str, set[str]] = {}
        """By deleted topic, in the order of deletion: the groups that had consumed it."""
        self.on_save: Callable[[], None] = lambda: None
        """Called before the table is copied for the file."""
        self.version = DataVersion()
        self._unknown = UnknownFields()
        self._commits = 0
        """The number of commits so far. Every `COMMITS_PER_VERSION` of them change `version`."""
        directory = f"{settings.store.root}/config"
        self.document = Document(files, f"{directory}/consumerOffset.json", self._render)
        self.resets_document = Document(
            files, f"{directory}/sluiceOffsetResets.json", self._render_resets
        )
        self._light_document = Document(files, f"{directory}/lmqConsumerOffset.json", self._render)

    def _mark_resets_changed(self) -> None:
        """Let the next save write the file of resets."""
        self.resets_document.changed = True

    def _render(self) -> str:
        """Return the text of the file of committed offsets."""
        self.on_save()
        return tables.encode_consumer_offsets_file(self.snapshot())

    def _render_resets(self) -> str:
        """Return the JSON text of the file of resets.

        The key "resets" has the pending resets. The key "deletedTopics" has the deleted topics with
        the groups that had consumed them; it is left out if there are none.
        """
        content: dict[str, Any] = {"resets": self.resets.to_objects()}
        if self.groups_by_deleted_topic:
            content["deletedTopics"] = [
                {"topic": topic, "groups": sorted(groups)}
                for topic, groups in self.groups_by_deleted_topic.items()
            ]
        return orjson.dumps(content).decode()

    def load(self) -> None:
        """Read the files. Raises StoreDamagedError.

        A broker of RocketMQ with light queues (enableLmq) wrote all offsets to another file, which
        is read if the usual one is missing.
        """
        self._load_table()
        self._load_resets()

    def _load_table(self) -> None:
        """Read the committed offsets from their file into `table`, `version` and `_unknown`.

        If the file does not exist, the file that RocketMQ writes with light queues is read, and the
        document is marked as changed. If neither exists, nothing changes. A warning is logged if
        this broker did not write the file last. Raises StoreDamagedError or StoreError.
        """
        saved = self.document.load(tables.decode_consumer_offsets_file)
        if saved is None:
            # RocketMQ with light queues (enableLmq) saves all offsets here.
            saved = self._light_document.load(tables.decode_consumer_offsets_file)
            self.document.changed = saved is not None
        if saved is not None:
            self.version = saved.data_version
            self._unknown = saved.unknown
            self.table = {key: dict(queues) for key, queues in saved.offsets.items()}
        if self.document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last: it was removed, is an older copy, belongs "
                "to another store, or RocketMQ has used the store since. Groups continue at the "
                "offsets in it, so messages may be repeated or skipped. If you replaced the file, "
                "restore the right one, or reset the offsets of the groups.",
                self.document.path,
            )

    def _load_resets(self) -> None:
        """Read the pending resets and the deleted topics from their file, if it exists.

        If this broker did not write the file last, its content is ignored, and a warning is logged.
        Raises StoreDamagedError, StoreError or ValueError.
        """
        saved = self.resets_document.load(orjson.loads)
        if self.resets_document.is_doubtful:
            log.warning(
                "%s is not what this broker wrote last (removed, an older copy, or from another "
                "store). The resets in it are ignored. Repeat the offset resets that consumers "
                "have not followed yet.",
                self.resets_document.path,
            )
            self.resets_document.changed = True
        elif saved is not None:
            self.resets.load(saved.get("resets", ()))
            for topic_object in saved.get("deletedTopics", ()):
                topic = str(topic_object["topic"])
                self.groups_by_deleted_topic[topic] = set(map(str, topic_object["groups"]))

    def snapshot(self) -> tables.ConsumerOffsets:
        """Return the table as GET_ALL_CONSUMER_OFFSET (43) and the file contain it.

        The result shares the dicts of the table.
        """
        return tables.ConsumerOffsets(self.table, self.version, self._unknown)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the committed offset for a consumer. Ignored while a reset is pending. HOT."""
        if (group, topic, queue_id) not in self.resets.table:
            self.put(group, topic, queue_id, offset)

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the committed offset of the group to `offset`, as an operator asks for.

        The reset is pending until the consumer of the queue has followed it: commits of the group
        are dropped meanwhile. `must_save_now` is set, because the reset must be on disk before the
        operator's request is answered. The functions in `on_reset` are called with the arguments of
        this call.
        """
        self.resets.add(group, topic, queue_id, offset)
        self.must_save_now = True
        self.put(group, topic, queue_id, offset)
        for follow in self.on_reset:
            follow(group, topic, queue_id, offset)

    def put(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Set the committed offset of the group in one queue of the topic.

        Whether a reset is pending is not checked. An offset lower than before is accepted and
        logged. The document is marked as changed. The version of the table changes with every
        COMMITS_PER_VERSION-th call. This function is hot.
        """
        key = f"{topic}@{group}"
        queues = self.table.get(key)
        if queues is None:
            queues = self.table[key] = {}
        committed = queues.get(queue_id, -1)
        if offset < committed:
            log.info(
                "group %s moves back on %s:%d: %d -> %d", group, topic, queue_id, committed, offset
            )
        queues[queue_id] = offset
        self.document.changed = True
        self._commits += 1
        if self._commits % COMMITS_PER_VERSION == 0:
            self.version = self.version.incremented(self._clock.now_ms())

    def clamp_to_queue_ends(self, end_of: Callable[[str, int], int | None]) -> None:
        """Lower each committed offset that is beyond the end of its queue to that end.

        `end_of(topic, queue_id)` returns the end offset, or None if the queue does not exist.
        Offsets of missing queues are not changed. Each lowered offset is logged.

        The log may have become shorter in a power failure, or because this broker took over from
        another master. Without this, a group would skip the messages that are stored next.
        """
        for topic_at_group, queues in self.table.items():
            topic, _, _ = topic_at_group.partition(SEPARATOR)
            for queue_id, offset in queues.items():
                queue_end = end_of(topic, queue_id)
                if queue_end is None or offset <= queue_end:
                    continue
                log.warning(
                    "The offset %d of %s in queue %d is beyond the end of the queue. It is set "
                    "to the end, %d.",
                    offset,
                    topic_at_group,
                    queue_id,
                    queue_end,
                )
                queues[queue_id] = queue_end
                self.document.changed = True

    def committed(self, group: str, topic: str, queue_id: int) -> int:
        """Return the committed offset of the group, or -1 if it has none."""
        return self.table.get(f"{topic}@{group}", {}).get(queue_id, -1)

    def pulled_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Return the next offset to fetch by queue id, of one group and topic.

        The result is the dict of the table itself, which pulls update in place. It is created if
        the group has not fetched from the topic.
        """
        return self.pulled.setdefault(f"{topic}@{group}", {})

    def fetched(self, group: str, topic: str, queue_id: int) -> int:
        """Return the next offset that the group will fetch.

        Return -1 if it has not fetched from the queue since the broker started.
        """
        return self.pulled.get(f"{topic}@{group}", {}).get(queue_id, -1)

    def topics_of(self, group: str) -> set[str]:
        """Return the topics for which the group has committed offsets."""
        return {topic for topic, name in self._keys() if name == group}

    def groups_of(self, topic: str) -> set[str]:
        """Return the groups that have committed offsets for the topic."""
        return {group for name, group in self._keys() if name == topic}

    def groups_by_topic(self) -> dict[str, list[str]]:
        """Return a dict that gives for each topic the groups that have committed offsets for it."""
        groups: dict[str, list[str]] = {}
        for topic, group in self._keys():
            groups.setdefault(topic, []).append(group)
        return groups

    def _keys(self) -> Iterator[tuple[str, str]]:
        """Yield (topic, group) for each key `topic@group` of the table.

        A key with several `@` is skipped, because it does not belong to a topic and a group
        (spec/delivery.md §5).
        """
        for key in self.table:
            topic, separator, group = key.partition(SEPARATOR)
            if separator and SEPARATOR not in group:
                yield topic, group

    def iter_offsets(self) -> Iterator[tuple[str, str, int, int]]:
        """Yield group, topic, queue id and committed offset of every queue."""
        for topic, group in list(self._keys()):
            for queue_id, offset in self.table.get(f"{topic}@{group}", {}).items():
                yield group, topic, queue_id, offset

    def delete_topic(self, topic: str) -> None:
        """Forget the offsets of a deleted topic, and remember which groups had offsets for it.

        The groups are kept in `groups_by_deleted_topic` until the topic is created again, when
        their offsets must be reset. At most DELETED_TOPICS_MAX topics are kept; the oldest deletion
        is forgotten first. `must_save_now` is set.
        """
        groups = self.groups_by_deleted_topic.pop(topic, set()) | self.groups_of(topic)
        self.forget(topic=topic)
        if groups:
            self.groups_by_deleted_topic[topic] = groups
            while len(self.groups_by_deleted_topic) > DELETED_TOPICS_MAX:
                oldest_topic = next(iter(self.groups_by_deleted_topic))
                del self.groups_by_deleted_topic[oldest_topic]
            self.resets_document.changed = True
        self.must_save_now = True

    def mark_missing_as_deleted(self, exists: Callable[[str], bool]) -> None:
        """Update `groups_by_deleted_topic` after a start, by the topics that exist.

        `exists(topic)` returns whether the topic exists. The offsets themselves are not changed.

        - A topic that has offsets but does not exist is remembered as deleted, with its groups. A
          crash during a deletion leaves such offsets, and so does RocketMQ 4, which does not delete
          the offsets of a topic.
        - A remembered topic that exists was created before a crash, or by a RocketMQ broker that
          used the store. The groups that have committed offsets for it are no longer remembered,
          because they have consumed the new topic and need no reset.
        """
        for topic, groups in self.groups_by_topic().items():
            if not exists(topic):
                self.groups_by_deleted_topic.setdefault(topic, set()).update(groups)
            elif topic in self.groups_by_deleted_topic:
                self.groups_by_deleted_topic[topic].difference_update(groups)

    def take_groups_of_deleted(self, topic: str) -> list[str]:
        """Return the groups that had consumed `topic` before it was deleted, and forget them.

        The names are sorted. The list is empty if the topic is not remembered as deleted.
        """
        groups = self.groups_by_deleted_topic.pop(topic, None)
        if groups is None:
            return []
        self.resets_document.changed = True
        return sorted(groups)

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Forget all offsets of a deleted topic, or of a deleted group.

        The caller passes `topic` or `group`, not both. Committed offsets, offsets to fetch and
        pending resets are forgotten. A group is also removed from `groups_by_deleted_topic`. The
        functions in `on_forget` are called with the keywords `topic` and `group`.
        """
        self.resets.forget(topic=topic, group=group)
        if group:
            self._forget_in_deleted_topics(group)
        for follow in self.on_forget:
            follow(topic=topic, group=group)

        # The keys of both tables are `topic@group`.
        prefix = f"{topic}@" if topic else ""
        suffix = f"@{group}" if group else ""
        for key in [*self.table]:
            if key.startswith(prefix) and key.endswith(suffix):
                del self.table[key]
                self.document.changed = True
        for key, pulled_offsets in self.pulled.items():
            if key.startswith(prefix) and key.endswith(suffix):
                pulled_offsets.clear()  # not removed: pulls hold a reference to it

    def _forget_in_deleted_topics(self, group: str) -> None:
        """Remove the deleted `group` from `groups_by_deleted_topic`.

        A deleted topic without further groups is removed as well. The file of resets is marked as
        changed.
        """
        for deleted_topic, groups in [*self.groups_by_deleted_topic.items()]:
            groups.discard(group)
            if not groups:
                del self.groups_by_deleted_topic[deleted_topic]
            self.resets_document.changed = True
