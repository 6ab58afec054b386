"""`sluice message show|query|consume`: single messages out of the brokers' key index; `sluice trace
MESSAGE_ID`: the way of one message, out of the traces that clients wrote."""

from typing import Any

import click

from sluicemq.cli.output import (
    TIME_MAX_MS,
    admin_options,
    body_record,
    fields,
    parse_time,
    print_json,
    print_records,
    print_result,
    print_table,
    show_body,
    show_time,
)
from sluicemq.client.core.operations.messages import COUNT_MAX, GroupTrace, Step, Timeline
from sluicemq.client.core.tracing import DEFAULT_TRACE_TOPIC
from sluicemq.client.sync.admin import Admin
from sluicemq.model.message import StoredMessage
from sluicemq.wire.bodies import ConsumeResult

BODY_SHOWN_BYTES = 4096
BODY_BEGIN_BYTES = 60
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
_topic_option = click.option(
    "-t", "--topic", help="Topic of the message; without it all are searched."
)


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
        elif name not in ("properties", "body"):
            rows.append((name, value))
    rows += [(f"  {name}", value) for name, value in found.properties.items()]
    print_table(f"Message {found.message_id}", ["field", "value"], rows)
    click.echo(show_body(found.body, BODY_SHOWN_BYTES))


@message.command("query")
@click.option("-t", "--topic", required=True, help="Topic of the messages.")
@click.option("-k", "--key", required=True, help="One of their keys.")
@click.option("--begin", help="Stored from then on: milliseconds since 1970 or 2013-01-01T00:00.")
@click.option("--end", help="Stored up to then.")
@click.option(
    "--max", "count_max", type=click.IntRange(1), default=COUNT_MAX, show_default=True,
    help="So many at most, the newest; a broker gives no more than its maxMsgsNumBatch.",
)  # fmt: skip
@admin_options
def query(
    admin: Admin,
    topic: str,
    key: str,
    begin: str | None,
    end: str | None,
    count_max: int,
    as_json: bool,
) -> None:
    """The messages of a topic that bear a key, newest first."""
    begin_ms = 0 if begin is None else parse_time(begin, "--begin")
    end_ms = TIME_MAX_MS if end is None else parse_time(end, "--end")
    found = admin.messages_by_key(topic, key, begin_ms=begin_ms, end_ms=end_ms, count_max=count_max)
    records = [record_of(one) for one in found]
    if not as_json:
        for record, one in zip(records, found, strict=True):
            record |= {"keys": " ".join(one.keys), "body": show_body(one.body, BODY_BEGIN_BYTES)}
    columns = (
        "stored=store_time_ms:time broker queue=queue_id offset=queue_offset tag keys "
        "id=message_id body"
    )
    empty = f"No message of {topic} has the key {key}."
    print_records(records, as_json=as_json, columns=columns, empty=empty)


@message.command("consume")
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", required=True, help="The consumer group whose handler is called.")
@click.option("-c", "--client", "client_id", help="Which of its members; without it the first.")
@_topic_option
@admin_options
def consume(
    admin: Admin,
    message_id: str,
    group: str,
    client_id: str | None,
    topic: str | None,
    as_json: bool,
) -> None:
    """Let a consumer handle the message ID now, and show how that went; exit code 1 when it failed.

    The handler of the client is called once more with the stored message, beside its other work. No
    offset changes, nothing is retried.
    """
    stored, result = admin.consume_directly(message_id, group, client_id, topic=topic)
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
    return _stored(stored) | hosts | body_record(stored.body)


# ---------------------------------------------------------------------------------- trace


@click.command()
@click.argument("message_id", metavar="MESSAGE_ID")
@click.option(
    "-t", "--topic", default=DEFAULT_TRACE_TOPIC, show_default=True, help="Topic of the traces."
)
@admin_options
def trace(admin: Admin, message_id: str, topic: str, as_json: bool) -> None:
    """Show what happened to a message: sent, stored, delivered, consumed by which groups.

    Traces are there when the clients write them, in Python Sluice(…, trace=True).
    """
    found = admin.trace(message_id, trace_topic=topic)
    if as_json:
        print_json(found)
        return
    click.echo("\n".join(drawn(found)))


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
        lines.append(f"{clock:<23} {after:>10}  {mark} {_step_text(step)}")
        last_ms = step.time_ms
    lines += ["", *map(_group_text, found.groups)]
    if not found.groups:
        lines.append("No consumer group has traced a delivery of it.")
    if found.unread:
        lines.append(f"{found.unread} trace records could not be understood.")
    return lines


def _step_text(step: Step) -> str:
    words = [f"{step.kind:<11}"]
    if step.kind == "deliver":
        words.append(f"to {step.group or 'an unknown group'}")
        words.append("" if not step.round else f"(retry {step.round})")
        words.append(f"-> {step.result or 'no result yet'}")
    else:
        words.append(f"by {step.group}" if step.group else "")
        words.append(f"at {step.place}" if step.place else "")
        words.append(f"-> {step.result}" if step.result else "")
    words.append(f"in {step.cost_ms} ms" if step.cost_ms is not None else "")
    words.append(f"({step.detail})" if step.detail else "")
    return " ".join(word for word in words if word)


def _group_text(trace: GroupTrace) -> str:
    if not trace.deliveries:
        how = "is past it and has not traced how" if trace.is_past else "has not received it"
        return f"Group {trace.group} {how}."
    how = "consumed it" if trace.consumed else "has not consumed it"
    times = "delivery" if trace.deliveries == 1 else "deliveries"
    return f"Group {trace.group} {how}: {trace.deliveries} {times}, {', '.join(trace.results)}."
