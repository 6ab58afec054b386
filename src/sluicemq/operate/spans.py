"""Spans of OpenTelemetry out of what clients have traced (pure, but for `exportable`).

    Pub             span `send TOPIC`      producer
    SubBefore and   span `process TOPIC`   consumer, a child of the send
    SubAfter
    EndTransaction  span `commit TOPIC`, `rollback TOPIC`, `undecided TOPIC`, a child of the send
    Recall          span `recall TOPIC`, a child of the send

Ids are made from what the records say, so every exporter makes the same ones, in any order and
again after a crash. The trace is the message: its trace id is the id of the message where that is
32 hexadecimal digits, as all clients make them, else a hash. So `sluice trace ID` and the page of a
tracing backend at the same id show one thing. A message with a `traceparent` among its properties
belongs to that trace instead; records do not carry properties, so somebody has to look it up.

A delivery is two records with one request id. What has begun waits for its end, in memory and for a
bounded time; without the beginning, the end alone makes the span. Consumers' records do not name
the topic: it is known when the send went by not too long ago.

Attributes: OpenTelemetry's semantic conventions for messaging; those that begin with `sluicemq.`
are ours.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from sluicemq.broker.otlp import NS_PER_MS, SCOPE, make_resource
from sluicemq.client.admin.messages import record_about
from sluicemq.client.core.tracing import (
    ConsumeOutcome,
    ConsumeTrace,
    DeliveryTrace,
    RecallTrace,
    SendTrace,
    TraceRecord,
    TransactionTrace,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

KNOWN_MAX: Final = 50_000
"""Sends that are remembered for their deliveries."""
BEGUN_MAX: Final = 20_000
BEGUN_MS: Final = 15 * 60_000
"""RocketMQ's consumeTimeout: then a delivery whose end is missing is told as it is."""
_TYPES: Final = ("normal", "transaction", "transaction", "delay", "fifo")
"""By MessageKind, under OpenTelemetry's names."""
_ENDS: Final = {"COMMIT_MESSAGE": "commit", "ROLLBACK_MESSAGE": "rollback"}
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_MESSAGE_ID: Final = re.compile(r"[0-9A-Fa-f]{32}")
Kind = Literal["PRODUCER", "CONSUMER", "CLIENT"]


class Span(NamedTuple):
    """One span; ids as numbers, `parent_id` 0 for none. `service`: the group whose client it is of.
    `error`: why it failed."""

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


class Context(NamedTuple):
    """The trace that a message belongs to, its parent there (0: none), and what only its send
    tells."""

    trace_id: int
    parent_id: int = 0
    topic: str | None = None
    tags: str | None = None


class Joiner:
    """Makes spans of records as they come."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Context] = OrderedDict()
        self._begun: OrderedDict[tuple[str | None, str | None], DeliveryTrace] = OrderedDict()

    def __len__(self) -> int:
        """Deliveries whose end has not come yet."""
        return len(self._begun)

    def spans(
        self, records: Iterable[TraceRecord], now_ms: int, traceparents: Mapping[str, str] = {}
    ) -> Iterator[Span]:
        """Those that these records complete, and those of deliveries that have waited too long.
        `traceparents`: by message id, of messages that have one."""
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
        """One for each message: Java's record of a batch tells of several."""
        ids = (record.message_id or "").split(",")
        for message_id in ids:
            one = record_about(record, message_id, None)
            assert isinstance(one, SendTrace)
            context = parent_of(traceparents.get(message_id, "")) or Context(_trace_id(message_id))
            self._known[message_id] = context = context._replace(topic=one.topic, tags=one.tags)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            again = () if one.success else (one.time_ms,)  # it may be sent once more
            yield _span(
                "send", "PRODUCER", one, context, (message_id, *again), context.parent_id,
                one.time_ms, one.time_ms + one.cost_ms, {
                    "messaging.operation.type": "send",
                    "messaging.message.body.size": one.body_length,
                    "messaging.rocketmq.message.type": _TYPES[one.kind],
                    "messaging.batch.message_count": len(ids) if len(ids) > 1 else None,
                    "sluicemq.offset_message_id": one.offset_message_id,
                    "server.address": one.store_host,
                    "client.address": one.client_host,
                }, None if one.success else "send_failed",
            )  # fmt: skip

    def _delivery(self, begun: DeliveryTrace | ConsumeTrace, ended: ConsumeTrace | None) -> Span:
        cost_ms = ended.cost_ms if ended is not None else 0
        # The cloud's flavour of an end has no time.
        begin_ms = (
            begun.time_ms
            if isinstance(begun, DeliveryTrace)
            else (begun.time_ms or cost_ms) - cost_ms
        )
        end_ms = ended.time_ms if ended is not None and ended.time_ms else begin_ms + cost_ms
        error = "no_end_traced" if ended is None else None
        if ended is not None and not ended.success:
            is_odd = ended.outcome is ConsumeOutcome.SUCCESS
            error = "failed" if is_odd else ended.outcome.name.lower()
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
        message_id = one.message_id or ""
        topic, tags = getattr(one, "topic", None), getattr(one, "tags", None)
        context = self._known.get(message_id) or Context(_trace_id(message_id), 0, topic, tags)
        own = one.request_id if isinstance(one, DeliveryTrace | ConsumeTrace) else one.time_ms
        return _span(
            verb, kind, one, context, (message_id, own), _span_id("send", message_id),
            begin_ms, max(begin_ms, end_ms), more, error,
        )  # fmt: skip


def _span(
    verb: str,
    kind: Kind,
    one: TraceRecord,
    context: Context,
    own: tuple[object, ...],
    parent_id: int,
    begin_ms: int,
    end_ms: int,
    more: Mapping[str, Any],
    error: str | None,
) -> Span:
    """`own`: the message id, and what tells this span from others of its verb and message."""
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
        one.group, f"{verb} {context.topic or ''}".rstrip(), kind, context.trace_id,
        _span_id(verb, *own), parent_id, begin_ms, end_ms,
        {name: value for name, value in attributes.items() if value is not None}, error,
    )  # fmt: skip


def parent_of(traceparent: str) -> Context | None:
    """Of W3C's header; None when it is none."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    ids = (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
    return Context(*ids) if all(ids) else None


def _trace_id(message_id: str) -> int:
    number = int(message_id, 16) if _MESSAGE_ID.fullmatch(message_id) else 0
    return number or int.from_bytes(sha256(message_id.encode()).digest()[:16])


def _span_id(*parts: object) -> int:
    text = "\x01".join(map(str, parts))
    return int.from_bytes(sha256(text.encode()).digest()[:8])


def exportable(spans: Iterable[Span]) -> "list[ReadableSpan]":
    """The same for OpenTelemetry's exporter (extra `otlp`), each as of the service of its group."""
    from opentelemetry import trace as o  # noqa: PLC0415
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415

    def context(trace_id: int, span_id: int) -> o.SpanContext:
        return o.SpanContext(trace_id, span_id, is_remote=False, trace_flags=o.TraceFlags(1))

    scope, resources = InstrumentationScope(SCOPE), cache(make_resource)
    return [
        ReadableSpan(
            it.name,
            context(it.trace_id, it.span_id),
            context(it.trace_id, it.parent_id) if it.parent_id else None,
            resources(it.service),
            it.attributes,
            kind=o.SpanKind[it.kind],
            status=o.Status(o.StatusCode.ERROR, it.error) if it.error else o.Status(),
            start_time=it.begin_ms * NS_PER_MS,
            end_time=it.end_ms * NS_PER_MS,
            instrumentation_scope=scope,
        )
        for it in spans
    ]
