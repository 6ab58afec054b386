"""Pulls of the members of a group with lanes: each reads what its lane's rule wants.

A read does not go over the border between two rules: the next pull goes on behind it. What a lane
was given is noted, so that it can be sent back when nothing of it is in hand (`lanes.py`).
"""

from collections.abc import Mapping
from typing import Final, Protocol

from sluicemq.broker.consume.clients import CLIENT_FIELD, ConsumerGroup, Consumers
from sluicemq.broker.consume.contract import STRICT
from sluicemq.broker.consume.delivered import Delivered
from sluicemq.broker.lanes.filters import rule_filter
from sluicemq.broker.lanes.group import GroupLanes
from sluicemq.broker.lanes.places import Place
from sluicemq.broker.lanes.table import end_of
from sluicemq.broker.offsets import Resets
from sluicemq.net.peer import Peer
from sluicemq.store.gather import Reach
from sluicemq.store.store import ReadResult, ReadStatus, Store

HELD_MS: Final = 1000
"""A pull that waits for its lane to come to rest is answered so soon: the next one says what is
committed."""


class Reading(Protocol):
    """What of a pull is asked for here."""

    group: str
    topic: str
    queue_id: int
    offset: int
    count_max: int
    bytes_max: int | None
    consumed: int | None
    lane: str
    delivered: Delivered
    peer: Peer
    fields: Mapping[str, str]


class LanePulls:
    """The reading of groups that have lanes."""

    def __init__(self, consumers: Consumers, store: Store) -> None:
        self._consumers = consumers
        self._store = store

    def _place(self, reading: Reading) -> tuple[GroupLanes, Place, str, str] | None:
        found = self._consumers.lane_of(reading.group, reading.peer, reading.fields)
        if found is None:
            return None
        lanes, member = found
        place = lanes.place(member.key, reading.topic, reading.queue_id)
        return (lanes, place, member.client_id, member.key) if place is not None else None

    def asks(self, reading: Reading) -> bool:
        """A new pull of a member, with its commit; True when the lane went back with it, or will
        and the pull has to wait."""
        found = self._place(reading)
        if found is None:
            return False
        lanes, place, client_id, key = found
        queue = (reading.topic, reading.queue_id)
        if lanes.is_finishing(client_id, queue, key):
            lanes.lanes[lanes.movers.reads(client_id, queue, key)].places[queue].pulls(
                reading.offset
            )
            return True
        if lanes.is_waited_for(lanes.lanes[key], queue) or lanes.parts.is_unsaved(lanes.name):
            return True
        if place.reader != client_id:
            others = [lane.places[queue] for lane in lanes.lanes.values() if queue in lane.places]
            place.read_by(client_id, others)
            lanes.parts.changed()
        reading.lane = key
        place.pulls(reading.offset)
        if place.scanned is None:
            place.scanned = place.delivered = reading.offset
        lanes.settle(queue)
        return lanes.is_going_back(key, place, queue)

    def is_held(self, reading: Reading) -> bool:
        """Does it still have to wait?"""
        found = self._place(reading)
        if found is None:
            return False
        lanes, place, client_id, key = found
        queue = (reading.topic, reading.queue_id)
        return (
            lanes.is_held(place, queue)
            or lanes.parts.is_unsaved(lanes.name)
            or lanes.is_finishing(client_id, queue, key)
            or lanes.is_waited_for(lanes.lanes[key], queue)
        )

    def is_stranger(self, reading: Reading, group: ConsumerGroup) -> bool:
        """A reader that was there before the broker restarted, and whose heartbeat is to come: by
        what the others want it would pass over its own messages."""
        consumers = self._consumers
        if reading.group not in consumers.lanes.table and (
            consumers.contracts.of(reading.group) != STRICT
        ):
            return False
        return group.find(reading.peer, reading.fields) is None

    def why(self, reading: Reading) -> str:
        """A stranger is one: its group refuses it, or does not know it yet."""
        client_id = reading.fields.get(CLIENT_FIELD)
        contracts = self._consumers.contracts
        refused = contracts.why_refused(reading.group, reading.peer, client_id)
        return refused or "no heartbeat of it has come yet"

    def told(self, reading: Reading, resets: Resets, is_parked: bool) -> int | None:
        """Where a pull has to go on, None where it is; `resets` are those of groups without
        lanes."""
        found = self._consumers.lane_of(reading.group, reading.peer, reading.fields)
        offset, queue = reading.offset, (reading.topic, reading.queue_id)
        if found is None:
            return resets.tell(reading.group, *queue, offset, is_parked=is_parked)
        lanes, member = found
        return lanes.tell(member.key, member.client_id, queue, offset, is_parked=is_parked)

    def is_stale(self, reading: Reading) -> bool:
        """Has another member pulled from the queue since this one began to wait? A reader that has
        given the queue up hears nothing any more: what it is told, nobody knows."""
        found = self._place(reading)
        return found is not None and found[1].reader not in {"", found[2]}

    def has_moved(self, reading: Reading) -> bool:
        """Does it wait with a pull of another lane? What that one has passed over may be what the
        new one wants."""
        found = self._place(reading)
        return found is not None and found[3] != reading.lane

    def read(self, reading: Reading, offset: int) -> ReadResult | None:
        """None for somebody who is no member of a lane."""
        found = self._place(reading)
        if found is None:
            return None
        place = found[1]
        rule, until = place.rule_at(offset)
        room = None if until is None else until - offset
        count = reading.count_max if reading.count_max > 0 else 1
        message_filter = rule_filter(rule)
        result = self._store.reader.read(
            reading.topic,
            reading.queue_id,
            offset,
            count if room is None else min(count, room),
            reading.bytes_max,
            message_filter,
            room,
            None if reading.consumed is None else Reach(reading.consumed),
        )
        if result.scanned and message_filter is not None and message_filter.reads_properties:
            end = offset + result.scanned
            reading.delivered.looked(message_filter, reading.queue_id, offset, end)
        if result.status is ReadStatus.FOUND:
            place.delivered = max(place.delivered, end_of(result.data))
        place.scanned = max(result.next_offset, offset)
        return result
