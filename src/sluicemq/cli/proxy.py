"""`sluice proxy status`: what a proxy for gRPC clients does. It is asked at its own port, by a
method that only ours has, so that it makes no difference whether it lives in a broker or alone."""

import click
import orjson

from sluicemq.cli.output import (
    Access,
    json_option,
    print_json,
    print_records,
    server_options,
)
from sluicemq.cli.serve import proxy
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError
from sluicemq.net.grpc import CallError, StatusCode
from sluicemq.net.grpc_client import call
from sluicemq.net.tls import Tls
from sluicemq.proxy import STATUS
from sluicemq.wire.signature import sign_call

DEFAULT_ADDRESS = "127.0.0.1:8081"


@proxy.command("status")
@click.argument("address", default=DEFAULT_ADDRESS)
@server_options
@json_option
def status(address: str, access: Access, as_json: bool) -> None:
    """Clients, calls and waiting polls of the proxy at ADDRESS (host:port, 127.0.0.1:8081)."""
    now = f"{SYSTEM_CLOCK.now_ms()}"
    metadata = sign_call(*access.credentials, now) if access.credentials else ()
    try:
        answer = call(address, STATUS, b"", metadata, tls=Tls.of(None))
    except CallError as error:
        if error.code != StatusCode.UNIMPLEMENTED:
            raise
        raise ConfigurationError(
            f"{address} is no proxy of SluiceMQ: {error}", cure="Name one of `sluice up`."
        ) from error
    found = orjson.loads(answer)
    if as_json:
        print_json(found)
        return
    clients = [
        it
        | {
            "address": it["addresses"],
            "wants": "; ".join(f"{t} {e}".rstrip() for t, e in it["topics"].items()),
        }
        for it in found["clients"]
    ]
    columns = (
        "client=client_id kind language version address since=since_ms:time group "
        "topics=wants in_flight=in_flight waiting_polls=polls stream=has_stream"
    )
    print_records(clients, columns=columns, title=f"Clients of {address}")
    methods = [
        it | {"answers": ", ".join(f"{name} {count:,}" for name, count in it["codes"].items())}
        for it in found["methods"]
    ]
    columns = "method in_flight=in_flight answers mean_ms=mean_ms"
    print_records(methods, columns=columns, title="Calls")
    polls = sum(it["polls"] for it in found["clients"])
    click.echo(
        f"{found['connections']} connections, {len(clients)} clients, {polls} waiting polls; "
        f"the proxy is {'in its broker' if found['mode'] == 'local' else 'alone'}."
    )
