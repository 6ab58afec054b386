"""Equality on the column `keys`, answered by the broker's key index instead of its queues.

`keys = 'k1 k2'` is true of messages that bear the key `k1` among others, so the index gives every
candidate, and Spark compares again. The ranges shrink to the places of the candidates.

Only a SluiceMQ broker is asked: it answers after its index has caught up with the log, and says so
when it cannot. The index of a Java broker may have holes after a crash (its index files newer than
the last checkpoint are thrown away), and rows would be missing; there `keys` is a SQL92 condition.
A key with as many messages as one answer can hold is read by its queues too.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import QUERY_NOT_FOUND, SUCCESS
from sluicemq.client.core.operations.messages import COUNT_MAX, TIME_MAX_MS
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import SluiceError
from sluicemq.record.codec import decode_records
from sluicemq.spark.offsets import QueueRange
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

KEYS_MAX: Final = 32
GAP_MAX: Final = 4_096
"""Candidates so near to one another are read in one range: a task costs more than the messages."""


def narrowed_by_keys(
    admin: Admin, ranges: list[QueueRange], keys: frozenset[str], addresses: dict[str, str]
) -> list[QueueRange]:
    """The ranges without what cannot bear one of `keys` (whole values of the column)."""
    words = {value.split(" ")[0] for value in keys}
    if len(words) > KEYS_MAX or "" in words:
        return ranges
    found: dict[tuple[str, str], set[tuple[int, int]] | None] = {}
    result: list[QueueRange] = []
    for one in ranges:
        topic, broker, queue_id = one.queue
        if (topic, broker) not in found:
            found[topic, broker] = _places(admin, topic, addresses[broker], words)
        places = found[topic, broker]
        if places is None:
            result.append(one)
        else:
            result += _around(one, sorted(offset for queue, offset in places if queue == queue_id))
    return result


def _around(one: QueueRange, offsets: Iterable[int]) -> list[QueueRange]:
    """Ranges within `one` that hold all the offsets."""
    inside = [offset for offset in offsets if one.start <= offset < one.end]
    if not inside:
        return []
    gaps = [(left, right) for left, right in pairwise(inside) if right - left > GAP_MAX]
    starts = [inside[0], *(right for _, right in gaps)]
    ends = [*(left + 1 for left, _ in gaps), inside[-1] + 1]
    return [QueueRange(one.queue, *bounds) for bounds in zip(starts, ends, strict=True)]


def _places(admin: Admin, topic: str, address: str, words: set[str]) -> set[tuple[int, int]] | None:
    """(queue id, offset) of every message with one of the keys; None when that is not certain."""
    places: dict[str, set[tuple[int, int]]] = defaultdict(set)
    try:
        count_max = _answer_max(admin, address)
        for word in words if count_max else ():
            command = requests.messages_by_key(
                topic, word, 0, TIME_MAX_MS, COUNT_MAX, is_unique=False
            )
            answer = admin.call(address, command)
            fields = answer.fields or {}
            if answer.code not in (SUCCESS, QUERY_NOT_FOUND) or not _LOOKED & fields.keys():
                return None
            for message in decode_records(answer.body, decompress=False):
                places[word].add((message.queue_id, message.queue_offset))
    except SluiceError:
        return None
    if not count_max or any(len(those) >= count_max for those in places.values()):
        return None
    return set().union(*places.values())


def _answer_max(admin: Admin, address: str) -> int:
    """How many messages one answer can hold; 0 when the broker is not a SluiceMQ one."""
    if "sluiceVersion" not in admin.runtime(address):
        return 0
    answer = admin.call(address, Command(RequestCode.GET_BROKER_CONFIG, {}))
    limit = re.search(rb"^maxMsgsNumBatch=(\d+)", answer.body, re.MULTILINE)
    return min(COUNT_MAX, int(limit[1])) if limit else 0


_LOOKED: Final = frozenset({"indexLastUpdateTimestamp"})
"""Only an answer of an index has it."""
