"""`sluice nameserver`, `sluice broker`, `sluice proxy`, `sluice up`: servers in the foreground.

Each prints one line beginning with `ready` on stdout when it serves, logs to stderr, closes in
order on SIGTERM or SIGINT and leaves with 0. What hinders the start is one sentence with its cure
on stderr, and exit code 1. A contract for scripts: it stays as it is.

`sluice proxy status` asks a proxy at its own port, by a method that only ours has, so that it makes
no difference whether it lives in a broker or alone.
"""

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluicemq.cli.output import (
    Access,
    client_options,
    json_option,
    print_json,
    print_records,
    server_options,
)
from sluicemq.cli.servers.inherited import inherited_settings
from sluicemq.cli.servers.inner import RunAccount
from sluicemq.cli.servers.logs import log_options
from sluicemq.cli.servers.ports import PROXY_PORT, PortPlan
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import (
    CHANGES_FILE,
    BrokerConfig,
    Change,
    NameServerConfig,
    StoreConfig,
    decode_properties_file,
    load_broker_config,
    load_local_proxy_config,
    load_name_server_config,
    load_proxy_config,
    parse_properties,
)
from sluicemq.config.keys import MeasuredConfig, Part, ServerConfig, TlsConfig
from sluicemq.config.load import (
    DEFAULT_TLS_FILE,
    java_options,
    key_files,
    parse_json,
    settings_text,
    tls_entries,
)
from sluicemq.config.proxying import ProxyLimits
from sluicemq.config.settings import KEYS
from sluicemq.errors import ConfigurationError, StoreError
from sluicemq.files import SYSTEM_FILES, descriptors, exposure_warning, machine
from sluicemq.model.addresses import LOOPBACK, NAME_SERVER_PORT, format_address, is_wildcard
from sluicemq.proxy import fetch_proxy_status

if TYPE_CHECKING:
    from sluicemq.broker.server import Broker
    from sluicemq.cli.servers.processes import ServerChild
    from sluicemq.net.limits import FairScheduler

METRICS_KEY = "metricsPromExporterPort"
GC_OBJECTS = 20_000
log = logging.getLogger("sluicemq.cli")


class Running(contextlib.AsyncExitStack):
    """Servers that run, and end with it."""

    def __init__(self) -> None:
        super().__init__()
        self.rereads: dict[str, Callable[[], Change]] = {}
        """What takes up the edited file, by its path: on SIGHUP."""
        self.children: list[ServerChild] = []
        self.metrics: list[str] = []
        """The words of the `ready` line that say where metrics and probes are: `metrics=host:port`
        of this process, then those of its children."""
        self.stop = asyncio.Event()
        """Set to end the servers in order: on SIGTERM, SIGINT and `fail`."""
        self.failure: StoreError | None = None

    def fail(self, error: OSError) -> None:
        """End the servers in order and the process with exit code 1, since the store of one
        refuses all writes after `error`."""
        self.failure = StoreError(
            f"The store refuses all writes: {error}.", fix="Check the disk, then start again."
        )
        self.stop.set()

    def tell_metrics(self, config: MeasuredConfig, port: int | None) -> None:
        """Print in the `ready` line that the metrics and probes of this process are at `port`;
        None: they are not served."""
        from sluicemq.net.wsgi import metrics_host  # noqa: PLC0415 - not for `--help`

        if port is not None:
            self.metrics.insert(
                0, f"metrics={format_address(metrics_host(config, for_local_clients=True), port)}"
            )

    def reread(self) -> None:
        """Each server takes up its file. What is wrong there is logged, and nothing changes."""
        for child in self.children:
            child.reread()
        for path, take_up in self.rereads.items():
            try:
                change = take_up()
            except (ConfigurationError, OSError) as error:
                log.error("%s was not taken up: %s", path, error)
            else:
                log.info("%s was read again: %s", path, ", ".join(change.entries) or "no change")
                _log_warnings(path, change.warnings)


Started = Callable[[Running], Awaitable[str]]
"""Starts servers, hands their closing to the stack, and returns the text after `ready`."""


