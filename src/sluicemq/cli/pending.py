"""`sluice delay` and `sluice transaction`: messages that nobody gets yet, on SluiceMQ brokers:
delayed ones, and those of undecided transactions.

Brokers of RocketMQ do not know these requests and say so.
"""

from typing import Any

import click

from sluicemq.cli.output import admin_options, fields, print_records, print_result
from sluicemq.client.core.transactions import TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import RequestError

COUNT_MAX = 1000
_waiting = fields(
    "topic queue=queue_id message_id=unique_id keys tag level due=due_ms stored=stored_ms "
    "bytes=body_bytes handle"
)
_open = fields(
    "id=transaction_id checks group topic keys tag queue_id began_time_ms=began_ms "
    "next_check_time_ms=next_check_ms asked half_queue_offset physical_offset body_bytes"
)
_topic_option = click.option("--topic", help="Only messages to this topic.")


@click.group()
def delay() -> None:
    """List and cancel delayed and timed messages."""


@delay.command("list")
@_topic_option
@click.option("--key", help="Only messages with this key or message id.")
@click.option(
    "--count", type=click.IntRange(1), default=COUNT_MAX, show_default=True,
    help="Of each broker at most so many, as they come.",
)  # fmt: skip
@admin_options
def list_waiting(
    admin: Admin, topic: str | None, key: str | None, count: int, as_json: bool
) -> None:
    """The messages that wait, those that are due first on top."""
    records: list[dict[str, Any]] = [
        {**_waiting(item), "level": item.level or None, "broker": address}
        for address, items in admin.delayed(topic, key=key, count_max=count).items()
        for item in items
    ]
    records.sort(key=lambda record: record["due"])
    columns = "topic queue message_id keys tag level due:time stored:time bytes"
    print_records(records, as_json=as_json, columns=columns, empty="No message waits.")


@delay.command("cancel")
@click.argument("key")
@_topic_option
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
    cancelled, late = [], 0
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
        click.echo(f"No message with key {key} was cancelled.", err=True)
        raise SystemExit(1)


@click.group()
def transaction() -> None:
    """Undecided transactions: list and decide them."""


@transaction.command("list")
@click.option("--group", help="Only transactions of this producer group.")
@_topic_option
@click.option(
    "--count", type=click.IntRange(1), default=COUNT_MAX, show_default=True,
    help="Of each broker at most so many.",
)  # fmt: skip
@admin_options
def list_open(
    admin: Admin, group: str | None, topic: str | None, count: int, as_json: bool
) -> None:
    """The undecided transactions, the oldest on top."""
    found = admin.transactions(group=group, topic=topic, count_max=count)
    now_ms = admin.clock.now_ms()
    records: list[dict[str, Any]] = [
        {**_open(item), "age_s": round((now_ms - item.began_ms) / 1000, 1), "broker": address}
        for address, items in found.items()
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
    address = admin.resolve_transaction(transaction_id, TransactionState[outcome.upper()])
    if as_json or address is not None:
        result = {"id": transaction_id, "outcome": outcome, "broker": address}
        print_result(result, f"{transaction_id}: {outcome} on {address}.", as_json=as_json)
    if address is None:
        click.echo(f"No broker has an undecided transaction {transaction_id}.", err=True)
        raise SystemExit(1)
