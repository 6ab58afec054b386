"""Commands for single messages: `sluice message`, `trace`, `delay` and `transaction`.

`message` finds stored messages with the key index of the brokers. `trace` shows what clients have
recorded about a message. `delay` and `transaction` manage messages that are not visible to
consumers yet; only SluiceMQ brokers know their requests.
"""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from sluicemq.cli.ending import describe_on_interrupt, note_pending_change
from sluicemq.cli.output import (
    TIME_MAX_MS,
    Access,
    admin_options,
    body_record,
    client_options,
    format_body,
    format_time,
    json_option,
    parse_position_or_time,
    parse_time_option,
    print_json,
    print_records,
    print_result,
    print_table,
    record_builder,
)
from sluicemq.cli.traffic import run_until_interrupted, start_option
from sluicemq.client.admin.messages import COUNT_MAX
from sluicemq.client.admin.traces import GroupTrace, Step, Timeline
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import RequestError, SluiceError
from sluicemq.model.message import StoredMessage
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.model.trace_records import SendTrace, TraceRecord, decode_trace_records
from sluicemq.wire.bodies import ConsumeResult

if TYPE_CHECKING:
    from sluicemq.telemetry.spans import Span

BODY_SHOWN_BYTES = 4096
BODY_PREVIEW_BYTES = 60
LISTED_MAX = 1000
EXPORT_BATCH_MAX = 20
EXPORT_RETRY_S = 2.0
SUCCESSFUL_RESULTS = (ConsumeResult.SUCCESS, ConsumeResult.COMMIT)
RESULT_TEXTS: dict[str, str] = {
    ConsumeResult.SUCCESS: "handled",
    ConsumeResult.COMMIT: "handled",
    ConsumeResult.LATER: "rejected, to be delivered again,",
    ConsumeResult.ROLLBACK: "rejected",
    ConsumeResult.EXCEPTION: "the handler failed",
    ConsumeResult.NOTHING: "the handler returned nothing",
}
_stored_record = record_builder(
    "topic broker queue_id queue_offset message_id offset_message_id physical_offset size_bytes "
    "tag keys properties born_time_ms born_host store_time_ms store_host reconsume_times"
)
_delayed_record = record_builder(
    "topic queue=queue_id message_id=unique_id keys tag level due=due_ms stored=stored_ms "
    "bytes=body_bytes handle"
)
_transaction_record = record_builder(
    "id=transaction_id checks group topic keys tag queue_id began_time_ms=began_ms "
    "next_check_time_ms=next_check_ms asked=asked_client_address half_queue_offset "
    "physical_offset body_bytes"
)
_topic_option = click.option(
    "-t", "--topic", help="Topic of the message. Without it, all topics are searched."
)
_only_topic_option = click.option("--topic", help="Use only messages of this topic.")
_count_option = click.option(
    "--count",
    "count_max",
    type=click.IntRange(1),
    default=LISTED_MAX,
    show_default=True,
    help="Maximum number of entries from each broker.",
)


@click.group()
def message() -> None:
    """Find stored messages by key or id, and let a consumer handle one again."""


@message.command("show")
@click.argument("message_id", metavar="ID")
@_topic_option
@admin_options
def show(admin: Admin, message_id: str, topic: str | None, as_json: bool) -> None:
    """Show the message with this message id or offset message id."""
    stored = admin.message_by_id(message_id, topic=topic)
    record = message_record(stored)
    if as_json:
        print_json(record)
        return

    # The properties and the body follow below the other fields.
    rows: list[tuple[str, object]] = []
    for field, value in record.items():
        if field.endswith("_time_ms"):
            rows.append((field.removesuffix("_ms"), format_time(value)))
        elif field not in ("properties", "body", "body_error"):
            rows.append((field, value))
    rows += [(f"  {name}", text) for name, text in stored.properties.items()]
    print_table(f"Message {stored.message_id}", ["field", "value"], rows)
    click.echo(format_body(stored, BODY_SHOWN_BYTES))


