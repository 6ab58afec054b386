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
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import Announced, Postponed
from sluicemq.broker.produce.producers import Producers
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
        """Create the handlers.

        `consumers` and `producers` have the online clients by group, `runtime` samples the
        counters, and `status` collects the progress of a group in a topic.
        """
        super().__init__(context)
        self.consumers = consumers
        self.producers = producers
        self.runtime = runtime
        self.status = status

    def view_counter(self, header: StatisticsRequest, command: Command, peer: Peer) -> Command:
        """Answer VIEW_BROKER_STATS_DATA (315) with the growth of one counter.

        `header.name` is RocketMQ's name of the counter. `header.key` says for what it counts, for
        example a topic. The name of the cluster means the whole broker. The body has an object for
        each of the periods statsMinute, statsHour and statsDay:

            sum      the growth of the counter in the period
            tps      the growth per second
            avgpt    bytes per message for a counter of bytes, else 1; 0 if nothing was counted

        Raises RequestError for an unknown counter. The remark says what to use instead, if known.
        """
        if header.name == "QUEUE_PUT_NUMS":
            growth_by_period = self._count_messages_of_queue(header.key)
        else:
            growth_by_period = self._count_by_period(header.name, header.key)
        if growth_by_period is None:
            raise _make_unknown_counter_error(header)

        # A counter of bytes has a counter of the same messages, for the bytes per message.
        messages_by_period = growth_by_period
        if header.name.endswith("_SIZE"):
            message_counter = header.name.replace("_SIZE", "_NUMS")
            messages_by_period = self._count_by_period(message_counter, header.key) or {}

        body = {}
        for period, (growth, rate_per_s) in growth_by_period.items():
            message_count, _ = messages_by_period.get(period, (0, 0.0))
            average = growth / message_count if message_count else 0.0
            body[period] = {"avgpt": average, "sum": growth, "tps": rate_per_s}
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def _count_by_period(self, name: str, key: str) -> dict[str, tuple[int, float]] | None:
        """Return (growth, growth per second) of a sampled counter for each period, by its name.

        `key` is what it counts for; the cluster name means the whole broker. Return None for an
        unknown counter.
        """
        is_whole_broker = key == self.settings.broker.cluster_name
        sampled_key = "" if is_whole_broker else key
        return self.runtime.period_counters.count_by_period(f"{name} {sampled_key}")

    def _count_messages_of_queue(self, key: str) -> dict[str, tuple[int, float]] | None:
        """Return (messages stored in a queue, messages per second) for each period, by its name.

        `key` is `topic@queueId`. Return None if there is no such queue. The count of a period is
        the end of the queue minus the offset at which the period began, which is searched by time.
        So no counter is needed, and the numbers are also right when the broker has just been
        restarted.
        """
        topic_name, _, queue_text = key.rpartition("@")
        topic = self.topics.get(topic_name)
        queue_id = natural(queue_text)
        if topic is None or queue_id is None or queue_id >= topic.queues:
            return None

        now_ms = self.status.clock.now_ms()
        growth_by_period = {}
        for period, period_s in _PERIOD_SECONDS.items():
            period_start_ms = now_ms - 1000 * period_s
            message_count = self._count_stored_since(topic_name, queue_id, period_start_ms)
            growth_by_period[period] = (message_count, message_count / period_s)
        return growth_by_period

    def _count_stored_since(self, topic: str, queue_id: int, since_ms: int) -> int:
        """Return the number of messages that were stored in a queue since a time."""
        store = self.status.store
        _, queue_end = store.queue_offsets(topic, queue_id)
        if queue_end == 0:
            return 0
        offset_since = store.reader.offset_by_time(topic, queue_id, since_ms)
        # The offset found by time may be beyond the end that was read before.
        return max(queue_end - offset_since, 0)

    def find_topics_by_group(self, *, ordered: bool) -> dict[str, list[str]]:
        """Return, by existing group, the sorted topics for which it has committed offsets.

        Topics that do not exist, and topics to which an online group does not subscribe, are left
        out. Groups without a topic are left out. With `ordered`, only topics in strict order are
        returned.
        """
        topics_by_group: dict[str, list[str]] = {}
        for topic_name, groups in sorted(self.offsets.groups_by_topic().items()):
            topic = self.topics.get(topic_name)
            if topic is None or (ordered and not topic.config.order):
                continue
            for group in groups:
                online_group = self.consumers.groups.get(group)
                may_consume = online_group is None or topic_name in online_group.subscriptions
                if group in self.groups and may_consume:
                    topics_by_group.setdefault(group, []).append(topic_name)
        return topics_by_group

    def get_consume_stats_of_broker(
        self, header: GetConsumeStatsOfBrokerRequest, command: Command, peer: Peer
    ) -> Postponed:
        """Answer GET_BROKER_CONSUME_STATS (317) with the progress of all groups in their topics.

        The answer also has two totals over all groups: the number of messages that are not
        committed, and how many of them were pulled. With `header.ordered`, only topics in strict
        order count. Return a Postponed, which works in steps, one for each group.
        """

        def steps() -> WorkItem[Command]:
            topics_by_group = self.find_topics_by_group(ordered=header.ordered)
            stats_by_group = []
            lag_count = 0
            in_flight_count = 0
            for group, topics in sorted(topics_by_group.items()):
                stats_of_topics = []
                for topic in topics:
                    topic_stats = self.status.collect_consume_stats(group, [topic])
                    stats_of_topics.append(topic_stats)
                    for queue in topic_stats.queues.values():
                        lag_count += queue.broker_offset - queue.consumer_offset
                        in_flight_count += queue.pull_offset - queue.consumer_offset
                stats_by_group.append({group: stats_of_topics})
                yield None  # ends a step
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
        # Heartbeats are noted by the monotonic clock: add the wall-clock time of its zero.
        monotonic_zero_ms = clock.now_ms() - round(clock.monotonic_s() * 1000)
        producers_by_group: dict[str, list[dict[str, Any]]] = {}
        for group, members in self.producers.groups.items():
            producers_by_group[group] = [
                {
                    "clientId": member.client_id,
                    "language": member.language,
                    "lastUpdateTimestamp": monotonic_zero_ms + round(member.heartbeat_s * 1000),
                    "remoteIP": f"/{member.peer.remote}",
                    "version": member.version,
                }
                for member in members.values()
            ]
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
        group_subscription = self.consumers.find_subscription(header.group, header.topic)
        body: dict[str, Any] = {"group": header.group, "topic": header.topic}
        if group_subscription is not None:
            body["subscriptionData"] = bodies.subscription_object(group_subscription.subscription)
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def update_forbidden(
        self, header: GroupForbiddenRequest, command: Command, peer: Peer
    ) -> Command | Postponed:
        """Answer UPDATE_AND_GET_GROUP_FORBIDDEN (353): allow or forbid a group to read a topic.

        The answer says whether the group may read the topic now. If the request has no field
        `readable`, nothing is changed. A change is logged, and its answer is sent when the change
        is on disk, here and on the slaves that must confirm changes.

        Raises RequestError if reading is to be forbidden and the topic or group does not exist.
        Allowing it is accepted for any names, so that a rule about a deleted topic or group can be
        removed.
        """
        group = header.group
        topic = header.topic
        may_read = header.is_readable
        if may_read is None:
            return _make_forbidden_answer(header, may_read=self.groups.can_read(group, topic))

        # A request to allow or forbid reading.
        if not may_read:
            self.topics.require(topic)
            if self.groups.get_or_create(group) is None:
                self.groups.check_exists(group)
        self.groups.set_forbidden(group, topic, is_forbidden=not may_read)
        verb = "may" if may_read else "may not"
        log.info("%s: group %s %s read topic %s", peer.remote, group, verb, topic)

        # The answer is sent after the write.
        answer = _make_forbidden_answer(header, may_read=may_read)
        return self._answer_after_write(answer)

    def _answer_after_write(self, answer: Command) -> Postponed:
        """Return a Postponed, which writes the file of groups and then sends `answer`.

        It is sent when the slaves that must confirm changes have the file, too.
        """
        write_groups = self.groups.document.prepare_write()
        assert write_groups is not None, "the document has just changed"

        def steps() -> WorkItem[Announced]:
            yield write_groups
            return Announced(answer)

        return Postponed(steps())

    @property
    def _address(self) -> str:
        """The address that the broker advertises, as host:port."""
        host = self.settings.host
        return f"{self.settings.broker.broker_ip1 or host.address}:{host.port}"


def _make_unknown_counter_error(header: StatisticsRequest) -> RequestError:
    """Return the error for an unknown counter. It says what to use instead, if that is known."""
    remark = f"The stats <{header.name}> <{header.key}> not exist"
    if header.name in UNMEASURED_REASONS:
        remark += f": {UNMEASURED_REASONS[header.name]}"
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)


def _make_forbidden_answer(header: GroupForbiddenRequest, *, may_read: bool) -> Command:
    """Return the answer that says whether the group of a request may read its topic."""
    body = fastjson.dumps({"group": header.group, "readable": may_read, "topic": header.topic})
    return Command(ResponseCode.SUCCESS, remark="", body=body)
