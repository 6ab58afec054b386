"""The positions in a queue, as users write them: one of its two ends, or a time.

Kafka and Spark say "earliest" and "latest", RocketMQ and this project "first" and "last". Every
option that takes a position accepts all of them.
"""

from datetime import datetime
from typing import Final, Literal

from sluicemq.errors import ConfigurationError
from sluicemq.numbers import other_unit

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


def check_position(position: object, name: str) -> Position | int:
    """Return a position in a queue that an application passes: "first", "last", or a time.

    `position` is a name of an end, a datetime (local if it has no time zone), or a whole number of
    milliseconds since 1970. The result for a time is such a number, at least 0. `name` is the name
    of the argument, for the text of the error.

    Raises ConfigurationError for any other value, and for a number that is negative or probably a
    time in another unit, such as seconds.
    """
    if isinstance(position, datetime):
        return max(0, round(position.timestamp() * 1000))
    if isinstance(position, str):
        end = parse_position(position)
        if end is not None:
            return end
    if isinstance(position, bool) or not isinstance(position, int):
        raise ConfigurationError(
            f"{name} cannot be {position!r:.60}.",
            fix="Use 'first', 'last', a datetime, or a Unix timestamp in milliseconds "
            "(an integer), such as 1767225600000.",
        )
    guess = other_unit(position)
    if guess is not None:
        unit, time_ms = guess
        raise ConfigurationError(
            f"{name}={position} looks like {unit}, but must be a Unix timestamp in milliseconds.",
            fix=f"Write {time_ms}, or use a datetime.",
        )
    if position < 0:
        raise ConfigurationError(
            f"{name}={position} is before 1970.", fix="Use 'first' for the oldest stored message."
        )
    return position
