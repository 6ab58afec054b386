"""The command: every mutant in turn, and who catches it.

    python -m mutants [--only WORD] [--jobs 2] [--report FILE]

Each mutant is applied to a copy of the repository and the test that has to catch it is run there,
with the compiled engine. The same test has to pass without the mutant. The exit code is 1 when a
mutant survives, its test takes longer than a minute, or the test fails without it.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mutants.patching import Mutant, StaleMutantError
from mutants.running import Copies, Copy, Verdict
from mutants.table import MUTANTS

HEAD = """# Mutants, and the tests that catch them

Written by `make mutants`. Each mutant is a small wrong patch of the product; the test beside it has
to fail with the patch, within a minute, and to pass without it.

| area | mutant | what is wrong | caught by | seconds |
|---|---|---|---|---|
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="those whose area or name has this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies side by side")
    parser.add_argument("--report", type=Path, help="write the table to this file")
    asked = parser.parse_args(arguments)
    wanted = [one for one in MUTANTS if asked.only in f"{one.area}/{one.name}"]
    with tempfile.TemporaryDirectory(prefix="sluicemq-mutants-") as scratch:
        copies = Copies(Path(scratch), max(min(asked.jobs, len(wanted)), 1))
        is_broken = copies.report_failures(one.caught_by for one in wanted)
        verdicts = copies.map(_judged, wanted)
    survivors = [
        one
        for one, verdict in zip(wanted, verdicts, strict=True)
        if not verdict.is_caught or verdict.is_late
    ]
    counts = Counter(one.area for one in wanted)
    print(f"{len(wanted)} mutants ({', '.join(f'{n} {area}' for area, n in counts.items())}): "
          f"{len(wanted) - len(survivors)} caught in time, {len(survivors)} not")  # fmt: skip
    if asked.report:
        asked.report.write_text(HEAD + "".join(map(_row, wanted, verdicts)))
    return 1 if survivors or is_broken else 0


def _judged(copy: Copy, mutant: Mutant) -> Verdict:
    """Run the mutant's test with it, and print the verdict."""
    try:
        verdict = copy.run(mutant)
    except StaleMutantError as stale:
        verdict = Verdict(False, 0.0, str(stale))
    word = "caught" if verdict.is_caught else "SURVIVES"
    if verdict.is_caught and verdict.is_late:
        word = "caught late"
    how = verdict.by if verdict.is_caught else verdict.said
    print(f"{word:>8} {verdict.seconds:5.1f} s  {mutant.area}/{mutant.name}  {how}", flush=True)
    return verdict


def _row(mutant: Mutant, verdict: Verdict) -> str:
    by = verdict.by if verdict.is_caught else "**nothing**"
    return f"| {mutant.area} | {mutant.name} | {mutant.reason} | `{by}` | {verdict.seconds:.1f} |\n"


if __name__ == "__main__":
    sys.exit(main())
