"""`sluice topic list|create|show|delete`."""

import click

from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_records,
    show_permission,
    show_time,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.model.topic import DLQ_PREFIX, MESSAGE_TYPES, RETRY_PREFIX

SYSTEM_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX, "rmq_sys_", "RMQ_SYS_")
SYSTEM_TOPICS = frozenset({
    "TBW102", "SCHEDULE_TOPIC_XXXX", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "BenchmarkTest",
    "CHECKPOINT_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC",
})  # fmt: skip


@click.group()
def command() -> None:
    """List, create, show and delete topics."""


@command.command("list")
@click.option(
    "-a", "--all", "show_all", is_flag=True, help="System, retry and dead-letter topics too."
)
@client_options
@json_option
def list_topics(
    show_all: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """The topics of the cluster, with their queues."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        info = admin.cluster_info()
        own = SYSTEM_TOPICS | set(info.brokers) | set(info.clusters)
        records = []
        for name in admin.topics():
            is_system = name.startswith(SYSTEM_PREFIXES) or name in own
            if (is_system or name.endswith("_REPLY_TOPIC")) and not show_all:
                continue
            route = admin.find_route(name)
            queues = route.queues if route else ()
            records.append(
                {
                    "topic": name,
                    "brokers": len(queues),
                    "read_queues": sum(data.read_queues for data in queues),
                    "write_queues": sum(data.write_queues for data in queues),
                    "permission": show_permission(queues[0].perm) if queues else "",
                }
            )
    print_records("", records, as_json=as_json, empty="No topics (--all shows system topics).")


def _attributes(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    found = dict(text.partition("=")[::2] for text in texts)
    if not all(found.values()) or len(found) < len(texts):
        raise click.BadParameter("write KEY=VALUE, each KEY once.")
    return found


@command.command("create")
@click.argument("name")
@click.option("-q", "--queues", type=int, default=8, show_default=True, help="Queues a broker.")
@click.option(
    "--perm",
    type=click.Choice(["2", "4", "6"]),
    default="6",
    show_default=True,
    help="2 write, 4 read, 6 both.",
)
@click.option("-c", "--cluster", help="Only the brokers of that cluster.")
@click.option(
    "-o/-O",
    "--order/--no-order",
    default=None,
    help="Strict order: the number of queues stays while a broker is away.",
)
@click.option(
    "--type",
    "message_type",
    type=click.Choice([one.lower() for one in MESSAGE_TYPES], case_sensitive=False),
    help="Which messages it is for (message.type); RocketMQ's proxy holds senders to it.",
)
@click.option(
    "--attribute",
    "attributes",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_attributes,
    help="Another attribute of RocketMQ's; again for each.",
)
@client_options
@json_option
def create(
    name: str,
    queues: int,
    perm: str,
    cluster: str | None,
    order: bool | None,
    message_type: str | None,
    attributes: dict[str, str],
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Create or change topic NAME on every broker."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        brokers = admin.create_topic(
            name, queues=queues, perm=int(perm), cluster=cluster, order=order, type=message_type,
            attributes=attributes,
        )  # fmt: skip
        route = admin.find_route(name) if order else None
    if as_json:
        print_json({"topic": name, "queues": queues, "brokers": brokers})
    else:
        click.echo(f"Topic {name} has {queues} queues on {', '.join(brokers)}.")
    if route is not None and not route.order_topic_config:
        click.echo(
            "The name server keeps the order table but does not hand it out, so the order is not "
            "strict yet: set orderMessageEnable=true in namesrv.conf.",
            err=True,
        )


@command.command("show")
@click.argument("name")
@client_options
@json_option
def show(
    name: str, name_servers: str, access_key: str | None, secret_key: str | None, as_json: bool
) -> None:
    """Queues of topic NAME with their offsets, and the groups that read it."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        offsets = admin.topic_offsets(name)
        groups = admin.groups_of_topic(name)
    records = [
        {
            "broker": queue.broker,
            "queue_id": queue.queue_id,
            "offset_min": stats.offset_min,
            "offset_max": stats.offset_max,
            "messages": stats.offset_max - stats.offset_min,
            "last_message": stats.last_time_ms if as_json else show_time(stats.last_time_ms),
        }
        for queue, stats in offsets.items()
    ]
    if as_json:
        print_json({"topic": name, "groups": groups, "queues": records})
        return
    print_records(name, records, as_json=False, empty="No queues.")
    total = sum(stats.offset_max - stats.offset_min for stats in offsets.values())
    click.echo(f"{total:,} messages. Groups: {', '.join(groups) or 'none'}.")


@command.command("delete")
@click.argument("name")
@click.option("-c", "--cluster", help="Only in that cluster.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@client_options
@json_option
def delete(
    name: str,
    cluster: str | None,
    yes: bool,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Delete topic NAME with all its messages."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        admin.route(name)
        if not yes:
            click.confirm(f"Delete {name} with all its messages?", abort=True, err=True)
        admin.delete_topic(name, cluster=cluster)
    if as_json:
        print_json({"topic": name, "deleted": True})
    else:
        click.echo(f"Topic {name} is deleted.")
