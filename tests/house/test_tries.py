"""Every try of a compatibility test has topics and groups of its own: names go through `own`.

A literal that looks like a name (T_…, G_…, with or without %DLQ% or %RETRY% before it) and is no
argument of `own` would meet at a second try what the first has left.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = sorted((Path(__file__).parents[1] / "compatibility").glob("test_*.py"))
NAME = re.compile(r"(%DLQ%|%RETRY%)?[TG]_")


def unowned(tree: ast.AST) -> Iterator[str]:
    owned = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "own"
        for argument in ast.walk(call)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in owned and NAME.match(node.value):
            yield f"line {node.lineno}: {node.value}: own(…) makes it this try's"


def test_names_of_topics_and_groups_belong_to_a_try() -> None:
    breaches = [
        f"{path.name}: {breach}"
        for path in TESTS
        for breach in unowned(ast.parse(path.read_text()))
    ]
    assert not breaches, "\n".join(breaches)


def test_a_planted_name_is_found() -> None:
    planted = ast.parse('send(own("T_a")); send("T_b"); read(f"%DLQ%{own(\'G_c\')}", "G_d")')
    assert [breach.split(": ")[1] for breach in unowned(planted)] == ["T_b", "G_d"]