# Options that are settings have the names of their keys.
_config_option = click.option(
    "-c", "--config", "path", type=click.Path(dir_okay=False),
    help="A file in RocketMQ's format (key = value).",
)  # fmt: skip
_host_option = click.option("--host", "bindAddress", help="Address to listen at.")
_port_option = functools.partial(click.option, type=click.IntRange(0, 65535), metavar="PORT")
_store_option = click.option(
    "--store", "storePathRootDir", type=click.Path(file_okay=False), help="Directory of the store."
)
_read_only_option = click.option(
    "--read-only", is_flag=True,
    help="Show a copy of a store, of RocketMQ or ours, and change nothing of it.",
)  # fmt: skip
_proxy_port_option = _port_option(
    "--proxy-port", "grpcServerPort",
    help="Port of the proxy for gRPC clients (8081); 0 takes a free one.",
)  # fmt: skip
_proxy_config_option = click.option(
    "--proxy-config", "proxy_path", type=click.Path(dir_okay=False),
    help="A rmq-proxy.json for the proxy: its port, TLS and limits.",
)  # fmt: skip
_metrics_port_option = _port_option(
    "--metrics-port", METRICS_KEY,
    help="Port of the metrics, /health and /ready (5557); 0, or one that is taken: a free one.",
)  # fmt: skip
_brokers_option = click.option(
    "--brokers", type=click.IntRange(1, 26), metavar="N",
    help="So many brokers, broker-a, …, processes of their own, which share the load.",
)  # fmt: skip
_replicas_option = click.option(
    "--replicas", type=click.IntRange(2, 9), metavar="N",
    help="So many brokers of one name, processes of their own, which fail over; for a trial.",
)  # fmt: skip
_console_option = click.option(
    "--console", is_flag=True, help="Show the cluster in the browser too, by a process of its own."
)


# --------------------------------------------------------------------------------- commands


@click.command()
@_config_option
@_host_option
@_port_option("--port", "listenPort", help="Port to listen at (9876); 0 takes a free one.")
@_port_option(
    "--metrics-port", METRICS_KEY,
    help="Port of /health and /ready (5556); 0, or one that is taken: a free one.",
)  # fmt: skip
@log_options("namesrv")
def nameserver(path: str | None, **keys: Any) -> None:
    """Run a name server until SIGTERM or Ctrl-C."""
    path = path or _changes_file(NameServerConfig().config_path)
    text = _read_config(path)
    keys = _beside_others(keys, text)
    overrides = _given(keys | {"configStorePath": path}) | _tls_file(text, Part.NAME_SERVER)
    config, warnings = load_name_server_config(text, overrides=overrides)
    _log_warnings(path, warnings)

    async def start(stack: Running) -> str:
        return f"nameserver={await start_name_server(config, stack)}"

    run_servers(start)


