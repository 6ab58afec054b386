"""Retention as the broker runs it: when files are deleted, and which groups lose messages.

    before a file is deleted    for each group with unread messages in it, the topic, group and
                                number of messages are logged and counted
                                (`UnreadMonitor.deleted_unread_counts`)
    from 80 % of                once a minute, a survey finds the groups with unread messages in
    fileReservedTime on         the files that are deleted next, the number of these messages, and
                                the time of the deletion (`UnreadMonitor.expiring_unread`)

The messages before a group's committed offset count as read. A message that the group's filter does
not match counts as unread until the group has passed it. Queues without a committed offset of the
group do not count, because the group chooses where it starts.

`RetentionHandlers` answers the requests of tools that start a clean-up. The answers do not wait for
the clean-up. `sluicemq.store.retain` has the rules by which files are deleted.
"""

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

from sluicemq.broker.context import BrokerContext
from sluicemq.broker.offsets import Offsets
from sluicemq.clock import Clock
from sluicemq.model.topic import LMQ_PREFIX
from sluicemq.net.dispatch import Peer
from sluicemq.store.retain import LogFile, Step, deletion_ms
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

log = logging.getLogger(__name__)

FIRST_CLEAN_UP_DELAY_S: Final = 60.0
"""The time from the start of the broker to the first clean-up (spec/store.md §9)."""
SURVEY_PERIOD_S: Final = 60.0
WARNING_PERIOD_S: Final = 3600.0
"""A group is warned of its unread messages in a topic at most once in this time."""
SURVEY_SLICE_S: Final = 0.003
"""After this time a survey lets the event loop run."""
TopicGroup = tuple[str, str]
"""The name of a topic and the name of a group."""


class ExpiringMessages(NamedTuple):
    """Unread messages in files that retention deletes next."""

    message_count: int
    earliest_deletion_ms: int
    """The earliest time at which the first of the messages is deleted, in ms since the epoch."""


