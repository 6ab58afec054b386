"""`sluice explain message|group`: why a group has or has not got a message, is idle or behind."""

from collections.abc import Sequence

import click

from sluicemq.cli.output import admin_options, fields, print_json, print_records, show_time
from sluicemq.client.core.operations.rules import Fate, Finding, MessageExplained
from sluicemq.client.core.tracing import DEFAULT_TRACE_TOPIC
from sluicemq.client.sync.admin import Admin
from sluicemq.filter.selector import Explanation

_place = fields("message_id topic broker queue_id queue_offset store_time_ms tag properties")
_explained = fields("group fate retries=times owner findings filter=verdict")


@click.group()
def explain() -> None:
    """Say why a group has not got a message, is idle or behind."""


@explain.command("message")
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", help="One consumer group; without it a line for each that reads it.")
@click.option("-t", "--topic", help="Topic of the message; without it all are searched.")
@click.option(
    "--trace-topic", default=DEFAULT_TRACE_TOPIC, show_default=True, help="Topic of the traces."
)
@admin_options
def message(
    admin: Admin,
    message_id: str,
    group: str | None,
    topic: str | None,
    trace_topic: str,
    as_json: bool,
) -> None:
    """Where the message ID is, and why a consumer group has or has not got it.

    What brokers, members, filters, retries and traces tell is put together; what none of them
    tells is said to be unknown.
    """
    about, found = admin.explain_message(
        message_id, group=group, topic=topic, trace_topic=trace_topic
    )
    stored = about.message
    has_route = about.routed is not None and stored.broker in about.routed
    if as_json:
        place = fields("offset_min offset_max")(about) | {"has_route": has_route}
        groups = [_explained(one) for one in found]
        print_json({"message": _place(stored) | place, "groups": groups})
        return
    click.echo(
        f"Message {stored.message_id} of {stored.topic}\n"
        f"  stored   {show_time(stored.store_time_ms)} on {stored.broker}, queue "
        f"{stored.queue_id}, offset {stored.queue_offset} (the queue holds {about.offset_min} to "
        f"{about.offset_max - 1})\n"
        f"  tag      {stored.tag or 'none'}"
        + ("" if has_route else "\n  route    clients do not find this topic there")
        + "\n"
    )
    if group is not None:
        for item in found:
            _print_one(item)
        return
    records = [
        {
            "group": item.group,
            "fate": fate_of(item),
            "because": item.cause.what if item.cause else "",
        }
        for item in found
    ]
    print_records(records)
    if not found:
        click.echo("No consumer group reads its topic, or has offsets in it.")


@explain.command("group")
@click.argument("name")
@admin_options
def group(admin: Admin, name: str, as_json: bool) -> None:
    """Why group NAME is idle or behind; exit code 1 when something was found."""
    found = admin.explain_group(name)
    if as_json:
        print_json(found)
    else:
        _print_findings(found.findings)
        if not found.findings:
            click.echo(f"Group {name} is up to date: nothing is before it.")
    if found.findings:
        raise SystemExit(1)


def fate_of(item: MessageExplained) -> str:
    """In a word, with the number of a retry."""
    return f"retry {item.times}" if item.fate is Fate.RETRY else item.fate.value


def _print_one(item: MessageExplained) -> None:
    click.echo(f"Group {item.group}: {fate_of(item)}")
    if item.owner is not None:
        click.echo(f"  its queue is read by {item.owner or 'no member'}")
    _print_findings(item.findings)
    if item.verdict is not None:
        for line in drawn(item.verdict):
            click.echo(line)


def _print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        click.echo(f"{finding.code}: {finding.what}")
        if finding.instead:
            click.echo(f"    {finding.instead}")


def drawn(verdict: Explanation, depth: int = 1) -> list[str]:
    """The filter as an indented tree, each condition with its outcome."""
    sides = "; ".join(
        f"{side.text} = {'absent' if side.value is None else repr(side.value)} ({side.java_class})"
        for side in verdict.operands
    )
    note = f"  [{sides}]" if sides else ""
    error = f"  {verdict.error}" if verdict.error else ""
    line = f"{'  ' * depth}{verdict.outcome.value:<11} {verdict.text}{note}{error}"
    return [line, *(text for part in verdict.parts for text in drawn(part, depth + 1))]
