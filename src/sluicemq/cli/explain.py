"""Commands that explain: `sluice explain`, `sluice filter test` and `sluice doctor`.

`explain message` and `explain group` say why a group has or has not received a message, is idle or
lags. `explain error` prints the documentation of an error. `filter test` evaluates an expression
on stored messages. `doctor` diagnoses a cluster, from the name servers to the clients.
"""

import inspect
import pydoc
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from sluicemq import errors
from sluicemq.cli.ending import EXIT_FINDINGS
from sluicemq.cli.output import (
    admin_options,
    format_time,
    parse_ago,
    parse_time_option,
    print_json,
    print_records,
    print_table,
    record_builder,
)
from sluicemq.client.admin.diagnose.cluster_facts import ClusterFacts
from sluicemq.client.admin.diagnose.findings import Fate, Finding, MessageExplained
from sluicemq.client.admin.diagnose.group_facts import MessageFacts
from sluicemq.client.admin.diagnose.records import doctor_record, explain_record, group_record
from sluicemq.client.admin.filter_trials import BrokerTrial
from sluicemq.client.sync.admin import Admin
from sluicemq.filter.selector import Explanation, Operand
from sluicemq.hints import did_you_mean
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.model.topic import MESSAGE_TYPES
from sluicemq.operate.doctor import Diagnosis, diagnose

SAMPLES_MAX: Final = 5
"""The number of messages in a table of samples."""
_HIDDEN_PROPERTIES: Final = frozenset({"MSG_REGION", "TRACE_ON", "CLUSTER", "WAIT", "UNIQ_KEY"})
_stored_record = record_builder(
    "message_id topic broker queue_id queue_offset store_time_ms tag properties"
)


@click.group()
def explain() -> None:
    """Explain why a group has not received a message, is idle or lags, and what errors mean."""


@explain.command("message")
@click.argument("message_id", metavar="ID")
@click.option(
    "-g",
    "--group",
    help="Consumer group to explain in detail. Without it, one line is printed for each group that "
    "reads the topic.",
)
@click.option("-t", "--topic", help="Topic of the message. Without it, all topics are searched.")
@click.option(
    "--trace-topic",
    default=TRACE_TOPIC,
    show_default=True,
    help="Topic that contains the traces.",
)
@admin_options
def message(
    admin: Admin, message_id: str, group: str | None, as_json: bool, **options: Any
) -> None:
    """Say where message ID is stored, and why a consumer group has or has not received it.

    The answer combines what brokers, members, filters, retries and traces report. What none of
    them reports is shown as unknown.
    """
    message_facts, explanations = admin.explain_message(message_id, group=group, **options)
    if as_json:
        print_json(
            {
                "message": _make_message_record(message_facts),
                "groups": [_make_group_fate_record(explained) for explained in explanations],
            }
        )
        return

    _print_message(message_facts)
    if group is None:
        _print_fates_table(explanations)
    else:
        for explained in explanations:
            _print_fate(explained)


def _make_message_record(message_facts: MessageFacts) -> dict[str, Any]:
    """Return a message and its location as the object `message` of `explain message --json`.

    `offset_min` and `offset_max` are the bounds of its queue, and `has_route` says whether clients
    can read it. The key `body_error` exists only if the body cannot be decoded.
    """
    stored = message_facts.message
    record = _stored_record(stored) | record_builder("offset_min offset_max")(message_facts)
    record["has_route"] = _has_route(message_facts)
    if stored.body_error is not None:
        record["body_error"] = str(stored.body_error)
    return record


def _has_route(message_facts: MessageFacts) -> bool:
    """Return whether clients have a route to the message's topic on its broker."""
    readable_brokers = message_facts.readable_brokers
    return readable_brokers is not None and message_facts.message.broker in readable_brokers


def _print_message(message_facts: MessageFacts) -> None:
    """Print where a message is stored and its tag.

    A line says if clients have no route to it, and another one why its body cannot be decoded.
    """
    stored = message_facts.message
    lines = [
        f"Message {stored.message_id} of {stored.topic}",
        f"  stored   {format_time(stored.store_time_ms)} on {stored.broker}, queue "
        f"{stored.queue_id}, offset {stored.queue_offset} (the queue contains "
        f"{message_facts.offset_min} to {message_facts.offset_max - 1})",
        f"  tag      {stored.tag or 'none'}",
    ]
    if not _has_route(message_facts):
        lines.append("  route    clients have no route to this topic on that broker")
    if stored.body_error:
        lines.append(f"  body     {stored.body_error}")
    click.echo("\n".join([*lines, ""]))


