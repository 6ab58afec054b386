"""What Prometheus sees of access control: refusals by access key and how the rules stand."""

from collections.abc import Callable, Iterator
from typing import Any

from sluicemq.acl.guard import Guard

Make = Callable[..., Any]


def access_metrics(
    guard: Guard, counter: Make, gauge: Make, values: Callable[..., list[str]]
) -> Iterator[Any]:
    """`counter` and `gauge` make families, `values` the labels of this broker and more."""
    refused = counter(
        "sluicemq_requests_refused",
        "Requests that access control refused; access_key ? is one that no account has.",
        "access_key",
    )
    for access_key, count in tuple(guard.denied.items()):
        refused.add_metric(values(access_key), count)
    yield refused
    accounts = gauge("sluicemq_access_accounts", "Accounts in force.")
    accounts.add_metric(values(), len(guard.rules.accounts))
    yield accounts
    loads = counter("sluicemq_access_loads", "Access rules read, by result.", "result")
    loads.add_metric(values("in_force"), guard.loads)
    loads.add_metric(values("refused"), guard.loads_failed)
    yield loads
    stale = gauge("sluicemq_access_rules_stale", "1 while the newest files are not in force.")
    stale.add_metric(values(), 1 if guard.error else 0)
    yield stale
