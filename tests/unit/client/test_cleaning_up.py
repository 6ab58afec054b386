"""No await of the client that cleans up is left to a caller who may be cancelled (again).

An `await` in a `finally` block, or in a handler of BaseException or CancelledError, runs while a
cancellation is on its way, and a second one would end it halfway: it has to be one of `SAFE`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

CLIENT = Path(__file__).parents[3] / "src" / "sluicemq" / "client"
SAFE = {
    "run_to_end",
    "self.close",  # of consumers and streams: `CloseOnce.run` or `run_to_end`
    "self.unsubscribe",  # `Memberships.leave` is
    "self._reject_failed",  # of a worker that is cancelled from outside; its message comes again
}


def cleaning_awaits(tree: ast.AST) -> Iterator[ast.Await]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try):
            continue
        blocks = [node.finalbody]
        for handler in node.handlers:
            caught = ast.unparse(handler.type) if handler.type is not None else "BaseException"
            if "BaseException" in caught or "CancelledError" in caught:
                blocks.append(handler.body)
        for block in blocks:
            for statement in block:
                yield from (it for it in ast.walk(statement) if isinstance(it, ast.Await))


def test_an_await_that_cleans_up_runs_to_its_end() -> None:
    found = []
    for path in sorted(CLIENT.rglob("*.py")):
        for node in cleaning_awaits(ast.parse(path.read_text())):
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else "?"
            if called not in SAFE:
                found.append(f"{path.name}:{node.lineno} awaits {called}")
    assert not found


def test_the_rule_finds_what_it_is_for() -> None:
    text = """
async def start():
    try:
        await join()
    except BaseException:
        await leave()
        raise
    finally:
        await close()
"""
    assert len(list(cleaning_awaits(ast.parse(text)))) == 2
