"""Group commit: when the answers to requests that change the store are sent.

Handlers run on the event loop and append messages to the store. Their answers are held back until
the messages are as safe as the configuration demands. `GroupCommit` commits once at the end of a
loop iteration, for all messages that the iteration appended, and then sends all answers with one
write per connection:

    append append append … | commit | answers, woken long polls             ASYNC_FLUSH
    append append append … | commit | fsync | publish | answers …           SYNC_FLUSH
    append append append … | commit | (fsync) | gate | publish | answers …  SYNC_MASTER

- *commit* writes the records to the commit log. If it fails, the messages of the group commit were
  never stored, and their answers become errors.
- *fsync* runs on another thread (`run_sync`). Group commits that end while it runs share the next
  fsync.
- *gate* is replication (`replication/in_sync.py`). It opens for a position of the log once enough
  replicas have the log up to that position. Several group commits may wait for it.
- *publish* makes the messages visible to consumers. A message never becomes visible before its
  answer may be sent.

What happens to the answers when a step fails or takes too long:

- A failed commit is undone. The answers say that the message was not stored.
- After a failed fsync the messages are written but not confirmed by the disk, and may come back
  when the broker restarts. The answers say so. An fsync that only lacked a file descriptor or
  memory is repeated at the next `expire`.
- An fsync that takes longer than syncFlushTimeout is answered with FLUSH_DISK_TIMEOUT: stored, but
  not known to be on disk (spec/remoting.md §19).
- A gate that stays closed for longer than slaveTimeout is answered with FLUSH_SLAVE_TIMEOUT. If no
  slave is in sync, the answer is SLAVE_NOT_AVAILABLE at once. In both cases the message is stored,
  and becomes visible only when the gate opens.

A handler may return, besides an encoded answer:

    Durable      an answer that is sent after the group commit: this module
    Parked       a pull or pop that waits for messages: `consume/longpoll.py`
    Announced    an answer that is sent after a change is saved and registered: `registration.py`
    Postponed    work that continues in steps: `net/work/background.py`

This module does not use asyncio. The event loop is represented by the callables `call_soon` and
`run_sync`, so that a test or a simulator can step it. All methods run on the loop's thread.
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

VisibleQueues = list[tuple[str, int, int]]
"""Queues with new visible messages: topic, queue id and the offset after the last visible one."""

LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds of the buckets in `GroupCommit.latency_counts`, in seconds."""

SYNC_TIMEOUT_REMARK: Final = (
    "The fsync took longer than syncFlushTimeout. The message is stored, but may not be on disk."
)
SLAVE_TIMEOUT_REMARK: Final = (
    "The slaves took longer than slaveTimeout. The message is stored and becomes visible once "
    "they have it."
)
SLAVE_MISSING_REMARK: Final = (
    "No slave is in sync (haMaxGapNotInSync). The message is stored and becomes visible once a "
    "slave has it."
)


class Durable(NamedTuple):
    """An answer that may be sent once the messages of its group commit are safe."""

    answer: bytes
    """The encoded answer, or b"" if the request is one-way."""
    waits_for_sync: bool = True
    """Whether the answer waits for the fsync and the gate. False if the producer set the property
    WAIT to false: then it is sent right after the commit."""
    creates_topic: bool = False
    """Whether the send created a topic. The answer then also waits until the name servers know the
    topic."""

    @classmethod
    def for_command(cls, command: Command, answer: bytes) -> "Durable":
        """Return a Durable of `answer`, or of b"" if `command` is one-way."""
        return cls(b"" if command.is_oneway else answer)


class Announced(NamedTuple):
    """An answer that is sent once a change of topics or groups is saved and registered."""

    answer: Command


class Postponed(NamedTuple):
    """A request whose work continues in steps, in slices of the loop's time.

    The value that `steps` returns is treated like the return value of a handler.
    """

    steps: Generator[Callable[[], Any] | None, Any, Any]


