"""What a filter costs a broker: which of its stages decides.

constant   nothing is read
tags       the consume queue alone, 20 bytes a message
columns    the property columns: the log is read for the messages that match
records    some messages' records are read to decide, because of a property that is no column
"""

from dataclasses import dataclass
from enum import Enum

from sluicemq.filter.nodes import Equal, In, Literal, Node, Or, Property, property_names


class CostClass(Enum):
    CONSTANT = "constant"
    TAGS = "tags"
    COLUMNS = "columns"
    RECORDS = "records"


@dataclass(frozen=True, slots=True)
class Cost:
    """The class, why, and what would be cheaper ("" for nothing). `records_share` of the messages
    have to be read from the log to decide."""

    cost_class: CostClass
    why: str
    instead: str = ""
    records_share: float = 0.0


def cost_of(
    tree: Node, rows: int, records_asked: int, excluded: frozenset[str] = frozenset()
) -> Cost:
    """Of an expression on `rows` messages, of which `records_asked` needed their record."""
    names = property_names(tree)
    if not names:
        return Cost(CostClass.CONSTANT, "It reads no property: all messages or none.")
    unique = sorted(names & excluded)
    share = records_asked / rows if rows else 0.0
    if unique:
        why = (
            f"{', '.join(unique)} has too many values for a column: the records of "
            f"{share:.1%} of the messages are read."
        )
        cure = "Put conditions on other properties beside it (AND): they spare the reading."
        return Cost(CostClass.RECORDS, why, cure, share)
    if names == {"TAGS"} and (tags := tags_of(tree)) is not None:
        why = "It only asks for tags."
        cure = f"Subscribe by tags, {' || '.join(tags)}: the consume queue alone decides."
        return Cost(CostClass.TAGS, why, cure, share)
    why = f"Decided in the columns of {', '.join(sorted(names))}; only what matches is read."
    return Cost(CostClass.COLUMNS, why, "", share)


def tags_of(tree: Node) -> tuple[str, ...] | None:
    """The tags when the expression is the same as a tag subscription, else None."""
    match tree:
        case Equal(left=Property(name="TAGS"), right=Literal(value=str(tag)), negated=False):
            return (tag,)
        case In(operand=Property(name="TAGS"), values=values, negated=False):
            return values
        case Or(parts=parts):
            found = [tags_of(part) for part in parts]
            if None in found:
                return None
            return tuple(tag for tags in found if tags for tag in tags)
        case _:
            return None
