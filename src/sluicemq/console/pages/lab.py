"""The filter lab: what an expression matches among stored messages, while it is being typed."""

from typing import Any, Final

from sluicemq.client.admin.filter_trials import BrokerTrial
from sluicemq.console.context import Answer, Context
from sluicemq.errors import SluiceError
from sluicemq.filter.check import check_sql92
from sluicemq.model.properties import settable_properties
from sluicemq.model.subscription import SQL92, TAG

ROWS_MAX: Final = 20_000
"""The number of newest messages on which an expression is tried."""
COUNTS: Final = "rows", "matched", "false", "null", "errors", "unknown"
OUTCOMES: Final = "true", "false", "null", "error"
SAMPLES_MAX: Final = 10


async def show(context: Context) -> Answer:
    """Return the page with a trial on the newest messages of a topic."""
    topic, expression, group = (
        context.query.get(name, "").strip() for name in ("topic", "expression", "group")
    )
    kind = TAG if context.query.get("kind") == TAG else SQL92
    values: dict[str, Any] = {
        "topic": topic,
        "expression": expression,
        "kind": kind,
        "group": group,
        "total": None,
        "findings": check_sql92(expression) if expression and kind == SQL92 else [],
        "error": None,
        "topics": await context.get_cached("topics", context.admin.topics),
    }
    if topic and expression and not any(one.is_error for one in values["findings"]):
        try:
            trials = await context.admin.try_filter(
                topic, expression, kind, group=group or None, count_max=ROWS_MAX
            )
        except SluiceError as error:
            values["error"] = error
        else:
            values |= sum_trials(trials)
    return Answer(values)


def sum_trials(trials: list[BrokerTrial]) -> dict[str, Any]:
    """Return the results of several brokers as one: sums of counts, conditions and samples."""
    total = {name: sum(one.report[name] for one in trials) for name in COUNTS}
    atoms: dict[str, dict[str, int]] = {}
    for trial in trials:
        for atom in trial.report["atoms"]:
            counts = atoms.setdefault(atom["text"], dict.fromkeys(OUTCOMES, 0))
            for name in OUTCOMES:
                counts[name] += atom[name]
    samples = [
        {
            "broker": one.broker,
            "queue_id": place[0],
            "offset": place[1],
            "properties": settable_properties(properties),
        }
        for one in trials
        for place, properties in one.messages.items()
        if any(
            (int(str(sample["source"])), sample["offset"]) == place
            for sample in one.report["samples"]
        )
    ]
    return {
        "total": total | {"stored": sum(one.stored for one in trials)},
        "atoms": [
            {"text": text, "share": counts["true"] / max(1, sum(counts.values())), **counts}
            for text, counts in atoms.items()
        ],
        "samples": samples[:SAMPLES_MAX],
        "causes": [cause for one in trials for cause in one.report["causes"]],
        "differences": [
            one.report["difference"] for one in trials if one.report["difference"] is not None
        ],
        "cost": next((one.report["cost"] for one in trials), None),
    }
