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
    from opentelemetry.sdk.trace import ReadableSpan

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
        self._known: OrderedDict[str, TraceContext] = OrderedDict()
        self._begun: OrderedDict[tuple[str | None, str | None], DeliveryTrace] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of deliveries that wait for their end."""
        return len(self._begun)

    def spans(
        self, records: Iterable[TraceRecord], now_ms: int, traceparents: Mapping[str, str] = {}
    ) -> Iterator[Span]:
        """Yield the spans that these records complete.

        Also yield the spans of deliveries whose end has not arrived for `BEGUN_MS`.

        `traceparents` contains the traceparent property of messages that have one, by message id.
        """
        for one in records:
            match one:
                case SendTrace():
                    yield from self._sends(one, traceparents)
                case DeliveryTrace():
                    self._begun[one.request_id, one.message_id] = one
                case ConsumeTrace():
                    yield self._delivery(
                        self._begun.pop((one.request_id, one.message_id), one), one
                    )
                case TransactionTrace():
                    verb = _ENDS.get(one.state or "", "undecided")
                    more = {"messaging.operation.type": "settle", "sluicemq.asked": one.from_check}
                    yield self._child(verb, "CLIENT", one, one.time_ms, one.time_ms, more)
                case RecallTrace():
                    error = None if one.success else "recall_failed"
                    yield self._child("recall", "CLIENT", one, one.time_ms, one.time_ms, {}, error)
        for key, begun in list(self._begun.items()):
            if len(self._begun) <= BEGUN_MAX and now_ms - begun.time_ms < BEGUN_MS:
                break
            yield self._delivery(self._begun.pop(key), None)

    def _sends(self, record: SendTrace, traceparents: Mapping[str, str]) -> Iterator[Span]:
        """Yield a span for each message of a record; a Java batch has several."""
        ids = (record.message_id or "").split(",")
        for message_id in ids:
            one = record_of_message(record, message_id, None)
            assert isinstance(one, SendTrace)
            context = parse_traceparent(traceparents.get(message_id, ""))
            if context is None:
                context = TraceContext(_trace_id(message_id))
            context = context._replace(topic=one.topic, tags=one.tags)
            self._known[message_id] = context
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            # A failed send may be repeated with the same message id: its time distinguishes it.
            attempt = () if one.success else (one.time_ms,)
            yield _span(
                "send",
                "PRODUCER",
                one,
                context,
                own=(message_id, *attempt),
                parent_id=context.parent_id,
                begin_ms=one.time_ms,
                end_ms=one.time_ms + one.cost_ms,
                more={
                    "messaging.operation.type": "send",
                    "messaging.message.body.size": one.body_length,
                    "messaging.rocketmq.message.type": _TYPES[one.kind],
                    "messaging.batch.message_count": len(ids) if len(ids) > 1 else None,
                    "sluicemq.offset_message_id": one.offset_message_id,
                    "server.address": one.store_host,
                    "client.address": one.client_host,
                },
                error=None if one.success else "send_failed",
            )

    def _delivery(self, begun: DeliveryTrace | ConsumeTrace, ended: ConsumeTrace | None) -> Span:
        """Return the span of a delivery.

        `begun` is its first record, `ended` its end, None if it is missing.
        """
        cost_ms = ended.cost_ms if ended is not None else 0
        # The records of RocketMQ's cloud edition that end a delivery have no time.
        begin_ms = (
            begun.time_ms
            if isinstance(begun, DeliveryTrace)
            else (begun.time_ms or cost_ms) - cost_ms
        )
        end_ms = ended.time_ms if ended is not None and ended.time_ms else begin_ms + cost_ms
        error = "no_end_traced" if ended is None else None
        if ended is not None and not ended.success:
            # A record may report a failure together with the outcome SUCCESS.
            is_contradictory = ended.outcome is ConsumeOutcome.SUCCESS
            error = "failed" if is_contradictory else ended.outcome.name.lower()
        more = {
            "messaging.operation.type": "process",
            "messaging.consumer.group.name": begun.group,
            "sluicemq.request_id": begun.request_id,
            "sluicemq.reconsume_times": begun.retry_times
            if isinstance(begun, DeliveryTrace)
            else None,
        }
        return self._child("process", "CONSUMER", begun, begin_ms, end_ms, more, error)

    def _child(
        self,
        verb: str,
        kind: Kind,
        one: DeliveryTrace | ConsumeTrace | TransactionTrace | RecallTrace,
        begin_ms: int,
        end_ms: int,
        more: Mapping[str, Any],
        error: str | None = None,
    ) -> Span:
        """Return a span that is a child of the message's send. `more` are additional attributes."""
        message_id = one.message_id or ""
        topic = getattr(one, "topic", None)
        tags = getattr(one, "tags", None)
        context = self._known.get(message_id) or TraceContext(_trace_id(message_id), 0, topic, tags)
        own = one.request_id if isinstance(one, DeliveryTrace | ConsumeTrace) else one.time_ms
        return _span(
            verb,
            kind,
            one,
            context,
            own=(message_id, own),
            parent_id=_span_id("send", message_id),
            begin_ms=begin_ms,
            end_ms=max(begin_ms, end_ms),
            more=more,
            error=error,
        )


