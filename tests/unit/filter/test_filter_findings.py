from sluicemq.filter.findings import Finding, Severity, caret_lines, syntax_error


def test_carets_are_below_the_fault() -> None:
    assert caret_lines("a > 'x'", 4, 3) == ("a > 'x'", "    ^^^")


def test_only_the_line_of_the_fault_is_shown() -> None:
    assert caret_lines("a = 1 AND\nb > 'x' AND\nc = 2", 14, 3) == ("b > 'x' AND", "    ^^^")


def test_characters_of_double_width_take_two_columns() -> None:
    assert caret_lines("a = '杭' AND（", 11, 1) == ("a = '杭' AND（", "            ^^")


def test_a_long_line_is_cut_around_the_fault() -> None:
    line, carets = caret_lines("x" * 500 + "!" + "y" * 500, 500, 1)
    assert len(line) == 100
    assert line[carets.index("^")] == "!"


def test_the_end_of_the_text_can_be_marked() -> None:
    assert caret_lines("a =", 3, 1) == ("a =", "   ^")
    assert caret_lines("", 0, 1) == ("", "^")
    assert caret_lines("a =\n", 4, 1) == ("", "^")


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert caret_lines("a\x1b= 5", 1, 1)[0] == "a = 5"


def test_error_contains_position_and_fix() -> None:
    error = syntax_error("a ! 5", Finding(2, 1, "x", "No.", "Write <>."))
    assert (error.position, error.fix) == (2, "Write <>.")
    assert str(error).endswith("^\nNo. Write <>.")


def test_finding_is_an_error_by_default() -> None:
    assert Finding(0, 1, "x", "y").is_error
    assert not Finding(0, 1, "x", "y", "", Severity.WARNING).is_error
