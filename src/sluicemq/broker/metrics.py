"""What Prometheus sees of access control: refusals by access key and how the rules stand.

`/metrics` for Prometheus, with RocketMQ 5's names and labels.

The hot paths count in plain integers (topic.messages_in, pull.delivered …); only a scrape makes
Prometheus objects of them. prometheus-client is imported when the port is opened: it is part of the
extra `server`, and a broker without it runs without the port.

A scrape runs in the thread of prometheus-client's own HTTP server and reads tables that the loop
changes, so it copies a table before it walks through it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sluicemq.acl.guard import Guard
from sluicemq.broker.admin.retention import GroupWatch
from sluicemq.broker.consume.clients import Consumers, Producers
from sluicemq.broker.consume.filter_watch import FilterWatch
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull import Pull
from sluicemq.broker.groups import Groups
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.produce.retries import Retries
from sluicemq.broker.produce.send import Send
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.broker.transactions.checks import TransactionChecks
from sluicemq.broker.transactions.transactions import Transactions
from sluicemq.broker.turns import LATENCY_BOUNDS_S, Turns
from sluicemq.clock import Clock
from sluicemq.errors import install_extra
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX
from sluicemq.store.store import Store

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Make = Callable[..., Any]


def access_metrics(
    guard: Guard, counter: Make, gauge: Make, values: Callable[..., list[str]]
) -> Iterator[Any]:
    """`counter` and `gauge` make families, `values` the labels of this broker and more."""
    refused = counter(
        "sluicemq_requests_refused",
        "Requests that access control refused; access_key ? is one that no account has.",
        "access_key",
    )
    for access_key, count in tuple(guard.denied.items()):
        refused.add_metric(values(access_key), count)
    yield refused
    accounts = gauge("sluicemq_access_accounts", "Accounts in force.")
    accounts.add_metric(values(), len(guard.rules.accounts))
    yield accounts
    loads = counter("sluicemq_access_loads", "Access rules read, by result.", "result")
    loads.add_metric(values("in_force"), guard.loads)
    loads.add_metric(values("refused"), guard.loads_failed)
    yield loads
    stale = gauge("sluicemq_access_rules_stale", "1 while the newest files are not in force.")
    stale.add_metric(values(), 1 if guard.error else 0)
    yield stale


log = logging.getLogger(__name__)

# RocketMQ's buckets of rocketmq_message_size: label and the bits that a size has at most.
SIZE_BUCKETS: Final = (
    ("1024.0", 10), ("4096.0", 12), ("524288.0", 19), ("1048576.0", 20), ("2097152.0", 21),
    ("4194304.0", 22),
)  # fmt: skip


@dataclass(slots=True)
class Parts:
    """What is measured."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    producers: Producers
    polls: LongPolls
    send: Send
    pull: Pull
    turns: Turns
    store: Store
    watch: GroupWatch
    filter_watch: FilterWatch
    retries: Retries
    transactions: Transactions
    checks: TransactionChecks
    clock: Clock
    guard: Guard | None = None


