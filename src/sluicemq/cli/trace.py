"""`sluice trace MESSAGE_ID`: the way of one message, out of the traces that clients wrote."""

from dataclasses import asdict

import click

from sluicemq.cli.output import client_options, credentials, json_option, print_json, show_time
from sluicemq.client.core.operations.traces import GroupTrace, Step, Timeline
from sluicemq.client.core.tracing import DEFAULT_TRACE_TOPIC
from sluicemq.client.sync.admin import Admin


@click.command()
@click.argument("message_id", metavar="MESSAGE_ID")
@click.option(
    "-t", "--topic", default=DEFAULT_TRACE_TOPIC, show_default=True, help="Topic of the traces."
)
@client_options
@json_option
def command(
    message_id: str,
    topic: str,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Show what happened to a message: sent, stored, delivered, consumed by which groups.

    Traces are there when the clients write them, in Python Sluice(…, trace=True).
    """
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        found = admin.trace(message_id, trace_topic=topic)
    if as_json:
        print_json(asdict(found))
        return
    for line in drawn(found):
        click.echo(line)


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
        lines.append(f"{clock:<23} {after:>10}  {mark} {_told(step)}")
        last_ms = step.time_ms
    lines += ["", *map(_fate, found.groups)]
    if not found.groups:
        lines.append("No consumer group has traced a delivery of it.")
    if found.unread:
        lines.append(f"{found.unread} trace records could not be understood.")
    return lines


def _told(step: Step) -> str:
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


def _fate(fate: GroupTrace) -> str:
    if not fate.deliveries:
        how = "is past it and has not traced how" if fate.is_past else "has not received it"
        return f"Group {fate.group} {how}."
    how = "consumed it" if fate.consumed else "has not consumed it"
    times = "delivery" if fate.deliveries == 1 else "deliveries"
    return f"Group {fate.group} {how}: {fate.deliveries} {times}, {', '.join(fate.results)}."
