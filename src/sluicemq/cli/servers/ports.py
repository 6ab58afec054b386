"""The ports of one `sluice up`, which are planned before a server starts.

    --nameserver-port N     the name server, in the process of `sluice up`
    --broker-port N         the broker. With --brokers or --replicas, the first one; the ports of
                            the others are 10 apart. A broker also listens at two ports beside its
                            own: two below for RocketMQ's VIP channel, one above for slaves
    --proxy-port N          the proxy
    --metrics-port N        metrics and probes of the process of `sluice up`; N + 1, N + 2, … those
                            of the brokers in child processes, and the next one that of their proxy

Port 0 means a free port. A server in the process of `sluice up` lets the kernel choose it when it
listens. That of a child process is chosen right before the child starts, because the child must
have the same port after a restart.
"""

import contextlib
import logging
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.model.addresses import LOOPBACK

log = logging.getLogger("sluicemq.cli")

BROKER_PORT_STEP: Final = 10
"""The distance between the ports of two brokers, each of which uses three ports."""
PORT_MAX: Final = 65_535
PROXY_PORT: Final = 8081


class ServerPorts(NamedTuple):
    """The two ports of one child process."""

    port: int
    """The port at which it accepts clients."""
    metrics: int
    """The port of its metrics and probes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """The ports of all servers of one `sluice up`; 0 means a free port that is not chosen yet.

    `brokers` are the ports of brokers in child processes. It is empty if the only broker is in the
    process of `sluice up`, with its port in `broker`. `metrics` is the port of the metrics of that
    process. `proxy` is None if no proxy is started. If `needs_proxy` is False, `sluice up` starts
    without a proxy if the port of the proxy is in use.
    """

    name_server: int
    broker: int
    brokers: tuple[ServerPorts, ...]
    proxy: ServerPorts | None
    needs_proxy: bool
    metrics: int
    etcd: int = 0
    console: int = 0

    @classmethod
    def create(
        cls,
        config: BrokerConfig,
        names: Sequence[str],
        name_server: int,
        *,
        proxy: bool | None,
        are_replicas: bool = False,
    ) -> "PortPlan":
        """Choose the ports of all servers of `sluice up`.

        `config` has the ports that the options and the configuration file set. `names` are the
        brokers in child processes; without them, a single broker runs in this process.
        `name_server` is the name server's port. `proxy` is True for a proxy, False for none, and
        None if it may be missing. If another server needs a port for metrics, a free port is taken
        instead, and a warning is logged.

        Raises ConfigurationError if two servers would listen at the same port, or if a broker's
        port exceeds 65535.
        """
        registry = _PortRegistry()
        registry.add("the name server", name_server, "--nameserver-port")
        child_ports = broker_ports(config.listen_port, len(names))
        if names:
            registry.add_brokers(names, child_ports, are_replicas=are_replicas)
        else:
            registry.add("the broker", config.listen_port, "--broker-port")
        proxy_port = PROXY_PORT if config.proxy_port is None else config.proxy_port
        if proxy:
            registry.add("the proxy", proxy_port, "--proxy-port")

        # With child processes, the process of `sluice up` contains only the name server. The last
        # server is the proxy, or the broker in whose process the proxy is.
        measured_servers = ["the name server", *names, "the proxy"] if names else ["the broker"]
        metrics_ports = _consecutive_ports(config.metrics_port, len(measured_servers))
        if config.metrics_enable:
            metrics_ports = list(map(registry.add_metrics, measured_servers, metrics_ports))
        process_metrics, *child_metrics = metrics_ports
        proxy_ports = ServerPorts(proxy_port, metrics_ports[-1])
        return cls(
            name_server=name_server,
            broker=config.listen_port,
            brokers=tuple(map(ServerPorts, child_ports, child_metrics)),
            proxy=None if proxy is False else proxy_ports,
            needs_proxy=proxy is True,
            metrics=process_metrics,
        )

    @property
    def used_ports(self) -> set[int]:
        """The ports of all servers, and the two next to each broker's port that it also uses."""
        ports = {self.name_server, self.broker, self.metrics, self.etcd, self.console}
        for broker in self.brokers:
            ports |= {broker.port, broker.metrics}
            if broker.port:
                ports |= {broker.port - 2, broker.port + 1}
        if self.proxy is not None:
            ports |= {self.proxy.port, self.proxy.metrics}
        return ports - {0}

    # Until a server listens at a free port, any connection of this machine may take it. So each of
    # these methods is called right before its servers start, after the servers started earlier
    # have begun to listen.

    def with_broker_ports(self) -> "PortPlan":
        """Return a copy in which brokers and etcd have free ports of this machine instead of 0."""
        free = iter(free_ports(2 * len(self.brokers) + 1, self.used_ports))
        brokers = tuple(_fill_free_ports(ports, free) for ports in self.brokers)
        return replace(self, brokers=brokers, etcd=self.etcd or next(free))

    def with_proxy_ports(self) -> "PortPlan":
        """Return a copy in which the proxy has free ports of this machine instead of 0."""
        free = iter(free_ports(2, self.used_ports))
        return replace(self, proxy=self.proxy and _fill_free_ports(self.proxy, free))

    def with_console_port(self) -> "PortPlan":
        """Return a copy in which the console has a free port of this machine instead of 0."""
        return replace(self, console=self.console or free_ports(1, self.used_ports)[0])


