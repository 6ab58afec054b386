"""A compiled SQL92 expression, its evaluation on messages and blocks, and explanations of results.

The verdicts on a block of columns equal those of the scalar engine by construction, because the
rules are not implemented a second time. A part of the expression that reads one property is
evaluated by the scalar engine for each *distinct* value, and for null, and the results are gathered
over the rows. AND, OR and NOT are look-ups in tables that were computed with the scalar engine
(`plan`, `blocks`). Nothing is cached between calls, so an expression that was never used before is
as fast as any other. NumPy is imported when the first block is evaluated.

`explain` says why a message matches or not. An atom is a comparison, or a bare property, that AND,
OR and NOT join. The explanation of an atom contains its operands (value and Java class) and its
result. The atoms are in the order of evaluation. One that is skipped because AND or OR ended before
it is "not reached". An atom that cannot be evaluated carries its error, which is also the error of
every condition that contains the atom.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import compile_node
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
    """A compiled SQL92 expression, which is also the filter of a subscription (`MessageFilter`).

    The first stage of the filter accepts every message, and the second stage decides.

    - `text` is the expression, and `weight` its length.
    - `tree` is its parsed form.
    - `ignored_start` is the index of the text behind a complete expression, which RocketMQ ignores;
      None if there is no such text.
    - `evaluate(properties)` returns True, False or None (null) for a message. It raises
      FilterEvaluationError if a value cannot be converted.
    """

    __slots__ = ("_vectorised", "evaluate", "ignored_start", "text", "tree", "weight")

    tag_codes: frozenset[int] | None = None
    reads_properties = True

    def __init__(self, text: str, tree: Node, ignored_start: int | None = None) -> None:
        """Compile `tree`, the parsed tree of the expression `text`.

        `ignored_start` is the index in `text` from which RocketMQ ignores it, None if it ignores
        nothing.
        """
        self.text = text
        self.weight = len(text)
        self.tree = tree
        self.ignored_start = ignored_start
        self.evaluate = compile_node(tree)
        self._vectorised: Vectorised | None = None

    @property
    def vectorised(self) -> "Vectorised":
        """The evaluation on blocks of columns. It is made at the first access."""
        if self._vectorised is None:
            self._vectorised = Vectorised(self.tree)
        return self._vectorised

    @property
    def property_names(self) -> frozenset[str]:
        """The names of the properties that the expression reads."""
        return property_names(self.tree)

    @property
    def ignored_text(self) -> str:
        """The text that RocketMQ ignores although it may be meant as a condition.

        It is "" if there is none, or if it is a comment at the end.
        """
        ignored = self.text[self.ignored_start :].rstrip() if self.ignored_start is not None else ""
        return "" if ignored.startswith("--") else ignored

    def by_consume_queue(self, tag_code: int) -> bool:
        """Return True: tag codes do not decide."""
        return True

    def matches(self, properties: Mapping[str, str]) -> bool:
        """Return whether the expression is TRUE for the properties of a message.

        Return False if it is FALSE or null, or if it cannot be evaluated.
        """
        try:
            return self.evaluate(properties) is True
        except FilterEvaluationError:
            return False

    by_commit_log = matches

    def __repr__(self) -> str:
        return f"Selector({self.text!r})"


class Vectorised:
    """The evaluation of an expression on blocks of columns (`BlockFilter`).

    `names` contains the names of the properties that the expression reads.
    """

    __slots__ = ("_plan", "names")

    def __init__(self, tree: Node) -> None:
        self.names = property_names(tree)
        self._plan = make_plan(tree)

    def verdicts(self, block: ColumnBlock) -> "NDArray[np.uint8]":
        """Return a verdict for each row: 0 for FALSE, 1 for TRUE, 2 for null, 3 for an error.

        The verdict is 4 (`plan.NEEDS_RECORD`) where a property that is not a column decides, and
        for rows that could not be decoded. Then evaluate the properties of the record instead.
        """
        from sluicemq.filter.blocks import evaluate_block  # noqa: PLC0415 - it imports NumPy

        return evaluate_block(self._plan, block)

    def count(self, block: ColumnBlock) -> int | None:
        """Return the number of rows for which the expression is TRUE.

        Return None if the columns may not decide every row: the block has odd rows, or a property
        that the expression reads is not a column.
        """
        from sluicemq.filter.blocks import count_matches  # noqa: PLC0415 - it imports NumPy

        return count_matches(self._plan, self.names, block)

    def can_match(self, stats: BlockStats) -> bool:
        """Return whether the expression can be TRUE for a row of a block with these statistics.

        False is certain, True is not: the block may still have no such row.
        """
        return can_match(self._plan, stats)


class Outcome(Enum):
    """The result of a condition. A message is delivered only if the whole expression is TRUE."""

    TRUE = "true"
    FALSE = "false"
    NULL = "null"
    ERROR = "error"
    NOT_REACHED = "not reached"


_OUTCOMES = {True: Outcome.TRUE, False: Outcome.FALSE, None: Outcome.NULL}


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a comparison: its text, its class in RocketMQ, and its value.

    `value` is None if the operand is null or could not be evaluated.
    """

    text: str
    java_class: str
    value: int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of one condition for one message.

    `parts` contains the conditions that it joins; it is empty for an atom. `operands` contains the
    operands of an atom. `error` says why an atom could not be evaluated, "" if it could.
    """

    text: str
    outcome: Outcome
    parts: tuple["Explanation", ...] = ()
    operands: tuple[Operand, ...] = ()
    error: str = ""

    @property
    def matches(self) -> bool:
        """Whether the condition is TRUE."""
        return self.outcome is Outcome.TRUE


def explain(selector: Selector, properties: Properties) -> Explanation:
    """Return the explanation of an expression for the properties of one message.

    An error of the evaluation is part of the explanation and is not raised.
    """
    return _explain(selector.tree, properties)


def deciding_atoms(explanation: Explanation) -> tuple[Explanation, ...]:
    """Return the atoms that caused the outcome of a condition, in the order of evaluation.

    An atom is a comparison or bare property, which contains no other condition. It is its own
    deciding atom. For AND and OR, the function collects the deciding atoms of each part whose
    outcome is the outcome of the whole. For NOT, it returns the deciding atoms of the negated part.
    """
    if not explanation.parts:
        return (explanation,)
    deciding_outcome = explanation.outcome
    if deciding_outcome not in {inner.outcome for inner in explanation.parts}:
        # Only NOT has an outcome that its part does not have.
        deciding_outcome = explanation.parts[0].outcome
    atoms: list[Explanation] = []
    for inner in explanation.parts:
        if inner.outcome is deciding_outcome:
            atoms += deciding_atoms(inner)
    return tuple(atoms)


def _explain(node: Node, properties: Properties) -> Explanation:
    """Evaluate a condition for the properties of a message, and explain the outcome.

    The explanation has the outcome of the condition and of each of its parts.
    """
    match node:
        case And(parts=parts):
            return _explain_chain(node, parts, Outcome.FALSE, properties)
        case Or(parts=parts):
            return _explain_chain(node, parts, Outcome.TRUE, properties)
        case Not(operand=operand):
            inner = _explain(operand, properties)
            negations = {Outcome.TRUE: Outcome.FALSE, Outcome.FALSE: Outcome.TRUE}
            outcome = negations.get(inner.outcome, inner.outcome)  # null and errors stay
            return Explanation(render(node), outcome, (inner,))
        case _:
            return _explain_atom(node, properties)


def _explain_atom(node: Node, properties: Properties) -> Explanation:
    """Evaluate an atom, which is a comparison or bare property, and return its explanation.

    The explanation has the outcome, the value of each operand, and the text of the error. The text
    is "" if the evaluation succeeded.
    """
    error = ""
    try:
        outcome = _OUTCOMES[compile_node(node)(properties)]
    except FilterEvaluationError as failure:
        outcome = Outcome.ERROR
        error = str(failure)
    operands = tuple(_evaluate_operand(child, properties) for child in children(node))
    return Explanation(render(node), outcome, operands=operands, error=error)


def _evaluate_operand(node: Node, properties: Properties) -> Operand:
    """Evaluate an operand of a comparison, and return its text, Java class and value.

    The value is None if the operand is null or cannot be evaluated.
    """
    try:
        operand_value = compile_node(node)(properties)
    except FilterEvaluationError:
        operand_value = None
    return Operand(render(node), java_class(node).value, operand_value)


def _explain_chain(
    node: Node, conditions: tuple[Node, ...], final_outcome: Outcome, properties: Properties
) -> Explanation:
    """Return the explanation of `node`, an AND or OR that joins `conditions`.

    The conditions are evaluated in order. `final_outcome` is the outcome that ends the evaluation:
    FALSE for AND and TRUE for OR. An error ends it too. All conditions after that get the outcome
    NOT_REACHED.
    """
    explanations: list[Explanation] = []
    outcome = Outcome.TRUE if final_outcome is Outcome.FALSE else Outcome.FALSE
    for condition in conditions:
        explanation = _explain(condition, properties)
        explanations.append(explanation)
        if explanation.outcome in (final_outcome, Outcome.ERROR):
            outcome = explanation.outcome
            break
        if explanation.outcome is Outcome.NULL:
            outcome = Outcome.NULL
    unreached_conditions = conditions[len(explanations) :]
    explanations += [
        Explanation(render(unreached), Outcome.NOT_REACHED) for unreached in unreached_conditions
    ]
    return Explanation(render(node), outcome, tuple(explanations))
