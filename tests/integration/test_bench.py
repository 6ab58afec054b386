"""Two rows of `make bench` with our broker alone."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_rows_are_measured_judged_and_written(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--no-java"]
    command += ["--json", str(figures), "--only", "start: CPU", "--only", "heartbeats"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(figures.read_text())
    assert [row["case"] for row in rows] == [
        "start: CPU to ready",
        "growth: heartbeats, 500 the same",
    ]
    for row in rows:
        assert row["figures"]["pure"]
        assert {aim["server"] for aim in row["aims"]} == set(row["figures"])
    assert rows[1]["figures"]["pure"]["cpu_us"] > 0
    assert "aims met" in done.stdout
