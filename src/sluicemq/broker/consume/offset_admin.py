"""What operators do with the offsets of groups: 222 303 308 314 321.

    222   send a group to another place of a topic: by time, to an offset, to the end
    303   how old is what a group consumes now?
    308   the least offset of all groups, queue by queue
    314   give one group the offsets of another
    321   the units of a queue as they are stored

A reset is done here (`useServerSideResetOffset`, the default; `offsets.py` says how it lasts) or by
the consumers, who are told with 220. Then they have to be online, and one that does not know 220
does nothing; that is what RocketMQ 4.x knows.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.group_commit import Announced, GroupCommit, Postponed
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem
from sluicemq.store.queues import UNIT
from sluicemq.store.store import Store
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    CloneGroupOffsetRequest,
    QueryConsumeQueueRequest,
    QueryCorrectionOffsetRequest,
    ResetOffsetRequest,
    TopicGroupRequest,
)

log = logging.getLogger(__name__)

UNITS_MAX: Final = 2000
OFFSET_NONE: Final = (1 << 63) - 1
"""308's word for a queue in which no group is behind the one it is compared with."""


@dataclass(slots=True, eq=False)
class OffsetAdmin:
    """The request family about offsets of whole groups."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    polls: LongPolls
    store: Store
    clock: Clock
    group_commit: GroupCommit

    # --------------------------------------------------------------------------------- reset

    def reset(
        self, header: ResetOffsetRequest, command: Command, peer: Peer
    ) -> Command | Announced:
        """222. Answered with the new offsets, when they are on disk."""
        topic = self.topics.require(header.topic)
        self.groups.check_exists(header.group)
        is_ours = self.settings.broker.server_side_reset
        name, queue_id, offset = topic.name, header.queue_id, header.offset
        queue_ids: Iterable[int] = range(topic.config.read_queues)
        found: dict[MessageQueue, int] = {}
        if is_ours and queue_id >= 0:
            if queue_id not in queue_ids:
                raise RequestError(
                    ResponseCode.SYSTEM_ERROR,
                    f"queue {queue_id} is not one of the {topic.config.read_queues} queues of "
                    f"{name}",
                )
            queue_ids = [queue_id]
            if offset is not None and offset != -1:
                low, high = self.store.queue_offsets(name, queue_id)
                if not low <= offset <= high + 1:  # one too many, as the real broker allows
                    raise RequestError(
                        ResponseCode.SYSTEM_ERROR,
                        f"the offset {offset} is not in the queue {queue_id} of {name}, "
                        f"which holds {low} to {high}",
                    )
                found = {self._queue(name, queue_id): offset}
        if not found:
            reader, ends = self.store.reader, self.store.queue_offsets
            found = {
                self._queue(name, queue_id): ends(name, queue_id)[1]
                if header.time_ms < 0
                else reader.offset_by_time(name, queue_id, header.time_ms, "lower")
                for queue_id in queue_ids
            }
        log.info(
            "%s resets group %s of topic %s: %s", peer.remote, header.group, topic.name,
            ", ".join(f"queue {queue.queue_id} to {offset}" for queue, offset in found.items()),
        )  # fmt: skip
        if is_ours:
            self._move(header.group, found)
            body = bodies.encode_queue_offsets(found)
            return Announced(Command(ResponseCode.SUCCESS, body=body))
        return self._let_consumers_reset(header, found, command.language)

    def _move(self, group: str, offsets: dict[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if not self.consumers.lanes.reset(group, queue.topic, queue.queue_id, offset):
                self.offsets.reset(group, queue.topic, queue.queue_id, offset)
            self.polls.wake(queue.topic, queue.queue_id)
        self.group_commit.schedule_commit()

    def _let_consumers_reset(
        self, header: ResetOffsetRequest, found: dict[MessageQueue, int], language: str
    ) -> Command:
        """220 to every member; who reads a queue moves there. A queue without an offset in the
        table has no reader that could obey, so it is refused, as by the real broker."""
        group = self.consumers.groups.get(header.group)
        if group is None:
            return Command(
                ResponseCode.CONSUMER_NOT_ONLINE,
                remark=f"Consumer not online, so can not reset offset, Group: {header.group} "
                f"Topic: {header.topic} Timestamp: {header.time_ms}",
            )
        for queue, offset in list(found.items()):
            known = self.offsets.committed(header.group, queue.topic, queue.queue_id)
            if known < 0:
                return Command(
                    ResponseCode.SYSTEM_ERROR,
                    remark=f"The consumer group <{header.group}> not exist",
                )
            if not header.force and offset >= known:
                found[queue] = known
        encode = bodies.encode_queue_offset_list if language == "CPP" else None
        body = (encode or bodies.encode_queue_offsets)(found)
        fields = encode_header(
            ResetOffsetRequest(
                topic=header.topic, group=header.group, time_ms=header.time_ms, force=header.force
            )
        )
        for member in tuple(group.members):
            member.send_oneway(
                Command(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, dict(fields), body)
            )
        return Command(
            ResponseCode.SUCCESS,
            body=bodies.encode_queue_offsets(found),
            remark="not set any response code",
        )

    # --------------------------------------------------------------------------------- clone

    def clone(self, header: CloneGroupOffsetRequest, command: Command, peer: Peer) -> Announced:
        """314: the target goes where the source stands; of one topic or of all but the retry topic.
        Members of the target that are online are moved as by a reset."""
        self.groups.check_exists(header.source_group)
        if self.groups.get_or_create(header.target_group) is None:
            self.groups.check_exists(header.target_group)
        source, target = header.source_group, header.target_group
        names = {header.topic} if header.topic else self.offsets.topics_of(source)
        for name in sorted(names):
            topic = self.topics.get(name)
            if topic is None or name.startswith(RETRY_PREFIX):
                continue
            found = {}
            for queue_id in range(topic.config.read_queues):
                offset = self.offsets.committed(source, name, queue_id)
                if offset >= 0:
                    found[self._queue(name, queue_id)] = offset
            self._move(target, found)
            log.info("%s clones %s to %s on %s", peer.remote, source, target, name)
        return Announced(Command(ResponseCode.SUCCESS))

    # ----------------------------------------------------------------------------- questions

    def time_spans(self, header: TopicGroupRequest, command: Command, peer: Peer) -> Command:
        """303."""
        topic = self.topics.require(header.topic)
        name, spans = topic.name, []
        reader, now_ms = self.store.reader, self.clock.now_ms()
        for queue_id in range(topic.config.write_queues):
            high = self.store.queue_offsets(name, queue_id)[1]
            offset = self.offsets.committed(header.group, name, queue_id)
            first_ms = consumed_ms = reader.earliest_time_ms(name, queue_id)
            if offset > 0:
                consumed_ms = reader.store_time_ms(name, queue_id, offset - 1)
            next_ms = reader.store_time_ms(name, queue_id, max(offset, 0)) if high > offset else 0
            delay_ms = max(0, now_ms - next_ms) if next_ms > 0 else 0
            last_ms = reader.store_time_ms(name, queue_id, high - 1) if high else -1
            queue = self._queue(name, queue_id)
            spans.append(bodies.TimeSpan(queue, first_ms, last_ms, consumed_ms, delay_ms))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_time_spans(spans))

    def corrections(
        self, header: QueryCorrectionOffsetRequest, command: Command, peer: Peer
    ) -> Command:
        """308: the least offset of all groups but `filterGroups`; where the compared group is
        behind all of them, the greatest number there is. Offsets of deleted messages do not count.

        RocketMQ drops the offsets of the groups that are left out; we only leave them out."""
        left_out = set(filter(None, (header.groups_left_out or "").split(",")))
        least: dict[int, int] = {}
        compared: dict[int, int] = {}
        for group, topic, queue_id, offset in self.offsets.iter_offsets():
            if topic != header.topic:
                continue
            if group == header.compare_group:
                compared[queue_id] = offset
            is_there = offset >= self.store.queue_offsets(topic, queue_id)[0]
            if group not in left_out and is_there:
                least[queue_id] = min(offset, least.get(queue_id, offset))
        for queue_id, offset in compared.items():
            if least.get(queue_id, OFFSET_NONE) > offset:
                least[queue_id] = OFFSET_NONE
        return Command(ResponseCode.SUCCESS, body=bodies.encode_correction_offsets(least))

    def units(self, header: QueryConsumeQueueRequest, command: Command, peer: Peer) -> Postponed:
        """321: at most UNITS_MAX; with a group, which of them its filter wants by their tag."""
        topic = self.topics.require(header.topic)
        low, high = self.store.queue_offsets(topic.name, header.queue_id)
        watch = self.consumers.watch(header.group, topic.name) if header.group else None
        left = min(header.count, UNITS_MAX)
        offset = max(header.offset, low)
        data = b""
        while left > 0:
            units = self.store.reader.units(topic.name, header.queue_id, offset, left)
            if not units:
                break
            data += units
            offset += len(units) // UNIT.size
            left -= len(units) // UNIT.size
        wanted = watch.subscription if watch is not None else None
        codes = wanted.codes if wanted is not None else ()

        filter_text = None
        if header.group:
            filter_text = "null" if watch else f"{header.group}@{topic.name} is not online!"

        def encoded() -> bytes:
            found = [
                bodies.QueueUnit(position, size, code, not codes or code in codes)
                for position, size, code in UNIT.iter_unpack(data)
            ]
            return bodies.encode_queue_units(
                bodies.QueueUnits(low, high, found, wanted, filter_text)
            )

        def steps() -> WorkItem[Command]:
            return Command(ResponseCode.SUCCESS, body=(yield encoded))

        return Postponed(steps())

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic, self.settings.broker.broker_name, queue_id)
