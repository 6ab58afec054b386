"""What a handler may return besides an answer: four ways to answer later.

None of them waits by itself. `turns.py` writes `Durable` answers after the commit (and the fsync,
where asked), `longpoll.py` keeps `Parked` requests, `announcing.py` holds `Announced` answers until
the change is on disk and the name servers know of it, `background.py` goes through the steps of a
`Postponed` one.

When answers leave: the turn.

A turn is what happens in one iteration of the event loop. Handlers append messages to the store and
return `Durable` answers; the first of them asks for `end` to be called when the iteration is over.
`end` commits once for all connections, and only then the answers leave, one write a connection:

    append append append … | commit | answers and woken long polls        ASYNC_FLUSH
    append append append … | commit | fsync | publish | answers …         SYNC_FLUSH

The fsync runs elsewhere (`run_sync`). While one runs, later turns collect; they share the next
one: group commit. A message is visible from the moment its answer may leave, never before.

When a commit or an fsync fails, exactly the answers held for it become errors, which say what is
known: a failed commit is undone; what a failed fsync was for is written, and may come back when the
broker starts again. An fsync that the system has only no descriptor or memory for is tried again at
the next sweep. One that takes longer than syncFlushTimeout turns its answers into
FLUSH_DISK_TIMEOUT: stored, not known to be on disk (spec/remoting.md §19).

No asyncio here: the loop is two callables, so a test or a simulator can step it.
"""

import logging
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.clock import Clock
from sluicemq.errors import StoreError, StoreFullError, StoreTransientError, StoreUncertainError
from sluicemq.net.peer import Peer
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import FLAG_RESPONSE, SERVER_LANGUAGE, Command, decode, encode


class Durable(NamedTuple):
    """An answer that may leave when the turn's messages are safe.

    `answer` is the encoded frame for the request it belongs to, b"" for one that wants none.
    `waits` is False when the producer does not want to wait for the fsync (property WAIT=false).
    `announces` is True when the send created a topic, which the name servers have to know first.
    """

    answer: bytes
    waits: bool = True
    announces: bool = False


class Announced:
    """An answer that leaves when a change of topics or groups is saved and registered."""

    __slots__ = ("answer",)

    def __init__(self, answer: Command) -> None:
        self.answer = answer


class Postponed(NamedTuple):
    """A request that takes long: work in steps (`background.Steps`) that return its outcome."""

    steps: Generator[Callable[[], Any] | None, Any, Any]


class Parked:
    """A pull that waits for messages.

    `scan_offset` is where the next look at the queue begins: it moves on over messages that the
    filter does not want, so that each is looked at once. `look(parked, is_last)` returns the
    answer, or None to go on waiting; with `is_last` it always answers. While `is_looking` it is
    about to look.
    """

    __slots__ = (
        "command", "deadline_s", "is_done", "is_looking", "look", "queue_id", "scan_offset",
        "topic",
    )  # fmt: skip

    def __init__(
        self,
        command: Command,
        topic: str,
        queue_id: int,
        scan_offset: int,
        deadline_s: float,
        look: "Callable[[Parked, bool], bytes | None]",
    ) -> None:
        self.command = command
        self.topic = topic
        self.queue_id = queue_id
        self.scan_offset = scan_offset
        self.deadline_s = deadline_s
        self.look = look
        self.is_done = False
        self.is_looking = False


def failed(answer: bytes, error: BaseException, remark: str) -> bytes:
    """What leaves instead of an encoded answer whose change did not reach the disk."""
    full = isinstance(error, StoreFullError)
    code = ResponseCode.SERVICE_NOT_AVAILABLE if full else ResponseCode.SYSTEM_ERROR
    opaque = decode(answer[4:]).opaque
    return encode(Command(code, {}, b"", opaque, FLAG_RESPONSE, remark, SERVER_LANGUAGE))


log = logging.getLogger(__name__)

Visible = list[tuple[str, int, int]]
LATENCY_BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class TurnStore(Protocol):
    """What a turn needs of the store."""

    on_visible: Callable[[Visible], None] | None

    def commit(self) -> int: ...

    def publish(self, end_offset: int) -> None: ...


RunSync = Callable[[Callable[[int | BaseException], None]], None]
"""Starts `store.sync()` elsewhere and calls back, in the loop's thread, with its end or error."""

Held = tuple[Peer, bytes, bool]
"""Connection, answer (b"" when none is wanted), whether it announces a new topic."""


class Batch:
    """Answers that wait for one fsync."""

    __slots__ = ("answers", "started_s")

    def __init__(self, started_s: float) -> None:
        self.answers: list[Held] = []
        self.started_s = started_s


