"""Handlers for requests of tools about counters, producers, and groups of the whole broker.

They answer VIEW_BROKER_STATS_DATA (315), GET_BROKER_CONSUME_STATS (317), GET_ALL_PRODUCER_INFO
(328), QUERY_TOPICS_BY_CONSUMER (343), QUERY_SUBSCRIPTION_BY_CONSUMER (345) and
UPDATE_AND_GET_GROUP_FORBIDDEN (353).

RocketMQ's brokers update their statistics with each message. This broker samples its counters
(`status.PeriodCounters`), and the count of a period is the newest sample minus the oldest of that
period (spec/admin.md §4).
"""

import logging
from typing import Any, Final

from sluicemq.broker.admin.status import RuntimeInfo, StatusHandlers
from sluicemq.broker.consume.clients import Consumers, Producers
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Announced, Postponed
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

_PERIOD_SECONDS: Final = {"statsMinute": 60, "statsHour": 3600, "statsDay": 86_400}
"""The length of each period of VIEW_BROKER_STATS_DATA (315)."""
UNMEASURED_REASONS: Final = {
    "TOPIC_PUT_LATENCY": "latencies are measured for the whole broker, see putLatency99 of "
    "brokerStatus and sluicemq_* of its metrics.",
    "GROUP_GET_LATENCY": "a read is a slice of the mapped log and is not measured by group.",
    "GROUP_CK_NUMS": "checkpoints are counted with their messages, see GROUP_GET_NUMS.",
    "DLQ_PUT_NUMS": "see TOPIC_PUT_NUMS of the topic %DLQ%GROUP.",
    "QUEUE_GET_NUMS": "reads are counted by topic and group, see GROUP_GET_NUMS.",
    "QUEUE_GET_SIZE": "reads are counted by topic and group, see GROUP_GET_SIZE.",
    "QUEUE_PUT_SIZE": "bytes are counted by topic, see TOPIC_PUT_SIZE.",
}
"""The counters of RocketMQ that this broker does not have: why, or what to use instead."""


