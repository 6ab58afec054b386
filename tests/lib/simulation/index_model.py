"""What the key index of a log has to be, in plain Python: slow, and easy to compare with
spec/store.md §4. Shares no code with the store.

    model = IndexModel(slots=5, entries=20)
    model.add(offset, topic, store_time_ms, properties, sys_flag)      # of each record, in order
    files = model.files()                                              # bytes of each file
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Entry(NamedTuple):
    hash: int
    offset: int
    seconds: int
    previous: int


@dataclass
class ModelFile:
    """One index file; entry 0 is unused."""

    slot_count: int
    begin_ms: int = 0
    end_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)

    def put(self, value: int, offset: int, time_ms: int) -> None:
        seconds = max((time_ms - self.begin_ms) // 1000, 0) if self.begin_ms > 0 else 0
        slot = value % self.slot_count
        self.entries.append(Entry(value, offset, seconds, self.slots.get(slot, 0)))
        self.slots[slot] = len(self.entries)
        if len(self.entries) == 1:
            self.begin_ms, self.begin_offset = time_ms, offset
        self.end_ms, self.end_offset = time_ms, offset

    def data(self) -> bytes:
        """Header, slots and the entries there are: the rest of the file is not looked at."""
        count = len(self.entries) + 1
        head = struct.pack(
            ">qqqqii", self.begin_ms, self.end_ms, self.begin_offset, self.end_offset,
            len(self.slots), count,
        )  # fmt: skip
        slots = b"".join(struct.pack(">i", self.slots.get(s, 0)) for s in range(self.slot_count))
        entries = b"".join(struct.pack(">iqii", *entry) for entry in self.entries)
        return head + slots + bytes(20) + entries


class IndexModel:
    """Files of `slots` slots and `entries` entries, the unused one included."""

    def __init__(self, slots: int, entries: int) -> None:
        self._slots = slots
        self._entries = entries
        self._files: list[ModelFile] = []
        self.keys: dict[tuple[str, str], list[int]] = {}
        """(topic, key) -> offsets of its messages, oldest first."""

    def add(
        self,
        offset: int,
        topic: str,
        store_time_ms: int,
        properties: Mapping[str, str],
        sys_flag: int = 0,
    ) -> None:
        """The next record of the log."""
        if sys_flag & 0xC == 0xC:
            return
        unique_key = properties.get("UNIQ_KEY", "")
        words = [word for word in properties.get("KEYS", "").split(" ") if word]
        for key in [unique_key, *words] if unique_key else words:
            self._file().put(string_hash(f"{topic}#{key}"), offset, store_time_ms)
            places = self.keys.setdefault((topic, key), [])
            if offset not in places:
                places.append(offset)

    def _file(self) -> ModelFile:
        last = self._files[-1] if self._files else None
        if last is not None and len(last.entries) + 1 < self._entries:
            return last
        made = ModelFile(self._slots)
        if last is not None:
            made.begin_ms = made.end_ms = last.end_ms
            made.begin_offset = made.end_offset = last.end_offset
        self._files.append(made)
        return made

    def files(self) -> list[bytes]:
        """What the files begin with, oldest first."""
        return [file.data() for file in self._files]


def string_hash(text: str) -> int:
    """Java's hash of a string, made positive as the index does."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (value * 31 + high * 256 + low) & 0xFFFFFFFF
    value = value if value < 1 << 31 else (1 << 32) - value
    return 0 if value == 1 << 31 else value
