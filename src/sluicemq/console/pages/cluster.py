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
    """Return the page with every replica of every broker."""
    rows = await context.admin.replicas()
    runtimes = await fetch_parts(
        {
            row["address"]: context.admin.runtime(row["address"])
            for row in rows
            if row["address"] and row["role"] != "gone"
        }
    )
    for row in rows:
        one = runtimes.get(row["address"])
        row["reason"] = one.reason if one else row["state"]
        row["runtime"] = parse_figures(one.value) if one and one.value else None
    live = [row["runtime"] for row in rows if row["runtime"] and row["role"] == "master"]
    return Answer(
        {
            "rows": rows,
            "totals": {
                name: sum(one[name] for one in live)
                for name in ("in_per_s", "out_per_s", "in_today", "out_today")
            },
            "chart": context.history.cluster.chart_data(RATE_IN, RATE_OUT),
            "lag_chart": context.history.cluster.chart_data(LAG),
            "lag_groups": len(context.history.counted_groups),
            "disk_chart": context.history.cluster.chart_data(DISK),
        }
    )


def parse_figures(runtime: dict[str, str]) -> dict[str, Any]:
    """Return the figures of the page from the runtime information of a broker (spec/admin.md §3).

    Missing counters are 0.
    """

    def count(name: str) -> int:
        text = runtime.get(name, "")
        return int(text) if text.lstrip("-").isdigit() else 0

    return {
        "version": runtime.get("sluiceVersion") or runtime.get("brokerVersionDesc", ""),
        "is_ours": "sluiceVersion" in runtime,
        "in_per_s": parse_rate(runtime.get("putTps", "")),
        "out_per_s": parse_rate(runtime.get("getTransferredTps", "")),
        "in_today": count("msgPutTotalTodayNow") - count("msgPutTotalTodayMorning"),
        "out_today": count("msgGetTotalTodayNow") - count("msgGetTotalTodayMorning"),
        "disk": parse_rate(runtime.get("commitLogDiskRatio", "")),
        "is_disk_high": parse_rate(runtime.get("commitLogDiskRatio", "")) >= DISK_WARNING,
        "log_bytes": count("commitLogMaxOffset") - count("commitLogMinOffset"),
        "oldest_ms": count("earliestMessageTimeStamp"),
        "waiting_sends": count("sendThreadPoolQueueSize"),
        "begun_ms": count("bootTimestamp"),
    }
