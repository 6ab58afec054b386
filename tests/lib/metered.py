"""A stepped broker whose loop is watched: how long the longest piece of work of a request is that
nothing else can interrupt, and how long all pieces are together, in CPU time of this thread.

Jobs that the broker gives to another thread are done here too, and counted apart: beside a loop
they run in parallel, with the interpreter's lock handed over ten thousand times a second.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

from simulation.stepped import SMALL, SteppedBroker
from sluicemq.config import BrokerConfig
from sluicemq.errors import ProtocolError
from sluicemq.wire.frames import Command, FrameReader, encode


class RunningClock:
    """The clock of the machine, for slices that end by themselves."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.thread_time()  # of this thread: what others compute meanwhile does not count

    def advance(self, seconds: float) -> None:
        """It goes by itself."""


class Pieces:
    """The CPU time of the pieces of one request."""

    def __init__(self) -> None:
        self.loop_s: list[float] = []
        self.jobs_s: list[float] = []

    @property
    def longest_ms(self) -> float:
        return 1000 * max(self.loop_s, default=0.0)

    @property
    def total_s(self) -> float:
        return sum(self.loop_s) + sum(self.jobs_s)


class MeteredBroker(SteppedBroker):
    """A stepped broker under a running clock. `ask` does all that a request makes the loop do."""

    def __init__(self, config: BrokerConfig | None = None) -> None:
        super().__init__(config=config, store_config=SMALL, clock=RunningClock())  # type: ignore[arg-type]
        self.pieces = Pieces()
        self.core.background.offload = self._offload
        self._client = self.connect()

    def _offload(self, job: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Do a job at the end of the turn, as another thread would."""

        def later() -> None:
            begin_s = time.thread_time()
            try:
                found: Any = job()
            except Exception as error:
                found = error
            self.pieces.jobs_s.append(time.thread_time() - begin_s)
            self._soon.append(lambda: done(found))

        self._jobs.append(later)

    @property
    def _jobs(self) -> list[Callable[[], None]]:
        return self.__dict__.setdefault("_queued", [])  # type: ignore[no-any-return]

    def _timed(self, run: Callable[[], object]) -> Any:
        begin_s = time.thread_time()
        found = run()
        self.pieces.loop_s.append(time.thread_time() - begin_s)
        return found

    def ask(self, command: Command) -> tuple[Pieces, Command | None]:
        """Feed a request and run the loop until nothing is left to do. Return what it cost, and the
        answer, None when the connection would be closed."""
        self.pieces = Pieces()
        data, peer, answers = encode(command), self._client.peer, FrameReader()
        written: list[bytes] = []
        peer._transport.write = written.append  # type: ignore[method-assign]
        gc.disable()
        try:
            shares = self.core.scheduler
            used, found = self._timed(lambda: self.dispatcher.handle_frames(data, peer, shares))
            while used < len(data) or self._soon or self._jobs:
                for run in [self._soon.popleft() for _ in range(len(self._soon))]:
                    self._timed(run)
                while self._jobs:
                    self._jobs.pop(0)()
                if used < len(data):
                    used, found = self._timed(
                        lambda: self.dispatcher.handle_frames(data, peer, shares)
                    )
        except ProtocolError:  # a server closes the connection
            return self.pieces, None
        finally:
            gc.enable()
        for chunk in (found, *written):
            for answer in answers.feed(chunk) if chunk else ():
                if answer.opaque == command.opaque and answer.is_response:
                    return self.pieces, answer
        return self.pieces, None
