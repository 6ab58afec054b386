"""Pull handlers: PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361), with long polling and bulk answers.

A pull passes through three stages: `PullChecks.prepare` decides whether it is allowed and which
filter applies, `_read_store` reads messages, and the `_encode_*` methods build the answer. The
checks run in the order of RocketMQ's broker (spec/remoting.md §13), because clients choose their
reaction by the response code.

A pull that finds no messages may be parked. It is retried when messages of its queue become
visible, from the offset at which its last read ended, and is answered when a message matches.

A member of a group with lanes first asks its lane what to do (`lanes/table.py`), and then reads
with the filter rule of that lane. A read never crosses the border between two rules; the next pull
continues behind it.

Plain pulls take the fast path (`PullHandlers.pull_fast_path`), and repeated pulls are handled by
the compiled engine (`engine/pulls.pyx`). Both hand every other pull to `PullHandlers.pull`.

Three request fields are SluiceMQ's own, and a Java broker ignores them:

    sluiceBulk=true      the answer holds up to `maxMsgBytes` bytes, at most sluiceBulkPullBytesMax,
                         instead of 32 messages (`PullChecks._reserve_bulk_bytes`)
    sluiceAnySpan=true   the reader is a SluiceMQ client (`pull_checks.ANY_SPAN_FIELD`)
    sluiceLook=true      a probe for the message at one offset (`PullHandlers._answer_probe`)
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import orjson

from sluicemq import engine
from sluicemq.broker.background import retry_after
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.filters import RequestFilters
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull_checks import (
    ANY_SPAN_FIELD,
    FLAG_COMMIT_OFFSET,
    FLAG_SUBSCRIPTION,
    FLAG_SUSPEND,
    PROBE_FIELD,
    PullChecks,
    PullContext,
    PullRefusedError,
)
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Parked, Postponed
from sluicemq.broker.lanes.filters import get_rule_filter
from sluicemq.broker.lanes.table import READ, PullAction, PullDecision, note_delivery
from sluicemq.broker.topics import make_no_topic_error
from sluicemq.model.topic import MASTER_ID, GroupConfig
from sluicemq.net.dispatch import Peer, RunEngine
from sluicemq.store.gather import UNLIMITED, PostponedError, SpanLimit
from sluicemq.store.log import PLACEHOLDER_CODE
from sluicemq.store.read import TAG_SCAN_MAX, ReadResult, ReadStatus
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import SERVER_LANGUAGE, VERSION, Command, encode_response
from sluicemq.wire.headers import PullMessageRequest, PullMessageResponse

SUSPEND_MS_MAX: Final = 10 * 60_000
"""The longest time in milliseconds for which a pull may ask to be parked."""
LANE_WAIT_S: Final = 1.0
"""The time in seconds after which a pull that waits for its lane is answered without messages.

The client's next pull then carries the offset that it has committed by that time.
"""
UNJOINED_BYTES_MIN: Final = 512 * 1024
"""Answers of at least this many bytes are written in pieces.

Copying larger ones into fresh memory costs more than sending them.
"""

FAST_PATH_FIELDS_MAX: Final = 32
"""The fast path hands pulls with more header fields to the general path."""
_FOUND: Final = ReadStatus.FOUND
_FRAME_PREFIX: Final = struct.Struct(">II")
# Bytes rather than a string: formatting bytes takes 60 % of the time of a string.
_ANSWER_HEADER: Final = (
    '{"code":%d,"extFields":{"suggestWhichBrokerId":"%d","groupSysFlag":"%d",'
    '"nextBeginOffset":"%d","maxOffset":"%d","minOffset":"%d","topicSysFlag":"%d"},'
    f'"flag":1,"language":"{SERVER_LANGUAGE}","opaque":%d,"remark":"%b",'
    f'"serializeTypeCurrentRPC":"JSON","version":{VERSION}}}'
).encode()
_PLACEHOLDERS: Final = (1 << 60, 1 << 61, 1 << 62, (1 << 62) + 1)
"""Unlikely numbers that mark, in an encoded answer, the places of the numbers of each pull."""
_CODE_BY_STATUS: Final = {
    ReadStatus.FOUND: ResponseCode.SUCCESS,
    ReadStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}
"""The response code for each status of a read of a queue that is not empty.

