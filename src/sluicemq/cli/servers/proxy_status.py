"""`sluice proxy status`: the state of a running proxy.

The command asks the proxy at its own port, with a method that only SluiceMQ's proxy has. So it
makes no difference whether the proxy runs in a broker or alone.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from sluicemq.cli.output import Access, json_option, print_json, print_records, server_options
from sluicemq.cli.servers.ports import PROXY_PORT
from sluicemq.model.addresses import LOOPBACK
from sluicemq.proxy import fetch_proxy_status

if TYPE_CHECKING:
    from sluicemq.client.core.names import Credentials


@click.command()
@click.argument("address", default=f"{LOOPBACK}:{PROXY_PORT}")
@server_options
@json_option
def status(address: str, access: Access, as_json: bool) -> None:
    """Show the clients, calls and long polls of the proxy at ADDRESS.

    ADDRESS is host:port. Default: 127.0.0.1:8081. With access control, this requires an admin
    account.
    """
    state = fetch_proxy_status(address, access.credentials)
    if as_json:
        print_json(state)
        return

    clients = state["clients"]
    print_proxy_clients(clients, f"Clients of {address}")
    _print_calls(state["methods"])
    for warning in state["warnings"]:
        click.echo(f"warning: {warning}")
    polls_count = sum(client["polls"] for client in clients)
    mode = "runs in its broker" if state["mode"] == "local" else "runs alone"
    click.echo(
        f"{state['connections']} connections, {len(clients)} clients, {polls_count} waiting polls. "
        f"The proxy {mode}."
    )


def _print_calls(methods: list[dict[str, Any]]) -> None:
    """Print a table of gRPC methods: calls in flight, answers by status code, and mean duration."""
    records = []
    for method in methods:
        answers = ", ".join(f"{code} {count:,}" for code, count in method["codes"].items())
        records.append(method | {"answers": answers})
    columns = "method in_flight=in_flight answers mean_ms=mean_ms"
    print_records(records, columns=columns, title="Calls")


def fetch_clients_of_group(
    group: str, proxies: Iterable[str], credentials: "Credentials | None"
) -> list[dict[str, Any]]:
    """Return the members of a group that are connected to the proxies at these addresses.

    Each is a dictionary as in `fetch_proxy_status`, with the proxy's address as `proxy`.
    """
    members = []
    for address in proxies:
        clients = fetch_proxy_status(address, credentials)["clients"]
        members += [client | {"proxy": address} for client in clients if client["group"] == group]
    return members


def print_proxy_clients(clients: list[dict[str, Any]], title: str) -> None:
    """Print clients of a proxy as a table. They are records of `fetch_proxy_status`."""
    records = []
    for client in clients:
        subscriptions = "; ".join(
            f"{topic} {expression}".rstrip() for topic, expression in client["topics"].items()
        )
        records.append(client | {"subscriptions": subscriptions})
    columns = (
        "client=client_id kind language version address=addresses since=since_ms:time group "
        "topics=subscriptions in_flight=in_flight waiting_polls=polls works_on=works_on "
        "stream=has_stream"
    )
    print_records(records, columns=columns, title=title)
