"""Ctrl-C at a certain point: when a program of `sluice` begins to import a module."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from waiting import limit

SOURCE = Path(__file__).parents[2] / "src"
AT_IMPORT = """
import os, signal, sys
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("INTERRUPT_AT"):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtImport())
"""


def interrupted(
    directory: Path, module: str, *words: str, handler: Any = signal.default_int_handler
) -> subprocess.CompletedProcess[str]:
    """Runs `sluice WORDS` so, with `directory` for what it takes, to its end and to that of
    whatever it has started."""
    (directory / "sitecustomize.py").write_text(AT_IMPORT)
    return subprocess.run(
        [sys.executable, "-m", "sluicemq", *words],
        capture_output=True, text=True, check=False, timeout=limit(60), stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{directory}:{SOURCE}", "INTERRUPT_AT": module},
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )  # fmt: skip
