"""Messages one by one: `sluice message show|query|consume`, out of the brokers' key index; `sluice
trace`, the way of one, out of the traces that clients wrote; `sluice delay` and `sluice
transaction`, those that nobody gets yet: only SluiceMQ brokers know these requests.
"""

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from operator import add
from typing import Any

import click

from sluicemq.cli.ending import undecided, when_interrupted
from sluicemq.cli.output import (
    TIME_MAX_MS,
    Access,
    admin_options,
    as_time,
    body_record,
    client_options,
    fields,
    json_option,
    print_json,
    print_records,
    print_result,
    print_table,
    show_body,
    show_time,
)
from sluicemq.cli.traffic import parse_start, until_interrupted
from sluicemq.client.admin.messages import COUNT_MAX, Timeline
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import RequestError, SluiceError
from sluicemq.model.message import StoredMessage
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.model.trace_records import SendTrace, TraceRecord, decode_trace_records
from sluicemq.wire.bodies import ConsumeResult

BODY_SHOWN_BYTES = 4096
BODY_BEGIN_BYTES = 60
WAITING_MAX = 1000
EXPORTED_AT_ONCE = 20
AGAIN_S = 2.0
DONE = (ConsumeResult.SUCCESS, ConsumeResult.COMMIT)
RESULTS: dict[str, str] = {
    ConsumeResult.SUCCESS: "handled",
    ConsumeResult.COMMIT: "handled",
    ConsumeResult.LATER: "given back, to come again",
    ConsumeResult.ROLLBACK: "given back",
    ConsumeResult.EXCEPTION: "not handled, its handler failed",
    ConsumeResult.NOTHING: "not handled, its handler returned nothing",
}
_stored = fields(
    "topic broker queue_id queue_offset message_id offset_message_id physical_offset size_bytes "
    "tag keys properties born_time_ms born_host store_time_ms store_host reconsume_times"
)
_waiting = fields(
    "topic queue=queue_id message_id=unique_id keys tag level due=due_ms stored=stored_ms "
    "bytes=body_bytes handle"
)
_open = fields(
    "id=transaction_id checks group topic keys tag queue_id began_time_ms=began_ms "
    "next_check_time_ms=next_check_ms asked=asked_client_address half_queue_offset "
    "physical_offset body_bytes"
)
_topic_option = click.option(
    "-t", "--topic", help="Topic of the message; without it all are searched."
)
_only_topic_option = click.option("--topic", help="Only messages to this topic.")
_count_option = functools.partial(
    click.option, "--count", "count_max", type=click.IntRange(1), default=WAITING_MAX,
    show_default=True,
)  # fmt: skip


@click.group()
def message() -> None:
    """Find stored messages by key or id, and have them handled again."""


@message.command("show")
@click.argument("message_id", metavar="ID")
@_topic_option
@admin_options
def show(admin: Admin, message_id: str, topic: str | None, as_json: bool) -> None:
    """Show the message ID: the id that its producer made, or the one that says where it lies."""
    found = admin.message_by_id(message_id, topic=topic)
    record = record_of(found)
    if as_json:
        print_json(record)
        return
    rows: list[tuple[str, object]] = []
    for name, value in record.items():
        if name.endswith("_time_ms"):
            rows.append((name.removesuffix("_ms"), show_time(value)))
        elif name not in ("properties", "body", "body_error"):
            rows.append((name, value))
    rows += [(f"  {name}", value) for name, value in found.properties.items()]
    print_table(f"Message {found.message_id}", ["field", "value"], rows)
    click.echo(show_body(found, BODY_SHOWN_BYTES))


