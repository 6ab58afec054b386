"""The scalar engine: forms that are compiled in different ways have the same results."""

import pytest

from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.subscriptions import compile_sql92


def verdict(text: str, **properties: str) -> bool | None:
    return compile_sql92(text).evaluate(properties)


def fails(text: str, **properties: str) -> bool:
    with pytest.raises(FilterEvaluationError):
        compile_sql92(text).evaluate(properties)
    assert compile_sql92(text).matches(properties) is False
    return True


@pytest.mark.parametrize("symbol", ["=", "<>", ">", ">=", "<", "<="])
@pytest.mark.parametrize("value", ["4", "5", "6", "NaN", "-Infinity", "5.5"])
@pytest.mark.parametrize("bound", ["5.0", "5.5"])
def test_a_comparison_and_its_mirror_agree(symbol: str, value: str, bound: str) -> None:
    mirrored = symbol.translate(str.maketrans("<>", "><")) if symbol != "<>" else symbol
    straight = verdict(f"a {symbol} {bound}", a=value)
    assert straight == verdict(f"{bound} {mirrored} a", a=value)
    # `b` is compared by the general function, which converts both strings to Double
    if symbol not in ("=", "<>"):
        assert straight == verdict(f"a {symbol} b", a=value, b=bound)


@pytest.mark.parametrize("value", ["9", "10", "15", "20", "21", None])
@pytest.mark.parametrize(("low", "high"), [("10", "20"), ("10.0", "20.0"), ("10", "20.0")])
def test_between_equals_its_two_comparisons(value: str | None, low: str, high: str) -> None:
    properties = {} if value is None else {"a": value}
    assert verdict(f"a BETWEEN {low} AND {high}", **properties) == verdict(
        f"a >= {low} AND a <= {high}", **properties
    )
    assert verdict(f"a NOT BETWEEN {low} AND {high}", **properties) == verdict(
        f"a < {low} OR a > {high}", **properties
    )


def test_between_ends_before_a_bound_that_cannot_be_compared() -> None:
    assert verdict("a BETWEEN 10 AND b", a="9", b="x") is False
    assert fails("a BETWEEN 10 AND b", a="10", b="x")
    assert verdict("a NOT BETWEEN 10 AND b", a="9", b="x") is True


def test_nan_is_above_every_number() -> None:
    assert verdict("a > 1.0", a="NaN") is True
    assert verdict("a BETWEEN 1.0 AND 2.0", a="NaN") is False
    assert verdict("a NOT BETWEEN 1.0 AND 2.0", a="NaN") is True
    assert verdict("a = b", a="NaN", b="NaN") is True


def test_zero_has_a_sign_between_properties() -> None:
    assert verdict("a < b", a="-0.0", b="0.0") is True
    assert verdict("a >= b", a="-0.0", b="0") is False


@pytest.mark.parametrize(
    ("parts", "conjunction", "disjunction"),
    [("TTT", True, True), ("TTF", False, True), ("TNT", None, True), ("NNF", False, None),
     ("NFE", False, "error"), ("TNE", "error", True), ("FFF", False, False), ("FNF", False, None),
     ("EFT", "error", "error"), ("TT", True, True), ("TF", False, True), ("NF", False, None),
     ("FN", False, None), ("NT", None, True), ("FE", False, "error"), ("NE", "error", "error"),
     ("TN", None, True), ("NN", None, None)],
)  # fmt: skip
def test_three_values_short_circuit_and_errors(
    parts: str, conjunction: object, disjunction: object
) -> None:
    atoms = {"T": "t = 'x'", "F": "t = 'y'", "N": "n = 'x'", "E": "t > 1"}
    for word, wanted in (("AND", conjunction), ("OR", disjunction)):
        text = f" {word} ".join(atoms[part] for part in parts)
        if wanted == "error":
            assert fails(text, t="x")
        else:
            assert verdict(text, t="x") is wanted, text


def test_constants_compare_in_their_wider_class() -> None:
    assert verdict("9223372036854775807 = 9223372036854775808.0") is True  # Long becomes Double
    assert verdict("2147483648 > 2147483647") is True
    assert verdict("1 = TRUE") is False
    assert verdict("'1' = 1") is True
    assert fails("'x' = 1")


def test_left_and_right_null_differ() -> None:
    assert verdict("a = 5") is None
    assert verdict("5 = a") is False
    assert verdict("5 <> a") is True
    assert verdict("a = b") is True
    assert verdict("-a = -b", a="1", b="2") is True  # both always null


def test_errors_inside_operands_count() -> None:
    assert fails("(a > 1) IS NULL", a="x")
    assert fails("-(a > 1) = 5", a="x")
    assert fails("(a > 1) CONTAINS 'x'", a="x")
    assert verdict("(a > 1) CONTAINS ''", a="x") is False


def test_a_single_surrogate_is_found_as_in_java() -> None:
    assert verdict("a CONTAINS '\ud83d'", a="x😀y") is True
    assert verdict("a ENDSWITH '\ude00'", a="x😀") is True
    assert verdict("a NOT STARTSWITH '\ud83d'", a="😀") is False


def test_condition_on_the_left_of_a_string_fails_with_a_fix() -> None:
    with pytest.raises(FilterEvaluationError, match="Put the property on the left"):
        verdict("TRUE = a", a="true")


def test_the_deepest_expression_evaluates() -> None:
    assert verdict("NOT " * 198 + "a", a="x") is False


def test_only_true_matches_not_null_or_an_error() -> None:
    selector = compile_sql92("a > 5")
    assert [selector.matches({"a": text}) for text in ("6", "5", "x")] == [True, False, False]
    assert selector.matches({}) is False
