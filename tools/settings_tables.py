"""The tables of docs/configuration.md, written from the keys.

    python tools/settings_tables.py docs/configuration.md

What stands between `<!-- written: NAME -->` and `<!-- end -->` is replaced. A test compares, so
that no key is undocumented.
"""

import textwrap

from written_tables import replace_tables, rewrite_page

from sluicemq.config.inert import INERT, REFUSED
from sluicemq.config.keys import INT_MAX, Key, Kind, Part, value_text
from sluicemq.config.settings import keys_of


def with_tables(text: str) -> str:
    """The document with its tables as the keys are now."""
    return replace_tables(text, _written)


def _written(name: str) -> str:
    if name == "refused":
        return "".join(_item(f"`{key}`: {reason}.") for key, reason in REFUSED.items())
    if name != "inert":
        head = "| key | default | values | meaning |\n|---|---|---|---|\n"
        return head + "".join(map(_row, keys_of(Part(name))))
    by_reason: dict[str, list[str]] = {}
    for key, reason in INERT.items():
        by_reason.setdefault(reason, []).append(f"`{key}`")
    lines = [_item(f"{reason}: {', '.join(keys)}") for reason, keys in by_reason.items()]
    return "".join(lines)


def _item(text: str) -> str:
    """Return an item of a list, wrapped at 100 characters."""
    lines = textwrap.wrap(
        text, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    also = f" Also written {', '.join(f'`{alias}`' for alias in key.aliases)}." * bool(key.aliases)
    default = "" if callable(key.default) else value_text(key, key.default)
    shown = f"`{default}`" if default else "–"
    live = " *live*" * key.live
    return f"| `{key.name}` | {shown} | {_values(key)} | {key.doc}{also}{live} |\n"


def _values(key: Key) -> str:
    match key.kind:
        case Kind.INTEGER if key.maximum == INT_MAX:
            return f"{key.minimum} or more"
        case Kind.INTEGER if key.minimum == key.maximum:
            return f"{key.minimum}"
        case Kind.INTEGER:
            return f"{key.minimum} to {key.maximum}"
        case Kind.CHOICE:
            return ", ".join(f"`{word}`" for word, _value in key.choices)
        case _:
            return key.kind.value


if __name__ == "__main__":
    rewrite_page(with_tables)
