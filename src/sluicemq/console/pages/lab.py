"""The filter lab: what an expression matches among stored messages, while it is being typed."""

from collections.abc import Iterable, Mapping
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
    """Return the page that tries a filter expression on the newest messages of a topic.

    The query has topic, expression, kind and perhaps a group to compare with. Errors of the
    expression are shown on the page.
    """
    query = context.query
    topic = query.get("topic", "").strip()
    expression = query.get("expression", "").strip()
    group = query.get("group", "").strip()
    kind = TAG if query.get("kind") == TAG else SQL92
    findings = check_sql92(expression) if expression and kind == SQL92 else []
    values: dict[str, Any] = {
        "topic": topic,
        "expression": expression,
        "kind": kind,
        "group": group,
        "total": None,
        "findings": findings,
        "error": None,
        "topics": await context.get_cached("topics", context.admin.topics),
    }
    compiles = not any(finding.is_error for finding in findings)
    if topic and expression and compiles:
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
    """Combine the results of a filter on several brokers: counts, conditions and samples."""
    reports = [trial.report for trial in trials]
    totals = {name: sum(report[name] for report in reports) for name in COUNTS}
    totals["stored"] = sum(trial.stored for trial in trials)
    samples: list[dict[str, Any]] = []
    causes: list[Any] = []
    for trial in trials:
        samples += _list_samples(trial)
        causes += trial.report["causes"]
    differences = [report["difference"] for report in reports]
    return {
        "total": totals,
        "atoms": _sum_atoms(reports),
        "samples": samples[:SAMPLES_MAX],
        "causes": causes,
        "differences": [difference for difference in differences if difference is not None],
        "cost": reports[0]["cost"] if reports else None,
    }


def _sum_atoms(reports: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return how each condition of an expression evaluated, summed over all brokers.

    A condition has no AND, OR or NOT; reports call it an atom. `share` is the part of the messages
    for which it is true.
    """
    counts_by_atom: dict[str, dict[str, int]] = {}
    for report in reports:
        for atom in report["atoms"]:
            counts = counts_by_atom.setdefault(atom["text"], dict.fromkeys(OUTCOMES, 0))
            for outcome in OUTCOMES:
                counts[outcome] += atom[outcome]
    atoms = []
    for atom_text, counts in counts_by_atom.items():
        share = counts["true"] / max(1, sum(counts.values()))
        atoms.append({"text": atom_text, "share": share, **counts})
    return atoms


def _list_samples(trial: BrokerTrial) -> list[dict[str, Any]]:
    """Return the sample messages of one broker, with the properties that applications set.

    Each is {"broker", "queue_id", "offset", "properties"}.
    """
    sampled = {(int(str(sample["source"])), sample["offset"]) for sample in trial.report["samples"]}
    samples = []
    for (queue_id, offset), properties in trial.messages.items():
        if (queue_id, offset) in sampled:
            samples.append(
                {
                    "broker": trial.broker,
                    "queue_id": queue_id,
                    "offset": offset,
                    "properties": settable_properties(properties),
                }
            )
    return samples
