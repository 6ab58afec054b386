"""What a table's file says and we have no use for: it is kept and written again.

Releases of RocketMQ differ in their fields, and a store goes from one to another. A file that we
write must not say less than the one that we read.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Unknown:
    """Fields of the whole file, and of items of its table by the item's name."""

    fields: dict[str, Any] = field(default_factory=dict)
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, name: str, values: Mapping[Any, Any], known: Collection[str]) -> None:
        """Remember what an item says besides the fields that are known."""
        fields = unknown_fields(values, known)
        if fields:
            self.items[name] = fields

    def complete(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """An item with what was remembered of it."""
        return completed(values, self.items.get(name, {}))


def unknown_fields(values: Mapping[Any, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of an object whose names are not known."""
    return {
        key: value for key, value in values.items() if isinstance(key, str) and key not in known
    }


def completed(values: Mapping[str, Any], unknown: Mapping[str, Any]) -> dict[str, Any]:
    """An object with unknown fields added, in alphabetical order as Java writes beans."""
    fields = {**unknown, **values}
    return {key: fields[key] for key in sorted(fields)}
