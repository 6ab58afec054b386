"""What a row of `make bench` holds and how it is judged: figures, aims, the lines that are printed.

Nothing here knows a broker. A column is a server: `pure` and `compiled` are ours, the others begin
with "Java" or "Rust". Ours are set against the better of the Java servers in the same run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.contenders import Plan, Server

OURS = ("pure", "compiled")
JAVA = "Java"
NOTHING = "-"


@dataclass(frozen=True)
class Figure:
    """A rate a second and CPU microseconds for each, or another number with its unit.

    `more`: further numbers; the last word of a name is the unit, as in `p99_ms`.
    """

    rate: float | None = None
    cpu_us: float | None = None
    value: float | None = None
    unit: str = ""
    more: Mapping[str, float] = field(default_factory=dict)

    def number(self, metric: str) -> float | None:
        return self.more[metric] if metric in self.more else getattr(self, metric, None)

    def __str__(self) -> str:
        if self.value is not None:
            digits = 2 if self.value < 10 else 1
            text = f"{self.value:,.{digits}f} {self.unit}"
        else:
            cpu = "" if self.cpu_us is None else f" [{self.cpu_us:.2f} us]"
            text = f"{self.rate or 0:,.0f}/s{cpu}"
        return text + "".join(f", {_named(name, value)}" for name, value in self.more.items())


def _named(name: str, value: float) -> str:
    words, _, unit = name.rpartition("_")
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{words.replace('_', ' ')} {number} {unit}".strip()


@dataclass(frozen=True)
class Aim:
    """A limit for each of ours: on the ratio of `metric` to that of `of`, or on the number itself.

    `of`: "Java", the name of an earlier row (the same server's figure there), or "" for the number.
    """

    pure: float | None
    compiled: float | None
    metric: str = "cpu_us"
    of: str = JAVA
    is_minimum: bool = False

    def limit(self, column: str) -> float | None:
        return {"pure": self.pure, "compiled": self.compiled}.get(column)


@dataclass(frozen=True)
class Case:
    """One row: what is done with each server. `needs`: rows that have to run before; `servers`:
    the columns it is for, by their first word."""

    name: str
    run: Callable[["Server", "Plan"], Figure]
    aims: tuple[Aim, ...] = ()
    compare: str = "cpu_us"
    needs: tuple[str, ...] = ()
    needs_java: bool = False
    servers: tuple[str, ...] = (*OURS, JAVA, "Rust")


@dataclass(frozen=True)
class Verdict:
    """How far one of ours is from an aim."""

    column: str
    aim: Aim
    found: float

    @property
    def is_met(self) -> bool:
        limit = self.aim.limit(self.column)
        assert limit is not None
        return self.found >= limit if self.aim.is_minimum else self.found <= limit

    def __str__(self) -> str:
        limit = self.aim.limit(self.column)
        assert limit is not None
        what = {"cpu_us": "CPU", "rate": "rate", "value": ""}.get(self.aim.metric, self.aim.metric)
        sign = ">=" if self.aim.is_minimum else "<="
        words = [what.replace("_", " "), f"{self.found:.2f} {sign} {fraction(limit)}"]
        return " ".join([*filter(None, words), "met" if self.is_met else "MISSED"])


@dataclass(frozen=True)
class Row:
    case: Case
    figures: Mapping[str, Figure]
    verdicts: Sequence[Verdict]

    @property
    def ratios(self) -> dict[str, float]:
        """Ours by the better Java's."""
        reference = best(self.figures, JAVA, self.case.compare, self.case.compare == "rate")
        return {
            column: number / reference
            for column in OURS
            if column in self.figures
            and reference
            and (number := self.figures[column].number(self.case.compare)) is not None
        }

    def lines(self, columns: Iterable[str]) -> list[str]:
        """The case, and a line for each server: figure, ratio, aims."""
        lines = [self.case.name]
        for column in columns:
            if column not in self.figures and not column.startswith(self.case.servers):
                continue
            ratio = f"{self.ratios[column]:.2f} x Java" if column in self.ratios else ""
            aims = "; ".join(str(one) for one in self.verdicts if one.column == column)
            figure = str(self.figures.get(column, NOTHING))
            lines.append(f"  {column:11} {figure:42}  {ratio:13} {aims}".rstrip())
        return lines

    def record(self) -> dict[str, Any]:
        """For JSON; `ours` is what a user has: compiled where it is there."""
        mine = [self.figures[column] for column in reversed(OURS) if column in self.figures]
        return {
            "case": self.case.name,
            "ours": str(mine[0]) if mine else NOTHING,
            "figures": {column: asdict(figure) for column, figure in self.figures.items()},
            "compared": self.case.compare,
            "ratios": self.ratios,
            "aims": [
                {**asdict(one.aim), "server": one.column, "found": one.found, "met": one.is_met}
                for one in self.verdicts
            ],
        }


def judged(
    case: Case, figures: Mapping[str, Figure], earlier: Mapping[str, Mapping[str, Figure]]
) -> Row:
    """The row with its verdicts; those whose figure or reference is missing are left out."""
    verdicts = []
    for column in OURS:
        for aim in case.aims:
            mine = figures[column].number(aim.metric) if column in figures else None
            if not aim.of:
                reference: float | None = 1.0
            elif aim.of == JAVA:
                reference = best(figures, JAVA, aim.metric, aim.is_minimum)
            else:
                same = earlier.get(aim.of, {}).get(column)
                reference = same.number(aim.metric) if same else None
            if mine is not None and reference and aim.limit(column) is not None:
                verdicts.append(Verdict(column, aim, mine / reference))
    return Row(case, figures, verdicts)


def best(
    figures: Mapping[str, Figure], kind: str, metric: str, is_larger_better: bool
) -> float | None:
    """The better number among the columns of a kind."""
    numbers = [
        number
        for column, figure in figures.items()
        if column.startswith(kind) and (number := figure.number(metric)) is not None
    ]
    choose = max if is_larger_better else min
    return choose(numbers, default=None)


def wanted(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases that have one of these texts in their name, and those that they need, in order;
    all of them without a text."""
    by_name = {case.name: case for case in cases}
    chosen: set[str] = set()
    open_ = [case.name for case in cases if any(text in case.name for text in only or [""])]
    while open_:
        name = open_.pop()
        if name not in chosen:
            chosen.add(name)
            open_.extend(by_name[name].needs)
    return [case for case in cases if case.name in chosen]


def fraction(limit: float) -> str:
    """1/9 rather than 0.111."""
    whole = 1 / limit if 0 < limit < 1 else 0.0
    is_neat = whole and abs(whole * 2 - round(whole * 2)) < 1e-9
    return f"1/{whole:g}" if is_neat else f"{limit:g}"


def summary(rows: Iterable[Row]) -> list[str]:
    """How many aims were met, and a line for each that was missed."""
    found = [(row.case.name, verdict) for row in rows for verdict in row.verdicts]
    missed = [
        f"  {name}, {verdict.column}: {verdict}" for name, verdict in found if not verdict.is_met
    ]
    return [f"{len(found) - len(missed)} of {len(found)} aims met", *missed]
