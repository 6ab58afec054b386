"""docs/errors.md, written from the docstrings of the errors.

    python tools/errors_page.py docs/errors.md

`sluice explain error NAME` prints the same text, so a wheel needs no docs folder. A test compares.
"""

import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator

from written_tables import replace_tables, rewrite_page

import sluicemq
from sluicemq.errors import SluiceError


def written(text: str) -> str:
    """The page with its two lists of sections as the classes are now."""
    return replace_tables(text, _sections)


def _sections(name: str) -> str:
    """An index and the sections of one list, by the alphabet: `applications` has the classes that
    `sluicemq` exports, `components` all others."""
    is_exported = name == "applications"
    listed = sorted(
        (kind for kind in kinds() if (kind.__name__ in sluicemq.__all__) is is_exported),
        key=lambda kind: kind.__name__,
    )
    links = " · ".join(f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in listed)
    parts = [textwrap.fill(links, 100, break_on_hyphens=False) + "\n"]
    for kind in listed:
        above = ", a ".join(f"[{one.__name__}](#{one.__name__.lower()})" for one in _above(kind))
        subtitle = f"`sluice explain error {kind.__name__}`" + (f" · a {above}" if above else "")
        parts.append(f"### {kind.__name__}\n\n{subtitle}\n\n{_body(kind)}\n")
    return "\n".join(parts)


def kinds() -> list[type[SluiceError]]:
    """Every class but the private ones, which nobody outside of their module meets."""
    for module in pkgutil.walk_packages(sluicemq.__path__, "sluicemq."):
        if not module.name.endswith(("__main__", ".plugin")):
            importlib.import_module(module.name)
    found = [kind for kind in _tree(SluiceError) if not kind.__name__.startswith("_")]
    ours = [kind for kind in found if kind.__module__ == SluiceError.__module__]
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
