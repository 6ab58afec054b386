"""The properties of a message as text, without taking them apart: `name 1 value 2 name 1 value 2`.

1 and 2 are the characters U+0001 and U+0002 (spec/remoting.md §9). Sends look for a handful of
names in each message; a search in the text costs a tenth of a dict. Where a name stands twice the
last one counts, as in a Java map.
"""

from typing import Final

NAME_END: Final = "\x01"
VALUE_END: Final = "\x02"


def value_of(properties: str, name: str) -> str:
    """The value of a property, "" when it is absent."""
    mark = name + NAME_END
    start = properties.rfind(VALUE_END + mark)
    if start >= 0:
        start += 1
    elif properties.startswith(mark):
        start = 0
    else:
        return ""
    start += len(mark)
    end = properties.find(VALUE_END, start)
    return properties[start:] if end < 0 else properties[start:end]


def tag_of(properties: bytes) -> str:
    """The tag in encoded properties, "" when there is none."""
    start = properties.rfind(b"\x02TAGS\x01")
    if start >= 0:
        start += 6
    elif properties.startswith(b"TAGS\x01"):
        start = 5
    else:
        return ""
    end = properties.find(b"\x02", start)
    return (properties[start:] if end < 0 else properties[start:end]).decode("utf-8", "replace")


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
