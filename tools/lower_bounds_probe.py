"""Execute the imports of src/ in an environment that `lower_bounds.py` has made.

    python lower_bounds_probe.py SRC PACKAGE…

`PACKAGE…` are the distributions that the environment was made for. Each has to be imported by some
statement of the source, or by name when only another package imports it. Standard library only:
the environment has nothing else for certain.
"""

import ast
import builtins
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

OURS = frozenset({"sluicemq", "pyspark_rocketmq", "pyspark_rocketmq_store"})


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements below a node, at any depth; not those that may fail, or that only
    a type checker reads."""
    if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and node.module):
        yield node
    is_optional = isinstance(node, ast.Try) and any(
        "ImportError" in ast.unparse(it.type) for it in node.handlers if it.type is not None
    )
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    if not is_optional and not is_for_types:
        for inner in ast.iter_child_nodes(node):
            yield from statements(inner)


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that a statement names."""
    if isinstance(node, ast.Import):
        return [it.name for it in node.names]
    return [node.module or ""]


def is_there(module: str) -> bool:
    """Return whether the package of a module is installed. A namespace (`google`) is, once some
    package has a part of it: then the part that is named is looked for."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in OURS:
        return True
    found = importlib.util.find_spec(top)
    if found is None or found.origin is not None:
        return found is not None
    return importlib.util.find_spec(".".join(module.split(".")[:2])) is not None


def normal(name: str) -> str:
    """Return the name of a distribution as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(text: str) -> BaseException | None:
    """Execute a statement; return the error that it ended with."""
    try:
        builtins.exec(text, {"__name__": "probe"})
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported
        return error
    return None


def needs_more(error: BaseException | None) -> bool:
    """Return whether an import failed, by itself or behind another error, for a package that is
    not installed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and not is_there(error.name or ""):
            return True
        error = error.__cause__ or error.__context__
    return False


def told(error: BaseException) -> str:
    """Return the error with the last lines that led to it."""
    return "".join(traceback.format_exception(error, limit=-2))


def outside(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file that are not of our own packages."""
    nodes = statements(ast.parse(path.read_text()))
    return [it for it in nodes if modules_of(it)[0].partition(".")[0] not in OURS]


def statement_failures(paths: list[Path], used: set[str]) -> Iterator[str]:
    """Execute every import of a package that is installed; yield what fails. `used` takes the names
    of the packages."""
    for path in paths:
        for node in outside(path):
            tops = {it.partition(".")[0] for it in modules_of(node)} - sys.stdlib_module_names
            if tops and all(map(is_there, modules_of(node))):
                used |= tops
                if wrong := run(ast.unparse(node)):
                    yield f"{path}:{node.lineno}: {told(wrong)}"


def attribute_failures(paths: list[Path]) -> Iterator[str]:
    """Look up what a file reads of the modules that it imports from packages (`pa.binary_view`);
    yield what is not there."""
    for path in paths:
        modules = {
            (it.asname or it.name.partition(".")[0]): it.name
            if it.asname
            else it.name.split(".")[0]
            for node in outside(path)
            if isinstance(node, ast.Import)
            for it in node.names
            if it.name.partition(".")[0] not in sys.stdlib_module_names and is_there(it.name)
        }
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            module = modules.get(node.value.id)
            if module is None or not isinstance(node.ctx, ast.Load):
                continue
            if not hasattr(importlib.import_module(module), node.attr):
                yield f"{path}:{node.lineno}: {module} has no {node.attr}"


def module_failures(source: Path, paths: list[Path]) -> Iterator[str]:
    """Import every module that finds its packages; yield what fails."""
    for path in paths:
        needed = [module for node in outside(path) for module in modules_of(node)]
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        if all(map(is_there, needed)) and not name.endswith("__main__"):
            wrong = run(f"import {name}")
            if wrong is not None and not needs_more(wrong):
                yield f"import {name}: {told(wrong)}"


def package_failures(packages: list[str], used: set[str]) -> Iterator[str]:
    """Import the packages that no statement imports: they are there for another package."""
    owners = importlib.metadata.packages_distributions()
    for package in packages:
        tops = {it for it, of in owners.items() if package in map(normal, of) and it.isidentifier()}
        if not tops & used:
            errors = ((top, run(f"import {top}")) for top in sorted(tops))
            yield from (f"import {top}: {told(error)}" for top, error in errors if error)


def main(source: Path, packages: list[str]) -> int:
    """Print every failure; return how many there are, 99 at most."""
    sys.path.insert(0, str(source))
    paths = [it for it in sorted(source.rglob("*.py")) if "templates" not in it.parts]
    used: set[str] = set()
    failures = [
        *statement_failures(paths, used),
        *module_failures(source, paths),
        *attribute_failures(paths),
        *package_failures(packages, used),
    ]
    print("\n".join(dict.fromkeys(failures)))
    ours = sum(name.partition(".")[0] in OURS for name in sys.modules)
    print(f"{len(used)} packages, {ours} modules, {len(failures)} failures", flush=True)
    return min(len(failures), 99)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
