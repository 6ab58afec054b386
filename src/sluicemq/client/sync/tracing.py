"""Writes what a blocking producer has noted: a thread that begins with the first note, sends about
once a second, and never lets an error reach whom it tells of."""

import logging
import threading
from collections.abc import Callable
from typing import Final

from sluicemq.client.core.tracing import LINGER_S, RECORDS_MAX, Tracing, trace_hint
from sluicemq.model.message import Message

_log = logging.getLogger("sluicemq.client")
_CLOSE_S: Final = 3.0


class TraceWriter:
    """The writer of one producer. `send` stores a message, or raises."""

    def __init__(
        self, tracing: Tracing, send: Callable[[Message], None], linger_s: float = LINGER_S
    ) -> None:
        self.tracing = tracing
        self._send = send
        self._linger_s = linger_s
        self._work = threading.Event()
        self._full = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = self._has_warned = False
        tracing.on_work = self._wake

    def _wake(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(
                        target=self._run, name="sluicemq trace", daemon=True
                    )
                    self._thread.start()
        if not self._work.is_set():
            self._work.set()
        if len(self.tracing) >= RECORDS_MAX and not self._full.is_set():
            self._full.set()

    def _run(self) -> None:
        while not self._closed or self.tracing:
            self._work.wait()
            self._work.clear()
            self._full.wait(self._linger_s)
            if not self._closed:
                self._full.clear()
            if not self.flush() and self._closed:
                return

    def flush(self) -> bool:
        """Sends all that is noted; False when that failed. Raises nothing."""
        while (batch := self.tracing.take()) is not None:
            try:
                self._send(batch.message)
            except Exception as error:  # noqa: BLE001 - a trace must not disturb what it tells of
                self.tracing.lost(batch.record_count)
                level = logging.DEBUG if self._has_warned else logging.WARNING
                self._has_warned = True
                _log.log(level, "traces cannot be written%s: %s", trace_hint(error), error)
                return False
        return True

    def close(self) -> None:
        """Writes what is left, for a few seconds at most."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._full.set()
            self._work.set()
            thread.join(_CLOSE_S)
        self.tracing.lost(len(self.tracing))
        if self.tracing.dropped:
            _log.warning("%d trace records were not written", self.tracing.dropped)
