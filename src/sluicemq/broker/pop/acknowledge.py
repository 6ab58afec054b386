"""What becomes of popped messages: 200051, 200151, 200053 (spec/grpc.md §8); which are in flight,
for the lag of groups, and who has them (900134).

    acknowledged    done. One that comes late, or a second time, changes nothing and is no error
    changed         invisible for another time, from now on: its handle is another one then
    in flight       from the pop until it is acknowledged, or visible again

The handle says which pop the message is of. Those of ordinary pops are in flight in
`pop/checkpoints.py`, and the answer leaves when that is stored; those in order in `order.py`. The
former lie before the group's place in their queue, so they count besides what follows it; the
latter behind its offset, where some may be done already. Who popped a message is known since the
broker's start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.group_commit import Durable, GroupCommit, Postponed
from sluicemq.broker.offsets import SEPARATOR, Offsets, UnfinishedMessages
from sluicemq.broker.pop.checkpoints import Checkpoints
from sluicemq.broker.pop.order import ConsumerOrder, hidden_ms
from sluicemq.broker.topics import Groups, Topics, make_no_queue_error, make_no_topic_error
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.model.topic import pop_origin, pop_topic
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import Background, WorkItem, decode_body
from sluicemq.store.store import Store
from sluicemq.wire import bodies
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.popping import (
    UNSET_REMARK,
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    InFlightRequest,
    PopAck,
    ReceiptHandle,
    decode_pop_acks,
)

ACKS_A_STEP: Final = 64
LISTED_MAX: Final = 1000
LOOKED_AT_A_STEP: Final = 1000
READ_A_STEP: Final = 100


@dataclass(slots=True, eq=False)
class Acknowledge:
    """The request family of messages that are popped."""

    topics: Topics
    offsets: Offsets
    checkpoints: Checkpoints
    order: ConsumerOrder
    store: Store
    group_commit: GroupCommit
    clock: Clock
    delivered: DeliveryStates

    def one(self, header: AckMessageRequest, command: Command, peer: Peer) -> Any:
        """200051. HOT."""
        low, high = self._check(header, peer)
        if not low <= header.offset <= high:
            raise RequestError(
                ResponseCode.NO_MESSAGE,
                f"offset is illegal, key:{header.topic}@{header.queue_id}, "
                f"commit:{header.offset}, store:{low}~{high}",
            )
        handle = ReceiptHandle.parse(header.handle)._replace(queue_id=header.queue_id)
        self._acknowledge(PopAck(header.group, header.topic, handle, (header.offset,)))
        return Durable.for_command(command, encode_response(command))

    def many(self, command: Command, peer: Peer) -> Any:
        """200151: those whose queue or message is not there are passed over."""

        def steps() -> WorkItem[Any]:
            acks = (yield from decode_body(decode_pop_acks, command.body)) if command.body else []
            if not acks:
                return Command(ResponseCode.NO_MESSAGE)
            return (yield from self._acknowledge_all(acks, command))

        return Postponed(steps())

    def change(self, header: ChangeInvisibleTimeRequest, command: Command, peer: Peer) -> Any:
        """200053."""
        code, remark, answer = ResponseCode.SUCCESS, UNSET_REMARK, ChangeInvisibleTimeResponse()
        try:
            low, high = self._check(header, peer)
            if low <= header.offset < high:
                answer = self._change(header)
            else:
                code = ResponseCode.NO_MESSAGE
        except RequestError as refusal:
            code, remark = ResponseCode(refusal.code), refusal.remark
        return Durable.for_command(
            command, encode_response(command, code, encode_header(answer), b"", remark)
        )

    def _check(self, header: AckMessageRequest, peer: Peer) -> tuple[int, int]:
        """The offsets of the message's queue. Raises RequestError when it cannot be there."""
        if header.lite_topic:
            raise RequestError(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                f"the message is of the lite topic {header.lite_topic}, and there are none here",
            )
        topic = self.topics.get(header.topic)
        if topic is None:
            raise make_no_topic_error(header.topic)
        if not 0 <= header.queue_id < topic.config.read_queues:
            raise make_no_queue_error(
                topic, header.queue_id, peer.remote, ResponseCode.MESSAGE_ILLEGAL
            )
        return self.store.queue_offsets(header.topic, header.queue_id)

    def _acknowledge(self, ack: PopAck) -> None:
        """`ack.topic` is where the messages are stored. Raises RequestError, StoreError. HOT."""
        group, topic, handle, offsets = ack
        if handle.is_ordered:
            for offset in offsets:
                self.order.acknowledge(group, topic, handle.queue_id, offset, handle.pop_ms)
        else:
            self.checkpoints.acknowledge(group, topic, handle, offsets)
        self.delivered[pop_origin(topic, group), group].acknowledged_count += len(offsets)

    def _acknowledge_all(self, acks: list[PopAck], command: Command) -> WorkItem[Any]:
        """The answer waits for the last ones' turn; those of the others must have been good.
        Raises RequestError."""
        failures, refusal = self.group_commit.failed_commit_count, None
        for number, ack in enumerate(acks):
            if number and number % ACKS_A_STEP == 0:
                yield None
            queue_id = ack.handle.queue_id
            topic = pop_topic(ack.topic, ack.group, ack.handle.kind)
            low, high = self.store.queue_offsets(topic, queue_id)
            offsets = tuple(one for one in ack.offsets if low <= one <= high)
            if offsets and self.store.queue_exists(topic, queue_id):
                try:
                    self._acknowledge(ack._replace(topic=topic, offsets=offsets))
                except RequestError as error:  # the others go on
                    refusal = error
        if refusal is not None:
            raise refusal
        if self.group_commit.failed_commit_count != failures:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                "some of the acknowledgements were not stored. Send all of them again.",
            )
        return Durable.for_command(command, encode_response(command))

    def _change(self, header: ChangeInvisibleTimeRequest) -> ChangeInvisibleTimeResponse:
        """What is new in the handle; nothing where the offset of a group that consumes in order is
        behind the message. Raises RequestError, StoreError."""
        group, topic, queue_id, offset = header.group, header.topic, header.queue_id, header.offset
        handle = ReceiptHandle.parse(header.handle)._replace(queue_id=queue_id, offset=offset)
        if not handle.is_ordered:
            handle = self.checkpoints.change(
                group, topic, handle, header.invisible_ms, is_suspended=header.suspend
            )
        elif offset < self.offsets.committed(group, topic, queue_id):
            return ChangeInvisibleTimeResponse()
        else:
            visible_ms = self.clock.now_ms() + header.invisible_ms
            self.order.change(group, topic, queue_id, offset, handle.pop_ms, visible_ms)
            handle = handle._replace(invisible_ms=visible_ms - handle.pop_ms)
        return ChangeInvisibleTimeResponse(
            pop_ms=handle.pop_ms,
            invisible_ms=handle.invisible_ms,
            revive_queue=handle.revive_queue,
        )


