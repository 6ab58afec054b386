"""Archive and replay while the driver is killed at the most critical steps.

SLUICEMQ_SEEDS (default 1): how many histories. One alone has one kill, of several each has three.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.pipelines.archive import read_archive
from thorough import seeds
from waiting import limit

ROOT = Path(__file__).parents[4]
SEEDS = seeds(1)
STEPS = ("commit", "move", "finish_step")
COUNT = 60


@pytest.mark.simulation
@pytest.mark.timeout(900 * max(SEEDS, 1))
def test_killed_drivers_archive_and_send_every_message_once(
    spark: Any, name_server: str, topic: str, publish: Callable[..., None], read: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    publish(0, COUNT)
    wanted = Counter(f"body-{number}".encode() for number in range(COUNT))
    for seed in range(SEEDS):
        place = tmp_path / str(seed)
        place.mkdir()
        chosen = random.Random(seed)
        kills = ["finish_step"] if SEEDS == 1 else chosen.choices(STEPS, k=3)
        for kill_at in kills:
            run_driver(name_server, topic, place, kill_at)
        assert "done" in run_driver(name_server, topic, place, "none")
        assert bodies(read_archive(spark, str(place / "archive"))) == wanted, f"{seed}: {kills}"
        back = bodies(read(topic=f"{topic}-again", columns="body"))
        assert back == Counter(dict.fromkeys(wanted, seed + 1)), f"{seed}: {kills}"


def bodies(frame: Any) -> Counter[bytes]:
    return Counter(bytes(row.body) for row in frame.select("body").collect())


def run_driver(name_server: str, topic: str, place: Path, kill_at: str) -> str:
    """Run the driver and return its output. Its JVM and workers are killed afterwards.

    A driver does not reach its step if an earlier driver has done it; then it ends normally.
    """
    with (place / "errors").open("wb") as errors:
        driver = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "archive_driver.py"), name_server, topic,
             str(place / "archive"), f"{topic}-{place.name}", kill_at],
            stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )  # fmt: skip
    try:
        code = driver.wait(limit(280))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.stdout is not None
    with driver.stdout:
        output = driver.stdout.read()
    said = (place / "errors").read_text()[-3000:]
    assert code in (0, -signal.SIGKILL), said
    assert (code == 0) == ("done" in output), said
    if SEEDS == 1 and kill_at != "none":
        assert code == -signal.SIGKILL, said
    return output
