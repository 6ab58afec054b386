"""The ports of one `sluice up`: planned before anything starts, and printed in its `ready` line.

    --nameserver-port N     the name server, in the process of `sluice up`
    --broker-port N         one broker; with --brokers or --replicas the first one, the others 10
                            apart. The port two below serves RocketMQ's VIP channel, the one above
                            serves slaves
    --proxy-port N          the proxy
    --metrics-port N        the process of `sluice up`; then N + 1, N + 2, … the brokers that are
                            processes of their own, and the next one their proxy

Port 0 is a free one. Servers in the process of `sluice up` let the kernel choose it when they
listen. Those of child processes are chosen right before they start, because a child has to come
back at the same port after a crash.
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

PORTS_APART: Final = 10
"""From one broker's port to the next: each has its VIP port and that for slaves beside it."""
PORT_MAX: Final = 65_535
PROXY_PORT: Final = 8081


class ServerPorts(NamedTuple):
    """The ports of one child process: the one that it serves at, and the one of its metrics and
    probes."""

    port: int
    metrics: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """The ports of all servers of one `sluice up`; 0 is a free one that is not chosen yet.

    `metrics` is the port of the process itself. `brokers` is empty if broker and proxy are in that
    process too; then the broker's port is `broker`. `proxy` is None if no proxy is started;
    without `needs_proxy` it is left out when its port is taken.
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
        """Plan the ports of `sluice up` from its options.

        `names` are those of the brokers that are child processes. `proxy` is False if none is
        started, and None if it is left out when its port is taken. Ports of metrics that another
        server needs are replaced by free ones, with a warning in the log. Raises ConfigurationError
        if two servers would listen at the same port, or if the ports of the brokers exceed 65535.
        """
        ports = ports_of(config.listen_port, len(names))
        taken = _Taken()
        taken.add("the name server", name_server, "--nameserver-port")
        for name, port in zip(names or ["the broker"], ports or [config.listen_port], strict=True):
            taken.add(name, port, "--broker-port")
            if are_replicas and port:
                taken.add(f"{name} (its port for slaves)", port + 1, "--broker-port")
        proxy_port = PROXY_PORT if config.proxy_port is None else config.proxy_port
        if proxy:
            taken.add("the proxy", proxy_port, "--proxy-port")
        users = ["the name server", *names, "the proxy"] if names else ["the broker"]
        metrics = [config.metrics_port and config.metrics_port + at for at in range(len(users))]
        if config.metrics_enable:
            metrics = list(map(taken.yielded, users, metrics))
        own, *others = metrics
        return cls(
            name_server=name_server,
            broker=config.listen_port,
            brokers=tuple(map(ServerPorts, ports, others)),
            proxy=None if proxy is False else ServerPorts(proxy_port, metrics[-1]),
            needs_proxy=proxy is True,
            metrics=own,
        )

    @property
    def used(self) -> set[int]:
        """The ports that are chosen, with those that brokers open beside theirs."""
        found = {self.name_server, self.broker, self.metrics, self.etcd, self.console}
        found.update(*self.brokers, self.proxy or ())
        found.update(port + beside for port, _ in self.brokers if port for beside in (-2, 1))
        return found - {0}

    # A free port may be taken by any connection of this machine until its server listens. So each
    # of these is called right before its servers start, when those before them listen already.

    def with_broker_ports(self) -> "PortPlan":
        """Return a copy in which brokers and etcd have free ports of this machine instead of 0."""
        found = iter(free_ports(2 * len(self.brokers) + 1, self.used))
        brokers = tuple(_settled(ports, found) for ports in self.brokers)
        return replace(self, brokers=brokers, etcd=self.etcd or next(found))

    def with_proxy_ports(self) -> "PortPlan":
        """Return a copy in which the proxy has free ports of this machine instead of 0."""
        found = iter(free_ports(2, self.used))
        return replace(self, proxy=self.proxy and _settled(self.proxy, found))

    def with_console_port(self) -> "PortPlan":
        """Return a copy in which the console has a free port of this machine instead of 0."""
        return replace(self, console=self.console or free_ports(1, self.used)[0])


def _settled(ports: ServerPorts, found: Iterator[int]) -> ServerPorts:
    return ServerPorts(ports.port or next(found), ports.metrics or next(found))


class _Taken:
    """The fixed ports of a plan, each with its user and the option that sets it."""

    def __init__(self) -> None:
        self._users: dict[int, tuple[str, str]] = {}

    def add(self, user: str, port: int, option: str) -> None:
        """Note that `user` listens at `port`; 0 is ignored. Raises ConfigurationError if another
        user has that port."""
        if not port:
            return
        other, other_option = self._users.setdefault(port, (user, option))
        if other != user:
            options = option if option == other_option else f"{other_option} or {option}"
            raise ConfigurationError(
                f"port {port} would be that of {other} and of {user}.",
                fix=f"Give another {options}; 0 takes a free port.",
            )

    def yielded(self, user: str, port: int) -> int:
        """Note that the metrics of `user` are at `port`, and return it. Return 0, with a warning in
        the log, if another server has that port or it exceeds 65535."""
        reason = f"it is that of {self._users[port][0]}" if port in self._users else ""
        if port > PORT_MAX:
            reason = f"the highest is {PORT_MAX}"
        if reason:
            log.warning(
                "port %d cannot be that of the metrics of %s: %s. A free one is used. Choose the "
                "first port of metrics with --metrics-port.", port, user, reason,
            )  # fmt: skip
            return 0
        if port:
            self._users[port] = (f"the metrics of {user}", "--metrics-port")
        return port


def ports_of(first: int, count: int) -> list[int]:
    """Return the ports of `count` brokers, `first` and those above it; zeros if `first` is 0.
    Raises ConfigurationError if they exceed 65535."""
    if not first or not count:
        return [0] * count
    room = PORTS_APART * (count - 1) + 1  # the last one's port for slaves too
    if first + room > PORT_MAX:
        raise ConfigurationError(
            f"{count} brokers from port {first} on, each {PORTS_APART} above the last, would need "
            f"port {first + room}; the highest is {PORT_MAX}.",
            fix=f"Give --broker-port {PORT_MAX - room} or a lower one, or 0 for free ones.",
        )
    return [first + PORTS_APART * number for number in range(count)]


def free_ports(count: int, avoided: Collection[int] = ()) -> list[int]:
    """Return `count` ports that no process of this machine listens at, nor at the port above each:
    that is the port for slaves of a broker, or for peers of etcd. None of them, and no port above
    one, is in `avoided`."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as beside:
            one.bind((LOOPBACK, 0))
            port = one.getsockname()[1]
            used = {*found, *avoided}
            with contextlib.suppress(OSError, OverflowError):
                beside.bind((LOOPBACK, port + 1))
                found += [port] if not {port - 1, port, port + 1} & used else []
    return found