def _print_fates_table(explanations: Sequence[MessageExplained]) -> None:
    """Print a table with a line for each group: what happened to the message there, and why.

    Without groups, a sentence says so.
    """
    print_records(
        [
            {
                "group": explained.group,
                "fate": fate_text(explained),
                "because": explained.cause.what if explained.cause else "",
            }
            for explained in explanations
        ]
    )
    if not explanations:
        click.echo("No consumer group reads the topic or has committed offsets in it.")


def _print_fate(explained: MessageExplained) -> None:
    """Print what happened to a message in one group.

    The findings that explain it follow, and the outcome of each condition of the group's filter.
    """
    click.echo(f"Group {explained.group}: {fate_text(explained)}")
    if explained.owner is not None:
        click.echo(f"  the queue is read by {explained.owner or 'no member'}")
    _print_findings(explained.findings)
    if explained.verdict is not None:
        click.echo("\n".join(verdict_lines(explained.verdict)))


@explain.command("group")
@click.argument("name")
@admin_options
def group(admin: Admin, name: str, as_json: bool) -> None:
    """Say why group NAME is idle or lags. Exit code 1 if there are findings."""
    explained = admin.explain_group(name)
    if as_json:
        print_json(group_record(explained))
    else:
        _print_findings(explained.findings)
        if not explained.findings:
            click.echo(f"Group {name} is up to date: it has no lag.")
    if explained.findings:
        raise SystemExit(EXIT_FINDINGS)


_COMPONENT_PATHS: Final = {path.rpartition(".")[2]: path for path in errors.COMPONENT_ERRORS}
"""The errors of single components: class name -> path below the package."""
_FIX_UNKNOWN_ERROR: Final = "To list all errors, run `sluice explain error`."


@explain.command("error")
@click.argument("name", default="")
def error(name: str) -> None:
    """Explain what error NAME means, when it is raised, and how to fix it.

    Without NAME, list all errors.
    """
    if not name:
        click.echo(inspect.getdoc(errors))
        return
    error_class = pydoc.locate(f"sluicemq.{_find_class_path(name)}")
    if not isinstance(error_class, type) or not issubclass(error_class, errors.SluiceError):
        hint = did_you_mean(name, [*vars(errors), *_COMPONENT_PATHS])
        # Not a SluiceError: the page of its own class, to which its text leads, would not help.
        sentences = (f"there is no error named {name!r}.", hint, _FIX_UNKNOWN_ERROR)
        raise click.ClickException(" ".join(filter(None, sentences)))
    click.echo(f"{error_class.__name__}\n\n{inspect.getdoc(error_class)}")


def _find_class_path(page: str) -> str:
    """Return the path of an error class below the package, such as "errors.SendError".

    `page` is the class name or, for an error of a single component, the path below the package
    where the class is or was first.
    """
    if page in _COMPONENT_PATHS:
        return _COMPONENT_PATHS[page]
    path_by_published_name = {published: path for path, published in errors.PUBLISHED_PAGES.items()}
    if page in path_by_published_name:
        return path_by_published_name[page]
    is_path = "." in page
    return page if is_path else f"errors.{page}"


def _make_group_fate_record(explained: MessageExplained) -> dict[str, Any]:
    """Return what happened to a message in a group, as an object of `explain message --json`.

    `filter` is None if the filter was not evaluated on the message. `owner` is the member that
    reads the queue, "" for none, None if unknown.
    """
    return {
        "group": explained.group,
        "fate": explained.fate,
        "retries": explained.times,
        "owner": explained.owner,
        "findings": [explain_record(finding) for finding in explained.findings],
        "filter": explained.verdict,
    }


