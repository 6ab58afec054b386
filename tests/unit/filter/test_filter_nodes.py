import pytest

from sluicemq.filter.nodes import (
    And,
    BareProperty,
    Between,
    Equal,
    JavaClass,
    Literal,
    Negate,
    Node,
    Not,
    Order,
    Property,
    children,
    java_class,
    levels,
    property_names,
)
from sluicemq.filter.subscriptions import compile_sql92


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        (Property("a"), JavaClass.STRING),
        (Literal("5"), JavaClass.STRING),
        (Literal(2147483647), JavaClass.INTEGER),
        (Literal(2147483648), JavaClass.LONG),
        (Negate(Literal(2147483648)), JavaClass.LONG),  # although -2147483648 has 32 bits
        (Literal(1.5), JavaClass.DOUBLE),
        (Literal(value=True), JavaClass.BOOLEAN),
        (Literal(None), JavaClass.BOOLEAN),
        (Negate(Property("a")), JavaClass.NULL),
        (Negate(Negate(Literal(1))), JavaClass.INTEGER),
        (BareProperty(Property("a")), JavaClass.BOOLEAN),
    ],
)
def test_class_of_an_operand_is_known_without_a_message(node: Node, wanted: JavaClass) -> None:
    assert java_class(node) is wanted
    assert wanted.is_number == (wanted.name in ("INTEGER", "LONG", "DOUBLE"))


def test_children_come_in_the_order_of_evaluation() -> None:
    a, b, c = Property("a"), Literal(1), Literal(2)
    assert children(Between(a, b, c)) == (a, b, c)
    assert children(Equal(a, b)) == (a, b)
    assert children(And((a, b, c))) == (a, b, c)
    assert children(Not(a)) == (a,)
    assert children(a) == ()


def test_levels_begin_with_the_root() -> None:
    a, b = Property("a"), Property("b")
    order = Order("<", a, b)
    root = Not(order)
    assert levels(root) == [(root,), (order,), (a, b)]


def test_position_does_not_count_in_comparisons() -> None:
    assert Property("a", 1) == Property("a", 2)
    assert compile_sql92("a=5").tree == compile_sql92("  a  =  (5)").tree


def test_property_names_are_those_that_the_expression_reads() -> None:
    tree = compile_sql92("a = 'x' AND (b > 1 OR c IN ('d') OR NOT e) AND a IS NULL").tree
    assert property_names(tree) == {"a", "b", "c", "e"}
