"""`sluice group update --contract`, and the lanes that `sluice group show` names."""

import click

from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_table,
    show_time,
)
from sluicemq.client.core.operations.groups import GroupContract
from sluicemq.client.sync.admin import Admin
from sluicemq.model.topic import CONTRACTS


@click.command("update")
@click.argument("name")
@click.option(
    "--contract",
    type=click.Choice(CONTRACTS),
    required=True,
    help="May members subscribe to different things? strict: no; lanes: each subscription gets its "
    "share; compatible: the same, with a warning.",
)
@client_options
@json_option
def update(
    name: str,
    contract: str,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Change the contract of group NAME on every broker."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        brokers = admin.change_contract(name, contract)
    if as_json:
        print_json({"group": name, "contract": contract, "brokers": brokers})
    else:
        click.echo(f"Group {name} has the contract {contract} on {', '.join(brokers)}.")


def contract_records(found: list[GroupContract]) -> list[dict[str, object]]:
    """As JSON, a broker each."""
    return [
        {
            "broker": item.broker,
            "contract": item.contract,
            "lanes": list(item.lanes),
            "refused": item.refused,
            "unmatched": item.unmatched,
            "forgotten": list(item.forgotten),
        }
        for item in found
    ]


def print_contract(found: list[GroupContract]) -> None:
    """The lanes and the refused, where there are any."""
    for item in found:
        if item.lanes:
            rows = [_row(lane) for lane in item.lanes]
            columns = ["lane", "subscription", "members", "not read", "left"]
            print_table(f"Lanes on {item.broker} (the oldest first)", columns, rows)
            click.echo(
                f"The contract is {item.contract}: members subscribe to different things, and each "
                "message goes to the oldest lane that wants it."
                + (" If that is not intended, set it to strict." if item.contract == CONTRACTS[0]
                   else "")
                + (f" {item.unmatched:,} messages are wanted by none." if item.unmatched else "")
            )  # fmt: skip
        for client_id, why in item.refused.items():
            click.echo(f"{client_id} is refused: {why}")
        for said in item.forgotten:
            click.echo(
                f"{show_time(said['timestamp'])} {item.broker} forgot the subscription "
                f"{said['subscription']}, because {said['why']}. It had not looked at "
                f"{said['messagesMax']:,} messages."
            )


def _row(lane: dict[str, object]) -> list[object]:
    subscriptions = lane["subscriptions"]
    queues = lane["queues"]
    left_ms = lane["leftTimestamp"]
    assert isinstance(subscriptions, dict)
    assert isinstance(queues, list)
    assert isinstance(left_ms, int)
    members = lane["clientIds"]
    assert isinstance(members, list)
    return [
        lane["lane"],
        "; ".join(f"{topic}: {text}" for topic, (_, text) in subscriptions.items()),
        ", ".join(members) or ("none, not waited for" if lane["isIdle"] else "none"),
        sum(queue["maxOffset"] - queue["offset"] for queue in queues),
        show_time(left_ms) if left_ms else "",
    ]
