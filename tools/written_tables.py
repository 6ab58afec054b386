"""Replace the tables of a page that tools write.

A page marks such a table with `<!-- written: NAME -->` before it and `<!-- end -->` after it.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

_BLOCK: Final = re.compile(r"(<!-- written: (.*?) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def replace_tables(text: str, write_table: Callable[[str], str]) -> str:
    """Return the text of a page with each marked table replaced by `write_table(NAME)`."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{write_table(block[2])}\n{block[3]}", text)


def rewrite_page(render: Callable[[str], str]) -> None:
    """Replace the text of the page that the command line names by `render(text)`."""
    page = Path(sys.argv[1])
    page.write_text(render(page.read_text()))