The other statuses mean an empty queue: see `_EMPTY_QUEUE_CODES`.
"""
_SCANNED_STATUSES: Final = ReadStatus.NO_MATCHED_MESSAGE, ReadStatus.MESSAGE_WAS_REMOVING
"""Statuses of reads that examined messages and returned none."""
_EMPTY_QUEUE_CODES: Final = (ResponseCode.PULL_OFFSET_MOVED, ResponseCode.PULL_NOT_FOUND)
"""Response codes for an empty queue, indexed by whether the requested offset is 0."""

_DECISION_ANSWERS: Final = {
    PullAction.REDIRECT: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET"),
    PullAction.WAIT: (ResponseCode.PULL_NOT_FOUND, "LANE_CHANGES"),
    PullAction.RETRY: (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
}
"""Response code and remark for a pull that may not read now, by what its lane or a reset demands.

REDIRECT: the group was sent to another offset of the queue. WAIT: the lane will go back once the
messages in flight are committed. RETRY: the client must pull again.
"""


class PullHandlers(BrokerComponent):
    """Request handlers for PULL_MESSAGE (11) and LITE_PULL_MESSAGE (361).

    `found_count` and `missed_count` count the answers with and without messages since the start.
    """

    def __init__(
        self,
        context: BrokerContext,
        *,
        consumers: Consumers,
        polls: LongPolls,
        deliveries: DeliveryStates,
        filters: RequestFilters,
    ) -> None:
        """Create the handlers.

        `consumers` has the members of groups with their filters and lanes, `polls` parks pulls,
        `deliveries` counts what groups receive, and `filters` caches the filters of expressions in
        requests.
        """
        super().__init__(context)
        self.consumers = consumers
        self.polls = polls
        self.call_soon = context.call_soon
        self.background = context.background
        self.deliveries = deliveries
        self.filters = filters
        self.scheduler = context.scheduler
        self.call_later = context.call_later
        """Calls a function after a delay in seconds. None means that pulls are never delayed."""
        self.has_master: Callable[[], bool] = lambda: False
        """Returns whether this broker is a slave that currently follows a master."""
        self.found_count = 0
        self.missed_count = 0
        self.compiled: Any = None
        """The compiled engine's `Pulls`, which handles repeated pulls; None without the engine."""
        self._lanes = self.consumers.lanes.table
        self.checks = PullChecks(
            settings=self.settings,
            topics=self.topics,
            groups=self.groups,
            consumers=self.consumers,
            deliveries=self.deliveries,
            filters=self.filters,
            call_soon=self.call_soon,
        )

    def pull(self, command: Command, peer: Peer) -> bytes | Command | Parked | Postponed | None:
        """Answer PULL_MESSAGE (11) or LITE_PULL_MESSAGE (361).

        Return the encoded answer. For an error or a probe, return a Command. Return Parked if the
        pull waits for messages, and Postponed if its filter takes long. Return None after writing a
        large answer to `peer` in pieces. Raises KeyError, TypeError, ValueError or RequestError for
        a malformed header. Called for every pull: keep it cheap.
        """
        # If the compiled engine has just stopped before this pull because it had no plan for it,
        # claim the (key, header) of the pull now: after another return it would be claimed for a
        # later pull. The plan is saved at the end, so only a pull that was allowed and found
        # messages gets one.
        missed_pull = None if self.compiled is None else self.compiled.claim()
        try:
            context = PullContext(command.fields, peer)
            self.checks.prepare(context)
            if PROBE_FIELD in context.fields:
                return self._answer_probe(context, command)
            sys_flag = context.sys_flag
            committed = int(context.fields["commitOffset"]) if sys_flag & FLAG_COMMIT_OFFSET else -1
            context.commit_offset = committed if committed >= 0 else None

            answer = self._answer_without_reading(context, command)
            if answer is not None:
                return answer
            if committed >= 0 and context.group not in self._lanes:
                self.offsets.commit(context.group, *context.queue, committed)

            read_result = self._read_store(context, context.offset)
            if read_result.status is not _FOUND:
                return self._answer_or_park(context, command, read_result)
        except PullRefusedError as refusal:
            forbidden_kind = refusal.forbidden_kind
            fields = {} if forbidden_kind is None else {"forbiddenType": str(forbidden_kind)}
            return Command(refusal.code, fields, remark=refusal.remark)
        except PostponedError as postponed:
            return Postponed(retry_after(postponed.work, partial(self.pull, command, peer)))
        except (KeyError, TypeError, ValueError):
            # This raises an error that names the field.
            decode_header(PullMessageRequest, command.fields)
            raise

        if missed_pull is not None:
            self._save_plan(missed_pull, context, command)
        answer_pieces = self._encode_found(context, command.opaque, read_result)
        if read_result.size_bytes < UNJOINED_BYTES_MIN:
            return b"".join(answer_pieces)
        peer.write_buffers(answer_pieces)
        return None

    def _answer_probe(self, context: PullContext, command: Command) -> bytes | Command:
        """Return the answer to a pull with the field `sluiceLook`: the message at its offset.

        A reader sends such a probe to find out whether the queue is the one that it has read
        before. Resets, lanes and filters are ignored, and nothing changes for the group. If the
        offset has no message, the answer has the reason and the bounds of the queue.
        """
        read_result = self.store.reader.read(*context.queue, context.offset, 1, None, None)
        if read_result.status is _FOUND:
            fields = PullMessageResponse(
                broker_id_suggested=0,
                next_offset=read_result.next_offset,
                offset_min=read_result.offset_min,
                offset_max=read_result.offset_max,
            )
            return Command(
                ResponseCode.SUCCESS,
                encode_header(fields),
                b"".join(read_result.data),
                remark="FOUND",
            )
        code = self._choose_code(context, read_result, context.offset)
        bounds = (read_result.next_offset, read_result.offset_max, read_result.offset_min)
        return self._encode_empty(context, command.opaque, code, bounds, read_result.status.name)

    def pull_fast_path(self, header: dict[str, Any], body: bytes, peer: Peer) -> bool | bytes:
        """Answer a plain PULL_MESSAGE (11) for which messages exist.

        A pull is plain if its queue has messages from its offset on, its filter is by tags or
        missing, and its group exists and has no lanes and no pending reset. `header` is the decoded
        JSON header; the body of a pull is not used. Return the encoded answer, True if it was
        written to `peer` in pieces, or False for every request that `pull` has to handle. The time
        it takes is charged to the share of the connection, like that of every request. Called for
        every pull: keep it cheap.
        """
        scheduler = self.scheduler
        try:
            context = PullContext(header["extFields"], peer)
            fields = context.fields
            opaque = header["opaque"]
            offset = context.offset
            resets = self.offsets.resets.table
            queue = self.store.writer.by_key.get(context.queue)
            if (
                queue is None
                or not queue.offset_min <= offset < queue.visible_offset
                or context.group not in self.groups.table
                or context.group in self._lanes
                or (resets and (context.group, *context.queue) in resets)
                or "sluiceBulk" in fields
                or PROBE_FIELD in fields
                or len(fields) > FAST_PATH_FIELDS_MAX
                or header["flag"] != 0
                or opaque.__class__ is not int
                or not 0 <= opaque <= 0x7FFFFFFF
                or (scheduler.is_tight and scheduler.has_to_wait(peer))
            ):
                return False
            begin_s = scheduler.now_s()
            self.checks.prepare(context)
            if context.filter is not None and context.filter.reads_properties:
                return False
            committed = -1
            if context.sys_flag & FLAG_COMMIT_OFFSET:
                committed = int(fields["commitOffset"])
            context.commit_offset = committed if committed >= 0 else None
        except (PullRefusedError, PostponedError, KeyError, TypeError, ValueError):
            return False

        if committed >= 0:
            self.offsets.commit(context.group, *context.queue, committed)
        read_result = self._read_store(context, offset)
        answer: bool | bytes = True
        if read_result.status is _FOUND:
            answer_pieces = self._encode_found(context, opaque, read_result)
            if read_result.size_bytes < UNJOINED_BYTES_MIN:
                answer = b"".join(answer_pieces)
            else:
                peer.write_buffers(answer_pieces)
        elif _is_out_of_reach(context, read_result):
            return False  # the general path delays it
        else:
            code = self._choose_code(context, read_result, offset)
            if code == ResponseCode.PULL_NOT_FOUND:
                return False  # the general path may park it
            answer = self._encode_not_found(context, opaque, code, read_result)
        scheduler.spent(peer, begin_s, RequestCode.PULL_MESSAGE)
        return answer

    def make_frame_runner(self, sends: Callable[..., int]) -> RunEngine:
        """Return the function that handles repeated pulls, and plain sends, from received bytes.

        `sends(data, position, peer)` handles the sends at the beginning of `data`, from `position`
        on, and returns the position where it stopped. Without the compiled engine the returned
        function calls only `sends`.
        """
        if engine.pulls is None:
            return lambda data, position, peer, scheduler: sends(data, position, peer)
        store = self.store
        self.compiled = engine.pulls.Pulls(
            self, store.reader, store.writer.by_key, store.reader.log, sends, PLACEHOLDER_CODE
        )
        return self.compiled.run  # type: ignore[no-any-return]

    def _save_plan(
        self, missed_pull: tuple[bytes, bytes], context: PullContext, command: Command
    ) -> None:
        """Give the compiled engine a plan, so that it handles further pulls like this one.

        A plan contains everything that is the same for each pull of a client from a queue: group,
        topic, filter, limits, and the answer's header with gaps for the numbers of each pull.
        `missed_pull` is the (key, header) of the last pull for which the engine had no plan. Do
        nothing if that is not the pull of `command`, or if the engine cannot handle such pulls.
        """
        key, header = missed_pull
        missed_header = orjson.loads(header)
        is_this_pull = (
            missed_header["opaque"] == command.opaque
            and missed_header["flag"] == 0
            and missed_header["extFields"] == command.fields
        )
        # The engine does not know bulk pulls, slaves that serve readers, and lanes.
        is_excluded = (
            context.bytes_max is not None
            or self.settings.broker.slave_read
            or context.group in self._lanes
            or context.group not in self.groups.table
        )
        if not is_this_pull or is_excluded:
            return
        plan = self._make_plan(context)
        if plan is not None:
            self.compiled.remember(key, plan)

    def _make_plan(self, context: PullContext) -> Any:
        """Return the engine's plan for a pull, whose group must exist.

        Return None if the engine does not know the filter, or cannot return as many messages.
        """
        assert engine.pulls is not None, "the engine has reported a missed pull"
        reader = self.store.reader
        message_filter = context.filter
        # Tag codes are compared without the message; a scan evaluates columns in memory.
        codes = None
        scan = None
        if message_filter is not None:
            codes = reader.tag_codes_only(message_filter)
            if codes is None:
                scan = reader.cached_column_scan(message_filter)
            if codes is None and scan is None:
                return None
        is_sluice_client = ANY_SPAN_FIELD in context.fields
        count_max = min(max(context.count_max, 1), reader.memory_count_max[is_sluice_client])
        if count_max > engine.pulls.count_max:
            return None

        plan = engine.pulls.Plan()
        plan.group = context.group
        plan.topic = context.topic
        plan.queue = context.queue
        plan.config = self.groups.table[context.group]
        plan.found_topic = self.topics.table[context.topic]
        plan.topic_config = plan.found_topic.config
        plan.broker = self.settings.broker
        plan.delivered = context.delivery
        plan.scan = scan
        plan.codes = codes
        if scan is not None:
            plan.codes = message_filter.vectorised  # type: ignore[union-attr]
        plan.any_span = is_sluice_client
        if not context.sys_flag & FLAG_SUBSCRIPTION:
            plan.members = self.consumers.groups[context.group]
            plan.watch = plan.members.subscriptions[context.topic]
            plan.model = plan.members.message_model
        plan.commits = bool(context.sys_flag & FLAG_COMMIT_OFFSET)
        plan.count_max = count_max
        plan.bytes_max = min(reader.config.max_transfer_bytes_memory, UNJOINED_BYTES_MIN - 1)
        plan.scan_max = reader.config.filter_scan_units_max
        if scan is None:
            plan.scan_max = min(plan.scan_max, TAG_SCAN_MAX)
        plan.answer = _split_answer_header(*context.sys_flags)
        return plan

    def _answer_or_park(
        self, context: PullContext, command: Command, read_result: ReadResult
    ) -> bytes | Parked | Postponed:
        """Return the answer to a read without messages, or the pull to be parked.

        - Postponed, if a slow filter must be evaluated first. The pull is then repeated.
        - A delayed pull, if the client has unprocessed messages too far before the first match.
        - Parked, at the end of the queue, if the client allows it (FLAG_SUSPEND).
        - Otherwise the encoded answer without messages.

        Called for every pull that reaches the end of a queue: keep it cheap.
        """
        if read_result.postponed is not None:
            return Postponed(
                retry_after(read_result.postponed, partial(self.pull, command, context.peer))
            )
        if _is_out_of_reach(context, read_result):
            return self._delay_match(context, command)
        code = self._choose_code(context, read_result, context.offset)
        if code != ResponseCode.PULL_NOT_FOUND or not context.sys_flag & FLAG_SUSPEND:
            return self._encode_not_found(context, command.opaque, code, read_result)
        wait_ms = min(max(int(context.fields["suspendTimeoutMillis"]), 0), SUSPEND_MS_MAX)
        config = self.settings.broker
        if not config.long_polling_enable:
            wait_ms = config.short_polling_ms
        return Parked(
            command,
            queues=(context.queue,),
            scan_offset=read_result.next_offset,
            deadline_s=self.clock.monotonic_s() + wait_ms / 1000,
            try_answer=partial(self._retry_parked, context),
        )

    def _delay_match(self, context: PullContext, command: Command) -> bytes | Parked:
        """Delay a pull, so that the client can process messages before it gets the next match.

        The client would pause if unprocessed messages were too far before the match. Return Parked,
        and schedule the retry, which delivers the match, after some milliseconds. Without timers
        (`call_later` is None), return the encoded answer with the match at once.
        """
        delay_s = context.delivery.span_estimator.record_delay(context.queue_id)
        parked = Parked(
            command,
            queues=(context.queue,),
            scan_offset=context.offset,
            deadline_s=self.clock.monotonic_s() + delay_s,
            try_answer=partial(self._retry_parked, context),
        )
        if self.call_later is None:
            return self._retry_parked(context, parked, is_last=True) or b""
        self.call_later(delay_s, partial(self.polls.retry, parked, context.peer))
        return parked

    def _answer_without_reading(
        self, context: PullContext, command: Command
    ) -> bytes | Parked | None:
        """Return the answer to a pull that may not read because of its lane or a reset, else None.

        A pull that waits for its lane is returned as Parked if the client allows it. Called for
        every pull: keep it cheap.
        """
        if context.group not in self._lanes:
            resets = self.offsets.resets.table
            has_reset = resets and (context.group, *context.queue) in resets
            if not has_reset:
                return None
        decision = self._decide_action(context)
        if decision.action is PullAction.WAIT and context.sys_flag & FLAG_SUSPEND:
            return Parked(
                command,
                queues=(context.queue,),
                scan_offset=context.offset,
                deadline_s=self.clock.monotonic_s() + LANE_WAIT_S,
                try_answer=partial(self._retry_parked, context),
            )
        if decision.action is PullAction.READ:
            return None
        return self._encode_decision(context, command.opaque, decision)

    # --------------------------------------------------------------------- resets and lanes

    def _decide_action(self, context: PullContext, *, is_parked: bool = False) -> PullDecision:
        """Return what a pull must do next (read, wait, …) if its group has lanes or was reset.

        The commit that comes with a new pull is applied before the lane decides. `is_parked` says
        that the pull was parked before, so its commit has been applied already.
        """
        lane = self.consumers.lane_of(context.group, context.peer, context.fields)
        if lane is None:
            new_offset = self.offsets.resets.redirect(
                context.group, *context.queue, context.offset, is_parked=is_parked
            )
            if new_offset is None:
                return READ
            return PullDecision(PullAction.REDIRECT, offset=new_offset)
        if is_parked:
            return lane.retry_pull(context.queue, context.offset, context.lane_key)
        if context.commit_offset is not None:
            lane.commit(context.queue, context.commit_offset)
        decision = lane.start_pull(context.queue, context.offset)
        context.lane_key = decision.lane_key
        return decision

    def _encode_decision(self, context: PullContext, opaque: int, decision: PullDecision) -> bytes:
        """Return the encoded answer to a pull that may not read because of `decision`.

        For a redirected pull, also record the new offset as the one that the group fetches next.
        """
        code, remark = _DECISION_ANSWERS[decision.action]
        offset = context.offset if decision.action is PullAction.WAIT else decision.offset
        if decision.action is PullAction.REDIRECT:
            context.delivery.fetched_offsets[context.queue_id] = offset
        low, high = self.store.queue_offsets(*context.queue)
        return self._encode_empty(context, opaque, code, (offset, high, low), remark)

    # ------------------------------------------------------------------------------- reading

    def _read_store(self, context: PullContext, offset: int, is_parked: bool = False) -> ReadResult:
        """Read the store from `offset` on with the filter and the limits of the pull.

        A member of a lane reads with the rule of its lane, and not beyond the offset at which the
        rule changes. Another reader with a filter reads with a span limit. `is_parked` says that
        the pull was parked and is retried.

        Also update the state of the group: count filtered messages, record the read for the span
        estimate or the lane, and note the range if the filter may have failed there. Called for
        every pull: keep it cheap.
        """
        delivery = context.delivery
        message_filter = context.filter
        committed = context.commit_offset
        count_max = context.count_max if context.count_max > 0 else 1
        is_sluice_client = ANY_SPAN_FIELD in context.fields
        span_limit = scan_max = lane_queue = estimator = None
        if context.group in self._lanes:
            lane = self.consumers.lane_of(context.group, context.peer, context.fields)
            lane_queue = lane.get_lane_queue(context.queue) if lane is not None else None

        # Choose the filter and the limits.
        if lane_queue is not None:
            rule, rule_end = lane_queue.find_rule(offset)
            message_filter = get_rule_filter(rule)
            if rule_end is not None:
                scan_max = rule_end - offset
                count_max = min(count_max, scan_max)
            span_limit = None if committed is None else SpanLimit(committed)
        elif message_filter is not None and context.bytes_max is None:
            if is_sluice_client:
                span_limit = SpanLimit(offset, UNLIMITED)
            else:
                estimator = delivery.span_estimator
                if not is_parked:
                    estimator.record_pull(context.queue_id, self.clock.monotonic_s())
                span_limit = estimator.make_span_limit(
                    context.queue_id, offset, committed, is_parked
                )

        read_result = self.store.reader.read(
            context.topic,
            context.queue_id,
            offset,
            count_max,
            context.bytes_max,
            message_filter,
            scan_max,
            span_limit,
            may_postpone=lane_queue is None,
            is_sluice_client=is_sluice_client,
        )

        # Record the read.
        scanned_count = read_result.units_scanned
        delivery.filtered_count += scanned_count - read_result.count
        if lane_queue is not None:
            note_delivery(lane_queue, offset, read_result)
        elif estimator is not None:
            estimator.record_answer(context.queue_id, read_result, self.clock.monotonic_s())
        # A lane's rule has several expressions: `is_sure` says nothing about each of them.
        is_sure = read_result.is_filter_reliable and lane_queue is None
        if scanned_count and not is_sure and message_filter and message_filter.reads_properties:
            scanned_end = offset + scanned_count
            delivery.add_range_to_check(message_filter, context.queue_id, offset, scanned_end)
        return read_result

    # ------------------------------------------------------------------------------- waiting

    def _retry_parked(self, context: PullContext, parked: Parked, is_last: bool) -> bytes | None:
        """Retry a parked pull: return the encoded answer, or None to keep it parked.

        The read begins where the last one ended (`parked.scan_offset`). The answer is an error if
        the topic was deleted. It asks the client to pull again if the filter of the group has
        changed. With `is_last` the pull is always answered, and its next offset is after the
        messages that the filter rejected. b"" means that the answer is written later. Called
        whenever a parked pull is woken: keep it cheap.
        """
        opaque = parked.command.opaque
        if context.topic not in self.topics.table:
            refusal = make_no_topic_error(context.topic)
            return encode_response(parked.command, refusal.code, remark=refusal.remark)
        resets = self.offsets.resets.table
        if context.group in self._lanes or (resets and (context.group, *context.queue) in resets):
            decision = self._decide_action(context, is_parked=True)
            if decision.action is PullAction.WAIT and not is_last:
                return None
            if decision.action is not PullAction.READ:
                return self._encode_decision(context, opaque, decision)
        if not context.sys_flag & FLAG_SUBSCRIPTION:
            members = self.consumers.groups.get(context.group)
            compiled = None if members is None else members.subscriptions.get(context.topic)
            if compiled is not None and compiled.filter is not context.filter:
                # The expression of the group has changed since the pull was parked. RocketMQ's
                # broker reads with the new one, and a Java client drops what does not match the
                # old one. Here the client has to pull again.
                decision = PullDecision(PullAction.RETRY, offset=parked.scan_offset)
                return self._encode_decision(context, opaque, decision)

        read_result = self._read_store(context, parked.scan_offset, is_parked=True)
        if read_result.status is _FOUND:
            return b"".join(self._encode_found(context, opaque, read_result))
        return self._answer_or_keep_parked(context, parked, read_result, is_last)

    def _answer_or_keep_parked(
        self, context: PullContext, parked: Parked, read_result: ReadResult, is_last: bool
    ) -> bytes | None:
        """Return the answer after a retry that found no messages, or None to keep the pull parked.

        Without `is_last` the pull stays parked if it was at the end of the queue or has examined
        messages. It then goes on from the offset at which the read ended; if that is not the end of
        the queue, the next read is scheduled in the background. A slave that has found a master
        answers at once, so that the client asks the master.

        With `is_last` the pull is answered. But if a slow filter has to be evaluated first, no
        message was examined: return b"", and repeat the pull in the background, which writes the
        answer.
        """
        if is_last and read_result.postponed is not None:
            command = parked.command
            peer = context.peer
            steps = retry_after(read_result.postponed, partial(self.pull, command, peer))
            self.background.run_request(steps, command, peer)
            return b""
        is_for_master = read_result.postponed is None and self._is_redirected_to_master(
            context, read_result, parked.scan_offset
        )
        code = self._choose_code(context, read_result, parked.scan_offset)
        if not is_last and not is_for_master:
            if code == ResponseCode.PULL_RETRY_IMMEDIATELY:
                parked.scan_offset = read_result.next_offset
                if read_result.next_offset < read_result.offset_max:
                    parked.is_attempt_pending = True
                    steps = self.polls.retry_after(parked, context.peer, read_result.postponed)
                    self.background.run_in_background(steps, context.peer)
                return None
            if code == ResponseCode.PULL_NOT_FOUND:
                return None
        elif code == ResponseCode.PULL_NOT_FOUND and read_result.next_offset > context.offset:
            code = ResponseCode.PULL_RETRY_IMMEDIATELY
            read_result.status = ReadStatus.NO_MATCHED_MESSAGE
        return self._encode_not_found(context, parked.command.opaque, code, read_result)

    # ------------------------------------------------------------------------------- answers

    def _choose_code(self, context: PullContext, read_result: ReadResult, offset: int) -> int:
        """Return the response code for a read that began at `offset`.

        On a slave, `read_result.next_offset` may be changed to `offset`: a slave that serves
        readers (slaveReadEnable) resets no client's offset, unless offsetCheckInSlave is set,
        because its log may be the shorter one. Called for every pull: keep it cheap.
        """
        code = _CODE_BY_STATUS.get(read_result.status) or _EMPTY_QUEUE_CODES[offset == 0]
        settings = self.settings
        if not settings.is_slave:
            return code
        if code == ResponseCode.PULL_OFFSET_MOVED and not settings.broker.offset_check_in_slave:
            read_result.next_offset = offset
            code = ResponseCode.PULL_NOT_FOUND
        if self._is_redirected_to_master(context, read_result, offset):
            return ResponseCode.PULL_RETRY_IMMEDIATELY
        return code

    def _is_redirected_to_master(
        self, context: PullContext, read_result: ReadResult, offset: int
    ) -> bool:
        """Return whether this slave sends a client that found no messages back to its master.

        That is done while a master is reachable and the client is not behind (spec/ha.md §4). With
        sluiceConsensus the slave lets clients wait instead: a client with an old route takes the
        slave for the master, and would ask it again and again.
        """
        settings = self.settings
        if not settings.is_slave or settings.is_failover or not self.has_master():
            return False
        return read_result.status not in _SCANNED_STATUSES or self.store.reader.is_in_memory(
            *context.queue, offset
        )

    def _encode_found(
        self, context: PullContext, opaque: int, read_result: ReadResult
    ) -> list[bytes | memoryview]:
        """Return the encoded answer with the messages of `read_result`, in pieces.

        The caller writes the pieces in order. The counters and the fetched offset of the group are
        updated. Called for every pull: keep it cheap.
        """
        group_flag, topic_flag = context.sys_flags
        broker_id = self._choose_suggested_broker(context) if self.settings.broker.slave_read else 0
        header = _ANSWER_HEADER % (
            0,
            broker_id,
            group_flag,
            read_result.next_offset,
            read_result.offset_max,
            read_result.offset_min,
            topic_flag,
            opaque,
            b"FOUND",
        )
        body_bytes = read_result.size_bytes
        header_bytes = len(header)
        self.found_count += 1
        delivery = context.delivery
        delivery.fetched_offsets[context.queue_id] = read_result.next_offset
        delivery.messages_out += read_result.count
        delivery.bytes_out += body_bytes
        prefix = _FRAME_PREFIX.pack(header_bytes + 4 + body_bytes, header_bytes)
        return [prefix + header, *read_result.data]

    def _encode_not_found(
        self, context: PullContext, opaque: int, code: int, read_result: ReadResult
    ) -> bytes:
        """Return the encoded answer of a read that found no messages.

        The group's fetched offset becomes the next offset of the read.
        """
        status = read_result.status
        if status is ReadStatus.NO_MATCHED_LOGIC_QUEUE:
            status = ReadStatus.NO_MESSAGE_IN_QUEUE  # RocketMQ creates the queue to read it
        context.delivery.fetched_offsets[context.queue_id] = read_result.next_offset
        bounds = (read_result.next_offset, read_result.offset_max, read_result.offset_min)
        return self._encode_empty(context, opaque, code, bounds, status.name)

    def _encode_empty(
        self,
        context: PullContext,
        opaque: int,
        code: int,
        bounds: tuple[int, int, int],
        remark: str,
    ) -> bytes:
        """Return an encoded answer without messages, with `remark`, and count it.

        `bounds` is (next offset, end offset of the queue, first offset of the queue).
        """
        self.missed_count += 1
        group_flag, topic_flag = context.sys_flags
        header = _ANSWER_HEADER % (
            code,
            0,
            group_flag,
            *bounds,
            topic_flag,
            opaque,
            remark.encode(),
        )
        return _FRAME_PREFIX.pack(len(header) + 4, len(header)) + header

    def _choose_suggested_broker(self, context: PullContext) -> int:
        """Return the id of the broker that the client should ask next (spec/ha.md §4).

        If the messages at the requested offset are probably no longer in memory, it is the group's
        `broker_id_when_slow`. Otherwise it is the master on a slave that follows one, else the
        group's `broker_id`.
        """
        group = self.groups.config_of(context.group) or GroupConfig(context.group)
        is_near = self.store.reader.is_in_memory(*context.queue, context.offset)
        if is_near and self.settings.is_slave and self.has_master():
            return MASTER_ID
        return group.broker_id if is_near else group.broker_id_when_slow


def _split_answer_header(group_flag: int, topic_flag: int) -> tuple[bytes, ...]:
    """Return an answer's header, split at the numbers that differ from pull to pull."""
    header = _ANSWER_HEADER % (
        0,
        0,
        group_flag,
        *_PLACEHOLDERS[:3],
        topic_flag,
        _PLACEHOLDERS[3],
        b"FOUND",
    )
    for placeholder in _PLACEHOLDERS:
        header = header.replace(b"%d" % placeholder, b"\0")
    return tuple(header.split(b"\0"))


def _is_out_of_reach(context: PullContext, read_result: ReadResult) -> bool:
    """Return whether the read made no progress because its first match is out of reach."""
    return read_result.is_out_of_reach and read_result.next_offset == context.offset
