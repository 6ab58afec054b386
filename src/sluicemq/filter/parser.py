"""`compile_sql92`: an expression as a `Selector`, compiled once and kept.

A broker sees the same few expressions with every pull, so the outcome of a compilation is kept,
failures too, as RocketMQ does (its cache has 100 places); as much as `KEPT_CHARACTERS` of text. A
long one takes tens of milliseconds: who has others to serve asks `is_quick` before. Everything else
about SQL92 is loaded at the first expression: lark and the tree cost 50 ms and 11 MiB, which users
of tags do not pay.
"""

import copy
from typing import TYPE_CHECKING, Final

from sluicemq.errors import FilterSyntaxError

if TYPE_CHECKING:
    from sluicemq.filter.selector import Selector

KEPT_CHARACTERS: Final = 1 << 19
"""Of long expressions and of others, so that those do not displace these."""
QUICK_CHARACTERS: Final = 512
"""As many are compiled in half a millisecond."""
_TIDY_EVERY: Final = 64


def compile_sql92(text: str) -> "Selector":
    """Raises FilterSyntaxError, with position and cure, where RocketMQ would not compile it."""
    outcome = (_quick if len(text) <= QUICK_CHARACTERS else _long).outcome(text)
    if isinstance(outcome, FilterSyntaxError):
        # A copy: one that was raised holds what its callers held, 250 kB of a read each.
        raise copy.copy(outcome)
    return outcome


def compile_whole(text: str) -> "Selector":
    """The same for an expression that somebody writes for SluiceMQ: text behind a complete one,
    which RocketMQ ignores, raises FilterSyntaxError as well."""
    selector = compile_sql92(text)
    if selector.ignored and selector.rest is not None:
        from sluicemq.filter.findings import rest_warning, syntax_error  # noqa: PLC0415 - as above

        raise syntax_error(text, rest_warning(text, selector.rest))
    return selector


def is_quick(text: str) -> bool:
    """Is it compiled already, or in no time? The first one of all is not."""
    return text in _long or (len(text) <= QUICK_CHARACTERS and bool(_quick or _long))


class _Kept(dict[str, "Selector | FilterSyntaxError"]):
    """Outcomes, the one that was asked for last behind the others. Threads share it: what one of
    them does not see is compiled once more."""

    __slots__ = ()

    def outcome(self, text: str) -> "Selector | FilterSyntaxError":
        outcome = self.pop(text, None)
        if outcome is not None:
            self[text] = outcome
            return outcome
        self[text] = outcome = try_compile(text)
        if len(text) > QUICK_CHARACTERS or len(self) % _TIDY_EVERY == 0:
            self._tidy()
        return outcome

    def _tidy(self) -> None:
        texts = list(self)
        size = sum(map(len, texts))
        for text in texts:
            if size <= KEPT_CHARACTERS:
                return
            self.pop(text, None)
            size -= len(text)


def try_compile(text: str) -> "Selector | FilterSyntaxError":
    """The selector, or the error that says why there is none (returned, so that it can be kept)."""
    from sluicemq.filter.findings import Rejected, syntax_error  # noqa: PLC0415 - see the docstring
    from sluicemq.filter.selector import Selector  # noqa: PLC0415
    from sluicemq.filter.syntax import parse  # noqa: PLC0415

    try:
        tree, rest = parse(text)
    except Rejected as rejected:
        return syntax_error(text, rejected.finding)
    return Selector(text, tree, rest)


_quick, _long = _Kept(), _Kept()
