"""The text of messageDelayLevel: `1s 5s 10s 30s 1m …`, level 1 first (spec/delivery.md §1)."""

from functools import lru_cache
from typing import Final

from sluicemq.errors import ConfigurationError

DEFAULT_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_UNITS_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DELAY_MAX_MS: Final = 40 * 86_400_000


@lru_cache(maxsize=16)
def parse_delay_levels(text: str) -> tuple[int, ...]:
    """The delay of each level in ms. Raises ConfigurationError for a text that is none."""
    levels = []
    for word in text.split():
        digits, unit = word[:-1], _UNITS_MS.get(word[-1])
        if unit is None or not (digits.isascii() and digits.isdigit()):
            raise _wrong(text, f"{word} is no time")
        if int(digits) * unit > _DELAY_MAX_MS:
            raise _wrong(text, f"{word} is more than 40 days")
        levels.append(int(digits) * unit)
    if not levels:
        raise _wrong(text, "there is no level")
    return tuple(levels)


def _wrong(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"messageDelayLevel = {text} is not valid: {why}.",
        cure="Write whole numbers with s, m, h or d, separated by a blank, as in 1s 5s 10s 1m 2h.",
    )