@click.command()
@_config_option
@_host_option
@_port_option("--port", "listenPort", help="Port to listen at (10911); 0 takes a free one.")
@_store_option
@click.option("--name", "brokerName", help="Name of the broker (brokerName).")
@click.option("-n", "--nameserver", "namesrvAddr", help="Name servers, host:port;host:port.")
@click.option("--enable-proxy", is_flag=True, help="Serve gRPC clients too.")
@_proxy_port_option
@_proxy_config_option
@_metrics_port_option
@click.option(
    "--consensus", "sluiceConsensus", help="Who says which replica is master: etcd://host:port,…"
)
@click.option(
    "--id", "brokerId", type=click.IntRange(1), help="Which of the replicas it is (brokerId)."
)
@_read_only_option
@log_options("broker")
def broker(
    path: str | None, enable_proxy: bool, proxy_path: str | None, read_only: bool, **keys: Any
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    With --read-only it registers with the name servers of --nameserver alone: a copied
    configuration names those of another broker. --proxy-port and --proxy-config mean --enable-proxy
    too. With --consensus a send is answered when the in-sync set has it, unless the file says
    brokerRole.
    """
    proxy = enable_proxy or keys["grpcServerPort"] is not None or proxy_path is not None
    proxy_text = _read_file(proxy_path, "--proxy-config") if proxy_path else None
    path = _broker_path(path, proxy_path, proxy_text)
    head = "brokerRole=SYNC_MASTER\n" if keys["sluiceConsensus"] else ""
    config, store = _broker_settings(path, keys, head=head)
    if (inner := RunAccount.from_environment()) is not None:
        config = inner.add_to(config)
    if read_only and keys["namesrvAddr"] is None:
        config = replace(config, name_server_addresses=())
    served = None
    if proxy_text is not None:
        *served, warnings = load_local_proxy_config(proxy_text, config)
        _log_warnings(proxy_path, warnings)
    start = functools.partial(start_broker, config, store, proxy_settings=served)
    run_servers(functools.partial(start, read_only=read_only, proxy=proxy))


@click.command()
@_config_option
@click.option(
    "--host", "bindAddress",
    help="Address to listen at (127.0.0.1; 0.0.0.0 serves other machines).",
)  # fmt: skip
@_port_option(
    "--nameserver-port", default=NAME_SERVER_PORT, show_default=True,
    help="Port of the name server; 0 takes a free one.",
)  # fmt: skip
@_port_option("--broker-port", "listenPort", help="Port of the broker (10911); 0 takes a free one.")
@_proxy_port_option
@_metrics_port_option
@click.option("--no-proxy", is_flag=True, help="Do not serve gRPC clients.")
@_store_option
@_read_only_option
@_brokers_option
@_replicas_option
@_console_option
@log_options("broker")
def up(
    path: str | None,
    nameserver_port: int,
    no_proxy: bool,
    read_only: bool,
    brokers: int | None,
    replicas: int | None,
    console: bool,
    **keys: Any,
) -> None:
    """Run name server, broker and proxy in one process until SIGTERM or Ctrl-C.

    The configuration file is the broker's. All listen on 127.0.0.1 unless --host or the file's
    bindAddress says otherwise; the name server keeps its files in the store's directory. The proxy
    is left out when it lacks its port or its package, unless its port was given; with a broker at a
    free port it is there only when its port was given. With --brokers or --replicas, each broker,
    etcd and the proxy are processes below this one; so is the console, which listens at 127.0.0.1.
    With aclEnable=true the name server checks signatures too, by the same plain_acl.yml.
    """
    if no_proxy and keys["grpcServerPort"] is not None:
        raise click.UsageError("--no-proxy and --proxy-port contradict each other.")
    if bool(brokers) + bool(replicas) + read_only > 1:
        raise click.UsageError(
            "--brokers, --replicas and --read-only are one or the other: brokers share the load, "
            "replicas fail over (for both run each by itself: sluice broker --name … --consensus … "
            "--id …), and a copy is shown store by store: --store DIRECTORY/broker-a."
        )
    from sluicemq.cli.servers import processes  # noqa: PLC0415 - not for `--help`

    names = processes.names_of(brokers, replicas)
    config, store = _broker_settings(path, keys, head=f"bindAddress={LOOPBACK}\n")
    inner = RunAccount.create(config)
    if inner is not None:
        config = inner.add_to(config)
    processes.check_root(store.root, names)
    if names and path:
        processes.check_settings(path, parse_properties(_read_config(path)), names)
    proxy = None if config.listen_port else False
    if no_proxy or config.proxy_port is not None:
        proxy = not no_proxy
    plan = PortPlan.create(
        config, names, nameserver_port, proxy=proxy, are_replicas=processes.are_replicas(names)
    )
    config = replace(config, metrics_port=plan.metrics)
    if config.bind_address == LOOPBACK:
        log.info(
            "only what runs on this machine (or in this container) reaches %s; --host 0.0.0.0 "
            "serves others", LOOPBACK,
        )  # fmt: skip

    async def start(stack: Running) -> str:
        from sluicemq.net.limits import FairScheduler  # noqa: PLC0415 - not for `--help`

        served = name_server_of(config, store, plan.name_server, alone=bool(names))
        shares = FairScheduler(SYSTEM_CLOCK.monotonic_s, asyncio.get_running_loop().call_soon)
        address = await start_name_server(served, stack, read_only=read_only, shares=shares)
        if names:
            text = await _start_children(names, store, address, config, path, plan, stack, inner)
        else:
            here = replace(config, name_server_addresses=(address,))
            text = await start_broker(
                here, store, stack, read_only=read_only, proxy=proxy, shares=shares
            )
        if console:
            port = plan.with_console_port().console
            link = await processes.start_console(address, port, stack, inner)
            text = f"{text} console={link}"
        return f"nameserver={address} {text}"

    run_servers(start)


@click.group(invoke_without_command=True)
@client_options
@click.option(
    "-c", "--config", "path", type=click.Path(dir_okay=False),
    help="A file in the format of RocketMQ's rmq-proxy.json.",
)  # fmt: skip
@_host_option
@_port_option("--port", "grpcServerPort", help="Port to listen at (8081); 0 takes a free one.")
@_metrics_port_option
@log_options("proxy")
def proxy(access: Access, path: str | None, **keys: Any) -> None:
    """Run a proxy for gRPC clients before a cluster, ours or RocketMQ's, until SIGTERM or Ctrl-C.

    Options of TLS and the account are for what it asks brokers and name servers.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        return
    text = _read_file(path) if path else ""
    if keys["grpcServerPort"] == 0 and METRICS_KEY not in text and keys[METRICS_KEY] is None:
        keys = keys | {METRICS_KEY: 0}
    inner = RunAccount.from_environment()
    config, warnings = load_proxy_config(
        text,
        overrides={
            **inherited_settings(),
            **_given(keys),
            **_tls_file("", Part.PROXY),
            **(inner.overrides if inner else {}),
        },
        path=path or "",
    )
    _log_warnings(path, warnings)
    _warn_of_exposure(*key_files(config))
    source = context.get_parameter_source("name_servers")
    is_said = source is click.core.ParameterSource.COMMANDLINE
    name_servers = access.name_servers
    if config.name_server_addresses and not is_said:
        name_servers = ";".join(config.name_server_addresses)

    async def start(stack: Running) -> str:
        from sluicemq.proxy.cluster import serve_cluster_proxy  # noqa: PLC0415 - protobuf may be missing

        served = serve_cluster_proxy(config, name_servers, access.credentials)
        proxy = await stack.enter_async_context(served)
        stack.tell_metrics(config, proxy.metrics_port)
        return f"proxy={format_address(_here(config), proxy.port)}"

    run_servers(start)


@proxy.command("status")
@click.argument("address", default=f"{LOOPBACK}:{PROXY_PORT}")
@server_options
@json_option
def status(address: str, access: Access, as_json: bool) -> None:
    """Show clients, calls and waiting polls of the proxy at ADDRESS (host:port, 127.0.0.1:8081)."""
    found = fetch_proxy_status(address, access.credentials)
    if as_json:
        print_json(found)
        return
    print_proxy_clients(found["clients"], f"Clients of {address}")
    methods = [
        it | {"answers": ", ".join(f"{name} {count:,}" for name, count in it["codes"].items())}
        for it in found["methods"]
    ]
    columns = "method in_flight=in_flight answers mean_ms=mean_ms"
    print_records(methods, columns=columns, title="Calls")
    for warning in found["warnings"]:
        click.echo(f"warning: {warning}")
    polls = sum(it["polls"] for it in found["clients"])
    click.echo(
        f"{found['connections']} connections, {len(found['clients'])} clients, {polls} waiting "
        f"polls; the proxy is {'in its broker' if found['mode'] == 'local' else 'alone'}."
    )


def print_proxy_clients(clients: list[dict[str, Any]], title: str) -> None:
    """A line each."""
    shown = [
        it
        | {"wants": "; ".join(f"{topic} {wish}".rstrip() for topic, wish in it["topics"].items())}
        for it in clients
    ]
    columns = (
        "client=client_id kind language version address=addresses since=since_ms:time group "
        "topics=wants in_flight=in_flight waiting_polls=polls works_on=works_on stream=has_stream"
    )
    print_records(shown, columns=columns, title=title)


# ---------------------------------------------------------------------------------- servers


def name_server_of(
    config: BrokerConfig, store: StoreConfig, port: int, *, alone: bool = False
) -> NameServerConfig:
    """The name server of `sluice up`: beside its broker, its files in the store's directory, with
    the same access rules. The broker's port answers probes for both, unless the name server is
    `alone` in this process: then it has that port."""
    path = f"{store.root}/namesrv/{CHANGES_FILE}"
    names, warnings = load_name_server_config(
        _read_config(_changes_file(path)),
        overrides={
            "bindAddress": config.bind_address,
            "listenPort": str(port),
            "kvConfigPath": f"{store.root}/namesrv/kvConfig.json",
            "configStorePath": path,
        },
    )
    _log_warnings(path, warnings)
    tls = {item.name: getattr(config, item.name) for item in fields(TlsConfig) if item.compare}
    return replace(
        names,
        acl_enable=config.acl_enable,
        acl_files=config.acl_files,
        acl_compatible=config.acl_compatible,
        inner_account=config.inner_account,
        metrics_enable=alone and config.metrics_enable,
        metrics_host=config.metrics_host,
        metrics_port=config.metrics_port,
        **tls,
    )


async def start_name_server(
    config: NameServerConfig,
    stack: Running,
    *,
    read_only: bool = False,
    shares: "FairScheduler | None" = None,
) -> str:
    """Start a name server that the stack closes. `shares` are those of other servers on this loop.
    Return its address from this machine."""
    from sluicemq.files.overlay import OverlayFiles  # noqa: PLC0415 - not for `--help`
    from sluicemq.nameserver.server import NameServer  # noqa: PLC0415
    from sluicemq.net import wsgi  # noqa: PLC0415

    _warn_of_exposure(*key_files(config))
    files = OverlayFiles() if read_only else SYSTEM_FILES
    server = NameServer(config, files=files, shares=shares)
    await server.start()
    stack.push_async_callback(server.close)
    if config.metrics_enable:
        opened = await asyncio.to_thread(
            wsgi.serve_probes, config, server.unhealthy, server.unready
        )
        if opened is not None:
            stack.tell_metrics(config, opened[0])
            stack.callback(opened[1])
    if config.config_path:
        stack.rereads[config.config_path] = server.requests.reread_config
    log.info("The Name Server boot success. serializeType=JSON, address %s", _here(config))
    return format_address(_here(config), server.port)


async def start_broker(
    config: BrokerConfig,
    store: StoreConfig,
    stack: Running,
    *,
    read_only: bool = False,
    proxy: bool | None = False,
    proxy_settings: Sequence[Any] | None = None,
    shares: "FairScheduler | None" = None,
) -> str:
    """Start a broker that the stack closes, and return what is said of it when it is ready.

    `proxy`: None starts one if its port is free. `proxy_settings` are with what and within which
    limits it is served, as `load_local_proxy_config` returns them; None: as the broker. `shares`
    are those of other servers on this loop.
    """
    _warn_of_exposure(*key_files(config))
    if config.consensus and not read_only:
        from sluicemq.broker.failover.broker_replica import run_replica  # noqa: PLC0415 - few have replicas
        from sluicemq.broker.failover.etcd import Etcd  # noqa: PLC0415 - few have replicas

        consensus = Etcd.from_config(config)
        _, server = await stack.enter_async_context(run_replica(config, store, consensus))
    else:
        from sluicemq.broker.server import Broker  # noqa: PLC0415 - not for name servers

        server = Broker(config, store, read_only=read_only, scheduler=shares)
        await server.start()
        stack.push_async_callback(server.close)
    server.on_store_failure = stack.fail
    if config.config_path and not read_only:
        stack.rereads[config.config_path] = server.reread_config
    log.info(
        "The broker[%s, %s] boot success. serializeType=JSON", config.broker_name, server.address
    )
    text = f"broker={server.address} store={store.root}{' read-only' if read_only else ''}"
    served, limits = proxy_settings or (config, ProxyLimits())
    text = await _with_proxy(text, proxy, _start_proxy(served, limits, server, stack))
    stack.tell_metrics(config, await server.metrics_opened())
    return text


async def _start_children(
    names: Sequence[str],
    store: StoreConfig,
    name_server: str,
    config: BrokerConfig,
    path: str | None,
    plan: PortPlan,
    stack: Running,
    inner: RunAccount | None,
) -> str:
    """Start the brokers `names` and their proxy as processes of their own, at the ports of `plan`.
    Return what the `ready` line says of them. Raises ConfigurationError."""
    from sluicemq.cli.servers import processes  # noqa: PLC0415 - not for one broker

    plan = plan.with_broker_ports()
    text = await processes.start_brokers(
        names, store.root, name_server, config, path, plan, stack, stack.children, inner
    )
    plan = plan.with_proxy_ports()
    if plan.proxy is not None:
        start = processes.start_proxy(config, name_server, plan.proxy, stack, stack.children, inner)
        text = await _with_proxy(text, plan.needs_proxy or None, start)
    stack.metrics += [child.told_metrics for child in stack.children if child.metrics]
    return text


async def _with_proxy(text: str, proxy: bool | None, start: Coroutine[Any, Any, str]) -> str:
    """`text` and the proxy that `start` starts; None: without one, if it cannot be had."""
    if proxy is False:
        start.close()
        return text
    try:
        return f"{text} proxy={await start}"
    except ConfigurationError as error:
        if proxy:
            raise
        log.warning(
            "no proxy for gRPC clients: %s Or give --proxy-port another one, or --no-proxy.", error
        )
    return text


def _proxy_port(config: BrokerConfig) -> int:
    return PROXY_PORT if config.proxy_port is None else config.proxy_port


async def _start_proxy(
    config: BrokerConfig, limits: ProxyLimits, server: "Broker", stack: Running
) -> str:
    """Start the proxy of a broker, and return its address from this machine."""
    from sluicemq.proxy.local import make_local_proxy  # noqa: PLC0415 - protobuf may be missing

    _warn_of_exposure(*key_files(config))
    proxy = make_local_proxy(server, config, limits)
    await proxy.start(config.listen_address, _proxy_port(config))
    stack.push_async_callback(proxy.close)
    return format_address(_here(config), proxy.port)


def _here(config: ServerConfig) -> str:
    """The address of a server from this machine."""
    return LOOPBACK if is_wildcard(config.listen_address) else config.bind_address


def run_servers(start: Started) -> None:
    """Serve until a signal. Exit code 0 after an orderly close, 1 when the start fails."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        async with Running() as stack:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stack.stop.set)
            text = await start(stack)
            loop.add_signal_handler(signal.SIGHUP, stack.reread)
            # What lives as long as the server is not looked at by the collector again. Requests
            # make no cycles, so young objects die by their counts: rare collections suffice.
            gc.collect()
            gc.freeze()
            gc.set_threshold(GC_OBJECTS, 20, 20)
            machine.start_memory_trimming()
            click.echo(" ".join(["ready", text, *stack.metrics]))
            await stack.stop.wait()
            log.info("closing")
        if stack.failure is not None:
            raise stack.failure

    log.info("%s", descriptors.describe_limits(descriptors.raise_limit()))
    try:
        from uvloop import new_event_loop  # noqa: PLC0415 - where it is installed
    except ModuleNotFoundError:
        new_event_loop = None
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve())
    except OSError as error:
        raise ConfigurationError(
            f"{error.strerror or error}: {error.filename or 'the store'}.",
            fix=descriptors.FIX
            if error.errno in (errno.EMFILE, errno.ENFILE)
            else "Choose another directory with --store, or give this user the right to write.",
        ) from error


# ---------------------------------------------------------------------------------- options


def settings_of(part: Part, path: str | None, name_servers: str | None = None) -> str:
    """Return every setting of a server with this file, as it would be in force, as `key=value`
    lines. `name_servers` are those of a broker's command line."""
    text = _read_config(path)
    if part is Part.NAME_SERVER:
        names, warnings = load_name_server_config(text)
        configs: dict[Part, Any] = {part: names}
    else:
        overrides = _given({"namesrvAddr": name_servers})
        broker, store, warnings = load_broker_config(text, overrides=overrides)
        configs = {Part.BROKER: broker, Part.STORE: store}
    _log_warnings(path, warnings)
    return settings_text(configs, configs)


def _read_config(path: str | None, option: str = "-c") -> str:
    if path is None:
        return ""
    text = _read_file(path, option)
    entries = parse_properties(text)
    if any(entries.get(key.name) for key in KEYS if key.is_secret):
        _warn_of_exposure(path)
    return text


def _read_file(path: str, option: str = "-c") -> str:
    try:
        return decode_properties_file(Path(path).read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}.", fix=f"Name a readable file with {option}."
        ) from error


