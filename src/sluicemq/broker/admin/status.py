"""Handlers for requests of tools about the state of the broker, its topics and its clients.

They answer UPDATE_BROKER_CONFIG (25), GET_BROKER_CONFIG (26), GET_BROKER_RUNTIME_INFO (28),
GET_TOPIC_STATS_INFO (202), GET_CONSUMER_CONNECTION_LIST (203), GET_PRODUCER_CONNECTION_LIST (204),
GET_CONSUME_STATS (208) and QUERY_TOPIC_CONSUME_BY_WHO (300).

The runtime information (28) has every key that RocketMQ's tools read (spec/admin.md §3). It has the
numbers of thread pools because the command clusterList fails without them. This broker has no such
pools, so their queues are empty and their wait times 0.

Rates are computed from samples: the broker samples its counters once a second (`CounterHistory`),
and a rate over the last 10, 60 or 600 seconds is the difference of two samples. The code that
increments a counter does nothing else.
"""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Final

from sluicemq.acl.loading import RuleSource
from sluicemq.broker.admin.retention import UnreadMonitor
from sluicemq.broker.consume.clients import Consumers, Member
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull import PullHandlers
from sluicemq.broker.context import BrokerComponent, BrokerContext
from sluicemq.broker.group_commit import LATENCY_BOUNDS_S
from sluicemq.broker.offsets import UnfinishedMessages
from sluicemq.broker.produce.producers import Producers
from sluicemq.broker.produce.send import SendHandlers
from sluicemq.broker.registration import parse_credentials
from sluicemq.config import Part, change_settings, edit_properties, settings_text
from sluicemq.errors import ConfigurationError, RequestError
from sluicemq.files import edit_text, read_text
from sluicemq.model.topic import DataVersion, MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import VERSION, Command
from sluicemq.wire.headers import (
    ConsumerGroupRequest,
    GetBrokerConfigResponse,
    GetConsumeStatsRequest,
    GetProducerConnectionsRequest,
    TopicRequest,
)

log = logging.getLogger(__name__)

WINDOWS_S: Final = (10, 60, 600)
"""The times over which the runtime information has rates."""
VERSION_NAME: Final = "V5_3_3"
"""The version of RocketMQ with which this broker is compatible."""
_POOLS: Final = (
    ("send", 10_000),
    ("pull", 100_000),
    ("litePull", 100_000),
    ("query", 20_000),
    ("ack", 100_000),
)
"""RocketMQ's thread pools: the name in keys, and the capacity that RocketMQ's broker reports."""
_LATENCY_BUCKETS: Final = (
    ("<=0ms", 0.0),
    ("0~10ms", 0.01),
    ("10~50ms", 0.05),
    ("50~100ms", 0.1),
    ("100~200ms", 0.2),
    ("200~500ms", 0.5),
    ("500ms~1s", 1.0),
    ("1~2s", 2.0),
    ("2~3s", 3.0),
    ("3~4s", 4.0),
    ("4~5s", 5.0),
    ("5~10s", 10.0),
    ("10s~", float("inf")),
)
"""RocketMQ's buckets of latencies: the name, and the upper bound in seconds."""
_FEATURES: Final = "sluiceBulk"
"""The extensions of SluiceMQ, for clients that look for them (design/0001)."""
UNCHANGEABLE_SETTINGS: Final = frozenset({"brokerConfigPath"})
"""The settings that UPDATE_BROKER_CONFIG must not change."""


