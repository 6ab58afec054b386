"""Pages of pipelines: they are made from progress files, without Spark."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from console_app import browsing
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.pipelines.record import Recorder
from waiting import limit

PROBE = "<script>alert(1)</script>"


class Nothing:
    """A cluster that receives no request from these pages."""

    admin = None

    async def close(self) -> None:
        pass


def connect(_credentials: object) -> Any:
    return Nothing()


def step(rows: int, left: int, text: str) -> Any:
    figures = {"sink": "parquet", "rows": rows, "rows_per_second": 40.0, "lag": left, "eta_s": 90.0}
    return SimpleNamespace(kind="batch", text=text, figures=figures)


def leave(directory: Path, name: str, *, error: str | None = None) -> None:
    recorder = Recorder(str(directory), name, f"{name}.yaml", "streaming")
    recorder.record_event(step(1200, 3600, f"batch 1 {PROBE}"))
    if error is None:
        recorder.refresh()
    else:
        recorder.finish(error)


async def test_runs_are_shown_with_their_progress(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    leave(runs, "copy-flights")
    leave(runs, "late/flights", error=f"the table is gone {PROBE}")
    (runs / "broken.json").write_text("{")
    async with browsing(connect, tmp_path, pipelines=(str(runs), "/nowhere/at/all")) as browser:
        await browser.enter()
        text = (await browser.get("/pipelines")).text
        assert "<script>alert" not in text
        for words in (
            ">running</span>", ">failed</span>", "1,200", "3,600", "1 min 30 s",
            "the table is gone", "is not a valid progress file of a pipeline",
            "/pipelines/late%2Fflights",
        ):  # fmt: skip
            assert words in text, words
        one = await browser.get("/pipelines/copy-flights")
        assert "data-points" in one.text
        assert "batch 1" in one.text
        assert "<script>alert" not in one.text
        failed = await browser.get("/pipelines/late%2Fflights")
        assert "the table is gone" in failed.text
        live = await browser.get("/pipelines/copy-flights", live=True)
        assert "<html" not in live.text
        missing = await browser.get(f"/pipelines/{PROBE}")
        assert missing.status_code == 400
        assert "<script>alert" not in missing.text
        leave(runs, "copy-flights", error="")
        assert ">finished</span>" in (await browser.get("/pipelines/copy-flights")).text


async def test_without_directories_the_page_says_how_to_configure_one(tmp_path: Path) -> None:
    async with browsing(connect, tmp_path, clock=SYSTEM_CLOCK) as browser:
        await browser.enter()
        assert "--pipelines DIRECTORY" in (await browser.get("/pipelines")).text
    async with browsing(connect, tmp_path, pipelines=(str(tmp_path / "accounts"),)) as browser:
        await browser.enter()
        assert "--progress DIRECTORY" in (await browser.get("/pipelines")).text


def test_the_console_needs_no_spark() -> None:
    code = (
        "import sys; import sluicemq.console.table;"
        "print([name for name in sys.modules if name.partition('.')[0] in ('pyspark', 'py4j')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=limit(60)
    )
    assert done.stdout.strip() == "[]"
