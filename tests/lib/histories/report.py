"""What a batch of histories was, for docs/reports."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from histories.history import History, Outcome


@dataclass
class Report:
    """Counts of what has come to an end, right or wrong. In a file, if `path` is given, after each
    history: a list of batches, of which this is the last."""

    replicas: int
    seconds: float
    path: Path | None = None
    seeds: list[int] = field(default_factory=list)
    wrong: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    sinks: dict[str, Counter[str]] = field(default_factory=dict)
    _begun_s: float = field(default_factory=time.monotonic)
    _before: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            self._before = json.loads(self.path.read_text())

    def add(self, seed: int, history: History, story: list[str], sink: str, *, wrong: bool) -> None:
        """One history. `story` are its faults, each with its kind first; `sink`: "" without one."""
        self.seeds.append(seed)
        self.wrong += wrong
        self.counts += Counter(
            sends=len(history.sends),
            acknowledged=sum(send.outcome is Outcome.OK for send in history.sends),
            seen=len(history.seen),
            filteredPulls=len(history.filtered),
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
        if self.path is not None:
            batches = [*self._before, self._values()]
            self.path.write_text(json.dumps(batches, indent=2) + "\n")

    @property
    def told(self) -> str:
        """In a line."""
        return ", ".join(f"{count} {name}" for name, count in self.counts.items())

    def _values(self) -> dict[str, Any]:
        return {
            "histories": len(self.seeds),
            "seeds": [min(self.seeds, default=0), max(self.seeds, default=0)],
            "wrong": self.wrong,
            "replicas": self.replicas,
            "secondsOfFaults": self.seconds,
            "duration_s": round(time.monotonic() - self._begun_s),
            **self.counts,
            "faults": dict(sorted(self.faults.items())),
            "sinks": self.sinks,
        }
