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
from sluicemq.errors import (
    ClientError,
    ConfigurationError,
    ConnectionLostError,
    NameServerUnreachableError,
    RequestError,
    RequestTimeoutError,
    SluiceError,
)
from sluicemq.files.machine import process_space
from sluicemq.model.topic import MASTER_ID

MASTER_TIMEOUT_S: Final = 30.0
"""The longest time to wait for a new master."""
MASTER_POLL_S: Final = 0.1
START_TIMEOUT_S: Final = 30.0
"""The default of `cluster wait --timeout`."""
START_POLL_S: Final = 0.1
_NO_BROKERS: Final = "No broker is registered. Start one: sluice broker."


@click.group()
def cluster() -> None:
    """Show the brokers of a cluster, wait for them, or make another replica master."""


@cluster.command("list")
@admin_options
def list_brokers(admin: Admin, as_json: bool) -> None:
    """List all brokers with their address, role and rates, and whether they can be reached."""
    brokers = sorted(
        admin.cluster_info().brokers.values(), key=lambda broker: (broker.cluster, broker.broker)
    )
    records = []
    for broker in brokers:
        for broker_id, address in sorted(broker.addresses.items()):
            role = "master" if broker_id == MASTER_ID else f"slave {broker_id}"
            record = {"cluster": broker.cluster, "broker": broker.broker, "role": role}
            records.append(record | _ask_for_rates(admin, address))
    print_records(records, as_json=as_json, empty=_NO_BROKERS)


def _ask_for_rates(admin: Admin, address: str) -> dict[str, Any]:
    """Return the version, the rates and the state of the broker at `address`, for `cluster list`.

    An error of the request is part of the state. The version is then "", and the rates are None.
    """
    runtime: dict[str, str] = {}
    try:
        runtime = admin.runtime(address)
        state = "up"
    except SluiceError as error:
        state = f"unreachable: {error}"
    return {
        "address": address,
        "version": runtime.get("brokerVersionDesc", ""),
        "in_per_s": _parse_first_rate(runtime.get("putTps", "")),
        "out_per_s": _parse_first_rate(runtime.get("getTransferredTps", "")),
        "state": state,
    }


def _parse_first_rate(rates: str) -> float | None:
    """Return the first number of a text such as "12.5 10.0 9.8", rounded; None if it is none.

    A broker reports rates in messages per second over 10 s, 1 min and 10 min as such a text.
    """
    first_rate, _, _ = rates.partition(" ")
    try:
        return round(float(first_rate), 1)
    except ValueError:
        return None


@cluster.command("show")
@click.argument("broker")
@admin_options
def show_broker(admin: Admin, broker: str, as_json: bool) -> None:
    """Show all counters of BROKER, which is a broker's name or host:port."""
    is_address = ":" in broker
    address = broker if is_address else _find_master(admin, broker)
    counters = dict(sorted(admin.runtime(address).items()))
    if as_json:
        print_json(counters)
        return
    records = [{"counter": name, "value": value} for name, value in counters.items()]
    print_records(records, title=f"{broker} at {address}", empty="No counters.")


def _find_master(admin: Admin, broker: str) -> str:
    """Return the address of a broker's master. Raises ConfigurationError for an unknown name."""
    masters = admin.masters()
    if broker not in masters:
        raise ConfigurationError(
            f"the broker {broker!r} does not exist.",
            fix=f"Choose one of the registered brokers: {', '.join(masters) or 'none'}.",
        )
    return masters[broker]


@cluster.command("wait")
@click.option(
    "--brokers",
    type=click.IntRange(1),
    metavar="N",
    default=1,
    show_default=True,
    help="Number of brokers to wait for.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=START_TIMEOUT_S,
    show_default=True,
    help="Longest time to wait, in seconds.",
)
@admin_options
def wait(admin: Admin, brokers: int, timeout_s: float, as_json: bool) -> None:
    """Wait until the name server responds and brokers are registered that respond, too.

    Print the brokers. Use it after a command that starts servers in the background. Exit code 1 if
    they are not ready in time.
    """
    deadline_s = SYSTEM_CLOCK.monotonic_s() + timeout_s
    pause = threading.Event()
    masters: dict[str, str] = {}
    while True:
        try:
            masters = _find_responding_masters(admin)
            if len(masters) >= brokers:
                break
            missing = f"{len(masters)} of {brokers} brokers are registered"
        except (NameServerUnreachableError, ConnectionLostError, RequestTimeoutError) as error:
            missing = error.fact
        if SYSTEM_CLOCK.monotonic_s() >= deadline_s:
            raise ClientError(
                f"the cluster is not ready after {timeout_s:g} s: {missing}.",
                fix="Read the log of its servers, or wait longer with --timeout.",
            )
        pause.wait(START_POLL_S)
    for name, address in masters.items():
        record = {"broker": name, "address": address}
        print_result(record, f"Broker {name} at {address} is ready.", as_json=as_json)


