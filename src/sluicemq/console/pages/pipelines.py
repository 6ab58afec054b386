"""The pages of Spark pipelines: the progress of each run.

It is read from the progress files in the console's directories (`pipelines.record`), without Spark.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sluicemq.console.context import Answer, Context
from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.record import read_runs

STEPS_SHOWN: Final = 50


async def show_all(context: Context) -> Answer:
    """Return the page with the last run of each pipeline, from the directories of the console."""
    runs = await asyncio.to_thread(read_runs, context.pipelines, clock=context.clock)
    return Answer(
        {"paged": context.paginate(list(runs.values())), "directories": context.pipelines}
    )


async def show(context: Context) -> Answer:
    """Return the page of the last run of one pipeline, with a chart for each sink.

    Raises ConfigurationError if no directory has a run of it.
    """
    runs = await asyncio.to_thread(read_runs, context.pipelines, clock=context.clock)
    run = runs.get(context.path["name"])
    if run is None:
        raise ConfigurationError(
            f"No directory has the progress of {context.path['name']!r}.",
            fix="Choose a pipeline from the list.",
        )
    charts = {sink: chart_data(run.steps, sink) for sink in run.sinks}
    steps = list(run.steps)[-STEPS_SHOWN:][::-1]
    return Answer({"run": run, "charts": charts, "steps": steps})


def chart_data(steps: Iterable[Mapping[str, Any]], sink: str) -> list[list[float | None]]:
    """Return [times, rates, remaining rows] of the steps of one sink, for a chart.

    Times are in seconds since 1970. Steps without a rate are left out.
    """
    times_s: list[float | None] = []
    rates: list[float | None] = []
    remaining_rows: list[float | None] = []
    for step in steps:
        if step["sink"] == sink and step["rows_per_second"] is not None:
            times_s.append(step["time_ms"] / 1000)
            rates.append(step["rows_per_second"])
            remaining_rows.append(step["left"])
    return [times_s, rates, remaining_rows]
