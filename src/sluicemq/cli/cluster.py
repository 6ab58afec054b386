"""`sluice cluster list|show`: the brokers that the name server knows, and how they do."""

import click

from sluicemq.cli.output import client_options, credentials, json_option, print_json, print_records
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.topic import MASTER_ID


@click.group()
def command() -> None:
    """Show the brokers of a cluster."""


@command.command("list")
@client_options
@json_option
def list_brokers(
    name_servers: str, access_key: str | None, secret_key: str | None, as_json: bool
) -> None:
    """Every broker with its addresses and whether it can be reached from here."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        info = admin.cluster_info()
        records = [
            {
                "cluster": data.cluster,
                "broker": data.broker,
                "role": "master" if broker_id == MASTER_ID else f"slave {broker_id}",
                "address": address,
                **_health(admin, address),
            }
            for data in sorted(info.brokers.values(), key=lambda data: (data.cluster, data.broker))
            for broker_id, address in sorted(data.addresses.items())
        ]
    print_records(
        "", records, as_json=as_json, empty="No broker is registered. Start one: sluice broker."
    )


def _health(admin: Admin, address: str) -> dict[str, object]:
    try:
        runtime = admin.runtime(address)
    except SluiceError as error:
        return {
            "version": "",
            "in_per_s": None,
            "out_per_s": None,
            "state": f"unreachable: {error}",
        }
    return {
        "version": runtime.get("brokerVersionDesc", ""),
        "in_per_s": _rate(runtime.get("putTps", "")),
        "out_per_s": _rate(runtime.get("getTransferredTps", "")),
        "state": "up",
    }


def _rate(text: str) -> float | None:
    """The first of three rates: over 10 s, 1 min, 10 min (spec/admin.md §3)."""
    try:
        return round(float(text.partition(" ")[0]), 1)
    except ValueError:
        return None


@command.command("show")
@click.argument("broker")
@client_options
@json_option
def show(
    broker: str, name_servers: str, access_key: str | None, secret_key: str | None, as_json: bool
) -> None:
    """Every counter of BROKER (its name, or host:port)."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        address = broker
        if ":" not in broker:
            masters = admin.masters()
            if broker not in masters:
                raise ConfigurationError(
                    f"there is no broker {broker!r}.",
                    cure=f"The name server knows: {', '.join(masters) or 'none'}.",
                )
            address = masters[broker]
        runtime = admin.runtime(address)
    if as_json:
        print_json(dict(sorted(runtime.items())))
        return
    records = [{"counter": name, "value": value} for name, value in sorted(runtime.items())]
    print_records(f"{broker} at {address}", records, as_json=False, empty="No counters.")