def _find_responding_masters(admin: Admin) -> dict[str, str]:
    """Return the addresses of all registered masters, by the name of the broker.

    Raises NameServerUnreachableError if no name server responds, and ConnectionLostError or
    RequestTimeoutError if a master does not respond.
    """
    masters = admin.masters()
    for address in masters.values():
        with contextlib.suppress(RequestError):  # a refusal is a response, too
            admin.runtime(address)
    return masters


# -------------------------------------------------------------------------------- replicas


@cluster.command("status")
@admin_options
def status(admin: Admin, as_json: bool) -> None:
    """Show the replicas of each broker: role, term, whether they are in sync, and their lag.

    The state of a replica is `up`, or why it waits or does not respond. With --json, print one
    object: `brokers` is a list with broker, id, role, address, epoch (the term), inSync, lagBytes,
    pid (of processes on this machine), state and more. Exit code 1 if a broker has no master.
    """
    replicas = admin.replicas()
    for replica in replicas:
        _add_state_report(replica)
    if as_json:
        print_json({"brokers": replicas})
    else:
        columns = (
            "broker id role address term=epoch in_sync=inSync lag_bytes=lagBytes lag=lagMs:span "
            "pid:id state"
        )
        print_records(replicas, columns=columns, empty=_NO_BROKERS)

    brokers_with_master = {replica["broker"] for replica in replicas if replica["role"] == MASTER}
    brokers_without_master = {replica["broker"] for replica in replicas} - brokers_with_master
    if brokers_without_master:
        raise SystemExit(EXIT_FINDINGS)


def _add_state_report(replica: dict[str, Any]) -> None:
    """Replace the key "said" of a row of `admin.replicas()` by "pid" and "consensus".

    "said" is what the replica reports about itself, or None. "pid" is its process id; it is None
    for a process on another machine or in another container. Without a report, both are None.
    """
    state_report = replica.pop("said") or {}
    # A process id has a meaning only in its own process namespace.
    is_local_process = state_report.get("processSpace") == process_space()
    replica["pid"] = state_report.get("pid") if is_local_process else None
    replica["consensus"] = state_report.get("consensus")


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
    """Make replica ID master although it is not in sync, if the in-sync replicas are lost.

    It is refused while the master, or another replica that is in sync, is running.
    """
    del unclean  # required, so that the user states it; it changes nothing else
    confirm(
        f"Replica {broker_id} may lack acknowledged messages. They are lost permanently if it "
        "becomes master. Continue?",
        yes=yes,
    )
    note_pending_change("sluice cluster status")
    row_before = admin.elect_master(broker_id, broker=broker)
    _await_master(admin, row_before, only_id=broker_id, as_json=as_json)


def _await_master(
    admin: Admin, row_before: Mapping[str, Any], *, only_id: int | None = None, as_json: bool
) -> None:
    """Wait until the broker has a master in a later term, and print that replica.

    `row_before` is a row of the broker in `admin.replicas()` from before the change; its key
    "epoch" is the term (the period in which one replica is master). If `only_id` is given, the
    master must be the replica with this id. Errors of requests are ignored while waiting. Raises
    ConfigurationError if no such replica is master after `MASTER_TIMEOUT_S`.
    """
    broker = row_before["broker"]
    term_before = row_before["epoch"] or 0
    deadline_s = SYSTEM_CLOCK.monotonic_s() + MASTER_TIMEOUT_S
    pause = threading.Event()
    while SYSTEM_CLOCK.monotonic_s() < deadline_s:
        new_master = None
        with contextlib.suppress(SluiceError):
            new_master = _find_new_master(admin, broker, term_before, only_id)
        if new_master is not None:
            new_master.pop("said")
            print_result(
                new_master,
                f"Replica {new_master['id']} of {broker} is master, term {new_master['epoch']}, "
                f"at {new_master['address']}.",
                as_json=as_json,
            )
            return
        pause.wait(MASTER_POLL_S)
    raise ConfigurationError(
        f"the broker {broker} has no new master after {MASTER_TIMEOUT_S:g} s.",
        fix="See `sluice cluster status` and the logs of its replicas.",
    )


def _find_new_master(
    admin: Admin, broker: str, term_before: int, only_id: int | None
) -> dict[str, Any] | None:
    """Return the row of a broker's master if it became master after the term `term_before`.

    A term is the period in which one replica is master; terms are numbered. The row is one of
    `admin.replicas()`. If `only_id` is given, only the replica with this id is considered. Returns
    None without such a master. Raises SluiceError if the replicas cannot be asked.
    """
    for replica in admin.replicas():
        is_master = replica["broker"] == broker and replica["role"] == MASTER
        is_expected = only_id in (None, replica["id"])
        if is_master and is_expected and (replica["epoch"] or 0) > term_before:
            return replica
    return None
