from sluicemq.filter.selector import Explanation, Operand, Outcome, deciding_atoms, explain
from sluicemq.filter.subscriptions import compile_sql92


def explained(text: str, **properties: str) -> Explanation:
    return explain(compile_sql92(text), properties)


def test_an_atom_shows_values_classes_and_verdict() -> None:
    assert explained("price BETWEEN 10 AND 20", price="15") == Explanation(
        "price BETWEEN 10 AND 20",
        Outcome.TRUE,
        operands=(
            Operand("price", "String", "15"),
            Operand("10", "Integer", 10),
            Operand("20", "Integer", 20),
        ),
    )


def test_parts_behind_the_deciding_one_are_not_reached() -> None:
    found = explained("a = 'x' AND b = 1 AND c = 2", a="x", b="2", c="2")
    assert found.outcome is Outcome.FALSE
    assert not found.matches
    assert [(part.text, part.outcome) for part in found.parts] == [
        ("a = 'x'", Outcome.TRUE),
        ("b = 1", Outcome.FALSE),
        ("c = 2", Outcome.NOT_REACHED),
    ]
    assert [atom.text for atom in deciding_atoms(found)] == ["b = 1"]


def test_an_error_is_the_outcome_of_all_enclosing_conditions() -> None:
    found = explained("a = 'y' OR NOT (b > 1) OR c = 2", a="x", b="2.5")
    assert found.outcome is Outcome.ERROR
    (atom,) = deciding_atoms(found)
    assert atom.text == "b > 1"
    assert "property b is '2.5'" in atom.error


def test_null_is_decided_by_the_absent_property() -> None:
    found = explained("a = 'x' AND b = 1", a="x")
    assert found.outcome is Outcome.NULL
    (atom,) = deciding_atoms(found)
    assert atom.operands[0] == Operand("b", "String", None)


def test_not_inverts_the_outcome_of_its_part() -> None:
    found = explained("NOT (a = 'x' OR b = 'y')", a="x", b="y")
    assert found.outcome is Outcome.FALSE
    assert [atom.text for atom in deciding_atoms(found)] == ["a = 'x'"]


def test_all_parts_decide_when_all_were_needed() -> None:
    found = explained("a = 'x' AND b = 'y'", a="x", b="y")
    assert found.matches
    assert [atom.text for atom in deciding_atoms(found)] == ["a = 'x'", "b = 'y'"]


def test_a_condition_as_operand_that_fails_has_no_value() -> None:
    found = explained("(a > 1) = TRUE", a="x")
    assert found.outcome is Outcome.ERROR
    assert found.operands[0] == Operand("a > 1", "Boolean", None)