def run_or_postpone(steps: WorkItem[T]) -> T | Postponed:
    """Run the generator `steps` up to its first `yield`.

    Return the result of the generator if it has ended by then. Otherwise, return a Postponed, from
    which the remaining steps are run later. Raises what the first step raises.
    """
    result_or_rest = run_first_step(steps)
    if isinstance(result_or_rest, Generator):
        return Postponed(result_or_rest)
    return result_or_rest


@dataclass(slots=True, eq=False)
class Parked:
    """A pull, pop or notification that is parked until messages arrive or its deadline passes."""

    command: Command
    """The request to answer."""
    queues: tuple[tuple[str, int], ...]
    """The topic and queue id of each queue whose messages wake the request."""
    scan_offset: int
    """The offset at which the next attempt of a pull begins. It moves past messages that the
    filter rejects, so that each message is examined once."""
    deadline_s: float
    """The monotonic time at which the request is answered even without messages."""
    try_answer: "Callable[[Parked, bool], bytes | Durable | None]"
    """Called as `try_answer(parked, is_last)`. Returns the answer, or None if the request remains
    parked. With `is_last` it always returns an answer."""
    is_done: bool = False
    """Whether the request was answered or its connection was lost."""
    is_attempt_pending: bool = False
    """Whether a call of `try_answer` is scheduled, so that no further one needs to be."""
    competition_key: str = ""
    """Pops with the same key compete: a message is offered to one of them at a time. It is "" for
    a pull, which competes with no other request."""
    has_left_messages: bool = False
    """Whether the answer left messages that competing pops can take."""


def encode_error_answer(answer: bytes, error: BaseException, remark: str) -> bytes:
    """Return an encoded error answer to the request that `answer` would have answered.

    `answer` is the encoded answer that must not be sent, because its change failed with `error`.
    The returned frame has the same opaque, the number by which the client finds its request. Its
    text is `remark`. Its code is SERVICE_NOT_AVAILABLE if `error` is a StoreFullError, else
    SYSTEM_ERROR.
    """
    is_full = isinstance(error, StoreFullError)
    code = ResponseCode.SERVICE_NOT_AVAILABLE if is_full else ResponseCode.SYSTEM_ERROR
    opaque = decode(answer[4:]).opaque  # the first 4 bytes are the length of the frame
    return encode(Command(code, {}, b"", opaque, FLAG_RESPONSE, remark, SERVER_LANGUAGE))


def encode_unconfirmed_answer(answer: bytes, error: BaseException) -> bytes:
    """Return an encoded error answer that replaces `answer`, whose change may have been stored.

    The change was written, but the fsync or the replication failed with `error`. The text of the
    returned frame says that the change may come back when the broker restarts. The code is that of
    `encode_error_answer`.
    """
    remark = (
        "The data was written, but the disk did not confirm it, so it may come back when the "
        f"broker restarts: {error}"
    )
    return encode_error_answer(answer, error, remark)


class CommitStore(Protocol):
    """The part of the store that `GroupCommit` uses; see `store.store.Store`."""

    on_visible: Callable[[VisibleQueues], None] | None
    """Called by the store with the queues that have new visible messages."""

    def commit(self) -> int:
        """Write what was appended since the last commit, and return the end of the log."""
        ...

    def publish(self, end_offset: int) -> None:
        """Make committed messages visible up to the position `end_offset`, which is synced."""
        ...

    def confirm(self, end_offset: int) -> None:
        """Make committed messages visible up to `end_offset`, which the replicas have."""
        ...


class ReplicationGate(Protocol):
    """The part of replication that `GroupCommit` uses; see `replication.in_sync.InSyncReplicas`."""

    @property
    def on_confirmed(self) -> list[Callable[[int], None]]:
        """Functions that are called with each new position that enough replicas have reached."""
        ...

    @property
    def holds_answers(self) -> bool:
        """Whether answers wait for the gate (SYNC_MASTER). If False, only visibility does."""
        ...

    @property
    def is_slave_missing(self) -> bool:
        """Whether no slave could open the gate now, so that answers need not wait for it."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long an answer may wait for the gate, in seconds."""
        ...

    def wait(self, end: int, callback: Callable[[int | BaseException], None]) -> None:
        """Call `callback(position)` once enough replicas have the log up to `end`.

        That may be at once. `callback(error)` is called instead if it can never happen.
        """
        ...