@message.command("query")
@click.option("-t", "--topic", required=True, help="Topic of the messages.")
@click.option("-k", "--key", required=True, help="One of their keys.")
@click.option(
    "--begin", "begin_ms", callback=as_time, default="0",
    help="Stored from then on: milliseconds since 1970 or 2013-01-01T00:00.",
)  # fmt: skip
@click.option(
    "--end", "end_ms", callback=as_time, default=str(TIME_MAX_MS), help="Stored up to then."
)
@click.option(
    "--max", "count_max", type=click.IntRange(1), default=COUNT_MAX, show_default=True,
    help="Show at most N messages, the newest; a broker gives at most its maxMsgsNumBatch.",
)  # fmt: skip
@admin_options
def query(admin: Admin, topic: str, key: str, as_json: bool, **options: Any) -> None:
    """Find the messages of a topic that bear a key, newest first."""
    found = admin.messages_by_key(topic, key, **options)
    records = [record_of(one) for one in found]
    if not as_json:
        for record, one in zip(records, found, strict=True):
            record |= {"keys": " ".join(one.keys), "body": show_body(one, BODY_BEGIN_BYTES)}
    columns = (
        "stored=store_time_ms:time broker queue=queue_id offset=queue_offset tag keys "
        "id=message_id body"
    )
    empty = f"No message of {topic} has the key {key}."
    print_records(records, as_json=as_json, columns=columns, empty=empty)
    until_ms = _complete_from_ms(found)
    if found and _has_others(admin, topic, key, found, options["begin_ms"], until_ms):
        click.echo(
            f"These are {len(found)} of the messages with the key {key}, and there are more: "
            f"--max is {options['count_max']}, and a broker gives at most its maxMsgsNumBatch. "
            f"Show older ones with --end {until_ms}.",
            err=True,
        )


def _complete_from_ms(found: Sequence[StoredMessage]) -> int:
    """Return the time from which the answers of all brokers are complete: each broker has given its
    newest messages, up to its limit."""
    oldest_ms = dict[str, int]()
    for one in found:
        oldest_ms[one.broker] = min(oldest_ms.get(one.broker, TIME_MAX_MS), one.store_time_ms)
    return max(oldest_ms.values(), default=0)


def _has_others(
    admin: Admin, topic: str, key: str, found: Sequence[StoredMessage], begin_ms: int, end_ms: int
) -> bool:
    """Return whether more messages bear the key than were found, from `begin_ms` to `end_ms`."""
    older = admin.messages_by_key(topic, key, begin_ms=begin_ms, end_ms=end_ms)
    places = {(one.broker, one.physical_offset) for one in found}
    return any((one.broker, one.physical_offset) not in places for one in older)


@message.command("consume")
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", required=True, help="The consumer group whose handler is called.")
@click.option("-c", "--client", "client_id", help="Which of its members; without it the first.")
@_topic_option
@admin_options
def consume(admin: Admin, message_id: str, group: str, as_json: bool, **options: Any) -> None:
    """Let a consumer handle the message ID now, and show how that went; exit code 1 when it failed.

    The handler of the client is called once more with the stored message, beside its other work. No
    offset changes, nothing is retried.
    """
    stored, result = admin.consume_directly(message_id, group, **options)
    record = fields("result remark spent_ms ordered=is_ordered")(result)
    remark = f": {result.remark}" if result.remark else "."
    print_result(
        {"message_id": stored.message_id, "group": group, **record},
        f"Message {stored.message_id} of {stored.topic} was "
        f"{RESULTS.get(result.result, result.result)} after {result.spent_ms} ms{remark}",
        as_json=as_json,
    )
    if result.result not in DONE:
        raise SystemExit(1)


def record_of(stored: StoredMessage) -> dict[str, Any]:
    """A message for --json: the names of `sluice consume --json`, and where it lies."""
    hosts = {"born_host": str(stored.born_host), "store_host": str(stored.store_host)}
    return _stored(stored) | hosts | body_record(stored)


# ---------------------------------------------------------------------------------- trace


