"""`sluice cluster`: brokers and their counters, replicas, and the choice of a master."""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any, Final

import click

from sluicemq.cli.ending import EXIT_FINDINGS, note_pending_change
from sluicemq.cli.output import (
    admin_options,
    confirm,
    print_json,
    print_records,
    print_result,
    yes_option,
)
from sluicemq.client.admin.replicas import MASTER
from sluicemq.client.sync.admin import Admin
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.files.machine import process_space
from sluicemq.model.topic import MASTER_ID

MASTER_TIMEOUT_S: Final = 30.0
"""The longest time to wait for a new master."""
MASTER_POLL_S: Final = 0.1
_NO_BROKERS: Final = "No broker is registered. Start one: sluice broker."


@click.group()
def cluster() -> None:
    """Show the brokers of a cluster, or make another replica master."""


@cluster.command("list")
@admin_options
def list_brokers(admin: Admin, as_json: bool) -> None:
    """List all brokers with their address, role and rates, and whether they can be reached."""
    brokers = sorted(
        admin.cluster_info().brokers.values(), key=lambda data: (data.cluster, data.broker)
    )
    records = []
    for data in brokers:
        for broker_id, address in sorted(data.addresses.items()):
            runtime: dict[str, str] = {}
            try:
                runtime = admin.runtime(address)
                state = "up"
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
    print_records(records, as_json=as_json, empty=_NO_BROKERS)


def _rate(text: str) -> float | None:
    """Return the first rate in `text`, in messages per second; None if it is not a number.

    A broker reports the rates over 10 s, 1 min and 10 min as one text, separated by blanks.
    """
    try:
        return round(float(text.partition(" ")[0]), 1)
    except ValueError:
        return None


@cluster.command("show")
@click.argument("broker")
@admin_options
def show_broker(admin: Admin, broker: str, as_json: bool) -> None:
    """Show all counters of BROKER, which is a broker's name or host:port."""
    address = broker
    if ":" not in broker:
        masters = admin.masters()
        if broker not in masters:
            raise ConfigurationError(
                f"the broker {broker!r} does not exist.",
                fix=f"Choose one of the registered brokers: {', '.join(masters) or 'none'}.",
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
    """Show the replicas of each broker: role, term, whether they are in sync, and their lag.

    With --json, print one object: `brokers` is a list with broker, id, role, address, epoch (the
    term), inSync, lagBytes, pid (of processes on this machine) and more. Exit code 1 if a broker
    has no master.
    """
    rows = admin.replicas()
    local_process_space = process_space()
    for row in rows:
        state_report = row.pop("said") or {}  # what the replica says about itself
        # A process id has a meaning only in its own process namespace.
        is_local_process = state_report.get("processSpace") == local_process_space
        row["pid"] = state_report.get("pid") if is_local_process else None
        row["consensus"] = state_report.get("consensus")
    if as_json:
        print_json({"brokers": rows})
    else:
        columns = (
            "broker id role address epoch in_sync=inSync lag_bytes=lagBytes lag=lagMs:span pid "
            "state"
        )
        print_records(rows, columns=columns, empty=_NO_BROKERS)
    brokers_with_master = {row["broker"] for row in rows if row["role"] == MASTER}
    brokers_without_master = {row["broker"] for row in rows} - brokers_with_master
    if brokers_without_master:
        raise SystemExit(EXIT_FINDINGS)


_broker_option = click.option(
    "--broker", help="Name of the broker. Required if the cluster has several."
)


@cluster.command("switch")
@click.option(
    "--to",
    type=int,
    help="Id of the replica that becomes master. Default: the one with the longest log.",
)
@_broker_option
@admin_options
def switch(admin: Admin, to: int | None, broker: str | None, as_json: bool) -> None:
    """Make another in-sync replica master, without failed sends."""
    note_pending_change("sluice cluster status")
    row_before = admin.switch_master(broker=broker, to=to)
    _await_master(admin, row_before, as_json=as_json)


@cluster.command("elect")
@click.argument("broker_id", metavar="ID", type=int)
@click.option(
    "--unclean",
    is_flag=True,
    required=True,
    help="Accept that acknowledged messages may be lost. Without this option, nothing is done.",
)
@yes_option
@_broker_option
@admin_options
def elect(
    admin: Admin, broker_id: int, unclean: bool, yes: bool, broker: str | None, as_json: bool
) -> None:
    """Make replica ID master although it is not in sync, if the in-sync replicas are lost."""
    del unclean  # required, so that the user states it; it changes nothing else
    confirm(
        f"Replica {broker_id} may lack acknowledged messages. They are lost permanently if it "
        "becomes master. Continue?",
        yes=yes,
    )
    note_pending_change("sluice cluster status")
    row_before = admin.elect_master(broker_id, broker=broker)
    _await_master(admin, row_before, as_json=as_json)


def _await_master(admin: Admin, row_before: Mapping[str, Any], *, as_json: bool) -> None:
    """Wait until the broker has a master in a later term, and print that replica.

    `row_before` is a row of the broker in `admin.replicas()` from before the change; its key
    "epoch" is the term (the period in which one replica is master). Errors of requests are ignored
    while waiting. Raises ConfigurationError if no replica is master after `MASTER_TIMEOUT_S`.
    """
    broker = row_before["broker"]
    term_before = row_before["epoch"] or 0
    clock = SYSTEM_CLOCK
    deadline_s = clock.monotonic_s() + MASTER_TIMEOUT_S
    pause = threading.Event()
    while clock.monotonic_s() < deadline_s:
        with contextlib.suppress(SluiceError):
            for row in admin.replicas():
                is_master = row["broker"] == broker and row["role"] == MASTER
                is_later_term = (row["epoch"] or 0) > term_before
                if is_master and is_later_term:
                    row.pop("said")
                    text = f"Replica {row['id']} of {broker} is master, epoch {row['epoch']}"
                    print_result(row, f"{text}, at {row['address']}.", as_json=as_json)
                    return
        pause.wait(MASTER_POLL_S)
    raise ConfigurationError(
        f"the broker {broker} has no new master after {MASTER_TIMEOUT_S:g} s.",
        fix="See `sluice cluster status` and the logs of its replicas.",
    )
