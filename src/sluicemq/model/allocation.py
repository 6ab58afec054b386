"""Which queues of a topic a group shares, and who of it reads which, by RocketMQ's two usual ways.

Each member computes it for itself (`client.core.balance`), or the broker for all (400); both have
to come to the same.
"""

from collections.abc import Callable, Sequence

from sluicemq.model.topic import PERM_READ, MessageQueue, TopicRoute

Strategy = Callable[[str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
"""(client id, queues, members) -> the queues of that client. Pure: every member computes it."""


def read_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """The queues a consumer group shares, sorted as all clients sort them."""
    return sorted(
        MessageQueue(topic, data.broker, queue_id)
        for data in route.queues
        if data.perm & PERM_READ
        for queue_id in range(data.read_queues)
    )


def allocate_average(
    client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """The queues of one member; [] when it is not a member, or there are more members than queues.

    `queues` and `members` may come in any order.
    """
    if client_id not in members or not queues:
        return []
    ordered, ids = sorted(queues), sorted(members)
    index, count = ids.index(client_id), len(ids)
    size, more = divmod(len(ordered), count)
    start = index * size + min(index, more)
    return ordered[start : start + size + (1 if index < more else 0)]


def allocate_circle(
    client_id: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    """Dealt out like cards. Any order; [] for a stranger."""
    if client_id not in members:
        return []
    return sorted(queues)[sorted(members).index(client_id) :: len(members)]
