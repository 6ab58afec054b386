"""`sluice explain message|group`: why a group has or has not got a message, is idle or behind;
`sluice explain error`: what an error means; `sluice filter test`: what an expression would do to
the messages that are stored; `sluice doctor`: what is wrong, from the name server to the client,
and what cures it."""

import inspect
import pydoc
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from sluicemq import errors
from sluicemq.cli.output import (
    admin_options,
    as_time,
    fields,
    parse_ago,
    print_json,
    print_records,
    print_table,
    show_time,
)
from sluicemq.client.admin.diagnose.cluster_facts import ClusterFacts
from sluicemq.client.admin.diagnose.findings import Fate, Finding, MessageExplained
from sluicemq.client.admin.diagnose.records import doctor_record, explain_record, group_record
from sluicemq.client.admin.filter_trials import BrokerTrial
from sluicemq.client.sync.admin import Admin
from sluicemq.filter.selector import Explanation
from sluicemq.hints import did_you_mean
from sluicemq.model.subscription import SQL92, TAG
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.model.topic import MESSAGE_TYPES
from sluicemq.operate.doctor import Diagnosis, diagnose

SHOWN_SAMPLES: Final = 5
_HIDDEN: Final = frozenset({"MSG_REGION", "TRACE_ON", "CLUSTER", "WAIT", "UNIQ_KEY"})
_place = fields("message_id topic broker queue_id queue_offset store_time_ms tag properties")


@click.group()
def explain() -> None:
    """Say why a group has not got a message, is idle or behind."""


@explain.command("message")
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", help="One consumer group; without it a line for each that reads it.")
@click.option("-t", "--topic", help="Topic of the message; without it all are searched.")
@click.option("--trace-topic", default=TRACE_TOPIC, show_default=True, help="Topic of the traces.")
@admin_options
def message(
    admin: Admin, message_id: str, group: str | None, as_json: bool, **options: Any
) -> None:
    """Say where the message ID is, and why a consumer group has or has not got it.

    What brokers, members, filters, retries and traces tell is put together; what none of them
    tells is said to be unknown.
    """
    about, found = admin.explain_message(message_id, group=group, **options)
    stored = about.message
    readable = about.readable_brokers
    has_route = readable is not None and stored.broker in readable
    if as_json:
        place = fields("offset_min offset_max")(about) | {"has_route": has_route}
        if stored.body_error is not None:
            place["body_error"] = str(stored.body_error)
        groups = [_message_record(one) for one in found]
        print_json({"message": _place(stored) | place, "groups": groups})
        return
    click.echo(
        f"Message {stored.message_id} of {stored.topic}\n"
        f"  stored   {show_time(stored.store_time_ms)} on {stored.broker}, queue "
        f"{stored.queue_id}, offset {stored.queue_offset} (the queue holds {about.offset_min} to "
        f"{about.offset_max - 1})\n"
        f"  tag      {stored.tag or 'none'}"
        + ("" if has_route else "\n  route    clients do not find this topic there")
        + (f"\n  body     {stored.body_error}" if stored.body_error else "")
        + "\n"
    )
    if group is None:
        causes = ((item, item.cause.what if item.cause else "") for item in found)
        print_records(
            [{"group": one.group, "fate": fate_of(one), "because": why} for one, why in causes]
        )
        if not found:
            click.echo("No consumer group reads its topic, or has offsets in it.")
        return
    for item in found:
        click.echo(f"Group {item.group}: {fate_of(item)}")
        if item.owner is not None:
            click.echo(f"  its queue is read by {item.owner or 'no member'}")
        _print_findings(item.findings)
        if item.verdict is not None:
            click.echo("\n".join(drawn(item.verdict)))


@explain.command("group")
@click.argument("name")
@admin_options
def group(admin: Admin, name: str, as_json: bool) -> None:
    """Say why group NAME is idle or behind; exit code 1 when something was found."""
    found = admin.explain_group(name)
    if as_json:
        print_json(group_record(found))
    else:
        _print_findings(found.findings)
        if not found.findings:
            click.echo(f"Group {name} is up to date: nothing is before it.")
    if found.findings:
        raise SystemExit(1)


