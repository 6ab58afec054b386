"""Report on a consumer group: its members, the queues that each reads, and its progress.

Which queues a member reads is computed here, by the average allocation that clients use. What the
members themselves report is part of the facts in `diagnose`.
"""

from collections import Counter
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
        return sum(queue_progress.lag for queue_progress in self.progress)


def group(directory: Directory, name: str) -> Conversation[GroupReport]:
    """Return a report on a group: its members with their queues, idle members, and lags.

    An idle member has no queue, and the report says why. Raises ConfigurationError if no broker
    knows the group.
    """
    progress_of_queues = yield from progress(directory, name)
    client_ids = yield from members(directory, name)
    if not progress_of_queues and not client_ids:
        known_groups = yield from groups(directory)
        if name not in known_groups:
            raise unknown_group(name, known_groups)
    queues_by_topic: dict[str, list[MessageQueue]] = {}
    for topic in sorted({queue_progress.queue.topic for queue_progress in progress_of_queues}):
        if not topic.startswith(RETRY_PREFIX):
            queues_by_topic[topic] = yield from queues(directory, topic)
    return group_report(name, client_ids, progress_of_queues, queues_by_topic)


def group_report(
    name: str,
    client_ids: Sequence[str],
    reached: Sequence[QueueProgress],
    queues_by_topic: Mapping[str, Sequence[MessageQueue]],
) -> GroupReport:
    """Make the report on a group from what brokers report.

    The queues of each member are computed by average allocation, the default strategy. `client_ids`
    are the members that are online, `reached` is the progress in each queue, and `queues_by_topic`
    has the queues of each topic that the group reads.
    """
    notes = _write_notes(name, client_ids, queues_by_topic)
    reason_for_idleness = _explain_idleness(len(client_ids), queues_by_topic)
    shares = []
    for client_id in sorted(client_ids):
        allocated: list[MessageQueue] = []
        for queues_of_topic in queues_by_topic.values():
            allocated += allocate_average(client_id, queues_of_topic, client_ids)
        idle_because = "" if allocated else reason_for_idleness
        shares.append(MemberShare(client_id, tuple(allocated), idle_because))
    return GroupReport(name, tuple(shares), tuple(reached), tuple(notes))


def _write_notes(
    name: str, client_ids: Sequence[str], queues_by_topic: Mapping[str, Sequence[MessageQueue]]
) -> list[str]:
    """Return sentences about what looks wrong in a group; [] if nothing does.

    These are: no members, topics without readable queues, and client ids that two members use.
    """
    facts = GroupFacts(name, members=[MemberFacts(client_id) for client_id in client_ids])
    notes = [f"{finding.what} {finding.fix}" for finding in judge([NO_MEMBER], facts)]
    for topic, queues_of_topic in queues_by_topic.items():
        if not queues_of_topic:
            notes.append(f"The topic {topic} has no readable queue.")
    for client_id, member_count in sorted(Counter(client_ids).items()):
        if member_count > 1:
            notes.append(
                f"The client id {client_id} is used by two members, which then read the same "
                "queues."
            )
    return notes


def _explain_idleness(
    member_count: int, queues_by_topic: Mapping[str, Sequence[MessageQueue]]
) -> str:
    """Return why a member of a group gets no queue, as the end of a sentence.

    `member_count` is the number of members, and `queues_by_topic` has the queues that they share.
    """
    if not queues_by_topic:
        return "the group has no offsets yet, so the brokers do not know its topics"
    queue_count = max(len(queues) for queues in queues_by_topic.values())
    if queue_count < member_count:
        return (
            f"{member_count} members share {queue_count} queues, and a queue has one reader: "
            f"give the topic {member_count} queues, or stop {member_count - queue_count} members"
        )
    return "no queue of its topics is readable"
