"""`sluice cluster`: brokers and how they do, their replicas, and who is master."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, Final

import click

from sluicemq.cli.ending import undecided
from sluicemq.cli.output import admin_options, print_json, print_records, print_result
from sluicemq.client.admin.replicas import MASTER
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.files.machine import process_space
from sluicemq.model.topic import MASTER_ID

SWITCH_S: Final = 30.0
LOOK_S: Final = 0.1


@click.group()
def cluster() -> None:
    """Show the brokers of a cluster; change which replica is master."""


@cluster.command("list")
@admin_options
def list_brokers(admin: Admin, as_json: bool) -> None:
    """List every broker with its addresses and whether it can be reached from here."""
    records = []
    for data in sorted(
        admin.cluster_info().brokers.values(), key=lambda data: (data.cluster, data.broker)
    ):
        for broker_id, address in sorted(data.addresses.items()):
            runtime: dict[str, str] = {}
            try:
                runtime, state = admin.runtime(address), "up"
            except SluiceError as error:
                state = f"unreachable: {error}"
            records.append(
                {
                    "cluster": data.cluster,
                    "broker": data.broker,
                    "role": "master" if broker_id == MASTER_ID else f"slave {broker_id}",
                    "address": address,
                    "version": runtime.get("brokerVersionDesc", ""),
                    "in_per_s": _rate(runtime.get("putTps", "")),
                    "out_per_s": _rate(runtime.get("getTransferredTps", "")),
                    "state": state,
                }
            )
    print_records(
        records, as_json=as_json, empty="No broker is registered. Start one: sluice broker."
    )


def _rate(text: str) -> float | None:
    """The first of three rates: over 10 s, 1 min, 10 min (spec/admin.md §3)."""
    try:
        return round(float(text.partition(" ")[0]), 1)
    except ValueError:
        return None


@cluster.command("show")
@click.argument("broker")
@admin_options
def show_broker(admin: Admin, broker: str, as_json: bool) -> None:
    """Show every counter of BROKER (its name, or host:port)."""
    address = broker
    if ":" not in broker:
        masters = admin.masters()
        if broker not in masters:
            raise ConfigurationError(
                f"there is no broker {broker!r}.",
                fix=f"The name server knows: {', '.join(masters) or 'none'}.",
            )
        address = masters[broker]
    runtime = dict(sorted(admin.runtime(address).items()))
    if as_json:
        print_json(runtime)
        return
    records = [{"counter": name, "value": value} for name, value in runtime.items()]
    print_records(records, title=f"{broker} at {address}", empty="No counters.")


# -------------------------------------------------------------------------------- replicas


@cluster.command("status")
@admin_options
def status(admin: Admin, as_json: bool) -> None:
    """Show which replica of each broker is master, who is in sync, how far behind the others are.

    With --json one object: `brokers`, a list of broker, id, role, address, epoch, inSync, lagBytes,
    pid (of processes on this machine) and more. Exit code 1 when a broker has no master.
    """
    rows = admin.replicas()
    here = process_space()
    for row in rows:
        said = row.pop("said") or {}
        row["pid"] = said.get("pid") if said.get("processSpace") == here else None
        row["consensus"] = said.get("consensus")
    if as_json:
        print_json({"brokers": rows})
    else:
        columns = (
            "broker id role address epoch in_sync=inSync lag_bytes=lagBytes lag=lagMs:span pid "
            "state"
        )
        empty = "No broker is registered. Start one: sluice broker."
        print_records(rows, columns=columns, empty=empty)
    if {row["broker"] for row in rows if row["role"] != MASTER} - {
        row["broker"] for row in rows if row["role"] == MASTER
    }:
        click.get_current_context().exit(1)


_broker_option = click.option("--broker", help="Which broker, where there are several.")


@cluster.command("switch")
@click.option("--to", type=int, help="Id of the replica that is to be master.")
@_broker_option
@admin_options
def switch(admin: Admin, to: int | None, broker: str | None, as_json: bool) -> None:
    """Make another replica master on purpose, without a failed send."""
    undecided("sluice cluster status")
    before = admin.switch_master(broker=broker, to=to)
    _await_master(admin, before, as_json=as_json)


@cluster.command("elect")
@click.argument("broker_id", metavar="ID", type=int)
@click.option(
    "--unclean",
    is_flag=True,
    required=True,
    help="Say that messages which were acknowledged may be lost with those that are gone.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@_broker_option
@admin_options
def elect(
    admin: Admin, broker_id: int, unclean: bool, yes: bool, broker: str | None, as_json: bool
) -> None:
    """Make replica ID master though it is not in sync, when those that are will not come back."""
    del unclean  # it is there to be said
    if not yes:
        click.confirm(
            f"Replica {broker_id} may lack messages that were acknowledged; they are lost for good "
            "if it becomes master. Go on?", abort=True, err=True,
        )  # fmt: skip
    undecided("sluice cluster status")
    before = admin.elect_master(broker_id, broker=broker)
    _await_master(admin, before, as_json=as_json)


def _await_master(admin: Admin, before: Mapping[str, Any], *, as_json: bool) -> None:
    """Says who is master in a newer epoch than before. Raises ConfigurationError when nobody is."""
    clock = SYSTEM_CLOCK
    end_s = clock.monotonic_s() + SWITCH_S
    pause = threading.Event()
    while clock.monotonic_s() < end_s:
        with contextlib.suppress(SluiceError):
            for row in admin.replicas():
                is_newer = (row["epoch"] or 0) > (before["epoch"] or 0)
                if row["broker"] == before["broker"] and row["role"] == MASTER and is_newer:
                    row.pop("said")
                    text = f"Replica {row['id']} of {row['broker']} is master, epoch {row['epoch']}"
                    print_result(row, f"{text}, at {row['address']}.", as_json=as_json)
                    return
        pause.wait(LOOK_S)
    raise ConfigurationError(
        f"broker {before['broker']} has no new master after {SWITCH_S:g} s.",
        fix="See `sluice cluster status` and the logs of its replicas.",
    )
