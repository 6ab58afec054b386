"""A small part of PromQL: as much as the alert rules about consumer groups need.

expression   comparison { ("and" | "unless") "on" "(" labels ")" comparison }
comparison   vector [ "/" number ] ( ">" | "<" | "==" ) number
vector       selector | "max" "by" "(" labels ")" "(" selector ")"
selector     name [ "{" label "=" string { "," label "=" string } "}" ]
"""

import operator
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

TOKEN: Final = re.compile(r'\s*([A-Za-z_:][\w:]*|"[^"]*"|\d+(?:\.\d+)?|==|[(){},=<>/])')
COMPARISONS: Final = {">": operator.gt, "<": operator.lt, "==": operator.eq}


class Sample(NamedTuple):
    """One value of a metric, or of a result."""

    name: str
    labels: dict[str, str]
    value: float


def evaluate(expression: str, samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples that the expression selects. Raises ValueError for other PromQL."""
    return _Evaluation(expression, list(samples)).run()


class _Evaluation:
    def __init__(self, expression: str, samples: list[Sample]) -> None:
        self._tokens: list[str] = []
        position = 0
        while position < len(expression.rstrip()):
            token = TOKEN.match(expression, position)
            if token is None:
                raise ValueError(f"not understood: {expression[position:]}")
            self._tokens.append(token[1])
            position = token.end()
        self._samples = samples

    def run(self) -> list[Sample]:
        found = self._comparison()
        while self._tokens:
            keyword = self._take("and", "unless")
            self._take("on")
            labels = self._names()
            keys = {_key(sample, labels) for sample in self._comparison()}
            is_kept = keyword == "and"
            found = [one for one in found if (_key(one, labels) in keys) == is_kept]
        return found

    def _take(self, *expected: str) -> str:
        token = self._tokens.pop(0)
        if expected and token not in expected:
            raise ValueError(f"{token} where {' or '.join(expected)} is expected")
        return token

    def _names(self) -> list[str]:
        self._take("(")
        names = [self._take()]
        while self._take(",", ")") == ",":
            names.append(self._take())
        return names

    def _comparison(self) -> list[Sample]:
        vector = self._vector()
        divisor = 1.0
        token = self._take("/", *COMPARISONS)
        if token == "/":
            divisor = float(self._take())
            token = self._take(*COMPARISONS)
        bound = float(self._take())
        quotients = [one._replace(value=one.value / divisor) for one in vector]
        return [one for one in quotients if COMPARISONS[token](one.value, bound)]

    def _vector(self) -> list[Sample]:
        name = self._take()
        if name != "max":
            return self._selector(name)
        self._take("by")
        labels = self._names()
        self._take("(")
        largest: dict[tuple[str, ...], float] = {}
        for sample in self._selector(self._take()):
            key = _key(sample, labels)
            largest[key] = max(sample.value, largest.get(key, sample.value))
        self._take(")")
        return [
            Sample("", dict(zip(labels, key, strict=True)), value) for key, value in largest.items()
        ]

    def _selector(self, name: str) -> list[Sample]:
        wanted = {}
        if self._tokens[0] == "{":
            while self._take("{", ",", "}") != "}":
                label = self._take()
                self._take("=")
                wanted[label] = self._take().strip('"')
        return [
            sample
            for sample in self._samples
            if sample.name == name and wanted.items() <= sample.labels.items()
        ]


def _key(sample: Sample, labels: list[str]) -> tuple[str, ...]:
    return tuple(sample.labels.get(label, "") for label in labels)
