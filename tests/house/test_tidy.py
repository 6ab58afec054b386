"""House rules that no linter covers, as tests: sizes, docstrings, names, banned calls.

Method (after TigerBeetle's tidy test): walk the source with `ast`, collect every breach, fail once
with the whole list. A limit holds only when a test holds it; where a hot function has to be longer
it is named in `HOT`, with the line of `make bench` that pays for it. `python
tests/house/test_tidy.py` prints the sizes as they are.
"""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 80

# Functions that may be longer, each with the benchmark (a row of `make bench`) that pays for it.
HOT: dict[str, str] = {}

# A call that the house does not make, and what it makes instead. Keys are dotted names after
# resolving imports.
BANNED = {
    "time.time": "take a Clock",
    "time.time_ns": "take a Clock",
    "time.sleep": "take a Clock",
    "time.monotonic": "take a Clock",
    "time.monotonic_ns": "take a Clock",
    "datetime.datetime.now": "take a Clock",
    "datetime.datetime.utcnow": "take a Clock",
    "datetime.datetime.today": "take a Clock",
    "random.random": "take an rng",
    "random.choice": "take an rng",
    "random.randint": "take an rng",
    "random.shuffle": "take an rng",
    "asyncio.ensure_future": "use a TaskGroup",
    "os.fsync": "go through files/",
    "os.fdatasync": "go through files/",
    "os.rename": "go through files/",
    "os.replace": "go through files/",
    "os.system": "use subprocess with a list",
    "pickle.loads": "never unpickle what came from outside",
    "eval": "parse it",
    "exec": "write a function",
}
# `open` reaches the disk without any import, so no import contract can see it.
OPENERS_ALLOWED = ("sluicemq/files/__init__.py", "sluicemq/cli/", "sluicemq/testing/")
BANNED_ALLOWED = {
    "sluicemq/clock.py": {
        "time.time",
        "time.time_ns",
        "time.sleep",
        "time.monotonic",
        "time.monotonic_ns",
    },
    "sluicemq/files/__init__.py": {"os.fsync", "os.fdatasync", "os.rename", "os.replace"},
}
CLASS_SUFFIXES_BANNED = ("Manager", "Service", "Impl", "Helper", "Util", "Utils")

FILES = sorted(SOURCE.rglob("*.py"))


class Function(NamedTuple):
    name: str
    line: int
    lines: int


def test_source_is_found() -> None:
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_file_keeps_the_house_rules(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    name = str(path.relative_to(SOURCE))
    breaches = [
        *long_file(text),
        *long_functions(name, tree),
        *missing_docstring(text, tree),
        *banned_names(tree),
        *banned_calls(name, tree),
        *joined_assignments(tree),
    ]
    assert not breaches, "\n".join(f"{name}: {breach}" for breach in breaches)


def test_every_exempt_function_exists_and_needs_its_exemption() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{function.name}"
        for path in FILES
        for function in functions(ast.parse(path.read_text()))
        if function.lines > FUNCTION_LINES_MAX
    }
    assert set(HOT) <= found, f"short enough now, strike them from HOT: {sorted(set(HOT) - found)}"


def test_the_walk_finds_planted_breaches() -> None:
    body = "\n".join(f"    x{i} = {i}" for i in range(FUNCTION_LINES_MAX + 1))
    planted = (
        "from time import sleep as nap\nimport datetime as dt\n\n\n"
        f"class CacheManager:\n    pass\n\n\ndef long() -> None:\n{body}\n"
        "    nap(1)\n    dt.datetime.now()\n"
    )
    tree = ast.parse(planted)
    assert long_functions("planted.py", tree) == [
        f"line 9: long has {FUNCTION_LINES_MAX + 3} lines, limit {FUNCTION_LINES_MAX}"
    ]
    assert missing_docstring(planted, tree)
    assert banned_names(tree) == ["line 5: class CacheManager: name it by its noun"]
    assert [breach.partition(": ")[2] for breach in banned_calls("planted.py", tree)] == [
        "time.sleep: take a Clock",
        "datetime.datetime.now: take a Clock",
    ]
    joined = "a, b = 1, 2\na, b = b, a\ndata, size = data[1:], len(data)\na, b = pair\n"
    assert joined_assignments(ast.parse(joined)) == ["line 1: write one statement for each value"]


