"""Delivery latency as a picture: the percentiles by hour, a panel for each topic and group.

matplotlib is imported when a chart is asked for, and draws into the file alone (Agg): no display.
"""

import importlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from sluicemq.errors import ConfigurationError, install_extra

PANELS_MAX: Final = 6
_COLORS: Final = (("p50_ms", "#4477aa"), ("p95_ms", "#ccbb44"), ("p99_ms", "#ee6677"))


class Hour(NamedTuple):
    """One point of a panel, milliseconds."""

    hour: datetime
    p50_ms: int
    p95_ms: int
    p99_ms: int
    messages: int


def draw_latency(path: str, panels: Sequence[tuple[str, Sequence[Hour]]]) -> None:
    """Writes the PNG: a title and its hours for each panel. Raises ConfigurationError without
    matplotlib."""
    figures, dates = _matplotlib()
    count = max(1, len(panels))
    figure = figures.Figure(figsize=(9, 1.2 + 2.2 * count), layout="constrained")
    axes = figure.subplots(count, 1, squeeze=False)[:, 0]
    for axis, (title, hours) in zip(axes, panels, strict=False):
        _draw_panel(axis, title, hours, dates)
    if not panels:
        axes[0].text(0.5, 0.5, "no deliveries were traced", ha="center", va="center")
        axes[0].set_axis_off()
    figure.suptitle("Delivery latency by hour (from the send to the first delivery)")
    figure.savefig(path, dpi=110)


def _draw_panel(axis: Any, title: str, hours: Sequence[Hour], dates: Any) -> None:
    times = [point.hour for point in hours]
    for name, color in _COLORS:
        values = [max(getattr(point, name), 0.5) for point in hours]
        axis.plot(times, values, color=color, marker="o", markersize=3, label=name[:3])
    axis.set_yscale("log")
    axis.set_ylabel("ms")
    axis.grid(visible=True, alpha=0.3)
    axis.set_title(f"{title}  ({sum(point.messages for point in hours):,} messages)", fontsize=10)
    axis.legend(loc="upper right", fontsize=8, ncols=3)
    locator = dates.AutoDateLocator(minticks=1, maxticks=10)
    axis.xaxis.set_major_locator(locator)
    axis.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))


def _matplotlib() -> tuple[Any, Any]:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return (
            importlib.import_module("matplotlib.figure"),
            importlib.import_module("matplotlib.dates"),
        )
    except ImportError:
        raise ConfigurationError(
            "a chart is asked for and matplotlib is not installed.",
            cure=f"Set chart: false. {install_extra('spark')}",
        ) from None
