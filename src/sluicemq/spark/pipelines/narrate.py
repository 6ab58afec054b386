"""What a run says, to people and to programs: events, each a line of text and its numbers.

    late-flights topic-report: batch 7: 30 rows, 60 rows/s, 75 filtered at the broker, lag 0
    {"event": "batch", "pipeline": "late-flights", "sink": "topic-report", "batch": 7, …}

Whoever runs a pipeline takes `Event`s; what to do with them (stderr, JSON lines) is the caller's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluicemq.spark.pipelines.document import Secrets


@dataclass(frozen=True, slots=True)
class Event:
    """`kind`: started, stage, batch, written, line, stopping, done. Without secrets."""

    kind: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"event": self.kind, "text": self.text, **self.figures}


Listener = Callable[[Event], None]


def silent(_event: Event) -> None:
    """A listener that does nothing."""


@dataclass(frozen=True, slots=True)
class Narrator:
    """Speaks for one pipeline."""

    pipeline: str
    listener: Listener = silent
    secrets: Secrets = field(default_factory=Secrets)

    def tell(self, kind: str, text: str, **figures: Any) -> None:
        sink = figures.get("sink")
        head = f"{self.pipeline} {sink}: " if sink else f"{self.pipeline}: "
        shown = self.secrets.hidden(head + text)
        self.listener(Event(kind, shown, {"pipeline": self.pipeline, **figures}))
