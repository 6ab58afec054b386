"""What a repair found and did, as `sluice store repair` tells it."""

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


class LostRange(NamedTuple):
    """Messages of a queue that cannot be brought back: offsets `first` to `last`."""

    topic: str
    queue_id: int
    first: int
    last: int

    @property
    def messages(self) -> int:
        return self.last - self.first + 1


class DamagedRange(NamedTuple):
    """Bytes [start, end) of the log that hold no whole record."""

    file: str
    start: int
    end: int
    reason: str
    messages_lost: int


@dataclass(slots=True)
class RepairReport:
    """What was found, and what was done when `is_written`."""

    root: str
    records: int = 0
    log_end: int = 0
    damaged: list[DamagedRange] = field(default_factory=list)
    lost: list[LostRange] = field(default_factory=list)
    not_placed: list[LostRange] = field(default_factory=list)
    """Lost ones that found no room for a place holder: brokers that build queues anew will move
    the offsets behind them."""
    tail_bytes: int = 0
    """What lies behind the end and was never safe: the next start cuts it off."""
    bad_files: list[str] = field(default_factory=list)
    """Files that are missing or have another size."""
    mended: int = 0
    """Records that were whole but for their queue offset, which a queue's unit knows."""
    wrong_units: int = 0
    missing_queues: int = 0
    is_written: bool = False
    backup: str = ""
    bytes_changed: int = 0

    @property
    def is_sound(self) -> bool:
        found = (self.damaged, self.bad_files, self.mended, self.wrong_units, self.missing_queues)
        return not any(found)

    @property
    def messages_lost(self) -> int:
        return sum(lost.messages for lost in self.lost)

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        for name in ("damaged", "lost", "not_placed"):
            facts[name] = [item._asdict() for item in getattr(self, name)]
        return facts | {"is_sound": self.is_sound, "messages_lost": self.messages_lost}
