"""`sluice topic`: list, show, create, change and delete topics."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from sluicemq.cli.ending import note_pending_change
from sluicemq.cli.output import (
    admin_options,
    combine_options,
    confirm,
    print_json,
    print_records,
    print_result,
    yes_option,
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
    """List, show, create, change and delete topics."""


@topic.command("list")
@click.option(
    "-a", "--all", "show_all", is_flag=True, help="Also list system, retry and dead-letter topics."
)
@admin_options
def list_topics(admin: Admin, show_all: bool, as_json: bool) -> None:
    """List the topics of the cluster with their queues and permission."""
    info = admin.cluster_info()
    server_names = {*info.brokers, *info.clusters}  # each is also the name of a system topic
    records = []
    for name in admin.topics():
        if not show_all and (is_group_topic(name) or is_system_topic(name, server_names)):
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


def _parse_attributes(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str | None]:
    """Return the attributes that KEY=VALUE and -KEY set; this is click's callback.

    -KEY removes an attribute, so its value is None. Raises click.BadParameter for other texts, and
    for a key that occurs twice.
    """
    attributes: dict[str, str | None] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        is_removal = key.startswith("-") and not separator
        key = key.removeprefix("-") if is_removal else key
        if not key or key[0] == "-" or key in attributes or bool(value) == is_removal:
            raise click.BadParameter("write KEY=VALUE, or -KEY to remove it, and each KEY once.")
        attributes[key] = None if is_removal else value
    return attributes


def _topic_options(queues: int | None, perm: str | None) -> Callable[[F], F]:
    """Return a decorator that adds the argument NAME and the options of a topic to a command.

    `queues` and `perm` are the defaults of these two options; None means that the option has none.
    """
    return combine_options(
        click.argument("name"),
        click.option(
            "-q",
            "--queues",
            type=int,
            default=queues,
            show_default=True,
            help="Number of read and of write queues on each broker.",
        ),
        click.option(
            "--perm",
            type=click.Choice(["2", "4", "6"]),
            default=perm,
            show_default=True,
            help="What clients may do: 2 write, 4 read, 6 both.",
        ),
        click.option(
            "-c", "--cluster", help="Use only the brokers of this cluster. Default: all brokers."
        ),
        click.option(
            "-o/-O",
            "--order/--no-order",
            default=None,
            help="Enable or disable strict order: producers use the same number of queues even "
            "while a broker is unreachable.",
        ),
        click.option(
            "--type",
            type=click.Choice([one.lower() for one in MESSAGE_TYPES], case_sensitive=False),
            help="Type of the topic's messages (message.type). Only RocketMQ's gRPC proxy refuses "
            "messages of another type.",
        ),
        click.option(
            "--attribute",
            "attributes",
            metavar="KEY=VALUE|-KEY",
            multiple=True,
            callback=_parse_attributes,
            help="Set another attribute of RocketMQ, or remove it with -KEY. Repeat for more.",
        ),
        click.option(
            "--force",
            is_flag=True,
            help="Reduce the number of queues even if the removed ones contain messages. No "
            "consumer reads these any more.",
        ),
    )


@topic.command("create")
@_topic_options(queues=8, perm="6")
@admin_options
def create(admin: Admin, name: str, queues: int, perm: str, as_json: bool, **options: Any) -> None:
    """Create topic NAME on every broker, or change it if it exists."""
    _create_or_update(admin, name, queues, as_json, perm=int(perm), **options)


@topic.command("update")
@_topic_options(queues=None, perm=None)
@admin_options
def update(
    admin: Admin, name: str, queues: int | None, perm: str | None, as_json: bool, **options: Any
) -> None:
    """Change topic NAME on every broker. Properties without an option stay as they are."""
    current = admin.route(name).queues[0]
    options["perm"] = current.perm if perm is None else int(perm)
    options["write_queues"] = queues or current.write_queues
    configs = admin.topic_configs(name).values()
    if options["order"] is None and any(config.order for config in configs):
        options["order"] = True
    _create_or_update(admin, name, queues or current.read_queues, as_json, **options)


def _create_or_update(admin: Admin, name: str, queues: int, as_json: bool, **options: Any) -> None:
    """Set the topic on every broker, and print the result.

    `options` are those of `Admin.create_topic`. A warning on stderr follows if strict order was
    requested and the name servers do not send the order table to clients.
    """
    note_pending_change(f"sluice topic show {name}")
    brokers = admin.create_topic(name, queues=queues, **options)
    print_result(
        {"topic": name, "queues": queues, "brokers": brokers},
        f"Topic {name} has {queues} queues on {', '.join(brokers)}.",
        as_json=as_json,
    )
    route = admin.find_route(name) if options["order"] else None
    if route is not None and not route.order_topic_config:
        click.echo(
            "The order is not strict yet: the name server stores the order table, but does not "
            "send it to clients. Set orderMessageEnable=true in namesrv.conf.",
            err=True,
        )


@topic.command("show")
@click.argument("name")
@admin_options
def show(admin: Admin, name: str, as_json: bool) -> None:
    """Show the queues of topic NAME with offsets, and its type, attributes and groups."""
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
    names_by_description: dict[str, list[str]] = {}
    for broker in brokers:
        attributes = [
            f"{key}={value}"
            for key, value in sorted(broker["attributes"].items())
            if key != MESSAGE_TYPE
        ]
        text = "; ".join([f"Type {broker['type'] or 'not set'}", *attributes])
        names_by_description.setdefault(text, []).append(broker["broker"])
    for text, names in names_by_description.items():
        is_only = len(names_by_description) == 1
        click.echo(f"{text}." if is_only else f"{', '.join(names)}: {text}.")
    total = sum(record["messages"] for record in records)
    click.echo(f"{total:,} messages. Groups: {', '.join(groups) or 'none'}.")


@topic.command("delete")
@click.argument("name")
@click.option("-c", "--cluster", help="Delete it in this cluster only. Default: in all clusters.")
@yes_option
@admin_options
def delete(admin: Admin, name: str, cluster: str | None, yes: bool, as_json: bool) -> None:
    """Delete topic NAME with all its messages."""
    admin.route(name)
    confirm(f"Delete {name} with all its messages?", yes=yes)
    note_pending_change("sluice topic list")
    admin.delete_topic(name, cluster=cluster)
    print_result({"topic": name, "deleted": True}, f"Topic {name} is deleted.", as_json=as_json)
