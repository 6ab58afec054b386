"""What a pipeline file means: the value that `file` makes and everything else reads.

Each part keeps the line it came from, so that what only Spark can find out (a transform that does
not parse, a column that is not there) is reported like what the file's reader finds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sluicemq.errors import ConfigurationError
from sluicemq.spark.pipelines.document import Problem, Secrets

BATCH, STREAMING = "batch", "streaming"
ROCKETMQ, STORE, PARQUET = "rocketmq", "store", "parquet"
TOPIC, TABLE = "topic", "table"
AVAILABLE_NOW: Final = "available-now"
VIEW: Final = "source"


@dataclass(frozen=True, slots=True)
class Source:
    """What comes in. `options` are those of Spark's source, those of the cluster included; `lines`
    has the line of each."""

    kind: str
    options: Mapping[str, str]
    line: int
    lines: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sink:
    """Where it goes. `fields`: the declared ones by name; `options`: of Spark's sink (topics)."""

    name: str
    kind: str
    fields: Mapping[str, Any]
    options: Mapping[str, str]
    key: str
    line: int
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, what: str, cure: str = "", *, at: str = "") -> "PlaceError":
        """An error at the sink, or at one of its keys."""
        key = f"{self.key}.{at}" if at else self.key
        return PlaceError(Problem(self.lines.get(at, self.line), key, what, cure))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A whole file. With `use` a ready one of that name, whose fields are `given`; else `source`
    and `sinks` are there. `trigger`: seconds between micro-batches, None for all that is there
    now. `transform_line`: the line of the file where the SQL begins."""

    path: str
    name: str
    cluster: Mapping[str, str]
    source: Source | None = None
    transform: str | None = None
    transform_line: int = 0
    sinks: tuple[Sink, ...] = ()
    mode: str = BATCH
    trigger: float | None = None
    checkpoint: str | None = None
    use: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    secrets: Secrets = field(default_factory=Secrets)
    warnings: tuple[Problem, ...] = ()

    @property
    def is_streaming(self) -> bool:
        return self.mode == STREAMING

    def checkpoint_of(self, sink: Sink) -> str:
        """The checkpoint directory of a sink's query: one below the pipeline's for each."""
        return f"{(self.checkpoint or '').rstrip('/')}/{sink.name}"

    def failed(self, error: "PlaceError") -> ConfigurationError:
        """The error as the user sees it: file, line, key."""
        return ConfigurationError(self.secrets.hidden(error.problem.told(self.path)))


class PlaceError(Exception):
    """Carries a problem of a place of the file to where the file's name is known."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem
