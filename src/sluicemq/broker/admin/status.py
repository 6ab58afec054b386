"""What the tools ask about the running broker: 25 26 28 202 203 204 208 300.

Its runtime information (28) has every key that RocketMQ's tools read (spec/admin.md §3). Numbers of
thread pools are there because clusterList fails without them; we have none, so queues are empty and
waits are 0.

How fast something counts is shown as a rate over the last 10, 60 and 600 s: once a second `sample`
remembers the counters, and a rate is a difference of two samples. Nothing happens where the
counting is done.
"""

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from sluicemq.acl.loading import RuleSource
from sluicemq.broker.admin.retention import GroupWatch
from sluicemq.broker.consume.clients import Consumers, Member, Producers
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull import PullHandlers
from sluicemq.broker.group_commit import LATENCY_BOUNDS_S, GroupCommit
from sluicemq.broker.offsets import Offsets, UnfinishedMessages
from sluicemq.broker.produce.send import Send
from sluicemq.broker.registration import parse_credentials
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.clock import Clock
from sluicemq.config import Part, change_settings, edit_properties, settings_text
from sluicemq.errors import ConfigurationError, RequestError
from sluicemq.files import Files, edit_text, read_text
from sluicemq.model.topic import DataVersion, MessageQueue
from sluicemq.net.dispatch import Peer
from sluicemq.store.store import Store
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
VERSION_NAME: Final = "V5_3_3"
# name in the keys, capacity that the real broker shows
_POOLS: Final = (
    ("send", 10_000), ("pull", 100_000), ("litePull", 100_000), ("query", 20_000), ("ack", 100_000),
)  # fmt: skip
_TIMES: Final = (
    ("<=0ms", 0.0), ("0~10ms", 0.01), ("10~50ms", 0.05), ("50~100ms", 0.1), ("100~200ms", 0.2),
    ("200~500ms", 0.5), ("500ms~1s", 1.0), ("1~2s", 2.0), ("2~3s", 3.0), ("3~4s", 4.0),
    ("4~5s", 5.0), ("5~10s", 10.0), ("10s~", float("inf")),
)  # fmt: skip
_FEATURES: Final = "sluiceBulk"
"""What only we have, for clients that ask (design/0001)."""
BLACK_LIST: Final = frozenset({"brokerConfigPath"})


class Rates:
    """What named counters were when they changed."""

    __slots__ = ("_histories", "_times")

    def __init__(self, count: int = WINDOWS_S[-1] + 1) -> None:
        """Remembers `count` samples."""
        self._times: deque[float] = deque(maxlen=count)
        self._histories: dict[str, deque[tuple[float, int]]] = {}

    def sample(self, now_s: float, counters: Mapping[str, int]) -> None:
        """Call this once a second. Only those that have changed take room."""
        self._times.append(now_s)
        histories, oldest_s = self._histories, self._times[0]
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

    def rate(self, name: str, window_s: int) -> float:
        """Counts a second over the last `window_s` seconds, 0.0 before there are two samples."""
        history = self._histories.get(name)
        if history is None or len(self._times) < 2:
            return 0.0
        begin_s = self._times[max(0, len(self._times) - 1 - window_s)]
        index = bisect_right(history, begin_s, key=itemgetter(0))
        counted = history[-1][1] - (history[index - 1][1] if index else 0)
        seconds = self._times[-1] - begin_s
        return counted / seconds if seconds > 0 else 0.0

    def newest(self, name: str) -> tuple[float, int | None]:
        """When it was sampled last, and what it was; None for a counter that is not known."""
        history = self._histories.get(name)
        return (self._times[-1] if self._times else 0.0), history[-1][1] if history else None

    def oldest(self, name: str) -> tuple[float, int]:
        """When the first sample that is remembered was taken, and what it was then; 0 before it
        began."""
        history = self._histories.get(name, ())
        index = bisect_right(history, self._times[0], key=itemgetter(0))
        return self._times[0], history[index - 1][1] if index else 0

    def text(self, *names: str) -> str:
        """Three rates of the sum of the counters, as in code 28: `10s 60s 600s`."""
        return " ".join(str(sum(self.rate(n, window) for n in names)) for window in WINDOWS_S)


