"""Find a function by its module and qualified name, and replace a piece of its text."""

import ast
import re
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A wrong patch: in `function` of `module`, `new` stands in place of `old`. `caught_by` is what
    has to fail: arguments of pytest, or a module of tests/lib and its arguments. `function` is ""
    for a constant of the module."""

    area: str
    name: str
    reason: str
    module: str
    function: str
    old: str
    new: str
    caught_by: str


class StaleMutantError(Exception):
    """The mutant no longer fits the code: its function or its text is not there, or not once."""


def path_of(module: str) -> Path:
    """Return the path of a module of the product, relative to the repository. A name that ends with
    `.pyx` or another ending of a file is the file of that name below `src`."""
    name, dot, ending = module.rpartition(".")
    if dot and ending in ("pyx", "pxd"):
        return Path("src", *name.split(".")).with_suffix(f".{ending}")
    plain = Path("src", *module.split("."))
    return plain / "__init__.py" if plain.is_dir() else plain.with_suffix(".py")


def patched(text: str, path: Path, function: str, old: str, new: str) -> str:
    """Return the text of the file `path` with `old` replaced by `new` in `function`, its qualified
    name; "" is the whole module.

    Raises StaleMutantError if there is no such function, or if `old` does not stand in it exactly
    once.
    """
    start, end = (0, len(text)) if not function else _span(text, path, function)
    body = text[start:end]
    if (count := body.count(old)) != 1:
        raise StaleMutantError(
            f"{path}: {function or 'the module'} has the text {old!r} {count} times, not once. "
            "Write the mutant anew."
        )
    return text[:start] + body.replace(old, new) + text[end:]


def _span(text: str, path: Path, function: str) -> tuple[int, int]:
    """Return where the source of a function begins and ends, in characters."""
    first, last = (_lines_of_cython if path.suffix == ".pyx" else _lines)(text, path, function)
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: first - 1])), len("".join(lines[:last]))


def _lines(text: str, path: Path, function: str) -> tuple[int, int]:
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in function.split("."):
        inner = [
            one
            for node in nodes
            for one in ast.iter_child_nodes(node)
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and one.name == name
        ]
        if not inner:
            raise StaleMutantError(f"{path} has no {function}. Write the mutant anew.")
        nodes = [inner[-1]]
    node = nodes[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return node.lineno, node.end_lineno or node.lineno


def _lines_of_cython(text: str, path: Path, function: str) -> tuple[int, int]:
    """By indentation: Python's parser does not read Cython."""
    lines = text.splitlines()
    name = re.escape(function.rpartition(".")[2])
    head = re.compile(rf"^(\s*)(?:def|cdef|cpdef|class)\b[^=]*?\b{name}\s*[(:]")
    found = [(number, match) for number, line in enumerate(lines) if (match := head.match(line))]
    if len(found) != 1:
        raise StaleMutantError(f"{path} has {len(found)} functions {function}, not one.")
    number, match = found[0]
    indent = len(match[1])
    end = number + 1
    while (head_text := "".join(lines[number:end])).count("(") > head_text.count(")"):
        end += 1
    while end < len(lines) and (
        not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent
    ):
        end += 1
    return number + 1, end