class UnreadMonitor:
    """Finds the unread messages that groups lose, or will lose, when files of the log are deleted.

    It is the `store.retain.DeletionObserver` of the broker.
    """

    def __init__(self, offsets: Offsets, store: Store, clock: Clock) -> None:
        """Create a monitor of messages that are deleted before groups have read them.

        It observes the groups that have committed offsets in `offsets`.
        """
        self._offsets = offsets
        self._store = store
        self._retention = store.retention
        self._clock = clock
        self._unread_counts: dict[TopicGroup, int] = {}
        """The numbers of unread messages in the file that is being deleted."""
        self._groups_by_topic: dict[str, list[str]] = {}
        """The groups that have offsets of each topic, looked up once for each deleted file."""
        self._warned_s: dict[TopicGroup, float] = {}
        """The monotonic time of the last warning."""
        self.deleted_unread_counts: dict[TopicGroup, int] = {}
        """The numbers of messages that were deleted unread since the broker started."""
        self.expiring_unread: dict[TopicGroup, ExpiringMessages] = {}
        """The expiring messages that the last survey found."""
        self.disk_percent = 0.0
        """The usage of the fullest disk at the last check, in percent."""

    # --- called before a file is deleted

    def on_messages_deleted(self, topic: str, queue_id: int, old_min: int, new_min: int) -> None:
        """Count the unread messages of each group that are about to be deleted from a queue.

        The offsets from `old_min` to before `new_min` are in a file that is about to be deleted.
        The counts are kept until `on_file_deleted` is called for that file. Groups without a
        committed offset for the queue are ignored.
        """
        if not self._groups_by_topic:
            self._groups_by_topic = self._offsets.groups_by_topic()
        for group in self._groups_by_topic.get(topic, ()):
            committed = self._offsets.committed(group, topic, queue_id)
            has_offset = committed >= 0
            unread_count = new_min - max(committed, old_min)
            if has_offset and unread_count > 0:
                earlier_count = self._unread_counts.get((topic, group), 0)
                self._unread_counts[topic, group] = earlier_count + unread_count

    def on_file_deleted(self, file: LogFile, why: str) -> None:
        """Log the unread messages that were counted for a file, and add them to the totals.

        A warning is logged for each topic and group. `why` is the reason of the deletion, for the
        log. The totals are in `deleted_unread_counts`. The counts of the next file begin at 0.
        """
        unread_counts = self._unread_counts
        self._unread_counts = {}
        self._groups_by_topic = {}
        for (topic, group), unread_count in sorted(unread_counts.items()):
            earlier_count = self.deleted_unread_counts.get((topic, group), 0)
            self.deleted_unread_counts[topic, group] = earlier_count + unread_count
            log.warning(
                "group %s loses %d unread messages of topic %s: log file %020d is being deleted "
                "(last written %s; %s)",
                group,
                unread_count,
                topic,
                file.base,
                _format_time(file.modified_ms),
                why,
            )

    # --- warnings ahead of a deletion

    def find_expiring(self, topic: str, queue_id: int, committed: int) -> ExpiringMessages | None:
        """Return the number of unread messages of a group that are deleted soon, and when.

        Only messages of one queue are counted. `committed` is the committed offset of the group, or
        -1 if it has none. Return None if it is -1, if no file of the log is deleted soon, or if the
        group has read all messages in such files.
        """
        files = self._retention.expiring_files()
        if committed < 0 or not files:
            return None
        expiring_end = self._retention.first_offset_from(topic, queue_id, files[-1].end)
        return self._find_in_files(files, topic, queue_id, committed, expiring_end)

    def _find_in_files(
        self, files: list[LogFile], topic: str, queue_id: int, committed: int, expiring_end: int
    ) -> ExpiringMessages | None:
        """Return the number of unread messages in `files`, and when the first one is deleted.

        `files` are the files of the log that are deleted soon, at least one. `committed` is the
        committed offset of the group, and `expiring_end` the first offset of the queue that is
        after all of these files. Return None if the files have no unread message.
        """
        queue_start, _ = self._store.queue_offsets(topic, queue_id)
        first_unread = max(committed, queue_start)
        if first_unread >= expiring_end:
            return None

        # Find the file with the first unread message.
        position = self._retention.position_of(topic, queue_id, first_unread)
        file = next((file for file in files if file.end > position), files[-1])
        now_ms = self._clock.now_ms()
        deletion_time_ms = deletion_ms(file, self._retention.config, self.disk_percent, now_ms)
        return ExpiringMessages(expiring_end - first_unread, deletion_time_ms)

    def survey(self) -> Iterator[Step]:
        """Find the unread messages of all groups that are deleted soon, and log warnings.

        The result replaces `expiring_unread`. A warning about the same topic and group is logged
        once in WARNING_PERIOD_S. This is a generator: it yields 0.0, a pause in seconds, after each
        SURVEY_SLICE_S, so that the event loop can handle requests. Raises OSError.
        """
        files = self._retention.expiring_files()
        committed_offsets = list(self._offsets.iter_offsets()) if files else ()
        expiring_unread: dict[TopicGroup, ExpiringMessages] = {}
        expiring_ends: dict[tuple[str, int], int] = {}
        slice_end_s = self._clock.monotonic_s() + SURVEY_SLICE_S
        for group, topic, queue_id, committed in committed_offsets:
            queue = topic, queue_id
            if queue not in expiring_ends:
                # Looked up once for all groups of the queue.
                expiring_ends[queue] = self._retention.first_offset_from(*queue, files[-1].end)
            expiring = self._find_in_files(files, *queue, committed, expiring_ends[queue])
            if expiring is not None:
                expiring_elsewhere = expiring_unread.get((topic, group))
                expiring_unread[topic, group] = _add_expiring(expiring_elsewhere, expiring)
            if self._clock.monotonic_s() > slice_end_s:
                yield 0.0
                slice_end_s = self._clock.monotonic_s() + SURVEY_SLICE_S
        self.expiring_unread = expiring_unread
        self._warn()

    def _warn(self) -> None:
        """Log a warning for each topic and group in `expiring_unread`.

        A warning is repeated after `WARNING_PERIOD_S`. If a group has caught up and falls behind
        again later, a warning is logged at once.
        """
        now_s = self._clock.monotonic_s()
        self._warned_s = {
            pair: time_s for pair, time_s in self._warned_s.items() if pair in self.expiring_unread
        }
        for (topic, group), expiring in sorted(self.expiring_unread.items()):
            if now_s - self._warned_s.get((topic, group), -WARNING_PERIOD_S) >= WARNING_PERIOD_S:
                self._warned_s[topic, group] = now_s
                log.warning(
                    "group %s will lose %d unread messages of topic %s, which are deleted from %s "
                    "on: let the group catch up, or raise fileReservedTime",
                    group,
                    expiring.message_count,
                    topic,
                    _format_time(expiring.earliest_deletion_ms),
                )


