"""What an exactly-once sink and a broker tell each other (design/0007). Ours alone.

The first property of a staged message says whose it is and where it goes when its epoch is
committed; it is taken off then:

    SLUICE_STAGE U+0001 query / epoch / partition / attempt / queue id or - / delay or - / topic

    delay    L3 a level, M5000 so many ms after the commit, T1700000000000 at a time

The body of 900201 is the decision about an epoch: the ranges of the staging queues of all brokers
that belong to it, each with the CRC-32 of its bodies, one after the other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.wire import fastjson
from sluicemq.wire.declare import Data, form, json, load_object, take_list

STAGING_QUEUES: Final = 8
STAGE_PROPERTY: Final = "SLUICE_STAGE"
STAGED_ID: Final = "SLUICE_ID"
"""The name of a staged message's id, if it follows the stage: it is UNIQ_KEY when published. So the
key index does not take it in twice."""
QUERY_LENGTH_MAX: Final = 100
_ABSENT: Final = "-"
_DELAYS: Final = {"L": "DELAY", "M": "TIMER_DELAY_MS", "T": "TIMER_DELIVER_MS"}


class Owner(NamedTuple):
    """Which attempt of which task of which epoch staged a message."""

    query: str
    epoch: int
    partition: int
    attempt: int

    @property
    def prefix(self) -> str:
        """What the property of each of its messages begins with."""
        return f"{self.query}/{self.epoch}/{self.partition}/{self.attempt}/"


class Stage(NamedTuple):
    """What the stage property says. `queue_id` None leaves the choice to the broker; `delay` is as
    in the module's text, None without."""

    owner: Owner
    topic: str
    queue_id: int | None = None
    delay: str | None = None

    def encode(self) -> str:
        """The property's value."""
        queue = _ABSENT if self.queue_id is None else str(self.queue_id)
        return f"{self.owner.prefix}{queue}/{self.delay or _ABSENT}/{self.topic}"

    def delay_properties(self) -> dict[str, str]:
        """The property that makes a broker deliver the message later; {} without a delay."""
        return {_DELAYS[self.delay[0]]: self.delay[1:]} if self.delay else {}


def check_query(query: str) -> str:
    """A query id that can stand in a stage property. Raises ProtocolError."""
    if not 0 < len(query) <= QUERY_LENGTH_MAX or not query.isascii() or not query.isprintable() or (
        "/" in query
    ):  # fmt: skip
        raise ProtocolError(
            f"{query!r} is no query id: it has 1 to {QUERY_LENGTH_MAX} printable ASCII characters "
            "other than /."
        )
    return query


@lru_cache(maxsize=4096)
def parse_stage(value: bytes) -> Stage:
    """The inverse of `Stage.encode`. HOT: rows of a task have few different values.

    Raises ProtocolError.
    """
    parts = value.decode("utf-8", "replace").split("/", 6)
    try:
        query, epoch, partition, attempt, queue, delay, topic = parts
        owner = Owner(query, int(epoch), int(partition), int(attempt))
        queue_id = None if queue == _ABSENT else int(queue)
    except ValueError:
        raise ProtocolError(f"{value!r} does not say what is staged.") from None
    if delay == _ABSENT:
        return Stage(owner, topic, queue_id)
    if delay[:1] not in _DELAYS or not delay[1:].isdigit():
        raise ProtocolError(f"{value!r} has the delay {delay!r}.")
    return Stage(owner, topic, queue_id, delay)


@dataclass(frozen=True, slots=True)
class StagedRange:
    """`count` messages from `offset` on of a staging queue, staged by one attempt of one task.

    `checksum` is the CRC-32 of their bodies, one after the other.
    """

    broker: str
    queue_id: int
    offset: int
    count: int
    checksum: int
    partition: int
    attempt: int


_RANGE: Final = form(
    StagedRange,
    broker="brokerName",
    queue_id=json("queueId", absent=-1),
    offset=json("offset", absent=-1),
    count="count",
    checksum="checksum",
    partition="partition",
    attempt="attempt",
)


def staged_ranges_to(ranges: Iterable[StagedRange]) -> list[dict[str, Any]]:
    """As JSON values."""
    return [_RANGE.write(one) for one in ranges]


def staged_ranges_of(values: Iterable[Any]) -> tuple[StagedRange, ...]:
    """The inverse. Raises ProtocolError."""
    found = tuple(_RANGE.read(value, "A staged range") for value in values)
    for one in found:
        if not one.broker or one.queue_id < 0 or one.offset < 0 or one.count <= 0:
            raise ProtocolError(f"{one} is no staged range.")
    return found


def encode_staged_ranges(ranges: Iterable[StagedRange]) -> bytes:
    """900201's body, of request and answer."""
    return fastjson.dumps_strict({"ranges": staged_ranges_to(ranges)})


def decode_staged_ranges(data: Data) -> tuple[StagedRange, ...]:
    """The inverse; () without a body. Raises ProtocolError."""
    if not data:
        return ()
    return staged_ranges_of(take_list(load_object(data, "decision about an epoch"), "ranges"))