class BrokerCollector:
    """Reads the counters when Prometheus asks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def _node(self) -> dict[str, str]:
        config = self._parts.settings.broker
        return {
            "cluster": config.cluster_name,
            "node_type": "broker",
            "node_id": config.broker_name,
        }

    def collect(self) -> "Iterator[Metric]":
        """Every metric of now."""
        yield from self._traffic_in()
        yield from self._traffic_out()
        yield from self._failures()
        yield from self._transactions()
        yield from self._lag()
        yield from self._filters()
        yield from self._retention()
        yield from self._clients()
        yield from self._sizes()
        yield from self._columns()
        yield from self._state()
        if self._parts.guard is not None:
            yield from access_metrics(self._parts.guard, self._counter, self._gauge, self._values)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415

        return CounterMetricFamily(name, text, labels=[*self._node, *labels])

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415

        return GaugeMetricFamily(name, text, labels=[*self._node, *labels])

    def _values(self, *values: str) -> list[str]:
        return [*self._node.values(), *values]

    def _flags(self, topic: str) -> tuple[str, str]:
        """is_retry, is_system."""
        is_retry = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
        return str(is_retry).lower(), str(self._parts.topics.is_system(topic)).lower()

    def _traffic_in(self) -> "Iterator[Metric]":
        labels = ("topic", "message_type", "is_retry", "is_system")
        messages = self._counter("rocketmq_messages_in", "Messages stored.", *labels)
        throughput = self._counter("rocketmq_throughput_in", "Bytes stored.", *labels)
        fifo = self._parts.send.fifo.copy()
        for topic in tuple(self._parts.topics.table.copy().values()):
            if not topic.messages_in:
                continue
            flags = self._flags(topic.name)
            ordered = fifo.get(topic.name, 0)
            normal = self._values(topic.name, "normal", *flags)
            messages.add_metric(normal, topic.messages_in - ordered)
            throughput.add_metric(normal, topic.bytes_in)
            if ordered:
                messages.add_metric(self._values(topic.name, "fifo", *flags), ordered)
        yield messages
        yield throughput
        failed = self._counter("sluicemq_messages_refused", "Sends that were not stored.")
        failed.add_metric(self._values(), self._parts.send.failures)
        yield failed

    def _failures(self) -> "Iterator[Metric]":
        retries = self._parts.retries
        retried = self._counter(
            "sluicemq_messages_retried", "Messages that come to a group again.", "consumer_group"
        )
        for group, count in retries.retried.copy().items():
            retried.add_metric(self._values(group), count)
        yield retried
        dead = self._counter(
            "rocketmq_send_to_dlq_messages", "Dead letters of a group.", "consumer_group"
        )
        for group, count in retries.dead.copy().items():
            dead.add_metric(self._values(group), count)
        yield dead

    def _traffic_out(self) -> "Iterator[Metric]":
        labels = ("topic", "consumer_group", "is_retry", "is_system")
        messages = self._counter("rocketmq_messages_out", "Messages delivered.", *labels)
        throughput = self._counter("rocketmq_throughput_out", "Bytes delivered.", *labels)
        filtered = self._counter(
            "sluicemq_messages_filtered", "Messages that a filter kept back.", *labels
        )
        for (topic, group), delivered in self._parts.pull.delivered.copy().items():
            values = self._values(topic, group, *self._flags(topic))
            messages.add_metric(values, delivered.messages_out)
            throughput.add_metric(values, delivered.bytes_out)
            filtered.add_metric(values, delivered.filtered)
        yield messages
        yield throughput
        yield filtered

    def _lag(self) -> "Iterator[Metric]":
        """How far groups are behind. Without a look at the messages, filtered ones count too."""
        lag = self._gauge(
            "rocketmq_consumer_lag_messages", "Messages not consumed yet.",
            "topic", "consumer_group", "is_retry", "is_system",
        )  # fmt: skip
        behind: dict[tuple[str, str], int] = {}
        table = {key: dict(queues) for key, queues in self._parts.offsets.table.copy().items()}
        for key, queues in table.items():
            topic, _, group = key.partition("@")
            for queue_id, offset in queues.items():
                first, end = self._parts.store.queue_offsets(topic, queue_id)
                lag_here = max(end - max(offset, first), 0)
                behind[topic, group] = behind.get((topic, group), 0) + lag_here
        for (topic, group), count in behind.items():
            lag.add_metric(self._values(topic, group, *self._flags(topic)), count)
        yield lag

    def _filters(self) -> "Iterator[Metric]":
        """What filters fail on, and how many messages before a group they will let through."""
        watch = self._parts.filter_watch
        pair = ("topic", "consumer_group")
        errors = self._counter(
            "sluicemq_filter_errors",
            "Evaluations of a filter that failed: the message is dropped.",
            *pair,
            "reason",
        )
        for (topic, group), troubles in watch.troubles.copy().items():
            for reason, count in troubles.reasons.copy().items():
                errors.add_metric(self._values(topic, group, reason), count)
        yield errors
        matching = self._gauge(
            "sluicemq_consumer_lag_matching_messages",
            "Messages not consumed yet that the group's filter lets through, exactly.",
            *pair,
        )
        eta = self._gauge(
            "sluicemq_consumer_lag_eta_seconds",
            "When none of them will be left at the present pace; absent when not known.",
            *pair,
        )
        for (topic, group), (count, eta_s) in watch.matches.items():
            matching.add_metric(self._values(topic, group), count)
            if eta_s is not None:
                eta.add_metric(self._values(topic, group), eta_s)
        yield matching
        yield eta

    def _transactions(self) -> "Iterator[Metric]":
        transactions, checks = self._parts.transactions, self._parts.checks
        back = transactions.check_back
        for name, text, counts in (
            ("rocketmq_commit_messages", "Transactions committed.", transactions.committed),
            ("rocketmq_rollback_messages", "Transactions rolled back.", transactions.rolled_back),
        ):
            ended = self._counter(name, text, "topic")
            for topic, count in counts.copy().items():
                ended.add_metric(self._values(topic), count)
            yield ended
        for name, text, count in (
            ("checks", "Times that a client was asked how a transaction ended.", back.sent),
            ("checks_unanswered", "... and had not answered by the next time.", back.unanswered),
            ("given_up", "Transactions that nobody would decide.", checks.given_up),
            ("lost", "Half messages deleted before they were decided.", checks.lost),
        ):
            total = self._counter(f"sluicemq_transactions_{name}", text)
            total.add_metric(self._values(), count)
            yield total
        halves = self._gauge("rocketmq_half_messages", "Transactions that are not decided.")
        halves.add_metric(self._values(), len(transactions.table))
        yield halves

    def _retention(self) -> "Iterator[Metric]":
        """Who loses what by the deletion of old files, and how full the disk is."""
        watch, retention = self._parts.watch, self._parts.store.retention
        pair = ("topic", "consumer_group")
        lost = self._counter(
            "sluicemq_messages_lost",
            "Messages that were deleted before the group read them.",
            *pair,
        )
        for (topic, group), count in watch.lost.copy().items():
            lost.add_metric(self._values(topic, group), count)
        yield lost
        risk = self._gauge(
            "sluicemq_messages_at_risk", "Unread messages that will be deleted next.", *pair
        )
        when = self._gauge(
            "sluicemq_loss_time_seconds",
            "When the first of them is deleted at the earliest.",
            *pair,
        )
        for (topic, group), found in watch.at_risk.copy().items():
            risk.add_metric(self._values(topic, group), found.messages)
            when.add_metric(self._values(topic, group), found.loss_ms / 1000)
        yield risk
        yield when
        files = self._counter("sluicemq_log_files_deleted", "Files of the log that were deleted.")
        files.add_metric(self._values(), retention.files_deleted)
        yield files
        disk = self._gauge("sluicemq_disk_used_percent", "Of the fullest disk of the store.")
        disk.add_metric(self._values(), watch.disk_percent)
        yield disk
        refusing = self._gauge("sluicemq_sends_refused_disk_full", "1 while sends are refused.")
        refusing.add_metric(self._values(), int(retention.is_refusing))
        yield refusing

    def _clients(self) -> "Iterator[Metric]":
        consumers = self._gauge(
            "rocketmq_consumer_connections", "Consumers that are connected.", "consumer_group"
        )
        for name, group in self._parts.consumers.groups.copy().items():
            consumers.add_metric(self._values(name), len(group.members))
        yield consumers
        yield from self._lanes()
        producers = self._gauge("rocketmq_producer_connections", "Producers that are connected.")
        peers = {peer for group in self._parts.producers.groups.copy().values() for peer in group}
        producers.add_metric(self._values(), len(peers))
        yield producers

    def _lanes(self) -> "Iterator[Metric]":
        lanes = self._gauge(
            "sluicemq_group_lanes", "Subscriptions that share a group's messages.", "consumer_group"
        )
        unmatched = self._counter(
            "sluicemq_lane_messages_unmatched", "Messages no lane wants.", "consumer_group"
        )
        for name, made in self._parts.consumers.lanes.table.copy().items():
            lanes.add_metric(self._values(name), len(made.lanes))
            unmatched.add_metric(self._values(name), made.unmatched)
        yield lanes
        yield unmatched
        conflicts = self._counter(
            "sluicemq_subscription_conflicts",
            "Subscriptions that differed from their group's.",
            "consumer_group",
        )
        for name, count in self._parts.consumers.contracts.conflicts.copy().items():
            conflicts.add_metric(self._values(name), count)
        yield conflicts
        refused = self._gauge(
            "sluicemq_group_refused_clients",
            "Clients online whose subscription their strict group refuses.",
            "consumer_group",
        )
        groups = [group for group, _ in self._parts.consumers.contracts.refused.copy()]
        for name in set(groups):
            refused.add_metric(self._values(name), groups.count(name))
        yield refused

    def _sizes(self) -> "Iterator[Metric]":
        from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415

        sizes = HistogramMetricFamily(
            "rocketmq_message_size", "Bytes of message bodies.", labels=list(self._node)
        )
        counts = self._parts.send.sizes
        buckets = [(bound, float(sum(counts[: bits + 1]))) for bound, bits in SIZE_BUCKETS]
        total = sum(topic.bytes_in for topic in tuple(self._parts.topics.table.copy().values()))
        sizes.add_metric(self._values(), [*buckets, ("+Inf", float(sum(counts)))], total)
        yield sizes
        turns = self._parts.turns
        latency = HistogramMetricFamily(
            "sluicemq_send_latency_seconds",
            "From the first message of a turn to its answers.",
            labels=list(self._node),
        )
        latency.add_metric(self._values(), _cumulated(turns.latency_counts), turns.latency_sum_s)
        yield latency

    def _columns(self) -> "Iterator[Metric]":
        """Property columns: how many messages they were made of, and what they take."""
        columns = self._parts.store.columns
        made = self._counter(
            "sluicemq_property_columns_messages",
            "Messages made into columns: in memory for a reader, or sealed into a file.",
            "kind",
        )
        made.add_metric(self._values("memory"), columns.rows_decoded)
        made.add_metric(self._values("file"), columns.rows_sealed)
        yield made
        size = self._gauge(
            "sluicemq_property_columns_bytes", "Files of property columns, of the topics in use."
        )
        size.add_metric(self._values(), columns.size_bytes)
        yield size

    def _state(self) -> "Iterator[Metric]":
        parts = self._parts
        values: Mapping[str, tuple[str, float]] = {
            "rocketmq_broker_permission": (
                "4 read, 2 write.", parts.settings.broker.broker_permission),
            "rocketmq_topic_number": ("Topics.", len(parts.topics)),
            "rocketmq_consumer_group_number": ("Consumer groups.", len(parts.groups)),
            "rocketmq_storage_size": (
                "Bytes of the commit log.",
                parts.store.written_offset - parts.store.offset_min),
            "rocketmq_storage_flush_behind_bytes": (
                "Bytes written and not yet synced.",
                parts.store.written_offset - parts.store.synced_offset),
            "rocketmq_storage_dispatch_behind_bytes": ("Bytes without queue entries.", 0),
            "rocketmq_storage_message_reserve_time": (
                "Age of the oldest message in ms.", self._reserve_ms()),
        }  # fmt: skip
        for name, (text, value) in values.items():
            gauge = self._gauge(name, text)
            gauge.add_metric(self._values(), value)
            yield gauge
        watermark = self._gauge(
            "rocketmq_processor_watermark", "Requests that wait in the broker.", "processor"
        )
        watermark.add_metric(self._values("send"), 0 if parts.turns.is_idle else 1)
        watermark.add_metric(self._values("pull"), len(parts.polls))
        yield watermark

    def _reserve_ms(self) -> int:
        earliest = self._parts.store.reader.earliest_time_ms()
        return self._parts.clock.now_ms() - earliest if earliest > 0 else 0


def _cumulated(counts: list[int]) -> list[tuple[str, float]]:
    total = 0
    buckets = []
    for bound, count in zip((*LATENCY_BOUNDS_S, float("inf")), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return buckets


def serve(
    collector: BrokerCollector, host: str, port: int
) -> tuple[int, Callable[[], None]] | None:
    """Opens the port; returns it with a function that closes it. None, with a warning in the log,
    when it cannot be had: a broker lives without its metrics."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415
    except ImportError:
        log.warning("no metrics: prometheus-client is missing. %s", install_extra("server"))
        return None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Described(collector))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        log.warning(
            "no metrics: port %d cannot be had (%s). Set metricsPromExporterPort to a free port, "
            "or metricsExporterType=DISABLE.", port, error,
        )  # fmt: skip
        return None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return server.server_port, close


class _Described:
    """A registry asks a new collector for all its metrics unless it describes itself; the store
    need not be ready for that."""

    def __init__(self, collector: BrokerCollector) -> None:
        self.collect = collector.collect

    def describe(self) -> "list[Metric]":
        return []
