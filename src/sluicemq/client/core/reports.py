"""What administration tells: clusters, progress of a group, idle members and why.

Pure: the shells ask the servers and hand the answers in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluicemq.client.core.balance import allocate_average
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import MASTER_ID, MessageQueue
from sluicemq.protocol.bodies import ClusterInfo


def masters_of(info: ClusterInfo, cluster: str | None = None) -> dict[str, str]:
    """Broker name -> master address. Raises ConfigurationError for a cluster that is not there."""
    if cluster is not None and cluster not in info.clusters:
        raise ConfigurationError(
            f"there is no cluster {cluster!r}.",
            cure=f"The name server knows: {', '.join(sorted(info.clusters)) or 'none'}.",
        )
    wanted = set(info.brokers) if cluster is None else set(info.clusters[cluster])
    return {
        name: data.addresses[MASTER_ID]
        for name, data in sorted(info.brokers.items())
        if name in wanted and MASTER_ID in data.addresses
    }


@dataclass(frozen=True, slots=True)
class QueueProgress:
    """One queue of a group: committed offset, next offset of the queue, time of the last consumed
    message (ms, 0 when unknown)."""

    queue: MessageQueue
    committed: int
    offset_max: int
    last_time_ms: int = 0
    messages_at_risk: int = 0
    loss_time_ms: int = 0

    @property
    def lag(self) -> int:
        """Messages not yet committed; a filter's misses count until they are passed."""
        return max(0, self.offset_max - self.committed)


@dataclass(frozen=True, slots=True)
class LaneLag:
    """What one lane of a group has before it in one queue: `matching` messages from its own
    `committed` on are its."""

    lane: str
    expression: str
    committed: int
    offset_max: int
    matching: int | None


@dataclass(frozen=True, slots=True)
class QueueLag:
    """What a group has before it in one queue: the queue holds `offset_min` up to, not including,
    `offset_max`.

    `messages_at_risk` of the unread ones are deleted next, from `loss_time_ms` on (ms since 1970;
    both 0 when none is in danger, or when the broker is not ours and does not tell).
    `matching` of them get through the group's filter, exactly; None when it is not known: on a
    RocketMQ broker, or of a group that is away and subscribed by tags. `eta_ms`: in how long none
    will be left at the present pace; None when not known, or never.
    """

    group: str
    queue: MessageQueue
    committed: int
    offset_min: int
    offset_max: int
    messages_at_risk: int = 0
    loss_time_ms: int = 0
    matching: int | None = None
    eta_ms: int | None = None
    lanes: tuple[LaneLag, ...] = ()
    """Of a group whose members want different things: then `committed` is the least of them, and
    `matching` the sum."""

    @property
    def lag(self) -> int:
        """Messages that are there and not committed; a filter's misses count until passed."""
        return max(0, self.offset_max - max(self.committed, self.offset_min))

    @property
    def lost(self) -> int:
        """Messages that were deleted before the group committed them; a group that has committed
        nothing begins where it wants, and has lost none."""
        return max(0, self.offset_min - self.committed) if self.committed > 0 else 0


@dataclass(frozen=True, slots=True)
class MemberShare:
    """What one member of a group gets, by the average allocation that clients agree on."""

    client_id: str
    queues: tuple[MessageQueue, ...]
    idle_because: str = ""


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group at one moment."""

    name: str
    members: tuple[MemberShare, ...]
    progress: tuple[QueueProgress, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def lag(self) -> int:
        return sum(item.lag for item in self.progress)


def group_report(
    name: str,
    members: Sequence[str],
    progress: Sequence[QueueProgress],
    queues: Mapping[str, Sequence[MessageQueue]],
) -> GroupReport:
    """Shares by average allocation of `queues` (topic -> its queues), idle members with the
    reason."""
    shares = [_share(member, members, queues) for member in sorted(members)]
    notes = []
    if not members:
        notes.append(
            "No member is online: nobody consumes. Either no consumer runs, or it was refused "
            "(its log says why), or it is connected to other brokers."
        )
    missing = [topic for topic, own in queues.items() if not own]
    notes.extend(f"The topic {topic} has no readable queue." for topic in missing)
    duplicates = {member for member in members if list(members).count(member) > 1}
    notes.extend(
        f"The client id {member} is used by two members, which then share one part."
        for member in sorted(duplicates)
    )
    return GroupReport(name, tuple(shares), tuple(progress), tuple(notes))


def _share(
    member: str, members: Sequence[str], queues: Mapping[str, Sequence[MessageQueue]]
) -> MemberShare:
    own = [
        queue
        for topic_queues in queues.values()
        for queue in allocate_average(member, topic_queues, members)
    ]
    if own:
        return MemberShare(member, tuple(own))
    count = max((len(topic_queues) for topic_queues in queues.values()), default=0)
    if not queues:
        why = "the group has no offsets yet, so its topics are not known to the brokers"
    elif count < len(members):
        why = (
            f"{len(members)} members share {count} queues, a queue has one reader: "
            f"give the topic {len(members)} queues or stop {len(members) - count} members"
        )
    else:
        why = "no queue of its topics is readable"
    return MemberShare(member, (), why)