@explain.command("error")
@click.argument("name", default="")
def error(name: str) -> None:
    """What error NAME means, when it comes, what was done, its cure; without NAME, all names."""
    if not name:
        click.echo(inspect.getdoc(errors))
        return
    kind = pydoc.locate(f"sluicemq.{_class_path_of(name)}")
    if not isinstance(kind, type) or not issubclass(kind, errors.SluiceError):
        fix = f"{did_you_mean(name, vars(errors))} sluice explain error shows them all.".lstrip()
        raise errors.ConfigurationError(f"there is no error {name!r}.", fix=fix)
    click.echo(f"{kind.__name__}\n\n{inspect.getdoc(kind)}")


def _class_path_of(page: str) -> str:
    """Return the module below sluicemq, and the class, that an error page is about."""
    moved = {published: path for path, published in errors.PUBLISHED_PAGES.items()}
    return moved.get(page, page if "." in page else f"errors.{page}")


def _message_record(item: MessageExplained) -> dict[str, Any]:
    """Return what happened to a message in a group as JSON."""
    return {
        "group": item.group,
        "fate": item.fate,
        "retries": item.times,
        "owner": item.owner,
        "findings": [explain_record(finding) for finding in item.findings],
        "filter": item.verdict,
    }


def fate_of(item: MessageExplained) -> str:
    """In a word, with the number of a retry."""
    return f"retry {item.times}" if item.fate is Fate.RETRY else item.fate.value


def _print_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        click.echo(f"{finding.code}: {finding.what}")
        if finding.fix:
            click.echo(f"    {finding.fix}")


def drawn(verdict: Explanation, depth: int = 1) -> list[str]:
    """The filter as an indented tree, each condition with its outcome."""
    sides = "; ".join(
        f"{side.text} = {'absent' if side.value is None else repr(side.value)} ({side.java_class})"
        for side in verdict.operands
    )
    note = f"  [{sides}]" if sides else ""
    error = f"  {verdict.error}" if verdict.error else ""
    line = f"{'  ' * depth}{verdict.outcome.value:<11} {verdict.text}{note}{error}"
    return [line, *(text for part in verdict.parts for text in drawn(part, depth + 1))]


# ------------------------------------------------------------------------------ filter test