def fate_text(explained: MessageExplained) -> str:
    """Return the fate of a message in a group as text; that of a retry includes its number."""
    return f"retry {explained.times}" if explained.fate is Fate.RETRY else explained.fate.value


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding as CODE: TEXT, and its fix on a line below."""
    for finding in findings:
        click.echo(f"{finding.code}: {finding.what}")
        if finding.fix:
            click.echo(f"    {finding.fix}")


def verdict_lines(verdict: Explanation, depth: int = 1) -> list[str]:
    """Return the conditions of a filter as an indented tree, one line for each, with its outcome.

    `depth` is the indentation of the first line, in units of two blanks.
    """
    indentation = "  " * depth
    line = f"{indentation}{verdict.outcome.value:<11} {verdict.text}"
    if verdict.operands:
        line += f"  [{'; '.join(map(_format_operand, verdict.operands))}]"
    if verdict.error:
        line += f"  {verdict.error}"

    lines = [line]
    for subcondition in verdict.parts:
        lines += verdict_lines(subcondition, depth + 1)
    return lines


def _format_operand(operand: Operand) -> str:
    """Return a property of a condition with its value and Java type: `price = 7 (Long)`."""
    value_text = "absent" if operand.value is None else repr(operand.value)
    return f"{operand.text} = {value_text} ({operand.java_class})"


# ------------------------------------------------------------------------------ filter test


def parse_moment_option(
    context: click.Context, option: click.Parameter, moment: str | None
) -> int | None:
    """Return the time that an option names, in milliseconds since 1970; click calls this.

    `moment` is a duration before now such as "30m", milliseconds since 1970 or a date. For the
    option `--since`, "all" means 0. None stays None. Raises OptionError for other texts.
    """
    if moment == "all" and option.opts[0] == "--since":
        return 0
    ago_ms = parse_ago(moment or "")
    if ago_ms is not None:
        return ago_ms
    return parse_time_option(context, option, moment)


@click.command("test")
@click.argument("expression", metavar="EXPR")
@click.option("-t", "--topic", required=True, help="Topic whose messages are evaluated.")
@click.option(
    "--since",
    "begin_ms",
    callback=parse_moment_option,
    default="1h",
    show_default=True,
    help="Evaluate messages stored at or after this time: all, 30m, 1h or 2d ago, a Unix "
    "timestamp in milliseconds, or a date.",
)
@click.option(
    "--until",
    "end_ms",
    callback=parse_moment_option,
    help="Evaluate messages stored at or before this time. Default: now.",
)
@click.option("-g", "--group", help="Compare EXPR with the current filter of this consumer group.")
@click.option(
    "--tags", is_flag=True, help="Interpret EXPR as a list of tags, such as TagA || TagB."
)
@click.option(
    "--max",
    "count_max",
    type=click.IntRange(1),
    help="Maximum number of messages, the newest of each queue. Default: 1,000,000, or 100,000 "
    "from a RocketMQ broker.",
)
@admin_options
def test_command(
    admin: Admin, expression: str, topic: str, tags: bool, as_json: bool, **options: Any
) -> None:
    """Evaluate EXPR on the stored messages of a topic, without consuming them.

    Show how many messages match, samples, how many match each condition alone, which evaluations
    fail and why, and how expensive EXPR is for a broker. With --group, also show the difference
    from that group's filter. Exit code 1 if evaluations fail, or values have another type than
    EXPR expects.
    """
    if not as_json and sys.stderr.isatty():
        options["progress"] = _show_read_count
    kind = TAG if tags else SQL92
    trials = admin.try_filter(topic, expression, kind, **options)  # one for each broker
    for trial in trials:
        if as_json:
            print_json(_trial_record(trial))
        else:
            _print_trial(trial)

    if any(trial.report["errors"] or _list_property_findings(trial) for trial in trials):
        raise SystemExit(EXIT_FINDINGS)


def _show_read_count(read_count: int, total_count: int) -> None:
    """Overwrite a line on stderr with the number of messages read from a RocketMQ broker."""
    line_end = "\n" if read_count >= total_count else ""
    click.echo(f"\r{read_count:,} of {total_count:,} messages read{line_end}", nl=False, err=True)


def _trial_record(trial: BrokerTrial) -> dict[str, Any]:
    """Return the result of an expression on one broker, as a line of `filter test --json`."""
    messages = [
        {"queue_id": queue_id, "offset": offset, "properties": properties}
        for (queue_id, offset), properties in sorted(trial.messages.items())
    ]
    scope = record_builder("broker stored is_read_here")(trial)
    return {**scope, **trial.report, "messages": messages}


def _list_property_findings(trial: BrokerTrial) -> list[Mapping[str, str]]:
    """Return the warnings about properties whose values EXPR does not interpret as expected.

    Each has the keys `what` and `instead`.
    """
    findings: list[Mapping[str, str]] = []
    for property_report in trial.report["properties"]:
        findings += property_report["findings"]
    return findings


def _print_trial(trial: BrokerTrial) -> None:
    """Print the result of an expression on the messages of one broker.

    Conditions, costs and samples follow, and with a group the difference from its filter. If the
    broker has no messages, only the counts are printed.
    """
    report = trial.report
    _print_trial_counts(trial)
    if not trial.rows:
        return
    _print_conditions(report["atoms"])
    _print_trial_costs(trial)
    _print_samples("Messages that match", trial, report["samples"])
    if difference := report["difference"]:
        click.echo(
            f"\nThe group's filter is {difference['other']}. {difference['both']:,} messages match "
            f"both, {difference['only_here']:,} only the new one, {difference['only_there']:,} "
            f"only the group's, {difference['neither']:,} neither."
        )
        _print_samples("Messages that match only the new filter", trial, difference["samples_here"])
        _print_samples(
            "Messages that match only the group's filter", trial, difference["samples_there"]
        )


def _print_trial_counts(trial: BrokerTrial) -> None:
    """Print how many messages of a broker match an expression, and the results of the others."""
    report = trial.report
    evaluated = f"{trial.rows:,} messages on {trial.broker}"
    if trial.rows < trial.stored:
        evaluated += f" (the newest of {trial.stored:,}: raise --max for more)"
    others = (
        f"The others: {report['false']:,} false, {report['null']:,} null, "
        f"{report['errors']:,} errors."
    )
    if report["unknown"]:
        others += f" {report['unknown']:,} are unknown."
    click.echo(
        f"{report['matched']:,} of {evaluated} match {report['expression']}: "
        f"{report['match_rate']:.4%}.\n{others}"
    )
    if not trial.rows:
        click.echo(
            "No message was stored in this time (by default the last hour). "
            "Evaluate all messages with --since all."
        )


def _print_conditions(atoms: Sequence[Mapping[str, Any]]) -> None:
    """Print a table that shows how many messages each condition of an expression matches alone.

    A condition has no AND, OR or NOT; the report calls it an atom. Nothing is printed for a single
    condition without errors.
    """
    has_errors = any(atom["error"] for atom in atoms)
    if len(atoms) <= 1 and not has_errors:
        return
    verdicts = ("true", "false", "null", "error")
    rows = []
    for atom in atoms:
        counts = [atom[verdict] for verdict in verdicts]
        rows.append([atom["text"], f"{atom['selectivity']:.2%}", *counts])
    print_table("Each condition alone", ["condition", "matches", *verdicts], rows)


def _print_trial_costs(trial: BrokerTrial) -> None:
    """Print errors of an expression, warnings about properties, and how expensive it is."""
    report = trial.report
    for cause in report["causes"]:
        click.echo(f"error    {cause['count']:,} messages: {cause['example']}")
    for finding in _list_property_findings(trial):
        click.echo(f"warning  {finding['what']}\n         {finding['instead']}")
    cost = report["cost"]
    click.echo(f"cost     {cost['cost_class']}: {cost['why']} {cost['instead']}".rstrip())


def _print_samples(title: str, trial: BrokerTrial, samples: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of up to `SAMPLES_MAX` sample messages: queue id, offset and properties.

    `samples` name the messages, and `trial.messages` has their properties. Without samples nothing
    is printed.
    """
    rows = []
    for sample in samples[:SAMPLES_MAX]:
        queue_id = sample["source"]
        offset = sample["offset"]
        properties = trial.messages.get((int(queue_id), offset), {})
        rows.append([queue_id, offset, _format_visible_properties(properties)])
    if rows:
        print_table(title, ["queue", "offset", "properties"], rows)


