"""A compiled expression: its tree, its verdict on a message, its verdicts on a block of columns.

The verdicts on a block are exactly the scalar engine's, by construction and not by a second
implementation of the rules: whatever reads one property is evaluated by the scalar engine for each
*distinct* value (and for null) and gathered over the rows; joins are look-ups in tables that were
asked of it (`plan`, `blocks`). Nothing is kept between calls: an expression that was never seen is
as fast as an old one. NumPy is loaded when the first block is evaluated.

`explain` tells why a message matches or not. An atom is a comparison (or a bare word) that AND, OR
and NOT join. Of each it says what its operands were (value and Java class) and what came of it, in
the order of evaluation: what short circuit left out is "not reached", and an atom that cannot be
evaluated carries its error, which is the error of everything around it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import compile_value
from sluicemq.filter.nodes import (
    And,
    Node,
    Not,
    Or,
    children,
    java_class,
    property_names,
    render,
)
from sluicemq.filter.plan import can_match, make_plan
from sluicemq.record.columns import BlockStats, ColumnBlock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Properties = Mapping[str, str]


class Selector:
    """An expression that compiles, and the filter of who subscribes with it: the second stage
    decides, the first lets everything through.

    `tree` is what was parsed; `rest` the index of the text behind a complete expression, which is
    ignored (None: there is none); `evaluate` gives the verdict on a message's properties: True,
    False or None for null; it raises FilterEvaluationError.
    """

    __slots__ = ("_vectorised", "evaluate", "rest", "text", "tree", "weight")

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def __init__(self, text: str, tree: Node, rest: int | None = None) -> None:
        self.text = text
        self.weight = len(text)
        self.tree = tree
        self.rest = rest
        self.evaluate = compile_value(tree)
        self._vectorised: Vectorised | None = None

    @property
    def vectorised(self) -> "Vectorised":
        """The same verdicts on a block of columns; made when it is first asked for."""
        if self._vectorised is None:
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

    def by_consume_queue(self, tag_code: int) -> bool:
        return True

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Is the message delivered? Null and errors of evaluation say no."""
        try:
            return self.evaluate(properties) is True
        except FilterEvaluationError:
            return False

    by_commit_log = matches

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"


class Vectorised:
    """A compiled expression for blocks; `names` are the properties that it reads."""

    __slots__ = ("_plan", "names")

    def __init__(self, tree: Node) -> None:
        self.names = property_names(tree)
        self._plan = make_plan(tree)

    def verdicts(self, block: ColumnBlock) -> "NDArray[np.uint8]":
        """One a row: FALSE 0, TRUE 1, null 2, error 3.

        4 (`plan.NEEDS_RECORD`) where a property that is no column decides, and for the rows
        that could not be decoded: ask the scalar engine, with the record's properties.
        """
        from sluicemq.filter.blocks import block_verdicts  # noqa: PLC0415 - NumPy, once it is used

        return block_verdicts(self._plan, block)

    def count(self, block: ColumnBlock) -> int | None:
        """How many of the verdicts would be TRUE; None when some record has to be asked."""
        from sluicemq.filter.blocks import block_count  # noqa: PLC0415 - as above

        return block_count(self._plan, self.names, block)

    def can_match(self, stats: BlockStats) -> bool:
        """False when no row of a block with these figures is TRUE: it need not be read."""
        return can_match(self._plan, stats)


class Outcome(Enum):
    """What came of a condition. Only TRUE delivers the message."""

    TRUE = "true"
    FALSE = "false"
    NULL = "null"
    ERROR = "error"
    NOT_REACHED = "not reached"


_OUTCOMES = {True: Outcome.TRUE, False: Outcome.FALSE, None: Outcome.NULL}


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a comparison: its text, the class RocketMQ sees, its value (None is null)."""

    text: str
    java_class: str
    value: int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One condition. `parts` are the conditions it joins (empty for an atom); `operands` what an
    atom compared; `error` why it could not be evaluated."""

    text: str
    outcome: Outcome
    parts: tuple["Explanation", ...] = ()
    operands: tuple[Operand, ...] = ()
    error: str = ""

    @property
    def matches(self) -> bool:
        return self.outcome is Outcome.TRUE


def explain(selector: Selector, properties: Properties) -> Explanation:
    """The whole expression on one message's properties. Never raises."""
    return _explain(selector.tree, properties)


def deciding(explanation: Explanation) -> tuple[Explanation, ...]:
    """The atoms that made the outcome what it is, in the order of evaluation."""
    if not explanation.parts:
        return (explanation,)
    inner = {part.outcome for part in explanation.parts}
    wanted = explanation.outcome
    if wanted not in inner:  # NOT turns its one part round
        wanted = explanation.parts[0].outcome
    return tuple(
        atom for part in explanation.parts if part.outcome is wanted for atom in deciding(part)
    )


def _explain(node: Node, properties: Properties) -> Explanation:
    match node:
        case And(parts=parts):
            return _joined(node, parts, Outcome.FALSE, properties)
        case Or(parts=parts):
            return _joined(node, parts, Outcome.TRUE, properties)
        case Not(operand=operand):
            inner = _explain(operand, properties)
            turned = {Outcome.TRUE: Outcome.FALSE, Outcome.FALSE: Outcome.TRUE}
            outcome = turned.get(inner.outcome, inner.outcome)
            return Explanation(render(node), outcome, (inner,))
        case _:
            pass
    try:
        outcome, error = _OUTCOMES[compile_value(node)(properties)], ""
    except FilterEvaluationError as failure:
        outcome, error = Outcome.ERROR, str(failure)
    operands = []
    for child in children(node):
        try:
            value = compile_value(child)(properties)
        except FilterEvaluationError:
            value = None
        operands.append(Operand(render(child), java_class(child).value, value))
    return Explanation(render(node), outcome, (), tuple(operands), error)


def _joined(
    node: Node, parts: tuple[Node, ...], ends: Outcome, properties: Properties
) -> Explanation:
    """AND ends at FALSE, OR at TRUE, both at an error."""
    explained: list[Explanation] = []
    outcome = Outcome.TRUE if ends is Outcome.FALSE else Outcome.FALSE
    for at, part in enumerate(parts):
        explained.append(_explain(part, properties))
        last = explained[-1].outcome
        if last in (ends, Outcome.ERROR):
            outcome = last
            explained += [
                Explanation(render(left), Outcome.NOT_REACHED) for left in parts[at + 1 :]
            ]
            break
        if last is Outcome.NULL:
            outcome = last
    return Explanation(render(node), outcome, tuple(explained))
