"""A compiled expression: its tree and its verdict on a message."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import compile_verdict
from sluicemq.filter.nodes import Node, property_names

if TYPE_CHECKING:
    from sluicemq.filter.vectorised import Vectorised


class Selector:
    """An expression that compiles.

    `tree` is what was parsed; `rest` the index of the text behind a complete expression, which is
    ignored (None: there is none); `evaluate` gives the verdict on a message's properties: True,
    False or None for null; it raises FilterEvaluationError.
    """

    __slots__ = ("_vectorised", "evaluate", "rest", "text", "tree")

    def __init__(self, text: str, tree: Node, rest: int | None = None) -> None:
        self.text = text
        self.tree = tree
        self.rest = rest
        self.evaluate = compile_verdict(tree)
        self._vectorised: Vectorised | None = None

    @property
    def vectorised(self) -> "Vectorised":
        """The same verdicts on a block of columns; made when it is first asked for."""
        if self._vectorised is None:
            from sluicemq.filter.vectorised import Vectorised  # noqa: PLC0415 - lazily

            self._vectorised = Vectorised(self.tree)
        return self._vectorised

    @property
    def property_names(self) -> frozenset[str]:
        """What it reads."""
        return property_names(self.tree)

    @property
    def ignored(self) -> str:
        """What of its text RocketMQ does not read though somebody wrote a condition there; a
        comment at the end is meant to be ignored."""
        rest = self.text[self.rest :].rstrip() if self.rest is not None else ""
        return "" if rest.startswith("--") else rest

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Is the message delivered? Null and errors of evaluation say no."""
        try:
            return self.evaluate(properties) is True
        except FilterEvaluationError:
            return False

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"