def _fill_free_ports(ports: ServerPorts, free: Iterator[int]) -> ServerPorts:
    """Return the ports of a child process, with each 0 replaced by the next port of `free`."""
    return ServerPorts(ports.port or next(free), ports.metrics or next(free))


class _PortRegistry:
    """The ports of a plan that are not 0, each with its server and the option that sets it."""

    def __init__(self) -> None:
        """Begin without ports."""
        self._users: dict[int, tuple[str, str]] = {}  # port -> (server, option)

    def add(self, user: str, port: int, option: str) -> None:
        """Record that the server `user` listens at `port`. Port 0, which means any, is ignored.

        `option` is the command-line option that sets the port. Raises ConfigurationError if another
        server has the port.
        """
        if not port:
            return
        first_user, first_option = self._users.setdefault(port, (user, option))
        if first_user != user:
            options = option if option == first_option else f"{first_option} or {option}"
            raise ConfigurationError(
                f"the port {port} would be used by both {first_user} and {user}.",
                fix=f"Choose another {options}. 0 takes a free port.",
            )

    def add_brokers(self, names: Sequence[str], ports: list[int], *, are_replicas: bool) -> None:
        """Record that the brokers `names` listen at `ports`, and replicas also at the next port.

        Raises ConfigurationError if another server has one of the ports.
        """
        for name, port in zip(names, ports, strict=True):
            self.add(name, port, "--broker-port")
            if are_replicas and port:
                self.add(f"{name} (its port for slaves)", port + 1, "--broker-port")

    def add_metrics(self, user: str, port: int) -> int:
        """Record the port for a server's metrics, and return it, or 0 if it cannot be used.

        It cannot be used if another server has it or if it exceeds 65535; a warning is then logged.
        Port 0 means a free port.
        """
        reason = f"it is used by {self._users[port][0]}" if port in self._users else ""
        if port > PORT_MAX:
            reason = f"the highest port is {PORT_MAX}"
        if reason:
            log.warning(
                "port %d cannot be used for the metrics of %s: %s. Using a free port. Choose the "
                "first port of metrics with --metrics-port.",
                port,
                user,
                reason,
            )
            return 0
        if port:
            self._users[port] = (f"the metrics of {user}", "--metrics-port")
        return port


def _consecutive_ports(first_port: int, count: int) -> list[int]:
    """Return `count` ports from `first_port` on; they are all 0 if it is 0."""
    if first_port == 0:
        return [0] * count
    return list(range(first_port, first_port + count))


def broker_ports(first_port: int, count: int) -> list[int]:
    """Return the ports of `count` brokers: `first_port`, and 10 more for each further broker.

    All are 0 if `first_port` is 0, which means free ports. Raises ConfigurationError if the last
    broker's ports exceed 65535.
    """
    if not first_port or not count:
        return [0] * count
    span = BROKER_PORT_STEP * (count - 1) + 1  # includes the last broker's port for slaves
    last_port = first_port + span
    if last_port > PORT_MAX:
        raise ConfigurationError(
            f"{count} brokers from port {first_port} on, {BROKER_PORT_STEP} ports apart, need port "
            f"{last_port}; the highest port is {PORT_MAX}.",
            fix=f"Give --broker-port {PORT_MAX - span} or a lower one, or 0 for free ports.",
        )
    return [first_port + BROKER_PORT_STEP * index for index in range(count)]


def free_ports(count: int, avoided: Collection[int] = ()) -> list[int]:
    """Return `count` ports of this machine that are free together with the next higher port.

    A broker uses the next port for slaves, and etcd for peers. Ports in `avoided` are not returned.
    """
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as server, socket.socket() as neighbour:
            server.bind((LOOPBACK, 0))
            port = server.getsockname()[1]
            used = {*ports, *avoided}
            with contextlib.suppress(OSError, OverflowError):
                neighbour.bind((LOOPBACK, port + 1))
                if not {port - 1, port, port + 1} & used:
                    ports.append(port)
    return ports
