"""`/metrics` for Prometheus, with RocketMQ 5's names and labels: one table of what is measured.

The hot paths count in plain integers (topic.messages_in, pull.delivered …); only a scrape makes
Prometheus objects of them. prometheus-client is imported when the port is opened: it is part of the
extra `server`, and a broker without it runs without the port.

A scrape runs in a thread of its own and reads tables that the loop changes, so it copies a table
before it walks through it. Beside them the port answers probes: `/health` and `/ready`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sluicemq.broker.group_commit import LATENCY_BOUNDS_S
from sluicemq.broker.registration import Registration
from sluicemq.broker.state import BrokerState
from sluicemq.broker.topics import Topic
from sluicemq.config.keys import MeasuredConfig
from sluicemq.errors import install_extra
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from sluicemq.net.wsgi import Probe

log = logging.getLogger(__name__)

# RocketMQ's buckets of rocketmq_message_size: label and the bits that a size has at most.
SIZE_BUCKETS: Final = (
    ("1024.0", 10), ("4096.0", 12), ("524288.0", 19), ("1048576.0", 20), ("2097152.0", 21),
    ("4194304.0", 22),
)  # fmt: skip
Samples = Iterable[tuple[Any, ...]]
"""Values of the labels, and the value."""


class Family(NamedTuple):
    """One metric: a counter or a gauge."""

    name: str
    text: str
    labels: tuple[str, ...]
    samples: Callable[[BrokerState], Samples]
    is_gauge: bool = False


def _one(value: Callable[[BrokerState], float]) -> Callable[[BrokerState], Samples]:
    return lambda b: [(value(b),)]


def _each(table: Callable[[BrokerState], dict[Any, Any]]) -> Callable[[BrokerState], Samples]:
    """One sample for each key: a name, or several."""

    def samples(b: BrokerState) -> Samples:
        for key, value in table(b).copy().items():
            yield (key, value) if isinstance(key, str) else (*key, value)

    return samples


def _flags(b: BrokerState, topic: str) -> tuple[str, str]:
    """is_retry, is_system."""
    is_retry = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    return str(is_retry).lower(), str(b.topics.is_system(topic)).lower()


def _lags(b: BrokerState) -> list[tuple[str, int, int]]:
    """A master's slaves, by id or address: how far they are behind in bytes and ms."""
    gate, end = b.in_sync, b.store.written_offset
    found = {} if gate is None else gate.replicas.copy()
    return [(str(link.replica_id or link.remote), max(end - max(one.acknowledged, 0), 0),
             gate.lag_ms(one)) for link, one in found.items() if gate is not None]  # fmt: skip


def _topics(b: BrokerState) -> list[Topic]:
    return [topic for topic in tuple(b.topics.table.copy().values()) if topic.messages_in]


def _messages_in(b: BrokerState) -> Samples:
    fifo = b.send.fifo.copy()
    for topic in _topics(b):
        ordered, flags = fifo.get(topic.name, 0), _flags(b, topic.name)
        yield topic.name, "normal", *flags, topic.messages_in - ordered
        if ordered:
            yield topic.name, "fifo", *flags, ordered


def _delivered(attribute: str) -> Callable[[BrokerState], Samples]:
    def samples(b: BrokerState) -> Samples:
        for (topic, group), delivered in b.pull.deliveries.copy().items():
            yield topic, group, *_flags(b, topic), getattr(delivered, attribute)

    return samples


def _lag(b: BrokerState) -> Samples:
    """Not committed and not popped, or popped and not acknowledged."""
    behind: dict[tuple[str, str], int] = {}
    popped = b.checkpoints.ahead()
    table = {key: dict(queues) for key, queues in b.offsets.table.copy().items()}
    for key, queues in table.items():
        topic, _, group = key.partition("@")
        for queue_id, offset in queues.items():
            first, end = b.store.queue_offsets(topic, queue_id)
            start = max(offset, first, popped.get((group, topic, queue_id), 0))
            behind[topic, group] = behind.get((topic, group), 0) + max(end - start, 0)
    for (group, topic, _), count in b.checkpoints.table.counts.copy().items():
        behind[topic, group] = behind.get((topic, group), 0) + count
    for (topic, group), count in behind.items():
        yield topic, group, *_flags(b, topic), count


def _in_flight(b: BrokerState) -> Samples:
    """Pulled and not committed, or popped and not acknowledged."""
    found: Counter[tuple[str, str]] = Counter()
    for key, queues in b.offsets.pulled.copy().items():
        topic, _, group = key.partition("@")
        for queue_id, offset in queues.copy().items():
            committed = b.offsets.committed(group, topic, queue_id)
            found[topic, group] += max(offset - committed, 0) if committed >= 0 else 0
    for (group, topic, _), count in b.checkpoints.table.counts.copy().items():
        found[topic, group] += count
    for (topic, group), count in found.items():
        yield topic, group, *_flags(b, topic), count


