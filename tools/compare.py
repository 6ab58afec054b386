"""Is a change slower? Two checkouts, measured alternately with the same load.

    python tools/compare.py OLD [NEW] [--runs 7]

OLD and NEW (default: this one) are checkouts with a `.venv` of their own. `python -m benchmarks
--quick --no-java` runs in OLD, NEW, OLD, NEW …; printed are the medians of each row (processor time
of the server per message where the row has it, else what it says), their ratio, and the spread of
OLD against itself: the median distance of a run from the median. A row is slower when its ratio is
above 1.05 and above what the spread explains; then the exit code is 1.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

LIMIT: Final = 1.05
CPU: Final = re.compile(r"\[([\d.]+) us\]")
FIRST_NUMBER: Final = re.compile(r"[\d.]+")


def main() -> int:
    options = arguments()
    old, new = Path(options.old).resolve(), Path(options.new).resolve()
    found: dict[Path, dict[str, list[float]]] = {old: {}, new: {}}
    for _ in range(options.runs):
        for checkout in (old, new):
            for row, value in measured(checkout).items():
                found[checkout].setdefault(row, []).append(value)
    slower = [row for row in found[old] if row in found[new] and is_slower(found, old, new, row)]
    print(f"slower: {', '.join(slower) or 'nothing'}")
    return 1 if slower else 0


def measured(checkout: Path) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [checkout / ".venv/bin/python", "-m", "benchmarks", "--quick", "--no-java"]
        subprocess.run(
            [*map(str, command), "--json", file.name],
            cwd=checkout, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        rows = json.loads(Path(file.name).read_text())
    return {row["case"]: value_of(row["ours"]) for row in rows}


def value_of(text: str) -> float:
    match = CPU.search(text)
    if match:
        return float(match[1])
    number = FIRST_NUMBER.search(text.replace(",", ""))
    return float(number[0]) if number else 0.0


def is_slower(found: dict[Path, dict[str, list[float]]], old: Path, new: Path, row: str) -> bool:
    before, after = found[old][row], found[new][row]
    median = statistics.median(before)
    spread = statistics.median(abs(value - median) for value in before) / median if median else 0
    ratio = statistics.median(after) / median if median else 1.0
    print(
        f"{row:42} {median:8.2f} -> {statistics.median(after):8.2f}  x {ratio:.2f}"
        f"  (old against old ± {spread:.0%})"
    )
    return ratio > max(LIMIT, 1 + 2 * spread)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default=str(Path(__file__).parents[1]))
    parser.add_argument("--runs", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
