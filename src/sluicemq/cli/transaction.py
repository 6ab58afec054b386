"""`sluice transaction list|resolve`: transactions that nobody has decided, on SluiceMQ brokers.

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
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.wire.bodies import OpenTransaction

COUNT_MAX = 1000


@click.group()
def command() -> None:
    """Undecided transactions: list and decide them."""


@command.command("list")
@click.option("--group", help="Only transactions of this producer group.")
@click.option("--topic", help="Only messages to this topic.")
@click.option(
    "--count", type=click.IntRange(1), default=COUNT_MAX, show_default=True,
    help="Of each broker at most so many.",
)  # fmt: skip
@client_options
@json_option
def list_open(
    group: str | None,
    topic: str | None,
    count: int,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """The undecided transactions, the oldest on top."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        found = admin.transactions(group=group, topic=topic, count_max=count)
        now_ms = admin.clock.now_ms()
    listed = sorted(
        ((item, address) for address, items in found.items() for item in items),
        key=lambda pair: pair[0].began_ms,
    )
    records = [_record(item, address, now_ms, as_json=as_json) for item, address in listed]
    print_records("", records, as_json=as_json, empty="No transaction is undecided.")


def _record(
    item: OpenTransaction, address: str, now_ms: int, *, as_json: bool
) -> dict[str, object]:
    shown: dict[str, object] = {
        "id": item.transaction_id,
        "age_s": round((now_ms - item.began_ms) / 1000, 1),
        "checks": item.checks,
        "group": item.group,
        "topic": item.topic,
        "keys": item.keys,
    }
    if not as_json:
        return {**shown, "next check": show_time(item.next_check_ms), "asked": item.asked}
    return {
        **shown,
        "tag": item.tag,
        "queue_id": item.queue_id,
        "began_time_ms": item.began_ms,
        "next_check_time_ms": item.next_check_ms,
        "asked": item.asked,
        "half_queue_offset": item.half_queue_offset,
        "physical_offset": item.physical_offset,
        "body_bytes": item.body_bytes,
        "broker": address,
    }


@command.command("resolve")
@click.argument("transaction_id", metavar="ID")
@click.option("--commit", "outcome", flag_value="commit", help="The message becomes visible.")
@click.option("--rollback", "outcome", flag_value="rollback", help="It never does.")
@client_options
@json_option
def resolve(
    transaction_id: str,
    outcome: str | None,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Decide the transaction ID, as its producer would."""
    if outcome is None:
        raise click.UsageError("say --commit or --rollback.")
    state = TransactionState.COMMIT if outcome == "commit" else TransactionState.ROLLBACK
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        address = admin.resolve_transaction(transaction_id, state)
    if as_json:
        print_json({"id": transaction_id, "outcome": outcome, "broker": address})
    elif address is not None:
        click.echo(f"{transaction_id}: {outcome} on {address}.")
    if address is None:
        click.echo(f"No broker has an undecided transaction {transaction_id}.", err=True)
        raise SystemExit(1)