class Turns:
    """Holds the answers of sends until their messages are safe."""

    def __init__(
        self,
        store: TurnStore,
        clock: Clock,
        *,
        call_soon: Callable[[Callable[[], None]], object],
        wake: Callable[[str, int, int], None],
        run_sync: RunSync | None = None,
        announce: Callable[[Peer, bytes], None] | None = None,
        others: Callable[[object, Command, Peer], None] | None = None,
        sync_timeout_s: float = 5.0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._call_soon = call_soon
        self._wake = wake
        self._run_sync = run_sync
        self._announce = announce
        self._others = others
        self._sync_timeout_s = sync_timeout_s
        self._held: list[Held] = []
        self._waiting: list[Held] = []  # for the fsync; `_held` is for the commit alone
        self._outgoing: dict[Peer, list[bytes]] = {}
        self.plain: dict[Peer, list[bytes]] = {}
        """The turn's answers that wait for the fsync and announce nothing; see `plain_of`."""
        self._news: Visible = []
        self._is_scheduled = False
        self._has_own = False
        self._started_s = 0.0
        self._next: Batch | None = None
        self._running: list[Batch] = []
        self.latency_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.latency_sum_s = 0.0
        self.turns = 0
        self.commits_failed = 0
        self.on_failed: list[Callable[[], None]] = []
        """Told when a commit has failed: what the turn had appended never was."""
        store.on_visible = self.visible

    # ------------------------------------------------------------------------- during a turn

    def hold(self, outcome: object, command: Command, peer: Peer) -> None:
        """Keeps a `Durable` answer until the end of the turn; `others` takes any other. HOT."""
        if outcome.__class__ is not Durable:
            if self._others is not None:
                self._others(outcome, command, peer)
            return
        if not self._is_scheduled:
            self.soon()
        answer, waits, announces = outcome
        held = (peer, answer, announces)
        if waits and self._run_sync is not None:
            self._waiting.append(held)
        else:
            self._held.append(held)

    def plain_of(self, peer: Peer) -> list[bytes]:
        """The list of a connection in `plain`, where it has none yet: what is put there is held
        like a `Durable` answer, without a call a message."""
        self.soon()
        answers = self.plain[peer] = []
        return answers

    def own(self) -> None:
        """The broker itself has appended something: as `soon`, and it wants to be seen, also when
        nobody else's answer waits for an fsync."""
        self._has_own = True
        self.soon()

    def end_own(self) -> bool:
        """End the turn now, with what the broker has appended; False when that is not stored."""
        failed = self.commits_failed
        self._has_own = True
        self.end()
        return failed == self.commits_failed

    def soon(self) -> None:
        """The turn has something to commit: it ends when the loop's iteration does."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._started_s = self._clock.monotonic_s()
            self._call_soon(self.end_scheduled)

    def end_scheduled(self) -> None:
        """End the turn, when it has something to commit."""
        if self._is_scheduled:
            self.end()

    def write(self, peer: Peer, frame: bytes) -> None:
        """Adds a frame to what leaves at the end of this turn."""
        frames = self._outgoing.get(peer)
        if frames is None:
            self._outgoing[peer] = [frame]
        else:
            frames.append(frame)

    def visible(self, queues: Visible) -> None:
        """The store shows new messages. Who waits for them is woken when the store is done: what
        goes wrong there must not look like a failed commit."""
        self._news += queues

    def _wake_all(self) -> None:
        news, self._news = self._news, []
        for topic, queue_id, offset_max in news:
            self._wake(topic, queue_id, offset_max)

    # ------------------------------------------------------------------------------- its end

    def end(self) -> None:
        """Commits the turn and lets its answers go."""
        self._is_scheduled = False
        held, self._held = self._held, []
        waiting, self._waiting = self._waiting, []
        plain = self._take_plain()
        own, self._has_own = self._has_own, False
        self.turns += 1
        try:
            self._store.commit()
        except Exception as error:  # whatever it is, nobody may be left without an answer
            self.commits_failed += 1
            if not isinstance(error, StoreError | OSError):
                log.exception("the commit of a turn failed")
            for undo in self.on_failed:
                undo()
            self._fail([*held, *waiting, *_listed(plain)], error)
            self.flush()
            return
        self._release(held, self._started_s)
        if self._run_sync is None:
            self._release_plain(plain)
        else:
            waiting += _listed(plain)
        self._wake_all()
        if waiting or ((held or own) and self._run_sync is not None):
            # Also for those alone that do not wait: others see their messages after the fsync.
            self._await_sync(waiting)
        self.flush()

    def _take_plain(self) -> dict[Peer, list[bytes]]:
        taken = self.plain.copy()
        self.plain.clear()  # the dict stays: the hot path holds it
        return taken

    def flush(self) -> None:
        """One write a connection with all that is ready for it."""
        outgoing, self._outgoing = self._outgoing, {}
        for peer, frames in outgoing.items():
            peer.write(frames[0] if len(frames) == 1 else b"".join(frames))

    def _release(self, answers: list[Held], started_s: float) -> None:
        if not answers:
            return
        outgoing = self._outgoing
        last: Peer | None = None
        frames: list[bytes] = []
        for peer, answer, announces in answers:
            if announces and self._announce is not None:
                self._announce(peer, answer)
                continue
            if peer is not last:
                frames = outgoing.setdefault(peer, [])
                last = peer
            if answer:
                frames.append(answer)
        self._measure(self._clock.monotonic_s() - started_s, len(answers))

    def _release_plain(self, plain: dict[Peer, list[bytes]]) -> None:
        if not plain:
            return
        outgoing = self._outgoing
        for peer, frames in plain.items():
            if peer in outgoing:
                outgoing[peer] += frames
            else:
                outgoing[peer] = frames
        seconds = self._clock.monotonic_s() - self._started_s
        self._measure(seconds, sum(map(len, plain.values())))

    def _measure(self, seconds: float, count: int) -> None:
        bucket = 0
        for bound in LATENCY_BOUNDS_S:
            if seconds <= bound:
                break
            bucket += 1
        self.latency_counts[bucket] += count
        self.latency_sum_s += seconds * count

    # -------------------------------------------------------------------------------- fsyncs

    def _await_sync(self, answers: list[Held]) -> None:
        batch = self._next
        if batch is None:
            batch = self._next = Batch(self._started_s)
        batch.answers += answers
        if not self._running:
            self._start_sync()

    def _start_sync(self) -> None:
        batch, self._next = self._next, None
        if batch is None or self._run_sync is None:
            return
        self._running.append(batch)
        self._run_sync(self._synced)

    def _synced(self, result: int | BaseException) -> None:
        batch = self._running.pop()
        if isinstance(result, StoreTransientError):
            log.warning("the fsync of the commit log is tried again: %s", result)
            if self._next is not None:
                batch.answers += self._next.answers
            self._next = batch
            return
        if isinstance(result, BaseException):
            log.error("fsync of the commit log failed: %s", result)
            self._fail(batch.answers, result, is_written=True)
        else:
            self._store.publish(result)
            self._release(batch.answers, batch.started_s)
            self._wake_all()
        self._start_sync()
        self.flush()

    def expire(self, now_s: float) -> None:
        """Answers the sends whose fsync takes too long, and tries one again that has to be."""
        for batch in (*self._running, *([self._next] if self._next else [])):
            if batch.answers and now_s - batch.started_s > self._sync_timeout_s:
                log.warning(
                    "the fsync takes more than %s s: %d sends are answered FLUSH_DISK_TIMEOUT",
                    self._sync_timeout_s, len(batch.answers),
                )  # fmt: skip
                for peer, answer, _ in batch.answers:
                    if answer:
                        self.write(peer, _late(answer))
                batch.answers = []
                batch.started_s = now_s
        if not self._running:
            self._start_sync()
        self.flush()

    @property
    def is_idle(self) -> bool:
        """Is no answer held?"""
        return not (self._held or self._waiting or self.plain or self._running or self._next)

    # ------------------------------------------------------------------------------ failures

    def _fail(self, answers: list[Held], error: BaseException, *, is_written: bool = False) -> None:
        log.error("%d messages are refused: %s", len(answers), error)
        if isinstance(error, StoreUncertainError):
            remark = str(error)
        elif is_written:
            remark = (
                "the message was written, but the disk did not confirm it, so it may come back when"
                f" the broker is started again: {error}"
            )
        else:
            remark = f"the message was not stored: {error}"
        for peer, answer, _ in answers:
            if answer:
                self.write(peer, failed(answer, error, remark))


def _listed(plain: dict[Peer, list[bytes]]) -> list[Held]:
    return [(peer, answer, False) for peer, answers in plain.items() for answer in answers]


def _late(answer: bytes) -> bytes:
    """The answer with FLUSH_DISK_TIMEOUT instead of success, all else kept."""
    command = decode(answer[4:])
    command.code = ResponseCode.FLUSH_DISK_TIMEOUT
    command.remark = "the fsync takes longer than syncFlushTimeout; the message is stored."
    return encode(command)
