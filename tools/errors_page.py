"""docs/errors.md, written from the docstrings of the errors.

    python tools/errors_page.py docs/errors.md

`sluice explain error NAME` prints the same text, so a wheel needs no docs folder. A test compares.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

from written_tables import rewrite_page

import sluicemq
from sluicemq.errors import SluiceError


def written(text: str) -> str:
    """The page with its sections as the classes are now: those of `errors.py` in their order, then
    those that belong to one package."""
    parts = [text.partition("\n## ")[0].rstrip() + "\n"]
    for kind in kinds():
        above = ", a ".join(f"[{one.__name__}](#{one.__name__.lower()})" for one in _above(kind))
        name = f"\n`sluice explain error {kind.page()}`" + (f" · a {above}" if above else "")
        parts.append(f"\n## {kind.__name__}\n{name}\n\n{_body(kind)}\n")
    return "".join(parts)


def kinds() -> list[type[SluiceError]]:
    """Every class but the private ones, which nobody outside of their module meets."""
    for module in pkgutil.walk_packages(sluicemq.__path__, "sluicemq."):
        if not module.name.endswith(("__main__", ".plugin")):
            importlib.import_module(module.name)
    found = [kind for kind in _tree(SluiceError) if not kind.__name__.startswith("_")]
    ours = [kind for kind in found if "." not in kind.page()]
    return ours + sorted(set(found) - set(ours), key=lambda kind: kind.__name__)


def _tree(kind: type[SluiceError]) -> Iterator[type[SluiceError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _above(kind: type[SluiceError]) -> list[type[SluiceError]]:
    return [one for one in kind.__mro__[1:] if issubclass(one, SluiceError)][:1]


def _body(kind: type[SluiceError]) -> str:
    """The docstring as Markdown: a paragraph for each label, the example as a block."""
    text = re.sub(
        r"^(When|Then|Fix): ", r"\n**\1:** ", inspect.getdoc(kind) or "", flags=re.MULTILINE
    )
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    rewrite_page(written)