class StatisticsHandlers(BrokerComponent):
    """Request handlers for counters, producers, and groups of the whole broker.

    They answer VIEW_BROKER_STATS_DATA (315), GET_BROKER_CONSUME_STATS (317), GET_ALL_PRODUCER_INFO
    (328), QUERY_TOPICS_BY_CONSUMER (343), QUERY_SUBSCRIPTION_BY_CONSUMER (345) and
    UPDATE_AND_GET_GROUP_FORBIDDEN (353).
    """

    def __init__(
        self,
        context: BrokerContext,
        *,
        consumers: Consumers,
        producers: Producers,
        runtime: RuntimeInfo,
        status: StatusHandlers,
    ) -> None:
        super().__init__(context)
        self.consumers = consumers
        self.producers = producers
        self.runtime = runtime
        self.status = status

    def view_counter(self, header: StatisticsRequest, command: Command, peer: Peer) -> Command:
        """Answer VIEW_BROKER_STATS_DATA (315) with the growth of one counter.

        `header.name` is RocketMQ's name of the counter. `header.key` is what it counts for, such as
        a topic; the cluster name means the whole broker. The body has an object for each of the
        periods statsMinute, statsHour and statsDay:

            sum      the growth of the counter in the period
            tps      the growth per second
            avgpt    bytes per message for a counter of bytes, else 1; 0 if nothing was counted

        Raises RequestError for an unknown counter. The remark says what to use instead, if known.
        """
        key = "" if header.key == self.settings.broker.cluster_name else header.key
        if header.name == "QUEUE_PUT_NUMS":
            growth_by_period = self._count_messages_of_queue(header.key)
        else:
            growth_by_period = self.runtime.period_counters.count_by_period(f"{header.name} {key}")
        if growth_by_period is None:
            remark = f"The stats <{header.name}> <{header.key}> not exist"
            if header.name in UNMEASURED_REASONS:
                remark += f": {UNMEASURED_REASONS[header.name]}"
            raise RequestError(ResponseCode.SYSTEM_ERROR, remark)
        messages_by_period = growth_by_period
        if header.name.endswith("_SIZE"):
            name = header.name.replace("_SIZE", "_NUMS")
            messages_by_period = self.runtime.period_counters.count_by_period(f"{name} {key}") or {}
        body = {}
        for period, (growth, rate) in growth_by_period.items():
            message_count = messages_by_period.get(period, (0, 0.0))[0]
            body[period] = {
                "avgpt": growth / message_count if message_count else 0.0,
                "sum": growth,
                "tps": rate,
            }
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def _count_messages_of_queue(self, key: str) -> dict[str, tuple[int, float]] | None:
        """Return (messages stored in a queue, messages per second) for each period.

        `key` is `topic@queueId`. Return None if there is no such queue. The offsets at the
        beginning of the periods are searched by time. So no counter is needed, and the numbers are
        also right when the broker has just been restarted.
        """
        name, _, queue_text = key.rpartition("@")
        topic, queue_id = self.topics.get(name), natural(queue_text)
        if topic is None or queue_id is None or queue_id >= topic.queues:
            return None
        store, now_ms = self.status.store, self.status.clock.now_ms()
        end, count_by_period = store.queue_offsets(name, queue_id)[1], {}
        for period, seconds in _PERIOD_SECONDS.items():
            since_ms = now_ms - 1000 * seconds
            first = store.reader.offset_by_time(name, int(queue_id), since_ms) if end else 0
            count = max(end - first, 0)
            count_by_period[period] = (count, count / seconds)
        return count_by_period

    def find_topics_by_group(self, *, ordered: bool) -> dict[str, list[str]]:
        """Return for each existing group the topics of which it has committed offsets.

        Left out are topics that do not exist, topics to which an online group does not subscribe,
        and groups without a topic. If `ordered`, only topics in strict order are returned. The
        topics of a group are sorted.
        """
        topics_by_group: dict[str, list[str]] = {}
        for name, groups in sorted(self.offsets.groups_by_topic().items()):
            topic = self.topics.get(name)
            if topic is None or (ordered and not topic.config.order):
                continue
            for group in groups:
                online = self.consumers.groups.get(group)
                if group in self.groups and (online is None or name in online.subscriptions):
                    topics_by_group.setdefault(group, []).append(name)
        return topics_by_group

    def get_consume_stats_of_broker(
        self, header: GetConsumeStatsOfBrokerRequest, command: Command, peer: Peer
    ) -> Postponed:
        """Answer GET_BROKER_CONSUME_STATS (317) with the progress of all groups in their topics.

        The answer also has two totals over all groups: the messages that are not committed, and
        those of them that were pulled. With `header.ordered`, only topics in strict order count.
        The work is done in steps, one for each group.
        """

        def steps() -> WorkItem[Command]:
            stats_by_group, lag_count, in_flight_count = [], 0, 0
            for group, names in sorted(self.find_topics_by_group(ordered=header.ordered).items()):
                group_stats = [self.status.collect_consume_stats(group, [name]) for name in names]
                for queue in (queue for stats in group_stats for queue in stats.queues.values()):
                    lag_count += queue.broker_offset - queue.consumer_offset
                    in_flight_count += queue.pull_offset - queue.consumer_offset
                stats_by_group.append({group: group_stats})
                yield None
            answer = bodies.ConsumeStatsOfBroker(
                self._address, stats_by_group, lag_count, in_flight_count
            )
            body = bodies.encode_consume_stats_of_broker(answer)
            return Command(ResponseCode.SUCCESS, body=body)

        return Postponed(steps())

    def list_producers(self, command: Command, peer: Peer) -> Command:
        """Answer GET_ALL_PRODUCER_INFO (328) with the online producers of all groups.

        The body is `{"data": {"<group>": [{"clientId": …, "language": …, "lastUpdateTimestamp": …,
        "remoteIP": …, "version": …}]}}`. The time stamp is that of the last heartbeat, in ms.
        """
        clock = self.status.clock
        # Heartbeats are noted by the monotonic clock. This is the wall-clock time of its zero.
        started_ms = clock.now_ms() - round(clock.monotonic_s() * 1000)
        producers_by_group = {
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
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps({"data": producers_by_group}))

    def list_topics_of_group(
        self, header: GetGroupConfigRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer QUERY_TOPICS_BY_CONSUMER (343) with the topics of which a group has offsets."""
        names = sorted(self.offsets.topics_of(header.group))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_list(names, self._address))

    def get_subscription(self, header: TopicGroupRequest, command: Command, peer: Peer) -> Command:
        """Answer QUERY_SUBSCRIPTION_BY_CONSUMER (345) with a group's subscription to a topic.

        The answer has no subscription if the group is offline or does not subscribe to the topic.
        """
        entry = self.consumers.find_subscription(header.group, header.topic)
        body: dict[str, Any] = {"group": header.group, "topic": header.topic}
        if entry is not None:
            body["subscriptionData"] = bodies.subscription_object(entry.subscription)
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def update_forbidden(
        self, header: GroupForbiddenRequest, command: Command, peer: Peer
    ) -> Command | Postponed:
        """Answer UPDATE_AND_GET_GROUP_FORBIDDEN (353): allow or forbid a group to read a topic.

        Without `readable`, the request changes nothing. The answer says whether the group may read
        the topic. A change is logged. Its answer is sent when the change is on disk, here and on
        the slaves that must confirm changes.

        Raises RequestError if the request forbids reading and the topic or group does not exist. A
        request that allows reading is accepted for any names, so that a rule about a deleted topic
        or group can be removed.
        """
        group, topic, readable = header.group, header.topic, header.is_readable
        if readable is False:
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
            "%s: group %s %s read topic %s",
            peer.remote,
            group,
            "may" if readable else "may not",
            topic,
        )
        write = self.groups.document.prepare_write()
        assert write is not None, "the document has just changed"

        def steps() -> WorkItem[Announced]:
            yield write
            return Announced(answer)

        return Postponed(steps())

    @property
    def _address(self) -> str:
        """The address that the broker advertises, as host:port."""
        host = self.settings.host
        return f"{self.settings.broker.broker_ip1 or host.address}:{host.port}"