def _warn_of_exposure(*paths: str) -> None:
    for path in paths:
        warning = exposure_warning(SYSTEM_FILES, path)
        if warning is not None:
            log.warning("%s", warning)


def _broker_path(path: str | None, proxy_path: str | None, proxy_text: str | None) -> str | None:
    """Return the broker's file: `path`, else what the proxy's file names as brokerConfigPath."""
    named = parse_json(proxy_text).get("brokerConfigPath") if proxy_text else None
    if not named or path is None:
        return path or named or None
    if Path(named).expanduser() != Path(path).expanduser():
        warning = f"brokerConfigPath = {named} is ignored: the broker's file is {path}, by -c."
        _log_warnings(proxy_path, [warning])
    return path


def _changes_file(path: str) -> str | None:
    """Without `-c`: where changes at run time were kept, if there were any."""
    return path if Path(path).is_file() else None


def _tls_file(text: str, part: Part) -> dict[str, str]:
    """What tls.config.file says; it wins over the configuration, as over Java's properties."""
    named = parse_properties(text).get("tls.config.file")
    named = named or java_options(os.environ).get("tls.config.file")
    path = named or DEFAULT_TLS_FILE
    if named is None and not Path(path).is_file():
        return {}
    return tls_entries(parse_properties(_read_config(path, "tls.config.file")), part)