def _span(
    verb: str,
    kind: Kind,
    one: TraceRecord,
    context: TraceContext,
    *,
    own: tuple[object, ...],
    parent_id: int,
    begin_ms: int,
    end_ms: int,
    more: Mapping[str, Any],
    error: str | None,
) -> Span:
    """Return a span of a record.

    `own` is the message id, and what distinguishes the span from others of its verb and message.
    """
    keys = getattr(one, "keys", None)
    attributes = {
        "messaging.system": "rocketmq",
        "messaging.operation.name": verb,
        "messaging.destination.name": context.topic,
        "messaging.message.id": own[0],
        "messaging.rocketmq.message.tag": context.tags,
        "messaging.rocketmq.message.keys": keys.split() if keys else None,
        "messaging.rocketmq.client_group": one.group,
        "error.type": error,
        **more,
    }
    return Span(
        one.group,
        f"{verb} {context.topic or ''}".rstrip(),
        kind,
        context.trace_id,
        _span_id(verb, *own),
        parent_id=parent_id,
        begin_ms=begin_ms,
        end_ms=end_ms,
        attributes={name: value for name, value in attributes.items() if value is not None},
        error=error,
    )


def parse_traceparent(traceparent: str) -> TraceContext | None:
    """Return the context in a W3C traceparent header, None if the header is invalid."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    ids = (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
    return TraceContext(*ids) if all(ids) else None


def _trace_id(message_id: str) -> int:
    """Return the trace id of a message that has no traceparent."""
    number = int(message_id, 16) if _MESSAGE_ID.fullmatch(message_id) else 0
    return number or int.from_bytes(sha256(message_id.encode()).digest()[:16])


def _span_id(*parts: object) -> int:
    """Return the span id that these values determine."""
    text = "\x01".join(map(str, parts))
    return int.from_bytes(sha256(text.encode()).digest()[:8])


def exportable(spans: Iterable[Span]) -> "list[ReadableSpan]":
    """Return the spans for OpenTelemetry's exporter (extra `otlp`).

    The service of each span is the group of its client.
    """
    from opentelemetry import trace  # noqa: PLC0415 - an optional extra
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415 - an optional extra
    from opentelemetry.sdk.util.instrumentation import (  # noqa: PLC0415 - an optional extra
        InstrumentationScope,
    )

    def context(trace_id: int, span_id: int) -> trace.SpanContext:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        return trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags)

    scope = InstrumentationScope(SCOPE)
    resources = cache(make_resource)
    return [
        ReadableSpan(
            it.name,
            context(it.trace_id, it.span_id),
            context(it.trace_id, it.parent_id) if it.parent_id else None,
            resources(it.service),
            it.attributes,
            kind=trace.SpanKind[it.kind],
            status=trace.Status(trace.StatusCode.ERROR, it.error) if it.error else trace.Status(),
            start_time=it.begin_ms * NS_PER_MS,
            end_time=it.end_ms * NS_PER_MS,
            instrumentation_scope=scope,
        )
        for it in spans
    ]