RunSync = Callable[[Callable[[int | BaseException], None]], None]
"""Starts `store.sync()` on another thread, and later calls its argument on the loop's thread with
the synced end of the log, or with the error."""


@dataclass(slots=True, eq=False)
class PendingAnswers:
    """Answers that are sent together."""

    count: int = 0
    """The number of answers, those of one-way requests included."""
    frames: dict[Peer, list[bytes]] = field(default_factory=dict)
    """The encoded answers of each connection, in order."""
    announcing: list[tuple[Peer, bytes]] = field(default_factory=list)
    """The answers to sends that created a topic."""
    started_s: float = 0.0
    """The monotonic time at which the first request of the group commit was handled."""

    def __iter__(self) -> Iterator[tuple[Peer, bytes]]:
        """Yield the connection and the encoded answer of each request that is not one-way."""
        for peer, frames in self.frames.items():
            yield from ((peer, frame) for frame in frames if frame)
        yield from ((peer, frame) for peer, frame in self.announcing if frame)

    def merge(self, added: "PendingAnswers") -> None:
        """Append the answers in `added`, so that they are sent together with these.

        `started_s` keeps its value.
        """
        self.count += added.count
        for peer, frames in added.frames.items():
            self.frames.setdefault(peer, []).extend(frames)
        self.announcing += added.announcing


