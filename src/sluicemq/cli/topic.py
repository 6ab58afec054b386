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
    TopicRoute,
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
    cluster_info = admin.cluster_info()
    # RocketMQ creates a system topic with the name of each broker and of each cluster.
    server_names = {*cluster_info.brokers, *cluster_info.clusters}
    records = []
    for name in admin.topics():
        is_internal = is_group_topic(name) or is_system_topic(name, server_names)
        if is_internal and not show_all:
            continue

        records.append({"topic": name, **_count_queues(admin.find_route(name))})
    print_records(records, as_json=as_json, empty="No topics (--all shows system topics).")


def _count_queues(route: TopicRoute | None) -> dict[str, Any]:
    """Return the brokers, queues and permission of a topic, for `topic list`.

    A topic without a route (None) has zeros, and the permission "".
    """
    broker_queues = route.queues if route else ()  # one item for each broker
    return {
        "brokers": len(broker_queues),
        "read_queues": sum(queues.read_queues for queues in broker_queues),
        "write_queues": sum(queues.write_queues for queues in broker_queues),
        "permission": permission_name(broker_queues[0].perm) if broker_queues else "",
    }


def _parse_attributes(
    _context: click.Context, _option: click.Parameter, arguments: tuple[str, ...]
) -> dict[str, str | None]:
    """Return the attributes that the texts KEY=VALUE and -KEY set; click calls this.

    `("a=1", "-b")` becomes {"a": "1", "b": None}, which removes b. Raises click.BadParameter for
    other texts, and for a key that occurs twice.
    """
    attributes: dict[str, str | None] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        is_removal = key.startswith("-") and not separator
        if is_removal:
            key = key.removeprefix("-")

        is_valid_key = bool(key) and not key.startswith("-")
        is_complete = is_removal or bool(value)
        if not is_valid_key or not is_complete or key in attributes:
            raise click.BadParameter("write KEY=VALUE, or -KEY to remove it, and each KEY once.")
        attributes[key] = None if is_removal else value
    return attributes


def _add_topic_options(queues: int | None, perm: str | None) -> Callable[[F], F]:
    """Return a decorator that adds the argument NAME and all options of a topic to a command.

    `queues` and `perm` are the defaults of two options; None means that they have no default.
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
            type=click.Choice([name.lower() for name in MESSAGE_TYPES], case_sensitive=False),
            help="Type of the topic's messages (message.type). The gRPC proxies refuse messages of "
            "another type.",
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
@_add_topic_options(queues=8, perm="6")
@admin_options
def create(admin: Admin, name: str, queues: int, perm: str, as_json: bool, **options: Any) -> None:
    """Create topic NAME on every broker, or change it if it exists."""
    _create_or_update(admin, name, queues, as_json, perm=int(perm), **options)


@topic.command("update")
@_add_topic_options(queues=None, perm=None)
@admin_options
def update(
    admin: Admin, name: str, queues: int | None, perm: str | None, as_json: bool, **options: Any
) -> None:
    """Change topic NAME on every broker. Properties without an option stay as they are."""
    # The request replaces queues, permission and order, so those without an option are sent as
    # they are now.
    current = admin.route(name).queues[0]
    options["perm"] = current.perm if perm is None else int(perm)
    read_queues = queues or current.read_queues
    options["write_queues"] = queues or current.write_queues

    configs = admin.topic_configs(name).values()
    if options["order"] is None and any(config.order for config in configs):
        options["order"] = True

    _create_or_update(admin, name, read_queues, as_json, **options)


def _create_or_update(admin: Admin, name: str, queues: int, as_json: bool, **options: Any) -> None:
    """Create or change a topic on every broker, and print the result.

    `queues` is the number of queues on each broker, and `options` are the other arguments of
    `Admin.create_topic`. If strict order was requested and the name servers do not support it yet,
    a warning is printed to stderr.
    """
    # From here on, Ctrl-C leaves it unknown which brokers have the change. The text of the
    # interrupt then names the command that shows it.
    note_pending_change(f"sluice topic show {name}")
    brokers = admin.create_topic(name, queues=queues, **options)
    noun = "queue" if queues == 1 else "queues"
    print_result(
        {"topic": name, "queues": queues, "brokers": brokers},
        f"Topic {name} has {queues} {noun} on {', '.join(brokers)}.",
        as_json=as_json,
    )
    if not options["order"]:
        return
    route = admin.find_route(name)
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
    brokers = _fetch_attributes(admin, name)
    queues = _fetch_queues(admin, name)
    if as_json:
        print_json({"topic": name, "brokers": brokers, "groups": groups, "queues": queues})
        return

    columns = "broker queue_id offset_min offset_max messages last_message:time"
    print_records(queues, columns=columns, title=name, empty="No queues.")
    _print_attributes(brokers)
    message_count = sum(queue["messages"] for queue in queues)
    click.echo(f"{message_count:,} messages. Groups: {', '.join(groups) or 'none'}.")


def _fetch_attributes(admin: Admin, name: str) -> list[dict[str, Any]]:
    """Return the type and the attributes of a topic on each broker, for `topic show`."""
    return [
        {
            "broker": broker,
            "type": config.attributes.get(MESSAGE_TYPE, "").lower(),
            "attributes": dict(config.attributes),
        }
        for broker, config in admin.topic_configs(name).items()
    ]


def _fetch_queues(admin: Admin, name: str) -> list[dict[str, Any]]:
    """Return the queues of a topic with their offsets, for `topic show`."""
    return [
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


def _print_attributes(brokers: list[dict[str, Any]]) -> None:
    """Print the type and the attributes of a topic.

    `brokers` are records with `broker`, `type` and `attributes`. Brokers with equal ones share a
    line. It names the brokers unless all are equal.
    """
    brokers_by_description: dict[str, list[str]] = {}
    for record in brokers:
        description = f"Type {record['type'] or 'not set'}"
        for key, value in sorted(record["attributes"].items()):
            if key != MESSAGE_TYPE:  # the type comes first
                description += f"; {key}={value}"
        brokers_by_description.setdefault(description, []).append(record["broker"])

    are_all_equal = len(brokers_by_description) == 1
    for description, broker_names in brokers_by_description.items():
        if are_all_equal:
            click.echo(f"{description}.")
        else:
            click.echo(f"{', '.join(broker_names)}: {description}.")


@topic.command("delete")
@click.argument("name")
@click.option("-c", "--cluster", help="Delete it in this cluster only. Default: in all clusters.")
@yes_option
@admin_options
def delete(admin: Admin, name: str, cluster: str | None, yes: bool, as_json: bool) -> None:
    """Delete topic NAME with all its messages."""
    admin.route(name)  # raises an error for an unknown topic, before the question
    confirm(f"Delete {name} with all its messages?", yes=yes)
    note_pending_change("sluice topic list")
    admin.delete_topic(name, cluster=cluster)
    print_result({"topic": name, "deleted": True}, f"Topic {name} is deleted.", as_json=as_json)
