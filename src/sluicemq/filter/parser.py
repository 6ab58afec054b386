"""`compile_sql92`: an expression as a `Selector`, compiled once and kept.

A broker sees the same few expressions with every pull, so the outcome of a compilation is kept,
failures too, as RocketMQ does (its cache has 100 places). Everything else about SQL92 is loaded at
the first expression: lark and the tree cost 50 ms and 11 MiB, which users of tags do not pay.
"""

import copy
from functools import lru_cache
from typing import TYPE_CHECKING

from sluicemq.errors import FilterSyntaxError

if TYPE_CHECKING:
    from sluicemq.filter.selector import Selector

CACHE_ENTRIES = 1024
CACHED_LENGTH_MAX = 1024  # characters; longer expressions share a cache of few places
CACHE_ENTRIES_LONG = 32


def compile_sql92(text: str) -> "Selector":
    """Raises FilterSyntaxError, with position and cure, where RocketMQ would not compile it."""
    short = len(text) <= CACHED_LENGTH_MAX
    outcome = _compile_short(text) if short else _compile_long(text)
    if isinstance(outcome, FilterSyntaxError):
        # A copy: one that was raised holds what its callers held, 250 kB of a read each.
        raise copy.copy(outcome)
    return outcome


def compile_whole(text: str) -> "Selector":
    """The same for an expression that somebody writes for SluiceMQ: text behind a complete one,
    which RocketMQ ignores, raises FilterSyntaxError as well."""
    selector = compile_sql92(text)
    if selector.ignored and selector.rest is not None:
        from sluicemq.filter.findings import syntax_error  # noqa: PLC0415 - see the docstring
        from sluicemq.filter.warn import rest_warning  # noqa: PLC0415

        raise syntax_error(text, rest_warning(text, selector.rest))
    return selector


def _compile(text: str) -> "Selector | FilterSyntaxError":
    from sluicemq.filter.selector import try_compile  # noqa: PLC0415 - see the module docstring

    return try_compile(text)


_compile_short = lru_cache(maxsize=CACHE_ENTRIES)(_compile)
_compile_long = lru_cache(maxsize=CACHE_ENTRIES_LONG)(_compile)