_OUT: Final = ("topic", "consumer_group", "is_retry", "is_system")
_IN: Final = ("topic", "message_type", "is_retry", "is_system")
_PAIR: Final = ("topic", "consumer_group")
_GROUP: Final = ("consumer_group",)
COUNTERS: Final = (
    Family("rocketmq_messages_in", "Messages stored.", _IN, _messages_in),
    Family("rocketmq_throughput_in", "Bytes stored.", _IN,
           lambda b: [(one.name, "normal", *_flags(b, one.name), one.bytes_in)
                      for one in _topics(b)]),
    Family("sluicemq_background_failures", "Failures of background jobs, by job.", ("job",),
           _each(lambda b: b.jobs.failures)),
    Family("sluicemq_messages_refused", "Sends that were not stored.", (),
           _one(lambda b: b.send.failures)),
    Family("rocketmq_messages_out", "Messages delivered.", _OUT, _delivered("messages_out")),
    Family("rocketmq_throughput_out", "Bytes delivered.", _OUT, _delivered("bytes_out")),
    Family("sluicemq_messages_filtered", "Messages that a filter kept back.", _OUT,
           _delivered("filtered_count")),
    Family("sluicemq_messages_retried", "Messages that come to a group again.", _GROUP,
           _each(lambda b: b.retries.retried)),
    Family("rocketmq_send_to_dlq_messages", "Dead letters of a group.", _GROUP,
           _each(lambda b: b.retries.dead)),
    Family("rocketmq_commit_messages", "Transactions committed.", ("topic",),
           _each(lambda b: b.transactions.committed)),
    Family("rocketmq_rollback_messages", "Transactions rolled back.", ("topic",),
           _each(lambda b: b.transactions.rolled_back)),
    Family("sluicemq_transactions_checks", "Times that a client was asked how a transaction ended.",
           (), _one(lambda b: b.transactions.check_back.sent)),
    Family("sluicemq_transactions_checks_unanswered",
           "... and had not answered by the next time.", (),
           _one(lambda b: b.transactions.check_back.unanswered)),
    Family("sluicemq_transactions_given_up", "Transactions that nobody would decide.", (),
           _one(lambda b: b.transactions.given_up)),
    Family("rocketmq_pop_revive_in_message", "Checkpoints and acknowledgements stored.",
           (*_PAIR, "revive_message_type", "put_status"),
           lambda b: [(*key, "PUT_OK", count)
                      for key, count in b.checkpoints.stored.copy().items()]),
    Family("rocketmq_pop_revive_retry_messages", "Popped messages that have come back.",
           (*_PAIR, "put_status"),
           lambda b: [(*pair, "PUT_OK", count)
                      for pair, count in b.checkpoints.revived.copy().items()]),
    Family("sluicemq_transactions_lost", "Half messages deleted before they were decided.", (),
           _one(lambda b: b.transactions.lost)),
    Family("sluicemq_filter_errors", "Evaluations of a filter that failed: the message is dropped.",
           (*_PAIR, "reason"),
           lambda b: [(*pair, reason, count)
                      for pair, troubles in b.filter_watch.failures.copy().items()
                      for reason, count in troubles.reasons.copy().items()]),
    Family("sluicemq_messages_lost", "Messages that were deleted before the group read them.",
           _PAIR, _each(lambda b: b.watch.lost)),
    Family("sluicemq_log_files_deleted", "Files of the log that were deleted.", (),
           _one(lambda b: b.store.retention.files_deleted)),
    Family("sluicemq_lane_messages_unmatched", "Messages no lane wants.", _GROUP,
           _each(lambda b: {name: made.unmatched for name, made in b.lanes.table.copy().items()})),
    Family("sluicemq_subscription_conflicts", "Subscriptions that differed from their group's.",
           _GROUP, _each(lambda b: b.contracts.conflict_counts)),
    Family("sluicemq_property_columns_messages",
           "Messages made into columns: in memory for a reader, or sealed into a file.", ("kind",),
           _each(lambda b: {"memory": b.store.columns.rows_decoded,
                            "file": b.store.columns.rows_sealed})),
)  # fmt: skip
GAUGES: Final = (
    Family("rocketmq_consumer_lag_messages", "Messages not consumed yet.", _OUT, _lag),
    Family("rocketmq_consumer_inflight_messages", "Messages with consumers.", _OUT, _in_flight),
    Family("rocketmq_pop_checkpoint_buffer_size", "Pops with messages in flight.", (),
           _one(lambda b: len(b.checkpoints.table))),
    Family("sluicemq_consumer_lag_matching_messages",
           "Messages not consumed yet that the group's filter lets through, exactly.", _PAIR,
           lambda b: [(*pair, count)
                      for pair, (count, _) in b.filter_watch.survey_results.items()]),
    Family("sluicemq_consumer_lag_eta_seconds",
           "When none of them will be left at the present pace; absent when not known.", _PAIR,
           lambda b: [(*pair, eta_s) for pair, (_, eta_s) in b.filter_watch.survey_results.items()
                      if eta_s is not None]),
    Family("rocketmq_half_messages", "Transactions that are not decided.", (),
           _one(lambda b: len(b.transactions.table))),
    Family("sluicemq_messages_at_risk", "Unread messages that will be deleted next.", _PAIR,
           lambda b: [(*pair, risk.messages) for pair, risk in b.watch.at_risk.copy().items()]),
    Family("sluicemq_loss_time_seconds", "When the first of them is deleted at the earliest.",
           _PAIR,
           lambda b: [(*pair, risk.loss_ms / 1000)
                      for pair, risk in b.watch.at_risk.copy().items()]),
    Family("sluicemq_disk_used_percent", "Of the fullest disk of the store.", (),
           _one(lambda b: b.watch.disk_percent)),
    Family("sluicemq_sends_refused_disk_full", "1 while sends are refused.", (),
           _one(lambda b: int(b.store.retention.is_refusing))),
    Family("sluicemq_store_failed",
           "1 after an error of the disk that makes the store refuse all writes until a restart.",
           (), _one(lambda b: int(b.store.failure is not None))),
    Family("rocketmq_consumer_connections", "Consumers that are connected.", _GROUP,
           lambda b: [(name, len(group.members))
                      for name, group in b.consumers.groups.copy().items()]),
    Family("rocketmq_producer_connections", "Producers that are connected.", (),
           _one(lambda b: len({peer for group in b.producers.groups.copy().values()
                               for peer in group}))),
    Family("sluicemq_group_lanes", "Subscriptions that share a group's messages.", _GROUP,
           lambda b: [(name, len(made.lanes)) for name, made in b.lanes.table.copy().items()]),
    Family("sluicemq_group_refused_clients",
           "Clients online whose subscription their strict group refuses.", _GROUP,
           _each(lambda b: Counter(group for group, _ in b.contracts.refusals.copy()))),
    Family("sluicemq_property_columns_bytes",
           "Files of property columns, of the topics in use.", (),
           _one(lambda b: b.store.columns.size_bytes)),
    Family("rocketmq_broker_permission", "4 read, 2 write.", (),
           _one(lambda b: b.settings.broker.broker_permission)),
    Family("rocketmq_topic_number", "Topics.", (), _one(lambda b: len(b.topics))),
    Family("rocketmq_consumer_group_number", "Consumer groups.", (), _one(lambda b: len(b.groups))),
    Family("rocketmq_storage_size", "Bytes of the commit log.", (),
           _one(lambda b: b.store.written_offset - b.store.offset_min)),
    Family("rocketmq_storage_flush_behind_bytes", "Bytes written and not yet synced.", (),
           _one(lambda b: b.store.written_offset - b.store.synced_offset)),
    Family("rocketmq_storage_dispatch_behind_bytes", "Bytes without queue entries.", (),
           _one(lambda b: 0)),
    Family("rocketmq_storage_message_reserve_time", "Age of the oldest message in ms.", (),
           _one(lambda b: b.clock.now_ms() - time_ms
                if (time_ms := b.store.reader.earliest_time_ms()) > 0 else 0)),
    Family("sluicemq_replica_lag_bytes", "Bytes of the log that a slave does not have.", ("slave",),
           lambda b: [(slave, size) for slave, size, _ in _lags(b)]),
    Family("sluicemq_replica_lag_milliseconds", "For how long it has not had them.", ("slave",),
           lambda b: [(slave, lag_ms) for slave, _, lag_ms in _lags(b)]),
    Family("sluicemq_replicas_in_sync", "Replicas that count, the master among them.", (),
           lambda b: [(1 + sum(map(b.in_sync.is_in_sync, b.in_sync.replicas.copy())),)]
           if b.in_sync is not None else []),
    Family("rocketmq_processor_watermark", "Requests that wait in the broker.", ("processor",),
           lambda b: [("send", 0 if b.turns.is_idle else 1), ("pull", len(b.polls))]),
)  # fmt: skip
OF_ACCESS_CONTROL: Final = (
    Family("sluicemq_requests_refused",
           "Requests that access control refused; access_key ? is one that no account has.",
           ("access_key",), _each(lambda b: _guard(b).denied)),
    Family("sluicemq_access_accounts", "Accounts in force.", (),
           _one(lambda b: len(_guard(b).accounts)), is_gauge=True),
    Family("sluicemq_access_loads", "Access rules read, by result.", ("result",),
           _each(lambda b: {"in_force": _guard(b).loads, "refused": _guard(b).loads_failed})),
    Family("sluicemq_access_rules_stale", "1 while the newest files are not in force.", (),
           _one(lambda b: 1 if _guard(b).error else 0), is_gauge=True),
)  # fmt: skip


