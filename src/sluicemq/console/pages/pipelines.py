"""Pipelines on Spark: how far each run is, as its file in one of the console's directories tells
(spark.pipelines.record). Nothing is asked of Spark.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sluicemq.console.context import Answer, Context
from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.record import read_runs

STEPS_SHOWN: Final = 50


async def show_all(context: Context) -> Answer:
    """Each pipeline with its last run."""
    runs = await asyncio.to_thread(read_runs, context.pipelines, clock=context.clock)
    return Answer({"paged": context.paged(list(runs.values())), "directories": context.pipelines})


async def show(context: Context) -> Answer:
    """One with its sinks and steps. Raises ConfigurationError for one that no directory has."""
    runs = await asyncio.to_thread(read_runs, context.pipelines, clock=context.clock)
    run = runs.get(context.path["name"])
    if run is None:
        raise ConfigurationError(
            f"no directory has the progress of {context.path['name']!r}.", fix="See the list."
        )
    charts = {sink: chart(run.steps, sink) for sink in run.sinks}
    steps = list(run.steps)[-STEPS_SHOWN:][::-1]
    return Answer({"run": run, "charts": charts, "steps": steps})


def chart(steps: Iterable[Mapping[str, Any]], sink: str) -> list[list[float | None]]:
    """Times (s), rates and what was left, of the steps of one sink that tell a rate."""
    own = [one for one in steps if one["sink"] == sink and one["rows_per_second"] is not None]
    times: list[float | None] = [one["time_ms"] / 1000 for one in own]
    return [times, [one["rows_per_second"] for one in own], [one["left"] for one in own]]
