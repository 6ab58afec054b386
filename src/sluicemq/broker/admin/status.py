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
from sluicemq.config import Change, Part, change_settings, edit_properties, settings_text
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
        """Store the values of all counters at the monotonic time `now_s`.

        `counters` are the values by name. Counters that are missing in it are forgotten. The caller
        must do this once a second, so that `compute_rate` is right.
        """
        self._times.append(now_s)
        histories = self._histories
        oldest_s = self._times[0]
        for name, count in counters.items():
            history = histories.get(name)
            if history is None:
                histories[name] = deque([(now_s, count)])
                continue
            _, last_count = history[-1]
            if count != last_count:
                history.append((now_s, count))
                # Keep one change at or before the oldest sample: it has the count at that time.
                while history[1][0] <= oldest_s:
                    history.popleft()
        if len(histories) > len(counters):
            for deleted_name in histories.keys() - counters.keys():
                del histories[deleted_name]

    def compute_rate(self, name: str, window_s: int) -> float:
        """Return the growth of a counter per second, over the last `window_s` samples.

        There is one sample for each second. Return 0.0 for an unknown counter, and before there are
        two samples.
        """
        history = self._histories.get(name)
        if history is None or len(self._times) < 2:
            return 0.0
        begin_s = self._times[max(0, len(self._times) - 1 - window_s)]
        growth = history[-1][1] - _find_count_at(history, begin_s)
        elapsed_s = self._times[-1] - begin_s
        return growth / elapsed_s if elapsed_s > 0 else 0.0

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
        oldest_s = self._times[0]
        return oldest_s, _find_count_at(self._histories.get(name, ()), oldest_s)

    def format_rates(self, *names: str) -> str:
        """Return the rates of the sum of several counters as text.

        The text has three numbers, over 10, 60 and 600 seconds, as RocketMQ formats them.
        """
        return " ".join(
            str(sum(self.compute_rate(name, window_s) for name in names)) for window_s in WINDOWS_S
        )


