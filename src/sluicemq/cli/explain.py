"""`sluice explain message|group`: why a group has or has not got a message, is idle or behind."""

from collections.abc import Sequence
from dataclasses import asdict

import click

from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_table,
    show_time,
)
from sluicemq.client.core.explanations.facts import (
    Fate,
    Finding,
    GroupExplained,
    MessageExplained,
    MessageFacts,
)
from sluicemq.client.core.tracing import DEFAULT_TRACE_TOPIC
from sluicemq.client.sync.admin import Admin
from sluicemq.filter.explain import Explanation

FATES = {
    Fate.CONSUMED: "consumed",
    Fate.FILTERED: "filtered",
    Fate.WAITING: "waiting",
    Fate.DEAD: "dead",
    Fate.OFFLINE: "offline",
    Fate.UNKNOWN: "unknown",
}


@click.group()
def command() -> None:
    """Say why a group has not got a message, is idle or behind."""


@command.command("message")
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", help="One consumer group; without it a line for each that reads it.")
@click.option("-t", "--topic", help="Topic of the message; without it all are searched.")
@click.option(
    "--trace-topic", default=DEFAULT_TRACE_TOPIC, show_default=True, help="Topic of the traces."
)
@client_options
@json_option
def message(
    message_id: str,
    group: str | None,
    topic: str | None,
    trace_topic: str,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Where the message ID is, and why a consumer group has or has not got it.

    What brokers, members, filters, retries and traces tell is put together; what none of them
    tells is said to be unknown.
    """
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        about, found = admin.explain_message(
            message_id, group=group, topic=topic, trace_topic=trace_topic
        )
    if as_json:
        print_json({"message": _place(about), "groups": [_record(item) for item in found]})
        return
    for line in _told(about):
        click.echo(line)
    if group is not None:
        for item in found:
            _print_one(item)
    elif found:
        rows = [[item.group, fate_of(item), item.cause.what if item.cause else ""]
                for item in found]  # fmt: skip
        print_table("", ["group", "fate", "because"], rows)
    else:
        click.echo("No consumer group reads its topic, or has offsets in it.")


@command.command("group")
@click.argument("name")
@client_options
@json_option
def group(
    name: str, name_servers: str, access_key: str | None, secret_key: str | None, as_json: bool
) -> None:
    """Why group NAME is idle or behind; exit code 1 when something was found."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        found = admin.explain_group(name)
    if as_json:
        print_json(_group_record(found))
    else:
        _print_findings(found.findings)
        if not found.findings:
            click.echo(f"Group {name} is up to date: nothing is before it.")
    if found.findings:
        raise SystemExit(1)


def fate_of(item: MessageExplained) -> str:
    """In a word, with the number of a retry."""
    if item.fate is Fate.RETRY:
        return f"retry {item.times}"
    return FATES[item.fate]


def _told(about: MessageFacts) -> list[str]:
    stored = about.message
    lines = [
        f"Message {stored.message_id} of {stored.topic}",
        f"  stored   {show_time(stored.store_time_ms)} on {stored.broker}, queue "
        f"{stored.queue_id}, offset {stored.queue_offset} (the queue holds {about.offset_min} to "
        f"{about.offset_max - 1})",
        f"  tag      {stored.tag or 'none'}",
    ]
    if about.routed is None or stored.broker not in about.routed:
        lines.append("  route    clients do not find this topic there")
    return [*lines, ""]


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
        click.secho(f"{finding.code}: {finding.what}")
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


def _place(about: MessageFacts) -> dict[str, object]:
    stored = about.message
    return {
        "message_id": stored.message_id,
        "topic": stored.topic,
        "broker": stored.broker,
        "queue_id": stored.queue_id,
        "queue_offset": stored.queue_offset,
        "store_time_ms": stored.store_time_ms,
        "tag": stored.tag,
        "properties": dict(stored.properties),
        "offset_min": about.offset_min,
        "offset_max": about.offset_max,
        "has_route": about.routed is not None and stored.broker in about.routed,
    }


def _record(item: MessageExplained) -> dict[str, object]:
    return {
        "group": item.group,
        "fate": item.fate,
        "retries": item.times,
        "owner": item.owner,
        "findings": [asdict(finding) for finding in item.findings],
        "filter": None if item.verdict is None else _verdict_record(item.verdict),
    }


def _verdict_record(verdict: Explanation) -> dict[str, object]:
    return {
        "text": verdict.text,
        "outcome": verdict.outcome.value,
        "error": verdict.error,
        "operands": [asdict(operand) for operand in verdict.operands],
        "parts": [_verdict_record(part) for part in verdict.parts],
    }


def _group_record(found: GroupExplained) -> dict[str, object]:
    return {
        "group": found.group,
        "lag": found.lag,
        "matching": found.matching,
        "findings": [asdict(finding) for finding in found.findings],
    }
