import subprocess
import sys

import pytest

from sluicemq.errors import FilterSyntaxError
from sluicemq.filter import subscriptions as parser
from sluicemq.filter.subscriptions import compile_complete, compile_sql92
from waiting import limit


def test_an_expression_is_compiled_once() -> None:
    assert compile_sql92("a = 'once'") is compile_sql92("a = 'once'")


def test_a_cached_failure_is_raised_again_without_a_growing_traceback() -> None:
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


def test_the_cache_keeps_a_limited_length_of_the_newest_expressions() -> None:
    count = 2 * parser.CACHED_CHARACTERS_MAX // 500
    texts = [f"a = '{number:0480}'" for number in range(count)]
    last = [compile_sql92(text) for text in texts][-1]
    assert compile_sql92(texts[-1]) is last
    assert sum(map(len, parser._short_expressions)) <= parser.CACHED_CHARACTERS_MAX + 64 * 500


def test_a_long_expression_is_quick_to_compile_once_it_is_cached() -> None:
    text = " OR ".join(f"a = 'quick{number}'" for number in range(100))
    assert not parser.is_quick_to_compile(text)
    compile_sql92(text)
    assert parser.is_quick_to_compile(text)
    assert parser.is_quick_to_compile("a = 'new'")


def test_the_newest_result_is_cached_whatever_its_length() -> None:
    """A request with a long expression is postponed until the expression is compiled.

    It would be postponed for ever if the result, here an error, were evicted at once.
    """
    text = f"a = '{'x' * parser.CACHED_CHARACTERS_MAX}'"
    with pytest.raises(FilterSyntaxError, match="the limit is"):
        compile_sql92(text)
    assert parser.is_quick_to_compile(text)


def test_selector_knows_its_text_names_and_ignored_rest() -> None:
    selector = compile_sql92("a = 5 AND b = 6 garbage")
    assert selector.text == "a = 5 AND b = 6 garbage"
    assert selector.property_names == {"a", "b"}
    assert selector.ignored_start == 16
    assert repr(selector) == "Selector('a = 5 AND b = 6 garbage')"


def test_text_that_rocketmq_ignores_is_refused_by_compile_complete() -> None:
    for text in ("a = 5 -- note\n", "a = 5 -- note"):
        assert compile_complete(text) is compile_sql92(text)
    with pytest.raises(FilterSyntaxError, match="not valid at character 7") as refused:
        compile_complete("a = 5 garbage")
    assert refused.value.position == 6


def test_users_of_tags_do_not_load_the_parser() -> None:
    code = (
        "import sys; from sluicemq.filter.subscriptions import make_filter, parse_subscription; "
        "make_filter(parse_subscription('T', 'a||b')); "
        "print([name for name in sys.modules if name.partition('.')[0] == 'lark'])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=limit(60))
    assert output == "[]\n"


def test_a_cached_failure_does_not_refer_to_its_callers() -> None:
    for _ in range(2):
        with pytest.raises(FilterSyntaxError) as caught:
            compile_sql92("a = = 77")
    kept = parser._short_expressions["a = = 77"]
    assert isinstance(kept, FilterSyntaxError)
    assert kept.__traceback__ is None
    assert kept.__context__ is None
    assert (str(caught.value), caught.value.fix) == (str(kept), kept.fix)
    assert caught.value.position == kept.position
