"""When answers leave: what a handler may return besides an answer, and the turn.

    Durable      leaves when the turn's messages are safe: here
    Parked       a pull or pop that waits for messages: `consume/longpoll.py`
    Announced    leaves when a change is on disk and the name servers know of it: `registration.py`
    Postponed    is worked at in steps: `background.py`

A turn is what happens in one iteration of the event loop. Handlers append messages to the store,
and their answers are held; the first of them asks for `end` to be called when the iteration is
over. `end` commits once for all connections, and only then the answers leave, one write a
connection:

    append append append … | commit | answers and woken long polls        ASYNC_FLUSH
    append append append … | commit | fsync | publish | answers …         SYNC_FLUSH
    append append append … | commit | (fsync) | gate | publish | answers  SYNC_MASTER

The fsync runs elsewhere (`run_sync`). While one runs, later turns collect; they share the next
one: group commit. The gate opens when as many replicas as have to have the turn
(`replicas/insync.py`); many turns may wait for it. A message is visible from the moment its answer
may leave, never before.

When a commit or an fsync fails, exactly the answers held for it become errors, which say what is
known: a failed commit is undone; what a failed fsync was for is written, and may come back when the
broker starts again. An fsync that the system has only no descriptor or memory for is tried again at
the next sweep. One that takes longer than syncFlushTimeout turns its answers into
FLUSH_DISK_TIMEOUT: stored, not known to be on disk (spec/remoting.md §19). A gate that stays shut
longer than slaveTimeout turns them into FLUSH_SLAVE_TIMEOUT, and one that cannot open into
SLAVE_NOT_AVAILABLE, at once: stored, not replicated (yet), and not visible before.

No asyncio here: the loop is two callables, so a test or a simulator can step it.
"""

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from sluicemq.clock import Clock
from sluicemq.errors import StoreError, StoreFullError, StoreTransientError, StoreUncertainError
from sluicemq.net.dispatch import Peer
from sluicemq.net.limits import log_slow_request
from sluicemq.net.work.background import WorkItem, run_first_step
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import FLAG_RESPONSE, SERVER_LANGUAGE, Command, decode, encode

T = TypeVar("T")
log = logging.getLogger(__name__)

Visible = list[tuple[str, int, int]]
LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

LATE: Final = "the fsync takes longer than syncFlushTimeout; the message is stored."
SLAVE_LATE: Final = "slaves take longer than slaveTimeout; it is stored, seen when they have it."
SLAVE_MISSING: Final = "no slave is near (haMaxGapNotInSync); it is stored, seen when one has it."


class Durable(NamedTuple):
    """An answer that may leave when the turn's messages are safe.

    `answer` is the encoded frame for the request it belongs to, b"" for one that wants none.
    `waits` is False when the producer does not want to wait for the fsync (property WAIT=false).
    `announces` is True when the send created a topic, which the name servers have to know first.
    """

    answer: bytes
    waits: bool = True
    announces: bool = False

    @classmethod
    def to(cls, command: Command, answer: bytes) -> "Durable":
        """The answer to a command that may want none."""
        return cls(b"" if command.is_oneway else answer)


class Announced(NamedTuple):
    """An answer that leaves when a change of topics or groups is saved and registered."""

    answer: Command


class Postponed(NamedTuple):
    """A request that takes long: work in steps (`background.WorkItem`) that return its outcome."""

    steps: Generator[Callable[[], Any] | None, Any, Any]


def in_steps(steps: WorkItem[T]) -> T | Postponed:
    """Do the first step of a request's work. Return its outcome if it has ended, else a Postponed
    that goes on with it."""
    found = run_first_step(steps)
    return Postponed(found) if isinstance(found, Generator) else found


@dataclass(slots=True, eq=False)
class Parked:
    """A pull or pop that waits for messages.

    It waits in `queues`, topic and queue id of each.
    `scan_offset` is where the next look at the queue begins: it moves on over messages that the
    filter does not want, so that each is looked at once. `look(parked, is_last)` returns the
    answer, or None to go on waiting; with `is_last` it always answers. While `is_looking` it is
    about to look.

    A pop is one of its `contest`, those that a message is for only once; "" for a pull.
    `leaves_more`: it has answered, and there is something for the others.
    """

    command: Command
    queues: tuple[tuple[str, int], ...]
    scan_offset: int
    deadline_s: float
    look: "Callable[[Parked, bool], bytes | Durable | None]"
    is_done: bool = False
    is_looking: bool = False
    contest: str = ""
    leaves_more: bool = False