def _format_visible_properties(properties: Mapping[str, str]) -> str:
    """Return the properties as NAME=VALUE, NAME=VALUE, without `_HIDDEN_PROPERTIES`."""
    return ", ".join(
        f"{name}={value}" for name, value in properties.items() if name not in _HIDDEN_PROPERTIES
    )


# ------------------------------------------------------------------------------------- doctor


@click.command()
@click.option(
    "-t", "--topic", help="Diagnose why clients cannot send to this topic or read from it."
)
@click.option(
    "-g", "--group", help="Diagnose why this consumer group receives no messages, or lags."
)
@click.option(
    "-m",
    "--message",
    "message_id",
    metavar="ID",
    help="Diagnose why the message with this id was not received.",
)
@click.option(
    "--type",
    type=click.Choice([name.lower() for name in MESSAGE_TYPES]),
    help="Type of the messages that producers send to the topic.",
)
@click.option(
    "--broker",
    "brokers",
    metavar="HOST:PORT",
    multiple=True,
    help="Also query this broker, even if no name server knows it. Repeat for more brokers.",
)
@admin_options
def doctor(admin: Admin, as_json: bool, **options: Any) -> None:
    """Diagnose a cluster of SluiceMQ or RocketMQ, and say how to fix it.

    Check name servers, brokers, stores, groups and clients in this order, without changing
    anything. Print the cause, then other findings. Exit code 1 if there is a cause.
    """
    diagnosis = diagnose(admin, **options)
    if as_json:
        print_json(_make_diagnosis_record(diagnosis))
    else:
        _print_diagnosis(diagnosis)
    if not diagnosis.is_healthy:
        raise SystemExit(EXIT_FINDINGS)