class Days:
    """What a counter was at the last two midnights (UTC): code 28's "today" and "yesterday"."""

    __slots__ = ("_day", "morning", "yesterday")

    def __init__(self) -> None:
        self._day = -1
        self.morning: dict[str, int] = {}
        self.yesterday: dict[str, int] = {}

    def sample(self, now_ms: int, counters: Mapping[str, int]) -> None:
        day = now_ms // 86_400_000
        if day != self._day:
            self.yesterday = self.morning if self._day >= 0 else {}
            self.morning = dict(counters) if self._day >= 0 else {}
            self._day = day


SPANS: Final = (("statsMinute", 10, 7), ("statsHour", 600, 7), ("statsDay", 3600, 25))
"""Name in the answer, seconds between two samples, how many are kept."""
Counters = Callable[[], Mapping[str, int]]


class Spans:
    """Counters as they were during the last minute, hour and day: sampled each ten seconds, ten
    minutes and hour. Only those that have changed take room."""

    def __init__(self) -> None:
        self._samples = {name: Rates(count) for name, _, count in SPANS}
        self._next_s = dict.fromkeys(self._samples, float("-inf"))

    def sample(self, now_s: float, counters: Counters) -> None:
        """Call this once a second; `counters` is asked when a sample is due."""
        due = [span for span in SPANS if now_s >= self._next_s[span[0]]]
        if due:
            found = counters()
            for name, period_s, _ in due:
                self._next_s[name] = now_s + period_s
                self._samples[name].sample(now_s, found)

    def counted(self, name: str) -> dict[str, tuple[int, float]] | None:
        """(What it has counted, a second) of each span; None for a counter that is not known."""
        newest_s, newest = self._samples[SPANS[0][0]].newest(name)
        if newest is None:
            return None
        found = {}
        for span, samples in self._samples.items():
            oldest_s, oldest = samples.oldest(name)
            seconds = newest_s - oldest_s
            count = max(newest - oldest, 0)  # a topic that was made anew begins at 0
            found[span] = (count, count / seconds if seconds > 0 else 0.0)
        return found


@dataclass(slots=True, eq=False)
class RuntimeInfo:
    """Collects the table when somebody asks. `more`: parts of it that others know."""

    topics: Topics
    send: Send
    pull: PullHandlers
    polls: LongPolls
    group_commit: GroupCommit
    store: Store
    rates: Rates
    days: Days
    more: Collection[Callable[[], dict[str, str]]] = ()
    spans: Spans = field(default_factory=Spans)

    def statistics(self) -> dict[str, int]:
        """Counters by RocketMQ's name and key of them; those of the broker have none."""
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

    def counters(self) -> dict[str, int]:
        """The counters that rates and day sums are made of; sampled once a second."""
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

    def table(self) -> dict[str, str]:
        """All keys."""
        from sluicemq import __version__, engine  # noqa: PLC0415 - the package imports nothing of ours

        counters, rates = self.counters(), self.rates
        put, times = counters["put"], self.group_commit.latency_counts
        shown = [0] * len(_TIMES)  # as the real broker writes it: `[<=0ms]:0 [0~10ms]:5 …`
        for bound, count in zip((*LATENCY_BOUNDS_S, 10.0), times, strict=True):
            shown[next(i for i, (_, limit) in enumerate(_TIMES) if bound <= limit)] += count
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
            "putTps": rates.text("put"),
            "getFoundTps": rates.text("found"),
            "getMissTps": rates.text("miss"),
            "getTotalTps": rates.text("found", "miss"),
            "getTransferredTps": rates.text("get"),
            "getTransferedTps": rates.text("get"),  # as mqadmin 4.9 spells it, which needs it
            "putMessageTimesTotal": str(put),
            "putMessageFailedTimes": str(self.send.failures),
            "putMessageSizeTotal": str(counters["put_bytes"]),
            "putMessageAverageSize": str(counters["put_bytes"] / put if put else 0.0),
            "putMessageEntireTimeMax": str(round(_quantile_s(times, 1.0) * 1000)),
            "getMessageEntireTimeMax": "0",
            "putMessageDistributeTime": "".join(
                f"[{name}]:{count} " for (name, _), count in zip(_TIMES, shown, strict=True)
            ),
            "putLatency99": f"{_quantile_s(times, 0.99) * 1000:.2f}",
            "putLatency999": f"{_quantile_s(times, 0.999) * 1000:.2f}",
        }
        for name, capacity in _POOLS:
            table[f"{name}ThreadPoolQueueSize"] = "0"
            table[f"{name}ThreadPoolQueueCapacity"] = str(capacity)
            table[f"{name}ThreadPoolQueueHeadWaitTimeMills"] = "0"
        for word, name in (("Put", "put"), ("Get", "get")):
            table[f"msg{word}TotalYesterdayMorning"] = str(self.days.yesterday.get(name, 0))
            table[f"msg{word}TotalTodayMorning"] = str(self.days.morning.get(name, 0))
            table[f"msg{word}TotalTodayNow"] = str(counters[name])
        for part in self.more:
            table |= part()
        return table | self.store.runtime_info()


