"""`sluice group reset|skip|clone`: send a consumer group to another place, also while it consumes.

Each shows, queue by queue, where the group stood, where it goes on, and how many messages come
again or are skipped. With --dry-run that is all.
"""

import click

from sluicemq.cli.message import parse_moment
from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_table,
)
from sluicemq.client.core.operations.offsets import EARLIEST_MS, LATEST_MS, OffsetChange
from sluicemq.client.sync.admin import Admin

dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would change and change nothing."
)
topic_option = click.option("-t", "--topic", required=True, help="The topic.")


@click.command("reset")
@click.argument("group")
@topic_option
@click.option(
    "--to",
    required=True,
    help="earliest, latest, or the time of the first message to get: milliseconds since 1970 or "
    "2013-01-01T00:00.",
)
@dry_run_option
@client_options
@json_option
def reset(
    group: str,
    topic: str,
    to: str,
    dry_run: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Send GROUP to another place of a topic: back to consume again, or ahead.

    Works while its consumers run: they go on at the new place, and what they had fetched before is
    neither handled nor committed any more (a handler that runs ends, without effect on offsets).
    """
    words = {"earliest": EARLIEST_MS, "latest": LATEST_MS}
    time_ms = words[to] if to in words else parse_moment("--to", to, 0)
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        make = admin.plan_reset if dry_run else admin.reset_offsets
        changes = make(group, topic, time_ms)
    _show(group, changes, as_json=as_json, dry_run=dry_run)


@click.command("skip")
@click.argument("group")
@topic_option
@dry_run_option
@client_options
@json_option
def skip(
    group: str,
    topic: str,
    dry_run: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Let GROUP skip what it has not read of a topic: the same as `reset --to latest`."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        make = admin.plan_reset if dry_run else admin.reset_offsets
        changes = make(group, topic, LATEST_MS)
    _show(group, changes, as_json=as_json, dry_run=dry_run)


@click.command("clone")
@click.argument("source")
@click.argument("target")
@click.option("-t", "--topic", help="Only this topic; without it all that SOURCE has offsets of.")
@dry_run_option
@client_options
@json_option
def clone(
    source: str,
    target: str,
    topic: str | None,
    dry_run: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Give group TARGET the offsets of group SOURCE: it goes on where SOURCE stands."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        make = admin.plan_clone if dry_run else admin.clone_offsets
        changes = make(source, target, topic)
    _show(target, changes, as_json=as_json, dry_run=dry_run)


def _show(group: str, changes: list[OffsetChange], *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        for change in changes:
            print_json(_record(group, change, dry_run=dry_run))
        return
    rows = [
        [*change.queue, change.old, change.new, change.again, change.skipped, change.offset_max]
        for change in changes
    ]
    columns = ["topic", "broker", "queue", "from", "to", "come again", "skipped", "end"]
    print_table("", columns, rows)
    verb = "would go on" if dry_run else "goes on"
    again, skipped = sum(c.again for c in changes), sum(c.skipped for c in changes)
    click.echo(
        f"{group} {verb} there: {again:,} messages come again, {skipped:,} are skipped."
        + (" Nothing is changed." if dry_run else "")
    )


def _record(group: str, change: OffsetChange, *, dry_run: bool) -> dict[str, object]:
    return {
        "group": group,
        "topic": change.queue.topic,
        "broker": change.queue.broker,
        "queue_id": change.queue.queue_id,
        "from": change.old,
        "to": change.new,
        "come_again": change.again,
        "skipped": change.skipped,
        "offset_max": change.offset_max,
        "dry_run": dry_run,
    }
