"""The whole is capped, not only its pieces: lines, files, modules a folder, functions used once.

Each cap is what the tree has reached; it only falls, until it is at its bar (docs/design/0012).
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

LINES_MAX = 110389  # bar: 60,000
FILES_MAX = 381
MODULES_A_FOLDER_MAX = 16  # bar: 15, and __init__.py
USED_ONCE_PERCENT_MAX = 8

COMPILED_LINES_MAX = 2000

FILES = sorted(SOURCE.rglob("*.py"))


def test_lines_and_files_are_capped() -> None:
    lines = sum(path.read_text().count("\n") for path in FILES)
    assert lines <= LINES_MAX
    assert len(FILES) <= FILES_MAX


def test_the_compiled_engine_is_small() -> None:
    """Lines of code: without blank lines, comments and docstrings."""
    parts = [path for kind in ("*.pyx", "*.pxd") for path in SOURCE.rglob(kind)]
    code = [re.sub(r'"""(.|\n)*?"""', "", path.read_text()).splitlines() for path in parts]
    lines = [line.strip() for part in code for line in part]
    assert parts
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= COMPILED_LINES_MAX


def test_a_folder_has_few_modules() -> None:
    folders = Counter(path.parent for path in FILES)
    folder, modules = folders.most_common(1)[0]
    assert modules <= MODULES_A_FOLDER_MAX, folder


def test_few_private_functions_are_used_once() -> None:
    once = functions = 0
    for path in FILES:  # one tree at a time: all of them are a gigabyte for the collector to walk
        nodes = list(ast.walk(ast.parse(path.read_text())))
        once += len(used_once(nodes))
        functions += sum(isinstance(node, DEFINITIONS) for node in nodes)
    assert once <= functions * USED_ONCE_PERCENT_MAX / 100


def test_a_class_name_is_defined_once_in_a_package() -> None:
    twice = defined_twice((path.parent, ast.parse(path.read_text())) for path in FILES)
    assert not twice


def test_planted_breaches_are_found() -> None:
    planted = ast.parse(
        "def _once(): ...\ndef _often(): ...\n_once(); _often(); _often()\nclass Finding: ..."
    )
    assert used_once(list(ast.walk(planted))) == ["_once"]
    assert defined_twice([(SOURCE, planted), (SOURCE, planted)]) == ["src: Finding"]


DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef


def used_once(nodes: Sequence[ast.AST]) -> list[str]:
    """Private functions and methods that their own file, these nodes, mentions once."""
    mentions = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
    )
    return [
        node.name
        for node in nodes
        if isinstance(node, DEFINITIONS)
        and node.name.startswith("_")
        and not node.name.startswith("__")
        and mentions[node.name] == 1
    ]


def defined_twice(modules: Iterable[tuple[Path, ast.Module]]) -> list[str]:
    classes: dict[Path, Counter[str]] = defaultdict(Counter)
    for folder, tree in modules:
        classes[folder].update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return sorted(
        f"{folder.name}: {name}"
        for folder, names in classes.items()
        for name, count in names.items()
        if count > 1
    )
