"""Retention as the broker sees it: when the store cleans up, and which groups lose what by it.

    before a file goes    every group that has not read all of it is logged and counted: topic,
                          group, number of messages (`lost`)
    from 80 % of          a survey, once a minute, finds the groups that have unread messages in
    fileReservedTime on   the files that go next, how many, and when (`at_risk`)

What a group has read is what it has committed; a message that its filter would refuse counts until
it is passed. Queues of which a group has committed nothing do not count: where it will begin there
is its own choice.

Requests of the tools (306, 316, 329) set the clean-up off; the answer does not wait for it.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.model.topic import LMQ_PREFIX
from sluicemq.net.dispatch import Peer
from sluicemq.store.retain import LogFile, Step, deletion_ms
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

log = logging.getLogger(__name__)

FIRST_RUN_S: Final = 60.0  # spec/store.md §9
SURVEY_PERIOD_S: Final = 60.0
REPEAT_S: Final = 3600.0
SLICE_S: Final = 0.003
Pair = tuple[str, str]
"""Topic and group."""


class Risk(NamedTuple):
    """Unread messages that retention deletes next, and when it does at the earliest (ms)."""

    messages: int
    loss_ms: int


class GroupWatch:
    """Knows what groups lose, and will lose, when files of the log go."""

    def __init__(self, offsets: Offsets, store: Store, clock: Clock) -> None:
        self._offsets = offsets
        self._store = store
        self._retention = store.retention
        self._clock = clock
        self._going: dict[Pair, int] = {}
        self._readers: dict[str, list[str]] = {}  # of one file: looked up once for all queues
        self._warned_s: dict[Pair, float] = {}
        self.lost: dict[Pair, int] = {}
        """Messages that were deleted unread, since the broker started."""
        self.at_risk: dict[Pair, Risk] = {}
        """As the last survey found it."""
        self.disk_percent = 0.0
        """Of the fullest disk, as last looked at."""

    # --- before a file goes (`store.retain.DeletionObserver`)

    def on_messages_deleted(self, topic: str, queue_id: int, old_min: int, new_min: int) -> None:
        """Who has not read the messages [old_min, new_min) of a queue?"""
        if not self._readers:
            self._readers = self._offsets.groups_by_topic()
        for group in self._readers.get(topic, ()):
            committed = self._offsets.committed(group, topic, queue_id)
            unread = new_min - max(committed, old_min)
            if committed >= 0 and unread > 0:
                self._going[topic, group] = self._going.get((topic, group), 0) + unread

    def on_file_deleted(self, file: LogFile, why: str) -> None:
        """Says and counts what was found for the file."""
        going, self._going = self._going, {}
        self._readers = {}
        for (topic, group), count in sorted(going.items()):
            self.lost[topic, group] = self.lost.get((topic, group), 0) + count
            log.warning(
                "group %s has not read %d messages of topic %s that are deleted now with the log "
                "file %020d (last written %s; %s)",
                group, count, topic, file.base, _shown(file.modified_ms), why,
            )  # fmt: skip

    # --- long before

    def risk(self, topic: str, queue_id: int, committed: int) -> Risk | None:
        """What a reader that has read up to `committed` will lose of a queue; None: nothing."""
        files = self._retention.expiring_files()
        if committed < 0 or not files:
            return None
        behind = self._retention.first_offset_from(topic, queue_id, files[-1].end)
        return self._risk(files, topic, queue_id, committed, behind)

    def _risk(
        self, files: list[LogFile], topic: str, queue_id: int, committed: int, behind: int
    ) -> Risk | None:
        first = max(committed, self._store.queue_offsets(topic, queue_id)[0])
        if first >= behind:
            return None
        place = self._retention.position_of(topic, queue_id, first)
        file = next((file for file in files if file.end > place), files[-1])
        now_ms = self._clock.now_ms()
        return Risk(
            behind - first, deletion_ms(file, self._retention.config, self.disk_percent, now_ms)
        )

    def survey(self) -> Iterator[Step]:
        """Looks at every group and queue, and warns once an hour for each group and topic."""
        files = self._retention.expiring_files()
        found: dict[Pair, Risk] = {}
        behind: dict[tuple[str, int], int] = {}
        end_s = self._clock.monotonic_s() + SLICE_S
        for group, topic, queue_id, committed in (
            list(self._offsets.iter_offsets()) if files else ()
        ):
            key = topic, queue_id
            if key not in behind:
                behind[key] = self._retention.first_offset_from(*key, files[-1].end)
            risk = self._risk(files, *key, committed, behind[key])
            if risk is not None:
                known = found.get((topic, group), Risk(0, risk.loss_ms))
                found[topic, group] = Risk(
                    known.messages + risk.messages, min(known.loss_ms, risk.loss_ms)
                )
            if self._clock.monotonic_s() > end_s:
                yield 0.0
                end_s = self._clock.monotonic_s() + SLICE_S
        self.at_risk = found
        now_s = self._clock.monotonic_s()
        self._warned_s = {pair: at for pair, at in self._warned_s.items() if pair in found}
        for (topic, group), risk in sorted(found.items()):
            if now_s - self._warned_s.get((topic, group), -REPEAT_S) >= REPEAT_S:
                self._warned_s[topic, group] = now_s
                log.warning(
                    "group %s has not read %d messages of topic %s that are deleted from %s on: "
                    "let it catch up, or raise fileReservedTime",
                    group, risk.messages, topic, _shown(risk.loss_ms),
                )  # fmt: skip


class Cleaning:
    """When the store looks at its disk and cleans up; also the request family that asks for it."""

    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        watch: GroupWatch,
        store: Store,
        clock: Clock,
        end_turn: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._watch = watch
        self._store = store
        self._retention = store.retention
        self._clock = clock
        self._end_turn = end_turn
        now_s = clock.monotonic_s()
        self._clean_s = now_s + FIRST_RUN_S
        self._look_s = self._survey_s = now_s
        self._queues_asked = False
        self._retention.observer = watch
        self._configure()
        settings.add_listener(self._configure)

    def _configure(self) -> None:
        self._retention.config = self._settings.store

    # --- what the tools ask for

    def clean_log(self, command: Command, peer: Peer) -> Command:
        """329: expired files go in the next twenty runs, whatever the hour."""
        log.info("%s asks to delete expired files of the log", peer.remote)
        self._retention.request_manual_run()
        return Command(ResponseCode.SUCCESS)

    def clean_queues(self, command: Command, peer: Peer) -> Command:
        """306: files of queues that lie behind the log. The real broker also drops a queue all of
        whose messages are gone, which then begins at 0 again: its consumers would miss messages."""
        log.info("%s asks to delete files of queues whose messages are gone", peer.remote)
        self._queues_asked = True
        return Command(ResponseCode.SUCCESS)

    def clean_topics(self, command: Command, peer: Peer) -> Command:
        """316: queues of topics that do not exist."""
        unused = {
            topic
            for topic, _ in self._store.queues()
            if topic not in self._topics
            and not self._topics.is_system(topic)
            and not topic.startswith(LMQ_PREFIX)
        }
        if unused:
            self._end_turn()  # deleting commits: who waits for this turn is answered by its own
        for topic in sorted(unused):
            log.info("%s asks to delete unused topics: %s goes", peer.remote, topic)
            self._store.delete_topic(topic)
        return Command(ResponseCode.SUCCESS)

    # --- by the clock

    def look(self) -> None:
        """How full is the disk? Refuses sends, or takes them again."""
        self._watch.disk_percent = self._retention.check_disk()

    def run(self) -> Iterator[Step]:
        """What is due, about once a second: pauses and blocking work, see `store.retention`.

        While sends are refused the disk is looked at each time, so that they are taken again soon.
        """
        now_s = self._clock.monotonic_s()
        period_s = self._settings.store.clean_interval_ms / 1000
        if now_s >= self._look_s or self._retention.is_refusing_sends:
            self._look_s = now_s + period_s
            self.look()
        if self._queues_asked:
            self._queues_asked = False
            yield from self._retention.clean_queues(now_s + period_s)
        if now_s >= self._clean_s:
            self._clean_s = now_s + period_s
            yield from self._retention.clean(now_s + period_s)
            self.look()
        if now_s >= self._survey_s:
            self._survey_s = now_s + SURVEY_PERIOD_S
            yield from self._watch.survey()


def _shown(time_ms: int) -> str:
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).astimezone()
    return moment.isoformat(sep=" ", timespec="seconds")