@message.command("query")
@click.option("-t", "--topic", required=True, help="Topic of the messages.")
@click.option("-k", "--key", required=True, help="Key that the messages have.")
@click.option(
    "--begin",
    "begin_ms",
    callback=parse_time_option,
    default="0",
    help="Show messages stored at or after this time: a Unix timestamp in milliseconds, or "
    "2013-01-01T00:00. Default: the beginning.",
)
@click.option(
    "--end",
    "end_ms",
    callback=parse_time_option,
    default=str(TIME_MAX_MS),
    help="Show messages stored at or before this time. Default: the end.",
)
@click.option(
    "--max",
    "count_max",
    type=click.IntRange(1),
    default=COUNT_MAX,
    show_default=True,
    help="Maximum number of messages; the newest are shown. A broker returns at most its "
    "maxMsgsNumBatch.",
)
@admin_options
def query(admin: Admin, topic: str, key: str, as_json: bool, **options: Any) -> None:
    """Find the messages of a topic that have a key, the newest first."""
    messages = admin.messages_by_key(topic, key, **options)
    records = []
    for stored in messages:
        record = message_record(stored)
        if not as_json:  # the table shows the keys, and the beginning of the body
            record["keys"] = " ".join(stored.keys)
            record["body"] = format_body(stored, BODY_PREVIEW_BYTES)
        records.append(record)
    columns = (
        "stored=store_time_ms:time broker queue=queue_id offset=queue_offset tag keys "
        "id=message_id body"
    )
    empty = f"No message of {topic} has the key {key}."
    print_records(records, as_json=as_json, columns=columns, empty=empty)
    if not messages:
        return

    # Brokers do not say whether they have left messages out, so ask for older ones.
    complete_from_ms = _find_complete_from_ms(messages)
    has_unlisted = _has_unlisted(
        admin, topic, key, messages, begin_ms=options["begin_ms"], end_ms=complete_from_ms
    )
    if has_unlisted:
        click.echo(
            f"There are more messages with the key {key} than these {len(messages)}: --max is "
            f"{options['count_max']}, and a broker returns at most its maxMsgsNumBatch. Show older "
            f"messages with --end {complete_from_ms}.",
            err=True,
        )


def _find_complete_from_ms(messages: Sequence[StoredMessage]) -> int:
    """Return the store time from which a list of messages is complete, 0 for an empty list.

    Each broker returns only its newest messages. So its part of the list is complete from its
    oldest message on, and the whole list from the latest of these times on.
    """
    oldest_ms_by_broker = dict[str, int]()
    for stored in messages:
        oldest_ms = oldest_ms_by_broker.get(stored.broker, TIME_MAX_MS)
        oldest_ms_by_broker[stored.broker] = min(oldest_ms, stored.store_time_ms)
    return max(oldest_ms_by_broker.values(), default=0)


def _has_unlisted(
    admin: Admin,
    topic: str,
    key: str,
    listed: Sequence[StoredMessage],
    *,
    begin_ms: int,
    end_ms: int,
) -> bool:
    """Return whether a message with the key exists that is not in `listed`.

    Only messages stored from `begin_ms` to `end_ms` (milliseconds since 1970) are looked for.
    Messages are the same if broker and position are.
    """
    older = admin.messages_by_key(topic, key, begin_ms=begin_ms, end_ms=end_ms)
    listed_positions = {(stored.broker, stored.physical_offset) for stored in listed}
    return any((stored.broker, stored.physical_offset) not in listed_positions for stored in older)


@message.command("consume")
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", required=True, help="Consumer group whose handler is called.")
@click.option(
    "-c",
    "--client",
    "client_id",
    help="Client id of the member that handles the message. Default: the first member.",
)
@_topic_option
@admin_options
def consume(admin: Admin, message_id: str, group: str, as_json: bool, **options: Any) -> None:
    """Let a consumer handle message ID now, and show the result. Exit code 1 if it failed.

    The client calls its handler with the stored message, in addition to its other work. No offset
    changes, and the message is not retried.
    """
    stored, handler_result = admin.consume_directly(message_id, group, **options)
    outcome = handler_result.result
    record = record_builder("result remark spent_ms ordered=is_ordered")(handler_result)
    remark = f": {handler_result.remark}" if handler_result.remark else "."
    print_result(
        {"message_id": stored.message_id, "group": group, **record},
        f"Message {stored.message_id} of {stored.topic}: "
        f"{RESULT_TEXTS.get(outcome, outcome)} after {handler_result.spent_ms} ms{remark}",
        as_json=as_json,
    )
    if outcome not in SUCCESSFUL_RESULTS:
        raise SystemExit(1)


def message_record(stored: StoredMessage) -> dict[str, Any]:
    """Return a message for `--json`.

    It has the keys of `sluice consume --json`, and where the message is stored.
    """
    hosts = {"born_host": str(stored.born_host), "store_host": str(stored.store_host)}
    return _stored_record(stored) | hosts | body_record(stored)


