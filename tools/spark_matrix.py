"""The main path on several versions of Spark, each in a virtual environment of its own.

    python tools/spark_matrix.py [--versions 4.1,4.2,newest] [pytest's arguments]

What is tested is the batch and the streaming source and the sinks (tests/integration/spark). The
environments are kept under .spark-matrix/ (1.5 GB each: pyspark is a source package of 450 MB) and
take what pip has in its cache. Not part of CI. The exit code is the number of versions that failed.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
HOME: Final = ROOT / ".spark-matrix"
NEWEST: Final = "newest"
TESTS: Final = (
    "test_spark_batch.py", "test_spark_stream.py", "test_spark_sink.py",
    "test_spark_exactly_once.py", "test_spark_frames.py",
)  # fmt: skip


def requirement(version: str) -> str:
    """What pip is asked for: `4.2` is its last patch version."""
    return "pyspark" if version == NEWEST else f"pyspark=={version}.*"


def environment(version: str) -> Path:
    """The interpreter of a version's environment, made when it is not there."""
    home = HOME / version
    python = home / "bin" / "python"
    ready = home / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--timeout", "180"]
        wanted = [requirement(version), "--editable", f"{ROOT}[dev]"]
        subprocess.run([*install, *wanted], check=True)
        ready.touch()
    return python


def found_version(python: Path) -> str:
    shown = [str(python), "-c", "import pyspark; print(pyspark.__version__)"]
    return subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip()


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(version: str, more: list[str]) -> str:
    """A line for the summary; begins with `ok` or `FAILED`."""
    started = time.monotonic()
    python = environment(version)
    spark = found_version(python)
    tell(f"--- Spark {spark}")
    tests = [str(ROOT / "tests" / "integration" / "spark" / name) for name in TESTS]
    given = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYSPARK_PYTHON": str(python)}
    command = [str(python), "-m", "pytest", "-q", "-m", "spark", *tests, *more]
    code = subprocess.run(command, cwd=ROOT, env=given, check=False).returncode
    verdict = "FAILED" if code else "ok    "
    return f"{verdict} {version:8s} Spark {spark:8s} {time.monotonic() - started:5.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", default=f"4.1,4.2,{NEWEST}")
    given, more = parser.parse_known_args()
    told = [run(version, more) for version in given.versions.split(",")]
    tell("\n".join(told))
    return sum(line.startswith("FAILED") for line in told)


if __name__ == "__main__":
    sys.exit(main())
