from sluicemq.filter.syntax import Reduction, TreeBuilder, parse_tables

TABLES = parse_tables()


def kinds(text: str) -> list[str | None]:
    return [found.lastgroup for found in TABLES.token.finditer(text)]


def test_no_state_has_a_choice_of_reductions() -> None:
    """Therefore a refused token and the end reduce alike, and the longest prefix is exact."""
    for state, actions in TABLES.actions.items():
        reductions = {action for action in actions.values() if isinstance(action, Reduction)}
        assert len(reductions) <= 1, state


def test_every_method_of_the_builder_is_an_arrow_of_the_grammar() -> None:
    used = {
        action.make.__name__
        for actions in TABLES.actions.values()
        for action in actions.values()
        if isinstance(action, Reduction) and action.make
    }
    assert used == {name for name in vars(TreeBuilder) if not name.startswith("_")}


def test_the_longer_token_wins() -> None:
    assert kinds("5.5e1") == ["FLOAT"]
    assert kinds("5L") == ["DECIMAL"]
    assert kinds("010") == ["DECIMAL", "DECIMAL"]
    assert kinds("<>") == ["UNEQUAL"]
    assert kinds("<=") == ["ORDER"]
    assert kinds("NOTE") == ["NAME"]
    assert kinds("--x\n") == ["LINE_COMMENT"]
    assert kinds("--x") == ["MINUS", "MINUS", "NAME"]


def test_table_keys_are_plain_strings_for_fast_look_ups() -> None:
    for actions in TABLES.actions.values():
        assert all(type(name) is str for name in actions)
