"""A pipeline file as a value: YAML whose values know their lines, and what the file means.

PyYAML's `compose` gives nodes with marks instead of values. `Entry` wraps one: the path of keys
that leads to it (`sinks[1].url`), its line, its texts. What is wrong goes into `Document.problems`
and reading goes on, so that a user sees all of it at once. A `Pipeline` keeps the line of each part
as well, so that what only Spark can find out (a transform that does not parse, a column that is not
there) is reported like what the file's reader finds.

`${NAME}` in a text is taken from the environment (`$${` is a plain `${`). What came from a variable
whose name sounds like a secret, and what stands where secrets stand, is remembered in `Secrets`,
which takes it out of whatever is printed.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from sluicemq.errors import ConfigurationError
from sluicemq.spark.errors import did_you_mean

BATCH, STREAMING = "batch", "streaming"
ROCKETMQ, STORE, PARQUET = "rocketmq", "store", "parquet"
TOPIC, TABLE = "topic", "table"
AVAILABLE_NOW: Final = "available-now"
VIEW: Final = "source"
MASK: Final = "***"
_VARIABLE: Final = re.compile(r"\$\$(?=\{)|\$\{([^}]*)\}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME: Final = re.compile(r"SECRET|PASS|PWD|TOKEN|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_URL_PASSWORD: Final = re.compile(r"://[^/@\s]*?:([^/\s]*)@")
_NULL: Final = "tag:yaml.org,2002:null"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What is wrong in a line, at a key, and what to do. A warning stops nothing."""

    line: int
    key: str
    what: str
    cure: str = ""
    is_error: bool = True

    def told(self, path: str) -> str:
        """`late.yaml:4: source.topik: there is no such key. Did you mean 'topic'?`"""
        kind = "" if self.is_error else "warning: "
        key = f"{self.key}: " if self.key else ""
        return f"{path}:{self.line}: {kind}{key}{self.what} {self.cure}".rstrip()


class PlaceError(Exception):
    """Carries a problem of a place of the file to where the file's name is known."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


@dataclass(slots=True)
class Secrets:
    """Texts that nobody may read, and what stands for each."""

    masks: dict[str, str] = field(default_factory=dict)

    def add(self, text: str, mask: str = MASK) -> None:
        if text:
            self.masks.setdefault(text, mask)

    def add_url(self, url: str) -> None:
        """The password of a URL, which a driver may write out with or without its escapes."""
        for password in _URL_PASSWORD.findall(url):
            self.add(password)

    def hidden(self, text: str) -> str:
        """The text without any of them; longest first, as one may hold another."""
        for secret in sorted(self.masks, key=len, reverse=True):
            text = text.replace(secret, self.masks[secret])
        return text


# ---- reading


@dataclass(slots=True)
class Document:
    """One file that is being read: its environment, and what was found wrong so far."""

    environment: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)
    secrets: Secrets = field(default_factory=Secrets)

    def add(self, line: int, key: str, what: str, cure: str = "", *, is_error: bool = True) -> None:
        hidden = self.secrets.hidden
        problem = Problem(line, key, hidden(what), hidden(cure), is_error)
        if problem not in self.problems:
            self.problems.append(problem)

    def root(self, text: str) -> "Entry | None":
        """The whole document. None, with the problem added, when it is no YAML mapping."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            what = getattr(error, "problem", None) or getattr(error, "context", None) or error
            self.add(mark.line + 1 if mark else 1, "", f"this is no YAML: {what}.")
            return None
        if not isinstance(node, yaml.MappingNode):
            self.add(1, "", "a pipeline is a mapping.", "Begin with name:, source: and sinks:.")
            return None
        return Entry(self, node, "", node.start_mark.line + 1)


