"""`sluice group` and `sluice consumer`: consumer groups, their offsets, and their running members.

`group reset`, `skip` and `clone` change committed offsets, also while the group consumes. Each of
them prints for every queue the old and the new offset, and how many messages are delivered again
or skipped. With `--dry-run` they only print that.

`consumer status` and `stack` ask a broker, which sends GET_CONSUMER_RUNNING_INFO (307) to the
consumer. A Python consumer of SluiceMQ answers from its heartbeat thread, so the commands also
work while a handler blocks the event loop, which is when the stack is of most interest.
"""

from operator import attrgetter
from typing import Any

import click

from sluicemq.cli.ending import EXIT_FINDINGS, note_pending_change
from sluicemq.cli.group.lag_tables import make_lag_record, print_lag, print_lag_totals
from sluicemq.cli.output import (
    admin_options,
    confirm,
    format_time,
    parse_position_or_time,
    print_json,
    print_records,
    print_result,
    record_builder,
    yes_option,
)
from sluicemq.cli.servers.proxy_status import fetch_clients_of_group, print_proxy_clients
from sluicemq.client.admin.diagnose.findings import Code
from sluicemq.client.admin.diagnose.records import explain_record
from sluicemq.client.admin.group_offsets import OffsetChange
from sluicemq.client.admin.group_report import GroupReport
from sluicemq.client.admin.groups import ConsumerClient, GroupContract
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.model.positions import Position
from sluicemq.model.system_names import is_retry_topic, is_system_group
from sluicemq.model.topic import CONTRACTS, DLQ_PREFIX, RETRY_PREFIX, GroupConfig
from sluicemq.wire.bodies import GroupMatching, RunningInfo
from sluicemq.wire.codes import version_name

Record = dict[str, Any]
FAILURES_SHOWN = 3
"""The number of failed evaluations of a filter that `group show` prints, the newest ones."""
_QUEUE_KEYS = "topic=queue.topic broker=queue.broker queue_id=queue.queue_id "
_progress_record = record_builder(f"{_QUEUE_KEYS} committed offset_max lag in_flight last_time_ms")
_change_record = record_builder(
    f"{_QUEUE_KEYS} from=old to=new come_again=again skipped offset_max"
)
_filter_base_record = record_builder("topic kind expression matched filtered")
_failure_record = record_builder("queue_id offset text")
_contract_record = record_builder("broker contract lanes refused unmatched forgotten pops")
_client_record = record_builder("client_id address language")
_queue_state_record = record_builder(
    "committed=commit_offset held=cached_count held_from=cached_min held_to=cached_max locked "
    "last_pull_ms last_consume_ms"
)
_rates_record = record_builder(
    "done_per_second failed_per_second failures_last_hour=failures consume_ms"
)


_all_option = click.option("-a", "--all", "show_all", is_flag=True, help="Also list system groups.")


@click.group()
def group() -> None:
    """Manage consumer groups: list, show, create, change and delete them, and set their offsets."""


@group.command("list")
@_all_option
@admin_options
def list_groups(admin: Admin, show_all: bool, as_json: bool) -> None:
    """List the consumer groups of all brokers with their members and lag."""
    records = []
    for name, config in admin.groups().items():
        if is_system_group(name) and not show_all:
            continue
        records.append(
            {
                "group": name,
                "members": len(admin.members(name)),
                "lag": sum(queue.lag for queue in admin.progress(name)),
                "may_consume": config.consume_enable,
                "retries_max": config.retry_times_max,
            }
        )
    print_records(records, as_json=as_json, empty="No consumer groups.")


@group.command("create")
@click.argument("name")
@click.option(
    "--retries",
    type=int,
    default=16,
    show_default=True,
    help="Maximum number of retries of a message, before it becomes a dead letter.",
)
@admin_options
def create(admin: Admin, name: str, retries: int, as_json: bool) -> None:
    """Create consumer group NAME on every broker, or change it if it exists."""
    note_pending_change(f"sluice group show {name}")
    brokers = admin.create_group(GroupConfig(name, retry_times_max=retries))
    sentence = f"Group {name} exists on {', '.join(brokers)}."
    print_result({"group": name, "brokers": brokers}, sentence, as_json=as_json)


