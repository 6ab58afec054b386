"""Delay levels and timers together: one alarm, slices of work that leave others their turn.

`run` delivers what is due and prepares what comes, for a few milliseconds; when there is more it
asks for the loop's next turn, else for a call at the time at which the next message is due, to the
millisecond. The sweep calls it as well: it loads the near future, and it is what drives everything
under a clock that a test moves.

What a slice has put is in the log when its turn has ended; a turn that failed is put again after a
tenth of a second, until it succeeds.
"""

from collections.abc import Callable
from typing import Final, Protocol

from sluicemq.broker.background import Slice, Worker
from sluicemq.broker.documents import Document
from sluicemq.broker.produce.intake import Intake
from sluicemq.broker.produce.redelivery import Redelivery
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import SCHEDULE_TOPIC, TIMER_TOPIC
from sluicemq.broker.turns import Turns
from sluicemq.broker.waiting.levels import DelayLevels
from sluicemq.broker.waiting.rewrite import DelayRewrite
from sluicemq.broker.waiting.timers import Timers
from sluicemq.clock import Clock
from sluicemq.errors import StoreError
from sluicemq.files import Files
from sluicemq.store.store import Store

WAITING_TOPICS: Final = frozenset({SCHEDULE_TOPIC, TIMER_TOPIC})
SLICE_S: Final = 0.004
SLICE_MESSAGES: Final = 2048


class Alarm(Protocol):
    """What a loop's `call_later` returns."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Alarm]


class Delayed:
    """The broker's part for everything that is delivered later."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        intake: Intake,
        turns: Turns,
        *,
        files: Files,
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._worker = Worker(self.run, clock, call_soon)
        self.call_later: CallLater | None = None
        """Set by who has a loop; without it the sweep alone drives."""
        self._redelivery = Redelivery(store, turns)
        self.levels = DelayLevels(settings, store, self._redelivery, files, clock)
        self.timers = Timers(settings, store, self._redelivery, intake, files, clock)
        intake.rewrites.append(DelayRewrite(settings, clock, self.timers.files.count).rewrite)
        self._alarm: Alarm | None = None
        self._alarm_s = 0.0

    def load(self) -> None:
        """Blocking; delivery may begin after it. Raises StoreDamagedError, OSError."""
        self.levels.load()
        self.timers.load()
        self._worker.is_on = not self._settings.is_read_only

    @property
    def documents(self) -> tuple[Document, ...]:
        return (
            self.levels.document, self.levels.cancellations, self.timers.metrics.document,
        )  # fmt: skip

    # --- when

    def arrived(self, topic: str, queue_id: int) -> None:
        """Messages of a queue have become visible: maybe one that waits."""
        if topic == SCHEDULE_TOPIC:
            self.levels.arrived(queue_id)
            self._plan()
        elif topic == TIMER_TOPIC:
            self._worker.soon()

    @property
    def next_ms(self) -> int | None:
        """When the next message that is known of is due; None without one."""
        times = [t for t in (self.levels.next_ms, self.timers.next_ms) if t is not None]
        return min(times, default=None)

    def _plan(self) -> None:
        """Come again: at once when there is work, else when the next message is due."""
        if not self._worker.is_on:
            return
        now_s = self._clock.monotonic_s()
        if self._worker.is_paused:
            self._wake_at(self._worker.paused_until_s, now_s)
            return
        next_ms, now_ms = self.next_ms, self._clock.now_ms()
        if self.timers.is_behind or (next_ms is not None and next_ms <= now_ms):
            self._worker.soon()
        elif next_ms is not None:
            self._wake_at(now_s + (next_ms - now_ms) / 1000, now_s)

    def _wake_at(self, time_s: float, now_s: float) -> None:
        if self.call_later is None:
            return
        if self._alarm is not None:
            if self._alarm_s <= time_s:
                return  # it rings in time, and plans anew
            self._alarm.cancel()
        self._alarm_s = time_s
        self._alarm = self.call_later(max(time_s - now_s, 0.0), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.run()

    # --- the work

    def run(self) -> None:
        """One slice."""
        if not self._worker.is_on:
            return
        if not self._worker.is_paused:
            is_stored = self._deliver()
            self.levels.settle(is_stored=is_stored)
            self.timers.settle(is_stored=is_stored)
        try:
            self.timers.prepare(Slice(self._clock, SLICE_S, SLICE_MESSAGES))
        except OSError as error:
            self._worker.failed(f"the timer log cannot be written: {error}")
        self._plan()

    def _deliver(self) -> bool:
        """Is everything that was put in the log?"""
        work = Slice(self._clock, SLICE_S, SLICE_MESSAGES)
        error: StoreError | None = None
        try:
            self.levels.deliver(work)
            self.timers.deliver(work)
        except StoreError as stopped:
            error = stopped
        is_idle = work.left == SLICE_MESSAGES and error is None
        is_stored = is_idle or self._redelivery.finish()
        if error is not None or not is_stored:
            self._worker.failed(f"delayed messages wait longer: {error or 'the turn failed'}")
        else:
            self._worker.succeeded()
        return is_stored

    def stop(self) -> None:
        """Deliver no more."""
        self._worker.is_on = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def save(self) -> None:
        """Blocking, at the end or for who has no other thread: wheel, log and checkpoint."""
        saving = self.timers.begin_save(is_last=True)
        if saving is None:
            return
        is_written = False
        try:
            saving.run()
            is_written = True
        finally:
            self.timers.end_save(saving, is_written=is_written)

    def clean(self) -> None:
        """Now and then: timer log files that nothing needs any more. Raises OSError."""
        self.timers.files.remove_before(self._store.offset_min)

    def runtime(self) -> dict[str, str]:
        """For request 28 (spec/admin.md §3)."""
        timers = self.timers
        behind_ms = max(self._clock.now_ms() - timers.read_ms - 1000, 0)
        return {
            "timerReadBehind": str(behind_ms // 1000),
            "timerOffsetBehind": str(timers.queue_behind),
            "timerCongestNum": str(timers.count),
            **self.levels.runtime(),
        }