def moment(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """As `as_time`, and a span of time before now; since `all`."""
    is_all = text == "all" and option.opts[0] == "--since"
    ago_ms = 0 if is_all else parse_ago(text or "")
    return as_time(context, option, text) if ago_ms is None else ago_ms


@click.command("test")
@click.argument("expression", metavar="EXPR")
@click.option("-t", "--topic", required=True, help="Topic whose messages are looked at.")
@click.option(
    "--since", "begin_ms", callback=moment, default="1h", show_default=True,
    help="Messages stored since then: 30m, 1h, 2d, a date, milliseconds since 1970, or all.",
)  # fmt: skip
@click.option("--until", "end_ms", callback=moment, help="Messages stored up to then.")
@click.option("-g", "--group", help="Compare with what this consumer group wants now.")
@click.option("--tags", is_flag=True, help="EXPR is a tag subscription: TagA || TagB.")
@click.option(
    "--max", "count_max", type=click.IntRange(1), help="So many messages at most, the newest of "
    "each queue; 1,000,000, and 100,000 of a RocketMQ broker.",
)  # fmt: skip
@admin_options
def test_command(
    admin: Admin, expression: str, topic: str, tags: bool, as_json: bool, **options: Any
) -> None:
    """Try EXPR on the stored messages of a topic. Nothing is consumed.

    Shows how many match, samples, what each condition takes by itself, which evaluations fail and
    why, and what it costs a broker; with --group the difference from that group's filter. Exit
    code 1 when evaluations fail or values are not what EXPR takes them for.
    """

    def progress(done: int, of: int) -> None:
        """A line that is written over: a RocketMQ broker's messages are read one by one."""
        line = f"\r{done:,} of {of:,} messages read" + ("\n" if done >= of else "")
        click.echo(line, nl=False, err=True)

    if not as_json and sys.stderr.isatty():
        options["progress"] = progress
    found = admin.try_filter(topic, expression, TAG if tags else SQL92, **options)
    for trial in found:
        if as_json:
            messages = [
                {"queue_id": queue_id, "offset": offset, "properties": properties}
                for (queue_id, offset), properties in sorted(trial.messages.items())
            ]
            about = fields("broker stored is_read_here")(trial)
            print_json({**about, **trial.report, "messages": messages})
        else:
            _print_trial(trial)
    if any(trial.report["errors"] or _findings(trial) for trial in found):
        raise SystemExit(1)


def _findings(trial: BrokerTrial) -> list[Mapping[str, str]]:
    return [finding for item in trial.report["properties"] for finding in item["findings"]]


def _print_trial(trial: BrokerTrial) -> None:
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


# ------------------------------------------------------------------------------------- doctor


@click.command()
@click.option("-t", "--topic", help="Why can it not be sent to, or read?")
@click.option("-g", "--group", help="Why does this consumer group get nothing, or lag?")
@click.option("-m", "--message", "message_id", metavar="ID", help="Why has it not arrived?")
@click.option(
    "--type", type=click.Choice([one.lower() for one in MESSAGE_TYPES]),
    help="What producers send to the topic.",
)  # fmt: skip
@click.option(
    "--broker", "brokers", metavar="HOST:PORT", multiple=True,
    help="Ask this broker too, although no name server may know it.",
)  # fmt: skip
@admin_options
def doctor(admin: Admin, as_json: bool, **options: Any) -> None:
    """Say what is wrong with a cluster, ours or RocketMQ's, and what cures it.

    Walks from the name servers to brokers, stores, groups and clients, changes nothing, and prints
    the one cause, then what is wrong besides. Exit code 1 when something is.
    """
    found = diagnose(admin, **options)
    if as_json:
        print_json({
            "healthy": found.is_healthy,
            "cause": None if found.cause is None else doctor_record(found.cause),
            "also": [doctor_record(finding) for finding in found.also],
            "notes": [doctor_record(finding) for finding in found.notes],
            "evidence": _facts_record(found),
        })  # fmt: skip
    else:
        _print_diagnosis(found)
    if not found.is_healthy:
        raise SystemExit(1)


_server = fields("address reach code remark detail")
_broker = fields(
    "address reach code remark detail name id skew_ms=clock_ahead_ms disk_percent vip=vip_reach "
    "runtime"
)
_message_search = fields("message_id waiting offset_min born_ms")


def _facts_record(found: Diagnosis) -> dict[str, Any]:
    """Return the facts that may be printed. The settings of brokers contain secrets."""
    facts = found.facts
    return {
        **fields("now_ms topic type denied unseen")(facts),
        "name_servers": [_server(one) | {"knows": one.has_route} for one in facts.name_servers],
        "brokers": [_broker(one) for one in facts.brokers],
        "group": _group_facts_record(facts),
        "message": facts.message and _message_search(facts.message),
    }


def _group_facts_record(facts: ClusterFacts) -> dict[str, Any] | None:
    group, explained = facts.group, facts.explained_group
    if group is None:
        return None
    return {
        "name": group.name,
        "explained": explained and group_record(explained),
        "models": sorted(group.message_models),
        "dead": group.dead_letter_count,
        "dead_time_ms": group.dead_letter_time_ms,
        "retried": group.failed_messages,
        "filters": [
            fields("topic expression rows matched atoms=never_true")(one) for one in group.filters
        ],
    }


def _print_diagnosis(found: Diagnosis) -> None:
    facts = found.facts
    if found.cause is None:
        names, brokers = (sum(one.is_up for one in them) for them in
                          (facts.name_servers, facts.brokers))  # fmt: skip
        click.echo(f"healthy  {names} name servers and {brokers} brokers answer; nothing is wrong.")
    causes = () if found.cause is None else (found.cause, *found.also)
    rows = [*zip(("cause", *("also",) * len(found.also)), causes, strict=False),
            *(("note", one) for one in found.notes)]  # fmt: skip
    for word, one in rows:
        click.echo(f"{word:<8} {one.code}: {one.what}")
        if one.fix:
            click.echo(f"{'':8} {one.fix}")
    for text in facts.unseen:
        click.echo(f"unseen   {text}")
