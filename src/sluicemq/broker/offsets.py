"""How far each group has consumed each queue, and its file (config/consumerOffset.json).

The key is `topic@group`, as in RocketMQ's file. Any value is taken, also one below the last
(spec/delivery.md §5). `pulled` is how far a group has fetched; it is shown by tools and kept in
memory only. The file is written every few seconds: after a crash a group may see messages again.
"""

import logging
from collections.abc import Iterator
from typing import Final

import orjson

from sluicemq.broker.documents import Document
from sluicemq.broker.resets import Resets
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import DataVersion
from sluicemq.protocol import bodies
from sluicemq.protocol.bodies.unknown import Unknown

log = logging.getLogger(__name__)

SEPARATOR: Final = "@"
COMMITS_PER_VERSION: Final = 500  # spec/store.md §11


class Offsets:
    """topic@group -> queue id -> next offset to consume."""

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        self._clock = clock
        self.table: dict[str, dict[int, int]] = {}
        self.pulled: dict[str, dict[int, int]] = {}
        self.resets = Resets(self._resets_changed)
        self.is_urgent = False
        """A reset is to be on disk before it is answered."""
        self.version = DataVersion()
        self._unknown = Unknown()
        self._commits = 0
        directory = f"{settings.store.root}/config"
        self.document = Document(files, f"{directory}/consumerOffset.json", self._render)
        self.resets_document = Document(
            files, f"{directory}/sluiceOffsetResets.json", self._render_resets
        )
        self._light_document = Document(files, f"{directory}/lmqConsumerOffset.json", self._render)

    def load(self) -> None:
        """A broker with light queues (enableLmq) had it all in another file: that one is read when
        ours is missing. Raises StoreDamagedError."""
        found = self.document.load(bodies.decode_consumer_offsets_file)
        if found is None:
            found = self._light_document.load(bodies.decode_consumer_offsets_file)
            self.document.changed = found is not None
        if found is not None:
            self.version, self._unknown = found.data_version, found.unknown
            self.table = {key: dict(queues) for key, queues in found.offsets.items()}

        pending = self.resets_document.load(orjson.loads)
        if pending is not None:
            self.resets.load(pending.get("resets", ()))

    def _resets_changed(self) -> None:
        self.resets_document.changed = True

    def _render_resets(self) -> str:
        return orjson.dumps({"resets": self.resets.objects()}).decode()

    def _render(self) -> str:
        return bodies.encode_consumer_offsets_file(self.snapshot())

    def snapshot(self) -> bodies.ConsumerOffsets:
        """The table as 43 and the file carry it."""
        return bodies.ConsumerOffsets(self.table, self.version, self._unknown)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """A consumer's commit: dropped while it does not know of a reset (`resets.py`)."""
        if self.resets and self.resets.blocks(group, topic, queue_id):
            return
        self._set(group, topic, queue_id, offset)

    def put(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Where the group is, as its lanes say."""
        self._set(group, topic, queue_id, offset)

    def reset(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """The group goes on at `offset`, whatever its consumers commit meanwhile."""
        self.resets.put(group, topic, queue_id, offset)
        self.is_urgent = True
        self._set(group, topic, queue_id, offset)

    def _set(self, group: str, topic: str, queue_id: int, offset: int) -> None:
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

    def committed(self, group: str, topic: str, queue_id: int) -> int:
        """The offset, -1 when there is none."""
        return self.table.get(f"{topic}@{group}", {}).get(queue_id, -1)

    def pulled_by(self, group: str, topic: str) -> dict[int, int]:
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

    def queues(self) -> Iterator[tuple[str, str, int, int]]:
        """Every (group, topic, queue id, offset)."""
        for topic, group in list(self._keys()):
            for queue_id, offset in self.table.get(f"{topic}@{group}", {}).items():
                yield group, topic, queue_id, offset

    def forget_topic(self, topic: str) -> None:
        self.resets.forget(topic=topic)
        self._forget(f"{topic}@", "")

    def forget_group(self, group: str) -> None:
        self.resets.forget(group=group)
        self._forget("", f"@{group}")

    def _forget(self, prefix: str, suffix: str) -> None:
        def meant(table: dict[str, dict[int, int]]) -> list[str]:
            return [key for key in table if key.startswith(prefix) and key.endswith(suffix)]

        for key in meant(self.table):
            del self.table[key]
            self.document.changed = True
        for key in meant(self.pulled):
            self.pulled[key].clear()  # the pulls hold it
