"""What a table's file says and we have no use for: it is kept and written again.

Releases of RocketMQ differ in their fields, and a store goes from one to another. A file that we
write must not say less than the one that we read.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sluicemq.wire import fastjson

T = TypeVar("T")
Texts = dict[str, tuple[T, str]]
"""Items of a table as they were last written: of a thousand few change between two editions."""


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

    def rendered(
        self, table: Mapping[str, T], texts: Texts[T], values_of: Callable[[T], dict[str, Any]]
    ) -> fastjson.Pretty:
        """A table as it stands in a file, its items with what was remembered of them. Those that
        are still the same objects are taken from `texts`, which is brought up to date."""
        for name in texts.keys() - table.keys():
            del texts[name]
        for name, item in table.items():
            if name not in texts or texts[name][0] is not item:
                values = completed(values_of(item), self.items.get(name, {}))
                text = fastjson.dumps_pretty({name: values}, 1)
                texts[name] = item, text[1 : text.rindex("\n")]
        items = ",".join([texts[name][1] for name in table])
        return fastjson.Pretty(f"{{{items}\n\t}}" if items else "{}")


def unknown_fields(values: Mapping[Any, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of an object whose names are not known."""
    return {
        key: value for key, value in values.items() if isinstance(key, str) and key not in known
    }


def completed(values: Mapping[str, Any], unknown: Mapping[str, Any]) -> dict[str, Any]:
    """An object with unknown fields added, in alphabetical order as Java writes beans."""
    fields = {**unknown, **values}
    return {key: fields[key] for key in sorted(fields)}
