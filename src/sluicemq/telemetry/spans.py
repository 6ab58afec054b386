"""OpenTelemetry spans from the trace records that clients have written.

    Pub                    span `send TOPIC`, of a producer
    SubBefore, SubAfter    span `process TOPIC`, of a consumer, child of the send
    EndTransaction         span `commit`, `rollback` or `undecided TOPIC`, child of the send
    Recall                 span `recall TOPIC`, child of the send

Span ids are computed from the contents of the records. All exporters therefore make the same ids,
in any order of records, and again after a crash. The trace id of a message is its message id if
that is 32 hexadecimal digits, as all clients make them, and a hash otherwise. `sluice trace ID` and
the page of a tracing backend at the same id thus show the same message. A message with a
`traceparent` property belongs to that trace instead. Trace records do not contain properties, so
the caller has to look it up.

A delivery is two records with the same request id. A delivery that has begun waits in memory for
its end, for a limited time. An end without a beginning makes a span by itself. Consumers' records
do not contain the topic: it is known if the record of the send was seen before.

Attributes follow OpenTelemetry's semantic conventions for messaging. Those that begin with
`sluicemq.` are SluiceMQ's own.

All functions but `exportable` are pure.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from sluicemq.model.trace_records import (
    ConsumeOutcome,
    ConsumeTrace,
    DeliveryTrace,
    RecallTrace,
    SendTrace,
    TraceRecord,
    TransactionTrace,
    record_of_message,
)
from sluicemq.telemetry.otlp import NS_PER_MS, SCOPE, make_resource

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

KNOWN_MAX: Final = 50_000
"""The number of sends that are remembered for their deliveries."""
BEGUN_MAX: Final = 20_000
"""The number of deliveries that wait for their end."""
BEGUN_MS: Final = 15 * 60_000
"""RocketMQ's consumeTimeout. A delivery whose end is still missing then becomes a span."""
_TYPES: Final = ("normal", "transaction", "transaction", "delay", "fifo")
"""OpenTelemetry's names of message types, by MessageKind."""
_ENDS: Final = {"COMMIT_MESSAGE": "commit", "ROLLBACK_MESSAGE": "rollback"}
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_MESSAGE_ID: Final = re.compile(r"[0-9A-Fa-f]{32}")
Kind = Literal["PRODUCER", "CONSUMER", "CLIENT"]


class Span(NamedTuple):
    """One span. `parent_id` is 0 if the span has no parent.

    `service` is the group of the client that wrote the record. `error` says why the operation
    failed, None if it succeeded.
    """

    service: str | None
    name: str
    kind: Kind
    trace_id: int
    span_id: int
    parent_id: int
    begin_ms: int
    end_ms: int
    attributes: dict[str, Any]
    error: str | None = None


class TraceContext(NamedTuple):
    """The trace of a message, the parent of its send there (0 for none), and its topic and tags.

    Topic and tags are None until the record of the send is seen.
    """

    trace_id: int
    parent_id: int = 0
    topic: str | None = None
    tags: str | None = None


