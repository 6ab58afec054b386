"""Report on a consumer group: its members, the queues that each reads, and its progress.

Which queues a member reads is computed here, by the average allocation that clients use. What the
members themselves report is part of the facts in `diagnose`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluicemq.client.admin.diagnose.findings import judge
from sluicemq.client.admin.diagnose.group_facts import GroupFacts, MemberFacts
from sluicemq.client.admin.diagnose.group_rules import NO_MEMBER
from sluicemq.client.admin.groups import (
    QueueProgress,
    groups,
    members,
    progress,
    unknown_group,
)
from sluicemq.client.admin.topics import queues
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue, allocate_average


@dataclass(frozen=True, slots=True)
class MemberShare:
    """The queues that a member of a group reads by the average allocation of clients.

    `idle_because` says why the member has no queue, "" if it has one.
    """

    client_id: str
    queues: tuple[MessageQueue, ...]
    idle_because: str = ""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The members and the progress of a group at one moment, with notes about what looks wrong."""

    name: str
    members: tuple[MemberShare, ...]
    progress: tuple[QueueProgress, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def lag(self) -> int:
        """The number of messages that the group has not consumed."""
        return sum(item.lag for item in self.progress)


def group(directory: Directory, name: str) -> Conversation[GroupReport]:
    """Return the members of a group with their queues, why some are idle, and the lag per queue.

    Raises ConfigurationError if no broker knows the group.
    """
    reached = yield from progress(directory, name)
    online = yield from members(directory, name)
    if not reached and not online and name not in (known := (yield from groups(directory))):
        raise unknown_group(name, known)
    queues_by_topic: dict[str, list[MessageQueue]] = {}
    for topic in sorted({item.queue.topic for item in reached}):
        if not topic.startswith(RETRY_PREFIX):
            queues_by_topic[topic] = yield from queues(directory, topic)
    return group_report(name, online, reached, queues_by_topic)


def group_report(
    name: str,
    client_ids: Sequence[str],
    reached: Sequence[QueueProgress],
    queues_by_topic: Mapping[str, Sequence[MessageQueue]],
) -> GroupReport:
    """Return the report on a group, with the queues that each member gets by average allocation.

    `client_ids` are the members that are online, and `queues_by_topic` the queues of each topic
    that the group reads.
    """
    facts = GroupFacts(name, members=[MemberFacts(client_id) for client_id in client_ids])
    notes = [f"{finding.what} {finding.fix}" for finding in judge([NO_MEMBER], facts)]
    missing = [topic for topic, queues in queues_by_topic.items() if not queues]
    notes.extend(f"The topic {topic} has no readable queue." for topic in missing)
    duplicates = {one for one in client_ids if list(client_ids).count(one) > 1}
    notes.extend(
        f"The client id {client_id} is used by two members, which then read the same queues."
        for client_id in sorted(duplicates)
    )

    members_count = len(client_ids)
    count = max((len(queues) for queues in queues_by_topic.values()), default=0)
    if not queues_by_topic:
        why = "the group has no offsets yet, so the brokers do not know its topics"
    elif count < members_count:
        why = (
            f"{members_count} members share {count} queues, and a queue has one reader: "
            f"give the topic {members_count} queues, or stop {members_count - count} members"
        )
    else:
        why = "no queue of its topics is readable"
    shares = []
    for client_id in sorted(client_ids):
        shared = (
            allocate_average(client_id, queues, client_ids) for queues in queues_by_topic.values()
        )
        own = tuple(queue for queues in shared for queue in queues)
        shares.append(MemberShare(client_id, own, "" if own else why))
    return GroupReport(name, tuple(shares), tuple(reached), tuple(notes))