@dataclass(slots=True, eq=False)
class InFlight:
    """The request family of those who ask for popped messages."""

    groups: Groups
    checkpoints: Checkpoints
    order: ConsumerOrder
    clock: Clock
    background: Background

    def unfinished(self, group: str, topic: str, queue_id: int) -> UnfinishedMessages:
        """What a group has before it in a queue."""
        start = self.checkpoints.place(group, topic, queue_id)
        count = extra = self.checkpoints.in_flight(group, topic, queue_id)
        info = self.order.table.get(f"{topic}{SEPARATOR}{group}", {}).get(queue_id)
        if info is not None:
            now_ms, hidden = self.clock.now_ms(), hidden_ms(info)
            count += sum(until_ms > now_ms for until_ms in hidden.values())
            extra -= sum(one >= start and one not in hidden for one in info.offsets)
        return UnfinishedMessages(start, count, extra)

    def listed(self, header: InFlightRequest, command: Command, peer: Peer) -> Command | None:
        """900134: ours. Those that come again soonest are not first: the order is that of pops."""
        self.groups.check_exists(header.group)

        def steps() -> WorkItem[Command]:
            found: list[bodies.InFlightMessage] = []
            for number, one in enumerate(self._all(header)):
                if one is not None:
                    found.append(one)
                if len(found) >= min(header.count_max or LISTED_MAX, LISTED_MAX):
                    break
                if number % LOOKED_AT_A_STEP == 0 or len(found) % READ_A_STEP == 1:
                    yield None
            return Command(ResponseCode.SUCCESS, {}, bodies.encode_in_flight(found))

        return self.background.answer(steps(), command, peer)

    def _all(self, header: InFlightRequest) -> Iterator[bodies.InFlightMessage | None]:
        """None for what is looked at and not asked for."""
        group, now_ms = header.group, self.clock.now_ms()
        for popped in [*self.checkpoints.table]:
            topic, own, queue_id, *_ = checkpoint = popped.checkpoint
            if own != group or not _is_asked(header, topic, queue_id):
                yield None
                continue
            for offset in popped.waiting:
                if header.offset in (None, offset):
                    record = self.checkpoints.record(topic, queue_id, offset)
                    times = 1 if record is None else record.reconsume_times + 1
                    yield bodies.InFlightMessage(
                        topic, queue_id, offset, checkpoint.pop_ms, checkpoint.deadline_ms,
                        popped.holder, times,
                    )  # fmt: skip
        for name, queues in [*self.order.table.items()]:
            topic, _, own = name.partition(SEPARATOR)
            for queue_id, info in queues.items():
                if own != group or not _is_asked(header, topic, queue_id):
                    continue
                holder = self.order.holders.get((name, queue_id), "")
                for offset, until_ms in hidden_ms(info).items():
                    if until_ms > now_ms and header.offset in (None, offset):
                        times = (info.counts or {}).get(offset, 0) + 1
                        yield bodies.InFlightMessage(
                            topic, queue_id, offset, info.pop_ms, until_ms, holder, times
                        )
            yield None


def _is_asked(header: InFlightRequest, topic: str, queue_id: int) -> bool:
    return header.topic in (None, topic) and header.queue_id in (None, queue_id)
