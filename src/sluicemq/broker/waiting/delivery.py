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
        """The name of the source's background job in the log and in metrics."""

    @property
    def next_due_ms(self) -> int | None:
        """The time when the source's next known message is due, in ms since 1970.

        None means that the source knows no waiting message. A time in the past means that the
        message can be delivered now.
        """

    def deliver(self, work: TimeSlice) -> None:
        """Append the messages that are due at `work.now_ms` until `work` is over.

        The source counts each message with `work.count_done`. It does not commit the messages:
        `DelayedDelivery` commits those of all sources, and then calls `confirm_deliveries`.

        Raises StoreError if the store accepts no messages.
        """

    def confirm_deliveries(self, *, is_stored: bool) -> None:
        """Record the result of the group commit for the messages that `deliver` appended.

        With `is_stored`, these messages count as delivered. Without it, the commit failed, and the
        next `deliver` must append the same messages again. The call does nothing if no message was
        appended since the last call.
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
        """Create the sources of waiting messages: the delay levels and the timed messages.

        No file is read before `load`. A function is added to `intake` that stores each new delayed
        message in the topic where it waits. `group_commit` will call this object when such a
        message has become visible.

        `call_soon` and `call_later` are methods of the event loop. If `call_later` is None, the
        caller must call `run_slice` regularly. `jobs` supervises each source separately, so a
        source that fails does not keep the others from delivering.
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

        group_commit.topic_listeners[SCHEDULE_TOPIC] = self._on_level_messages
        group_commit.topic_listeners[TIMER_TOPIC] = lambda queue_id: self._worker.schedule()

    def _on_level_messages(self, queue_id: int) -> None:
        """Schedule the delivery of new messages of a delay level, which are visible now."""
        self.levels.note_new_messages(queue_id)
        self.schedule_run()

    def load(self) -> None:
        """Load the saved clock, the delay levels, the timer metrics and the timers. Blocking.

        Afterwards `schedule_run` and `run_slice` have an effect, unless the broker is read-only.

        Raises StoreDamagedError if a file cannot be parsed, and OSError.
        """
        self.saved_clock.load()  # First: the others compare due times with the steady clock.
        self.levels.load()
        self.metrics.load()  # Before the timers: a rebuild of the timers clears these counts.
        self.timers.load()
        self._worker.is_enabled = not self._settings.is_read_only

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents, tables with a file, that the broker saves regularly."""
        return (
            self.levels.document,
            self.levels.cancellations,
            self.metrics.document,
            self.saved_clock.document,
        )

    # --- when to run

    @property
    def next_due_ms(self) -> int | None:
        """The time when the next known message is due, in ms since 1970; None if none waits."""
        times = [source.next_due_ms for source in self.sources]
        return min((time for time in times if time is not None), default=None)

    def schedule_run(self) -> None:
        """Schedule the next call of `run_slice` for the time when there is something to do.

        That is the next iteration of the event loop if a message is due, or if timed messages must
        be indexed or loaded. Otherwise it is the time when the next message is due. A source that
        pauses after a failure has nothing to do before its pause ends. After a failed commit no
        source has anything to do before the pause of the worker ends.

        Do nothing before `load`, after `stop`, and if no message waits.
        """
        if not self._worker.is_enabled:
            return
        now_s = self._clock.monotonic_s()
        if self._worker.is_paused:
            self._set_timer(self._worker.paused_until_s, now_s)
            return
        next_run_s = self._find_next_run_s(now_s)
        if next_run_s <= now_s:
            self._worker.schedule()
        elif next_run_s < math.inf:
            self._set_timer(next_run_s, now_s)

    def _find_next_run_s(self, now_s: float) -> float:
        """Return the monotonic time, in seconds, when there is something to do.

        It is `now_s`, the present time, or earlier if there is something to do now. It is infinite
        if no message waits.
        """
        now_ms = self._clock.now_ms()
        next_run_s = math.inf
        for source in self.sources:
            # A due timed message may have to wait until more of the timer queue is indexed.
            is_timers = source is self.timers
            next_ms = self.timers.next_deliverable_ms if is_timers else source.next_due_ms
            if next_ms is not None:
                due_s = now_s + (next_ms - now_ms) / 1000
                run_s = max(due_s, self._jobs.resume_s(source.name))
                next_run_s = min(next_run_s, run_s)
        if self.timers.is_behind:
            prepare_s = max(now_s, self._jobs.resume_s(PREPARE_JOB))
            next_run_s = min(next_run_s, prepare_s)
        return next_run_s

    def _set_timer(self, time_s: float, now_s: float) -> None:
        """Let the event loop call `run_slice` at the monotonic time `time_s`, or earlier.

        There is only one timer. If it is set to an earlier time, it stays, because `run_slice` sets
        the next one at its end. If it is set to a later time, it is replaced. `now_s` is the
        present monotonic time. Do nothing if `call_later` is None.
        """
        if self.call_later is None:
            return
        if self._timer is not None:
            if self._timer_s <= time_s:
                return
            self._timer.cancel()

        def run() -> None:
            self._timer = None
            self.run_slice()

        self._timer_s = time_s
        self._timer = self.call_later(max(time_s - now_s, 0.0), run)

    # --- the work

    def run_slice(self) -> None:
        """Deliver due messages for a short time, prepare the next ones, and schedule the next call.

        While the worker pauses after a failed commit, nothing is delivered. An error in one of the
        three steps is logged. That step then pauses, and the others continue.

        Do nothing before `load` and after `stop`.
        """
        if not self._worker.is_enabled:
            return
        if not self._worker.is_paused:
            self._jobs.run_unless_pausing("delivery", self._deliver)
        self._jobs.run_unless_pausing(PREPARE_JOB, self._prepare)
        self._jobs.run_unless_pausing("delivery alarm", self.schedule_run)

    def _deliver(self) -> None:
        """Let the sources append due messages to their topics, and commit them together.

        All sources share one slice, which limits time and messages. If the store accepts no more
        messages, the later sources append none. The appended messages are committed in any case.
        Then `confirm_deliveries` of each source is called with the result of the commit. If the
        store or the commit failed, the worker pauses, and the reason is logged.
        """
        work = TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES)
        have_all_succeeded, store_error = self._append_due_messages(work)
        # A source that failed may have appended messages before, which it did not count.
        is_nothing_appended = have_all_succeeded and work.remaining == SLICE_MESSAGES
        is_stored = is_nothing_appended or self.redelivery.commit()

        if store_error is not None or not is_stored:
            reason = store_error or "the group commit failed"
            self._worker.pause_after_failure(f"delayed messages are delivered later: {reason}")
        else:
            self._worker.clear_failure()
        for source in self.sources:
            confirm = partial(source.confirm_deliveries, is_stored=is_stored)
            self._jobs.run_now(f"{source.name}, settling", confirm)

    def _append_due_messages(self, work: TimeSlice) -> tuple[bool, StoreError | None]:
        """Call `deliver` of each source, until the store accepts no more messages.

        Return (whether all sources succeeded, error). The error is the StoreError that says why the
        store accepts no messages, or None.
        """
        store_error: StoreError | None = None

        def deliver(source: DueMessageSource) -> None:
            # A StoreError must not reach the supervisor, which would let the source pause. The
            # source has not failed: the store has.
            nonlocal store_error
            try:
                source.deliver(work)
            except StoreError as error:
                store_error = error

        have_all_succeeded = True
        for source in self.sources:
            have_all_succeeded &= self._jobs.run_unless_pausing(
                source.name, partial(deliver, source)
            )
            if store_error is not None:
                return False, store_error
        return have_all_succeeded, None

    def _prepare(self) -> None:
        """Index new timed messages, and load those that are due soon, for one slice.

        If the timer log cannot be written, the worker pauses, and the reason is logged.
        """
        try:
            self.timers.prepare(TimeSlice(self._clock, SLICE_S, SLICE_MESSAGES))
        except OSError as error:
            self._worker.pause_after_failure(f"cannot write the timer log: {error}")

    def stop(self) -> None:
        """Deliver no more messages, and cancel the timer.

        The document of the saved clock is marked as changed, so that the last save of all documents
        writes the clocks as they are at the shutdown. This method writes no file itself.
        """
        self.saved_clock.document.changed = True
        self._worker.is_enabled = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def save(self) -> None:
        """Save the timer wheel, timer log and checkpoint to their files. Blocking.

        If `stop` was called before, the files are also sealed: they are marked as complete, so that
        the next start trusts them.

        Raises OSError or StoreError.
        """
        with closing(self.timers.save(is_last=True)) as write_functions:
            for write_files in write_functions:
                write_files()
        if not self._worker.is_enabled:  # nothing is delivered or indexed any more
            self.timers.seal()

    def remove_old_log_files(self) -> None:
        """Remove the files of the timer log whose messages retention has all removed.

        These messages were stored before the present start of the commit log. Raises OSError.
        """
        self.timers.files.log.remove_before(self._store.log_start)

    def get_runtime_info(self) -> dict[str, str]:
        """Return the fields of GET_BROKER_RUNTIME_INFO (28) about waiting messages.

        - `timerReadBehind`: by how many seconds the timer wheel is read late.
        - `timerOffsetBehind`: the number of messages of the timer queue that are not indexed.
        - `timerCongestNum`: the number of timed messages that wait.
        - `scheduleMessageOffset_<level>`: the delivered offset of a delay level and the end of its
          queue, such as "7,9".

        The other values are decimal numbers as strings (spec/admin.md §3).
        """
        timers = self.timers
        # The slot of the present second is still being read.
        behind_ms = max(self._clock.now_ms() - timers.read_ms - 1000, 0)
        return {
            "timerReadBehind": str(behind_ms // 1000),
            "timerOffsetBehind": str(timers.unindexed_count),
            "timerCongestNum": str(self.metrics.total_count),
            **self.levels.get_runtime_info(),
        }
