"""`sluice group list|create|update|show|lag|reset|skip|clone`: who consumes, how far, who idles
and why, who loses what; send a group elsewhere."""

from dataclasses import asdict

import click

from sluicemq.cli import group_offsets
from sluicemq.cli.group_contract import contract_records, print_contract, update
from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_records,
    print_table,
    show_time,
)
from sluicemq.client.core.explanations.facts import Code, Finding
from sluicemq.client.core.operations.filters import QueueLag, TopicMatching
from sluicemq.client.core.operations.groups import GroupReport
from sluicemq.client.sync.admin import Admin
from sluicemq.model.topic import RETRY_PREFIX, GroupConfig
from sluicemq.wire.bodies import GroupMatching

SYSTEM_PREFIXES = (
    "CID_ONS", "CID_RMQ_SYS_", "FILTERSRV_CONSUMER", "SELF_TEST_", "TOOLS_CONSUMER", "__MONITOR_",
)  # fmt: skip


@click.group()
def command() -> None:
    """List, create and show consumer groups, what they have not read; move them."""


for _moving in (group_offsets.reset, group_offsets.skip, group_offsets.clone, update):
    command.add_command(_moving)


@command.command("list")
@click.option("-a", "--all", "show_all", is_flag=True, help="The groups of the system too.")
@client_options
@json_option
def list_groups(
    show_all: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """The consumer groups that any broker knows."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        records = [
            {
                "group": name,
                "members": len(admin.members(name)),
                "lag": sum(item.lag for item in admin.progress(name)),
                "may_consume": config.consume_enable,
                "retries_max": config.retry_times_max,
            }
            for name, config in admin.groups().items()
            if show_all or not name.startswith(SYSTEM_PREFIXES)
        ]
    print_records("", records, as_json=as_json, empty="No consumer groups.")


@command.command("create")
@click.argument("name")
@click.option("--retries", type=int, default=16, show_default=True, help="Redeliveries at most.")
@client_options
@json_option
def create(
    name: str,
    retries: int,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Create or change consumer group NAME on every broker."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        brokers = admin.create_group(GroupConfig(name, retry_times_max=retries))
    if as_json:
        print_json({"group": name, "brokers": brokers})
    else:
        click.echo(f"Group {name} is known on {', '.join(brokers)}.")


@command.command("show")
@click.argument("name")
@client_options
@json_option
def show(
    name: str, name_servers: str, access_key: str | None, secret_key: str | None, as_json: bool
) -> None:
    """Members of group NAME with their queues, idle ones with the reason, and lag per queue."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        report = admin.group(name)
        told = admin.matching(name)
        contract = admin.contract(name)
        unequal = [
            finding
            for finding in admin.explain_group(name).findings
            if finding.code is Code.UNEQUAL
        ]
    if as_json:
        print_json(_record(report, told, unequal) | {"contract": contract_records(contract)})
        return
    _print(report)
    _print_filters(told)
    print_contract(contract)
    for finding in unequal:
        click.echo(f"{finding.what} {finding.instead}")


@command.command("lag")
@click.argument("name", required=False)
@click.option(
    "--at-risk",
    "only_risks",
    is_flag=True,
    help="Only queues whose unread messages will be deleted next; exit code 1 when there are any.",
)
@click.option("-a", "--all", "show_all", is_flag=True, help="The groups of the system too.")
@client_options
@json_option
def lag(
    name: str | None,
    only_risks: bool,
    show_all: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Unread messages of group NAME (or of all) in each queue, and which are deleted when."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        found = [
            item
            for item in admin.lag(name)
            if (name or show_all or not item.group.startswith(SYSTEM_PREFIXES))
            and (item.messages_at_risk or not only_risks)
        ]
    if as_json:
        for item in found:
            print_json(_lag_record(item))
    else:
        _print_lag(found)
    if only_risks and found:
        raise SystemExit(1)


def _lag_record(item: QueueLag) -> dict[str, object]:
    return {
        "group": item.group,
        "topic": item.queue.topic,
        "broker": item.queue.broker,
        "queue_id": item.queue.queue_id,
        "committed": item.committed,
        "offset_min": item.offset_min,
        "offset_max": item.offset_max,
        "lag": item.lag,
        "lost": item.lost,
        "at_risk": item.messages_at_risk,
        "loss_time_ms": item.loss_time_ms,
        "matching": item.matching,
        "eta_ms": item.eta_ms,
        "lanes": [asdict(lane) for lane in item.lanes],
    }


def _print_lag(found: list[QueueLag]) -> None:
    rows = [
        [item.group, *item.queue, item.committed, item.offset_min, item.offset_max, item.lag,
         item.matching, _span(item.eta_ms), item.lost, item.messages_at_risk,
         show_time(item.loss_time_ms)]
        for item in found
        if not item.queue.topic.startswith(RETRY_PREFIX) or item.lag or item.lost
    ]  # fmt: skip
    if rows:
        columns = [
            "group", "topic", "broker", "queue", "committed", "first", "end", "lag", "matching",
            "done in", "lost", "at risk", "deleted from",
        ]  # fmt: skip
        print_table("", columns, rows)
    _print_lanes(found)
    at_risk = sum(item.messages_at_risk for item in found)
    times = [item.loss_time_ms for item in found if item.messages_at_risk]
    known = [item.matching for item in found if item.matching is not None]
    if any(item.lag and item.matching is None for item in found):
        click.echo(
            "Where matching is empty it cannot be known how many messages the filter lets through: "
            "a RocketMQ broker does not count them, and of a group that is away and subscribed by "
            "tags nobody knows the tags. The lag counts those that a filter will drop."
        )
    elif known:
        click.echo(f"{sum(known):,} messages match the groups' filters.")
    click.echo(
        f"{sum(item.lag for item in found):,} messages behind; "
        + (f"{at_risk:,} of them are deleted from {show_time(min(times))} on." if times
           else "none of them is about to be deleted.")
    )  # fmt: skip


def _print_lanes(found: list[QueueLag]) -> None:
    """Of groups whose members want different things: each lane by its own offset."""
    rows = [
        [item.group, *item.queue, lane.lane, lane.expression, lane.committed, lane.matching]
        for item in found
        for lane in item.lanes
        if lane.matching or not item.queue.topic.startswith(RETRY_PREFIX)
    ]
    if rows:
        columns = ["group", "topic", "broker", "queue", "lane", "wants", "committed", "matching"]
        print_table("Lanes: a message counts in the one that will get it", columns, rows)


def _span(time_ms: int | None) -> str:
    """How long, roughly; empty when it is not known."""
    if time_ms is None:
        return ""
    seconds = time_ms / 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _record(
    report: GroupReport, told: list[TopicMatching], found: list[Finding]
) -> dict[str, object]:
    return {
        "group": report.name,
        "lag": report.lag,
        "members": [
            {
                "client_id": member.client_id,
                "queues": [list(queue) for queue in member.queues],
                "idle_because": member.idle_because,
            }
            for member in report.members
        ],
        "queues": [
            {
                "topic": item.queue.topic,
                "broker": item.queue.broker,
                "queue_id": item.queue.queue_id,
                "committed": item.committed,
                "offset_max": item.offset_max,
                "lag": item.lag,
                "last_time_ms": item.last_time_ms,
            }
            for item in report.progress
        ],
        "notes": list(report.notes),
        "filters": [
            {
                "broker": item.broker,
                "topic": topic.topic,
                "kind": topic.kind,
                "expression": topic.expression,
                "matched": topic.matched,
                "filtered": topic.filtered,
                "matching": _matching(topic),
                "errors": dict(topic.errors),
                "last_errors": [asdict(failure) for failure in topic.failures],
            }
            for item in told
            for topic in item.topics
        ],
        "findings": [asdict(finding) for finding in found],
    }


def _matching(topic: GroupMatching) -> int | None:
    counts = [queue.matching for queue in topic.queues]
    return None if None in counts else sum(count or 0 for count in counts)


def _print_filters(told: list[TopicMatching]) -> None:
    """What each filter has done since its broker started, and its last errors."""
    topics = [
        (item.broker, topic)
        for item in told
        for topic in item.topics
        if not topic.topic.startswith(RETRY_PREFIX)
        and (topic.expression != "*" or topic.filtered or topic.errors)
    ]
    rows = [
        [topic.topic, broker, topic.expression or "not known", topic.matched, topic.filtered,
         sum(topic.errors.values()), _matching(topic)]
        for broker, topic in topics
    ]  # fmt: skip
    if rows:
        columns = ["topic", "broker", "filter", "matched", "filtered out", "errors", "matching"]
        print_table("Filters", columns, rows)
    for _, topic in topics:
        for reason, count in sorted(topic.errors.items(), key=lambda item: -item[1]):
            click.echo(f"{topic.topic}: {count:,} messages were dropped: {reason}.")
        for failure in topic.failures[-3:]:
            place = f"queue {failure.queue_id} offset {failure.offset}"
            click.echo(f"    {topic.topic} {place}: {failure.text}")


def _print(report: GroupReport) -> None:
    if report.members:
        print_table(
            f"Members of {report.name}",
            ["member", "queues", "idle because"],
            [
                [
                    member.client_id,
                    ", ".join(
                        f"{queue.topic}/{queue.broker}/{queue.queue_id}" for queue in member.queues
                    ),
                    member.idle_because,
                ]
                for member in report.members
            ],
        )
    owners = {queue: member.client_id for member in report.members for queue in member.queues}
    rows = [
        [*item.queue, item.committed, item.offset_max, item.lag, show_time(item.last_time_ms),
         owners.get(item.queue, "")]
        for item in report.progress
        if not item.queue.topic.startswith(RETRY_PREFIX) or item.lag
    ]  # fmt: skip
    if rows:
        columns = ["topic", "broker", "queue", "committed", "end", "lag", "last consumed", "member"]
        print_table(f"Progress of {report.name}", columns, rows)
    for note in report.notes:
        click.echo(note)
    idle = sum(bool(member.idle_because) for member in report.members)
    click.echo(
        f"{len(report.members)} members ({idle} idle), {report.lag:,} messages behind. "
        "With a filter, messages that it drops count until they are passed: see `matching`."
    )
