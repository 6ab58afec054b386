"""`sluice delay list|cancel`: messages that wait for their delivery, on SluiceMQ brokers.

Brokers of RocketMQ do not know these requests and say so.
"""

import click

from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_records,
    show_time,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import RequestError
from sluicemq.wire.bodies import WaitingMessage

COUNT_MAX = 1000


@click.group()
def command() -> None:
    """List and cancel delayed and timed messages."""


@command.command("list")
@click.option("--topic", help="Only messages to this topic.")
@click.option("--key", help="Only messages with this key or message id.")
@click.option(
    "--count",
    type=click.IntRange(1),
    default=COUNT_MAX,
    show_default=True,
    help="Of each broker at most so many, as they come.",
)
@client_options
@json_option
def list_waiting(
    topic: str | None,
    key: str | None,
    count: int,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """The messages that wait, those that are due first on top."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        found = admin.delayed(topic, key=key, count_max=count)
    waiting = sorted(
        ((item, address) for address, items in found.items() for item in items),
        key=lambda pair: pair[0].due_ms,
    )
    records = [_record(item, address, as_json=as_json) for item, address in waiting]
    print_records("", records, as_json=as_json, empty="No message waits.")


def _record(item: WaitingMessage, address: str, *, as_json: bool) -> dict[str, object]:
    shown = {
        "topic": item.topic,
        "queue": item.queue_id,
        "message_id": item.unique_id,
        "keys": item.keys,
        "tag": item.tag,
        "level": item.level or None,
        "due": item.due_ms if as_json else show_time(item.due_ms),
        "stored": item.stored_ms if as_json else show_time(item.stored_ms),
        "bytes": item.body_bytes,
    }
    return {**shown, "broker": address, "handle": item.handle} if as_json else shown


@command.command("cancel")
@click.argument("key")
@click.option("--topic", help="Only messages to this topic.")
@click.option("--yes", is_flag=True, help="Several messages with that key: cancel them all.")
@client_options
@json_option
def cancel(
    key: str,
    topic: str | None,
    yes: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Never deliver the waiting message with key or message id KEY."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        found = admin.delayed(topic, key=key)
        meant = [(address, item) for address, items in found.items() for item in items]
        if len(meant) > 1 and not yes:
            raise click.UsageError(
                f"{len(meant)} messages with key {key} wait: give a message id, or --yes for all."
            )
        cancelled, late = [], []
        for address, item in meant:
            try:
                admin.cancel_delayed(address, item.handle)
                cancelled.append(item.unique_id)
            except RequestError as error:
                late.append(f"{item.unique_id}: {error}")
    for line in late:
        click.echo(line, err=True)
    if as_json:
        print_json({"key": key, "cancelled": cancelled, "late": len(late)})
    elif cancelled:
        click.echo(f"Cancelled: {', '.join(cancelled)}.")
    if not cancelled:
        click.echo(f"No message with key {key} was cancelled.", err=True)
        raise SystemExit(1)