def _make_diagnosis_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as the object that `doctor --json` prints.

    `cause` is None if nothing is wrong; `evidence` has the facts.
    """
    return {
        "healthy": diagnosis.is_healthy,
        "cause": None if diagnosis.cause is None else doctor_record(diagnosis.cause),
        "also": [doctor_record(finding) for finding in diagnosis.also],
        "notes": [doctor_record(finding) for finding in diagnosis.notes],
        "evidence": _make_facts_record(diagnosis.facts),
    }


_name_server_record = record_builder("address reach code remark detail")
_broker_record = record_builder(
    "address reach code remark detail name id skew_ms=clock_ahead_ms disk_percent vip=vip_reach "
    "runtime"
)
_message_search_record = record_builder("message_id waiting offset_min born_ms")


def _make_facts_record(facts: ClusterFacts) -> dict[str, Any]:
    """Return the facts of a diagnosis for `--json`, the object `evidence`.

        {"now_ms": …, "topic": …, "type": …, "denied": …, "unseen": […], "name_servers": [{…}],
         "brokers": [{…}], "group": {…} or null, "message": {…} or null}

    The settings of brokers are left out, because they contain secrets.
    """
    return {
        **record_builder("now_ms topic type denied unseen")(facts),
        "name_servers": [
            _name_server_record(server) | {"knows": server.has_route}
            for server in facts.name_servers
        ],
        "brokers": [_broker_record(broker) for broker in facts.brokers],
        "group": _make_group_facts_record(facts),
        "message": facts.message and _message_search_record(facts.message),
    }


def _make_group_facts_record(facts: ClusterFacts) -> dict[str, Any] | None:
    """Return the facts about the diagnosed group as an object of `doctor --json`.

    It is None if the user did not name a group.
    """
    group = facts.group
    explained = facts.explained_group
    if group is None:
        return None
    filter_record = record_builder("topic expression rows matched atoms=never_true")
    return {
        "name": group.name,
        "explained": explained and group_record(explained),
        "models": sorted(group.message_models),
        "dead": group.dead_letter_count,
        "dead_time_ms": group.dead_letter_time_ms,
        "retried": group.failed_messages,
        "filters": [filter_record(group_filter) for group_filter in group.filters],
    }


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the cause and further findings of a diagnosis, each with its fix, and then notes.

    If there is no cause, the first line says that the cluster is healthy. Lines with "unseen" say
    what could not be checked.
    """
    facts = diagnosis.facts
    if diagnosis.cause is None:
        name_servers = sum(server.is_up for server in facts.name_servers)
        brokers = sum(broker.is_up for broker in facts.brokers)
        click.echo(
            f"healthy  {name_servers} name servers and {brokers} brokers respond; nothing is wrong."
        )
    else:
        _print_labelled_finding("cause", diagnosis.cause)
        for finding in diagnosis.also:
            _print_labelled_finding("also", finding)
    for note in diagnosis.notes:
        _print_labelled_finding("note", note)
    for unchecked in facts.unseen:
        click.echo(f"unseen   {unchecked}")


def _print_labelled_finding(label: str, finding: Finding) -> None:
    """Print a finding of `doctor` after its label, and its fix on a line below."""
    click.echo(f"{label:<8} {finding.code}: {finding.what}")
    if finding.fix:
        click.echo(f"{'':8} {finding.fix}")
