"""A bar of the tasks that Spark has done, beside a query that runs in a thread."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")
PERIOD_S: Final = 0.2


def task_bar(tracker: Any, work: Callable[[], T]) -> T:
    """The result of `work`; the bar goes away with it."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool, bar:
        task = bar.add_task("planning", total=None)
        running = pool.submit(work)
        seen: dict[int, tuple[int, int]] = {}
        while wait_for([running], timeout=PERIOD_S).not_done:
            seen |= stages_of(tracker)
            done, total = (sum(pair[at] for pair in seen.values()) for at in (0, 1))
            if total:
                bar.update(task, description="tasks", completed=done, total=total)
        return running.result()


def stages_of(tracker: Any) -> dict[int, tuple[int, int]]:
    """Tasks done and in all, by active stage."""
    found = {}
    for stage in tracker.getActiveStageIds():
        about = tracker.getStageInfo(stage)
        if about is not None:
            found[int(stage)] = (about.numCompletedTasks, about.numTasks)
    return found