def error_answer(answer: bytes, error: BaseException, remark: str) -> bytes:
    """What leaves instead of an encoded answer whose change did not reach the disk."""
    full = isinstance(error, StoreFullError)
    code = ResponseCode.SERVICE_NOT_AVAILABLE if full else ResponseCode.SYSTEM_ERROR
    opaque = decode(answer[4:]).opaque
    return encode(Command(code, {}, b"", opaque, FLAG_RESPONSE, remark, SERVER_LANGUAGE))


def unconfirmed_answer(answer: bytes, error: BaseException) -> bytes:
    """What leaves instead of an encoded answer whose change is written and was not synced: whether
    it is there after a restart, nobody knows."""
    remark = (
        "it was written, but the disk did not confirm it, so it may come back when the broker is"
        f" started again: {error}"
    )
    return error_answer(answer, error, remark)


class CommitStore(Protocol):
    """What a turn needs of the store."""

    on_visible: Callable[[Visible], None] | None

    def commit(self) -> int: ...

    def publish(self, end_offset: int) -> None: ...

    def confirm(self, end_offset: int) -> None: ...


class ReplicationGate(Protocol):
    """What a turn needs of the replicas: `insync.InSync`. `holds_answers` of a SYNC_MASTER, and not
    of one that is quick to answer and slow to show."""

    @property
    def on_confirmed(self) -> list[Callable[[int], None]]: ...

    @property
    def holds_answers(self) -> bool: ...

    @property
    def is_slave_missing(self) -> bool: ...

    @property
    def timeout_s(self) -> float: ...

    def wait(self, end: int, done: Callable[[int | BaseException], None]) -> None: ...


RunSync = Callable[[Callable[[int | BaseException], None]], None]
"""Starts `store.sync()` elsewhere and calls back, in the loop's thread, with its end or error."""


@dataclass(slots=True, eq=False)
class PendingAnswers:
    """Answers that leave together. `announcing`: of sends that have made a topic."""

    count: int = 0
    frames: dict[Peer, list[bytes]] = field(default_factory=dict)
    announcing: list[tuple[Peer, bytes]] = field(default_factory=list)
    started_s: float = 0.0

    def __iter__(self) -> Iterator[tuple[Peer, bytes]]:
        """Connection and answer, without those that nobody wants."""
        for peer, frames in self.frames.items():
            yield from ((peer, frame) for frame in frames if frame)
        yield from ((peer, frame) for peer, frame in self.announcing if frame)

    def join(self, others: "PendingAnswers") -> None:
        """Takes over others, which leave at the same time."""
        self.count += others.count
        for peer, frames in others.frames.items():
            self.frames.setdefault(peer, []).extend(frames)
        self.announcing += others.announcing