class CounterHistory:
    """Samples of named counters, taken at regular times.

    A counter takes memory only for the samples at which its value had changed.
    """

    __slots__ = ("_histories", "_times")

    def __init__(self, count: int = WINDOWS_S[-1] + 1) -> None:
        """Keep the last `count` samples."""
        self._times: deque[float] = deque(maxlen=count)
        self._histories: dict[str, deque[tuple[float, int]]] = {}

    def sample(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Store a sample of `counters`, values by name, at the monotonic time `now_s`.

        Counters that are missing in `counters` are forgotten. For `compute_rate`, the caller must
        take a sample once a second.
        """
        self._times.append(now_s)
        histories = self._histories
        oldest_s = self._times[0]
        for name, value in counters.items():
            history = histories.get(name)
            if history is None:
                histories[name] = deque([(now_s, value)])
            elif history[-1][1] != value:
                history.append((now_s, value))
                while history[1][0] <= oldest_s:
                    history.popleft()
        if len(histories) > len(counters):
            for name in histories.keys() - counters.keys():
                del histories[name]

    def compute_rate(self, name: str, window_s: int) -> float:
        """Return the rate of a counter per second, over the last `window_s` samples.

        Return 0.0 for an unknown counter, and before there are two samples.
        """
        history = self._histories.get(name)
        if history is None or len(self._times) < 2:
            return 0.0
        begin_s = self._times[max(0, len(self._times) - 1 - window_s)]
        index = bisect_right(history, begin_s, key=itemgetter(0))
        counted = history[-1][1] - (history[index - 1][1] if index else 0)
        seconds = self._times[-1] - begin_s
        return counted / seconds if seconds > 0 else 0.0

    def get_newest_sample(self, name: str) -> tuple[float, int | None]:
        """Return the time of the last sample, and the value of the counter in it.

        The time is 0.0 before the first sample, and the value None for an unknown counter.
        """
        history = self._histories.get(name)
        time_s = self._times[-1] if self._times else 0.0
        return time_s, history[-1][1] if history else None

    def get_oldest_sample(self, name: str) -> tuple[float, int]:
        """Return the time of the oldest sample, and the value of the counter in it.

        The value is 0 if the counter did not exist then. There must be at least one sample.
        """
        history = self._histories.get(name, ())
        index = bisect_right(history, self._times[0], key=itemgetter(0))
        return self._times[0], history[index - 1][1] if index else 0

    def format_rates(self, *names: str) -> str:
        """Return the rates of the sum of several counters as text.

        The text has three numbers, over 10, 60 and 600 seconds, as RocketMQ formats them.
        """
        return " ".join(
            str(sum(self.compute_rate(name, window_s) for name in names)) for window_s in WINDOWS_S
        )


class MidnightCounters:
    """The values of counters at the last two midnights in UTC.

    The runtime information (28) contains them as "today morning" and "yesterday morning".
    """

    __slots__ = ("_day", "today_start", "yesterday_start")

    def __init__(self) -> None:
        self._day = -1
        self.today_start: dict[str, int] = {}
        """The values at the last midnight. Empty if the broker started after it."""
        self.yesterday_start: dict[str, int] = {}
        """The values at the midnight before. Empty if the broker started after it."""

    def sample(self, now_ms: int, counters: Mapping[str, int]) -> None:
        """Store the values of `counters` if the day has changed since the last call."""
        day = now_ms // 86_400_000
        if day != self._day:
            self.yesterday_start = self.today_start if self._day >= 0 else {}
            self.today_start = dict(counters) if self._day >= 0 else {}
            self._day = day


PERIODS: Final = (("statsMinute", 10, 7), ("statsHour", 600, 7), ("statsDay", 3600, 25))
"""The periods of VIEW_BROKER_STATS_DATA (315).

For each: its name in the answer, the seconds between two samples, and the number of samples.
"""
CollectCounters = Callable[[], Mapping[str, int]]
"""A function that returns the present values of all counters."""


class PeriodCounters:
    """Samples of counters during the last minute, hour and day.

    They are taken every ten seconds, ten minutes and hour. A counter takes memory only for the
    samples at which its value had changed.
    """

    def __init__(self) -> None:
        self._histories = {name: CounterHistory(count) for name, _, count in PERIODS}
        self._next_s = dict.fromkeys(self._histories, float("-inf"))

    def sample(self, now_s: float, counters: CollectCounters) -> None:
        """Take the samples that are due at the monotonic time `now_s`. Call it once a second.

        `counters` is called only if a sample is due.
        """
        due = [period for period in PERIODS if now_s >= self._next_s[period[0]]]
        if due:
            values = counters()
            for name, interval_s, _ in due:
                self._next_s[name] = now_s + interval_s
                self._histories[name].sample(now_s, values)

    def count_by_period(self, name: str) -> dict[str, tuple[int, float]] | None:
        """Return by how much a counter has grown in each period.

        The result maps the name of a period to the growth and the growth per second. Return None
        for an unknown counter.
        """
        newest_s, newest = self._histories[PERIODS[0][0]].get_newest_sample(name)
        if newest is None:
            return None
        growth_by_period = {}
        for period, history in self._histories.items():
            oldest_s, oldest = history.get_oldest_sample(name)
            seconds = newest_s - oldest_s
            # The counters of a topic start at 0 if it is deleted and created again.
            growth = max(newest - oldest, 0)
            growth_by_period[period] = (growth, growth / seconds if seconds > 0 else 0.0)
        return growth_by_period


class RuntimeInfo(BrokerComponent):
    """The runtime information and the counters of a broker, collected from its components."""

    def __init__(
        self,
        context: BrokerContext,
        *,
        send: SendHandlers,
        pull: PullHandlers,
        polls: LongPolls,
        rates: CounterHistory,
        midnight_counters: MidnightCounters,
        extra_collectors: Collection[Callable[[], dict[str, str]]],
    ) -> None:
        """`extra_collectors` return further entries of the runtime information."""
        super().__init__(context)
        self.send = send
        self.pull = pull
        self.polls = polls
        self.group_commit = context.group_commit
        self.rates = rates
        self.midnight_counters = midnight_counters
        self.extra_collectors = extra_collectors
        self.period_counters = PeriodCounters()

    def collect_statistics(self) -> dict[str, int]:
        """Return the counters that VIEW_BROKER_STATS_DATA (315) can show.

        The names have the form "NAME KEY", with RocketMQ's names, such as "TOPIC_PUT_NUMS orders".
        The key is empty for counters of the whole broker: "BROKER_PUT_NUMS ".
        """
        found = {
            "BROKER_PUT_NUMS ": self.topics.deleted_topic_totals[0],
            "BROKER_GET_NUMS ": 0,
            "BROKER_ACK_NUMS ": 0,
        }
        for topic in self.topics:
            if topic.messages_in:
                found["BROKER_PUT_NUMS "] += topic.messages_in
                found[f"TOPIC_PUT_NUMS {topic.name}"] = topic.messages_in
                found[f"TOPIC_PUT_SIZE {topic.name}"] = topic.bytes_in
        for (name, group), delivered in self.pull.deliveries.items():
            if delivered.messages_out:
                found["BROKER_GET_NUMS "] += delivered.messages_out
                found[f"GROUP_GET_NUMS {name}@{group}"] = delivered.messages_out
                found[f"GROUP_GET_SIZE {name}@{group}"] = delivered.bytes_out
            if delivered.acknowledged_count:
                found["BROKER_ACK_NUMS "] += delivered.acknowledged_count
                found[f"GROUP_ACK_NUMS {name}@{group}"] = delivered.acknowledged_count
            if delivered.sent_back_count:
                found[f"SNDBCK_PUT_NUMS {name}@{group}"] = delivered.sent_back_count
        return found

    def collect_counters(self) -> dict[str, int]:
        """Return the counters of rates and daily sums, which are sampled once a second.

        The names are "put", "put_bytes", "get" for messages stored and delivered; "found" and
        "miss" for pulls with and without messages; "in:TOPIC" and "out:TOPIC@GROUP" for messages.
        """
        found = {"found": self.pull.found_count, "miss": self.pull.missed_count}
        put, put_bytes = self.topics.deleted_topic_totals
        for topic in self.topics:
            put += topic.messages_in
            put_bytes += topic.bytes_in
            if topic.messages_in:
                found[f"in:{topic.name}"] = topic.messages_in
        got = 0
        for (name, group), delivered in self.pull.deliveries.items():
            got += delivered.messages_out
            found[f"out:{name}@{group}"] = delivered.messages_out
        return found | {"put": put, "put_bytes": put_bytes, "get": got}

    def collect_table(self) -> dict[str, str]:
        """Return all entries of the runtime information (28), as text by key."""
        from sluicemq import __version__, engine  # noqa: PLC0415 - a higher layer

        counters = self.collect_counters()
        rates = self.rates
        put = counters["put"]
        latency_counts = self.group_commit.latency_counts
        # RocketMQ's format of the distribution: `[<=0ms]:0 [0~10ms]:5 …`
        bucket_counts = [0] * len(_LATENCY_BUCKETS)
        for bound, count in zip((*LATENCY_BOUNDS_S, 10.0), latency_counts, strict=True):
            bucket = next(
                index for index, (_, limit) in enumerate(_LATENCY_BUCKETS) if bound <= limit
            )
            bucket_counts[bucket] += count
        table = {
            "brokerActive": "true",
            "brokerVersion": str(VERSION),
            "brokerVersionDesc": VERSION_NAME,
            "sluiceVersion": __version__,
            "sluiceEngine": engine.NAME,
            "sluiceFeatures": _FEATURES,
            "startAcceptSendRequestTimeStamp": "0",
            "EndTransactionQueueSize": "0",
            "EndTransactionThreadPoolQueueCapacity": "100000",
            "timerReadBehind": "0",
            "timerOffsetBehind": "0",
            "timerCongestNum": "0",
            "timerEnqueueTps": "0.0",
            "timerDequeueTps": "0.0",
            "sluiceParkedPulls": str(len(self.polls)),
            "putTps": rates.format_rates("put"),
            "getFoundTps": rates.format_rates("found"),
            "getMissTps": rates.format_rates("miss"),
            "getTotalTps": rates.format_rates("found", "miss"),
            "getTransferredTps": rates.format_rates("get"),
            "getTransferedTps": rates.format_rates("get"),  # mqadmin 4.9 reads this spelling
            "putMessageTimesTotal": str(put),
            "putMessageFailedTimes": str(self.send.failure_count),
            "putMessageSizeTotal": str(counters["put_bytes"]),
            "putMessageAverageSize": str(counters["put_bytes"] / put if put else 0.0),
            "putMessageEntireTimeMax": str(round(_quantile_s(latency_counts, 1.0) * 1000)),
            "getMessageEntireTimeMax": "0",
            "putMessageDistributeTime": "".join(
                f"[{name}]:{count} "
                for (name, _), count in zip(_LATENCY_BUCKETS, bucket_counts, strict=True)
            ),
            "putLatency99": f"{_quantile_s(latency_counts, 0.99) * 1000:.2f}",
            "putLatency999": f"{_quantile_s(latency_counts, 0.999) * 1000:.2f}",
        }
        for name, capacity in _POOLS:
            table[f"{name}ThreadPoolQueueSize"] = "0"
            table[f"{name}ThreadPoolQueueCapacity"] = str(capacity)
            table[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        midnights = self.midnight_counters
        for word, name in (("Put", "put"), ("Get", "get")):
            table[f"msg{word}TotalYesterdayMorning"] = str(midnights.yesterday_start.get(name, 0))
            table[f"msg{word}TotalTodayMorning"] = str(midnights.today_start.get(name, 0))
            table[f"msg{word}TotalTodayNow"] = str(counters[name])
        for collect in self.extra_collectors:
            table |= collect()
        return table | self.store.runtime_info()


def _quantile_s(counts: list[int], share: float) -> float:
    """Return a quantile of latencies in seconds, as the upper bound of its bucket.

    `counts` are those of `GroupCommit.latency_counts`, and `share` is the quantile, from 0 to 1.
    The last bucket has no bound; it counts as 10 s. Return 0.0 if there are no latencies.
    """
    wanted = sum(counts) * share
    reached = 0
    for bound, count in zip((*LATENCY_BOUNDS_S, 10.0), counts, strict=True):
        reached += count
        if count and reached >= wanted:
            return bound
    return 0.0


class StatusHandlers(BrokerComponent):
    """Request handlers for the state of the broker, its topics and its clients.

    They answer UPDATE_BROKER_CONFIG (25), GET_BROKER_CONFIG (26), GET_BROKER_RUNTIME_INFO (28),
    GET_TOPIC_STATS_INFO (202), GET_CONSUMER_CONNECTION_LIST (203), GET_PRODUCER_CONNECTION_LIST
    (204), GET_CONSUME_STATS (208) and QUERY_TOPIC_CONSUME_BY_WHO (300).
    """

    def __init__(
        self,
        context: BrokerContext,
        *,
        consumers: Consumers,
        producers: Producers,
        runtime: RuntimeInfo,
        rates: CounterHistory,
        unread_monitor: UnreadMonitor,
        unfinished: Callable[[str, str, int], UnfinishedMessages],
    ) -> None:
        """`unfinished(group, topic, queue_id)` returns the unfinished messages of a group."""
        super().__init__(context)
        self.consumers = consumers
        self.producers = producers
        self.runtime = runtime
        self.rates = rates
        self.unread_monitor = unread_monitor
        self.unfinished = unfinished
        self.files = context.files
        self.config_version = DataVersion(0, self.clock.now_ms())
        """The version of the settings, which changes with each UPDATE_BROKER_CONFIG."""

    # ---------------------------------------------------------------------------- the broker

    def change_config(self, command: Command, peer: Peer) -> Command:
        """Answer UPDATE_BROKER_CONFIG (25): change settings and write them to the broker's file.

        The remark of the answer names the settings that take effect at the next start, and keys
        that have no effect. Raises RequestError if a setting is invalid or must not be changed, or
        if no key of the request has an effect.
        """
        settings = self.settings
        try:
            change = change_settings(
                settings.in_force,
                settings.at_next_start,
                bytes(command.body).decode("utf-8", "replace"),
                UNCHANGEABLE_SETTINGS,
            )
            if change.pending:
                # Reject settings with which the broker could not start the next time.
                from sluicemq.net.openssl import load_server_context  # noqa: PLC0415 - rarely needed

                config = change.at_next_start[Part.BROKER]
                parse_credentials(config.inner_credentials)
                load_server_context(config)
                if config.acl_enable:
                    source = RuleSource.from_config(self.files, config)
                    source.load(source.read_files())
        except ConfigurationError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        path = settings.broker.config_path
        if path and change.entries:
            old = read_text(self.files, path) or ""
            edit_text(self.files, path, edit_properties(old, change.entries))
        settings.apply(change)
        self.config_version = DataVersion(self.config_version.counter + 1, self.clock.now_ms())
        names = ", ".join(change.entries) or "nothing"
        log.info("%s changed the configuration: %s", peer.remote, names)
        for warning in change.warnings:
            log.warning("%s", warning)
        return Command(ResponseCode.SUCCESS, remark=change.remark)

    def get_config(self, command: Command, peer: Peer) -> Command:
        """Answer GET_BROKER_CONFIG (26) with all settings as lines of `key=value`."""
        text = settings_text(self.settings.in_force, self.settings.at_next_start)
        text += "filterServerNums=0\n"  # exportConfigs of mqadmin 4.9 fails without this line
        version = tables.encode_data_version(self.config_version).decode()
        fields = encode_header(GetBrokerConfigResponse(version=version))
        return Command(ResponseCode.SUCCESS, fields, text.encode())

    def get_runtime_info(self, command: Command, peer: Peer) -> Command:
        """Answer GET_BROKER_RUNTIME_INFO (28) with the runtime information."""
        table = self.runtime.collect_table()
        return Command(ResponseCode.SUCCESS, body=bodies.encode_kv_table(table))

    # --------------------------------------------------------------------- topics and groups

    def get_topic_stats(self, header: TopicRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_TOPIC_STATS_INFO (202) with the offsets and last store time of each queue.

        Raises RequestError if the topic does not exist.
        """
        topic = self.topics.require(header.topic)
        queues = {}
        for queue_id in range(topic.queues):
            low, high = self.store.queue_offsets(topic.name, queue_id)
            time_ms = self.store.reader.store_time_ms(topic.name, queue_id, high - 1) if high else 0
            queue = MessageQueue(topic.name, self.settings.broker.broker_name, queue_id)
            queues[queue] = bodies.QueueStats(low, high, max(time_ms, 0))
        stats = bodies.TopicStats(queues, self.rates.compute_rate(f"in:{topic.name}", 60))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_stats(stats))

    def get_consume_stats(
        self, header: GetConsumeStatsRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer GET_CONSUME_STATS (208) with the progress of a group.

        The request names one topic, or several. Without any, the answer covers the topics of which
        the group has offsets, and those to which its online members subscribe. SluiceMQ adds the
        messages in flight to RocketMQ's fields.
        """
        names = set(filter(None, (header.topic_list or "").split(";")))
        if header.topic:
            names.add(header.topic)
        if not names:
            names = self.offsets.topics_of(header.group)
            group = self.consumers.groups.get(header.group)
            names |= set(group.subscriptions) if group is not None else set()
        stats = self.collect_consume_stats(header.group, sorted(names))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_consume_stats(stats))

    def collect_consume_stats(self, group: str, names: Sequence[str]) -> bodies.ConsumeStats:
        """Return the progress of a group in the queues of the topics `names`.

        Topics that do not exist are logged and left out. The rate is that of all `names`, over the
        last minute.
        """
        queues: dict[MessageQueue, bodies.QueueProgress] = {}
        for name in names:
            topic = self.topics.get(name)
            if topic is None:
                log.info("group %s has offsets of topic %s, which does not exist", group, name)
                continue
            for queue_id in range(topic.config.read_queues):
                end = self.store.queue_offsets(name, queue_id)[1]
                known = self.offsets.committed(group, name, queue_id)
                expiring = self.unread_monitor.find_expiring(name, queue_id, known)
                committed = max(known, 0)
                time_ms = self.store.reader.store_time_ms(name, queue_id, committed - 1)
                start, in_flight, extra = self.unfinished(group, name, queue_id)
                fetched = max(start, committed, self.offsets.fetched(group, name, queue_id))
                extra -= max(start, 0) - committed
                queue = MessageQueue(name, self.settings.broker.broker_name, queue_id)
                queues[queue] = bodies.QueueProgress(
                    broker_offset=end,
                    consumer_offset=committed,
                    last_time_ms=max(time_ms, 0),
                    pull_offset=fetched,
                    messages_at_risk=0 if expiring is None else expiring.message_count,
                    loss_time_ms=0 if expiring is None else expiring.earliest_deletion_ms,
                    in_flight=in_flight,
                    extra=extra,
                )
        rate = sum(self.rates.compute_rate(f"out:{name}@{group}", 60) for name in names)
        return bodies.ConsumeStats(queues, rate)

    def list_groups_of_topic(self, header: TopicRequest, command: Command, peer: Peer) -> Command:
        """Answer QUERY_TOPIC_CONSUME_BY_WHO (300) with the groups that consume a topic.

        These are the groups that subscribe to the topic now, and those that have offsets of it.
        """
        name = header.topic
        groups = self.consumers.groups_subscribed_to(name) | self.offsets.groups_of(name)
        return Command(ResponseCode.SUCCESS, body=bodies.encode_group_list(sorted(groups)))

    # -------------------------------------------------------------------------------- clients

    def list_consumer_connections(
        self, header: ConsumerGroupRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer GET_CONSUMER_CONNECTION_LIST (203) with the online members of a group.

        Raises RequestError if no member is online.
        """
        name = header.group
        group = self.consumers.groups.get(name)
        if group is None:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online"
            )
        answer = bodies.ConsumerConnections(
            tuple(_describe_connection(member) for member in group.members.values()),
            group.consume_type,
            group.message_model,
            group.consume_from_where,
            {topic: entry.subscription for topic, entry in group.subscriptions.items()},
        )
        return Command(ResponseCode.SUCCESS, body=bodies.encode_consumer_connections(answer))

    def list_producer_connections(
        self, header: GetProducerConnectionsRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer GET_PRODUCER_CONNECTION_LIST (204) with the online producers of a group.

        Raises RequestError if none is online.
        """
        name = header.group
        members = self.producers.groups.get(name)
        if members is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        body = bodies.encode_producer_connections(
            _describe_connection(member) for member in members.values()
        )
        return Command(ResponseCode.SUCCESS, body=body)


def _describe_connection(member: Member) -> bodies.Connection:
    """Return a member as the answers to tools contain it."""
    return bodies.Connection(
        member.client_id, str(member.peer.remote), member.language, member.version
    )
