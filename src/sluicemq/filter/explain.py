"""Why a message matches or not: every atom of the expression with what it saw.

An atom is a comparison (or a bare word) that AND, OR and NOT join. The tree says of each what its
operands were (value and Java class) and what came of it, in the order of evaluation: what short
circuit left out is "not reached", and an atom that cannot be evaluated carries its error, which is
the error of everything around it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.evaluate import compile_value, compile_verdict
from sluicemq.filter.nodes import And, Node, Not, Or, children, java_class, render
from sluicemq.filter.selector import Selector

Properties = Mapping[str, str]


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
            return _turned(node, _explain(operand, properties))
        case _:
            return _atom(node, properties)


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


def _turned(node: Node, inner: Explanation) -> Explanation:
    turned = {Outcome.TRUE: Outcome.FALSE, Outcome.FALSE: Outcome.TRUE}
    return Explanation(render(node), turned.get(inner.outcome, inner.outcome), (inner,))


def _atom(node: Node, properties: Properties) -> Explanation:
    try:
        outcome, error = _OUTCOMES[compile_verdict(node)(properties)], ""
    except FilterEvaluationError as failure:
        outcome, error = Outcome.ERROR, str(failure)
    operands = tuple(_operand(child, properties) for child in children(node))
    return Explanation(render(node), outcome, (), operands, error)


def _operand(node: Node, properties: Properties) -> Operand:
    try:
        value = compile_value(node)(properties)
    except FilterEvaluationError:
        value = None
    return Operand(render(node), java_class(node).value, value)
