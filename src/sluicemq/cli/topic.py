"""`sluice topic`: topics with their queues."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from sluicemq.cli.ending import undecided
from sluicemq.cli.output import (
    admin_options,
    print_json,
    print_records,
    print_result,
    with_options,
)
from sluicemq.client.sync.admin import Admin
from sluicemq.model.system_names import is_group_topic, is_system_topic
from sluicemq.model.topic import (
    MESSAGE_TYPE,
    MESSAGE_TYPES,
    permission_name,
)

F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def topic() -> None:
    """List, create, show and delete topics."""


@topic.command("list")
@click.option(
    "-a", "--all", "show_all", is_flag=True, help="System, retry and dead-letter topics too."
)
@admin_options
def list_topics(admin: Admin, show_all: bool, as_json: bool) -> None:
    """List the topics of the cluster, with their queues."""
    info = admin.cluster_info()
    own_names = {*info.brokers, *info.clusters}
    records = []
    for name in admin.topics():
        if not show_all and (is_group_topic(name) or is_system_topic(name, own_names)):
            continue
        route = admin.find_route(name)
        queues = route.queues if route else ()
        records.append(
            {
                "topic": name,
                "brokers": len(queues),
                "read_queues": sum(data.read_queues for data in queues),
                "write_queues": sum(data.write_queues for data in queues),
                "permission": permission_name(queues[0].perm) if queues else "",
            }
        )
    print_records(records, as_json=as_json, empty="No topics (--all shows system topics).")


def _attributes(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        is_removal = key.startswith("-") and not separator
        key = key.removeprefix("-") if is_removal else key
        if not key or key[0] == "-" or key in found or bool(value) == is_removal:
            raise click.BadParameter("write KEY=VALUE, or -KEY to take it away, each KEY once.")
        found[key] = None if is_removal else value
    return found


def _topic_options(queues: int | None, perm: str | None) -> Callable[[F], F]:
    """What a topic can be, with the defaults where nothing is said."""
    return with_options(
        click.argument("name"),
        click.option(
            "-q", "--queues", type=int, default=queues, show_default=True, help="Queues a broker."
        ),
        click.option(
            "--perm", type=click.Choice(["2", "4", "6"]), default=perm, show_default=True,
            help="2 write, 4 read, 6 both.",
        ),
        click.option("-c", "--cluster", help="Only the brokers of that cluster."),
        click.option(
            "-o/-O", "--order/--no-order", default=None,
            help="Strict order: the number of queues stays while a broker is away.",
        ),
        click.option(
            "--type",
            type=click.Choice([one.lower() for one in MESSAGE_TYPES], case_sensitive=False),
            help="Which messages it is for (message.type); RocketMQ's proxy holds senders to it.",
        ),
        click.option(
            "--attribute", "attributes", metavar="KEY=VALUE|-KEY", multiple=True,
            callback=_attributes,
            help="Another attribute of RocketMQ's; -KEY takes it away; again for each.",
        ),
        click.option(
            "--force", is_flag=True, help="Fewer queues, although those that go hold messages."
        ),
    )  # fmt: skip


@topic.command("create")
@_topic_options(queues=8, perm="6")
@admin_options
def create(admin: Admin, name: str, queues: int, perm: str, as_json: bool, **options: Any) -> None:
    """Create or change topic NAME on every broker."""
    _change(admin, name, queues, as_json, perm=int(perm), **options)


@topic.command("update")
@_topic_options(queues=None, perm=None)
@admin_options
def update(
    admin: Admin, name: str, queues: int | None, perm: str | None, as_json: bool, **options: Any
) -> None:
    """Change topic NAME on every broker; what is not given stays as it is."""
    now = admin.route(name).queues[0]
    options["perm"] = now.perm if perm is None else int(perm)
    options["write_queues"] = queues or now.write_queues
    if options["order"] is None and any(one.order for one in admin.topic_configs(name).values()):
        options["order"] = True
    _change(admin, name, queues or now.read_queues, as_json, **options)


def _change(admin: Admin, name: str, queues: int, as_json: bool, **options: Any) -> None:
    undecided(f"sluice topic show {name}")
    brokers = admin.create_topic(name, queues=queues, **options)
    print_result(
        {"topic": name, "queues": queues, "brokers": brokers},
        f"Topic {name} has {queues} queues on {', '.join(brokers)}.",
        as_json=as_json,
    )
    route = admin.find_route(name) if options["order"] else None
    if route is not None and not route.order_topic_config:
        click.echo(
            "The name server keeps the order table but does not hand it out, so the order is not "
            "strict yet: set orderMessageEnable=true in namesrv.conf.",
            err=True,
        )


@topic.command("show")
@click.argument("name")
@admin_options
def show(admin: Admin, name: str, as_json: bool) -> None:
    """Show queues and offsets of topic NAME, its type and attributes, the groups that read it."""
    groups = admin.groups_of_topic(name)
    brokers: list[dict[str, Any]] = [
        {
            "broker": broker,
            "type": config.attributes.get(MESSAGE_TYPE, "").lower(),
            "attributes": dict(config.attributes),
        }
        for broker, config in admin.topic_configs(name).items()
    ]
    records: list[dict[str, Any]] = [
        {
            "broker": queue.broker,
            "queue_id": queue.queue_id,
            "offset_min": stats.offset_min,
            "offset_max": stats.offset_max,
            "messages": stats.offset_max - stats.offset_min,
            "last_message": stats.last_time_ms,
        }
        for queue, stats in admin.topic_offsets(name).items()
    ]
    if as_json:
        print_json({"topic": name, "brokers": brokers, "groups": groups, "queues": records})
        return
    columns = "broker queue_id offset_min offset_max messages last_message:time"
    print_records(records, columns=columns, title=name, empty="No queues.")
    kinds: dict[str, list[str]] = {}
    for one in brokers:
        texts = [f"{k}={v}" for k, v in sorted(one["attributes"].items()) if k != MESSAGE_TYPE]
        text = "; ".join([f"Type {one['type'] or 'not set'}", *texts])
        kinds.setdefault(text, []).append(one["broker"])
    for text, names in kinds.items():
        click.echo(f"{text}." if len(kinds) == 1 else f"{', '.join(names)}: {text}.")
    total = sum(record["messages"] for record in records)
    click.echo(f"{total:,} messages. Groups: {', '.join(groups) or 'none'}.")


@topic.command("delete")
@click.argument("name")
@click.option("-c", "--cluster", help="Only in that cluster.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@admin_options
def delete(admin: Admin, name: str, cluster: str | None, yes: bool, as_json: bool) -> None:
    """Delete topic NAME with all its messages."""
    admin.route(name)
    if not yes:
        click.confirm(f"Delete {name} with all its messages?", abort=True, err=True)
    undecided("sluice topic list")
    admin.delete_topic(name, cluster=cluster)
    print_result({"topic": name, "deleted": True}, f"Topic {name} is deleted.", as_json=as_json)
