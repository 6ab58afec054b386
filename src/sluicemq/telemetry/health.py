"""What the health checks of all servers share: their type, and where they are served."""

from collections.abc import Callable
from typing import Final

from sluicemq.config.keys import MeasuredConfig
from sluicemq.model.addresses import LOOPBACK, is_wildcard

HealthCheck = Callable[[], list[str]]
"""A function that returns a sentence for each problem. An empty list means that all is well."""
LOOP_STALL_S: Final = 30.0
"""An event loop without an iteration for this time hangs."""


def event_loop_problems(idle_s: float) -> list[str]:
    """Return a sentence if the event loop, last run `idle_s` ago, hangs. Return [] if not."""
    if idle_s <= LOOP_STALL_S:
        return []
    return [f"the event loop has not run for {idle_s:.0f} s."]


def metrics_host(config: MeasuredConfig, *, for_local_clients: bool = False) -> str:
    """Return the address at which the metrics and health checks of a server are served.

    With `for_local_clients`, return an address that clients on this machine can connect to, instead
    of a wildcard address.
    """
    host = config.metrics_host or (LOOPBACK if config.is_protected else config.listen_address)
    return LOOPBACK if for_local_clients and is_wildcard(host) else host
