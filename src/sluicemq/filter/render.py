"""A tree back to text that parses to the same tree: for `explain`, and for tests."""

from sluicemq.filter.nodes import (
    And,
    Between,
    Equal,
    In,
    IsNull,
    Literal,
    Match,
    Negate,
    Node,
    Not,
    Or,
    Order,
    Property,
    Truth,
)

# How tightly a node binds (grammar.lark): an operand that binds looser goes into parentheses.
_OR, _AND, _EQUALITY, _COMPARISON, _OPERAND, _PRIMARY = range(6)
_BINDING: dict[type, int] = {
    Or: _OR,
    And: _AND,
    Equal: _EQUALITY,
    IsNull: _EQUALITY,
    Order: _COMPARISON,
    Between: _COMPARISON,
    In: _COMPARISON,
    Match: _COMPARISON,
    Not: _OPERAND,
    Negate: _OPERAND,
    Literal: _PRIMARY,
    Property: _PRIMARY,
}


def render(node: Node) -> str:
    """The node as SQL92, with only the parentheses it needs; literals as they were written."""
    match node:
        case Property(name=name):
            return name
        case Literal():
            return _literal(node)
        case Truth(operand=operand):
            return render(operand)
        case Negate(operand=operand):
            return f"- {_inside(operand, _OPERAND)}"  # the blank: two signs would be a comment
        case Not(operand=operand):
            return f"NOT {_inside(operand, _OPERAND)}"
        case Or(parts=parts):
            return " OR ".join(_inside(part, _AND) for part in parts)
        case And(parts=parts):
            return " AND ".join(_inside(part, _EQUALITY) for part in parts)
        case _:
            return _comparison(node)


def _comparison(node: Equal | Order | Between | In | Match | IsNull) -> str:
    match node:
        case Equal(left=left, right=right, negated=negated):
            sign = "<>" if negated else "="
            return f"{_inside(left, _EQUALITY)} {sign} {_inside(right, _COMPARISON)}"
        case IsNull(operand=operand, negated=negated):
            return f"{_inside(operand, _EQUALITY)} IS {'NOT ' * negated}NULL"
        case Order(operator=operator, left=left, right=right):
            return f"{_inside(left, _COMPARISON)} {operator} {_inside(right, _OPERAND)}"
        case Between(value=value, low=low, high=high, negated=negated):
            bounds = f"{_inside(low, _OPERAND)} AND {_inside(high, _OPERAND)}"
            return f"{_inside(value, _COMPARISON)} {'NOT ' * negated}BETWEEN {bounds}"
        case In(operand=operand, values=values, negated=negated):
            return f"{operand.name} {'NOT ' * negated}IN ({', '.join(map(_quoted, values))})"
        case Match(operator=word, operand=operand, search=search, negated=negated):
            return f"{_inside(operand, _COMPARISON)} {'NOT ' * negated}{word} {_quoted(search)}"


def _inside(node: Node, binding: int) -> str:
    inner = node.operand if isinstance(node, Truth) else node
    return render(inner) if _BINDING[type(inner)] >= binding else f"({render(inner)})"


def _literal(node: Literal) -> str:
    if node.text:
        return node.text
    if isinstance(node.value, str):
        return _quoted(node.value)
    return "NULL" if node.value is None else str(node.value).upper()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