class GroupCommit:
    """Holds the answers of sends until their messages are safe.

    `announce(peer, answer)` takes those that have to wait for the name servers too. With a `gate`
    nothing is visible before it opens.
    """

    def __init__(
        self,
        store: CommitStore,
        clock: Clock,
        *,
        call_soon: Callable[[Callable[[], None]], object],
        run_sync: RunSync | None = None,
        announce: Callable[[Peer, bytes], None] = Peer.write,
        sync_timeout_s: float = 5.0,
        gate: ReplicationGate | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._call_soon = call_soon
        self.wake: Callable[[str, int, int], None] = lambda topic, queue_id, end: None
        """Told of each queue that has more to show, up to its new end; `arrivals` by topic, when
        what it has stored there is the broker's own."""
        self.arrivals: dict[str, Callable[[int], None]] = {}
        self._run_sync = run_sync
        self._announce = announce
        self._sync_timeout_s = sync_timeout_s
        self._gate = gate
        if gate is not None:
            gate.on_confirmed.append(self.on_replicated)
        self._holds = gate is not None and gate.holds_answers
        self._gated: deque[PendingAnswers] = deque()
        """They wait for the gate, in its order."""
        self.on_commit: Callable[[], None] | None = None
        """Told when the log has more, for those who send it on."""
        self._waits = run_sync is not None or self._holds
        self._written = self._synced = PendingAnswers()
        """The turn's answers: those that leave after the commit, and those that wait for the fsync
        and the gate after it. Without them they are the same."""
        if self._waits:
            self._synced = PendingAnswers()
        self._next: PendingAnswers | None = None
        """They wait for the next fsync, `_syncing` for the one that runs."""
        self._syncing: PendingAnswers | None = None
        self._outgoing: dict[Peer, list[bytes]] = {}
        self._visible: Visible = []
        self._is_scheduled = False
        self._has_own = False
        self._undos: list[Callable[[], object]] = []
        self._started_s = 0.0
        self.latency_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.latency_sum_s = 0.0
        self.commits = 0
        self.commits_failed = 0
        self.slow_commit_s = math.inf
        """A turn that takes longer goes into the log."""
        # Who waits is woken when the store is done: what goes wrong there is no failed commit.
        store.on_visible = self._visible.extend

    # ------------------------------------------------------------------------- during a turn

    def send_after_commit(
        self, peer: Peer, answer: bytes, waits: bool = True, announces: bool = False
    ) -> None:
        """Keeps an answer until the end of the turn; see `Durable`. HOT."""
        if not self._is_scheduled:
            self.schedule_commit()
        answers = self._synced if waits else self._written
        answers.count += 1
        if announces:
            answers.announcing.append((peer, answer))
            return
        frames = answers.frames.get(peer)
        if frames is None:
            answers.frames[peer] = [answer]
        else:
            frames.append(answer)

    def send_all_after_commit(self, peer: Peer, frames: list[bytes]) -> None:
        """The same for plain sends that came one behind the other. HOT."""
        if not self._is_scheduled:
            self.schedule_commit()
        answers = self._synced
        answers.count += len(frames)
        known = answers.frames.get(peer)
        if known is None:
            answers.frames[peer] = frames
        else:
            known += frames

    def commit_internal(self, undo: Callable[[], object] | None = None) -> None:
        """The broker itself has appended something: as `soon`, and it wants to be seen, also when
        nobody else's answer waits for an fsync. `undo` is called if the commit fails, the last one
        first: what the turn had appended never was."""
        self._has_own = True
        if undo is not None:
            self._undos.append(undo)
        self.schedule_commit()

    def commit_now(self) -> bool:
        """End the turn now, with what the broker has appended; False when that is not stored."""
        failures = self.commits_failed
        self._has_own = True
        self.commit()
        return failures == self.commits_failed

    def schedule_commit(self) -> None:
        """The turn has something to commit: it ends when the loop's iteration does."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._started_s = self._clock.monotonic_s()
            self._call_soon(self.commit)

    def queue_frame(self, peer: Peer, frame: bytes) -> None:
        """Adds a frame to what leaves at the end of this turn."""
        self._outgoing.setdefault(peer, []).append(frame)

    # ------------------------------------------------------------------------------- its end

    def commit(self) -> None:
        """Commits the turn, when it has something to commit, and lets its answers go. HOT."""
        if not (self._is_scheduled or self._has_own):
            return
        self._is_scheduled = False
        written, synced = self._written, self._synced
        self._written = self._synced = PendingAnswers()
        if self._waits:
            self._synced = PendingAnswers()
        written.started_s = synced.started_s = self._started_s
        own, self._has_own = self._has_own, False
        undos, self._undos = self._undos, []
        self.commits += 1
        try:
            end = self._store.commit()
        except Exception as error:  # noqa: BLE001 -- nobody may be left without an answer
            if synced is not written:
                written.join(synced)
            self._take_back(written, undos, error)
            return
        self._release(written)
        if self._run_sync is not None and (synced.count or written.count or own):
            # Also for those alone that do not wait: others see their messages after the fsync.
            if self._next is None:
                self._next = synced
            else:
                self._next.join(synced)
            self._start_sync()
        elif self._gate is not None:
            self._to_gate(synced if self._holds else PendingAnswers(), end)
        if self.on_commit is not None:
            self.on_commit()
        self.flush()

    def _take_back(
        self, answers: PendingAnswers, undos: list[Callable[[], object]], error: Exception
    ) -> None:
        """What the turn had appended never was."""
        self.commits_failed += 1
        if not isinstance(error, StoreError | OSError):
            log.error("the commit of a turn failed", exc_info=error)
        for undo in reversed(undos):
            undo()
        self._fail(answers, error)
        self.flush()

    def _release(self, answers: PendingAnswers) -> None:
        """What was waited for is done: the answers leave, and who waits for messages is woken."""
        if answers.count:
            for peer, frames in answers.frames.items() if self._outgoing else ():
                frames[:0] = self._outgoing.pop(peer, ())
            self._outgoing |= answers.frames
            for peer, answer in answers.announcing:
                self._announce(peer, answer)
            seconds, count = self._clock.monotonic_s() - answers.started_s, answers.count
            self.latency_counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += count
            self.latency_sum_s += seconds * count
            if seconds > self.slow_commit_s:
                who = next(iter(answers.frames), None)
                text = f"until {count} sends were safe"
                log_slow_request(RequestCode.SEND_MESSAGE_V2, who, seconds, text)
        if self._visible:
            queues = self._visible[:]
            self._visible.clear()
            for topic, queue_id, end in queues:
                self.wake(topic, queue_id, end)
                if topic in self.arrivals:
                    self.arrivals[topic](queue_id)

    def flush(self) -> None:
        """One write a connection with all that is ready for it."""
        outgoing, self._outgoing = self._outgoing, {}
        for peer, frames in outgoing.items():
            peer.write(frames[0] if len(frames) == 1 else b"".join(frames))

    # -------------------------------------------------------------------------------- fsyncs

    def _start_sync(self) -> None:
        if self._syncing is None and self._next is not None and self._run_sync is not None:
            self._syncing, self._next = self._next, None
            self._run_sync(self._sync_ended)

    def _sync_ended(self, result: int | BaseException) -> None:
        answers, self._syncing = self._syncing, None
        assert answers is not None
        if isinstance(result, StoreTransientError):
            log.warning("the fsync of the commit log is tried again: %s", result)
            if self._next is not None:
                answers.join(self._next)
            self._next = answers
            return
        if isinstance(result, BaseException):
            log.error("fsync of the commit log failed: %s", result)
            self._fail(answers, result, is_written=True)
        elif self._gate is None:
            self._store.publish(result)
            self._release(answers)
        else:
            self._to_gate(answers, result)
        if self._gate is not None and self.on_commit is not None:  # more is on disk
            self.on_commit()
        self._start_sync()
        self.flush()

    # ---------------------------------------------------------------------------------- the gate

    def _to_gate(self, answers: PendingAnswers, end: int) -> None:
        """What waited for commit and fsync up to `end` waits for the replicas."""
        assert self._gate is not None, "only turns with a gate come here"
        if not self._holds:
            self._release(answers)
            answers = PendingAnswers()
        elif answers.count and self._gate.is_slave_missing:
            self._answer_late(answers, ResponseCode.SLAVE_NOT_AVAILABLE, SLAVE_MISSING)
        self._gated.append(answers)
        self._gate.wait(end, partial(self._opened, answers))

    def _opened(self, answers: PendingAnswers, result: int | BaseException) -> None:
        self._gated.remove(answers)  # it is the first one
        if isinstance(result, BaseException):
            if answers.count:
                self._fail(answers, result, is_written=True)
        else:
            self._release(answers)

    def on_replicated(self, end: int) -> None:
        """What the replicas have is visible, and the answers that waited for that leave."""
        self._store.confirm(end)
        self.show_published()

    def show_published(self) -> None:
        """There is something to see, or to send."""
        self._release(PendingAnswers())
        self.flush()

    def on_follower_append(self, visible: Visible) -> None:
        """A slave's log has more to show, outside of any turn."""
        if not self._visible:
            self._call_soon(self.show_published)
        self._visible += visible

    def expire(self, now_s: float) -> None:
        """Answers the sends whose fsync or replicas take too long, and tries an fsync again that
        has to be."""
        for answers in (self._syncing, self._next):
            if answers is not None and now_s - answers.started_s > self._sync_timeout_s:
                self._answer_late(answers, ResponseCode.FLUSH_DISK_TIMEOUT, LATE)
                answers.started_s = now_s
        for answers in self._gated:
            if self._gate is None or now_s - answers.started_s <= self._gate.timeout_s:
                break
            self._answer_late(answers, ResponseCode.FLUSH_SLAVE_TIMEOUT, SLAVE_LATE)
        self._start_sync()
        self.flush()

    def _answer_late(self, answers: PendingAnswers, code: ResponseCode, remark: str) -> None:
        """They are stored, and not as safe as they were to be: nobody waits any longer."""
        if not answers.count:
            return
        log.warning("%d sends are answered %s: %s", answers.count, code.name, remark)
        for peer, answer in answers:
            late = decode(answer[4:])
            late.code, late.remark = code, remark
            self.queue_frame(peer, encode(late))
        answers.count, answers.frames, answers.announcing = 0, {}, []

    @property
    def is_idle(self) -> bool:
        """Is no answer held?"""
        is_syncing = self._syncing is not None or self._next is not None
        is_gated = any(answers.count for answers in self._gated)
        return not (self._written.count or self._synced.count or is_syncing or is_gated)

    def _fail(
        self, answers: PendingAnswers, error: BaseException, *, is_written: bool = False
    ) -> None:
        log.error("%d messages are refused: %s", answers.count, error)
        is_known = isinstance(error, StoreUncertainError)
        remark = str(error) if is_known else f"the message was not stored: {error}"
        for peer, answer in answers:
            if is_written and not is_known:
                self.queue_frame(peer, unconfirmed_answer(answer, error))
            else:
                self.queue_frame(peer, error_answer(answer, error, remark))
