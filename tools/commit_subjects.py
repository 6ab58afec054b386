"""Check the subjects of commits: at most 72 characters each.

    python tools/commit_subjects.py

Checks every commit after the one that added this file, except merges. The exit code is 1 if a
subject is too long. Without a Git history, as in an unpacked source archive, nothing is checked.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LENGTH_MAX = 72


def main() -> int:
    """Print each commit whose subject is too long, and return the exit code."""
    added = _git("log", "--diff-filter=A", "--format=%H", "--", "tools/commit_subjects.py")
    if not added:
        print("No history with this file: no subject was checked.")
        return 0

    log = _git("log", "--no-merges", "--format=%h %s", f"{added.split()[-1]}..HEAD")
    faults = too_long(log.splitlines())
    for line, length in faults:
        print(f"The subject has {length} characters, must have at most {LENGTH_MAX}: {line}")
    return 1 if faults else 0


def too_long(lines: list[str]) -> list[tuple[str, int]]:
    """Return the lines `HASH SUBJECT` whose subject is too long, each with its length."""
    subjects = [(line, len(line.partition(" ")[2])) for line in lines]
    return [(line, length) for line, length in subjects if length > LENGTH_MAX]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