class SpanBuilder:
    """Builds spans from trace records as they arrive."""

    def __init__(self) -> None:
        """Create a builder that has not seen any records."""
        self._context_by_message_id: OrderedDict[str, TraceContext] = OrderedDict()
        """The contexts of the newest sends, KNOWN_MAX at most."""
        self._open_deliveries: OrderedDict[tuple[str | None, str | None], DeliveryTrace] = (
            OrderedDict()
        )
        """The deliveries that wait for their end, by request id and message id."""

    def __len__(self) -> int:
        """Return the number of deliveries that wait for their end."""
        return len(self._open_deliveries)

    def spans(
        self, records: Iterable[TraceRecord], now_ms: int, traceparents: Mapping[str, str] = {}
    ) -> Iterator[Span]:
        """Yield the spans that these trace records complete.

        A delivery has two records, for its begin and its end. If the end has not arrived within
        `BEGUN_MS`, the span is yielded without it. `now_ms` is the current time. `traceparents` has
        the property traceparent of messages by message id.
        """
        for record in records:
            match record:
                case SendTrace():
                    yield from self._build_send_spans(record, traceparents)
                case DeliveryTrace():
                    self._open_deliveries[record.request_id, record.message_id] = record
                case ConsumeTrace():
                    key = (record.request_id, record.message_id)
                    first_record = self._open_deliveries.pop(key, record)
                    yield self._build_delivery_span(first_record, record)
                case TransactionTrace():
                    yield self._build_transaction_span(record)
                case RecallTrace():
                    yield self._build_recall_span(record)
        yield from self._end_old_deliveries(now_ms)

    def _end_old_deliveries(self, now_ms: int) -> Iterator[Span]:
        """Yield the spans of deliveries that still have no end, if they are too old or too many.

        A delivery is too old after `BEGUN_MS`. At most `BEGUN_MAX` deliveries are kept, the newest
        ones.
        """
        for key, delivery in list(self._open_deliveries.items()):
            is_recent = now_ms - delivery.time_ms < BEGUN_MS
            if is_recent and len(self._open_deliveries) <= BEGUN_MAX:
                break
            yield self._build_delivery_span(self._open_deliveries.pop(key), None)

    def _build_transaction_span(self, record: TransactionTrace) -> Span:
        """Return the span of the commit or rollback of a transaction. It has no duration.

        `sluicemq.asked` says whether the producer answered a check by the broker.
        """
        verb = _ENDS.get(record.state or "", "undecided")
        attributes = {
            "messaging.operation.type": "settle",
            "sluicemq.asked": record.from_check,
        }
        return self._build_child(verb, "CLIENT", record, record.time_ms, record.time_ms, attributes)

    def _build_recall_span(self, record: RecallTrace) -> Span:
        """Return the span of the recall of a timed message. It has no duration.

        A failed recall has the error "recall_failed".
        """
        error = None if record.success else "recall_failed"
        return self._build_child(
            "recall", "CLIENT", record, record.time_ms, record.time_ms, {}, error
        )

    def _build_send_spans(
        self, record: SendTrace, traceparents: Mapping[str, str]
    ) -> Iterator[Span]:
        """Yield a span for each message in the record of a send.

        The record of a batch from a Java client is about several messages.
        """
        message_ids = (record.message_id or "").split(",")
        for message_id in message_ids:
            send = record_of_message(record, message_id, None)
            assert isinstance(send, SendTrace)
            context = self._remember_context(send, message_id, traceparents)
            # A failed send may be repeated with the same message id: its time distinguishes it.
            identity = (message_id,) if send.success else (message_id, send.time_ms)
            yield _build_span(
                "send",
                "PRODUCER",
                send,
                context,
                identity=identity,
                parent_id=context.parent_id,
                begin_ms=send.time_ms,
                end_ms=send.time_ms + send.cost_ms,
                more_attributes=_describe_send(send, len(message_ids)),
                error=None if send.success else "send_failed",
            )

    def _remember_context(
        self, send: SendTrace, message_id: str, traceparents: Mapping[str, str]
    ) -> TraceContext:
        """Return the trace context of a message, and store it for the spans of its deliveries.

        The context comes from the message's traceparent if it has one. Otherwise its trace id is
        made from the message id.
        """
        context = parse_traceparent(traceparents.get(message_id, ""))
        if context is None:
            context = TraceContext(_trace_id(message_id))
        context = context._replace(topic=send.topic, tags=send.tags)
        self._context_by_message_id[message_id] = context
        if len(self._context_by_message_id) > KNOWN_MAX:
            self._context_by_message_id.popitem(last=False)
        return context

    def _build_delivery_span(
        self, first_record: DeliveryTrace | ConsumeTrace, end_record: ConsumeTrace | None
    ) -> Span:
        """Return the span of a delivery.

        `first_record` is the record of its begin, and `end_record` the record of its end, None if
        it is missing. If the record of the begin is missing, both are the record of the end.
        """
        cost_ms = end_record.cost_ms if end_record is not None else 0
        if isinstance(first_record, DeliveryTrace):
            begin_ms = first_record.time_ms
            retry_times = first_record.retry_times
        else:
            # The records of RocketMQ's cloud edition that end a delivery have no time.
            begin_ms = (first_record.time_ms or cost_ms) - cost_ms
            retry_times = None
        end_ms = begin_ms + cost_ms
        if end_record is not None and end_record.time_ms:
            end_ms = end_record.time_ms
        attributes = {
            "messaging.operation.type": "process",
            "messaging.consumer.group.name": first_record.group,
            "sluicemq.request_id": first_record.request_id,
            "sluicemq.reconsume_times": retry_times,
        }
        error = _find_delivery_error(end_record)
        return self._build_child(
            "process", "CONSUMER", first_record, begin_ms, end_ms, attributes, error
        )

    def _build_child(
        self,
        verb: str,
        kind: Kind,
        record: DeliveryTrace | ConsumeTrace | TransactionTrace | RecallTrace,
        begin_ms: int,
        end_ms: int,
        more_attributes: Mapping[str, Any],
        error: str | None = None,
    ) -> Span:
        """Return a span whose parent is the span of the send of the same message.

        `verb` names the operation, such as "process". The span lasts from `begin_ms` to `end_ms`,
        in ms since 1970. `error` says why the operation failed; None means that it succeeded.
        """
        message_id = record.message_id or ""
        context = self._context_by_message_id.get(message_id)
        if context is None:
            context = TraceContext(
                _trace_id(message_id),
                topic=getattr(record, "topic", None),
                tags=getattr(record, "tags", None),
            )
        # What distinguishes this span from others of the same verb and message.
        distinction: object = record.time_ms
        if isinstance(record, DeliveryTrace | ConsumeTrace):
            distinction = record.request_id
        return _build_span(
            verb,
            kind,
            record,
            context,
            identity=(message_id, distinction),
            parent_id=_span_id("send", message_id),
            begin_ms=begin_ms,
            end_ms=max(begin_ms, end_ms),
            more_attributes=more_attributes,
            error=error,
        )


