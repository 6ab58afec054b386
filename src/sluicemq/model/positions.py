"""The names of the two ends of a queue, as users write them.

Kafka and Spark say "earliest" and "latest", RocketMQ and this project "first" and "last". Every
option that takes a position accepts all of them.
"""

from typing import Final, Literal

Position = Literal["first", "last"]

_POSITIONS: Final[dict[str, Position]] = {
    "first": "first",
    "earliest": "first",
    "0": "first",
    "last": "last",
    "latest": "last",
}


def parse_position(text: str) -> Position | None:
    """Return the end of a queue that a text names: "first" or "last". None for any other text.

    Letter case and blanks around the text are ignored.
    """
    return _POSITIONS.get(text.strip().lower())
