"""The server commands `sluice up`, `nameserver`, `broker` and `proxy`.

Each command loads its settings (`settings`), and passes a function that starts its servers to
`running.run_servers`. `sluice up` runs a name server, a broker and a proxy in one process. With
`--brokers` or `--replicas`, brokers and proxy are child processes (`processes`).
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import click

from sluicemq.cli.output import Access, client_options
from sluicemq.cli.servers.inherited import inherited_settings
from sluicemq.cli.servers.inner import RunAccount
from sluicemq.cli.servers.logs import log_options
from sluicemq.cli.servers.ports import PROXY_PORT, PortPlan
from sluicemq.cli.servers.proxy_status import status
from sluicemq.cli.servers.running import RunningServers, run_servers
from sluicemq.cli.servers.settings import (
    METRICS_KEY,
    existing_file,
    find_broker_file,
    given_settings,
    load_broker_settings,
    load_tls_settings,
    log_warnings,
    read_config_file,
    read_properties_file,
    warn_if_exposed,
    with_metrics_port,
)
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import (
    CHANGES_FILE,
    BrokerConfig,
    NameServerConfig,
    ProxyConfig,
    StoreConfig,
    load_local_proxy_config,
    load_name_server_config,
    load_proxy_config,
    parse_properties,
)
from sluicemq.config.keys import Part, ServerConfig, TlsConfig
from sluicemq.config.load import key_files
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES
from sluicemq.model.addresses import LOOPBACK, NAME_SERVER_PORT, format_address, is_wildcard

if TYPE_CHECKING:
    from sluicemq.broker.server import Broker
    from sluicemq.nameserver.server import NameServer
    from sluicemq.net.limits import FairScheduler

log = logging.getLogger("sluicemq.cli")


def _make_config_option(file_kind: str) -> Callable[[Any], Any]:
    """Return the option `--config`; `file_kind` says in its help what the file is."""
    return click.option(
        "-c",
        "--config",
        "path",
        type=click.Path(dir_okay=False),
        help=f"Configuration file: {file_kind}.",
    )


_broker_config_option = _make_config_option("a broker.conf of RocketMQ (key = value)")
_host_option = click.option(
    "--host",
    "bindAddress",
    help="IP address at which the server listens. 0.0.0.0 means all. Default: all addresses, but "
    "without access control only clients on this machine are served.",
)
_port_option = functools.partial(click.option, type=click.IntRange(0, 65535), metavar="PORT")
_store_option = click.option(
    "--store",
    "storePathRootDir",
    type=click.Path(file_okay=False),
    help="Directory of the store. Default: that of the configuration file, else ~/store.",
)
_read_only_option = click.option(
    "--read-only",
    is_flag=True,
    help="Serve a copy of a store of RocketMQ or SluiceMQ, without changing any of its files.",
)
_proxy_port_option = _port_option(
    "--proxy-port",
    "grpcServerPort",
    help="Port of the proxy for gRPC clients. 0 takes a free port. Default: 8081.",
)
_proxy_config_option = click.option(
    "--proxy-config",
    "proxy_path",
    type=click.Path(dir_okay=False),
    help="Configuration file of the proxy: a rmq-proxy.json with its port, TLS and limits.",
)
_metrics_port_option = _port_option(
    "--metrics-port",
    METRICS_KEY,
    help="Port of the metrics, /health and /ready. If it is 0 or in use, a free port is taken. "
    "Default: 5557.",
)


# --------------------------------------------------------------------------------- commands


@click.command()
@_make_config_option("a namesrv.conf of RocketMQ (key = value)")
@_host_option
@_port_option(
    "--port",
    "listenPort",
    help="Port at which the name server listens. 0 takes a free port. Default: 9876.",
)
@_port_option(
    "--metrics-port",
    METRICS_KEY,
    help="Port of /health and /ready. If it is 0 or in use, a free port is taken. Default: 5556.",
)
@log_options("namesrv")
def nameserver(path: str | None, **options: Any) -> None:
    """Run a name server until SIGTERM or Ctrl-C."""
    path = path or existing_file(NameServerConfig().config_path)
    config_text = read_config_file(path)
    options = with_metrics_port(options, config_text)
    overrides = given_settings(options | {"configStorePath": path})
    overrides |= load_tls_settings(config_text, Part.NAME_SERVER)
    config, warnings = load_name_server_config(config_text, overrides=overrides)
    log_warnings(path, warnings)

    async def start(servers: RunningServers) -> str:
        """Start the name server, and return what follows `ready`."""
        return f"nameserver={await start_name_server(config, servers)}"

    run_servers(start)


@click.command()
@_broker_config_option
@_host_option
@_port_option(
    "--port",
    "listenPort",
    help="Port at which the broker listens. 0 takes a free port. Default: 10911.",
)
@_store_option
@click.option(
    "--name",
    "brokerName",
    help="Name of the broker (brokerName). Default: that of the configuration file, else the host "
    "name.",
)
@click.option(
    "-n",
    "--nameserver",
    "namesrvAddr",
    help="Addresses of the name servers with which the broker registers, as host:port;host:port.",
)
@click.option("--enable-proxy", is_flag=True, help="Also serve gRPC clients.")
@_proxy_port_option
@_proxy_config_option
@_metrics_port_option
@click.option(
    "--consensus",
    "sluiceConsensus",
    help="Consensus service that elects the master among the replicas, as "
    "etcd://host:port,host:port. Default: no failover.",
)
@click.option(
    "--id",
    "brokerId",
    type=click.IntRange(1),
    help="Id of this replica among those with the same name (brokerId). It must never change.",
)
@_read_only_option
@log_options("broker")
def broker(
    path: str | None, enable_proxy: bool, proxy_path: str | None, read_only: bool, **options: Any
) -> None:
    """Run a broker until SIGTERM or Ctrl-C.

    --proxy-port and --proxy-config imply --enable-proxy. With --consensus, a send is acknowledged
    when all in-sync replicas have the message, unless the configuration file sets brokerRole. With
    --read-only, the broker registers only with the name servers of --nameserver, because a copied
    configuration file names those of the original broker.
    """
    starts_proxy = enable_proxy or options["grpcServerPort"] is not None or proxy_path is not None
    proxy_text = read_properties_file(proxy_path, "--proxy-config") if proxy_path else None
    path = find_broker_file(path, proxy_path, proxy_text)
    defaults = "brokerRole=SYNC_MASTER\n" if options["sluiceConsensus"] else ""
    config, store = load_broker_settings(path, options, defaults=defaults)
    account = RunAccount.from_environment()  # set if `sluice up` started this process
    if account is not None:
        config = account.add_to(config)
    if read_only and options["namesrvAddr"] is None:
        config = replace(config, name_server_addresses=())
    proxy_settings = None
    if proxy_text is not None:
        *proxy_settings, warnings = load_local_proxy_config(
            proxy_text, config, path=proxy_path or ""
        )
        log_warnings(proxy_path, warnings)

    async def start(servers: RunningServers) -> str:
        """Start the broker, and return what follows `ready`."""
        if not config.name_server_addresses and not read_only:
            log.warning(
                "No name server is configured, so clients will not find this broker. Set "
                "namesrvAddr, or start it with -n HOST:PORT."
            )
        return await start_broker(
            config,
            store,
            servers,
            read_only=read_only,
            proxy=starts_proxy,
            proxy_settings=proxy_settings,
        )

    run_servers(start)


@click.command()
@_broker_config_option
@click.option(
    "--host",
    "bindAddress",
    help="IP address at which all servers listen. 0.0.0.0 serves other machines. Default: "
    "127.0.0.1.",
)
@_port_option(
    "--nameserver-port",
    default=NAME_SERVER_PORT,
    show_default=True,
    help="Port of the name server. 0 takes a free port.",
)
@_port_option(
    "--broker-port",
    "listenPort",
    help="Port of the broker, or of the first one. 0 takes a free port. Default: 10911.",
)
@_proxy_port_option
@_metrics_port_option
@click.option("--no-proxy", is_flag=True, help="Do not serve gRPC clients.")
@_store_option
@_read_only_option
@click.option(
    "--brokers",
    type=click.IntRange(1, 26),
    metavar="N",
    help="Start N brokers named broker-a, broker-b and so on, each in its own process, that share "
    "the load.",
)
@click.option(
    "--replicas",
    type=click.IntRange(2, 9),
    metavar="N",
    help="Start N replicas of one broker, each in its own process, with failover. For evaluation "
    "only.",
)
@click.option(
    "--console",
    is_flag=True,
    help="Also serve the web console, in its own process at a free port of 127.0.0.1.",
)
@log_options("broker")
def up(
    path: str | None,
    nameserver_port: int,
    no_proxy: bool,
    read_only: bool,
    brokers: int | None,
    replicas: int | None,
    console: bool,
    **options: Any,
) -> None:
    """Run a name server, broker and proxy in one process until SIGTERM or Ctrl-C.

    The configuration file is that of the broker. The name server keeps its files in the directory
    of the store. If the port or the package of the proxy is not available, no proxy is started,
    unless its port was given. With a free port for the broker, a proxy is started only if its port
    was given. With --brokers or --replicas, each broker, etcd and the proxy are child processes.
    With aclEnable=true, the name server uses the access rules of the broker.
    """
    if no_proxy and options["grpcServerPort"] is not None:
        raise click.UsageError("--no-proxy and --proxy-port cannot be combined.")
    exclusive_options = (brokers, replicas, read_only)
    if sum(map(bool, exclusive_options)) > 1:
        raise click.UsageError(
            "--brokers, --replicas and --read-only cannot be combined. For several brokers with "
            "replicas, start each one: sluice broker --name … --consensus … --id …. To serve a "
            "copy of several stores, start one server for each: --store DIRECTORY/broker-a."
        )
    from sluicemq.cli.servers import processes  # noqa: PLC0415 - not for `--help`

    names = processes.broker_names(brokers, replicas)
    config, store = load_broker_settings(path, options, defaults=f"bindAddress={LOOPBACK}\n")
    account = RunAccount.create(config)
    if account is not None:
        config = account.add_to(config)
    processes.check_root(store.root, names)
    if names and path:
        processes.check_settings(path, parse_properties(read_config_file(path)), names)

    proxy = _decide_on_proxy(config, no_proxy=no_proxy)
    plan = PortPlan.create(
        config, names, nameserver_port, proxy=proxy, are_replicas=processes.are_replicas(names)
    )
    if config.bind_address == LOOPBACK:
        log.info(
            "only clients on this machine (or in this container) can reach %s; use --host 0.0.0.0 "
            "to serve others",
            LOOPBACK,
        )
    cluster = _LocalCluster(
        config=replace(config, metrics_port=plan.metrics),
        store=store,
        path=path,
        broker_names=names,
        plan=plan,
        account=account,
        is_read_only=read_only,
        proxy=proxy,
        has_console=console,
    )
    run_servers(cluster.start)


def _decide_on_proxy(config: BrokerConfig, *, no_proxy: bool) -> bool | None:
    """Return whether `sluice up` starts a proxy: True, False, or None for "if it is possible".

    It must start if its port was given. It is not started with `no_proxy`, or if the broker has a
    free port.
    """
    if no_proxy:
        return False
    if config.proxy_port is not None:
        return True
    has_free_broker_port = config.listen_port == 0
    return False if has_free_broker_port else None


@click.group(invoke_without_command=True)
@client_options
@_make_config_option("a rmq-proxy.json of RocketMQ")
@_host_option
@_port_option(
    "--port",
    "grpcServerPort",
    help="Port at which the proxy listens. 0 takes a free port. Default: 8081.",
)
@_metrics_port_option
@log_options("proxy")
def proxy(access: Access, path: str | None, **options: Any) -> None:
    """Run a proxy for gRPC clients of a cluster until SIGTERM or Ctrl-C.

    The cluster may consist of brokers of SluiceMQ or RocketMQ. The options for TLS and for the
    account apply to the connections of the proxy to name servers and brokers.
    """
    context = click.get_current_context()
    if context.invoked_subcommand is not None:
        return  # this group is also the parent of `proxy status`
    config_text = read_properties_file(path) if path else ""
    options = with_metrics_port(options, config_text, port_key="grpcServerPort")
    account = RunAccount.from_environment()
    overrides = {**inherited_settings(), **given_settings(options)}
    overrides |= load_tls_settings("", Part.PROXY)
    if account is not None:
        overrides |= account.overrides
    config, warnings = load_proxy_config(config_text, overrides=overrides, path=path or "")
    log_warnings(path, warnings)
    warn_if_exposed(*key_files(config))

    name_servers = _choose_name_servers(access, config)

    async def start(servers: RunningServers) -> str:
        """Start the proxy, and return what follows `ready`."""
        from sluicemq.proxy.cluster import serve_cluster_proxy  # noqa: PLC0415 - optional protobuf

        running_proxy = await servers.enter_async_context(
            serve_cluster_proxy(config, name_servers, access.credentials)
        )
        servers.announce_metrics(config, running_proxy.metrics_port)
        return f"proxy={format_address(_local_host(config), running_proxy.port)}"

    run_servers(start)


def _choose_name_servers(access: Access, config: ProxyConfig) -> str:
    """Return the addresses of the name servers for `sluice proxy`.

    They are those of the option `-n`, or else of the configuration file, or else of NAMESRV_ADDR.
    """
    source = click.get_current_context().get_parameter_source("name_servers")
    is_option_given = source is click.core.ParameterSource.COMMANDLINE
    if config.name_server_addresses and not is_option_given:
        return ";".join(config.name_server_addresses)
    return access.name_servers


proxy.add_command(status)


# ---------------------------------------------------------------------------------- servers


def make_name_server_config(
    config: BrokerConfig, store: StoreConfig, port: int, *, is_alone: bool = False
) -> NameServerConfig:
    """Return the configuration of the name server of `sluice up`, made from its broker's.

    The name server keeps its files in the directory of the store, and has the TLS settings and
    access rules of the broker. The probes at the broker's metrics port answer for both servers. If
    the name server `is_alone` in its process, it serves that port itself.
    """
    path = f"{store.root}/namesrv/{CHANGES_FILE}"
    overrides = {
        "bindAddress": config.bind_address,
        "listenPort": str(port),
        "kvConfigPath": f"{store.root}/namesrv/kvConfig.json",
        "configStorePath": path,
    }
    config_text = read_config_file(existing_file(path))
    name_server_config, warnings = load_name_server_config(config_text, overrides=overrides)
    log_warnings(path, warnings)
    tls_settings = {
        field.name: getattr(config, field.name) for field in fields(TlsConfig) if field.compare
    }
    return replace(
        name_server_config,
        acl_enable=config.acl_enable,
        acl_files=config.acl_files,
        acl_compatible=config.acl_compatible,
        inner_account=config.inner_account,
        metrics_enable=is_alone and config.metrics_enable,
        metrics_host=config.metrics_host,
        metrics_port=config.metrics_port,
        **tls_settings,
    )


async def start_name_server(
    config: NameServerConfig,
    servers: RunningServers,
    *,
    read_only: bool = False,
    scheduler: "FairScheduler | None" = None,
) -> str:
    """Start a name server, and return its address for clients on this machine, "host:port".

    `servers` closes it at the end, and lets it read its file again after SIGHUP. With `read_only`,
    its files are changed only in memory. `scheduler` divides the time of the event loop among
    servers; None means one of its own.
    """
    from sluicemq.files.overlay import OverlayFiles  # noqa: PLC0415 - not for `--help`
    from sluicemq.nameserver.server import NameServer  # noqa: PLC0415 - as above

    warn_if_exposed(*key_files(config))
    files = OverlayFiles() if read_only else SYSTEM_FILES
    server = NameServer(config, files=files, shares=scheduler)
    await server.start()
    servers.push_async_callback(server.close)
    if config.metrics_enable:
        await _serve_probes(config, server, servers)
    if config.config_path:
        servers.reload_functions[config.config_path] = server.requests.reread_config
    log.info("The Name Server boot success. serializeType=JSON, address %s", _local_host(config))
    return format_address(_local_host(config), server.port)


async def _serve_probes(
    config: NameServerConfig, server: "NameServer", servers: RunningServers
) -> None:
    """Serve /health and /ready of a name server, until `servers` closes it.

    Does nothing but log if no port is available.
    """
    from sluicemq.telemetry.probes import serve_probes  # noqa: PLC0415 - only a server serves them

    probes = await asyncio.to_thread(serve_probes, config, server.unhealthy, server.unready)
    if probes is not None:
        port, close_probes = probes
        servers.announce_metrics(config, port)
        servers.callback(close_probes)


async def start_broker(
    config: BrokerConfig,
    store: StoreConfig,
    servers: RunningServers,
    *,
    read_only: bool = False,
    proxy: bool | None = False,
    proxy_settings: Sequence[Any] | None = None,
    scheduler: "FairScheduler | None" = None,
) -> str:
    """Start a broker and perhaps a proxy, and return their part of the line `ready …`.

    `servers` closes both at the end, and lets the broker read its file again after SIGHUP. With
    `read_only`, the files of the store are not changed. `proxy` is True for a proxy, False for
    none, and None if a proxy that cannot start is only logged. `proxy_settings` are (configuration,
    limits) of the proxy; None means the broker's configuration. `scheduler` divides the time of the
    event loop among servers; None means one of its own.
    """
    warn_if_exposed(*key_files(config))
    if config.consensus and not read_only:
        server = await _start_replica(config, store, servers)
    else:
        from sluicemq.broker.server import Broker  # noqa: PLC0415 - not for name servers

        server = Broker(config, store, read_only=read_only, scheduler=scheduler)
        await server.start()
        servers.push_async_callback(server.close)
    server.on_store_failure = servers.fail
    if config.config_path and not read_only:
        servers.reload_functions[config.config_path] = server.reread_config
    log.info(
        "The broker[%s, %s] boot success. serializeType=JSON", config.broker_name, server.address
    )

    ready_text = f"broker={server.address} store={store.root}"
    if read_only:
        ready_text += " read-only"
    proxy_config, limits = proxy_settings or (config, ProxyLimits())
    proxy_start = _start_local_proxy(proxy_config, limits, server, servers)
    ready_text = await _append_proxy(ready_text, proxy, proxy_start)
    servers.announce_metrics(config, await server.metrics_opened())
    return ready_text


async def _start_replica(
    config: BrokerConfig, store: StoreConfig, servers: RunningServers
) -> "Broker":
    """Start a replica of a broker, and return it.

    Its consensus service, etcd, decides whether it is master or slave. `servers` closes it.
    """
    from sluicemq.broker.failover.broker_replica import run_replica  # noqa: PLC0415 - few have replicas
    from sluicemq.broker.failover.etcd import Etcd  # noqa: PLC0415 - few have replicas

    consensus = Etcd.from_config(config)
    _, broker = await servers.enter_async_context(run_replica(config, store, consensus))
    return broker


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalCluster:
    """The servers of one `sluice up`, before they are started.

    `config` is the configuration of the brokers, and `path` their configuration file, or None.
    `broker_names` are those of brokers in child processes; it is empty if the only broker is in
    this process. `proxy` is True to start a proxy, False for none, and None if it may be missing.
    """

    config: BrokerConfig
    store: StoreConfig
    path: str | None
    broker_names: Sequence[str]
    plan: PortPlan
    account: RunAccount | None
    is_read_only: bool
    proxy: bool | None
    has_console: bool

    async def start(self, servers: RunningServers) -> str:
        """Start all servers of `sluice up`, and return the text after `ready`: their addresses.

        `servers` closes them at the end. Raises ConfigurationError if one does not start.
        """
        from sluicemq.net.limits import FairScheduler  # noqa: PLC0415 - not for `--help`

        scheduler = FairScheduler(SYSTEM_CLOCK.monotonic_s, asyncio.get_running_loop().call_soon)
        name_server = await self._start_name_server(servers, scheduler)
        if self.broker_names:
            ready_text = await self._start_children(servers, name_server)
        else:
            ready_text = await start_broker(
                replace(self.config, name_server_addresses=(name_server,)),
                self.store,
                servers,
                read_only=self.is_read_only,
                proxy=self.proxy,
                scheduler=scheduler,
            )
        ready_text = f"nameserver={name_server} {ready_text}"
        if self.has_console:
            from sluicemq.cli.servers import processes  # noqa: PLC0415 - not for `--help`

            # The port is chosen now, because the servers started above have taken theirs.
            port = self.plan.with_console_port().console
            link = await processes.start_console(name_server, port, servers, self.account)
            ready_text += f" console={link}"
        return ready_text

    async def _start_name_server(self, servers: RunningServers, scheduler: "FairScheduler") -> str:
        """Start the name server in this process, and return its address, "host:port".

        `servers` closes it at the end. `scheduler` divides the time of the event loop among
        servers.
        """
        config = make_name_server_config(
            self.config, self.store, self.plan.name_server, is_alone=bool(self.broker_names)
        )
        return await start_name_server(
            config, servers, read_only=self.is_read_only, scheduler=scheduler
        )

    async def _start_children(self, servers: RunningServers, name_server: str) -> str:
        """Start the brokers and their proxy as child processes.

        Returns their part of the line `ready …`, when all are ready.
        """
        from sluicemq.cli.servers import processes  # noqa: PLC0415 - with child processes only

        plan = self.plan.with_broker_ports()
        ready_text = await processes.start_brokers(
            self.broker_names,
            self.store.root,
            name_server,
            config=self.config,
            path=self.path,
            plan=plan,
            stack=servers,
            children=servers.children,
            account=self.account,
        )
        plan = plan.with_proxy_ports()
        if plan.proxy is not None:
            proxy_start = processes.start_proxy(
                self.config, name_server, plan.proxy, servers, servers.children, self.account
            )
            ready_text = await _append_proxy(ready_text, plan.needs_proxy or None, proxy_start)
        servers.metrics += [child.metrics_text for child in servers.children if child.metrics]
        return ready_text


async def _append_proxy(
    ready_text: str, proxy: bool | None, start: Coroutine[Any, Any, str]
) -> str:
    """Await `start`, which starts a proxy, and return `ready_text` with its address added.

    `proxy` False means that no proxy is wanted: `start` is not run. With None, a failed start is
    only logged. In both cases `ready_text` is returned unchanged. With True, a failed start raises
    ConfigurationError.
    """
    if proxy is False:
        start.close()
        return ready_text
    try:
        return f"{ready_text} proxy={await start}"
    except ConfigurationError as error:
        if proxy:
            raise
        log.warning(
            "no proxy for gRPC clients: %s Or choose another port with --proxy-port, or use "
            "--no-proxy.",
            error,
        )
    return ready_text


async def _start_local_proxy(
    config: BrokerConfig, limits: ProxyLimits, server: "Broker", servers: RunningServers
) -> str:
    """Start a proxy in the process of its broker, and return its address, "host:port".

    `server` is the broker, and `limits` are limits of the proxy. `servers` closes the proxy at the
    end.
    """
    from sluicemq.proxy.local import make_local_proxy  # noqa: PLC0415 - optional protobuf

    warn_if_exposed(*key_files(config))
    proxy = make_local_proxy(server, config, limits)
    port = PROXY_PORT if config.proxy_port is None else config.proxy_port
    await proxy.start(config.listen_address, port)
    servers.push_async_callback(proxy.close)
    return format_address(_local_host(config), proxy.port)


def _local_host(config: ServerConfig) -> str:
    """Return the IP address by which clients on this machine reach a server."""
    return LOOPBACK if is_wildcard(config.listen_address) else config.bind_address
