"""The handle by which a timed message is taken back: base64 of `v1 topic broker time id`.

A broker gives it with the answer to the send; `time_ms` lies in the message's slot of the timer
wheel, `unique_id` is the UNIQ_KEY (spec/delivery.md §2).
"""

import base64
import binascii
from typing import Final, NamedTuple

_VERSION: Final = "v1"
_PARTS: Final = 5


class RecallHandle(NamedTuple):
    """What a handle says."""

    topic: str
    broker: str
    time_ms: int
    unique_id: str

    def encode(self) -> str:
        """The text of it."""
        plain = f"{_VERSION} {self.topic} {self.broker} {self.time_ms} {self.unique_id}"
        return base64.urlsafe_b64encode(plain.encode()).decode()


def parse_recall_handle(text: str) -> RecallHandle | None:
    """The inverse; None when it is no handle."""
    try:
        plain = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    parts = plain.split(" ")
    if len(parts) != _PARTS or parts[0] != _VERSION or not all(parts):
        return None
    _, topic, broker, time, unique_id = parts
    if not (time.isascii() and time.isdigit()) or len(time) > 18:
        return None
    return RecallHandle(topic, broker, int(time), unique_id)
