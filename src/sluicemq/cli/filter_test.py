"""`sluice filter test`: what an expression would do to the messages that are stored."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from sluicemq.cli.output import (
    admin_options,
    fields,
    parse_ago,
    parse_time,
    print_json,
    print_table,
)
from sluicemq.client.core.operations.filters import BrokerTrial
from sluicemq.client.sync.admin import Admin
from sluicemq.model.subscription import SQL92, TAG

SHOWN_SAMPLES: Final = 5
EXIT_FINDINGS: Final = 1
_HIDDEN: Final = frozenset({"MSG_REGION", "TRACE_ON", "CLUSTER", "WAIT", "UNIQ_KEY"})


@click.command("test")
@click.argument("expression", metavar="EXPR")
@click.option("-t", "--topic", required=True, help="Topic whose messages are looked at.")
@click.option(
    "--since",
    default="1h",
    show_default=True,
    help="Messages stored since then: 30m, 1h, 2d, a date, milliseconds since 1970, or all.",
)
@click.option("--until", help="Messages stored up to then.")
@click.option("-g", "--group", help="Compare with what this consumer group wants now.")
@click.option("--tags", is_flag=True, help="EXPR is a tag subscription: TagA || TagB.")
@click.option(
    "--max", "count_max", type=click.IntRange(1), help="So many messages at most, the newest of "
    "each queue; 1,000,000, and 100,000 of a RocketMQ broker.",
)  # fmt: skip
@admin_options
def test_command(
    admin: Admin,
    expression: str,
    topic: str,
    since: str,
    until: str | None,
    group: str | None,
    tags: bool,
    count_max: int | None,
    as_json: bool,
) -> None:
    """Try EXPR on the stored messages of a topic. Nothing is consumed.

    Shows how many match, samples, what each condition takes by itself, which evaluations fail and
    why, and what it costs a broker; with --group the difference from that group's filter. Exit
    code 1 when evaluations fail or values are not what EXPR takes them for.
    """
    begin_ms = 0 if since == "all" else moment("--since", since)
    end_ms = None if until is None else moment("--until", until)
    found = admin.try_filter(
        topic, expression, TAG if tags else SQL92, begin_ms=begin_ms, end_ms=end_ms,
        group=group, count_max=count_max, progress=_progress(as_json),
    )  # fmt: skip
    for trial in found:
        if as_json:
            messages = [
                {"queue_id": queue_id, "offset": offset, "properties": properties}
                for (queue_id, offset), properties in sorted(trial.messages.items())
            ]
            about = fields("broker stored is_read_here")(trial)
            print_json({**about, **trial.report, "messages": messages})
        else:
            _print(trial)
    if any(trial.report["errors"] or _findings(trial) for trial in found):
        raise SystemExit(EXIT_FINDINGS)


def moment(option: str, text: str) -> int:
    """As `parse_time`, and a span of time before now. Raises ConfigurationError."""
    ago_ms = parse_ago(text)
    return parse_time(text, option) if ago_ms is None else ago_ms


def _progress(as_json: bool) -> Callable[[int, int], None] | None:
    """A line that is written over, for a RocketMQ broker, whose messages are read one by one."""
    if as_json or not sys.stderr.isatty():
        return None
    return lambda done, of: click.echo(
        f"\r{done:,} of {of:,} messages read" + ("\n" if done >= of else ""), nl=False, err=True
    )


def _findings(trial: BrokerTrial) -> list[Mapping[str, str]]:
    return [finding for item in trial.report["properties"] for finding in item["findings"]]


def _print(trial: BrokerTrial) -> None:
    report = trial.report
    looked = f"{trial.rows:,} messages on {trial.broker}"
    if trial.rows < trial.stored:
        looked += f" (the newest of {trial.stored:,}: raise --max for more)"
    click.echo(
        f"{report['matched']:,} of {looked} match {report['expression']}: "
        f"{report['match_rate']:.4%}.\n"
        f"The others: {report['false']:,} false, {report['null']:,} null, "
        f"{report['errors']:,} errors."
        + (f" {report['unknown']:,} could not be told." if report["unknown"] else "")
    )
    if not trial.rows:
        return
    atoms = report["atoms"]
    if len(atoms) > 1 or any(atom["error"] for atom in atoms):
        names = ("true", "false", "null", "error")
        rows = [[atom["text"], f"{atom['selectivity']:.2%}", *(atom[name] for name in names)]
                for atom in atoms]  # fmt: skip
        print_table("Each condition by itself", ["condition", "takes", *names], rows)
    for cause in report["causes"]:
        click.echo(f"error    {cause['count']:,} messages: {cause['example']}")
    for finding in _findings(trial):
        click.echo(f"warning  {finding['what']}\n         {finding['instead']}")
    cost = report["cost"]
    click.echo(f"cost     {cost['cost_class']}: {cost['why']} {cost['instead']}".rstrip())
    _print_samples("Messages that match", trial, report["samples"])
    if difference := report["difference"]:
        click.echo(
            f"\nThe group wants {difference['other']}. Both take {difference['both']:,}, only the "
            f"new one {difference['only_here']:,}, only the group's {difference['only_there']:,}, "
            f"neither {difference['neither']:,}."
        )
        _print_samples("Only the new one takes", trial, difference["samples_here"])
        _print_samples("Only the group's takes", trial, difference["samples_there"])


def _print_samples(title: str, trial: BrokerTrial, samples: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for sample in samples[:SHOWN_SAMPLES]:
        properties = trial.messages.get((int(sample["source"]), sample["offset"]), {})
        shown = ", ".join(f"{n}={v}" for n, v in properties.items() if n not in _HIDDEN)
        rows.append([sample["source"], sample["offset"], shown])
    if rows:
        print_table(title, ["queue", "offset", "properties"], rows)