def _guard(b: BrokerState) -> Any:
    return b.guard


class BrokerCollector:
    """Reads the counters of a broker when Prometheus asks."""

    def __init__(self, broker: Callable[[], BrokerState]) -> None:
        """`broker` gives the parts of now: they are made anew with each role."""
        self._broker = broker

    def collect(self) -> "Iterator[Metric]":
        """Every metric of now."""
        from prometheus_client.core import (  # noqa: PLC0415
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        b = self._broker()
        config = b.settings.broker
        names = ["cluster", "node_type", "node_id"]
        node = [config.cluster_name, "broker", config.broker_name]
        families = [*COUNTERS, *(family._replace(is_gauge=True) for family in GAUGES)]
        for family in (*families, *(OF_ACCESS_CONTROL if b.guard is not None else ())):
            make: Any = GaugeMetricFamily if family.is_gauge else CounterMetricFamily
            metric = make(family.name, family.text, labels=[*names, *family.labels])
            for *labels, value in family.samples(b):
                metric.add_metric([*node, *labels], value)
            yield metric
        sizes = HistogramMetricFamily(
            "rocketmq_message_size", "Bytes of message bodies.", labels=names
        )
        counts = b.send.sizes
        buckets = [(bound, float(sum(counts[: bits + 1]))) for bound, bits in SIZE_BUCKETS]
        total = sum(topic.bytes_in for topic in _topics(b))
        sizes.add_metric(node, [*buckets, ("+Inf", float(sum(counts)))], total)
        yield sizes
        latency = HistogramMetricFamily(
            "sluicemq_send_latency_seconds",
            "From the first message of a turn to its answers.",
            labels=names,
        )
        bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
        cumulated = map(float, accumulate(b.turns.latency_counts))
        latency.add_metric(node, list(zip(bounds, cumulated, strict=True)), b.turns.latency_sum_s)
        yield latency
        for collect in b.collectors:
            yield from collect()

    def describe(self) -> "list[Metric]":
        """Nothing: a registry would ask for all metrics else, and the store need not be ready."""
        return []


def _store_failure(b: BrokerState) -> list[str]:
    """Return why the store refuses all writes until a restart, as one sentence; [] if it does
    not."""
    error = b.store.failure
    if error is None:
        return []
    return [
        f"the store refuses all writes until the broker is restarted: {error}."
        " Check the disk, then restart the broker."
    ]


def unhealthy(b: BrokerState) -> list[str]:
    """Return the reasons to restart the process, one sentence each: the answer of `/health`."""
    from sluicemq.net.wsgi import hanging  # noqa: PLC0415 - many brokers of tests have no probes

    return hanging(b.clock.monotonic_s() - b.sampled_s) + _store_failure(b)


def unready(b: BrokerState, registration: Registration) -> list[str]:
    """Return the reasons to send clients elsewhere, one sentence each: the answer of `/ready`."""
    servers = registration.name_servers
    found = _store_failure(b)
    if b.store.retention.is_refusing:
        found.append("the disk is full, so sends are refused.")
    if b.in_sync is not None and b.in_sync.refusal is not None:
        found.append(f"sends are refused: {b.in_sync.refusal.remark}")
    if servers and not any(it.is_known and not it.failures for it in servers):
        found.append("no name server takes its registration, so clients do not find it.")
    return found


def serve(
    collector: Any, config: MeasuredConfig, *, health: "Probe" = list, readiness: "Probe" = list
) -> tuple[int, Callable[[], None]] | None:
    """Opens the port for what is collected, beside the probes; returns it with a function that
    closes it. None, with a warning in the log, when it cannot be had: servers live without their
    metrics."""
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app  # noqa: PLC0415
    except ImportError:
        log.warning("no metrics: prometheus-client is missing. %s", install_extra("server"))
        return None
    from sluicemq.net.wsgi import expose  # noqa: PLC0415

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return expose(config, health, readiness, make_wsgi_app(registry))
