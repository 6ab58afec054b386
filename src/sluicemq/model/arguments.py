"""The forms in which applications may give the parts of a message, and their conversion.

A wrong type is a ConfigurationError at once. Names and limits are checked when the message is sent.
"""

from collections.abc import Sequence, Set
from datetime import datetime, timedelta
from typing import Final

from sluicemq.errors import ConfigurationError

Body = bytes | bytearray | memoryview | str
"""A str is sent as UTF-8."""

_MS_MIN: Final = 100_000_000_000
"""A smaller number of milliseconds is a time before 1973, so it is probably meant as seconds."""


def encode_body(body: Body | None) -> bytes:
    """Return a body as bytes; a string is encoded as UTF-8.

    Raises ConfigurationError for any type other than a string and bytes-like objects.
    """
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    type_name = type(body).__name__
    fix = "Pass bytes or a string (sent as UTF-8), for example json.dumps(…)."
    if type_name in ("list", "tuple", "set"):  # it may contain bytes, which json.dumps refuses
        fix = (
            f"Pass a single value, or serialize the {type_name} to bytes or a string first "
            "(strings are sent as UTF-8)."
        )
    raise ConfigurationError(
        f"the body must be bytes or a string, got {body!r:.60} ({type_name}).", fix=fix
    )


def to_key_tuple(keys: object) -> tuple[str, ...]:
    """Return keys as a tuple: None becomes (), "a" becomes ("a",), and ["a", "b"] ("a", "b").

    Raises ConfigurationError if `keys` is neither a string nor a sequence or set.
    """
    if keys is None or isinstance(keys, str):
        return () if keys is None else (keys,)
    if isinstance(keys, Sequence | Set) and not isinstance(keys, bytes):
        return tuple(keys)
    raise ConfigurationError(
        f"keys must be a string or a list of strings, got {keys!r:.60}.",
        fix="Pass a string or a list of strings.",
    )


def parse_delay_ms(delay: timedelta | float) -> int:
    """Return a delay in milliseconds; `delay` is a number of seconds or a timedelta.

    Raises ConfigurationError for another type, for a negative delay, and for 1e10 seconds or more.
    """
    if isinstance(delay, bool) or not isinstance(delay, int | float | timedelta):
        raise ConfigurationError(
            f"delay must be a number of seconds or a timedelta, got {delay!r:.60}.",
            fix="Write, for example, delay=90.",
        )
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if not 0 <= seconds < 1e10:
        raise ConfigurationError(
            f"delay must be 0 or more seconds, got {seconds:,} s.",
            fix="Use a delay that the brokers accept: up to 3 days, or their timerMaxDelaySec.",
        )
    return round(seconds * 1000)


def parse_deliver_at_ms(moment: datetime | int) -> int:
    """Return a delivery time in milliseconds since 1970.

    `moment` is a datetime with a time zone, or such a number of milliseconds. Raises
    ConfigurationError for a datetime without a time zone and for another type. A number that means
    a time before 1973 is refused too, because it is probably in seconds; a datetime before 1973 is
    accepted.
    """
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ConfigurationError(
                f"deliver_at must have a time zone, got {moment}.",
                fix="For UTC, pass tzinfo=UTC to datetime(); for local time, call .astimezone().",
            )
        return round(moment.timestamp() * 1000)
    if isinstance(moment, bool) or not isinstance(moment, int):
        raise ConfigurationError(
            f"deliver_at must be a datetime or milliseconds, got {moment!r:.60}.",
            fix="Use a datetime with a time zone, or a Unix timestamp in milliseconds.",
        )
    if moment < _MS_MIN:
        raise ConfigurationError(
            f"deliver_at={moment} is before 1973.",
            fix="Use a Unix timestamp in milliseconds: multiply seconds by 1,000.",
        )
    return moment
