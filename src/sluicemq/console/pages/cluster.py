"""The page of the cluster: brokers with rates and disk usage, replicas with their lag."""

from typing import Any, Final

from sluicemq.console.context import Answer, Context
from sluicemq.console.history import DISK, LAG, RATE_IN, RATE_OUT, parse_rate
from sluicemq.console.parts import fetch_parts

DISK_WARNING: Final = 0.75
"""The disk usage above which RocketMQ deletes the oldest files before they expire.

See spec/store.md §9.
"""


async def show(context: Context) -> Answer:
    """Return the page with each replica of each broker: its state and, if it responds, its figures.

    Charts show rates, lag and disk over time.
    """
    replicas = await context.admin.replicas()
    present_replicas = [
        replica for replica in replicas if replica["address"] and replica["role"] != "gone"
    ]
    runtimes = await fetch_parts(
        {
            replica["address"]: context.admin.runtime(replica["address"])
            for replica in present_replicas
        }
    )
    # Add to each replica either its figures or the reason why it has none.
    figures_of_masters = []
    for replica in replicas:
        part = runtimes.get(replica["address"])
        replica["reason"] = part.reason if part else replica["state"]
        replica["runtime"] = parse_figures(part.value) if part and part.value else None
        if replica["runtime"] and replica["role"] == "master":
            figures_of_masters.append(replica["runtime"])
    return Answer(
        {
            "rows": replicas,
            "totals": {
                name: sum(figures[name] for figures in figures_of_masters)
                for name in ("in_per_s", "out_per_s", "in_today", "out_today")
            },
            "chart": context.history.cluster.chart_data(RATE_IN, RATE_OUT),
            "lag_chart": context.history.cluster.chart_data(LAG),
            "lag_groups": len(context.history.counted_groups),
            "disk_chart": context.history.cluster.chart_data(DISK),
        }
    )


def parse_figures(runtime: dict[str, str]) -> dict[str, Any]:
    """Return the figures about a broker that the page shows, from its runtime information.

    Rates are messages per second, counts are since midnight. A missing counter is 0 (spec/admin.md
    §3).
    """

    def parse_count(name: str) -> int:
        """Return a counter, or 0 if it is missing."""
        digits = runtime.get(name, "")
        return int(digits) if digits.lstrip("-").isdigit() else 0

    disk_ratio = parse_rate(runtime.get("commitLogDiskRatio", ""))
    return {
        "version": runtime.get("sluiceVersion") or runtime.get("brokerVersionDesc", ""),
        "is_ours": "sluiceVersion" in runtime,
        "in_per_s": parse_rate(runtime.get("putTps", "")),
        "out_per_s": parse_rate(runtime.get("getTransferredTps", "")),
        "in_today": parse_count("msgPutTotalTodayNow") - parse_count("msgPutTotalTodayMorning"),
        "out_today": parse_count("msgGetTotalTodayNow") - parse_count("msgGetTotalTodayMorning"),
        "disk": disk_ratio,
        "is_disk_high": disk_ratio >= DISK_WARNING,
        "log_bytes": parse_count("commitLogMaxOffset") - parse_count("commitLogMinOffset"),
        "oldest_ms": parse_count("earliestMessageTimeStamp"),
        "waiting_sends": parse_count("sendThreadPoolQueueSize"),
        "begun_ms": parse_count("bootTimestamp"),
    }