def long_file(text: str) -> list[str]:
    lines = text.count("\n")
    return [f"{lines} lines, limit {FILE_LINES_MAX}"] if lines > FILE_LINES_MAX else []


def long_functions(name: str, tree: ast.Module) -> list[str]:
    return [
        f"line {function.line}: {function.name} has {function.lines} lines, "
        f"limit {FUNCTION_LINES_MAX}"
        for function in functions(tree)
        if function.lines > FUNCTION_LINES_MAX and f"{name}:{function.name}" not in HOT
    ]


def missing_docstring(text: str, tree: ast.Module) -> list[str]:
    return [] if not text.strip() or ast.get_docstring(tree) else ["no module docstring"]


def banned_names(tree: ast.Module) -> list[str]:
    return [
        f"line {node.lineno}: class {node.name}: name it by its noun"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(CLASS_SUFFIXES_BANNED)
    ]


def joined_assignments(tree: ast.Module) -> list[str]:
    """Assignments like `a, b = 1, 2`. Only values that depend on each other need one statement."""
    breaches = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
            continue
        assigned = {ast.unparse(item) for item in target.elts}
        used = {ast.unparse(inner) for item in node.value.elts for inner in ast.walk(item)}
        nested = any(isinstance(item, ast.Tuple | ast.Starred) for item in target.elts)
        if not nested and not assigned & used:
            breaches.append(f"line {node.lineno}: write one statement for each value")
    return breaches


def banned_calls(name: str, tree: ast.Module) -> list[str]:
    imported = imported_names(tree)
    allowed = BANNED_ALLOWED.get(name, set())
    breaches = []
    for line, called in calls(tree, imported):
        if called in BANNED and called not in allowed:
            breaches.append(f"line {line}: {called}: {BANNED[called]}")
        if called in ("open", "io.open") and not name.startswith(OPENERS_ALLOWED):
            breaches.append(f"line {line}: open: go through files/")
    return breaches


def calls(tree: ast.Module, imported: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            head, dot, rest = ast.unparse(node.func).partition(".")
            yield node.lineno, imported.get(head, head) + dot + rest


def imported_names(tree: ast.Module) -> dict[str, str]:
    """What each imported local name stands for, as a dotted name."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(
                {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            )
    return names


def functions(tree: ast.Module) -> list[Function]:
    """Every function with its qualified name and its lines of body, the docstring left out."""
    found: list[Function] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(Function(prefix + child.name, child.lineno, body_lines(child)))
            visit(child, inner)

    visit(tree, "")
    return found


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def sizes() -> list[int]:
    return sorted(
        function.lines
        for path in FILES
        for function in functions(ast.parse(path.read_text()))
        if function.lines
    )


def p90(lines: list[int]) -> int:
    return lines[int(len(lines) * 0.9)]


def spread(lines: list[int]) -> str:
    return f"p50 {statistics.median(lines):.0f}, p90 {p90(lines)}, max {lines[-1]}"


def report() -> str:
    lines = sizes()
    files = sorted(path.read_text().count("\n") for path in FILES)
    longest = sorted(
        (
            (function.lines, f"{path.relative_to(SOURCE)}:{function.name}")
            for path in FILES
            for function in functions(ast.parse(path.read_text()))
        ),
        reverse=True,
    )[:12]
    return "\n".join(
        [
            f"{len(files)} files with {sum(files)} lines: {spread(files)}",
            f"{len(lines)} functions: {spread(lines)}",
            *(f"  {count:4} {name}" for count, name in longest),
        ]
    )


if __name__ == "__main__":
    print(report())