@group.command("update")
@click.argument("name")
@click.option(
    "--contract",
    type=click.Choice(CONTRACTS),
    required=True,
    help="Whether members may have different subscriptions. strict: no; lanes: yes, each "
    "subscription has its own lane; compatible: the same, with a warning.",
)
@admin_options
def update(admin: Admin, name: str, contract: str, as_json: bool) -> None:
    """Change the contract of group NAME on every broker."""
    brokers = admin.change_contract(name, contract)
    record = {"group": name, "contract": contract, "brokers": brokers}
    sentence = f"Group {name} has the contract {contract} on {', '.join(brokers)}."
    print_result(record, sentence, as_json=as_json)


@group.command("delete")
@click.argument("name")
@click.option("-c", "--cluster", help="Delete it in this cluster only. Default: in all clusters.")
@click.option(
    "--offsets",
    is_flag=True,
    help="Also delete the committed offsets. Otherwise, a new group of this name continues from "
    "them.",
)
@click.option(
    "--topics",
    is_flag=True,
    help="Also delete the retry and dead-letter topics with all their messages.",
)
@yes_option
@admin_options
def delete(
    admin: Admin,
    name: str,
    cluster: str | None,
    offsets: bool,
    topics: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the settings of consumer group NAME on every broker.

    If brokers create groups automatically (autoCreateSubscriptionGroup), members that are online
    create the group again.
    """
    what_to_delete = "its settings"
    if offsets:
        what_to_delete += " and offsets"
    if topics:
        what_to_delete += " and topics"
    _confirm_deletion(admin, name, what_to_delete, yes=yes)

    note_pending_change("sluice group list")
    masters = admin.masters(cluster)
    for address in masters.values():
        admin.delete_group(address, name, clean_offset=offsets)
    if topics:
        _delete_topics_of_group(admin, name, cluster)
    print_result(
        {"group": name, "deleted": True, "brokers": list(masters)},
        f"Group {name} is deleted on {', '.join(masters)}: {what_to_delete}.",
        as_json=as_json,
    )


def _confirm_deletion(admin: Admin, name: str, what_to_delete: str, *, yes: bool) -> None:
    """Ask whether to delete the group, and say how many members use it. With `yes`, do not ask."""
    question = f"Delete {name}"
    if member_count := len(admin.group(name).members):
        question += f", currently used by {member_count} members"
    confirm(f"{question}: {what_to_delete}?", yes=yes)


def _delete_topics_of_group(admin: Admin, name: str, cluster: str | None) -> None:
    """Delete the retry topic and the dead-letter topic of a group, if they exist."""
    topics_of_group = {RETRY_PREFIX + name, DLQ_PREFIX + name}
    for topic in topics_of_group & set(admin.topics()):
        admin.delete_topic(topic, cluster=cluster)


# ----------------------------------------------------------------------------------- show


@group.command("show")
@click.argument("name")
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    help="Also show the members that are connected to the proxy at host:port. Repeat for more "
    "proxies.",
)
@admin_options
def show(admin: Admin, name: str, proxies: tuple[str, ...], as_json: bool) -> None:
    """Show the members of group NAME with their queues, and the lag of each queue.

    Also show why members are idle, what filters have matched and dropped, and the lanes of members
    with different subscriptions.
    """
    report = admin.group(name)
    contracts = admin.contract(name)
    clients = admin.consumers(name) if report.members else []
    proxy_clients = fetch_clients_of_group(name, proxies, admin.credentials)
    filters = _fetch_filters(admin, name)
    unequal_findings = [
        finding for finding in admin.explain_group(name).findings if finding.code is Code.UNEQUAL
    ]
    if as_json:
        client_records = [
            _client_record(client) | {"version": client.version} for client in clients
        ]
        print_json(
            {
                "group": name,
                "lag": report.lag,
                "members": report.members,
                "clients": client_records,
                "proxy_clients": proxy_clients,
                "queues": list(map(_progress_record, report.progress)),
                "notes": report.notes,
                "filters": [_make_filter_record(broker, counts) for broker, counts in filters],
                "findings": list(map(explain_record, unequal_findings)),
                "contract": list(map(_contract_record, contracts)),
            }
        )
        return

    _print_members(report, clients)
    _print_progress(report)
    if proxy_clients:
        print_proxy_clients(proxy_clients, f"Members of {name} at {', '.join(proxies)}")
    _print_filters([(broker, counts) for broker, counts in filters if _is_filter_shown(counts)])
    for contract in contracts:
        _print_contract(contract)
    for finding in unequal_findings:
        click.echo(f"{finding.what} {finding.fix}")


def _fetch_filters(admin: Admin, name: str) -> list[tuple[str, GroupMatching]]:
    """Return (broker name, what the broker counts for the filter of one topic) pairs of a group."""
    return [
        (broker_counts.broker, topic_counts)
        for broker_counts in admin.matching(name)
        for topic_counts in broker_counts.topics
    ]


def _is_filter_shown(topic_counts: GroupMatching) -> bool:
    """Return whether `group show` prints the counts of a filter.

    The filter `*` matches everything, and is shown only if messages were dropped all the same.
    """
    if is_retry_topic(topic_counts.topic):
        return False
    is_selective = topic_counts.expression != "*"
    return is_selective or bool(topic_counts.filtered) or bool(topic_counts.errors)


def _print_members(report: GroupReport, clients: list[ConsumerClient]) -> None:
    """Print a table of the members of a group. `clients` are the members that are connected."""
    clients_by_id = {client.client_id: client for client in clients}
    member_records = []
    for member in report.members:
        client = clients_by_id.get(member.client_id)
        member_records.append(
            {
                "member": member.client_id,
                "language": client.language if client else "",
                "version": version_name(client.version) if client else "",
                "queues": ", ".join("/".join(map(str, queue)) for queue in member.queues),
                "idle_because": member.idle_because,
            }
        )
    columns = "member language version queues idle_because=idle_because"
    print_records(member_records, columns=columns, title=f"Members of {report.name}")


def _print_progress(report: GroupReport) -> None:
    """Print a table of a group's queues, the notes of its report, and the sums.

    Queues of the retry topic without a lag are left out.
    """
    owner_by_queue = {
        queue: member.client_id for member in report.members for queue in member.queues
    }
    queue_records = []
    for progress in report.progress:
        is_idle_retry_queue = is_retry_topic(progress.queue.topic) and not progress.lag
        if not is_idle_retry_queue:
            owner = owner_by_queue.get(progress.queue, "")
            queue_records.append(_progress_record(progress) | {"member": owner})
    columns = (
        "topic broker queue=queue_id committed end=offset_max lag in_flight=in_flight "
        "last_consumed=last_time_ms:time member"
    )
    print_records(queue_records, columns=columns, title=f"Progress of {report.name}")

    idle_count = sum(bool(member.idle_because) for member in report.members)
    for note in report.notes:
        click.echo(note)
    click.echo(
        f"{len(report.members)} members ({idle_count} idle). The lag is {report.lag:,} messages. "
        "It includes messages that a filter will drop; the column `matching` does not."
    )


def _make_filter_record(broker: str, topic_counts: GroupMatching) -> Record:
    """Return the counters of a group's filter on one broker, as a dictionary for `--json`.

    `matching` is the number of unread messages that match, None if the broker does not know it for
    one of the queues.
    """
    known_counts = [queue.matching for queue in topic_counts.queues if queue.matching is not None]
    is_known_for_all = len(known_counts) == len(topic_counts.queues)
    return {
        **_filter_base_record(topic_counts),
        "broker": broker,
        "matching": sum(known_counts) if is_known_for_all else None,
        "errors": topic_counts.errors,
        "last_errors": [_failure_record(failure) for failure in topic_counts.failures],
    }


def _print_filters(filters: list[tuple[str, GroupMatching]]) -> None:
    """Print what each filter has matched and dropped since its broker started, and its last errors.

    Each item of `filters` is (name of a broker, what that broker counts for one topic of the
    group).
    """
    records = []
    for broker, counts in filters:
        record = _make_filter_record(broker, counts)
        record["filter"] = counts.expression or "not known"
        record["errors"] = sum(counts.errors.values())
        records.append(record)
    columns = "topic broker filter matched filtered_out=filtered errors matching"
    print_records(records, columns=columns, title="Filters")
    for _, counts in filters:
        _print_filter_errors(counts)


def _print_filter_errors(counts: GroupMatching) -> None:
    """Print on how many messages a filter failed for each reason, and its last errors."""
    reasons = sorted(counts.errors, key=lambda reason: -counts.errors[reason])
    for reason in reasons:
        failed_count = counts.errors[reason]
        click.echo(f"{counts.topic}: the filter failed on {failed_count:,} messages: {reason}.")
    for failure in counts.failures[-FAILURES_SHOWN:]:
        location = f"queue {failure.queue_id} offset {failure.offset}"
        click.echo(f"    {counts.topic} {location}: {failure.text}")


def _print_contract(contract: GroupContract) -> None:
    """Print what one broker does for members of a group that have different subscriptions.

    The parts are the lanes, the subscriptions with which the group pops, the refused clients with
    the reasons, and the forgotten subscriptions. A part without content is left out.
    """
    if contract.lanes:
        _print_lanes(contract)
    for topic, (kind, expression) in contract.pops.items():
        click.echo(f"Pops {topic} on {contract.broker} by {kind} {expression}.")
    for client_id, reason in contract.refused.items():
        click.echo(f"{client_id} is refused: {reason}")
    for lane in contract.forgotten:
        click.echo(
            f"{format_time(lane['timestamp'])} {contract.broker} forgot the subscription "
            f"{lane['subscription']}, because {lane['why']}. Its filter had not been applied to "
            f"{lane['messagesMax']:,} messages."
        )


def _print_lanes(contract: GroupContract) -> None:
    """Print a table of the lanes of a group on one broker, and a line about the contract.

    Members with the same subscription form a lane, with committed offsets of its own. The table
    shows for each lane, oldest first, the subscription, the members and the unread messages.
    """
    columns = "lane subscription members not_read=not_read left:time"
    title = f"Lanes on {contract.broker} (the oldest first)"
    print_records(
        [_make_lane_record(lane) for lane in contract.lanes], columns=columns, title=title
    )

    sentences = [
        f"The contract is {contract.contract}: the members have different subscriptions, and "
        "each message goes to the oldest lane whose filter matches it."
    ]
    if contract.contract == CONTRACTS[0]:  # the default
        sentences.append("If that is not intended, set the contract to strict.")
    if contract.unmatched:
        sentences.append(f"{contract.unmatched:,} messages match no lane.")
    click.echo(" ".join(sentences))


def _make_lane_record(lane: Record) -> Record:
    """Return the row of a lane in the table of `group show`; `lane` is the broker's description.

    `not_read` is the number of messages that the lane has not read, and `left` is when its last
    member left the group, in milliseconds since 1970, or 0.
    """
    members = ", ".join(lane["clientIds"])
    if not members:
        members = "none (idle)" if lane["isIdle"] else "none"
    subscription = "; ".join(
        f"{topic}: {expression}" for topic, (_, expression) in lane["subscriptions"].items()
    )
    unread_count = sum(queue["maxOffset"] - queue["offset"] for queue in lane["queues"])
    return {
        "lane": lane["lane"],
        "subscription": subscription,
        "members": members,
        "not_read": unread_count,
        "left": lane["leftTimestamp"] or 0,
    }


# ------------------------------------------------------------------------------------ lag


@group.command("lag")
@click.argument("name", required=False)
@click.option(
    "--at-risk",
    "only_risks",
    is_flag=True,
    help="Show only queues with unconsumed messages that retention will delete next. Exit code 1 "
    "if there are any.",
)
@_all_option
@admin_options
def lag(admin: Admin, name: str | None, only_risks: bool, show_all: bool, as_json: bool) -> None:
    """Show the lag of group NAME, or of all groups, in each queue.

    Also show how many messages match the group's filter, how many were deleted before the group
    consumed them, and when the next ones will be deleted.
    """
    lags = admin.lag(name)
    if not name and not show_all:
        lags = [queue_lag for queue_lag in lags if not is_system_group(queue_lag.group)]
    shown_lags = lags
    if only_risks:
        shown_lags = [queue_lag for queue_lag in lags if queue_lag.messages_at_risk]

    if as_json:
        for queue_lag in shown_lags:
            print_json(make_lag_record(queue_lag) | {"lanes": queue_lag.lanes})
    else:
        print_lag(shown_lags)
        print_lag_totals(lags)
    if only_risks and shown_lags:
        raise SystemExit(EXIT_FINDINGS)


# ------------------------------------------------------------------ reset, skip and clone

_dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Show what would change, and change nothing."
)
_topic_option = click.option(
    "-t", "--topic", required=True, help="Topic in which the committed offsets change."
)


@group.command("reset")
@click.argument("name", metavar="GROUP")
@_topic_option
@click.option(
    "--to",
    required=True,
    help="Where the group continues: first, last, or at the first message stored at or after "
    "a time: 1h for an hour ago, 2013-01-01T00:00 (local time; a zone such as Z may follow), or "
    "a Unix timestamp in milliseconds.",
)
@_dry_run_option
@admin_options
def reset(admin: Admin, name: str, topic: str, to: str, dry_run: bool, as_json: bool) -> None:
    """Set the committed offsets of GROUP in a topic, back or forward.

    This also works while its consumers run. They continue at the new offsets, and neither process
    nor commit the messages that they have fetched before. A handler that is running finishes, but
    its message is not committed.
    """
    position = parse_position_or_time(to, "--to")
    _reset(admin, name, topic, position, dry_run=dry_run, as_json=as_json)


@group.command("skip")
@click.argument("name", metavar="GROUP")
@_topic_option
@_dry_run_option
@admin_options
def skip(admin: Admin, name: str, topic: str, dry_run: bool, as_json: bool) -> None:
    """Skip all messages of a topic that GROUP has not consumed, as `reset --to last` does."""
    _reset(admin, name, topic, "last", dry_run=dry_run, as_json=as_json)


def _reset(
    admin: Admin, name: str, topic: str, position: Position | int, *, dry_run: bool, as_json: bool
) -> None:
    """Reset the group's offsets to an end of the topic or to a time; print the changes.

    A time is in milliseconds since 1970. With `dry_run`, nothing is changed.
    """
    if dry_run:
        changes = admin.plan_reset(name, topic, position)
    else:
        note_pending_change(f"sluice group show {name}")
        changes = admin.reset_offsets(name, topic, position)
    _print_changes(name, changes, dry_run=dry_run, as_json=as_json)


@group.command("clone")
@click.argument("source")
@click.argument("target")
@click.option(
    "-t", "--topic", help="Copy the offsets of this topic only. Default: all topics of SOURCE."
)
@_dry_run_option
@admin_options
def clone(
    admin: Admin, source: str, target: str, topic: str | None, dry_run: bool, as_json: bool
) -> None:
    """Copy the committed offsets of group SOURCE to group TARGET, which continues from there."""
    if dry_run:
        changes = admin.plan_clone(source, target, topic)
    else:
        note_pending_change(f"sluice group show {target}")
        changes = admin.clone_offsets(source, target, topic)
    _print_changes(target, changes, dry_run=dry_run, as_json=as_json)


def _print_changes(name: str, changes: list[OffsetChange], *, dry_run: bool, as_json: bool) -> None:
    """Print the old and new offset of each queue, and how many messages are repeated or skipped.

    `name` is the group. With `dry_run`, the text says that nothing was changed.
    """
    records = [{"group": name, **_change_record(change), "dry_run": dry_run} for change in changes]
    columns = "topic broker queue=queue_id from to come_again=come_again skipped end=offset_max"
    print_records(records, as_json=as_json, columns=columns)
    if as_json:
        return
    verb = "would continue" if dry_run else "continues"
    repeated_count = sum(change.again for change in changes)
    skipped_count = sum(change.skipped for change in changes)
    summary = (
        f"{name} {verb} there. {repeated_count:,} stored messages are read again, "
        f"{skipped_count:,} are skipped."
    )
    if dry_run:
        summary += " Nothing was changed."
    click.echo(summary)


# ------------------------------------------------------------------------------- consumer


@click.group()
def consumer() -> None:
    """Show what the running consumers of a group do now."""


@consumer.command("list")
@click.argument("name", metavar="GROUP")
@admin_options
def list_consumers(admin: Admin, name: str, as_json: bool) -> None:
    """List the online members of GROUP with their address, language, version and model."""
    records = [
        {
            **_client_record(client),
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
    """Show the queues, prefetched messages and rates of CLIENT of GROUP, or of each member."""
    for client, running_info in _request_running_info(admin, name, client_id, stack=False):
        if as_json:
            print_json(_make_consumer_status_record(client, running_info))
        else:
            _print_consumer_status(client, running_info)


def _make_queue_records(running_info: RunningInfo) -> list[Record]:
    """Return the state of each queue that a consumer reads, as dictionaries sorted by queue."""
    return [
        queue._asdict() | _queue_state_record(state)
        for queue, state in sorted(running_info.queues.items())
    ]


def _make_consumer_status_record(client: ConsumerClient, running_info: RunningInfo) -> Record:
    """Return what a consumer reports about itself, as a line of `consumer status --json`."""
    return {
        **_client_record(client),
        "properties": running_info.properties,
        "subscriptions": {
            subscription.topic: subscription.expression
            for subscription in running_info.subscriptions
        },
        "queues": _make_queue_records(running_info),
        "topics": {
            topic: _rates_record(rates) for topic, rates in sorted(running_info.rates.items())
        },
        "notes": running_info.notes,
    }


def _print_consumer_status(client: ConsumerClient, running_info: RunningInfo) -> None:
    """Print the start, the subscriptions, the queues, the rates and the notes of a consumer."""
    start_ms = int(running_info.properties.get("PROP_CONSUMER_START_TIMESTAMP", "0") or 0)
    click.echo(
        f"--- {client.client_id} ({client.language}, {client.address}), "
        f"since {format_time(start_ms)}"
    )
    for subscription in sorted(running_info.subscriptions, key=attrgetter("topic")):
        click.echo(
            f"subscribed: {subscription.topic} {subscription.kind} {subscription.expression}"
        )
    columns = (
        "topic broker queue=queue_id committed held locked last_pull=last_pull_ms:time "
        "last_consumed=last_consume_ms:time"
    )
    print_records(_make_queue_records(running_info), columns=columns)
    for topic, rates in sorted(running_info.rates.items()):
        click.echo(
            f"{topic}: {rates.done_per_second:.1f} processed/s, {rates.failed_per_second:.1f} "
            f"failed/s, {rates.consume_ms:.1f} ms each, {rates.failures} failures in the last "
            "hour"
        )
    _print_notes(running_info)


@consumer.command("stack")
@click.argument("name", metavar="GROUP")
@_client_argument
@admin_options
def stack(admin: Admin, name: str, client_id: str | None, as_json: bool) -> None:
    """Print the stacks of all threads and tasks of CLIENT of GROUP, or of each member."""
    for client, running_info in _request_running_info(admin, name, client_id, stack=True):
        if as_json:
            print_json({"client_id": client.client_id, "group": name, "stack": running_info.stack})
        else:
            click.echo(f"--- {client.client_id} ({client.language}, {client.address})")
            _print_notes(running_info)
            click.echo(running_info.stack or "The client has sent no stack.")


def _request_running_info(
    admin: Admin, name: str, client_id: str | None, *, stack: bool
) -> list[tuple[ConsumerClient, RunningInfo]]:
    """Ask online members of a group for a report; return (client, report) pairs.

    `client_id` selects one member; None means all. With `stack`, a report has the stacks of the
    member's threads and tasks. Raises ConfigurationError if the member is not online, or no member
    is, and the errors of the request.
    """
    online_clients = admin.consumers(name)
    if client_id is None:
        asked_clients = online_clients
    else:
        asked_clients = [client for client in online_clients if client.client_id == client_id]
    if not asked_clients:
        missing = f"No consumer {client_id!r}" if client_id else "No consumer"
        fix = "See sluice group show."
        if online_clients:
            online_ids = ", ".join(client.client_id for client in online_clients)
            fix = f"Choose one of those online: {online_ids}."
        raise ConfigurationError(f"{missing} of group {name!r} is online.", fix=fix)
    return [
        (client, admin.running_info(name, client.client_id, stack=stack))
        for client in asked_clients
    ]


def _print_notes(running_info: RunningInfo) -> None:
    """Print SluiceMQ's own entries in the running information of a consumer, sorted by name."""
    for name, note in sorted(running_info.notes.items()):
        click.echo(f"{name}: {note}")