# ---------------------------------------------------------------------------------- trace


class _TraceGroup(click.Group):
    """A group in which `sluice trace ID` means `sluice trace show ID`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `show` unless the first argument is a command or the help option."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


_trace_topic_option = click.option(
    "-t", "--topic", default=TRACE_TOPIC, show_default=True, help="Topic that contains the traces."
)


@click.group(cls=_TraceGroup)
def trace() -> None:
    """Show what happened to a message (`sluice trace ID`), or export all traces.

    Traces exist only if the clients write them: in Python, with Sluice(…, trace=True).
    """


@trace.command("show")
@click.argument("message_id", metavar="MESSAGE_ID")
@_trace_topic_option
@admin_options
def show_trace(admin: Admin, message_id: str, topic: str, as_json: bool) -> None:
    """Show when a message was sent, stored, delivered, and consumed by which groups."""
    timeline = admin.trace(message_id, trace_topic=topic)
    if as_json:
        print_json(timeline)
        return
    click.echo("\n".join(timeline_lines(timeline)))


@trace.command("export")
@click.option(
    "--otlp",
    "endpoint",
    default="",
    metavar="URL",
    help="Endpoint that receives the spans, such as http://HOST:4318. Default: the environment "
    "variable OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318.",
)
@_trace_topic_option
@click.option(
    "-g",
    "--group",
    default="sluice-trace-export",
    show_default=True,
    help="Consumer group that reads the traces. Its committed offsets record what was exported.",
)
@start_option
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    help="Stop if no trace arrives for this time, in seconds. Default: never.",
)
@click.option(
    "--parents",
    is_flag=True,
    help="Look up each message, and link its spans to the trace in its property traceparent.",
)
@client_options
@json_option
def export_traces(
    access: Access, endpoint: str, start: str, parents: bool, as_json: bool, **options: Any
) -> None:
    """Export traces as OpenTelemetry spans until --timeout or Ctrl-C.

    Traces are committed after the endpoint has accepted their spans. So each span arrives at least
    once, always with the same id.
    """
    from sluicemq.telemetry.otlp import open_exporter  # noqa: PLC0415 - few have the extra
    from sluicemq.telemetry.spans import SpanBuilder  # noqa: PLC0415 - as above

    exporter = open_exporter("traces", endpoint)
    span_builder = SpanBuilder()  # it joins the records of one delivery to a span
    start_at = parse_position_or_time(start, "--from")
    totals = {"messages": 0, "spans": 0, "unread": 0}

    async def export_all() -> None:
        """Export batches of trace messages until none arrives for `timeout_s`."""
        async with Sluice(access.name_servers, credentials=access.credentials) as mq:
            stream = mq.subscribe(options["topic"], group=options["group"], start=start_at)
            while messages := await stream.receive_many(EXPORT_BATCH_MAX, options["timeout_s"]):
                records, unreadable_count = _decode_trace_messages(messages)
                parent_by_id = await _find_trace_parents(mq, records) if parents else {}
                now_ms = mq.cluster.clock.now_ms()
                spans = list(span_builder.spans(records, now_ms, parent_by_id))
                await _send_spans(exporter, spans)

                # Only now, so that spans are not lost if the process ends before.
                for message in messages:
                    await message.ack()
                totals["messages"] += len(messages)
                totals["spans"] += len(spans)
                totals["unread"] += unreadable_count

    try:
        asyncio.run(run_until_interrupted(export_all()))
    finally:
        exporter.shutdown()
    print_result(
        totals | {"unfinished": len(span_builder)},
        f"Exported {totals['spans']:,} spans of {totals['messages']:,} trace messages. "
        f"{len(span_builder)} deliveries had not ended, "
        f"{totals['unread']} records were unreadable.",
        as_json=as_json,
    )


def _decode_trace_messages(messages: Iterable[ReceivedMessage]) -> tuple[list[TraceRecord], int]:
    """Return (trace records in the messages, number of records that could not be decoded)."""
    records: list[TraceRecord] = []
    unreadable_count = 0
    for message in messages:
        records_of_message, unreadable_in_message = decode_trace_records(message.body_or_raw)
        records += records_of_message
        unreadable_count += unreadable_in_message
    return records, unreadable_count


async def _find_trace_parents(mq: Sluice, records: list[TraceRecord]) -> dict[str, str]:
    """Return message id -> property traceparent, for the messages that trace records say were sent.

    The value is "" for a message without the property. A message that cannot be found is left out.
    """
    parent_by_id = {}
    for record in records:
        if not isinstance(record, SendTrace):
            continue
        if not record.message_id or not record.offset_message_id:
            continue
        # The message may be deleted. A Java client traces a batch as one message, whose offset
        # message id is not that of a single message.
        with contextlib.suppress(SluiceError):
            stored = await mq.admin.message_by_id(record.offset_message_id)
            parent_by_id[record.message_id] = stored.properties.get("traceparent", "")
    return parent_by_id


async def _send_spans(exporter: Any, spans: list["Span"]) -> None:
    """Send spans to the endpoint of `exporter`, and repeat that until it accepts them.

    The first refusal is printed to stderr. If there are no spans, nothing is sent.
    """
    from sluicemq.telemetry.otlp import export  # noqa: PLC0415 - few have the extra
    from sluicemq.telemetry.spans import exportable  # noqa: PLC0415 - as above

    exportable_spans = exportable(spans)
    is_refusal_reported = False
    while exportable_spans:
        refusal = await asyncio.to_thread(export, exporter, exportable_spans)
        if not refusal:
            return
        if not is_refusal_reported:
            click.echo(f"Spans not accepted, retrying: {refusal}", err=True)
            is_refusal_reported = True
        await asyncio.sleep(EXPORT_RETRY_S)


def timeline_lines(timeline: Timeline) -> list[str]:
    """Return the lines that `sluice trace show` prints: the message, its steps, the groups.

    Steps are drawn as a tree. A last line counts the trace records that could not be decoded, if
    there are any.
    """
    lines = [_format_message_line(timeline), "", *_format_steps(timeline.steps), ""]
    lines += [_format_group(group) for group in timeline.groups]
    if not timeline.groups:
        lines.append("No consumer group has traced a delivery of this message.")
    if timeline.unread:
        lines.append(f"{timeline.unread} trace records were unreadable.")
    return lines


def _format_message_line(timeline: Timeline) -> str:
    """Return the first line of `sluice trace show`: the message id, with topic, tag and keys.

    Those that are unknown are left out.
    """
    labels = []
    if timeline.topic:
        labels.append(f"topic {timeline.topic}")
    if timeline.tags:
        labels.append(f"tag {timeline.tags}")
    if timeline.keys:
        labels.append(f"keys {timeline.keys}")
    line = f"Message {timeline.message_id}"
    return f"{line} ({', '.join(labels)})" if labels else line


def _format_steps(steps: Sequence[Step]) -> list[str]:
    """Return a line for each step: its time, the time since the step before, and what happened.

    The lines form a tree with branches ├─ and └─.
    """
    lines = []
    for index, step in enumerate(steps):
        is_last = index == len(steps) - 1
        branch = "└─" if is_last else "├─"
        elapsed = ""
        if index > 0:
            elapsed = f"+{step.time_ms - steps[index - 1].time_ms} ms"
        time = format_time(step.time_ms) or "at an unknown time"
        lines.append(f"{time:<23} {elapsed:>10}  {branch} {_format_step(step)}")
    return lines


def _format_step(step: Step) -> str:
    """Return what happened in a step, as `deliver to billing -> success in 5 ms`.

    Parts that are unknown are left out.
    """
    parts = [f"{step.kind:<11}"]
    is_delivery = step.kind == "deliver"
    if is_delivery:
        parts.append(f"to {step.group or 'an unknown group'}")
        if step.round:
            parts.append(f"(retry {step.round})")
    elif step.group:
        parts.append(f"by {step.group}")
    if step.place:
        parts.append(f"at {step.place}")
    if step.result:
        parts.append(f"-> {step.result}")
    elif is_delivery:
        parts.append("-> no result yet")
    if step.cost_ms is not None:
        parts.append(f"in {step.cost_ms} ms")
    if step.detail:
        parts.append(f"({step.detail})")
    return " ".join(parts)


def _format_group(trace: GroupTrace) -> str:
    """Return a sentence that says whether a group has consumed the message."""
    if trace.deliveries:
        outcome = "consumed it" if trace.consumed else "has not consumed it"
        count = "1 delivery" if trace.deliveries == 1 else f"{trace.deliveries} deliveries"
        outcome += f": {count}, {', '.join(trace.results)}"
    elif trace.is_past:
        outcome = "has committed a later offset, and no client has traced a delivery"
    else:
        outcome = "has not received it"
    return f"Group {trace.group} {outcome}."


# ------------------------------------------------------------------ messages not visible yet


@click.group()
def delay() -> None:
    """List and cancel delayed and timed messages."""


@delay.command("list")
@_only_topic_option
@click.option("--key", help="Show only messages with this key or message id.")
@_count_option
@admin_options
def list_delayed(admin: Admin, as_json: bool, **options: Any) -> None:
    """List the delayed and timed messages that are not delivered yet, the next one first."""
    records = []
    for address, delayed_messages in admin.delayed(**options).items():
        for delayed in delayed_messages:
            level = delayed.level or None  # None for a timed message
            records.append({**_delayed_record(delayed), "level": level, "broker": address})
    records.sort(key=lambda record: record["due"])
    columns = "topic queue message_id keys tag level due:time stored:time bytes"
    print_records(records, as_json=as_json, columns=columns, empty="There are no delayed messages.")


@delay.command("cancel")
@click.argument("key")
@_only_topic_option
@click.option("--yes", is_flag=True, help="Cancel all delayed messages with this key.")
@admin_options
def cancel(admin: Admin, key: str, topic: str | None, yes: bool, as_json: bool) -> None:
    """Cancel the delayed message with key or message id KEY, so that it is never delivered.

    Exit code 1 if no message was cancelled.
    """
    messages_by_broker = admin.delayed(topic, key=key)
    message_count = sum(map(len, messages_by_broker.values()))
    if message_count > 1 and not yes:
        raise click.UsageError(
            f"{message_count} delayed messages have the key {key}. Give a message id, or "
            "--yes to cancel them all."
        )

    cancelled_ids: list[str] = []
    describe_on_interrupt(
        lambda: f"{len(cancelled_ids)} cancelled; `sluice delay list` shows the others."
    )
    for address, delayed_messages in messages_by_broker.items():
        for delayed in delayed_messages:
            try:
                admin.cancel_delayed(address, delayed.handle)
                cancelled_ids.append(delayed.unique_id)
            except RequestError as error:  # such as a message that was delivered in the meantime
                click.echo(f"{delayed.unique_id}: {error}", err=True)

    if as_json or cancelled_ids:
        late_count = message_count - len(cancelled_ids)
        record = {"key": key, "cancelled": cancelled_ids, "late": late_count}
        print_result(record, f"Cancelled: {', '.join(cancelled_ids)}.", as_json=as_json)
    if not cancelled_ids:
        raise click.ClickException(f"No message with key {key} was cancelled.")


@click.group()
def transaction() -> None:
    """List open transactions, and commit or roll back one."""


@transaction.command("list")
@click.option("--group", help="Show only transactions of this producer group.")
@_only_topic_option
@_count_option
@admin_options
def list_transactions(admin: Admin, as_json: bool, **options: Any) -> None:
    """List the open transactions, the oldest first."""
    now_ms = admin.clock.now_ms()
    records = []
    for address, open_transactions in admin.transactions(**options).items():
        for open_transaction in open_transactions:
            age_s = round((now_ms - open_transaction.began_ms) / 1000, 1)
            record = _transaction_record(open_transaction)
            records.append({**record, "age_s": age_s, "broker": address})
    records.sort(key=lambda record: record["began_time_ms"])
    columns = "id age_s checks group topic keys next_check=next_check_time_ms:time asked"
    empty = "There are no open transactions."
    print_records(records, as_json=as_json, columns=columns, empty=empty)


@transaction.command("resolve")
@click.argument("transaction_id", metavar="ID")
@click.option("--commit", "outcome", flag_value="commit", help="Commit: deliver the message.")
@click.option(
    "--rollback", "outcome", flag_value="rollback", help="Roll back: never deliver the message."
)
@admin_options
def resolve(admin: Admin, transaction_id: str, outcome: str | None, as_json: bool) -> None:
    """Commit or roll back the open transaction ID, as its producer would."""
    if outcome is None:
        raise click.UsageError("Give --commit or --rollback.")
    note_pending_change("sluice transaction list")
    address = admin.resolve_transaction(transaction_id, TransactionState[outcome.upper()])
    if as_json or address is not None:
        record = {"id": transaction_id, "outcome": outcome, "broker": address}
        print_result(record, f"{transaction_id}: {outcome} on {address}.", as_json=as_json)
    if address is None:
        raise click.ClickException(f"No broker has an open transaction {transaction_id}.")
