"""A separate process that writes the files of property columns, so that no request waits for it.

Decoding a block of 65,536 messages takes about 100 ms of computing. On a thread of the broker, that
time would be shared with the event loop by the interpreter's lock (GIL), and producers would wait.
The process has an interpreter and a core of its own, runs with a low priority (nice), and does what
`store.columns.file.serve` describes. It ends after IDLE_S without a job.

The broker runs it as `python -m sluicemq.broker.consume.columns_helper NICE`.
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
    from sluicemq.store.columns.file import SealJob


MODULE: Final = "sluicemq.broker.consume.columns_helper"
"""The name under which the process runs this module."""
NICE: Final = 15
"""The default value that is added to the niceness of the process."""
IDLE_S: Final = 60.0
"""The process ends after it has been idle for this time in seconds."""


class SealingProcess:
    """The broker's side of the process: a `store.columns.file.Sealer`.

    It runs one job at a time. Jobs may be started on any thread.
    """

    def __init__(self, nice: int = NICE) -> None:
        """Create the helper. The process is started by the first job.

        `nice` is added to the niceness of the process: a higher value means a lower priority.
        """
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_used = False
        """Whether there was a job since the last call of `release_unused`."""
        self._used_s = 0.0
        """The monotonic time of the last call of `release_unused` that found a job."""

    def seal(self, job: "SealJob", units: Sequence[bytes]) -> tuple[str, int]:
        """Write the file of a block in the process, which is started if necessary.

        `units` are the units of the block: the 20-byte entries of its consume queue. Return the
        name and the size in bytes of the file. Blocks until the file is written.

        Raises OSError if the process fails; there is no file then, and the process is ended.
        """
        with self._lock:
            self._is_used = True
            try:
                if self._process is None:
                    self._process = self._start_process()
                answer_line = self._send_job(self._process, job, units)
            except OSError:
                self._stop_process()
                raise
            answer = json.loads(answer_line) if answer_line else {}
            if "name" in answer:
                return answer["name"], answer["size"]

            # Before the process is stopped, because that would change its exit code.
            exit_code = self._process.poll()
            self._stop_process()
            end_text = f"The process that writes property columns ended (exit code {exit_code})."
            raise OSError(answer.get("error", end_text))

    def _send_job(
        self, process: subprocess.Popen[bytes], job: "SealJob", units: Sequence[bytes]
    ) -> bytes:
        """Send a job to the process, and return the line that it answers; b"" if it has ended.

        The process receives the job as one line of JSON and then the units, and answers with one
        line of JSON: {"name": …, "size": …} or {"error": …}. Raises OSError.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job._asdict()).encode() + b"\n")
        for unit_bytes in units:
            process.stdin.write(unit_bytes)
        process.stdin.flush()
        return process.stdout.readline()

    def _start_process(self) -> subprocess.Popen[bytes]:
        """Start the process, with this package on its path, and return it. Raises OSError."""
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        # One thread: the process must not take more than one core from the broker.
        threads = {"OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, str(self._nice)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **threads},
        )

    def release_unused(self, now_s: float) -> None:
        """End the process if it has had no job for IDLE_S before `now_s`.

        The owner calls this regularly, between jobs.
        """
        if self._is_used:
            self._is_used = False
            self._used_s = now_s
        elif self._process is not None and now_s > self._used_s + IDLE_S:
            self.close()

    def close(self) -> None:
        """End the process; the next job starts another one."""
        with self._lock:
            self._stop_process()

    def _stop_process(self) -> None:
        """Kill the process and wait for its end. The caller holds the lock."""
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.communicate()


if __name__ == "__main__":
    from sluicemq.store.columns.file import serve_seal_jobs

    os.nice(int(sys.argv[1]))
    serve_seal_jobs(sys.stdin.buffer, sys.stdout.buffer)