def _quantile_s(counts: list[int], share: float) -> float:
    """The upper bound of the bucket in which this share of all is reached; 0.0 without any."""
    wanted, seen = sum(counts) * share, 0
    for bound, count in zip((*LATENCY_BOUNDS_S, 10.0), counts, strict=True):
        seen += count
        if count and seen >= wanted:
            return bound
    return 0.0


@dataclass(slots=True, eq=False)
class Admin:
    """The request family of the tools."""

    settings: Settings
    topics: Topics
    offsets: Offsets
    consumers: Consumers
    producers: Producers
    store: Store
    runtime: RuntimeInfo
    rates: Rates
    watch: GroupWatch
    unfinished: Callable[[str, str, int], UnfinishedMessages]
    files: Files
    clock: Clock
    version: DataVersion = field(init=False)

    def __post_init__(self) -> None:
        self.version = DataVersion(0, self.clock.now_ms())

    # ---------------------------------------------------------------------------- the broker

    def change_config(self, command: Command, peer: Peer) -> Command:
        """Answer UPDATE_BROKER_CONFIG (25): change settings and write them to the broker's file.

        The remark names what takes effect at the next start, and keys that have no effect. A
        request whose keys all have none is refused.
        """
        settings = self.settings
        try:
            change = change_settings(
                settings.in_force,
                settings.at_next_start,
                bytes(command.body).decode("utf-8", "replace"),
                BLACK_LIST,
            )
            if change.pending:
                # What the next start would stumble over is refused now.
                from sluicemq.net.openssl import load_server_context  # noqa: PLC0415

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
        self.version = DataVersion(self.version.counter + 1, self.clock.now_ms())
        names = ", ".join(change.entries) or "nothing"
        log.info("%s changed the configuration: %s", peer.remote, names)
        for warning in change.warnings:
            log.warning("%s", warning)
        return Command(ResponseCode.SUCCESS, remark=change.remark)

    def config(self, command: Command, peer: Peer) -> Command:
        """26."""
        text = settings_text(self.settings.in_force, self.settings.at_next_start)
        text += "filterServerNums=0\n"  # without it exportConfigs of mqadmin 4.9 fails
        version = tables.encode_data_version(self.version).decode()
        fields = encode_header(GetBrokerConfigResponse(version=version))
        return Command(ResponseCode.SUCCESS, fields, text.encode())

    def runtime_info(self, command: Command, peer: Peer) -> Command:
        """28."""
        return Command(ResponseCode.SUCCESS, body=bodies.encode_kv_table(self.runtime.table()))

    # --------------------------------------------------------------------- topics and groups

    def topic_stats(self, header: TopicRequest, command: Command, peer: Peer) -> Command:
        """202."""
        topic = self.topics.require(header.topic)
        queues = {}
        for queue_id in range(topic.queues):
            low, high = self.store.queue_offsets(topic.name, queue_id)
            time_ms = self.store.reader.store_time_ms(topic.name, queue_id, high - 1) if high else 0
            queue = MessageQueue(topic.name, self.settings.broker.broker_name, queue_id)
            queues[queue] = bodies.QueueStats(low, high, max(time_ms, 0))
        stats = bodies.TopicStats(queues, self.rates.rate(f"in:{topic.name}", 60))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_stats(stats))

    def consume_stats(
        self, header: GetConsumeStatsRequest, command: Command, peer: Peer
    ) -> Command:
        """208: a topic, some topics, or all on which the group has offsets. As in RocketMQ they say
        nothing of what is in flight; that is ours."""
        names = set(filter(None, (header.topic_list or "").split(";")))
        if header.topic:
            names.add(header.topic)
        if not names:
            names = self.offsets.topics_of(header.group)
            group = self.consumers.groups.get(header.group)
            names |= set(group.subscriptions) if group is not None else set()
        stats = self.progress(header.group, sorted(names))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_consume_stats(stats))

    def progress(self, group: str, names: Sequence[str]) -> bodies.ConsumeStats:
        """How far a group is in these topics."""
        queues: dict[MessageQueue, bodies.QueueProgress] = {}
        for name in names:
            topic = self.topics.get(name)
            if topic is None:
                log.info("group %s has offsets of topic %s, which is gone", group, name)
                continue
            for queue_id in range(topic.config.read_queues):
                end = self.store.queue_offsets(name, queue_id)[1]
                known = self.offsets.committed(group, name, queue_id)
                risk = self.watch.risk(name, queue_id, known)
                committed = max(known, 0)
                time_ms = self.store.reader.store_time_ms(name, queue_id, committed - 1)
                start, in_flight, extra = self.unfinished(group, name, queue_id)
                fetched = max(start, committed, self.offsets.fetched(group, name, queue_id))
                extra -= max(start, 0) - committed
                queues[MessageQueue(name, self.settings.broker.broker_name, queue_id)] = (
                    bodies.QueueProgress(
                        end, committed, max(time_ms, 0), fetched, *(risk or (0, 0)), in_flight,
                        extra,
                    )
                )  # fmt: skip
        rate = sum(self.rates.rate(f"out:{name}@{group}", 60) for name in names)
        return bodies.ConsumeStats(queues, rate)

    def groups_of_topic(self, header: TopicRequest, command: Command, peer: Peer) -> Command:
        """300: groups that subscribe to the topic now or have offsets of it."""
        name = header.topic
        groups = self.consumers.groups_subscribed_to(name) | self.offsets.groups_of(name)
        return Command(ResponseCode.SUCCESS, body=bodies.encode_group_list(sorted(groups)))

    # -------------------------------------------------------------------------------- clients

    def consumer_connections(
        self, header: ConsumerGroupRequest, command: Command, peer: Peer
    ) -> Command:
        """203."""
        name = header.group
        group = self.consumers.groups.get(name)
        if group is None:
            raise RequestError(
                ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online"
            )
        answer = bodies.ConsumerConnections(
            tuple(_connection(member) for member in group.members.values()),
            group.consume_type,
            group.message_model,
            group.consume_from_where,
            {topic: watch.subscription for topic, watch in group.subscriptions.items()},
        )
        return Command(ResponseCode.SUCCESS, body=bodies.encode_consumer_connections(answer))

    def producer_connections(
        self, header: GetProducerConnectionsRequest, command: Command, peer: Peer
    ) -> Command:
        """204."""
        name = header.group
        members = self.producers.groups.get(name)
        if members is None:
            raise RequestError(ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        body = bodies.encode_producer_connections(_connection(m) for m in members.values())
        return Command(ResponseCode.SUCCESS, body=body)


def _connection(member: Member) -> bodies.Connection:
    return bodies.Connection(
        member.client_id, str(member.peer.remote), member.language, member.version
    )
