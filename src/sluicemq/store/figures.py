"""A store's figures as RocketMQ's tools print them (spec/admin.md §3)."""

from sluicemq.store.log import CommitLog


def runtime_figures(
    log: CommitLog, path: str, usage: tuple[int, int], start_ms: int, now_ms: int, earliest_ms: int
) -> dict[str, str]:
    """`path` is the log's, `usage` total and free bytes of its disk, the times are those of the
    start, now, and of the earliest message."""
    total, free = usage
    ratio = f"{1 - free / total:.4f}" if total else "0"
    return {
        "bootTimestamp": str(start_ms),
        "runtime": _duration(now_ms - start_ms),
        "commitLogMinOffset": str(log.start),
        "commitLogMaxOffset": str(log.written_offset),
        "commitLogDiskRatio": ratio,
        f"commitLogDiskRatio_{path}": ratio,
        "consumeQueueDiskRatio": ratio,
        "commitLogDirCapacity": f"Total : {_binary(total)}, Free : {_binary(free)}.",
        "earliestMessageTimeStamp": str(earliest_ms),
        "dispatchBehindBytes": "0",
        "dispatchMaxBuffer": "0",
        "pageCacheLockTimeMills": "0",
        "remainTransientStoreBufferNumbs": "2147483647",
        "remainHowManyDataToFlush": _binary(log.written_offset - log.synced_offset),
    }


def _binary(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f} {unit}"


def _duration(milliseconds: int) -> str:
    """As RocketMQ prints it: `[ 0 days, 0 hours, 0 minutes, 1 seconds ]`."""
    seconds = max(0, milliseconds) // 1000
    days, seconds = divmod(seconds, 86_400)
    hours, seconds = divmod(seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
