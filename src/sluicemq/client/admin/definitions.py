"""Topics and groups as one broker stores them: read, create, change and delete.

`topics` and `groups` do the same for a whole cluster.
"""

from collections.abc import Iterable, Mapping

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import NAME_SERVERS, Directory
from sluicemq.model.topic import GroupConfig, TopicConfig, TopicRoute
from sluicemq.wire import bodies, tables


def current_route(directory: Directory, topic: str) -> Conversation[TopicRoute]:
    """Return the route of a topic that a name server has now.

    Raises TopicNotFoundError with the name server's own remark if it has none.
    """
    answer = yield from directory.call(NAME_SERVERS, requests.route(topic))
    return bodies.decode_topic_route(answer.body)


def put_topic(
    directory: Directory, address: str, config: TopicConfig, changes: Mapping[str, str | None]
) -> Conversation[None]:
    """Create or change a topic of a broker.

    `changes` are attributes to set, or to remove if the value is None.
    """
    yield from directory.call(address, requests.update_topic(config, changes))
    directory.routes.expire(config.name)


def put_topics(
    directory: Directory, address: str, configs: Iterable[TopicConfig]
) -> Conversation[None]:
    """Create or change several topics of a broker."""
    yield from directory.call(address, requests.update_topics(configs))


def topic_table(directory: Directory, address: str) -> Conversation[tables.TopicTable]:
    """Return all topics of a broker."""
    answer = yield from directory.call(address, requests.all_topics())
    return tables.decode_topic_table(answer.body)


def system_topics(directory: Directory, address: str) -> Conversation[tuple[str, ...]]:
    """Return the system topics of a broker."""
    answer = yield from directory.call(address, requests.system_topics())
    return bodies.decode_topic_list(answer.body)


def put_groups(
    directory: Directory, address: str, configs: Iterable[GroupConfig]
) -> Conversation[None]:
    """Create or change consumer groups at the broker with an address.

    `configs` are their settings. A single group is sent in a request that RocketMQ 4 knows, too.
    """
    groups = list(configs)
    if len(groups) == 1:
        command = requests.update_group(groups[0])
    else:
        command = requests.update_groups(groups)
    yield from directory.call(address, command)


def group_table(directory: Directory, address: str) -> Conversation[tables.GroupTable]:
    """Return all groups of a broker."""
    answer = yield from directory.call(address, requests.all_groups())
    return tables.decode_group_table(answer.body)


def delete_group(
    directory: Directory, address: str, group: str, *, clean_offset: bool = False
) -> Conversation[None]:
    """Delete a group of a broker, and its offsets if `clean_offset` is set."""
    yield from directory.call(
        address, requests.delete_group(group=group, clean_offset=clean_offset)
    )


def set_request_mode(
    directory: Directory, address: str, mode: tables.RequestMode
) -> Conversation[None]:
    """Set whether a group consumes a topic by PULL or by POP."""
    yield from directory.call(address, requests.set_request_mode(mode))
