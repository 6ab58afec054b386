"""`sluice group` and `sluice consumer`: who consumes, how far, who idles and why, who loses what;
send a group elsewhere; what its consumers do now.

`reset`, `skip` and `clone` also work while the group consumes. Each shows, queue by queue, where
the group stood, where it goes on, and how many messages come again or are skipped; with --dry-run
that is all.

What a consumer does the brokers ask it themselves (307). A Python consumer of ours answers from its
heartbeat thread: also when a handler blocks its program, which is when one wants to see the stack.
"""

from dataclasses import asdict
from typing import Any, TypeVar

import click

from sluicemq.cli.ending import undecided
from sluicemq.cli.output import (
    admin_options,
    fields,
    parse_time,
    print_json,
    print_records,
    print_result,
    show_time,
)
from sluicemq.cli.servers.serve import print_proxy_clients
from sluicemq.client.admin.diagnose.findings import Code
from sluicemq.client.admin.diagnose.records import explain_record
from sluicemq.client.admin.group_offsets import EARLIEST_MS, LATEST_MS, OffsetChange
from sluicemq.client.admin.group_report import GroupReport
from sluicemq.client.admin.groups import (
    ConsumerClient,
    GroupContract,
    QueueLag,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.model.system_names import is_retry_topic, is_system_group
from sluicemq.model.topic import CONTRACTS, DLQ_PREFIX, RETRY_PREFIX, GroupConfig
from sluicemq.proxy import fetch_proxy_status
from sluicemq.wire.bodies import GroupMatching, RunningInfo
from sluicemq.wire.codes import version_name

T = TypeVar("T")
Record = dict[str, Any]
_QUEUE = "topic=queue.topic broker=queue.broker queue_id=queue.queue_id "
_lag = fields(
    f"group {_QUEUE} committed offset_min offset_max lag in_flight lost at_risk=messages_at_risk "
    "loss_time_ms matching eta_ms beyond_end"
)
_progress = fields(f"{_QUEUE} committed offset_max lag in_flight last_time_ms")
_change = fields(f"{_QUEUE} from=old to=new come_again=again skipped offset_max")
_filter = fields("topic kind expression matched filtered")
_failure = fields("queue_id offset text")
_contract = fields("broker contract lanes refused unmatched forgotten pops")
_client = fields("client_id address language")
_held = fields(
    "committed=commit_offset held=cached_count held_from=cached_min held_to=cached_max locked "
    "last_pull_ms last_consume_ms"
)
_rates = fields("done_per_second failed_per_second failures_last_hour=failures consume_ms")


@click.group()
def group() -> None:
    """List, create and show consumer groups, what they have not read; move them."""


@group.command("list")
@click.option("-a", "--all", "show_all", is_flag=True, help="The groups of the system too.")
@admin_options
def list_groups(admin: Admin, show_all: bool, as_json: bool) -> None:
    """List the consumer groups that any broker knows."""
    records = [
        {
            "group": name,
            "members": len(admin.members(name)),
            "lag": sum(item.lag for item in admin.progress(name)),
            "may_consume": config.consume_enable,
            "retries_max": config.retry_times_max,
        }
        for name, config in admin.groups().items()
        if show_all or not is_system_group(name)
    ]
    print_records(records, as_json=as_json, empty="No consumer groups.")


@group.command("create")
@click.argument("name")
@click.option("--retries", type=int, default=16, show_default=True, help="Redeliveries at most.")
@admin_options
def create(admin: Admin, name: str, retries: int, as_json: bool) -> None:
    """Create or change consumer group NAME on every broker."""
    undecided(f"sluice group show {name}")
    brokers = admin.create_group(GroupConfig(name, retry_times_max=retries))
    text = f"Group {name} is known on {', '.join(brokers)}."
    print_result({"group": name, "brokers": brokers}, text, as_json=as_json)


@group.command("update")
@click.argument("name")
@click.option(
    "--contract", type=click.Choice(CONTRACTS), required=True,
    help="May members subscribe to different things? strict: no; lanes: each subscription gets its "
    "share; compatible: the same, with a warning.",
)  # fmt: skip
@admin_options
def update(admin: Admin, name: str, contract: str, as_json: bool) -> None:
    """Change the contract of group NAME on every broker."""
    brokers = admin.change_contract(name, contract)
    text = f"Group {name} has the contract {contract} on {', '.join(brokers)}."
    record = {"group": name, "contract": contract, "brokers": brokers}
    print_result(record, text, as_json=as_json)


@group.command("delete")
@click.argument("name")
@click.option("-c", "--cluster", help="Only in that cluster.")
@click.option("--offsets", is_flag=True, help="Its offsets too: it would begin anew.")
@click.option(
    "--topics", is_flag=True,
    help="Its retry and dead-letter topics too, with all messages in them.",
)  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@admin_options
def delete(
    admin: Admin, name: str, cluster: str | None, offsets: bool, topics: bool, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Delete the settings of consumer group NAME on every broker, and what the options say.

    Members that are online make it anew where groups are made by themselves.
    """
    online = len(admin.group(name).members)
    with_them = [text for is_asked, text in ((offsets, "offsets"), (topics, "topics")) if is_asked]
    what = " and ".join(["its settings", *with_them])
    if not yes:
        members = f", which {online} members use now" * bool(online)
        click.confirm(f"Delete {name}{members}: {what}?", abort=True, err=True)
    undecided("sluice group list")
    masters = admin.masters(cluster)
    for address in masters.values():
        admin.delete_group(address, name, clean_offset=offsets)
    if topics:
        for there in {RETRY_PREFIX + name, DLQ_PREFIX + name} & set(admin.topics()):
            admin.delete_topic(there, cluster=cluster)
    print_result(
        {"group": name, "deleted": True, "brokers": list(masters)},
        f"Group {name} is deleted on {', '.join(masters)}: {what}.",
        as_json=as_json,
    )


# ----------------------------------------------------------------------------------- show


@group.command("show")
@click.argument("name")
@click.option(
    "--proxy", "proxies", multiple=True,
    help="Show what the proxy at host:port knows of its members too; repeat for more.",
)  # fmt: skip
@admin_options
def show(admin: Admin, name: str, proxies: tuple[str, ...], as_json: bool) -> None:
    """Show members of group NAME with their queues, why some are idle, and lag per queue."""
    report, contracts = admin.group(name), admin.contract(name)
    clients = admin.consumers(name) if report.members else []
    of_proxies = [
        one | {"proxy": address}
        for address in proxies
        for one in fetch_proxy_status(address, admin.credentials)["clients"]
        if one["group"] == name
    ]
    filters = [(one.broker, topic) for one in admin.matching(name) for topic in one.topics]
    unequal = [one for one in admin.explain_group(name).findings if one.code is Code.UNEQUAL]
    if as_json:
        print_json({
            "group": name,
            "lag": report.lag,
            "members": report.members,
            "clients": [_client(one) | {"version": one.version} for one in clients],
            "proxy_clients": of_proxies,
            "queues": [_progress(item) for item in report.progress],
            "notes": report.notes,
            "filters": [_filter_record(broker, topic) for broker, topic in filters],
            "findings": [explain_record(one) for one in unequal],
            "contract": [_contract(item) for item in contracts],
        })  # fmt: skip
        return
    _print_progress(report, clients)
    if of_proxies:
        print_proxy_clients(of_proxies, f"Members of {name} by {', '.join(proxies)}")
    _print_filters(
        [
            (broker, topic)
            for broker, topic in filters
            if not is_retry_topic(topic.topic)
            and (topic.expression != "*" or topic.filtered or topic.errors)
        ]
    )
    for contract in contracts:
        _print_contract(contract)
    for finding in unequal:
        click.echo(f"{finding.what} {finding.fix}")


def _print_progress(report: GroupReport, clients: list[ConsumerClient]) -> None:
    known = {one.client_id: one for one in clients}
    members = [
        {
            "member": member.client_id,
            "language": one.language if (one := known.get(member.client_id)) else "",
            "version": version_name(one.version) if one else "",
            "queues": ", ".join("/".join(map(str, queue)) for queue in member.queues),
            "idle_because": member.idle_because,
        }
        for member in report.members
    ]
    columns = "member language version queues idle_because=idle_because"
    print_records(members, columns=columns, title=f"Members of {report.name}")
    owners = {queue: member.client_id for member in report.members for queue in member.queues}
    queues = [
        _progress(item) | {"member": owners.get(item.queue, "")}
        for item in report.progress
        if not is_retry_topic(item.queue.topic) or item.lag
    ]
    columns = (
        "topic broker queue=queue_id committed end=offset_max lag in_flight=in_flight "
        "last_consumed=last_time_ms:time member"
    )
    print_records(queues, columns=columns, title=f"Progress of {report.name}")
    idle = sum(bool(member.idle_because) for member in report.members)
    click.echo(
        "".join(f"{note}\n" for note in report.notes)
        + f"{len(report.members)} members ({idle} idle), {report.lag:,} messages behind. "
        "With a filter, messages that it drops count until they are passed: see `matching`."
    )


def _filter_record(broker: str, topic: GroupMatching) -> Record:
    counts = [queue.matching for queue in topic.queues]
    return {
        **_filter(topic),
        "broker": broker,
        "matching": None if None in counts else sum(count or 0 for count in counts),
        "errors": topic.errors,
        "last_errors": [_failure(one) for one in topic.failures],
    }


def _print_filters(filters: list[tuple[str, GroupMatching]]) -> None:
    """What each filter has done since its broker started, and its last errors."""
    records = [
        _filter_record(broker, topic)
        | {"filter": topic.expression or "not known", "errors": sum(topic.errors.values())}
        for broker, topic in filters
    ]
    columns = "topic broker filter matched filtered_out=filtered errors matching"
    print_records(records, columns=columns, title="Filters")
    for _, topic in filters:
        for reason, count in sorted(topic.errors.items(), key=lambda item: -item[1]):
            click.echo(f"{topic.topic}: {count:,} messages were dropped: {reason}.")
        for failure in topic.failures[-3:]:
            place = f"queue {failure.queue_id} offset {failure.offset}"
            click.echo(f"    {topic.topic} {place}: {failure.text}")


def _print_contract(found: GroupContract) -> None:
    """The lanes and the refused, where there are any."""
    records = [
        {
            "lane": lane["lane"],
            "subscription": "; ".join(
                f"{t}: {text}" for t, (_, text) in lane["subscriptions"].items()
            ),
            "members": ", ".join(lane["clientIds"])
            or ("none, not waited for" if lane["isIdle"] else "none"),
            "not_read": sum(queue["maxOffset"] - queue["offset"] for queue in lane["queues"]),
            "left": lane["leftTimestamp"] or 0,
        }
        for lane in found.lanes
    ]
    if records:
        columns = "lane subscription members not_read=not_read left:time"
        title = f"Lanes on {found.broker} (the oldest first)"
        print_records(records, columns=columns, title=title)
        is_default = found.contract == CONTRACTS[0]
        click.echo(
            f"The contract is {found.contract}: members subscribe to different things, and each "
            "message goes to the oldest lane that wants it."
            + " If that is not intended, set it to strict." * is_default
            + f" {found.unmatched:,} messages are wanted by none." * bool(found.unmatched)
        )
    for topic, (kind, expression) in found.pops.items():
        click.echo(f"Pops {topic} on {found.broker} by {kind} {expression}.")
    for client_id, why in found.refused.items():
        click.echo(f"{client_id} is refused: {why}")
    for one in found.forgotten:
        click.echo(
            f"{show_time(one['timestamp'])} {found.broker} forgot the subscription "
            f"{one['subscription']}, because {one['why']}. It had not looked at "
            f"{one['messagesMax']:,} messages."
        )


# ------------------------------------------------------------------------------------ lag


@group.command("lag")
@click.argument("name", required=False)
@click.option(
    "--at-risk", "only_risks", is_flag=True,
    help="Only queues whose unread messages will be deleted next; exit code 1 when there are any.",
)  # fmt: skip
@click.option("-a", "--all", "show_all", is_flag=True, help="The groups of the system too.")
@admin_options
def lag(admin: Admin, name: str | None, only_risks: bool, show_all: bool, as_json: bool) -> None:
    """Count unread messages of group NAME (or of all) in each queue, and which are deleted when."""
    found = [
        item
        for item in admin.lag(name)
        if (name or show_all or not is_system_group(item.group))
        and (item.messages_at_risk or not only_risks)
    ]
    if as_json:
        for item in found:
            print_json(_lag(item) | {"lanes": item.lanes})
    else:
        _print_lag(found)
    if only_risks and found:
        raise SystemExit(1)


def _print_lag(found: list[QueueLag]) -> None:
    queues = [
        _lag(item)
        for item in found
        if not is_retry_topic(item.queue.topic) or item.lag or item.lost or item.beyond_end
    ]
    columns = (
        "group topic broker queue=queue_id committed first=offset_min end=offset_max lag "
        "in_flight=in_flight matching "
        "done_in=eta_ms:span lost at_risk=at_risk deleted_from=loss_time_ms:time"
    )
    print_records(queues, columns=columns)
    lanes = [  # of groups whose members want different things: each lane by its own offset
        _lag(item) | asdict(lane)
        for item in found
        for lane in item.lanes
        if lane.matching or not is_retry_topic(item.queue.topic)
    ]
    columns = "group topic broker queue=queue_id lane wants=expression committed matching"
    print_records(
        lanes, columns=columns, title="Lanes: a message counts in the one that will get it"
    )
    for item in found:
        if item.beyond_end:
            click.echo(
                f"The committed offset {item.committed} of {item.group} is beyond the end "
                f"{item.offset_max} of {item.queue.topic} queue {item.queue.queue_id} on "
                f"{item.queue.broker}: the topic was deleted and created again, or the broker "
                f"lost messages. See sluice explain group {item.group}."
            )
    at_risk = sum(item.messages_at_risk for item in found)
    in_flight = sum(item.in_flight for item in found)
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
        f"{sum(item.lag for item in found):,} messages behind"
        + f", {in_flight:,} of them popped and not acknowledged" * bool(in_flight)
        + "; "
        + (f"{at_risk:,} of them are deleted from {show_time(min(times))} on." if times
           else "none of them is about to be deleted.")
    )  # fmt: skip


# ------------------------------------------------------------------ reset, skip and clone

_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would change and change nothing."
)
_topic_option = click.option("-t", "--topic", required=True, help="The topic.")


@group.command("reset")
@click.argument("name", metavar="GROUP")
@_topic_option
@click.option(
    "--to", required=True,
    help="earliest, latest, or the time of the first message to get: milliseconds since 1970 or "
    "2013-01-01T00:00.",
)  # fmt: skip
@_dry_run_option
@admin_options
def reset(admin: Admin, name: str, topic: str, to: str, dry_run: bool, as_json: bool) -> None:
    """Send GROUP to another place of a topic: back to consume again, or ahead.

    Works while its consumers run: they go on at the new place, and what they had fetched before is
    neither handled nor committed any more (a handler that runs ends, without effect on offsets).
    """
    words = {"earliest": EARLIEST_MS, "latest": LATEST_MS}
    time_ms = words[to] if to in words else parse_time(to, "--to")
    make = admin.plan_reset if dry_run else _changing(name, admin.reset_offsets)
    _print_changes(name, make(name, topic, time_ms), as_json=as_json, dry_run=dry_run)


@group.command("skip")
@click.argument("name", metavar="GROUP")
@_topic_option
@_dry_run_option
@admin_options
def skip(admin: Admin, name: str, topic: str, dry_run: bool, as_json: bool) -> None:
    """Let GROUP skip what it has not read of a topic: the same as `reset --to latest`."""
    make = admin.plan_reset if dry_run else _changing(name, admin.reset_offsets)
    _print_changes(name, make(name, topic, LATEST_MS), as_json=as_json, dry_run=dry_run)


@group.command("clone")
@click.argument("source")
@click.argument("target")
@click.option("-t", "--topic", help="Only this topic; without it all that SOURCE has offsets of.")
@_dry_run_option
@admin_options
def clone(
    admin: Admin, source: str, target: str, topic: str | None, dry_run: bool, as_json: bool
) -> None:
    """Give group TARGET the offsets of group SOURCE: it goes on where SOURCE stands."""
    make = admin.plan_clone if dry_run else _changing(target, admin.clone_offsets)
    _print_changes(target, make(source, target, topic), as_json=as_json, dry_run=dry_run)


def _changing(name: str, change: T) -> T:
    undecided(f"sluice group show {name}")
    return change


def _print_changes(name: str, changes: list[OffsetChange], *, as_json: bool, dry_run: bool) -> None:
    records = [{"group": name, **_change(change), "dry_run": dry_run} for change in changes]
    columns = "topic broker queue=queue_id from to come_again=come_again skipped end=offset_max"
    print_records(records, as_json=as_json, columns=columns)
    if not as_json:
        verb = "would go on" if dry_run else "goes on"
        again, skipped = sum(c.again for c in changes), sum(c.skipped for c in changes)
        click.echo(
            f"{name} {verb} there: {again:,} messages come again, {skipped:,} are skipped."
            + " Nothing is changed." * dry_run
        )


# ------------------------------------------------------------------------------- consumer


@click.group()
def consumer() -> None:
    """Show what the consumers of a group do now."""


@consumer.command("list")
@click.argument("name", metavar="GROUP")
@admin_options
def list_consumers(admin: Admin, name: str, as_json: bool) -> None:
    """List the members of GROUP that are online: id, address, language, version."""
    records = [
        {
            **_client(client),
            "version": client.version,
            "kind": "push" if client.consume_type == "CONSUME_PASSIVELY" else "pull",
            "model": client.message_model.lower(),
        }
        for client in admin.consumers(name)
    ]
    columns = "client=client_id address language version:version kind model"
    empty = f"No consumer of {name} is online."
    print_records(records, as_json=as_json, columns=columns, empty=empty)


_client_argument = click.argument("client_id", metavar="[CLIENT]", required=False)


@consumer.command("status")
@click.argument("name", metavar="GROUP")
@_client_argument
@admin_options
def status(admin: Admin, name: str, client_id: str | None, as_json: bool) -> None:
    """Show what CLIENT of GROUP (or each member) reads, holds, handles, and how fast."""
    for client, info in _running(admin, name, client_id, stack=False):
        queues = [queue._asdict() | _held(state) for queue, state in sorted(info.queues.items())]
        if as_json:
            print_json({
                **_client(client),
                "properties": info.properties,
                "subscriptions": {item.topic: item.expression for item in info.subscriptions},
                "queues": queues,
                "topics": {topic: _rates(rates) for topic, rates in sorted(info.rates.items())},
                "notes": info.notes,
            })  # fmt: skip
            continue
        since = show_time(int(info.properties.get("PROP_CONSUMER_START_TIMESTAMP", "0") or 0))
        click.echo(f"--- {client.client_id} ({client.language}, {client.address}), since {since}")
        for item in sorted(info.subscriptions, key=lambda item: item.topic):
            click.echo(f"subscribed: {item.topic} {item.kind} {item.expression}")
        columns = (
            "topic broker queue=queue_id committed held locked last_pull=last_pull_ms:time "
            "last_consumed=last_consume_ms:time"
        )
        print_records(queues, columns=columns)
        for topic, rates in sorted(info.rates.items()):
            click.echo(
                f"{topic}: {rates.done_per_second:.1f} done/s, {rates.failed_per_second:.1f} "
                f"failed/s, {rates.consume_ms:.1f} ms each, {rates.failures} failures in the last "
                "hour"
            )
        _print_notes(info)


@consumer.command("stack")
@click.argument("name", metavar="GROUP")
@_client_argument
@admin_options
def stack(admin: Admin, name: str, client_id: str | None, as_json: bool) -> None:
    """Print the stacks of all threads and tasks of CLIENT of GROUP (or of each member)."""
    for client, info in _running(admin, name, client_id, stack=True):
        if as_json:
            print_json({"client_id": client.client_id, "group": name, "stack": info.stack})
        else:
            click.echo(f"--- {client.client_id} ({client.language}, {client.address})")
            _print_notes(info)
            click.echo(info.stack or "It has sent no stack.")


def _running(
    admin: Admin, name: str, client_id: str | None, *, stack: bool
) -> list[tuple[ConsumerClient, RunningInfo]]:
    clients = admin.consumers(name)
    online = ", ".join(client.client_id for client in clients)
    if client_id is not None:
        clients = [client for client in clients if client.client_id == client_id]
    if not clients:
        who = f"no consumer {client_id!r}" if client_id else "no consumer"
        raise ConfigurationError(
            f"{who} of the group {name!r} is online.",
            fix=f"Online: {online}." if online else "See sluice group show.",
        )
    return [(one, admin.running_info(name, one.client_id, stack=stack)) for one in clients]


def _print_notes(info: RunningInfo) -> None:
    for note, text in sorted(info.notes.items()):
        click.echo(f"{note}: {text}")
