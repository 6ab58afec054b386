"""Write the tables of docs/reference/metrics.md from the declarations of the metrics.

    python tools/metrics_page.py docs/reference/metrics.md

The text between `<!-- written: NAME -->` and `<!-- end -->` is replaced. Counters and gauges of a
broker are declared in tables, those of a proxy in rows, and histograms where they are made. A test
compares the page.
"""

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

from written_tables import replace_tables, rewrite_page

from sluicemq.broker import metrics as broker_metrics
from sluicemq.config.settings import BrokerConfig
from sluicemq.proxy import server as proxy_server

_HEAD: Final = "| metric | type | labels | meaning |\n|---|---|---|---|\n"


class Metric(NamedTuple):
    """One row of a table."""

    name: str
    type: str
    labels: tuple[str, ...]
    """The labels besides those that every metric of the server has."""
    meaning: str


def with_tables(text: str) -> str:
    """Return the page with its tables as the declarations are now."""
    return replace_tables(text, _write_table)


def _write_table(name: str) -> str:
    return _HEAD + "".join(map(_row, TABLES[name]()))


def _row(metric: Metric) -> str:
    """Return a row. Prometheus adds `_total` to the names of counters."""
    name = metric.name + "_total" * (metric.type == "counter")
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    return f"| `{name}` | {metric.type} | {labels} | {metric.meaning} |\n"


def _list_families(
    families: Iterable[broker_metrics.Family], metric_type: str | None = None
) -> Iterator[Metric]:
    for family in families:
        own_type = "gauge" if family.is_gauge else "counter"
        yield Metric(family.name, metric_type or own_type, family.labels, family.text)


def _list_histograms(module: ModuleType) -> Iterator[Metric]:
    """Yield the histograms that a module creates, with the labels that are strings there."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "HistogramMetricFamily"
        ):
            name, meaning = map(ast.literal_eval, node.args)
            labels = tuple(
                one.value
                for keyword in node.keywords
                for one in ast.walk(keyword.value)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            )
            yield Metric(name, "histogram", labels, meaning)


def _list_proxy_metrics() -> Iterator[Metric]:
    """Yield the counters and gauges of a proxy, from the rows of an idle one."""
    proxy: Any = SimpleNamespace(
        config=BrokerConfig(),
        is_serving=True,
        peers=(),
        dispatcher=SimpleNamespace(stats_by_method={}),
        clients=SimpleNamespace(by_id={}),
        jobs=SimpleNamespace(failures=Counter()),
    )
    rows = proxy_server.ProxyCollector(proxy)._metric_rows("counter", "gauge")
    for metric_type, name, meaning, labels, _ in rows:
        yield Metric(name, metric_type, labels, meaning)


TABLES: Final[dict[str, Callable[[], Iterable[Metric]]]] = {
    "broker counters": lambda: _list_families(broker_metrics.COUNTERS),
    "broker gauges": lambda: _list_families(broker_metrics.GAUGES, "gauge"),
    "broker histograms": lambda: _list_histograms(broker_metrics),
    "access": lambda: _list_families(broker_metrics.ACCESS_METRICS),
    "proxy": lambda: [*_list_proxy_metrics(), *_list_histograms(proxy_server)],
}
"""The tables of the page by their names in it."""


if __name__ == "__main__":
    rewrite_page(with_tables)
