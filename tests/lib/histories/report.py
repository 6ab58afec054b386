"""What a batch of histories was, for docs/reports."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from histories.history import History, Outcome

COUNTS = (
    "sends", "acknowledged", "seen", "filteredPulls", "timedSends", "timedAcknowledged",
    "timedTakenBack", "returnedRoles", "elections",
)  # fmt: skip
"""What is counted of each history."""


@dataclass
class Report:
    """Counts of what has come to an end, right or wrong. In a file, if `path` is given, after each
    history: a list of batches, of which this is the last."""

    replicas: int
    seconds: float
    path: Path | None = None
    seeds: list[int] = field(default_factory=list)
    finished: int = 0
    wrong: int = 0
    parallel: int = 1
    shortest_s: float = inf
    """Of the periods of faults, from the first one to the end of the last one."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    sinks: dict[str, Counter[str]] = field(default_factory=dict)
    _begun_s: float = field(default_factory=time.monotonic)
    _before: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._before = json.loads(self.path.read_text())

    def add(
        self, seed: int, history: History, story: list[str], sink: str, *, faults_s: float,
        wrong: bool,
    ) -> None:  # fmt: skip
        """Count one history, and write the file.

        `story` are the faults, each with its kind first; `sink` is "" without one; `faults_s` is
        how long the faults lasted.
        """
        self.seeds.append(seed)
        self.finished += 1
        self.wrong += wrong
        self.shortest_s = min(self.shortest_s, faults_s)
        self.counts += Counter(
            sends=len(history.sends),
            acknowledged=sum(send.outcome is Outcome.OK for send in history.sends),
            seen=len(history.seen),
            filteredPulls=len(history.filtered),
            timedSends=len(history.timed),
            timedAcknowledged=sum(one.outcome is Outcome.OK for one in history.timed),
            timedTakenBack=sum(one.recall is Outcome.OK for one in history.timed),
            returnedRoles=history.returns,
            elections=len({term.epoch for term in history.terms}) - 1 if history.terms else 0,
        )
        for fault in story:
            self.faults[fault.split()[0]] += 1
            self.faults["of the master"] += "(master)" in fault
        if sink:
            committed = [epoch for epoch in history.epochs if epoch.committed_at is not None]
            self.sinks[sink] = self.sinks.get(sink, Counter()) + Counter(
                histories=1,
                epochs=len(history.epochs),
                committed=len(committed),
                commitsAskedFor=sum(len(epoch.offers) for epoch in history.epochs),
                rowsStaged=sum(len(epoch.staged) for epoch in history.epochs),
                rowsCommitted=sum(len(epoch.offers[0]) for epoch in committed),
            )
        self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        if self.path is not None:
            batches = [*self._before, self._values()]
            self.path.write_text(json.dumps(batches, indent=2) + "\n")

    def merge(self, path: Path) -> None:
        """Add the last batch of another report's file to this one."""
        batch = json.loads(path.read_text())[-1]
        self.seeds += batch["seeds"]
        self.finished += batch["histories"]
        self.wrong += batch["wrong"]
        self.shortest_s = min(self.shortest_s, batch["shortestFaults_s"])
        self.counts += Counter({name: batch.get(name, 0) for name in COUNTS})
        self.faults += Counter(batch["faults"])
        for sink, counts in batch["sinks"].items():
            self.sinks[sink] = self.sinks.get(sink, Counter()) + Counter(counts)

    @property
    def told(self) -> str:
        """In a line."""
        return ", ".join(f"{count} {name}" for name, count in self.counts.items())

    def _values(self) -> dict[str, Any]:
        return {
            "histories": self.finished,
            "seeds": [min(self.seeds, default=0), max(self.seeds, default=0)],
            "wrong": self.wrong,
            "replicas": self.replicas,
            "parallel": self.parallel,
            "secondsOfFaults": self.seconds,
            "shortestFaults_s": round(self.shortest_s, 1),
            "duration_s": round(time.monotonic() - self._begun_s),
            **self.counts,
            "faults": dict(sorted(self.faults.items())),
            "sinks": self.sinks,
        }
