"""The protocol between an exactly-once sink and a broker (design/0007), which only SluiceMQ has.

The first property of a staged message names its owner, and the topic and queue to which it is
published when its epoch is committed. A published message does not have this property:

    SLUICE_STAGE U+0001 query / epoch / partition / attempt / queue id or - / delay or - / topic

    delay    L3: delay level 3; M5000: 5,000 ms after the commit; T1700000000000: at that time in ms

The body of SLUICE_COMMIT_EPOCH (900201) is the decision about an epoch: the ranges of the staging
queues of all brokers that belong to the epoch. Each range has the CRC-32 of the concatenated bodies
of its messages.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from sluicemq.errors import ProtocolError
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import declare_object, int32, int64, json_field, text
from sluicemq.wire.fastjson import JsonData, load_object, take_list
from sluicemq.wire.headers import request, response

STAGING_QUEUES: Final = 8
"""The number of queues of the staging topic on each broker."""
STAGE_PROPERTY: Final = "SLUICE_STAGE"
"""The name of the property that makes a message a staged one."""
STAGED_ID: Final = "SLUICE_ID"
"""The property with the id of a staged message, which follows the stage property.

It becomes UNIQ_KEY when the message is published. Under this name the key index does not contain
the id of the message twice.
"""
QUERY_LENGTH_MAX: Final = 100
"""The most characters of a query id."""
_ABSENT: Final = "-"
_DELAYS: Final = {"L": "DELAY", "M": "TIMER_DELAY_MS", "T": "TIMER_DELIVER_MS"}


class Owner(NamedTuple):
    """The attempt of a Spark task that staged a message."""

    query: str
    epoch: int
    partition: int
    attempt: int

    @property
    def prefix(self) -> str:
        """The beginning of the stage property of each of its messages."""
        return f"{self.query}/{self.epoch}/{self.partition}/{self.attempt}/"


class Stage(NamedTuple):
    """The content of a stage property.

    `queue_id` None means that the broker chooses the queue. `delay` has the format in the module's
    docstring. None means that the message is not delayed.
    """

    owner: Owner
    topic: str
    queue_id: int | None = None
    delay: str | None = None

    def encode(self) -> str:
        """Return the value of the stage property."""
        queue = _ABSENT if self.queue_id is None else str(self.queue_id)
        return f"{self.owner.prefix}{queue}/{self.delay or _ABSENT}/{self.topic}"

    def delay_properties(self) -> dict[str, str]:
        """Return the message property that delays the delivery, {} without a delay."""
        return {_DELAYS[self.delay[0]]: self.delay[1:]} if self.delay else {}


def check_query(query: str) -> str:
    """Return `query` unchanged if it is a valid query id.

    A query id has 1 to QUERY_LENGTH_MAX printable ASCII characters other than `/`. Raises
    ProtocolError for any other text.
    """
    has_valid_length = 0 < len(query) <= QUERY_LENGTH_MAX
    if not has_valid_length or not query.isascii() or not query.isprintable() or "/" in query:
        raise ProtocolError(
            f"{query!r} is not a query id: it must have 1 to {QUERY_LENGTH_MAX} printable ASCII "
            "characters other than /."
        )
    return query


@lru_cache(maxsize=4096)
def parse_stage(stage_property: bytes) -> Stage:
    """Return the stage in the value of a message's stage property.

    A stage says which task of a Spark query wrote the message, and to which topic it is to be
    published. Raises ProtocolError if the value is malformed.

    Results are cached, because the messages of one task have few different values.
    """
    fields = stage_property.decode("utf-8", "replace").split("/", 6)
    try:
        query, epoch, partition, attempt, queue, delay, topic = fields
        owner = Owner(query, int(epoch), int(partition), int(attempt))
        queue_id = None if queue == _ABSENT else int(queue)
    except ValueError:
        raise ProtocolError(f"{stage_property!r} is not a valid stage property.") from None
    if delay == _ABSENT:
        return Stage(owner, topic, queue_id)
    if delay[:1] not in _DELAYS or not delay[1:].isdigit():
        raise ProtocolError(
            f"The stage property {stage_property!r} has the invalid delay {delay!r}."
        )
    return Stage(owner, topic, queue_id, delay)


@dataclass(frozen=True, slots=True)
class StagedRange:
    """The `count` messages from `offset` on in a staging queue, staged by one attempt of a task.

    `checksum` is the CRC-32 of their concatenated bodies.
    """

    broker: str
    queue_id: int
    offset: int
    count: int
    checksum: int
    partition: int
    attempt: int


_RANGE: Final = declare_object(
    StagedRange,
    broker="brokerName",
    queue_id=json_field("queueId", absent=-1),
    offset=json_field("offset", absent=-1),
    count="count",
    checksum="checksum",
    partition="partition",
    attempt="attempt",
)


def staged_ranges_to_json(ranges: Iterable[StagedRange]) -> list[dict[str, Any]]:
    """Return each range as a JSON object, in order."""
    return [_RANGE.write(staged_range) for staged_range in ranges]


def staged_ranges_from_json(json_ranges: Iterable[Any]) -> tuple[StagedRange, ...]:
    """Return the ranges in JSON objects, in order.

    Raises ProtocolError if a field has another type, or if a range lacks its broker name, has a
    negative queue id or offset, or no messages.
    """
    ranges = tuple(_RANGE.read(json_range, "A staged range") for json_range in json_ranges)
    for staged_range in ranges:
        has_place = staged_range.broker and staged_range.queue_id >= 0 and staged_range.offset >= 0
        if not has_place or staged_range.count <= 0:
            raise ProtocolError(f"{staged_range} is not a valid staged range.")
    return ranges


def encode_staged_ranges(ranges: Iterable[StagedRange]) -> bytes:
    """Encode the body of a SLUICE_COMMIT_EPOCH (900201) request or response.

    It is an object with the member `ranges`, a list of ranges.
    """
    return fastjson.dumps_strict({"ranges": staged_ranges_to_json(ranges)})


def decode_staged_ranges(json_body: JsonData) -> tuple[StagedRange, ...]:
    """Return the ranges in the body of SLUICE_COMMIT_EPOCH (900201); () if the body is empty.

    Raises ProtocolError if the body is malformed, or if a range is not valid.
    """
    if not json_body:
        return ()
    return staged_ranges_from_json(
        take_list(load_object(json_body, "decision about an epoch"), "ranges")
    )


@request(Code.SLUICE_COMMIT_EPOCH)
class CommitEpochRequest:
    """The header of SLUICE_COMMIT_EPOCH (900201), which commits an epoch of the exactly-once sink.

    `step` is `prepare` or `commit`. In step `prepare` the broker checks the staged messages and
    makes them durable. `topics` are the target topics of the staged messages, separated by commas;
    access control checks them.
    """

    query: str = text("query")
    epoch: int = int64("epoch")
    step: str = text("step")
    topics: str = text("topics", default="")


@response(Code.SLUICE_COMMIT_EPOCH)
class CommitEpochResponse:
    """The header of the response to SLUICE_COMMIT_EPOCH (900201).

    `state` is `checking`, `checked`, `publishing` or `published`. `messages` and `published` count
    the messages of the epoch on this broker. The body contains the decision about the epoch as soon
    as the decision is durable.
    """

    state: str = text("state")
    broker: str = text("brokerName")
    messages: int = int64("messages", default=0)
    published: int = int64("published", default=0)
    staging_topic: str = text("stagingTopic")
    staging_queues: int = int32("stagingQueues")
