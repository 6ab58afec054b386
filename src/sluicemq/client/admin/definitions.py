"""Topics and groups as one broker keeps them: look, make, change, take away.

What `topics` and `groups` do to a cluster, for a broker that is named by its address.
"""

from collections.abc import Iterable, Mapping

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import NAME_SERVERS, Directory
from sluicemq.model.topic import GroupConfig, TopicConfig, TopicRoute
from sluicemq.wire import bodies, tables


def known_route(directory: Directory, topic: str) -> Conversation[TopicRoute]:
    """The route as a name server has it now. Raises TopicNotFoundError with its own words."""
    answer = yield from directory.call(NAME_SERVERS, requests.route(topic))
    return bodies.decode_topic_route(answer.body)


def put_topic(
    directory: Directory, address: str, config: TopicConfig, changes: Mapping[str, str | None]
) -> Conversation[None]:
    """Creates or changes a topic; `changes` of attributes, None takes one away."""
    yield from directory.call(address, requests.update_topic(config, changes))
    directory.routes.expire(config.name)


def put_topics(
    directory: Directory, address: str, configs: Iterable[TopicConfig]
) -> Conversation[None]:
    """Creates or changes several."""
    yield from directory.call(address, requests.update_topics(configs))


def topic_table(directory: Directory, address: str) -> Conversation[tables.TopicTable]:
    """All topics."""
    answer = yield from directory.call(address, requests.all_topics())
    return tables.decode_topic_table(answer.body)


def system_topics(directory: Directory, address: str) -> Conversation[tuple[str, ...]]:
    """Those that the broker itself needs."""
    answer = yield from directory.call(address, requests.system_topics())
    return bodies.decode_topic_list(answer.body)


def put_groups(
    directory: Directory, address: str, configs: Iterable[GroupConfig]
) -> Conversation[None]:
    """Creates or changes groups; one of them in the way that RocketMQ 4 knows too."""
    found = list(configs)
    one = requests.update_group(found[0]) if len(found) == 1 else requests.update_groups(found)
    yield from directory.call(address, one)


def group_table(directory: Directory, address: str) -> Conversation[tables.GroupTable]:
    """All groups."""
    answer = yield from directory.call(address, requests.all_groups())
    return tables.decode_group_table(answer.body)


def delete_group(
    directory: Directory, address: str, group: str, *, clean_offset: bool = False
) -> Conversation[None]:
    """Takes a group away, with its offsets when they are to be cleaned."""
    yield from directory.call(
        address, requests.delete_group(group=group, clean_offset=clean_offset)
    )


def set_request_mode(
    directory: Directory, address: str, mode: tables.RequestMode
) -> Conversation[None]:
    """Makes a group read a topic by PULL or by POP."""
    yield from directory.call(address, requests.set_request_mode(mode))
