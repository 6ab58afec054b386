"""Counts and lists over the whole broker, for the tools: 315 317 328 343 345 353.

    315   a count by minute, hour and day
    317   how far each group is in each of its topics
    328   the producers of all groups
    343   the topics of a group, 345 what it wants of one
    353   keeps a group from a topic, or lets it again

RocketMQ counts where messages pass. Here nothing happens there: counters are sampled (`Spans`), and
a count is the newest sample less the oldest of its span (spec/admin.md §4).
"""

import logging
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.broker.admin.status import Admin, RuntimeInfo
from sluicemq.broker.consume.clients import Consumers, Producers
from sluicemq.broker.group_commit import Announced, Postponed
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.errors import RequestError
from sluicemq.net.dispatch import Peer
from sluicemq.net.work.background import WorkItem
from sluicemq.numbers import natural
from sluicemq.wire import bodies, fastjson
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    GetConsumeStatsOfBrokerRequest,
    GetGroupConfigRequest,
    GroupForbiddenRequest,
    StatisticsRequest,
    TopicGroupRequest,
)

log = logging.getLogger(__name__)

_SPANS_S: Final = {"statsMinute": 60, "statsHour": 3600, "statsDay": 86_400}
UNMEASURED: Final = {
    "TOPIC_PUT_LATENCY": "latencies are measured for the whole broker, see putLatency99 of "
    "brokerStatus and sluicemq_* of its metrics.",
    "GROUP_GET_LATENCY": "a read is a slice of the mapped log and is not measured by group.",
    "GROUP_CK_NUMS": "checkpoints are counted with what they hold, see GROUP_GET_NUMS.",
    "DLQ_PUT_NUMS": "see TOPIC_PUT_NUMS of %DLQ% and the group.",
    "QUEUE_GET_NUMS": "reads are counted by topic and group, see GROUP_GET_NUMS.",
    "QUEUE_GET_SIZE": "reads are counted by topic and group, see GROUP_GET_SIZE.",
    "QUEUE_PUT_SIZE": "bytes are counted by topic, see TOPIC_PUT_SIZE.",
}
"""What RocketMQ counts and nobody here: why not, and what tells it instead."""


