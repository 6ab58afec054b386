"""Blocking administration: routes, offsets, topics, groups, clusters.

Every method is a conversation of `client.core.operations`, driven here with
blocking calls: what the Spark source, the command line and scripts need. Offsets are
positions in one queue, times are milliseconds since 1970.
"""

from typing import Any, TypeVar

from sluicemq.client.core import operations
from sluicemq.client.core.answers import expect_success
from sluicemq.client.core.operations import NAME_SERVER, Ask, RouteOf, Talk
from sluicemq.client.core.reports import GroupReport, QueueProgress
from sluicemq.client.sync.cluster import Cluster
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.protocol.bodies import ClusterInfo, QueueStats

T = TypeVar("T")


class Admin(Cluster):
    """Administration over blocking connections. Use it in a `with` statement; any number of threads
    may share one. Raises the errors of `sluicemq.errors`."""

    def _drive(self, talk: Talk[T]) -> T:
        answer: Any = None
        while True:
            try:
                wanted = talk.send(answer)
            except StopIteration as done:
                value: T = done.value
                return value
            answer = self._answer(wanted)

    def _answer(self, wanted: Ask | RouteOf) -> Any:
        if isinstance(wanted, RouteOf):
            return self.route(wanted.topic)
        where = wanted.where
        if where == NAME_SERVER:
            answer, address = self.ask_name_server(wanted.command), ""
        else:
            address = where if isinstance(where, str) else self.address(where)
            answer = self.call(address, wanted.command)
        return expect_success(answer, address) if wanted.must_succeed else answer

    def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic, sorted."""
        return self._drive(operations.queues(topic))

    def offsets(self, queue: MessageQueue) -> tuple[int, int]:
        """(first stored offset, offset that the next message will get)."""
        return self._drive(operations.offsets(queue))

    def offset_by_time(self, queue: MessageQueue, time_ms: int, *, upper: bool = False) -> int:
        """The first offset stored at `time_ms` or later; `upper`: the last at or before it."""
        return self._drive(operations.offset_by_time(queue, time_ms, upper=upper))

    def offset_min(self, queue: MessageQueue) -> int:
        """The first offset that is still stored."""
        return self._drive(operations.offset_min(queue))

    def offset_max(self, queue: MessageQueue) -> int:
        """The offset that the next message will get."""
        return self._drive(operations.offset_max(queue))

    def earliest_time_ms(self, queue: MessageQueue) -> int:
        """When the first stored message was stored; -1 without one."""
        return self._drive(operations.earliest_time_ms(queue))

    def committed_offset(self, group: str, queue: MessageQueue) -> int | None:
        """The committed offset of a group, None when it never committed."""
        return self._drive(operations.committed_offset(group, queue))

    def commit_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Sets the committed offset of a group, also backwards."""
        self._drive(operations.commit_offset(group, queue, offset))

    def cluster_info(self) -> ClusterInfo:
        """All clusters and brokers that the name server knows."""
        return self._drive(operations.cluster_info())

    def masters(self, cluster: str | None = None) -> dict[str, str]:
        """Broker name -> address of each master. Raises ConfigurationError for an unknown
        cluster."""
        return self._drive(operations.masters(cluster))

    def topics(self) -> list[str]:
        """All topic names, sorted."""
        return self._drive(operations.topics())

    def create_topic(
        self,
        name: str,
        *,
        queues: int = 8,
        write_queues: int | None = None,
        perm: int = 6,
        cluster: str | None = None,
        order: bool = False,
    ) -> list[str]:
        """Creates or changes a topic on every master (of one cluster); returns the broker names.

        Raises ConfigurationError for a bad name, count or cluster, RequestError when refused.
        """
        config = operations.topic_to_create(name, queues, write_queues, perm, order=order)
        made = self._drive(operations.create_topic(config, cluster))
        self.routes.forget(name)
        return made

    def delete_topic(self, name: str, *, cluster: str | None = None) -> None:
        """Deletes a topic on every master, then on every name server."""
        self._drive(operations.delete_topic(name, cluster, self.name_servers))
        self.routes.drop(name)

    def topic_offsets(self, topic: str) -> dict[MessageQueue, QueueStats]:
        """Queue -> first offset, next offset, time of the last message."""
        return self._drive(operations.topic_offsets(topic))

    def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that read a topic, or have offsets in it."""
        return self._drive(operations.groups_of_topic(topic))

    def groups(self) -> dict[str, GroupConfig]:
        """Every consumer group known to any master."""
        return self._drive(operations.groups())

    def create_group(self, config: GroupConfig, *, cluster: str | None = None) -> list[str]:
        """Creates or changes a consumer group on every master; returns the broker names."""
        return self._drive(operations.create_group(config, cluster))

    def members(self, group: str) -> list[str]:
        """Client ids of the members of a group that are online, over all masters."""
        return self._drive(operations.members(group))

    def progress(self, group: str, topic: str | None = None) -> list[QueueProgress]:
        """How far a group is in each queue it has offsets for."""
        return self._drive(operations.progress(group, topic))

    def group(self, name: str) -> GroupReport:
        """Members, their shares, who is idle and why, lag per queue."""
        return self._drive(operations.group(name))

    def runtime(self, address: str) -> dict[str, str]:
        """The counters of one broker."""
        return self._drive(operations.runtime(address))