def _describe_send(send: SendTrace, batch_size: int) -> dict[str, Any]:
    """Return the attributes of the span of a sent message.

    `batch_size` is the number of messages in the same request.
    """
    return {
        "messaging.operation.type": "send",
        "messaging.message.body.size": send.body_length,
        "messaging.rocketmq.message.type": _TYPES[send.kind],
        "messaging.batch.message_count": batch_size if batch_size > 1 else None,
        "sluicemq.offset_message_id": send.offset_message_id,
        "server.address": send.store_host,
        "client.address": send.client_host,
    }


def _find_delivery_error(end_record: ConsumeTrace | None) -> str | None:
    """Return why a delivery failed, or None if it succeeded.

    If there is no record of its end, return "no_end_traced".
    """
    if end_record is None:
        return "no_end_traced"
    if end_record.success:
        return None
    # A record may report a failure together with the outcome SUCCESS.
    is_contradictory = end_record.outcome is ConsumeOutcome.SUCCESS
    return "failed" if is_contradictory else end_record.outcome.name.lower()


def _build_span(
    verb: str,
    kind: Kind,
    record: TraceRecord,
    context: TraceContext,
    *,
    identity: tuple[object, ...],
    parent_id: int,
    begin_ms: int,
    end_ms: int,
    more_attributes: Mapping[str, Any],
    error: str | None,
) -> Span:
    """Return a span of a trace record.

    `identity` is the message id, followed by values that distinguish the span from others with the
    same `verb` and message. The id of the span is a hash of these. `parent_id` is 0 for a span
    without parent. Attributes whose value is None are left out.
    """
    keys = getattr(record, "keys", None)
    attributes = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": verb,
        "messaging.destination.name": context.topic,
        "messaging.message.id": identity[0],
        "messaging.rocketmq.message.tag": context.tags,
        "messaging.rocketmq.message.keys": keys.split() if keys else None,
        "messaging.rocketmq.client_group": record.group,
        "error.type": error,
        **more_attributes,
    }
    known_attributes = {name: value for name, value in attributes.items() if value is not None}
    return Span(
        service=record.group,
        name=f"{verb} {context.topic or ''}".rstrip(),
        kind=kind,
        trace_id=context.trace_id,
        span_id=_span_id(verb, *identity),
        parent_id=parent_id,
        begin_ms=begin_ms,
        end_ms=end_ms,
        attributes=known_attributes,
        error=error,
    )


def parse_traceparent(traceparent: str) -> TraceContext | None:
    """Return the trace context in a W3C traceparent header, or None if the header is invalid."""
    header = _TRACEPARENT.fullmatch(traceparent.strip())
    if header is None:
        return None
    trace_id = int(header[1], 16)
    parent_id = int(header[2], 16)
    if not trace_id or not parent_id:
        return None  # 0 is not a valid id
    return TraceContext(trace_id, parent_id)


def _trace_id(message_id: str) -> int:
    """Return the trace id of a message that has no traceparent.

    It is the message id as a number if that has the length of a trace id, or else a hash.
    """
    if _MESSAGE_ID.fullmatch(message_id):
        trace_id = int(message_id, 16)
        if trace_id:  # 0 is not a valid id
            return trace_id
    return int.from_bytes(sha256(message_id.encode()).digest()[:16])


def _span_id(*parts: object) -> int:
    """Return the span id that these values determine: the first 8 bytes of their SHA-256."""
    joined = "\x01".join(map(str, parts))
    return int.from_bytes(sha256(joined.encode()).digest()[:8])


def exportable(spans: Iterable[Span]) -> "list[ReadableSpan]":
    """Return the spans as objects that OpenTelemetry's exporter accepts (extra `otlp`).

    The service of each span is the group of its client.
    """
    from opentelemetry.sdk.util.instrumentation import (  # noqa: PLC0415 - an optional extra
        InstrumentationScope,
    )

    scope = InstrumentationScope(SCOPE)
    resource_of = cache(make_resource)
    return [_to_readable_span(span, resource_of(span.service), scope) for span in spans]


def _to_readable_span(
    span: Span, resource: "Resource", scope: "InstrumentationScope"
) -> "ReadableSpan":
    """Return a span as an object of OpenTelemetry.

    `resource` describes the service that made it, and `scope` this library.
    """
    from opentelemetry import trace  # noqa: PLC0415 - an optional extra
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415 - an optional extra

    parent = _to_span_context(span.trace_id, span.parent_id) if span.parent_id else None
    status = trace.Status()
    if span.error:
        status = trace.Status(trace.StatusCode.ERROR, span.error)
    return ReadableSpan(
        span.name,
        _to_span_context(span.trace_id, span.span_id),
        parent,
        resource,
        span.attributes,
        kind=trace.SpanKind[span.kind],
        status=status,
        start_time=span.begin_ms * NS_PER_MS,
        end_time=span.end_ms * NS_PER_MS,
        instrumentation_scope=scope,
    )


def _to_span_context(trace_id: int, span_id: int) -> "SpanContext":
    """Return the ids of a span as an object of OpenTelemetry, marked as sampled and not remote."""
    from opentelemetry import trace  # noqa: PLC0415 - an optional extra

    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    return trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)
