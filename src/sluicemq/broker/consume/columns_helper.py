"""A process of its own that makes the files of property columns, so that nobody waits for it.

Decoding a block of 65,536 messages takes some 100 ms of computing. In a thread of the broker that
time would be shared with the loop by way of the interpreter's lock, and whoever sends meanwhile
waits. The helper has an interpreter and a core of its own, gives way to others (nice), and does
what `store.columns.seal` says. It lives as long as it is in use.

Run by the broker: `python -m sluicemq.broker.consume.columns_helper`.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sluicemq.store.columns.file import Job


MODULE: Final = "sluicemq.broker.consume.columns_helper"
NICE: Final = 15
IDLE_S: Final = 60.0


class SealingProcess:
    """The broker's side: a `store.columns.seal.Sealer`. One job at a time, in any thread."""

    def __init__(self, nice: int = NICE) -> None:
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_used = False
        self._used_s = 0.0

    def seal(self, job: "Job", units: Sequence[bytes]) -> tuple[str, int]:
        """The file's name and size. Raises OSError; then there is no file."""
        with self._lock:
            self._is_used = True
            try:
                if self._process is None:
                    root = str(Path(__file__).parents[3])
                    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
                    threads = {"OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", MODULE, str(self._nice)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        env={**os.environ, "PYTHONPATH": path, **threads},
                    )
                process = self._process
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(job._asdict()).encode() + b"\n")
                for part in units:
                    process.stdin.write(part)
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                self._stop()
                raise
            found = json.loads(answer) if answer else {}
            if "name" in found:
                return found["name"], found["size"]
            ended = f"the process that makes property columns ended ({process.poll()})"
            self._stop()
            raise OSError(found.get("error", ended))

    def rest(self, now_s: float) -> None:
        """End the process when it has had nothing to do for a while."""
        if self._is_used:
            self._is_used, self._used_s = False, now_s
        elif self._process is not None and now_s > self._used_s + IDLE_S:
            self.close()

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.communicate()


if __name__ == "__main__":
    from sluicemq.store.columns.file import serve

    os.nice(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
