"""README.md as the description of a package: it reads well where the repository is not.

A wheel has no docs folder, so a link to a file of the repository becomes its text, a picture goes,
and a sentence says where the named files are. Links to the web stay.
"""

import re
from typing import Final

_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
NOTE: Final = "*Files that are named here are those of the source repository.*"


def described(text: str) -> str:
    """The description for package metadata, Markdown."""

    def plain(found: re.Match[str]) -> str:
        is_picture, words, target = found.groups()
        if "://" in target or target.startswith("#"):
            return found[0]
        return "" if is_picture else words

    title, _, rest = _LINK.sub(plain, text).partition("\n\n")
    return f"{title}\n\n{NOTE}\n\n{rest}"