class _Traces(click.Group):
    """`sluice trace ID` is `sluice trace show ID`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


_trace_topic_option = click.option(
    "-t", "--topic", default=TRACE_TOPIC, show_default=True, help="Topic of the traces."
)


@click.group(cls=_Traces)
def trace() -> None:
    """Show what happened to a message (`sluice trace ID`), or export it of all.

    Traces are there when the clients write them, in Python Sluice(…, trace=True).
    """


@trace.command("show")
@click.argument("message_id", metavar="MESSAGE_ID")
@_trace_topic_option
@admin_options
def show_trace(admin: Admin, message_id: str, topic: str, as_json: bool) -> None:
    """Show what happened to a message: sent, stored, delivered, consumed by which groups."""
    found = admin.trace(message_id, trace_topic=topic)
    if as_json:
        print_json(found)
        return
    click.echo("\n".join(drawn(found)))


@trace.command("export")
@click.option(
    "--otlp", "endpoint", default="", metavar="URL",
    help="Where to: http://HOST:4318. Without it OTEL_EXPORTER_OTLP_ENDPOINT says it.",
)  # fmt: skip
@_trace_topic_option
@click.option(
    "-g", "--group", default="sluice-trace-export", show_default=True,
    help="Consumer group; its offsets say what is exported.",
)  # fmt: skip
@click.option("--from", "start", default="first", show_default=True, help="As of sluice consume.")
@click.option("--timeout", "timeout_s", type=float, help="Stop when none came for so many seconds.")
@click.option(
    "--parents", is_flag=True,
    help="Look every message up: one with a property traceparent belongs to that trace.",
)  # fmt: skip
@client_options
@json_option
def export_traces(
    access: Access, endpoint: str, start: str, parents: bool, as_json: bool, **options: Any
) -> None:
    """Export traces as spans of OpenTelemetry until --timeout or Ctrl-C.

    What the endpoint has taken is committed, so each span arrives at least once, with the same id.
    """
    from sluicemq.telemetry.otlp import export, open_exporter  # noqa: PLC0415 - few have the extra
    from sluicemq.telemetry.spans import SpanBuilder, exportable  # noqa: PLC0415

    topic, group, timeout_s = options["topic"], options["group"], options["timeout_s"]
    exporter, joiner, begin = open_exporter("traces", endpoint), SpanBuilder(), parse_start(start)
    done = {"messages": 0, "spans": 0, "unread": 0}

    async def parents_of(mq: Sluice, records: list[TraceRecord]) -> dict[str, str]:
        found = {}
        for one in records:
            if isinstance(one, SendTrace) and one.message_id and one.offset_message_id:
                with contextlib.suppress(SluiceError):  # deleted meanwhile, or a batch of Java's
                    stored = await mq.admin.message_by_id(one.offset_message_id)
                    found[one.message_id] = stored.properties.get("traceparent", "")
        return found

    async def run() -> None:
        async with Sluice(access.name_servers, credentials=access.credentials) as mq:
            stream = mq.subscribe(topic, group=group, start=begin)
            while messages := await stream.receive_many(EXPORTED_AT_ONCE, timeout_s):
                decoded = [decode_trace_records(one.body_or_raw) for one in messages]
                records = [record for some, _ in decoded for record in some]
                known = await parents_of(mq, records) if parents else {}
                spans = list(joiner.spans(records, mq.cluster.clock.now_ms(), known))
                data, is_said = exportable(spans), False
                while data and (reason := await asyncio.to_thread(export, exporter, data)):
                    if not is_said:
                        click.echo(f"Not taken, and tried again: {reason}", err=True)
                    is_said = True
                    await asyncio.sleep(AGAIN_S)
                for one in messages:
                    await one.ack()
                more = len(messages), len(spans), sum(unread for _, unread in decoded)
                done.update(zip(done, map(add, done.values(), more), strict=True))

    try:
        asyncio.run(until_interrupted(run()))
    finally:
        exporter.shutdown()
    result = done | {"unfinished": len(joiner)}
    print_result(
        result,
        f"{done['spans']:,} spans of {done['messages']:,} trace messages exported; {len(joiner)} "
        f"deliveries had not ended, {done['unread']} records could not be understood.",
        as_json=as_json,
    )


def drawn(found: Timeline) -> list[str]:
    """The timeline as lines; the time since the line before stands after the clock."""
    labels = (("topic", found.topic), ("tag", found.tags), ("keys", found.keys))
    head = ", ".join(f"{name} {value}" for name, value in labels if value)
    lines = [f"Message {found.message_id}{f' ({head})' if head else ''}", ""]
    last_ms = found.steps[0].time_ms if found.steps else 0
    for index, step in enumerate(found.steps):
        mark = "└─" if index == len(found.steps) - 1 else "├─"
        after = f"+{step.time_ms - last_ms} ms" if index else ""
        clock = show_time(step.time_ms) or "at an unknown time"
        is_delivery = step.kind == "deliver"
        words = (
            f"{step.kind:<11}",
            f"to {step.group or 'an unknown group'}"
            if is_delivery
            else step.group and f"by {step.group}",
            f"(retry {step.round})" if is_delivery and step.round else "",
            f"at {step.place}" if step.place else "",
            f"-> {step.result or 'no result yet'}" if is_delivery or step.result else "",
            f"in {step.cost_ms} ms" if step.cost_ms is not None else "",
            f"({step.detail})" if step.detail else "",
        )
        text = " ".join(word for word in words if word)
        lines.append(f"{clock:<23} {after:>10}  {mark} {text}")
        last_ms = step.time_ms
    lines.append("")
    for trace in found.groups:
        if trace.deliveries:
            how = "consumed it" if trace.consumed else "has not consumed it"
            times = "delivery" if trace.deliveries == 1 else "deliveries"
            how += f": {trace.deliveries} {times}, {', '.join(trace.results)}"
        else:
            past = "is past it and has not traced how"
            how = past if trace.is_past else "has not received it"
        lines.append(f"Group {trace.group} {how}.")
    if not found.groups:
        lines.append("No consumer group has traced a delivery of it.")
    if found.unread:
        lines.append(f"{found.unread} trace records could not be understood.")
    return lines


# --------------------------------------------------------------- what nobody gets yet


@click.group()
def delay() -> None:
    """List and cancel delayed and timed messages."""


@delay.command("list")
@_only_topic_option
@click.option("--key", help="Only messages with this key or message id.")
@_count_option(help="Of each broker at most so many, as they come.")
@admin_options
def list_waiting(admin: Admin, as_json: bool, **options: Any) -> None:
    """List the messages that wait, those that are due first on top."""
    records: list[dict[str, Any]] = [
        {**_waiting(item), "level": item.level or None, "broker": address}
        for address, items in admin.delayed(**options).items()
        for item in items
    ]
    records.sort(key=lambda record: record["due"])
    columns = "topic queue message_id keys tag level due:time stored:time bytes"
    print_records(records, as_json=as_json, columns=columns, empty="No message waits.")


@delay.command("cancel")
@click.argument("key")
@_only_topic_option
@click.option("--yes", is_flag=True, help="Several messages with that key: cancel them all.")
@admin_options
def cancel(admin: Admin, key: str, topic: str | None, yes: bool, as_json: bool) -> None:
    """Never deliver the waiting message with key or message id KEY."""
    found = admin.delayed(topic, key=key)
    meant = [(address, item) for address, items in found.items() for item in items]
    if len(meant) > 1 and not yes:
        raise click.UsageError(
            f"{len(meant)} messages with key {key} wait: give a message id, or --yes for all."
        )
    late, cancelled = 0, list[str]()
    when_interrupted(lambda: f"{len(cancelled)} cancelled; `sluice delay list` shows what waits.")
    for address, item in meant:
        try:
            admin.cancel_delayed(address, item.handle)
            cancelled.append(item.unique_id)
        except RequestError as error:
            late += 1
            click.echo(f"{item.unique_id}: {error}", err=True)
    if as_json or cancelled:
        result = {"key": key, "cancelled": cancelled, "late": late}
        print_result(result, f"Cancelled: {', '.join(cancelled)}.", as_json=as_json)
    if not cancelled:
        raise click.ClickException(f"no message with key {key} was cancelled.")


@click.group()
def transaction() -> None:
    """List and decide undecided transactions."""


@transaction.command("list")
@click.option("--group", help="Only transactions of this producer group.")
@_only_topic_option
@_count_option(help="Of each broker at most so many.")
@admin_options
def list_open(admin: Admin, as_json: bool, **options: Any) -> None:
    """List the undecided transactions, the oldest on top."""
    now_ms = admin.clock.now_ms()
    records: list[dict[str, Any]] = [
        {**_open(item), "age_s": round((now_ms - item.began_ms) / 1000, 1), "broker": address}
        for address, items in admin.transactions(**options).items()
        for item in items
    ]
    records.sort(key=lambda record: record["began_time_ms"])
    columns = "id age_s checks group topic keys next_check=next_check_time_ms:time asked"
    print_records(records, as_json=as_json, columns=columns, empty="No transaction is undecided.")


@transaction.command("resolve")
@click.argument("transaction_id", metavar="ID")
@click.option("--commit", "outcome", flag_value="commit", help="The message becomes visible.")
@click.option("--rollback", "outcome", flag_value="rollback", help="It never does.")
@admin_options
def resolve(admin: Admin, transaction_id: str, outcome: str | None, as_json: bool) -> None:
    """Decide the transaction ID, as its producer would."""
    if outcome is None:
        raise click.UsageError("say --commit or --rollback.")
    undecided("sluice transaction list")
    address = admin.resolve_transaction(transaction_id, TransactionState[outcome.upper()])
    if as_json or address is not None:
        result = {"id": transaction_id, "outcome": outcome, "broker": address}
        print_result(result, f"{transaction_id}: {outcome} on {address}.", as_json=as_json)
    if address is None:
        raise click.ClickException(f"no broker has an undecided transaction {transaction_id}.")