@dataclass(slots=True)
class Entry:
    """One value of the document. `block_line`: the line where the text of a block (`|`) begins."""

    document: Document
    node: Any
    key: str
    line: int

    def problem(self, what: str, cure: str = "", *, is_error: bool = True) -> None:
        self.document.add(self.line, self.key, what, cure, is_error=is_error)

    @property
    def block_line(self) -> int:
        is_block = getattr(self.node, "style", None) in ("|", ">")
        return int(self.node.start_mark.line) + 1 + is_block

    def scalar(self) -> str | None:
        """The text of a scalar, with its variables. None, with a problem, for anything else and for
        nothing."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.problem("a text is wanted here, not a list or a mapping.")
            return None
        if self.node.tag == _NULL:
            self.problem("nothing is said.", "Give a value, or leave the key out.")
            return None
        environment, secrets = self.document.environment, self.document.secrets

        def value(found: re.Match[str]) -> str:
            name = found[1]
            if name is None:
                return "$"
            if name not in environment:
                if _NAME.fullmatch(name):
                    cure = f"Set it, as in: {name}=… sluice pipeline run …"
                    self.problem(f"the variable {name} is not set.", cure)
                else:
                    self.problem(f"${{{name}}} is no variable.", "Write $${ for a plain ${.")
                return ""
            if _SECRET_NAME.search(name):
                secrets.add(environment[name], f"${{{name}}}")
            return environment[name]

        return _VARIABLE.sub(value, str(self.node.value))

    def items(self) -> "list[Entry] | None":
        """The entries of a list. None, with a problem, for anything else."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.problem("a list is wanted here.", "Write [a, b], or a line with - for each.")
            return None
        return [
            Entry(self.document, node, f"{self.key}[{index}]", node.start_mark.line + 1)
            for index, node in enumerate(self.node.value)
        ]

    def mapping(self) -> "dict[str, Entry] | None":
        """The entries by key. None, with a problem, for anything else; keys twice are problems."""
        if not isinstance(self.node, yaml.MappingNode):
            self.problem("a mapping is wanted here.", "Write a line key: value for each.")
            return None
        found: dict[str, Entry] = {}
        for name_node, node in self.node.value:
            line = name_node.start_mark.line + 1
            name = str(getattr(name_node, "value", ""))
            key = f"{self.key}.{name}" if self.key else name
            if not isinstance(name_node, yaml.ScalarNode):
                self.document.add(line, self.key, "a key is a text.")
            elif name in found:
                cure = f"It stands in line {found[name].line} already; keep one."
                self.document.add(line, key, "the key is there twice.", cure)
            else:
                found[name] = Entry(self.document, node, key, line)
        return found

    def plain(self, depth: int = 5) -> Any:
        """The value as plain lists, mappings, texts and numbers, for what is handed on as JSON."""
        if depth == 0:
            self.problem("this is nested too deep.")
            return None
        if isinstance(self.node, yaml.MappingNode):
            return {name: one.plain(depth - 1) for name, one in (self.mapping() or {}).items()}
        if isinstance(self.node, yaml.SequenceNode):
            return [one.plain(depth - 1) for one in self.items() or ()]
        text = self.scalar()
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else text


def nearest(name: str, names: Iterable[str]) -> str:
    """`Did you mean 'topic'?`, or the list of all when nothing is near."""
    listed = list(names)
    return did_you_mean(name, listed).rstrip() or f"There are: {', '.join(listed)}."


# ---- what a file means


@dataclass(frozen=True, slots=True)
class Source:
    """What comes in. `options` are those of Spark's source, those of the cluster included."""

    kind: str
    options: Mapping[str, str]
    line: int


@dataclass(frozen=True, slots=True)
class Sink:
    """Where it goes. `fields`: the declared ones by name; `options`: of Spark's sink (topics);
    `lines` has the line of each key."""

    name: str
    kind: str
    fields: Mapping[str, Any]
    options: Mapping[str, str]
    key: str
    line: int
    lines: Mapping[str, int] = field(default_factory=dict)

    def error(self, what: str, cure: str = "", *, at: str = "") -> PlaceError:
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

    def failed(self, error: PlaceError) -> ConfigurationError:
        """The error as the user sees it: file, line, key."""
        return ConfigurationError(self.secrets.hidden(error.problem.told(self.path)))


# ---- what a run says


@dataclass(frozen=True, slots=True)
class Event:
    """A line of text and its numbers, for people and for programs; without secrets. `kind`:
    started, stage, batch, written, line, stopping, done.

    late-flights topic-report: batch 7: 30 rows, 60 rows/s, 75 filtered at the broker, lag 0
    {"event": "batch", "pipeline": "late-flights", "sink": "topic-report", "batch": 7, …}
    """

    kind: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"event": self.kind, "text": self.text, **self.figures}


Listener = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one pipeline's run; what to do with them (stderr, JSON lines) is the
    listener's."""

    pipeline: str
    listener: Listener
    secrets: Secrets = field(default_factory=Secrets)

    def emit(self, kind: str, text: str, **figures: Any) -> None:
        sink = figures.get("sink")
        head = f"{self.pipeline} {sink}: " if sink else f"{self.pipeline}: "
        shown = self.secrets.hidden(head + text)
        self.listener(Event(kind, shown, {"pipeline": self.pipeline, **figures}))
