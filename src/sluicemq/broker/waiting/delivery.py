"""Delivers all messages that are due at some time: delay levels, timers, and popped messages.

`DelayedDelivery.run_slice` delivers due messages and prepares the next ones, for a few
milliseconds. Then other work of the event loop has its turn. If messages are still due, the next
slice follows at once, else when the next message is due, to the millisecond. The broker also calls
`run_slice` regularly: that loads the timers of the near future, and drives the delivery under a
clock that a test advances.

The messages that a slice appends are stored by a group commit at its end. If the commit fails, they
are appended again after `SliceWorker.PAUSE_S`, until it succeeds.
"""

import logging
import math
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Final, Protocol

from sluicemq.broker.background import SliceWorker, TimeSlice
from sluicemq.broker.documents import Document
from sluicemq.broker.group_commit import GroupCommit
from sluicemq.broker.produce.intake import DueMessageDelivery, MessageIntake
from sluicemq.broker.settings import Settings
from sluicemq.broker.waiting.levels import DelayLevels
from sluicemq.broker.waiting.listing import TimerListing
from sluicemq.broker.waiting.rewrite import DelayRewriter
from sluicemq.broker.waiting.saved_clock import SavedClock
from sluicemq.broker.waiting.timer_metrics import TimerMetrics
from sluicemq.broker.waiting.timers import Timers
from sluicemq.clock import SteadyClock
from sluicemq.errors import StoreError
from sluicemq.files import Files
from sluicemq.model.system_names import SCHEDULE_TOPIC, TIMER_TOPIC
from sluicemq.net.work.background import CallLater, TimerHandle
from sluicemq.store.store import Store
from sluicemq.supervision import Supervisor

log = logging.getLogger(__name__)

SLICE_S: Final = 0.004
"""The time of a slice in seconds."""
SLICE_MESSAGES: Final = 2048
"""The most messages of a slice."""
PREPARE_JOB: Final = "timer files"
"""The background job that indexes timed messages and loads those of the near future."""


class DueMessageSource(Protocol):
    """Something that has messages which are due at some time."""

    @property
    def name(self) -> str:
        """The name of its background job in the log and in metrics."""

    @property
    def next_due_ms(self) -> int | None:
        """When its next known message is due, in ms since 1970; None without one."""

    def deliver(self, work: TimeSlice) -> None:
        """Append due messages until the slice is over. They are committed by the caller.

        Each message is counted as a step of `work`. Raises StoreError if the store accepts no
        messages at the moment.
        """

    def confirm_deliveries(self, *, is_stored: bool) -> None:
        """Learn whether the messages that `deliver` appended since the last call are stored.

        If they are not, the next `deliver` must append them again. Called after each slice, also if
        it appended nothing.
        """