@dataclass(slots=True, eq=False)
class Statistics:
    """The request family."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    producers: Producers
    runtime: RuntimeInfo
    status: Admin

    def view(self, header: StatisticsRequest, command: Command, peer: Peer) -> Command:
        """315. `avgpt` is bytes a message of what counts bytes, else 1."""
        key = "" if header.key == self.settings.broker.cluster_name else header.key
        if header.name == "QUEUE_PUT_NUMS":
            counted = self._put_into(header.key)
        else:
            counted = self.runtime.spans.counted(f"{header.name} {key}")
        if counted is None:
            remark = f"The stats <{header.name}> <{header.key}> not exist"
            if header.name in UNMEASURED:
                remark += f": {UNMEASURED[header.name]}"
            raise RequestError(ResponseCode.SYSTEM_ERROR, remark)
        numbers = counted
        if header.name.endswith("_SIZE"):
            name = header.name.replace("_SIZE", "_NUMS")
            numbers = self.runtime.spans.counted(f"{name} {key}") or {}
        body = {
            span: {
                "avgpt": total / numbers[span][0] if numbers.get(span, (0,))[0] else 0.0,
                "sum": total,
                "tps": rate,
            }
            for span, (total, rate) in counted.items()
        }
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def _put_into(self, key: str) -> dict[str, tuple[int, float]] | None:
        """What came into a queue (`topic@queueId`): the queue knows it by time, so nobody has to
        count, and a restart forgets nothing. None for one that is not there."""
        name, _, text = key.rpartition("@")
        topic, number = self.topics.get(name), natural(text)
        if topic is None or number is None or number >= topic.queues:
            return None
        store, now_ms = self.status.store, self.status.clock.now_ms()
        end, found = store.queue_offsets(name, number)[1], {}
        for span, seconds in _SPANS_S.items():
            since_ms = now_ms - 1000 * seconds
            first = store.reader.offset_by_time(name, int(number), since_ms) if end else 0
            found[span] = (max(end - first, 0), max(end - first, 0) / seconds)
        return found

    def topics_by_group(self, *, ordered: bool) -> dict[str, list[str]]:
        """The topics that exist and that groups have offsets of, without those that a group which
        is online does not subscribe. `ordered`: ordered topics alone."""
        found: dict[str, list[str]] = {}
        for name, groups in sorted(self.offsets.groups_by_topic().items()):
            topic = self.topics.get(name)
            if topic is None or (ordered and not topic.config.order):
                continue
            for group in groups:
                online = self.consumers.groups.get(group)
                if group in self.groups and (online is None or name in online.subscriptions):
                    found.setdefault(group, []).append(name)
        return found

    def of_broker(
        self, header: GetConsumeStatsOfBrokerRequest, command: Command, peer: Peer
    ) -> Postponed:
        """317: a step a group."""

        def steps() -> WorkItem[Command]:
            listed, behind, in_flight = [], 0, 0
            for group, names in sorted(self.topics_by_group(ordered=header.ordered).items()):
                found = [self.status.progress(group, [name]) for name in names]
                for queue in (it for stats in found for it in stats.queues.values()):
                    behind += queue.broker_offset - queue.consumer_offset
                    in_flight += queue.pull_offset - queue.consumer_offset
                listed.append({group: found})
                yield None
            answer = bodies.ConsumeStatsOfBroker(self._address, listed, behind, in_flight)
            body = bodies.encode_consume_stats_of_broker(answer)
            return Command(ResponseCode.SUCCESS, body=body)

        return Postponed(steps())

    def all_producers(self, command: Command, peer: Peer) -> Command:
        """328."""
        clock = self.status.clock
        started_ms = clock.now_ms() - round(clock.monotonic_s() * 1000)
        found = {
            group: [
                {
                    "clientId": member.client_id,
                    "language": member.language,
                    "lastUpdateTimestamp": started_ms + round(member.heartbeat_s * 1000),
                    "remoteIP": f"/{member.peer.remote}",
                    "version": member.version,
                }
                for member in members.values()
            ]
            for group, members in self.producers.groups.items()
        }
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps({"data": found}))

    def topics_of_group(
        self, header: GetGroupConfigRequest, command: Command, peer: Peer
    ) -> Command:
        """343: those that it has offsets of."""
        names = sorted(self.offsets.topics_of(header.group))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_list(names, self._address))

    def subscription(self, header: TopicGroupRequest, command: Command, peer: Peer) -> Command:
        """345: nothing of a group that is offline."""
        watch = self.consumers.find_subscription(header.group, header.topic)
        body: dict[str, Any] = {"group": header.group, "topic": header.topic}
        if watch is not None:
            body["subscriptionData"] = bodies.subscription_object(watch.subscription)
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def forbidden(
        self, header: GroupForbiddenRequest, command: Command, peer: Peer
    ) -> Command | Postponed:
        """353: changes it when `readable` is there, and says how it is. A change is answered when
        it is on disk, and on those of the slaves that count."""
        group, topic, readable = header.group, header.topic, header.is_readable
        if readable is False:  # what is gone may be let again
            self.topics.require(topic)
            if self.groups.get_or_create(group) is None:
                self.groups.check_exists(group)
        may_read = self.groups.can_read(group, topic) if readable is None else readable
        body = fastjson.dumps({"group": group, "readable": may_read, "topic": topic})
        answer = Command(ResponseCode.SUCCESS, remark="", body=body)
        if readable is None:
            return answer
        self.groups.set_forbidden(group, topic, is_forbidden=not readable)
        log.info(
            "%s: group %s %s read %s", peer.remote, group, "may" if readable else "may not", topic
        )
        write = self.groups.document.prepare_write()
        assert write is not None, "it has just changed"

        def steps() -> WorkItem[Announced]:
            yield write
            return Announced(answer)

        return Postponed(steps())

    @property
    def _address(self) -> str:
        host = self.settings.host
        return f"{self.settings.broker.broker_ip1 or host.address}:{host.port}"