class RetentionHandlers:
    """Request handlers that start a clean-up, and the schedule of clean-ups and surveys.

    They answer CLEAN_EXPIRED_CONSUMEQUEUE (306), CLEAN_UNUSED_TOPIC (316) and
    DELETE_EXPIRED_COMMITLOG (329).
    """

    def __init__(
        self,
        context: BrokerContext,
        unread_monitor: UnreadMonitor,
    ) -> None:
        """Create the handlers, and schedule the first jobs. Nothing is deleted here.

        `unread_monitor` observes deletions. The first call of `run_due_jobs` checks the disk, and
        looks for unread messages that are deleted soon. The first clean-up is due
        FIRST_CLEAN_UP_DELAY_S seconds from now.
        """
        self._settings = context.settings
        self._topics = context.topics
        self._unread_monitor = unread_monitor
        self._store = context.store
        self._retention = context.store.retention
        self._clock = context.clock
        self._commit = context.group_commit.commit
        now_s = context.clock.monotonic_s()
        self._next_clean_up_s = now_s + FIRST_CLEAN_UP_DELAY_S
        self._next_disk_check_s = self._next_survey_s = now_s
        self._is_queue_clean_up_requested = False
        self._retention.observer = unread_monitor
        self._configure()
        self._settings.add_listener(self._configure)

    def _configure(self) -> None:
        """Pass the settings of the store on. Called after each change of a setting."""
        self._retention.config = self._settings.store

    # --- requests of tools

    def clean_log(self, command: Command, peer: Peer) -> Command:
        """Answer DELETE_EXPIRED_COMMITLOG (329): delete expired files of the commit log.

        They are deleted in the next twenty runs of the clean-up, at any hour of the day. The answer
        is SUCCESS and does not wait for them. The request is logged with the address of `peer`.
        """
        log.info("%s requested the deletion of expired files of the commit log", peer.remote)
        self._retention.request_manual_run()
        return Command(ResponseCode.SUCCESS)

    def clean_queues(self, command: Command, peer: Peer) -> Command:
        """Answer CLEAN_EXPIRED_CONSUMEQUEUE (306): delete files of queues before the log's start.

        RocketMQ's broker also removes a queue whose messages are all deleted. Offsets of the queue
        then start at 0 again, and its consumers would miss messages, so this broker keeps it.

        The answer is SUCCESS. The next call of `run_due_jobs` deletes the files.
        """
        log.info("%s requested the deletion of expired files of queues", peer.remote)
        self._is_queue_clean_up_requested = True
        return Command(ResponseCode.SUCCESS)

    def clean_topics(self, command: Command, peer: Peer) -> Command:
        """Answer CLEAN_UNUSED_TOPIC (316): delete the queues of topics that do not exist.

        Queues of system topics, and queues whose name begins with %LMQ%, are kept. The queues are
        deleted before the answer, which is SUCCESS, and each topic is logged.
        """
        stored_topics = {topic for topic, _ in self._store.queues()}
        unused_topics = sorted(filter(self._is_unused, stored_topics))
        if unused_topics:
            # `Store.delete_topic` commits too. Answers that wait for a commit must be released or
            # failed by their own group commit before that.
            self._commit()
        for topic in unused_topics:
            log.info("%s requested the deletion of unused topics: deleting %s", peer.remote, topic)
            self._store.delete_topic(topic)
        return Command(ResponseCode.SUCCESS)

    def _is_unused(self, topic: str) -> bool:
        """Return whether the queues of a topic may be deleted, because the topic does not exist."""
        is_kept = self._topics.is_system(topic) or topic.startswith(LMQ_PREFIX)
        return topic not in self._topics and not is_kept

    # --- scheduled jobs

    def check_disk(self) -> None:
        """Check how full the disks are, and give the result to the monitor.

        The store refuses sends while a disk is too full, and accepts them otherwise.
        """
        self._unread_monitor.disk_percent = self._retention.check_disk()

    def run_due_jobs(self) -> Iterator[Step]:
        """Do the jobs that are due: disk check, clean-ups of queues and log, and survey.

        The survey looks for unread messages that are deleted soon. The broker calls this about once
        a second. The iterator yields pauses in seconds, and functions for another thread. While the
        store refuses sends because the disk is full, each call checks the disk.
        """
        now_s = self._clock.monotonic_s()
        period_s = self._settings.store.clean_interval_ms / 1000
        if now_s >= self._next_disk_check_s or self._retention.is_refusing_sends:
            self._next_disk_check_s = now_s + period_s
            self.check_disk()
        if self._is_queue_clean_up_requested:
            self._is_queue_clean_up_requested = False
            yield from self._retention.clean_queues(now_s + period_s)
        if now_s >= self._next_clean_up_s:
            self._next_clean_up_s = now_s + period_s
            yield from self._retention.clean(now_s + period_s)
            self.check_disk()
        if now_s >= self._next_survey_s:
            self._next_survey_s = now_s + SURVEY_PERIOD_S
            yield from self._unread_monitor.survey()


def _add_expiring(earlier: ExpiringMessages | None, added: ExpiringMessages) -> ExpiringMessages:
    """Return the sum of two counts, with the earlier one of their deletion times.

    If `earlier` is None, return `added`.
    """
    if earlier is None:
        return added
    return ExpiringMessages(
        earlier.message_count + added.message_count,
        min(earlier.earliest_deletion_ms, added.earliest_deletion_ms),
    )


def _format_time(time_ms: int) -> str:
    """Return a time as text in ISO format, to the second, in this machine's time zone."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).astimezone()
    return moment.isoformat(sep=" ", timespec="seconds")