class GroupCommit:
    """Commits appended messages in groups, and sends their answers once the messages are safe."""

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
        """Create a group commit for `store`.

        `call_soon` calls a function at the end of the current loop iteration. `run_sync` starts an
        fsync; None means ASYNC_FLUSH, which sends answers without one. `announce(peer, answer)`
        takes the answers that have to wait for the name servers as well. With a `gate`, no message
        becomes visible before the gate opens for it.
        """
        self._store = store
        self._clock = clock
        self._call_soon = call_soon
        self._run_sync = run_sync
        self._announce = announce
        self._sync_timeout_s = sync_timeout_s
        self._gate = gate
        if gate is not None:
            gate.on_confirmed.append(self.on_replicated)
        self._gate_holds_answers = gate is not None and gate.holds_answers
        self._has_stages = run_sync is not None or self._gate_holds_answers
        """Whether answers that wait for the sync are sent later than those that do not."""

        self.wake: Callable[[str, int, int], None] = lambda topic, queue_id, end: None
        """Called with topic, queue id and end offset of each queue that has new visible messages.
        It wakes the long polls of consumers."""
        self.topic_listeners: dict[str, Callable[[int], None]] = {}
        """By system topic: called with the id of a queue of that topic that has new visible
        messages."""
        self.on_commit: Callable[[], None] | None = None
        """Called when the log has grown, for the log senders of slaves."""
        self.slow_commit_s = math.inf
        """Answers that wait longer than this, in seconds, are noted in the slow-request log."""

        self._after_commit = self._after_sync = PendingAnswers()
        """The answers of the current loop iteration: those to send after the commit, and those to
        send after the fsync and the gate. Both are one object unless `_has_stages`."""
        if self._has_stages:
            self._after_sync = PendingAnswers()
        self._in_sync: PendingAnswers | None = None
        """The answers that wait for the running fsync; None if none runs."""
        self._next_sync: PendingAnswers | None = None
        """The answers that wait for the fsync after the running one."""
        self._at_gate: deque[PendingAnswers] = deque()
        """The answers that wait for the gate, in the order in which it opens."""
        self._outgoing: dict[Peer, list[bytes]] = {}
        """Frames that the next `flush` writes."""
        self._visible: VisibleQueues = []
        """Queues whose long polls are not woken yet."""
        self._is_scheduled = False
        self._has_internal_messages = False
        self._undos: list[Callable[[], object]] = []
        self._started_s = 0.0

        self.latency_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        """The number of answers per bucket of `LATENCY_BOUNDS_S`; the last one has no bound."""
        self.latency_sum_s = 0.0
        """The sum of the times that all answers have waited, in seconds."""
        self.failed_commit_count = 0
        # Long polls are woken after the store has returned: an error of theirs must not look like a
        # failed commit.
        store.on_visible = self._visible.extend

    # --- during a loop iteration

    def send_after_commit(
        self, peer: Peer, answer: bytes, waits_for_sync: bool = True, creates_topic: bool = False
    ) -> None:
        """Keep the encoded `answer`, to send it to `peer` once the appended messages are safe.

        This call sends nothing. It schedules a commit for the end of the loop iteration. `answer`
        is b"" for a one-way request, which is only counted.

        - With `waits_for_sync`, the answer is sent after the fsync, and after the replication gate,
          which opens when enough slaves have the messages. Without it, the answer is sent right
          after the commit.
        - With `creates_topic`, the answer is then given to `announce`, which sends it when the name
          servers know the new topic.

        Called for each send: keep it cheap.
        """
        if not self._is_scheduled:
            self.schedule_commit()
        pending = self._after_sync if waits_for_sync else self._after_commit
        pending.count += 1
        if creates_topic:
            pending.announcing.append((peer, answer))
            return
        peer_answers = pending.frames.get(peer)
        if peer_answers is None:
            pending.frames[peer] = [answer]
        else:
            peer_answers.append(answer)

    def send_all_after_commit(self, peer: Peer, frames: list[bytes]) -> None:
        """Keep several encoded answers, to send them to `peer` once the messages are safe.

        They are sent after the fsync and the replication gate. The result is the same as that of
        `send_after_commit(peer, frame)` for each frame. The list `frames` itself is kept and
        changed, so the caller must not use it afterwards. Called for each batch of sends: keep it
        cheap.
        """
        if not self._is_scheduled:
            self.schedule_commit()
        pending = self._after_sync
        pending.count += len(frames)
        peer_answers = pending.frames.get(peer)
        if peer_answers is None:
            pending.frames[peer] = frames
        else:
            peer_answers += frames

    def commit_internal(self, undo: Callable[[], object] | None = None) -> None:
        """Schedule a commit for messages that the broker itself appended.

        The messages are synced and become visible even if no client waits for an answer. If the
        commit fails, none of its messages is stored, and `undo()` is called. The undo functions of
        all calls since the last commit are then called in reverse order.
        """
        self._has_internal_messages = True
        if undo is not None:
            self._undos.append(undo)
        self.schedule_commit()

    def commit_now(self) -> bool:
        """Commit everything that was appended so far, before the loop iteration ends.

        Return True if the messages were written to the log. They may not be synced yet. Return
        False if the commit failed. Then none of them is stored, their answers were replaced by
        errors, and the undo functions were called.
        """
        failures_before = self.failed_commit_count
        self._has_internal_messages = True
        self.commit()
        return failures_before == self.failed_commit_count

    def schedule_commit(self) -> None:
        """Schedule a commit for the end of this loop iteration, unless one is scheduled."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._started_s = self._clock.monotonic_s()
            self._call_soon(self.commit)

    def queue_frame(self, peer: Peer, frame: bytes) -> None:
        """Add an encoded frame to those that the next `flush` writes to `peer`."""
        self._outgoing.setdefault(peer, []).append(frame)

    # --- at the end of a loop iteration

    def commit(self) -> None:
        """Commit the appended messages to the store, and send the answers that need not wait.

        The other answers wait for an fsync, which is started here, or for the replication gate,
        which opens when enough slaves have the messages. `on_commit` is called, and all queued
        frames are written. If the store fails, nothing is raised: the answers are replaced by
        errors, and the undo functions are called. Do nothing if no commit is scheduled. Called once
        for each loop iteration with sends: keep it cheap.
        """
        if not (self._is_scheduled or self._has_internal_messages):
            return

        # Take the state of this group before the store is called. What is appended from now on
        # belongs to the next group.
        self._is_scheduled = False
        after_commit = self._after_commit
        after_sync = self._after_sync
        self._after_commit = self._after_sync = PendingAnswers()
        if self._has_stages:
            self._after_sync = PendingAnswers()
        after_commit.started_s = after_sync.started_s = self._started_s
        has_internal_messages = self._has_internal_messages
        self._has_internal_messages = False
        undos = self._undos
        self._undos = []

        try:
            end = self._store.commit()
        except Exception as error:  # noqa: BLE001 - every request must be answered
            if after_sync is not after_commit:
                after_commit.merge(after_sync)
            self._undo_commit(after_commit, undos, error)
            return

        # If no answer waits for an fsync or the gate, `after_sync` is the same object as
        # `after_commit`, and this queues all answers.
        self._release(after_commit)
        has_messages = after_sync.count or after_commit.count or has_internal_messages
        if self._run_sync is not None and has_messages:
            # Messages whose answers did not wait need the fsync too: it makes them visible.
            self._sync_for(after_sync)
        elif self._gate is not None:
            answers_at_gate = after_sync if self._gate_holds_answers else PendingAnswers()
            self._wait_for_gate(answers_at_gate, end)
        if self.on_commit is not None:
            self.on_commit()
        self.flush()

    def _undo_commit(
        self, answers: PendingAnswers, undos: list[Callable[[], object]], error: Exception
    ) -> None:
        """Handle the failure of a commit: call `undos` in reverse order, and answer with errors.

        Each of `answers` is replaced by an error answer about `error` and sent.
        `failed_commit_count` is increased. If `error` is neither a StoreError nor an OSError, it is
        a bug, and it is logged with its traceback.
        """
        self.failed_commit_count += 1
        if not isinstance(error, StoreError | OSError):
            log.error("A group commit failed.", exc_info=error)
        for undo in reversed(undos):
            undo()
        self._send_errors(answers, error)
        self.flush()

    def _release(self, answers: PendingAnswers) -> None:
        """Queue `answers` for the next `flush`, and wake consumers that wait for new messages.

        Answers to sends that created a topic are given to `announce` instead. The latency of the
        answers is counted. Then `wake`, and the function in `topic_listeners` if the topic has one,
        is called for each queue that has new visible messages.
        """
        if answers.count:
            if self._outgoing:
                # `|=` below replaces the list of a connection. Move the frames that are queued for
                # it already to the front of the new list.
                for peer, frames in answers.frames.items():
                    frames[:0] = self._outgoing.pop(peer, ())
            self._outgoing |= answers.frames
            for peer, answer in answers.announcing:
                self._announce(peer, answer)
            self._note_latency(answers)

        if self._visible:
            # Copied and cleared, not replaced: the store's `on_visible` extends this very list. And
            # cleared first, because a woken reader may make further messages visible.
            visible_queues = self._visible[:]
            self._visible.clear()
            for topic, queue_id, end_offset in visible_queues:
                self.wake(topic, queue_id, end_offset)
                if topic in self.topic_listeners:
                    self.topic_listeners[topic](queue_id)

    def _note_latency(self, answers: PendingAnswers) -> None:
        """Add the waiting time of `answers` to the latency histogram.

        All of them count as waiting since the first request of their group commit. If that is
        longer than `slow_commit_s`, they are noted in the log of slow requests.
        """
        waited_s = self._clock.monotonic_s() - answers.started_s
        bucket = bisect_left(LATENCY_BOUNDS_S, waited_s)
        self.latency_counts[bucket] += answers.count
        self.latency_sum_s += waited_s * answers.count
        if waited_s > self.slow_commit_s:
            first_peer = next(iter(answers.frames), None)
            reason = f"until {answers.count} sends were committed"
            log_slow_request(RequestCode.SEND_MESSAGE_V2, first_peer, waited_s, reason)

    def flush(self) -> None:
        """Write all queued frames to their connections, with one write per connection."""
        outgoing = self._outgoing
        self._outgoing = {}
        for peer, frames in outgoing.items():
            peer.write(frames[0] if len(frames) == 1 else b"".join(frames))

    # --- fsync

    def _sync_for(self, answers: PendingAnswers) -> None:
        """Keep `answers` until an fsync has ended that starts after this call.

        The fsync is started now, or when the running one has ended. The running one is not enough,
        because it may miss the new messages.
        """
        if self._next_sync is None:
            self._next_sync = answers
        else:
            self._next_sync.merge(answers)
        self._start_sync()

    def _start_sync(self) -> None:
        """Start an fsync on another thread, for the answers in `_next_sync`.

        Do nothing if an fsync is running, because its end starts the next one. Do nothing either if
        no answers wait, or if the broker does not sync before it answers (ASYNC_FLUSH).
        """
        if self._in_sync is None and self._next_sync is not None and self._run_sync is not None:
            self._in_sync = self._next_sync
            self._next_sync = None
            self._run_sync(self._on_sync_end)

    def _on_sync_end(self, end_or_error: int | BaseException) -> None:
        """Handle the end of an fsync, and start the next one if answers wait for it.

        `end_or_error` is the position up to which the log is synced, or the error of the fsync.

        - After a success, the answers are sent, or wait for the replication gate if there is one.
        - After a StoreTransientError, they wait for another fsync, which `expire` starts.
        - After any other error, they are replaced by error answers.
        """
        answers = self._in_sync
        self._in_sync = None
        assert answers is not None
        if isinstance(end_or_error, StoreTransientError):
            log.warning("The fsync of the commit log failed and will be retried: %s", end_or_error)
            if self._next_sync is not None:
                answers.merge(self._next_sync)
            self._next_sync = answers
            return
        if isinstance(end_or_error, BaseException):
            log.error("The fsync of the commit log failed: %s", end_or_error)
            self._send_errors(answers, end_or_error, is_written=True)
        elif self._gate is None:
            self._store.publish(end_or_error)
            self._release(answers)
        else:
            self._wait_for_gate(answers, end_or_error)
        if self._gate is not None and self.on_commit is not None:  # more is on disk
            self.on_commit()
        self._start_sync()
        self.flush()

    # --- the replication gate

    def _wait_for_gate(self, answers: PendingAnswers, end: int) -> None:
        """Keep `answers` until enough slaves have the log up to the position `end`.

        The gate reports that. The messages of `answers` end at `end`. In two cases the answers are
        sent at once: if the gate only delays when messages become visible, or if no slave is in
        sync. In the second case their code is changed to SLAVE_NOT_AVAILABLE. In both cases a
        PendingAnswers without answers waits for the gate instead, because the gate must still be
        asked to make the messages visible.
        """
        assert self._gate is not None, "only a group commit with a gate waits for it"
        if not self._gate_holds_answers:
            self._release(answers)
            answers = PendingAnswers()
        elif answers.count and self._gate.is_slave_missing:
            self._answer_early(answers, ResponseCode.SLAVE_NOT_AVAILABLE, SLAVE_MISSING_REMARK)
        self._at_gate.append(answers)
        self._gate.wait(end, partial(self._on_gate_open, answers))

    def _on_gate_open(self, answers: PendingAnswers, end_or_error: int | BaseException) -> None:
        """Queue `answers`, which waited for the replication gate, and remove them from the gate.

        `end_or_error` is the position of the log that enough replicas have. It is an error if the
        gate will never open for these answers. Then error answers are queued instead.
        """
        self._at_gate.remove(answers)  # cheap, because it is the first one
        if not isinstance(end_or_error, BaseException):
            self._release(answers)
        elif answers.count:
            self._send_errors(answers, end_or_error, is_written=True)

    def on_replicated(self, end: int) -> None:
        """Make messages visible up to the position `end`, and wake their readers.

        The gate calls this when enough replicas have the log up to `end`.
        """
        self._store.confirm(end)
        self.wake_and_flush()

    def wake_and_flush(self) -> None:
        """Wake the readers of queues with new visible messages, and write all queued frames."""
        self._release(PendingAnswers())
        self.flush()

    def on_follower_append(self, visible: VisibleQueues) -> None:
        """Wake the readers of the queues in `visible` at the end of this loop iteration.

        Called on a slave, whose log grows without a group commit.
        """
        if not self._visible:
            self._call_soon(self.wake_and_flush)
        self._visible += visible

    # --- timeouts and errors

    def expire(self, now_s: float) -> None:
        """Send the answers that have waited too long for an fsync or for slaves.

        `now_s` is the monotonic time. Answers that have waited for an fsync for longer than
        `sync_timeout_s` get the code FLUSH_DISK_TIMEOUT. Answers that have waited for the
        replication gate for longer than its timeout get the code FLUSH_SLAVE_TIMEOUT.

        If the last fsync failed with a transient error, it is started again. The broker calls this
        several times a second.
        """
        for answers in (self._in_sync, self._next_sync):
            if answers is not None and now_s - answers.started_s > self._sync_timeout_s:
                self._answer_early(answers, ResponseCode.FLUSH_DISK_TIMEOUT, SYNC_TIMEOUT_REMARK)
                answers.started_s = now_s
        for answers in self._at_gate:
            if self._gate is None or now_s - answers.started_s <= self._gate.timeout_s:
                break
            self._answer_early(answers, ResponseCode.FLUSH_SLAVE_TIMEOUT, SLAVE_TIMEOUT_REMARK)
        self._start_sync()
        self.flush()

    def _answer_early(self, answers: PendingAnswers, code: ResponseCode, remark: str) -> None:
        """Queue `answers` with `code` and `remark` before their messages are safe.

        Afterwards the object `answers` is empty, but it still waits for its fsync or gate. The
        messages remain stored, and become visible when the fsync or the gate allows it.
        """
        if not answers.count:
            return
        log.warning("%d sends were answered with %s: %s", answers.count, code.name, remark)
        for peer, answer in answers:
            command = decode(answer[4:])
            command.code = code
            command.remark = remark
            self.queue_frame(peer, encode(command))
        # Empty them, but keep the object: the fsync or the gate still ends for it.
        answers.count = 0
        answers.frames = {}
        answers.announcing = []

    @property
    def is_idle(self) -> bool:
        """Whether no answer is held back and no fsync runs or is due."""
        is_syncing = self._in_sync is not None or self._next_sync is not None
        is_gated = any(answers.count for answers in self._at_gate)
        return not (self._after_commit.count or self._after_sync.count or is_syncing or is_gated)

    def _send_errors(
        self, answers: PendingAnswers, error: BaseException, *, is_written: bool = False
    ) -> None:
        """Queue an error answer about `error` in place of each of `answers`.

        `is_written` says that the messages are in the log. The error answers then say that the
        messages may come back when the broker restarts. Without `is_written`, they say that the
        message was not stored. The text of a StoreUncertainError is sent as it is.
        """
        log.error("%d messages were refused: %s", answers.count, error)
        # A StoreUncertainError says itself whether the messages may come back.
        is_explained = isinstance(error, StoreUncertainError)
        remark = str(error) if is_explained else f"The message was not stored: {error}"
        for peer, answer in answers:
            if is_written and not is_explained:
                self.queue_frame(peer, encode_unconfirmed_answer(answer, error))
            else:
                self.queue_frame(peer, encode_error_answer(answer, error, remark))
