"""lark's work: from grammar.lark to the two tables that `syntax` drives.

A lexer of one regular expression, the terminals in the order of their priority, and the LALR
actions of every state. Importing lark and making the tables costs 50 ms, once a process, so this
module is loaded at the first SQL92 expression.
"""

import re
from collections.abc import Callable
from sys import intern
from typing import Any, NamedTuple, TypeAlias

from lark import Lark
from lark.parsers.lalr_analysis import Reduce

from sluicemq.filter.build import Builder

LINE_COMMENT = "LINE_COMMENT"


class Reduction(NamedTuple):
    """`size` parts become one of the rule `origin`; `make` is None when it is the part itself."""

    size: int
    origin: str
    make: Callable[..., Any] | None


Action: TypeAlias = int | Reduction  # the state to go to, or what to reduce first


class Tables(NamedTuple):
    """`token` matches one token, its group's name is the terminal; those in `ignored` are skipped.

    `actions[state][terminal]` says what to do, `gotos[state][rule]` where to go after a reduction.
    `token_last` is for what lies behind the last end of a line, where no comment can end: there
    each -- would be searched to the end of the text, and 64,000 of them took a minute.
    """

    token: re.Pattern[str]
    ignored: frozenset[str]
    actions: dict[int, dict[str, Action]]
    gotos: dict[int, dict[str, int]]
    start: int
    end: int
    token_last: re.Pattern[str]


def make_tables() -> Tables:
    lark = Lark.open_from_package(__package__, "grammar.lark", parser="lalr", lexer="basic")
    # The configuration of an idle parser is lark's public way to its tables.
    table = lark.parse_interactive("").parser_state.parse_conf
    builder = Builder()
    actions: dict[int, dict[str, Action]] = {}
    gotos: dict[int, dict[str, int]] = {}
    for state, entries in table.states.items():
        # lark's symbols are a subclass of str with a slow __eq__: plain strings look up faster.
        found = {intern(str(symbol)): _action(builder, *entry) for symbol, entry in entries.items()}
        actions[state] = {name: action for name, action in found.items() if name.isupper()}
        gotos[state] = {name: to for name, to in found.items() if isinstance(to, int)}
    return Tables(
        token=_token_pattern(lark),
        ignored=frozenset(map(str, lark.ignore_tokens)),
        actions=actions,
        gotos=gotos,
        start=table.start_state,
        end=table.end_state,
        token_last=_token_pattern(lark, without=LINE_COMMENT),
    )


def _token_pattern(lark: Any, without: str = "") -> re.Pattern[str]:
    terminals = sorted(lark.terminals, key=lambda terminal: -terminal.priority)
    terminals = [terminal for terminal in terminals if terminal.name != without]
    return re.compile(
        "|".join(f"(?P<{each.name}>{each.pattern.to_regexp()})" for each in terminals)
    )


def _action(builder: Builder, kind: Any, argument: Any) -> Action:
    if kind is not Reduce:
        return int(argument)
    make = getattr(builder, argument.alias) if argument.alias else None
    return Reduction(len(argument.expansion), intern(str(argument.origin.name)), make)
