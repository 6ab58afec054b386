"""`sluice` as processes: started by their arguments, waited for, and none left behind."""

import os
import select
import subprocess
import sys
from pathlib import Path

from waiting import limit

SOURCE = Path(__file__).parents[2] / "src"
TIMEOUT_S = 30


class Processes:
    """Starts `sluice` and leaves none behind."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "sluicemq", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "NAMESRV_ADDR": ""},
        )
        self.running.append(process)
        return process

    def ready(self, *arguments: str) -> tuple[subprocess.Popen[str], str]:
        process = self.start(*arguments)
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], limit(TIMEOUT_S))[0]:
            process.kill()
            raise AssertionError(f"not ready: {process.communicate()[1]}")
        return process, process.stdout.readline()

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.communicate()
