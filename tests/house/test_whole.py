"""Rules over the whole source tree: modules per folder, and class names unique in a package."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

MODULES_A_FOLDER_MAX = 16  # 15, and __init__.py

FILES = sorted(SOURCE.rglob("*.py"))


def test_a_folder_has_few_modules() -> None:
    folders = Counter(path.parent for path in FILES)
    folder, modules = folders.most_common(1)[0]
    assert modules <= MODULES_A_FOLDER_MAX, folder


def test_a_class_name_is_defined_once_in_a_package() -> None:
    twice = defined_twice((path.parent, ast.parse(path.read_text())) for path in FILES)
    assert not twice


def test_planted_breaches_are_found() -> None:
    planted = ast.parse("class Finding: ...")
    assert defined_twice([(SOURCE, planted), (SOURCE, planted)]) == ["src: Finding"]


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
