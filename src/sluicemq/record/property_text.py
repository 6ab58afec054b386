"""The properties of a message as text, without taking them apart: `name 1 value 2 name 1 value 2`.

1 and 2 are the characters U+0001 and U+0002 (spec/remoting.md §9). Sends look for a handful of
names in each message; a search in the text costs a tenth of a dict. Where a name stands twice the
last one counts, as in a Java map.
"""

from functools import lru_cache
from typing import Final

from sluicemq.model.ids import tag_code
from sluicemq.record import layout

NAME_END: Final = chr(layout.NAME_END)
VALUE_END: Final = chr(layout.VALUE_END)


def tag_code_of(properties: bytes) -> int:
    """The code of the tag in encoded properties, 0 without one. HOT: each message of a batch."""
    start = properties.rfind(b"\x02TAGS\x01")
    if start >= 0:
        start += 6
    elif properties.startswith(b"TAGS\x01"):
        start = 5
    else:
        return 0
    end = properties.find(b"\x02", start)
    return tag_code_of_value(properties[start:] if end < 0 else properties[start:end])


def tag_code_in(properties: str) -> int:
    """The same for the text, whose last property is ended. HOT."""
    start = properties.rfind("\x02TAGS\x01")
    if start >= 0:
        return tag_code(properties[start + 6 : properties.find(VALUE_END, start + 6)])
    if properties.startswith("TAGS\x01"):
        return tag_code(properties[5 : properties.find(VALUE_END, 5)])
    return 0


@lru_cache(maxsize=65_536)
def tag_code_of_value(tag: bytes) -> int:
    """The code of a tag as it is encoded."""
    return tag_code(tag.decode("utf-8", "replace"))


def value_of(properties: bytes, name: bytes) -> bytes | None:
    """The value of a name in encoded properties, None without one. HOT: each delayed message."""
    start = properties.rfind(b"\x02" + name + b"\x01")
    if start >= 0:
        start += len(name) + 2
    elif properties.startswith(name + b"\x01"):
        start = len(name) + 1
    else:
        return None
    end = properties.find(b"\x02", start)
    return properties[start:] if end < 0 else properties[start:end]


def as_text(properties: dict[str, str]) -> str:
    """The text form of properties; empty values are left out, as no peer reads them."""
    return "".join(
        f"{name}{NAME_END}{value}{VALUE_END}" for name, value in properties.items() if value
    )


def as_dict(properties: str) -> dict[str, str]:
    """Text -> dict; parts without a name or a value are dropped, as RocketMQ's parser does."""
    found: dict[str, str] = {}
    for part in properties.split(VALUE_END):
        name, _, value = part.partition(NAME_END)
        if name and value:
            found[name] = value
    return found
