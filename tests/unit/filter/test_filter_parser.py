import subprocess
import sys

import pytest

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter import subscriptions as parser
from sluicemq.filter.subscriptions import compile_sql92, compile_whole
from waiting import limit


def test_an_expression_is_compiled_once() -> None:
    assert compile_sql92("a = 'once'") is compile_sql92("a = 'once'")


def test_a_failure_is_kept_and_raised_anew_without_growing() -> None:
    lengths = []
    for _ in range(3):
        with pytest.raises(FilterSyntaxError) as caught:
            compile_sql92("a ! twice")
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1


def test_long_expressions_do_not_displace_short_ones() -> None:
    kept = compile_sql92("a = 'kept'")
    for number in range(20):
        compile_sql92(f"a = '{'x' * 32_000}{number}'")
    assert compile_sql92("a = 'kept'") is kept


def test_so_much_text_is_kept_the_latest() -> None:
    count = 2 * parser.KEPT_CHARACTERS // 500
    texts = [f"a = '{number:0480}'" for number in range(count)]
    last = [compile_sql92(text) for text in texts][-1]
    assert compile_sql92(texts[-1]) is last
    assert sum(map(len, parser._quick)) <= parser.KEPT_CHARACTERS + 64 * 500


def test_a_long_expression_is_quick_once_it_is_compiled() -> None:
    text = " OR ".join(f"a = 'quick{number}'" for number in range(100))
    assert not parser.is_quick(text)
    compile_sql92(text)
    assert parser.is_quick(text)
    assert parser.is_quick("a = 'new'")


def test_the_newest_outcome_is_kept_however_long_its_expression_is() -> None:
    """A request with a long expression is put off until the outcome is known. It would be put off
    for ever if the outcome, here an error, were forgotten at once."""
    text = f"a = '{'x' * parser.KEPT_CHARACTERS}'"
    with pytest.raises(FilterSyntaxError, match="the limit is"):
        compile_sql92(text)
    assert parser.is_quick(text)


def test_selector_knows_its_text_names_and_ignored_rest() -> None:
    selector = compile_sql92("a = 5 AND b = 6 garbage")
    assert selector.text == "a = 5 AND b = 6 garbage"
    assert selector.property_names == {"a", "b"}
    assert selector.rest == 16
    assert repr(selector) == "Selector('a = 5 AND b = 6 garbage')"


def test_what_rocketmq_ignores_is_refused_where_an_expression_is_written_for_us() -> None:
    for text in ("a = 5 -- note\n", "a = 5 -- note"):
        assert compile_whole(text) is compile_sql92(text)
    with pytest.raises(FilterSyntaxError, match="ends before character 7") as refused:
        compile_whole("a = 5 garbage")
    assert refused.value.position == 6


def test_users_of_tags_do_not_load_the_parser() -> None:
    code = (
        "import sys; from sluicemq.filter.subscriptions import make_filter; "
        "from sluicemq.filter.subscriptions import subscribe; make_filter(subscribe('T', 'a||b')); "
        "print([name for name in sys.modules if name.partition('.')[0] == 'lark'])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=limit(60))
    assert output == "[]\n"


def test_a_kept_failure_holds_nothing_of_those_who_met_it() -> None:
    for _ in range(2):
        with pytest.raises(FilterSyntaxError) as caught:
            compile_sql92("a = = 77")
    kept = parser._quick["a = = 77"]
    assert isinstance(kept, FilterSyntaxError)
    assert kept.__traceback__ is None
    assert kept.__context__ is None
    assert (str(caught.value), caught.value.fix) == (str(kept), kept.fix)
    assert caught.value.position == kept.position
