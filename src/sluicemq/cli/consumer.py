"""`sluice consumer list|status|stack`: what the consumers of a group do now.

The brokers ask the consumers themselves (307). A Python consumer of ours answers from its heartbeat
thread: also when a handler blocks its program, which is when one wants to see the stack.
"""

import click

from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_records,
    print_table,
    show_time,
)
from sluicemq.client.core.operations.groups import ConsumerClient
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.wire.bodies import RunningInfo

client_argument = click.argument("client_id", metavar="[CLIENT]", required=False)


@click.group()
def command() -> None:
    """Show what the consumers of a group do now."""


@command.command("list")
@click.argument("group")
@client_options
@json_option
def list_consumers(
    group: str, name_servers: str, access_key: str | None, secret_key: str | None, as_json: bool
) -> None:
    """The members of GROUP that are online: id, address, language, version."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        records = [
            {
                "client_id": client.client_id,
                "address": client.address,
                "language": client.language,
                "version": client.version,
                "kind": "push" if client.consume_type == "CONSUME_PASSIVELY" else "pull",
                "model": client.message_model.lower(),
            }
            for client in admin.consumers(group)
        ]
    print_records("", records, as_json=as_json, empty=f"No consumer of {group} is online.")


@command.command("status")
@click.argument("group")
@client_argument
@client_options
@json_option
def status(
    group: str,
    client_id: str | None,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """What CLIENT of GROUP (or each member) reads, holds, handles, and how fast."""
    for client, info in _ask(group, client_id, name_servers, access_key, secret_key, stack=False):
        if as_json:
            print_json(_record(client, info))
        else:
            _print(client, info)


@command.command("stack")
@click.argument("group")
@client_argument
@client_options
@json_option
def stack(
    group: str,
    client_id: str | None,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """The stacks of all threads and tasks of CLIENT of GROUP (or of each member)."""
    for client, info in _ask(group, client_id, name_servers, access_key, secret_key, stack=True):
        if as_json:
            print_json({"client_id": client.client_id, "group": group, "stack": info.stack})
        else:
            click.echo(f"--- {client.client_id} ({client.language}, {client.address})")
            for note, text in sorted(info.notes.items()):
                click.echo(f"{note}: {text}")
            click.echo(info.stack or "It has sent no stack.")


def _ask(
    group: str,
    client_id: str | None,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    *,
    stack: bool,
) -> list[tuple[ConsumerClient, RunningInfo]]:
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        clients = admin.consumers(group)
        online = ", ".join(client.client_id for client in clients)
        if client_id is not None:
            clients = [client for client in clients if client.client_id == client_id]
        if not clients:
            who = f"no consumer {client_id!r}" if client_id else "no consumer"
            raise ConfigurationError(
                f"{who} of the group {group!r} is online.",
                cure=f"Online: {online}." if online else "See sluice group show.",
            )
        return [
            (client, admin.running_info(group, client.client_id, stack=stack)) for client in clients
        ]


def _record(client: ConsumerClient, info: RunningInfo) -> dict[str, object]:
    return {
        "client_id": client.client_id,
        "address": client.address,
        "language": client.language,
        "properties": dict(info.properties),
        "subscriptions": {item.topic: item.expression for item in info.subscriptions},
        "queues": [
            {
                "topic": queue.topic,
                "broker": queue.broker,
                "queue_id": queue.queue_id,
                "committed": state.commit_offset,
                "held": state.cached_count,
                "held_from": state.cached_min,
                "held_to": state.cached_max,
                "locked": state.locked,
                "last_pull_ms": state.last_pull_ms,
                "last_consume_ms": state.last_consume_ms,
            }
            for queue, state in sorted(info.queues.items())
        ],
        "topics": {
            topic: {
                "done_per_second": rates.done_per_second,
                "failed_per_second": rates.failed_per_second,
                "failures_last_hour": rates.failures,
                "consume_ms": rates.consume_ms,
            }
            for topic, rates in sorted(info.rates.items())
        },
        "notes": dict(info.notes),
    }


def _print(client: ConsumerClient, info: RunningInfo) -> None:
    start_ms = int(info.properties.get("PROP_CONSUMER_START_TIMESTAMP", "0") or 0)
    click.echo(
        f"--- {client.client_id} ({client.language}, {client.address}), since {show_time(start_ms)}"
    )
    for item in sorted(info.subscriptions, key=lambda item: item.topic):
        click.echo(f"subscribed: {item.topic} {item.kind} {item.expression}")
    rows = [
        [*queue, state.commit_offset, state.cached_count, state.locked,
         show_time(state.last_pull_ms), show_time(state.last_consume_ms)]
        for queue, state in sorted(info.queues.items())
    ]  # fmt: skip
    if rows:
        columns = [
            "topic", "broker", "queue", "committed", "held", "locked", "last pull", "last consumed",
        ]  # fmt: skip
        print_table("", columns, rows)
    for topic, rates in sorted(info.rates.items()):
        click.echo(
            f"{topic}: {rates.done_per_second:.1f} done/s, {rates.failed_per_second:.1f} failed/s, "
            f"{rates.consume_ms:.1f} ms each, {rates.failures} failures in the last hour"
        )
    for note, text in sorted(info.notes.items()):
        click.echo(f"{note}: {text}")
