"""Pops, and who looks at what is there to pop: 200050, 200052, 200054, 200055 (spec/grpc.md §8).

A pop names no offset: it takes what comes next in a queue, or in any, for its whole group, and its
answer says by which handles the messages are acknowledged. Where the group is, and what of it is in
flight, is known by `pop/checkpoints.py` and, for queues that are consumed in order, by `order.py`;
here is who may pop, what is looked at, and the answers, with the real broker's codes in its order.

    sources   the retry topic of group and topic goes first now and then, else last; of a topic all
              queues, from a random one on. A look ends when it has enough, or its time is over
    answer    leaves when the checkpoints are stored (`Durable`): what it gives away is in the log
    nothing   the pop waits (`longpoll.py`), in a contest with the others of its group

A look at a long queue whose messages a filter does not want takes more than a slice of the loop: it
is done in steps, and the group's place moves on with each.

Messages that come again lie in the retry topic. They are given as they were sent, with the topic
that the consumer knows, and with their handle as a property.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any, Final

from sluicemq.broker.background import retry_after
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.filters import RequestFilters
from sluicemq.broker.consume.longpoll import ANY_QUEUE, LongPolls
from sluicemq.broker.group_commit import Durable, Parked, Postponed
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.pop.checkpoints import Checkpoints
from sluicemq.broker.pop.order import ConsumerOrder
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import FAQ, Groups, Topics, make_no_queue_error, make_no_topic_error
from sluicemq.clock import SteadyClock
from sluicemq.errors import ProtocolError, RequestError, StoreError
from sluicemq.model.message import POP_CK
from sluicemq.model.subscription import MessageFilter
from sluicemq.model.topic import (
    PERM_READ,
    POP_RETRY,
    POP_RETRY_V2,
    RETRY_PREFIX,
    pop_kind,
    pop_topic,
)
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import Background, WorkItem
from sluicemq.record.codec import (
    as_text,
    decode_properties,
    encode_record,
    parse_head,
    properties_slice,
)
from sluicemq.store.gather import PostponedError, PostponedWork
from sluicemq.store.read import ReadResult, ReadStatus
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.popping import (
    ORDERED,
    UNSET_REMARK,
    NotificationRequest,
    NotificationResponse,
    PeekMessageRequest,
    PollingInfoRequest,
    PollingInfoResponse,
    PopMessageRequest,
    PopMessageResponse,
    ReceiptHandle,
    encode_queue_info,
)

log = logging.getLogger(__name__)

COUNT_MAX: Final = 32
LATE_MS: Final = 500
"""A pop that comes so long after the end of its own waiting is not looked at any more."""
EARLY_MS: Final = 50
"""One that waits is answered so long before its end."""
WAIT_MS_MAX: Final = 10 * 60_000
FROM_FIRST: Final = 0
LOOK_S: Final = 0.002
NOTICED_MAX: Final = 64
"""So many messages a notification with a filter looks at; behind them there may be one."""
_HANDLE_START: Final = f"{POP_CK}\x01".encode()
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_ELSEWHERE: Final = (
    ReadStatus.OFFSET_TOO_SMALL, ReadStatus.OFFSET_OVERFLOW_BADLY, ReadStatus.OFFSET_FOUND_NULL,
)  # fmt: skip
Source = tuple[str, int, int]
"""Topic, queue id, kind of the topic."""
Admit = Callable[[str, str, str | None, str | None, Peer], None]
"""Raises RequestError unless who is connected there may pop: group, topic, kind and expression."""


def _contest(group: str, *, is_order: bool) -> str:
    return f"{group} in order" if is_order else group


@dataclass(slots=True, eq=False)
class Popping:
    """A pop under way, from its request to its answer. A peek and a notification are pops that
    take nothing (`is_look`). `until_ms`: so long it may wait."""

    header: PopMessageRequest
    command: Command
    peer: Peer
    until_ms: int
    filter: MessageFilter | None = None
    is_look: bool = False

    @property
    def contest(self) -> str:
        """The pops of a group; those in order know nothing of what the others find, and those that
        want no messages must not be in the way of others. Notifications with one filter, of which
        one is enough."""
        header = self.header
        if header.count_max < 1:
            return f"{header.group} wants nothing"
        if self.is_look:
            return f"{header.group} notified {header.expression or ''}"
        return _contest(header.group, is_order=header.order)


@dataclass(slots=True)
class Look:
    """What one look has found. `rest` counts what is left in the queues. `is_over`: it looks no
    further; `is_unfinished`: though it has found nothing yet, and more has to be looked at."""

    pop_ms: int
    until_s: float
    data: list[bytes | memoryview] = field(default_factory=list)
    count: int = 0
    size_bytes: int = 0
    rest: int = 0
    revive_queue: int = 0
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    messages: list[tuple[int, int, str]] = field(default_factory=list)
    orders: list[tuple[int, object, int]] = field(default_factory=list)
    is_over: bool = False
    is_unfinished: bool = False
    judgement: PostponedWork | None = None


@dataclass(slots=True, eq=False)
class Pop:
    """The request family of consumers that pop. `random` chooses where a look begins."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    checkpoints: Checkpoints
    order: ConsumerOrder
    polls: LongPolls
    store: Store
    clock: SteadyClock
    background: Background
    delivered: DeliveryStates
    filters: RequestFilters
    random: Random
    consumers: Consumers
    admit: Admit

    # ------------------------------------------------------------------------------- requests

    def pop(self, header: PopMessageRequest, command: Command, peer: Peer) -> Any:
        """200050. HOT."""
        now_ms = self.clock.now_ms()
        until_ms = self._until_ms(header.born_time_ms, header.poll_ms, now_ms)
        try:
            self._check_pop(header, peer, now_ms - until_ms)
            wanted = self._filter(header.expression_kind, header.expression)
            self._admit(header, peer)
        except PostponedError as postponed:
            again = partial(self.pop, header, command, peer)
            return Postponed(retry_after(postponed.work, again))
        except RequestError as refusal:
            return _refused(refusal, PopMessageResponse())
        popping = Popping(header, command, peer, until_ms, wanted)
        found = self._look(popping)
        if found.is_unfinished:
            return Postponed(self._go_on(popping, found))
        return self._outcome(popping, found)

    def peek(self, header: PeekMessageRequest, command: Command, peer: Peer) -> Any:
        """200052: what a pop would get, without taking it."""
        try:
            self._check_target(header, peer)
        except RequestError as refusal:
            return _refused(refusal, PopMessageResponse())
        asked = PopMessageRequest(
            group=header.group, topic=header.topic, queue_id=header.queue_id,
            count_max=header.count_max, invisible_ms=0, poll_ms=0, init_mode=FROM_FIRST,
        )  # fmt: skip
        popping = Popping(asked, command, peer, 0, is_look=True)
        found = self._look(popping)
        return Command(
            ResponseCode.SUCCESS if found.count else ResponseCode.PULL_NOT_FOUND,
            encode_header(PopMessageResponse(rest_count=found.rest + found.count)),
            b"".join(found.data),
            remark="FOUND" if found.count else "NO_MESSAGE_IN_QUEUE",
        )

    def notify(self, header: NotificationRequest, command: Command, peer: Peer) -> Any:
        """200054: is there something to pop? Waits until there is."""
        now_ms = self.clock.now_ms()
        try:
            self._check_target(header, peer)
            wanted = self._filter(header.expression_kind, header.expression)
        except PostponedError as postponed:
            again = partial(self.notify, header, command, peer)
            return Postponed(retry_after(postponed.work, again))
        except RequestError as refusal:
            return _refused(refusal, NotificationResponse())
        asked = PopMessageRequest(
            group=header.group, topic=header.topic, queue_id=header.queue_id, count_max=1,
            invisible_ms=0, poll_ms=header.poll_ms, init_mode=FROM_FIRST, order=header.order,
            attempt_id=header.attempt_id, expression=header.expression,
        )  # fmt: skip
        until_ms = self._until_ms(header.born_time_ms, header.poll_ms, now_ms)
        popping = Popping(asked, command, peer, until_ms, wanted, is_look=True)
        if self._has_messages(popping):
            return _notice(popping, NotificationResponse(has_messages=True))
        code = self._why_not_wait(popping)
        if code is None:
            return self._parked(popping, self._notice_again)
        is_full = code == ResponseCode.POLLING_FULL
        return _notice(popping, NotificationResponse(is_full=is_full))

    def polling(self, header: PollingInfoRequest, command: Command, peer: Peer) -> Command:
        """200055: how many pops of the group wait for a queue, or with -1 for any."""
        try:
            self._check_target(header, peer)
        except RequestError as refusal:
            return _refused(refusal, PollingInfoResponse())
        count = sum(
            self.polls.count_waiting_pops(
                header.topic, max(header.queue_id, ANY_QUEUE), _contest(header.group, is_order=it)
            )
            for it in (False, True)
        )
        fields = encode_header(PollingInfoResponse(count=count))
        return Command(ResponseCode.SUCCESS, fields, remark=UNSET_REMARK)

    # --------------------------------------------------------------------------------- checks

    def _check_pop(self, header: PopMessageRequest, peer: Peer, late_ms: int) -> None:
        """Raises RequestError for the first thing in the way. HOT."""
        if late_ms > LATE_MS:
            what = f"the broker[{self._address}] pop message is timeout too much"
            raise RequestError(ResponseCode.POLLING_TIMEOUT, what)
        self._check_readable("pop")
        if header.count_max > COUNT_MAX:
            what = f"the broker[{self._address}] pop message's num is greater than {COUNT_MAX}"
            raise RequestError(ResponseCode.INVALID_PARAMETER, what)
        if not self.settings.store.timer_enable:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                f"the broker[{self._address}] pop message is forbidden because timerWheelEnable "
                "is false",
            )
        self._check_target(header, peer)

    @property
    def _address(self) -> str:
        return self.settings.broker.broker_ip1 or self.settings.host.address

    def _check_readable(self, verb: str) -> None:
        if not self.settings.broker.broker_permission & PERM_READ:
            what = f"the broker[{self._address}] {verb} message is forbidden"
            raise RequestError(ResponseCode.NO_PERMISSION, what)

    def _check_target(self, header: PollingInfoRequest, peer: Peer) -> None:
        """Raises RequestError unless the group may read the topic and its queue. HOT."""
        self._check_readable("peeking")
        topic = self.topics.get(header.topic)
        if topic is None:
            raise make_no_topic_error(header.topic)
        if not topic.is_readable:
            what = f"the topic[{header.topic}] peeking message is forbidden"
            raise RequestError(ResponseCode.NO_PERMISSION, what)
        if header.queue_id >= topic.config.read_queues:
            code = ResponseCode.INVALID_PARAMETER
            raise make_no_queue_error(topic, header.queue_id, peer.remote, code)
        group = self.groups.table.get(header.group) or self.groups.get_or_create(header.group)
        if group is None:
            what = f"subscription group [{header.group}] does not exist, \n{FAQ}"
            raise RequestError(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, what)
        if not group.consume_enable:
            what = f"subscription group no permission, {header.group}"
            raise RequestError(ResponseCode.NO_PERMISSION, what)

    def _filter(self, kind: str | None, expression: str | None) -> MessageFilter | None:
        """Raises RequestError, PostponedError."""
        return self.filters.get_filter(kind, expression) if expression else None

    def _admit(self, header: PopMessageRequest, peer: Peer) -> None:
        """HOT. Raises RequestError."""
        self.admit(header.group, header.topic, header.expression_kind, header.expression, peer)

    # -------------------------------------------------------------------------------- looking

    def _sources(self, header: PopMessageRequest) -> Iterator[Source]:
        """The queues that a pop looks at, in turn. HOT."""
        retries = self._retry_topics(header)
        is_first = self.random.randrange(100) < self.settings.broker.pop_retry_percent
        if is_first:
            yield from retries
        if header.queue_id >= 0:
            yield header.topic, header.queue_id, pop_kind(header.topic)
        else:
            yield from self._queues(header.topic)
        if not is_first:
            yield from retries

    def _retry_topics(self, header: PopMessageRequest) -> Iterator[Source]:
        kinds = () if header.order else self._retry_kinds()
        if len(kinds) > 1 and self.random.randrange(2):
            kinds = kinds[::-1]
        for kind in kinds:
            yield from self._queues(pop_topic(header.topic, header.group, kind))

    def _retry_kinds(self) -> tuple[int, ...]:
        config = self.settings.broker
        if not config.pop_retry_v2:
            return (POP_RETRY,)
        return (POP_RETRY, POP_RETRY_V2) if config.pop_retry_v1_read else (POP_RETRY_V2,)

    def _queues(self, name: str) -> Iterator[Source]:
        """All of a topic, from a random one on."""
        topic = self.topics.get(name)
        count = topic.config.read_queues if topic is not None else 0
        first = self.random.randrange(count) if count > 1 else 0
        kind = pop_kind(name)
        for number in range(count):
            yield name, (first + number) % count, kind

    def _look(self, popping: Popping) -> Look:
        """HOT. Raises StoreError, RequestError when nothing can be given away."""
        found = Look(self.clock.now_ms(), self.clock.monotonic_s() + LOOK_S)
        if popping.header.order:
            found.revive_queue = ORDERED
        for source in self._sources(popping.header):
            self._look_at(popping, found, source)
        found.is_unfinished &= not found.count
        return found

    def _look_at(self, popping: Popping, found: Look, source: Source) -> None:
        """One queue: what it gives is given away. HOT."""
        header, (topic, queue_id, _) = popping.header, source
        group, offset = header.group, self._start(popping, topic, queue_id)
        end = self.store.queue_offsets(topic, queue_id)[1]
        if header.order and not self.order.may_pop(
            group, topic, queue_id, header.attempt_id, found.pop_ms
        ):
            return
        if offset == end:
            return
        config = self.settings.broker
        if (
            found.is_over
            or found.count >= header.count_max
            or found.size_bytes >= self.settings.store.max_transfer_bytes_memory
            or (
                config.pop_in_flight_limited
                and self.checkpoints.in_flight(group, topic, queue_id) > config.pop_in_flight_max
            )
        ):
            found.rest += max(end - offset, 0)
            return
        result = self._read(popping, found, topic, queue_id, offset)
        if result.status in _ELSEWHERE:
            log.warning(
                "group %s was at %d of %s:%d, which has no such message: it goes on at %d",
                group, offset, topic, queue_id, result.next_offset,
            )  # fmt: skip
            offset = result.next_offset
            if not popping.is_look:
                self.offsets.reset(group, topic, queue_id, offset)
                self.checkpoints.next_offset(group, topic, queue_id)  # hears of it
            result = self._read(popping, found, topic, queue_id, offset)
        if result.postponed is not None:
            found.judgement, found.is_over, found.is_unfinished = result.postponed, True, True
            found.rest += max(end - offset, 0)
            return
        if result.count:
            self._take(popping, found, source, result)
        elif result.next_offset > offset and not popping.is_look:
            self.checkpoints.skip(group, topic, queue_id, result.next_offset)
        left = max(result.offset_max - result.next_offset, 0)
        found.rest += left
        found.is_unfinished |= left > 0 and result.next_offset > offset
        if popping.filter is not None:
            found.is_over |= self.clock.monotonic_s() >= found.until_s

    def _start(self, popping: Popping, topic: str, queue_id: int) -> int:
        """Where the group is. HOT."""
        group = popping.header.group
        offset = self.checkpoints.next_offset(group, topic, queue_id)
        if offset >= 0:
            return offset
        low, high = self.store.queue_offsets(topic, queue_id)
        if popping.is_look or popping.header.init_mode == FROM_FIRST or topic.startswith(
            RETRY_PREFIX
        ):  # fmt: skip
            offset = low
        elif (
            low == 0
            and self.settings.broker.pop_from_first_when_near
            and self.store.reader.is_in_memory(topic, queue_id, 0)
        ):
            offset = 0
        else:
            offset = max(high - 1, 0)
        if not popping.is_look:
            self.checkpoints.skip(group, topic, queue_id, offset)
        return offset

    def _read(
        self, popping: Popping, found: Look, topic: str, queue_id: int, offset: int
    ) -> ReadResult:
        """HOT."""
        count, wanted = popping.header.count_max - found.count, popping.filter
        result = self.store.reader.read(
            topic, queue_id, offset, count, None, wanted, may_postpone=True
        )
        delivered = self.delivered[topic, popping.header.group]
        delivered.filtered_count += result.units_scanned - result.count
        if (
            result.units_scanned
            and not result.is_filter_reliable
            and wanted
            and wanted.reads_properties
        ):
            delivered.add_range_to_check(wanted, queue_id, offset, offset + result.units_scanned)
        return result

    def _take(self, popping: Popping, found: Look, source: Source, result: ReadResult) -> None:
        """The messages are the pop's. HOT."""
        header, (topic, queue_id, kind) = popping.header, source
        group, invisible_ms = header.group, header.invisible_ms
        records = list(result.records())
        offsets = [one for one, _ in records]
        holder = self.consumers.client_name(group, popping.peer)
        if popping.is_look:
            pass
        elif header.order:
            counts = self.order.took(
                group, topic, queue_id, offsets, header.attempt_id, found.pop_ms, invisible_ms,
                holder,
            )  # fmt: skip
            found.orders += [
                (kind, f"qo{queue_id}%{one}", count) for one, count in counts.by_offset.items()
            ]
            found.orders.append((kind, queue_id, counts.least))
        else:
            try:
                found.revive_queue = self.checkpoints.open(
                    group, topic, queue_id, offsets, result.next_offset, found.pop_ms, invisible_ms,
                    holder,
                )  # fmt: skip
            except StoreError as error:
                if not found.count:
                    raise
                log.warning("a pop of group %s gets less than there is: %s", group, error)
                found.is_over = True
                found.rest += result.count
                return
        found.starts.append((kind, queue_id, offsets[0]))
        found.messages.append((kind, queue_id, ",".join(map(str, offsets))))
        found.count += result.count
        found.size_bytes += result.size_bytes
        actual = popping.is_look or self.settings.broker.pop_actual_retry_topic
        if topic == header.topic or actual:
            found.data += _without_handles(records, result.data)
        else:
            handle = ReceiptHandle(
                offsets[0], found.pop_ms, invisible_ms, found.revive_queue, kind,
                self.settings.broker.broker_name, queue_id,
            )  # fmt: skip
            found.data += [
                _as_sent(record, header.topic, handle._replace(offset=one))
                for one, record in records
            ]
        delivered = self.delivered[topic, group]
        delivered.messages_out += result.count
        delivered.bytes_out += result.size_bytes

    def _has_messages(self, popping: Popping) -> bool:
        """Is there one that the group has not had, or that nobody knows of whether it is wanted?"""
        header, wanted = popping.header, popping.filter
        now_ms = self.clock.now_ms()
        for topic, queue_id, _ in self._sources(header):
            offset = self._start(popping, topic, queue_id)
            end = self.store.queue_offsets(topic, queue_id)[1]
            if offset >= end or (
                header.order
                and not self.order.may_pop(
                    header.group, topic, queue_id, header.attempt_id, now_ms
                )
            ):  # fmt: skip
                continue
            if wanted is None or end - offset > NOTICED_MAX:
                return True
            result = self.store.reader.read(topic, queue_id, offset, 1, None, wanted)
            if result.count or result.next_offset < end:
                return True
        return False

    # -------------------------------------------------------------------------------- waiting

    def _until_ms(self, born_time_ms: int | None, poll_ms: int, now_ms: int) -> int:
        """Until when a request may wait: `poll_ms` from its birth by the client's clock, which is
        compared with our wall clock, and never longer than `poll_ms` from now."""
        if not born_time_ms:
            return now_ms + poll_ms
        return min(born_time_ms + self.clock.lead_ms, now_ms) + poll_ms

    def _go_on(self, popping: Popping, found: Look) -> WorkItem[Any]:
        """Looks on, as long as it may wait. Its outcome."""
        while found.is_unfinished:
            job = found.judgement
            if job is not None:
                job.store_result((yield job.run))
            else:
                yield None
                if self.clock.now_ms() >= popping.until_ms:
                    break
            self._admit(popping.header, popping.peer)
            found = self._look(popping)
        return self._outcome(popping, found)

    def _outcome(self, popping: Popping, found: Look) -> bytes | Durable | Parked:
        """HOT."""
        if found.count:
            return self._answer(popping, found)
        code = self._why_not_wait(popping)
        if code is not None:
            return self._answer(popping, found, code)
        return self._parked(popping, self._look_again)

    def _why_not_wait(self, popping: Popping) -> ResponseCode | None:
        """The answer's code, None when it may wait."""
        header, config = popping.header, self.settings.broker
        if header.poll_ms <= 0:
            return ResponseCode.POLLING_TIMEOUT
        if self.polls.parked_pops >= config.pop_polling_total_max:
            return ResponseCode.POLLING_FULL
        if self.clock.now_ms() > popping.until_ms - EARLY_MS:
            return ResponseCode.POLLING_TIMEOUT
        waiting = self.polls.count_waiting_pops(
            header.topic, max(header.queue_id, ANY_QUEUE), popping.contest
        )
        return ResponseCode.POLLING_FULL if waiting > config.pop_polling_max else None

    def _parked(
        self, popping: Popping, look: Callable[[Popping, Parked, bool], bytes | Durable | None]
    ) -> Parked:
        header = popping.header
        wait_ms = min(popping.until_ms - EARLY_MS - self.clock.now_ms(), WAIT_MS_MAX)
        kinds = () if header.order else self._retry_kinds()
        queues = [(header.topic, max(header.queue_id, ANY_QUEUE))]
        queues += [(pop_topic(header.topic, header.group, kind), ANY_QUEUE) for kind in kinds]
        return Parked(
            popping.command, tuple(queues), -1, self.clock.monotonic_s() + wait_ms / 1000,
            partial(look, popping), competition_key=popping.contest,
        )  # fmt: skip

    def _look_again(
        self, popping: Popping, parked: Parked, is_last: bool
    ) -> bytes | Durable | None:
        """Look for messages for a pop that waits, at an offer and once more at its deadline
        (`is_last`), for a message can become available without an offer. Return its answer, or
        None if it goes on waiting. HOT."""
        try:
            if is_last:
                self._check_target(popping.header, popping.peer)
                if self._is_refused(parked):  # it has looked just now
                    return self._answer(popping, Look(0, 0.0), ResponseCode.POLLING_FULL)
            self._admit(popping.header, popping.peer)
        except RequestError as refusal:
            fields = encode_header(PopMessageResponse())
            return encode_response(popping.command, refusal.code, fields, remark=refusal.remark)
        found = self._look(popping)
        if found.count:
            parked.has_left_messages = found.rest > 0
            return self._answer(popping, found)
        if is_last:
            return self._answer(popping, found, ResponseCode.POLLING_TIMEOUT)
        if found.is_unfinished:
            parked.is_attempt_pending = True
            steps = self.polls.retry_after(parked, popping.peer, found.judgement)
            self.background.run_in_background(steps, popping.peer)
        return None

    def _notice_again(self, popping: Popping, parked: Parked, is_last: bool) -> bytes | None:
        """Look for messages for a notification that waits, at an offer and once more at its
        deadline (`is_last`): the offer of a message went to one notification of its contest, and
        the message may still be there. Return its answer, or None if it goes on waiting."""
        if is_last:
            try:
                self._check_target(popping.header, popping.peer)
            except RequestError as refusal:
                fields = encode_header(NotificationResponse())
                return encode_response(popping.command, refusal.code, fields, remark=refusal.remark)
            if self._is_refused(parked):  # it has looked just now
                return _notice(popping, NotificationResponse(is_full=True))
        if self._has_messages(popping):
            return _notice(popping, NotificationResponse(has_messages=True))
        return _notice(popping, NotificationResponse()) if is_last else None

    def _is_refused(self, parked: Parked) -> bool:
        """Is its last look before its time? Then there was no room for it."""
        return self.clock.monotonic_s() < parked.deadline_s

    def _answer(
        self, popping: Popping, found: Look, code: ResponseCode = ResponseCode.SUCCESS
    ) -> bytes | Durable:
        """HOT."""
        header, command = popping.header, popping.command
        is_order = header.order
        fields = encode_header(
            PopMessageResponse(
                pop_ms=found.pop_ms,
                invisible_ms=header.invisible_ms,
                revive_queue=ORDERED if is_order else found.revive_queue,
                rest_count=found.rest,
                start_offset_info=encode_queue_info(found.starts),
                message_offset_info=encode_queue_info(found.messages),
                order_count_info=encode_queue_info(found.orders) if is_order else None,
            )
        )
        remark = "FOUND" if found.count else "NO_MESSAGE_IN_QUEUE"
        answer = encode_response(command, code, fields, b"".join(found.data), remark)
        if is_order or not found.count:
            return answer
        return Durable.for_command(command, answer)


