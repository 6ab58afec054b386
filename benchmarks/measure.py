"""CPU time and memory of server processes from /proc, and percentiles.

CPU time a message is the figure that other load on the machine disturbs least; rates on two cores
shared by client and server are not comparable between runs.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_LOG_MAP = re.compile(r"^[0-9a-f]+-[0-9a-f]+ .*/commitlog/")
REST_CORES = 0.25
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """A measured span: `count` things in `seconds`, for `cpu_s` of the server's CPU time."""

    count: int
    seconds: float
    cpu_s: float

    @property
    def per_second(self) -> float:
        return self.count / self.seconds if self.seconds else 0.0

    @property
    def cpu_us(self) -> float:
        return self.cpu_s / self.count * 1e6 if self.count else float("nan")


def process_tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    found, open_ = [], [pid]
    while open_:
        one = open_.pop()
        found.append(one)
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # threads end at any time
                open_.extend(int(child) for child in task.read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """User and system time of the process tree."""
    total = 0
    for one in process_tree(pid):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_SECOND


def exact_cpu_s(pid: int) -> float:
    """The same in nanoseconds, by the clock of each process: for spans of tenths of a second."""
    return sum(time.clock_gettime(~one << 3 | 2) for one in process_tree(pid))


def rss_mib(pid: int) -> float:
    """Resident memory of the process tree, with the pages of mapped files."""
    return _status_mib(pid, "VmRSS:")


def own_mib(pid: int) -> float:
    """Resident memory of the process tree that is no file: the kernel cannot just drop it."""
    return _status_mib(pid, "RssAnon:")


def _status_mib(pid: int, name: str) -> float:
    total = 0
    for one in process_tree(pid):
        for line in Path(f"/proc/{one}/status").read_text().splitlines():
            if line.startswith(name):
                total += int(line.split()[1])
    return total / 1024


def forget_pages(pid: int) -> None:
    """Clear the accessed bits of the pages of mapped files (proc(5), clear_refs)."""
    for one in process_tree(pid):
        with contextlib.suppress(OSError):
            Path(f"/proc/{one}/clear_refs").write_text("3")


def used_log_bytes(pid: int) -> int:
    """Pages of the commit log that were used since."""
    total = 0
    for one in process_tree(pid):
        is_log = False
        for line in Path(f"/proc/{one}/smaps").read_text().splitlines():
            if line[0] in "0123456789abcdef":
                is_log = _LOG_MAP.match(line) is not None
            elif is_log and line.startswith("Referenced:"):
                total += int(line.split()[1]) * 1024
    return total


def kill(pid: int) -> None:
    """SIGKILL: the process has no time to tidy up."""
    os.kill(pid, signal.SIGKILL)


def await_rest(pid: int, timeout_s: float = 20, calm_s: int = 2) -> None:
    """Until the process has spent less than a quarter of a core in each of `calm_s` seconds: an
    idle Java broker compares its timer wheel with the disk every second."""
    end_s, before, calm = time.monotonic() + timeout_s, exact_cpu_s(pid), 0
    while calm < calm_s and time.monotonic() < end_s:
        time.sleep(1)
        now = exact_cpu_s(pid)
        calm = calm + 1 if now - before < REST_CORES else 0
        before = now


class Span:
    """Counts what happens after `warm_s` for `measure_s`, with the server's CPU time."""

    def __init__(self, pid: int, warm_s: float, measure_s: float) -> None:
        self._pid = pid
        self._warm_s = warm_s
        self._measure_s = measure_s
        self._begin_at: float | None = None
        self._begin: tuple[float, float, int] | None = None
        self.cost = Cost(0, 0.0, 0.0)

    def over(self, count: int) -> bool:
        """True once the span is over; to be asked often, with the count so far. It begins when it
        is asked for the first time."""
        now = time.perf_counter()
        if self._begin is None:
            if self._begin_at is None:
                self._begin_at = now + self._warm_s
            if now >= self._begin_at:
                self._begin = (now, exact_cpu_s(self._pid), count)
            return False
        begin_s, begin_cpu_s, begin_count = self._begin
        if now < begin_s + self._measure_s:
            return False
        spent_s = exact_cpu_s(self._pid) - begin_cpu_s
        self.cost = Cost(count - begin_count, now - begin_s, spent_s)
        return True


def timed(pid: int, work: Callable[[], int]) -> Cost:
    """The cost of `work`, which returns what it did."""
    started, cpu = time.perf_counter(), exact_cpu_s(pid)
    count = work()
    return Cost(count, time.perf_counter() - started, exact_cpu_s(pid) - cpu)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")