class DelayedDelivery:
    """Delivers the messages of all sources of a broker when they are due."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        intake: MessageIntake,
        group_commit: GroupCommit,
        *,
        files: Files,
        clock: SteadyClock,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: CallLater | None = None,
        jobs: Supervisor,
    ) -> None:
        """Create the delay levels and timers of a broker, and register with its other parts.

        `intake` rewrites messages that must wait from now on, and `group_commit` reports new ones.
        `call_soon` and `call_later` are those of the event loop. Without `call_later`, messages are
        delivered only when the broker calls `run_slice`. `jobs` supervises the sources: one that
        fails does not keep the others from delivering. Nothing is delivered before `load`.
        """
        self._jobs = jobs
        self._settings = settings
        self._store = store
        self._clock = clock
        self._worker = SliceWorker(self.run_slice, clock, call_soon)
        self.saved_clock = SavedClock(files, settings.store.root, clock)
        self.call_later = call_later
        self.redelivery = DueMessageDelivery(store, group_commit, intake.delivered_elsewhere)
        self.levels = DelayLevels(settings, store, self.redelivery, files, clock, jobs)
        self.metrics = TimerMetrics(files, settings.store.root, clock)
        self.timers = Timers(
            settings,
            store,
            self.redelivery,
            intake,
            files,
            clock,
            add_count=self.metrics.add,
            clear_counts=self.metrics.counts.clear,
        )
        self.timer_listing = TimerListing(store, self.timers, self.timers.placing, clock)
        self.sources: list[DueMessageSource] = [self.levels, self.timers]
        """The sources, in the order in which they deliver."""
        intake.rewrites.append(
            DelayRewriter(settings, clock, self.timers.files.message_count).rewrite
        )
        self._timer: TimerHandle | None = None
        self._timer_s = 0.0
        """The monotonic time of the next call of `run_slice` by the timer."""

        def handle_level_messages(queue_id: int) -> None:
            self.levels.note_new_messages(queue_id)
            self.schedule_run()

        group_commit.topic_listeners[SCHEDULE_TOPIC] = handle_level_messages
        group_commit.topic_listeners[TIMER_TOPIC] = lambda queue_id: self._worker.schedule()

    def load(self) -> None:
        """Load the files. Blocking. Delivery may begin afterwards, unless the broker is read-only.

        Raises StoreDamagedError or OSError.
        """
        self.saved_clock.load()
        self.levels.load()
        self.metrics.load()  # first: timers that are rebuilt are counted again
        self.timers.load()
        self._worker.is_enabled = not self._settings.is_read_only

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents that the broker saves regularly."""
        return (
            self.levels.document,
            self.levels.cancellations,
            self.metrics.document,
            self.saved_clock.document,
        )

    # --- when to run

    @property
    def next_due_ms(self) -> int | None:
        """When the next known message is due, in ms since 1970; None without one."""
        times = [source.next_due_ms for source in self.sources]
        return min((time for time in times if time is not None), default=None)

    def schedule_run(self) -> None:
        """Schedule the next slice: at once if there is work, else when the next message is due.

        After a failure, it is scheduled for the end of the pause. A source that has failed counts
        only from the time at which its supervisor resumes it. Do nothing before `load` and after
        `stop`.
        """
        if not self._worker.is_enabled:
            return
        now_s = self._clock.monotonic_s()
        if self._worker.is_paused:
            self._run_at(self._worker.paused_until_s, now_s)
            return
        now_ms, times_s = self._clock.now_ms(), []
        for source in self.sources:
            is_timers = source is self.timers
            next_ms = self.timers.next_deliverable_ms if is_timers else source.next_due_ms
            if next_ms is not None:
                due_s = now_s + (next_ms - now_ms) / 1000
                times_s.append(max(due_s, self._jobs.resume_s(source.name)))
        if self.timers.is_behind:
            times_s.append(max(now_s, self._jobs.resume_s(PREPARE_JOB)))
        first_s = min(times_s, default=math.inf)
        if first_s <= now_s:
            self._worker.schedule()
        elif first_s < math.inf:
            self._run_at(first_s, now_s)

    def _run_at(self, time_s: float, now_s: float) -> None:
        """Let the timer call `run_slice` at the monotonic time `time_s`.

        `now_s` is the present monotonic time. Do nothing if the timer is set to an earlier time, or
        if there is no `call_later`.
        """
        if self.call_later is None:
            return
        if self._timer is not None:
            if self._timer_s <= time_s:
                return  # the slice schedules the next one
            self._timer.cancel()

        def run() -> None:
            self._timer = None
            self.run_slice()

        self._timer_s = time_s
        self._timer = self.call_later(max(time_s - now_s, 0.0), run)

    # --- the work

    def run_slice(self) -> None:
        """Deliver due messages for one slice, prepare the next ones, and schedule the next slice.

        Do nothing before `load` and after `stop`.
        """
        if not self._worker.is_enabled:
            return
        if not self._worker.is_paused:
            self._jobs.run_unless_pausing("delivery", self._deliver)
        self._jobs.run_unless_pausing(PREPARE_JOB, self._prepare)
        self._jobs.run_unless_pausing("delivery alarm", self.schedule_run)

    def _deliver(self) -> None:
        """Deliver due messages of all sources for one slice, and commit them.

        Then each source learns whether they are stored. If the store refuses messages or the commit
        fails, the following sources are left out, and the worker pauses.
        """
        work = TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES)
        store_error: StoreError | None = None

        def deliver(source: DueMessageSource) -> None:
            nonlocal store_error
            try:
                source.deliver(work)
            except StoreError as error:
                store_error = error

        have_all_run = True  # a source that failed may have appended messages
        for source in self.sources:
            if store_error is None:
                have_all_run &= self._jobs.run_unless_pausing(source.name, partial(deliver, source))
        was_nothing_delivered = work.remaining == SLICE_MESSAGES
        needs_no_commit = was_nothing_delivered and store_error is None and have_all_run
        is_stored = needs_no_commit or self.redelivery.commit()
        if store_error is not None or not is_stored:
            reason = store_error or "the group commit failed"
            self._worker.pause_after_failure(f"delayed messages are delivered later: {reason}")
        else:
            self._worker.clear_failure()
        for source in self.sources:
            confirm = partial(source.confirm_deliveries, is_stored=is_stored)
            self._jobs.run_now(f"{source.name}, settling", confirm)

    def _prepare(self) -> None:
        """Index and load timed messages for one slice, and pause the worker if that fails."""
        try:
            self.timers.prepare(TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES))
        except OSError as error:
            self._worker.pause_after_failure(f"cannot write the timer log: {error}")

    def stop(self) -> None:
        """Deliver no more messages, and cancel the timer.

        The file of the saved clock is marked as changed, so that it is written with the documents.
        """
        self.saved_clock.document.changed = True
        self._worker.is_enabled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def save(self) -> None:
        """Save timer wheel, timer log and checkpoint if they have changed. Blocking.

        After `stop`, the files are sealed: the next start trusts them. Raises OSError or
        StoreError.
        """
        with closing(self.timers.save(is_last=True)) as steps:
            for step in steps:
                step()
        if not self._worker.is_enabled:  # nothing is delivered or indexed any more
            self.timers.seal()

    def remove_old_log_files(self) -> None:
        """Remove the files of the timer log that nothing needs any more. Raises OSError."""
        self.timers.files.log.remove_before(self._store.log_start)

    def get_runtime_info(self) -> dict[str, str]:
        """Return the fields of GET_BROKER_RUNTIME_INFO (28) about waiting messages.

        spec/admin.md §3 describes them.
        """
        timers = self.timers
        behind_ms = max(self._clock.now_ms() - timers.read_ms - 1000, 0)
        return {
            "timerReadBehind": str(behind_ms // 1000),
            "timerOffsetBehind": str(timers.unindexed_count),
            "timerCongestNum": str(self.metrics.total_count),
            **self.levels.get_runtime_info(),
        }
