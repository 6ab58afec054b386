"""Who reads which queue: the average allocation of RocketMQ's clients.

Every member sorts the same queues and the same member ids and computes the same shares; nobody is
asked. The share of a member is a run of consecutive queues; the first `queues % members` members
get one more. (spec/remoting.md §15; it must equal the Java and Go clients' or queues have two
readers.)
"""

from collections.abc import Sequence

from sluicemq.model.topic import MessageQueue


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