def _given(keys: Mapping[str, Any]) -> dict[str, str]:
    """Options that were given, as keys of a configuration file; paths become absolute ones."""
    paths = ("storePathRootDir", "brokerConfigPath", "configStorePath")
    return {
        name: str(Path(value).expanduser().absolute() if name in paths else value)
        for name, value in keys.items()
        if value is not None
    }


def _beside_others(keys: dict[str, Any], text: str) -> dict[str, Any]:
    """Servers on free ports are many on one machine: their metrics take free ports too."""
    if keys["listenPort"] == 0 and METRICS_KEY not in text and keys[METRICS_KEY] is None:
        return keys | {METRICS_KEY: 0}
    return keys


def _broker_settings(
    path: str | None, keys: dict[str, Any], *, head: str = ""
) -> tuple[BrokerConfig, StoreConfig]:
    """`head`: before the file, which wins over it."""
    root = keys["storePathRootDir"] or StoreConfig().root
    path = path or _changes_file(f"{root}/config/{CHANGES_FILE}")
    text = head + _read_config(path)
    keys = _beside_others(keys, text)
    overrides = _tls_file(text, Part.BROKER) | _given(keys | {"brokerConfigPath": path})
    config, store, warnings = load_broker_config(text, overrides=overrides)
    _log_warnings(path, warnings)
    return config, store


def _log_warnings(path: str | None, warnings: list[str]) -> None:
    for warning in warnings:
        log.warning("%s: %s", path or "configuration", warning)
