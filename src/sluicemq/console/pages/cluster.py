"""The cluster: brokers with rates and disk, replicas with their lag."""

from typing import Any, Final

from sluicemq.console.context import Answer, Context
from sluicemq.console.history import DISK, LAG, RATE_IN, RATE_OUT, rate
from sluicemq.console.parts import parts

DISK_WARNING: Final = 0.75
"""Above it RocketMQ deletes what is old, whatever its age (spec/store.md §9)."""


async def show(context: Context) -> Answer:
    """Every replica of every broker."""
    rows = await context.admin.replicas()
    told = await parts(
        {
            row["address"]: context.admin.runtime(row["address"])
            for row in rows
            if row["address"] and row["role"] != "gone"
        }
    )
    for row in rows:
        one = told.get(row["address"])
        row["reason"] = one.reason if one else row["state"]
        row["runtime"] = figures(one.value) if one and one.value else None
    live = [row["runtime"] for row in rows if row["runtime"] and row["role"] == "master"]
    return Answer(
        {
            "rows": rows,
            "totals": {
                name: sum(one[name] for one in live)
                for name in ("in_per_s", "out_per_s", "in_today", "out_today")
            },
            "chart": context.history.cluster.chart(RATE_IN, RATE_OUT),
            "lag_chart": context.history.cluster.chart(LAG),
            "lag_groups": len(context.history.counted),
            "disk_chart": context.history.cluster.chart(DISK),
        }
    )


def figures(told: dict[str, str]) -> dict[str, Any]:
    """What the page shows of a broker's counters (spec/admin.md §3)."""

    def whole(name: str) -> int:
        text = told.get(name, "")
        return int(text) if text.lstrip("-").isdigit() else 0

    return {
        "version": told.get("sluiceVersion") or told.get("brokerVersionDesc", ""),
        "is_ours": "sluiceVersion" in told,
        "in_per_s": rate(told.get("putTps", "")),
        "out_per_s": rate(told.get("getTransferredTps", "")),
        "in_today": whole("msgPutTotalTodayNow") - whole("msgPutTotalTodayMorning"),
        "out_today": whole("msgGetTotalTodayNow") - whole("msgGetTotalTodayMorning"),
        "disk": rate(told.get("commitLogDiskRatio", "")),
        "is_disk_high": rate(told.get("commitLogDiskRatio", "")) >= DISK_WARNING,
        "log_bytes": whole("commitLogMaxOffset") - whole("commitLogMinOffset"),
        "oldest_ms": whole("earliestMessageTimeStamp"),
        "waiting_sends": whole("sendThreadPoolQueueSize"),
        "begun_ms": whole("bootTimestamp"),
    }