def _find_count_at(history: Sequence[tuple[float, int]], time_s: float) -> int:
    """Return the count at a time; 0 if the counter did not exist then.

    `history` has (time, count) for each change of the counter, in order.
    """
    change_count = bisect_right(history, time_s, key=itemgetter(0))
    if change_count == 0:
        return 0
    _, count = history[change_count - 1]
    return count


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
        """Store the values of `counters` if the day (in UTC) has changed since the last call.

        They become `today_start`, and the former `today_start` becomes `yesterday_start`. The first
        call stores no values, because the broker was started after the midnight of that day.
        """
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
        """Start without samples. The first call of `sample` takes one of each period."""
        self._histories = {name: CounterHistory(count) for name, _, count in PERIODS}
        self._next_s = dict.fromkeys(self._histories, float("-inf"))
        """By name of the period: the monotonic time from which its next sample is due."""

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
        shortest_period, _, _ = PERIODS[0]
        newest_s, newest_count = self._histories[shortest_period].get_newest_sample(name)
        if newest_count is None:
            return None
        growth_by_period = {}
        for period, history in self._histories.items():
            oldest_s, oldest_count = history.get_oldest_sample(name)
            # The counters of a topic start at 0 if it is deleted and created again.
            growth = max(newest_count - oldest_count, 0)
            elapsed_s = newest_s - oldest_s
            growth_per_s = growth / elapsed_s if elapsed_s > 0 else 0.0
            growth_by_period[period] = (growth, growth_per_s)
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
        """Create the collector of counters and of the runtime information of the broker.

        `send` and `pull` count messages, and `polls` has the waiting requests. `rates` and
        `midnight_counters` have earlier values of the counters. Each of `extra_collectors` returns
        further entries of the runtime information, as strings by key.
        """
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
        deleted_topics_count, _ = self.topics.deleted_topic_totals
        counters = {
            "BROKER_PUT_NUMS ": deleted_topics_count,
            "BROKER_GET_NUMS ": 0,
            "BROKER_ACK_NUMS ": 0,
        }
        for topic in self.topics:
            if topic.messages_in:
                counters["BROKER_PUT_NUMS "] += topic.messages_in
                counters[f"TOPIC_PUT_NUMS {topic.name}"] = topic.messages_in
                counters[f"TOPIC_PUT_SIZE {topic.name}"] = topic.bytes_in
        for (topic_name, group), delivered in self.pull.deliveries.items():
            key = f"{topic_name}@{group}"
            if delivered.messages_out:
                counters["BROKER_GET_NUMS "] += delivered.messages_out
                counters[f"GROUP_GET_NUMS {key}"] = delivered.messages_out
                counters[f"GROUP_GET_SIZE {key}"] = delivered.bytes_out
            if delivered.acknowledged_count:
                counters["BROKER_ACK_NUMS "] += delivered.acknowledged_count
                counters[f"GROUP_ACK_NUMS {key}"] = delivered.acknowledged_count
            if delivered.sent_back_count:
                counters[f"SNDBCK_PUT_NUMS {key}"] = delivered.sent_back_count
        return counters

    def collect_counters(self) -> dict[str, int]:
        """Return the counters of which rates and daily sums are made, as values by name.

        - "put", "put_bytes": the messages stored, and their bytes; "get": the messages delivered
        - "found", "miss": the pulls that found messages, and those that found none
        - "in:TOPIC": the messages stored in a topic
        - "out:TOPIC@GROUP": the messages of a topic that were delivered to a group
        """
        counters = {"found": self.pull.found_count, "miss": self.pull.missed_count}
        stored_count, stored_bytes = self.topics.deleted_topic_totals
        for topic in self.topics:
            stored_count += topic.messages_in
            stored_bytes += topic.bytes_in
            if topic.messages_in:
                counters[f"in:{topic.name}"] = topic.messages_in
        delivered_count = 0
        for (topic_name, group), delivered in self.pull.deliveries.items():
            delivered_count += delivered.messages_out
            counters[f"out:{topic_name}@{group}"] = delivered.messages_out
        return counters | {"put": stored_count, "put_bytes": stored_bytes, "get": delivered_count}

    def collect_table(self) -> dict[str, str]:
        """Return all entries of the answer to GET_BROKER_RUNTIME_INFO (28), as strings by key.

        Entries about things that this broker does not have, such as thread pools, are constants.
        """
        from sluicemq import __version__, engine  # noqa: PLC0415 - a higher layer

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
            "putMessageFailedTimes": str(self.send.failure_count),
            "getMessageEntireTimeMax": "0",
        }
        for pool, capacity in _POOLS:
            table[f"{pool}ThreadPoolQueueSize"] = "0"
            table[f"{pool}ThreadPoolQueueCapacity"] = str(capacity)
            table[f"{pool}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        table |= self._describe_rates()
        table |= self._describe_totals()
        table |= self._describe_latencies()
        for collect in self.extra_collectors:
            table |= collect()
        return table | self.store.runtime_info()

    def _describe_rates(self) -> dict[str, str]:
        """Return the entries with rates per second, over 10, 60 and 600 seconds."""
        rates = self.rates
        return {
            "putTps": rates.format_rates("put"),
            "getFoundTps": rates.format_rates("found"),
            "getMissTps": rates.format_rates("miss"),
            "getTotalTps": rates.format_rates("found", "miss"),
            "getTransferredTps": rates.format_rates("get"),
            "getTransferedTps": rates.format_rates("get"),  # mqadmin 4.9 reads this spelling
        }

    def _describe_totals(self) -> dict[str, str]:
        """Return the entries with the number of messages since the start, and at the midnights.

        Entries with YesterdayMorning and TodayMorning have the values at the last two midnights, or
        0 if the broker started later. Entries with TodayNow have the present values.
        """
        counters = self.collect_counters()
        stored_count = counters["put"]
        stored_bytes = counters["put_bytes"]
        average_bytes = stored_bytes / stored_count if stored_count else 0.0
        entries = {
            "putMessageTimesTotal": str(stored_count),
            "putMessageSizeTotal": str(stored_bytes),
            "putMessageAverageSize": str(average_bytes),
        }
        yesterday_start = self.midnight_counters.yesterday_start
        today_start = self.midnight_counters.today_start
        for name in ("put", "get"):
            prefix = f"msg{name.capitalize()}Total"
            entries[f"{prefix}YesterdayMorning"] = str(yesterday_start.get(name, 0))
            entries[f"{prefix}TodayMorning"] = str(today_start.get(name, 0))
            entries[f"{prefix}TodayNow"] = str(counters[name])
        return entries

    def _describe_latencies(self) -> dict[str, str]:
        """Return the entries with the latencies of sends."""
        latency_counts = self.group_commit.latency_counts
        max_ms = round(_quantile_s(latency_counts, 1.0) * 1000)
        # RocketMQ's format of the distribution: `[<=0ms]:0 [0~10ms]:5 …`
        distribution = ""
        bucket_counts = _count_by_bucket(latency_counts)
        for (bucket_name, _), count in zip(_LATENCY_BUCKETS, bucket_counts, strict=True):
            distribution += f"[{bucket_name}]:{count} "
        return {
            "putMessageEntireTimeMax": str(max_ms),
            "putMessageDistributeTime": distribution,
            "putLatency99": f"{_quantile_s(latency_counts, 0.99) * 1000:.2f}",
            "putLatency999": f"{_quantile_s(latency_counts, 0.999) * 1000:.2f}",
        }


def _count_by_bucket(latency_counts: list[int]) -> list[int]:
    """Return the number of sends in each bucket of RocketMQ's latency histogram.

    `latency_counts` has the numbers in the finer buckets of `LATENCY_BOUNDS_S`, and the last one
    without a bound.
    """
    bucket_counts = [0] * len(_LATENCY_BUCKETS)
    for bound_s, count in zip((*LATENCY_BOUNDS_S, 10.0), latency_counts, strict=True):
        for bucket, (_, bucket_bound_s) in enumerate(_LATENCY_BUCKETS):
            if bound_s <= bucket_bound_s:
                bucket_counts[bucket] += count
                break
    return bucket_counts


def _quantile_s(counts: list[int], share: float) -> float:
    """Return the latency in seconds that the share `share` of sends does not exceed.

    `share` is from 0 to 1; 0.99 is the 99th percentile. `counts` has the number of sends in each
    bucket of `LATENCY_BOUNDS_S`, and the last one without a bound. The result is the upper bound of
    a bucket; that of the last bucket is 10 s. Return 0.0 if there are no sends.
    """
    required_count = sum(counts) * share
    reached_count = 0
    for bound_s, count in zip((*LATENCY_BOUNDS_S, 10.0), counts, strict=True):
        reached_count += count
        if count and reached_count >= required_count:
            return bound_s
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
        """Create the handlers that answer questions of tools about the state of the broker.

        `consumers` and `producers` have the online clients, `runtime` and `rates` the counters, and
        `unread_monitor` the messages that are deleted soon. `unfinished(group, topic, queue_id)`
        returns the unfinished messages of a group in a queue.
        """
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

        The body of the request has lines of `key=value`. The remark of the answer names the
        settings that take effect at the next start, and the keys that have no effect. Raises
        RequestError if a setting is invalid or must not be changed, or if no key has an effect.
        """
        settings = self.settings
        requested_lines = bytes(command.body).decode("utf-8", "replace")
        try:
            change = change_settings(
                settings.in_force,
                settings.at_next_start,
                requested_lines,
                UNCHANGEABLE_SETTINGS,
            )
            if change.pending:
                self._check_next_start(change)
        except ConfigurationError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error

        # Write the file, and then let the change come into force.
        path = settings.broker.config_path
        if path and change.entries:
            old_content = read_text(self.files, path) or ""
            edit_text(self.files, path, edit_properties(old_content, change.entries))
        settings.apply(change)
        self.config_version = DataVersion(self.config_version.counter + 1, self.clock.now_ms())
        names = ", ".join(change.entries) or "nothing"
        log.info("%s changed the configuration: %s", peer.remote, names)
        for warning in change.warnings:
            log.warning("%s", warning)
        return Command(ResponseCode.SUCCESS, remark=change.remark)

    def _check_next_start(self, change: Change) -> None:
        """Raise ConfigurationError if the broker could not start with the changed settings."""
        from sluicemq.net.openssl import load_server_context  # noqa: PLC0415 - rarely needed

        config = change.at_next_start[Part.BROKER]
        parse_credentials(config.inner_credentials)
        load_server_context(config)
        if config.acl_enable:
            source = RuleSource.from_config(self.files, config)
            source.load(source.read_files())

    def get_config(self, command: Command, peer: Peer) -> Command:
        """Answer GET_BROKER_CONFIG (26) with all settings as lines of `key=value`."""
        lines = settings_text(self.settings.in_force, self.settings.at_next_start)
        lines += "filterServerNums=0\n"  # exportConfigs of mqadmin 4.9 fails without this line
        version = tables.encode_data_version(self.config_version).decode()
        fields = encode_header(GetBrokerConfigResponse(version=version))
        return Command(ResponseCode.SUCCESS, fields, lines.encode())

    def get_runtime_info(self, command: Command, peer: Peer) -> Command:
        """Answer GET_BROKER_RUNTIME_INFO (28) with the runtime information."""
        table = self.runtime.collect_table()
        return Command(ResponseCode.SUCCESS, body=bodies.encode_kv_table(table))

    # --------------------------------------------------------------------- topics and groups

    def get_topic_stats(self, header: TopicRequest, command: Command, peer: Peer) -> Command:
        """Answer GET_TOPIC_STATS_INFO (202) with the offsets and last store time of each queue.

        The answer also has the messages per second that were stored in the last minute. Raises
        RequestError if the topic does not exist.
        """
        topic = self.topics.require(header.topic)
        queues = {}
        for queue_id in range(topic.queues):
            first_offset, end_offset = self.store.queue_offsets(topic.name, queue_id)
            last_time_ms = 0
            if end_offset:
                last_time_ms = self.store.reader.store_time_ms(topic.name, queue_id, end_offset - 1)
            queue = MessageQueue(topic.name, self.settings.broker.broker_name, queue_id)
            queues[queue] = bodies.QueueStats(first_offset, end_offset, max(last_time_ms, 0))
        stats = bodies.TopicStats(queues, self.rates.compute_rate(f"in:{topic.name}", 60))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_stats(stats))

    def get_consume_stats(
        self, header: GetConsumeStatsRequest, command: Command, peer: Peer
    ) -> Command:
        """Answer GET_CONSUME_STATS (208) with the progress of a group.

        The request may name one or several topics. If it names none, the answer has the topics for
        which the group has offsets, and those to which its online members subscribe. SluiceMQ adds
        the messages in flight to RocketMQ's fields.
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

        Topics that do not exist are logged and left out. The result also has the number of messages
        per second that the group got from these topics in the last minute.
        """
        queues: dict[MessageQueue, bodies.QueueProgress] = {}
        for name in names:
            topic = self.topics.get(name)
            if topic is None:
                log.info("group %s has offsets of topic %s, which does not exist", group, name)
                continue
            for queue_id in range(topic.config.read_queues):
                queue = MessageQueue(name, self.settings.broker.broker_name, queue_id)
                queues[queue] = self._collect_queue_progress(group, name, queue_id)
        rate = sum(self.rates.compute_rate(f"out:{name}@{group}", 60) for name in names)
        return bodies.ConsumeStats(queues, rate)

    def _collect_queue_progress(
        self, group: str, topic: str, queue_id: int
    ) -> bodies.QueueProgress:
        """Return the progress of a group in one queue: its offsets, and messages in flight.

        It also has the number of unread messages that are deleted soon, and the time of that.
        """
        _, end_offset = self.store.queue_offsets(topic, queue_id)
        committed_or_none = self.offsets.committed(group, topic, queue_id)  # -1 without one
        committed = max(committed_or_none, 0)
        last_time_ms = self.store.reader.store_time_ms(topic, queue_id, committed - 1)

        # `extra` counts unfinished messages before `start`. Those that are not committed are in the
        # lag of the answer already, so count only the others.
        start, in_flight, extra = self.unfinished(group, topic, queue_id)
        fetched = max(start, committed, self.offsets.fetched(group, topic, queue_id))
        extra -= max(start, 0) - committed

        messages_at_risk = 0
        loss_time_ms = 0
        expiring = self.unread_monitor.find_expiring(topic, queue_id, committed_or_none)
        if expiring is not None:
            messages_at_risk = expiring.message_count
            loss_time_ms = expiring.earliest_deletion_ms

        return bodies.QueueProgress(
            broker_offset=end_offset,
            consumer_offset=committed,
            last_time_ms=max(last_time_ms, 0),
            pull_offset=fetched,
            messages_at_risk=messages_at_risk,
            loss_time_ms=loss_time_ms,
            in_flight=in_flight,
            extra=extra,
        )

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
        connections = tuple(map(_describe_connection, group.members.values()))
        subscriptions = {
            topic: group_subscription.subscription
            for topic, group_subscription in group.subscriptions.items()
        }
        answer = bodies.ConsumerConnections(
            connections,
            group.consume_type,
            group.message_model,
            group.consume_from_where,
            subscriptions,
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
