"""When a message is delivered: the words of `send`, checked, as RocketMQ's properties.

    delay_level=3                   a level of the brokers' messageDelayLevel: 10 s as a rule
    delay=90 | timedelta(hours=5)   so long from now, to the millisecond
    deliver_at=datetime | ms        at that time; one that is over means at once

One of the three. A level needs no more than a 4.x broker, a time needs 5.x.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from sluicemq.errors import ConfigurationError
from sluicemq.model.message import DELAY, TIMER_PROPERTIES, Message
from sluicemq.model.recall import RecallHandle, parse_recall_handle

DELAY_LEVEL_MAX: Final = 18
"""Those of messageDelayLevel by default: 1s 5s 10s 30s 1m … 10m 20m 30m 1h 2h."""
_MS_MIN: Final = 100_000_000_000
"""A smaller number of ms lies before 1973: it is one of seconds."""
_SECONDS, _MILLISECONDS, _DELIVER = TIMER_PROPERTIES


def delay_ms_of(delay: timedelta | float | None) -> int | None:
    """A delay in seconds or as timedelta -> ms. Raises ConfigurationError."""
    if delay is None:
        return None
    if isinstance(delay, bool) or not isinstance(delay, int | float | timedelta):
        raise ConfigurationError(
            f"the delay is {type(delay).__name__}.", cure="Give seconds or a timedelta."
        )
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    if not 0 <= seconds < 1e10:
        raise ConfigurationError(
            f"the delay is {seconds:,} s.",
            cure="Give 0 or more; brokers take 3 days, or what their timerMaxDelaySec says.",
        )
    return round(seconds * 1000)


def deliver_at_ms_of(moment: datetime | int | None) -> int | None:
    """A time of delivery -> ms since 1970. Raises ConfigurationError."""
    if moment is None:
        return None
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ConfigurationError(
                f"deliver_at={moment} has no time zone.",
                cure="Add one: datetime.now(UTC) + …, or .astimezone() for local time.",
            )
        return round(moment.timestamp() * 1000)
    if isinstance(moment, bool) or not isinstance(moment, int):
        raise ConfigurationError(
            f"deliver_at is {type(moment).__name__}.",
            cure="Give a datetime with a time zone, or whole milliseconds since 1970.",
        )
    if moment < _MS_MIN:
        raise ConfigurationError(
            f"deliver_at={moment} is before 1973.",
            cure="It counts milliseconds since 1970: multiply seconds by 1,000.",
        )
    return moment


def recalled(handle: str) -> RecallHandle:
    """What a recall handle says. Raises ConfigurationError when it is none."""
    found = parse_recall_handle(handle)
    if found is None:
        raise ConfigurationError(
            f"{handle!r} is no recall handle.",
            cure="It is the recall_handle of a SendResult; only timed messages have one.",
        )
    return found


def is_delayed(message: Message) -> bool:
    """Is one of the three set?"""
    return bool(
        message.delay_level or message.delay_ms is not None or message.deliver_at_ms is not None
    )


def delay_properties(message: Message, level_max: int = DELAY_LEVEL_MAX) -> Mapping[str, str]:
    """The properties that say when. Raises ConfigurationError for what cannot be meant."""
    found: dict[str, str] = {}
    if message.delay_level:
        level = message.delay_level
        if not 0 < level <= level_max:
            raise ConfigurationError(
                f"the delay level is {level}.",
                cure=f"Levels are 1 to {level_max}, 0 is none. For any other time give delay= or "
                "deliver_at=.",
            )
        found[DELAY] = str(level)
    if message.delay_ms is not None:
        if message.delay_ms < 0:
            raise ConfigurationError(
                f"the delay is {message.delay_ms:,} ms.", cure="Give 0 or more."
            )
        found[_MILLISECONDS] = str(message.delay_ms)
    if message.deliver_at_ms is not None:
        found[_DELIVER] = str(message.deliver_at_ms)
    if len(found) > 1:
        raise ConfigurationError(
            f"the message says in more than one way when to deliver it: {', '.join(found)}.",
            cure="Give one of delay_level, delay and deliver_at.",
        )
    return found