def _refused(refusal: RequestError, header: object) -> Command:
    """An error, with the zeros that the real broker's has."""
    return Command(refusal.code, encode_header(header), remark=refusal.remark)


def _notice(popping: Popping, header: NotificationResponse) -> bytes:
    return encode_response(popping.command, fields=encode_header(header), remark=UNSET_REMARK)


def _without_handles(
    records: Sequence[tuple[int, memoryview]], data: Sequence[bytes | memoryview]
) -> Sequence[bytes | memoryview]:
    """Return the records of a read as `data`, but without the property POP_CK: clients would take
    it for the handle, and a store of another release may hold what a producer wrote. HOT."""
    if all(_HANDLE_START not in bytes(one[properties_slice(one)]) for _, one in records):
        return data
    return [_recoded(record) for _, record in records]


def _as_sent(record: memoryview, topic: str, handle: ReceiptHandle) -> bytes | memoryview:
    """Return a message that comes again, with the topic that it was sent to and its handle; as it
    is stored when there is no room for that."""
    return _recoded(record, topic, {POP_CK: handle.encode()})


def _recoded(
    record: memoryview, topic: str = "", added: Mapping[str, str] = _NOTHING
) -> bytes | memoryview:
    """Return a stored record under the name of `topic` (its own if empty), with the properties
    `added` and without any other handle."""
    head = parse_head(record)
    properties = decode_properties(record[head.properties])
    properties.pop(POP_CK, None)
    properties |= added
    try:
        return encode_record(
            topic=topic or bytes(record[head.topic]).decode("utf-8", "replace"),
            queue_id=head.queue_id,
            queue_offset=head.queue_offset,
            physical_offset=head.physical_offset,
            body=record[head.body],
            properties=as_text(properties).encode(),
            flag=head.flag,
            sys_flag=head.sys_flag,
            born_time_ms=head.born_time_ms,
            born_host=record[head.born_host],
            store_time_ms=head.store_time_ms,
            store_host=record[head.store_host],
            reconsume_times=head.reconsume_times,
            prepared_offset=head.prepared_offset,
        )
    except ProtocolError:
        return record
