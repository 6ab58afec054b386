"""The metrics of a broker for Prometheus (`/metrics`), and its health checks (`/health`, `/ready`).

Names and labels are those of RocketMQ 5; further metrics begin with `sluicemq_`. `COUNTERS`,
`GAUGES` and `ACCESS_METRICS` declare what is measured.

The hot paths count in plain integers (topic.messages_in, pull.deliveries …), and only a scrape
makes Prometheus objects of them. A scrape runs on a thread of its own and reads tables that the
event loop changes, so it copies a table before iterating over it.

prometheus-client belongs to the extra `server` and is imported when the port is opened. A broker
without it runs without that port.
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
from sluicemq.model.system_names import is_group_topic
from sluicemq.telemetry.health import event_loop_problems
from sluicemq.wire.bodies import BROADCASTING

if TYPE_CHECKING:
    from prometheus_client.core import Metric


log = logging.getLogger(__name__)

SIZE_BUCKETS: Final = (
    ("1024.0", 10),
    ("4096.0", 12),
    ("524288.0", 19),
    ("1048576.0", 20),
    ("2097152.0", 21),
    ("4194304.0", 22),
)
"""RocketMQ's buckets of rocketmq_message_size: the upper bound in bytes as a label, and its binary
logarithm."""
Samples = Iterable[tuple[Any, ...]]
"""For each sample the values of the labels, followed by the value of the metric."""


class Family(NamedTuple):
    """The declaration of one metric: a counter or a gauge."""

    name: str
    text: str
    """The help text of the metric."""
    labels: tuple[str, ...]
    """The labels besides cluster, node_type and node_id, which every metric has."""
    samples: Callable[[BrokerState], Samples]
    is_gauge: bool = False


def _single_sample(measure: Callable[[BrokerState], float]) -> Callable[[BrokerState], Samples]:
    """Return a function that returns one sample without labels: the result of `measure`."""
    return lambda broker: [(measure(broker),)]


def _samples_by_label(
    table: Callable[[BrokerState], dict[Any, Any]],
) -> Callable[[BrokerState], Samples]:
    """Return a function that yields one sample for each item of a dict.

    `table(broker)` returns the dict. A key is the value of the metric's label, or a tuple of the
    values of its labels. A value is the sample. For example, `{("a", "b"): 3}` yields
    ("a", "b", 3).
    """

    def samples(broker: BrokerState) -> Samples:
        for label_or_labels, sample in table(broker).copy().items():
            if isinstance(label_or_labels, str):
                yield label_or_labels, sample
            else:
                yield *label_or_labels, sample

    return samples


def _flags(broker: BrokerState, topic: str) -> tuple[str, str]:
    """Return the values of the labels is_retry and is_system for a topic."""
    is_retry = is_group_topic(topic)
    return str(is_retry).lower(), str(broker.topics.is_system(topic)).lower()


def _replica_lags(broker: BrokerState) -> list[tuple[str, int, int]]:
    """Return a tuple (id or address, lag in bytes, lag in ms) for each connected slave.

    The list is empty if this broker is not a master.
    """
    in_sync = broker.in_sync
    log_end = broker.store.written_offset
    if in_sync is None:
        return []
    return [
        (
            str(link.replica_id or link.remote),
            max(log_end - max(slave.acked_end, 0), 0),
            in_sync.lag_ms(slave),
        )
        for link, slave in in_sync.slaves.copy().items()
    ]


def _topics(broker: BrokerState) -> list[Topic]:
    """Return the topics in which messages were stored since the start."""
    return [topic for topic in tuple(broker.topics.table.copy().values()) if topic.messages_in]


def _messages_in(broker: BrokerState) -> Samples:
    """Yield the number of messages stored in each topic since the start.

    A sample is (topic, message type, is_retry, is_system, count). The message type is "fifo" for
    ordered messages and "normal" for all others. A topic without ordered messages has no sample of
    type "fifo".
    """
    fifo_counts = broker.send.fifo_counts.copy()
    for topic in _topics(broker):
        fifo_count = fifo_counts.get(topic.name, 0)
        flags = _flags(broker, topic.name)
        yield topic.name, "normal", *flags, topic.messages_in - fifo_count
        if fifo_count:
            yield topic.name, "fifo", *flags, fifo_count


def _delivered(attribute: str) -> Callable[[BrokerState], Samples]:
    """Return a function that yields one counter of deliveries for each topic and group.

    `attribute` is the name of the counter, an attribute of the values of `broker.pull.deliveries`.
    A sample is (topic, group, is_retry, is_system, count).
    """

    def samples(broker: BrokerState) -> Samples:
        for (topic, group), delivered in broker.pull.deliveries.copy().items():
            yield topic, group, *_flags(broker, topic), getattr(delivered, attribute)

    return samples


class _QueueLag(NamedTuple):
    """The messages of one queue that a group has not consumed."""

    topic: str
    group: str
    message_count: int
    """The messages that the group has neither committed nor popped."""
    oldest_offset: int
    """The offset of the oldest message that is not consumed, if there is one.

    The messages in flight of pops may be any before those of `message_count`. They are taken to be
    the last ones, as in RocketMQ.
    """
    queue_id: int


def _iter_queue_lags(broker: BrokerState) -> Iterator[_QueueLag]:
    """Yield the lag of each group in each queue of which it has an offset."""
    popped_ends = broker.checkpoints.get_uncommitted_offsets()
    in_flight_counts = broker.checkpoints.open_checkpoints.in_flight_counts.copy()
    for topic_at_group, queues in _copy_offsets(broker).items():
        topic, _, group = topic_at_group.partition("@")
        for queue_id, committed in queues.items():
            first_offset, end_offset = broker.store.queue_offsets(topic, queue_id)
            popped_end = popped_ends.get((group, topic, queue_id), 0)
            # Messages before `first_offset` are deleted, so they do not count.
            done_end = max(committed, first_offset, popped_end)
            in_flight = in_flight_counts.get((group, topic, queue_id), 0)
            yield _QueueLag(
                topic=topic,
                group=group,
                message_count=max(end_offset - done_end, 0),
                oldest_offset=max(min(done_end, end_offset) - in_flight, first_offset),
                queue_id=queue_id,
            )


def _copy_offsets(broker: BrokerState) -> dict[str, dict[int, int]]:
    """Return a copy of the committed offsets, by `topic@group` and queue id.

    Members of a connected group that have fetched from a queue and committed nothing there may be
    stuck from the first message on. Then the offset up to which they have fetched is returned.
    """
    # Copied first, because another thread changes the tables meanwhile.
    offsets = {key: dict(queues) for key, queues in broker.offsets.table.copy().items()}
    for key, queues in broker.offsets.pulled.copy().items():
        group = broker.consumers.groups.get(key.partition("@")[2])
        if group is None or group.message_model == BROADCASTING:
            continue
        for queue_id, fetched in queues.copy().items():
            offsets.setdefault(key, {}).setdefault(queue_id, fetched)
    return offsets


def _lag(broker: BrokerState) -> Samples:
    """Yield the lag of each group and topic, a number of messages.

    The lag counts the stored messages that the group has neither committed nor popped, and the
    messages that it has popped and not acknowledged. A sample is (topic, group, is_retry,
    is_system, lag).
    """
    lags: Counter[tuple[str, str]] = Counter()
    for queue_lag in _iter_queue_lags(broker):
        lags[queue_lag.topic, queue_lag.group] += queue_lag.message_count
    _add_popped(broker, lags)
    for (topic, group), lag in lags.items():
        yield topic, group, *_flags(broker, topic), lag


def _lag_latency(broker: BrokerState) -> Samples:
    """Yield the age in ms of the oldest message that a group has not consumed, 0 without one.

    A topic to which the connected members of the group no longer subscribe is left out. A sample is
    (topic, group, is_retry, is_system, age).
    """
    now_ms = broker.clock.now_ms()
    ages_ms: dict[tuple[str, str], int] = {}
    for lag in _iter_queue_lags(broker):
        if not _is_wanted(broker, lag.group, lag.topic):
            continue
        age_ms = 0
        # The time is -1 if there is no such message.
        stored_ms = broker.store.reader.store_time_ms(lag.topic, lag.queue_id, lag.oldest_offset)
        if stored_ms >= 0:
            age_ms = max(now_ms - stored_ms, 0)
        ages_ms[lag.topic, lag.group] = max(age_ms, ages_ms.get((lag.topic, lag.group), 0))
    for (topic, group), age_ms in ages_ms.items():
        yield topic, group, *_flags(broker, topic), age_ms


def _is_wanted(broker: BrokerState, group: str, topic: str) -> bool:
    """Return whether the group may still consume a topic of which it has an offset.

    It does not if its connected members subscribe to other topics only. Members that assign queues
    themselves have no subscriptions.
    """
    connected = broker.consumers.groups.get(group)
    if connected is None or not connected.subscriptions or is_group_topic(topic):
        return True
    return topic in connected.subscriptions


def _add_popped(broker: BrokerState, counts: Counter[tuple[str, str]]) -> None:
    """Add the messages that are popped and not acknowledged to counts by topic and group."""
    in_flight_counts = broker.checkpoints.open_checkpoints.in_flight_counts.copy()
    for (group, topic, _), count in in_flight_counts.items():
        counts[topic, group] += count


def _in_flight(broker: BrokerState) -> Samples:
    """Yield the number of messages in flight of each group and topic.

    These are messages that the group has pulled and not committed, or popped and not acknowledged.
    A queue without a committed offset counts as 0. A sample is (topic, group, is_retry, is_system,
    count).
    """
    counts: Counter[tuple[str, str]] = Counter()
    for topic_at_group, queues in broker.offsets.pulled.copy().items():
        topic, _, group = topic_at_group.partition("@")
        for queue_id, fetched in queues.copy().items():
            committed = broker.offsets.committed(group, topic, queue_id)
            has_committed = committed >= 0
            # Also 0, so that there is a sample for each group that has fetched.
            counts[topic, group] += max(fetched - committed, 0) if has_committed else 0
    _add_popped(broker, counts)
    for (topic, group), count in counts.items():
        yield topic, group, *_flags(broker, topic), count


# Labels that several metrics have.
_OUT: Final = ("topic", "consumer_group", "is_retry", "is_system")
_IN: Final = ("topic", "message_type", "is_retry", "is_system")
_PAIR: Final = ("topic", "consumer_group")
_GROUP: Final = ("consumer_group",)
COUNTERS: Final = (
    Family("rocketmq_messages_in", "Messages stored.", _IN, _messages_in),
    Family(
        "rocketmq_throughput_in",
        "Bytes stored.",
        _IN,
        lambda broker: [
            (one.name, "normal", *_flags(broker, one.name), one.bytes_in) for one in _topics(broker)
        ],
    ),
    Family(
        "sluicemq_background_failures",
        "Failures of background jobs, by job.",
        ("job",),
        _samples_by_label(lambda broker: broker.supervisor.failures),
    ),
    Family(
        "sluicemq_messages_refused",
        "Sends that were not stored.",
        (),
        _single_sample(lambda broker: broker.send.failure_count),
    ),
    Family("rocketmq_messages_out", "Messages delivered.", _OUT, _delivered("messages_out")),
    Family("rocketmq_throughput_out", "Bytes delivered.", _OUT, _delivered("bytes_out")),
    Family(
        "sluicemq_messages_filtered",
        "Messages that a filter rejected.",
        _OUT,
        _delivered("filtered_count"),
    ),
    Family(
        "sluicemq_messages_retried",
        "Messages that are delivered to a group again.",
        _GROUP,
        _samples_by_label(lambda broker: broker.retries.retry_counts),
    ),
    Family(
        "rocketmq_send_to_dlq_messages",
        "Dead letters of a group.",
        _GROUP,
        _samples_by_label(lambda broker: broker.retries.dead_letter_counts),
    ),
    Family(
        "rocketmq_commit_messages",
        "Transactions committed.",
        ("topic",),
        _samples_by_label(lambda broker: broker.transactions.committed),
    ),
    Family(
        "rocketmq_rollback_messages",
        "Transactions rolled back.",
        ("topic",),
        _samples_by_label(lambda broker: broker.transactions.rolled_back),
    ),
    Family(
        "sluicemq_transactions_checks",
        "Transaction checks sent to producers.",
        (),
        _single_sample(lambda broker: broker.transactions.checker.sent_count),
    ),
    Family(
        "sluicemq_transactions_checks_unanswered",
        "Transaction checks without an answer before the next check.",
        (),
        _single_sample(lambda broker: broker.transactions.checker.unanswered_count),
    ),
    Family(
        "sluicemq_transactions_given_up",
        "Transactions that no producer decided in the maximum number of checks or time.",
        (),
        _single_sample(lambda broker: broker.transactions.abandoned_count),
    ),
    Family(
        "rocketmq_pop_revive_in_message",
        "Checkpoints and acknowledgements stored.",
        (*_PAIR, "revive_message_type", "put_status"),
        lambda broker: [
            (*key, "PUT_OK", count)
            for key, count in broker.checkpoints.stored_record_counts.copy().items()
        ],
    ),
    Family(
        "rocketmq_pop_revive_retry_messages",
        "Popped messages that were delivered again.",
        (*_PAIR, "put_status"),
        lambda broker: [
            (*pair, "PUT_OK", count)
            for pair, count in broker.checkpoints.revived_counts.copy().items()
        ],
    ),
    Family(
        "sluicemq_transactions_lost",
        "Prepared messages deleted before their transaction was decided.",
        (),
        _single_sample(lambda broker: broker.transactions.lost_count),
    ),
    Family(
        "sluicemq_filter_errors",
        "Failed evaluations of a filter. The message is not delivered.",
        (*_PAIR, "reason"),
        lambda broker: [
            (*pair, reason, count)
            for pair, troubles in broker.filter_watch.failures.copy().items()
            for reason, count in troubles.reasons.copy().items()
        ],
    ),
    Family(
        "sluicemq_messages_lost",
        "Messages that were deleted before the group read them.",
        _PAIR,
        _samples_by_label(lambda broker: broker.unread_monitor.deleted_unread_counts),
    ),
    Family(
        "sluicemq_log_files_deleted",
        "Files of the commit log that were deleted.",
        (),
        _single_sample(lambda broker: broker.store.retention.files_deleted),
    ),
    Family(
        "sluicemq_lane_messages_unmatched",
        "Messages that match the subscription of no lane.",
        _GROUP,
        _samples_by_label(
            lambda broker: {
                name: made.unmatched_count for name, made in broker.lanes.table.copy().items()
            }
        ),
    ),
    Family(
        "sluicemq_subscription_conflicts",
        "Subscriptions that differed from their group's.",
        _GROUP,
        _samples_by_label(lambda broker: broker.contracts.conflict_counts),
    ),
    Family(
        "sluicemq_property_columns_messages",
        "Messages decoded into property columns: in memory, or sealed into a file.",
        ("kind",),
        _samples_by_label(
            lambda broker: {
                "memory": broker.store.columns.rows_decoded,
                "file": broker.store.columns.rows_sealed,
            }
        ),
    ),
)
GAUGES: Final = (
    Family("rocketmq_consumer_lag_messages", "Messages not consumed yet.", _OUT, _lag),
    Family(
        "rocketmq_consumer_lag_latency",
        "Age in ms of the oldest message not consumed yet; 0 if there is none.",
        _OUT,
        _lag_latency,
    ),
    Family(
        "rocketmq_consumer_inflight_messages",
        "Messages in flight: delivered to consumers and not acknowledged.",
        _OUT,
        _in_flight,
    ),
    Family(
        "rocketmq_pop_checkpoint_buffer_size",
        "Pops with messages in flight.",
        (),
        _single_sample(lambda broker: len(broker.checkpoints.open_checkpoints)),
    ),
    Family(
        "sluicemq_consumer_lag_matching_messages",
        "Messages not consumed yet that match the filter of a connected group (an exact count).",
        _PAIR,
        lambda broker: [
            (*pair, count) for pair, (count, _) in broker.filter_watch.survey_results.items()
        ],
    ),
    Family(
        "sluicemq_consumer_lag_eta_seconds",
        "Seconds until a connected group has consumed them at its present rate. Absent while a "
        "queue does not get shorter.",
        _PAIR,
        lambda broker: [
            (*pair, eta_s)
            for pair, (_, eta_s) in broker.filter_watch.survey_results.items()
            if eta_s is not None
        ],
    ),
    Family(
        "rocketmq_half_messages",
        "Transactions that are not decided yet.",
        (),
        _single_sample(lambda broker: len(broker.transactions.table)),
    ),
    Family(
        "sluicemq_messages_at_risk",
        "Unread messages in the files of the log that retention deletes next.",
        _PAIR,
        lambda broker: [
            (*pair, expiring.message_count)
            for pair, expiring in broker.unread_monitor.expiring_unread.copy().items()
        ],
    ),
    Family(
        "sluicemq_loss_time_seconds",
        "Unix time at which the first unread message may be deleted.",
        _PAIR,
        lambda broker: [
            (*pair, expiring.earliest_deletion_ms / 1000)
            for pair, expiring in broker.unread_monitor.expiring_unread.copy().items()
        ],
    ),
    Family(
        "sluicemq_disk_used_percent",
        "Percent used of the fullest disk of the store.",
        (),
        _single_sample(lambda broker: broker.unread_monitor.disk_percent),
    ),
    Family(
        "sluicemq_sends_refused_disk_full",
        "1 while sends are refused because the disk is full.",
        (),
        _single_sample(lambda broker: int(broker.store.retention.is_refusing_sends)),
    ),
    Family(
        "sluicemq_store_failed",
        "1 after a disk error that makes the store refuse all writes until a restart.",
        (),
        _single_sample(lambda broker: int(broker.store.failure is not None)),
    ),
    Family(
        "rocketmq_consumer_connections",
        "Connected consumers.",
        _GROUP,
        lambda broker: [
            (name, len(group.members)) for name, group in broker.consumers.groups.copy().items()
        ],
    ),
    Family(
        "rocketmq_producer_connections",
        "Connected producers.",
        (),
        _single_sample(
            lambda broker: len(
                {peer for group in broker.producers.groups.copy().values() for peer in group}
            )
        ),
    ),
    Family(
        "sluicemq_group_lanes",
        "Lanes of the group: different subscriptions of its members.",
        _GROUP,
        lambda broker: [
            (name, len(made.lanes)) for name, made in broker.lanes.table.copy().items()
        ],
    ),
    Family(
        "sluicemq_group_refused_clients",
        "Connected clients whose subscription is refused by their strict group.",
        _GROUP,
        _samples_by_label(
            lambda broker: Counter(group for group, _ in broker.contracts.refusals.copy())
        ),
    ),
    Family(
        "sluicemq_property_columns_bytes",
        "Bytes of the property column files of the topics in use.",
        (),
        _single_sample(lambda broker: broker.store.columns.size_bytes),
    ),
    Family(
        "rocketmq_broker_permission",
        "Permission of the broker: 4 read, 2 write, 6 both.",
        (),
        _single_sample(lambda broker: broker.settings.broker.broker_permission),
    ),
    Family(
        "rocketmq_topic_number", "Topics.", (), _single_sample(lambda broker: len(broker.topics))
    ),
    Family(
        "rocketmq_consumer_group_number",
        "Consumer groups.",
        (),
        _single_sample(lambda broker: len(broker.groups)),
    ),
    Family(
        "rocketmq_storage_size",
        "Bytes of the commit log.",
        (),
        _single_sample(lambda broker: broker.store.written_offset - broker.store.log_start),
    ),
    Family(
        "rocketmq_storage_flush_behind_bytes",
        "Bytes written and not yet synced.",
        (),
        _single_sample(lambda broker: broker.store.written_offset - broker.store.synced_offset),
    ),
    Family(
        "rocketmq_storage_dispatch_behind_bytes",
        "Bytes that are not in a consume queue yet; always 0.",
        (),
        _single_sample(lambda broker: 0),
    ),
    Family(
        "rocketmq_storage_message_reserve_time",
        "Age of the oldest message in ms.",
        (),
        _single_sample(
            lambda broker: (
                broker.clock.now_ms() - time_ms
                if (time_ms := broker.store.reader.earliest_time_ms()) > 0
                else 0
            )
        ),
    ),
    Family(
        "sluicemq_replica_lag_bytes",
        "Bytes of the commit log that a slave does not have.",
        ("slave",),
        lambda broker: [(slave, size) for slave, size, _ in _replica_lags(broker)],
    ),
    Family(
        "sluicemq_replica_lag_milliseconds",
        "How long a slave has not had the whole commit log, in ms.",
        ("slave",),
        lambda broker: [(slave, lag_ms) for slave, _, lag_ms in _replica_lags(broker)],
    ),
    Family(
        "sluicemq_replicas_in_sync",
        "Replicas in sync, including the master.",
        (),
        lambda broker: (
            [(1 + sum(map(broker.in_sync.is_in_sync, broker.in_sync.slaves.copy())),)]
            if broker.in_sync is not None
            else []
        ),
    ),
    Family(
        "rocketmq_processor_watermark",
        "Requests that wait in the broker.",
        ("processor",),
        lambda broker: [
            ("send", 0 if broker.group_commit.is_idle else 1),
            ("pull", len(broker.polls)),
        ],
    ),
)
ACCESS_METRICS: Final = (
    Family(
        "sluicemq_requests_refused",
        "Requests that access control refused. The access key ? stands for unknown keys.",
        ("access_key",),
        _samples_by_label(lambda broker: _guard(broker).refusal_counts),
    ),
    Family(
        "sluicemq_access_accounts",
        "Accounts in force.",
        (),
        _single_sample(lambda broker: len(_guard(broker).accounts)),
        is_gauge=True,
    ),
    Family(
        "sluicemq_access_loads",
        "Loads of the access rules, by result.",
        ("result",),
        _samples_by_label(
            lambda broker: {
                "in_force": _guard(broker).load_count,
                "refused": _guard(broker).failed_load_count,
            }
        ),
    ),
    Family(
        "sluicemq_access_rules_stale",
        "1 while the latest rule files are not in force.",
        (),
        _single_sample(lambda broker: 1 if _guard(broker).error else 0),
        is_gauge=True,
    ),
)


def _guard(broker: BrokerState) -> Any:
    """Return the access control of the broker. It is not None where its metrics are collected."""
    return broker.guard


_NODE_LABELS: Final = ("cluster", "node_type", "node_id")
"""The labels that every metric has."""


def _node_labels(broker: BrokerState) -> list[str]:
    """Return the values of `_NODE_LABELS`."""
    config = broker.settings.broker
    return [config.cluster_name, "broker", config.broker_name]


def _message_sizes(broker: BrokerState) -> "Metric":
    """Return the histogram of the sizes of the message bodies stored since the start, in bytes."""
    from prometheus_client.core import (  # noqa: PLC0415 - an optional dependency
        HistogramMetricFamily,
    )

    # At index n: the number of bodies of more than 2**(n-1) and at most 2**n bytes.
    counts_by_bits = broker.send.body_size_counts
    buckets = []
    for bound, bits in SIZE_BUCKETS:
        smaller_count = sum(counts_by_bits[: bits + 1])
        buckets.append((bound, float(smaller_count)))
    buckets.append(("+Inf", float(sum(counts_by_bits))))
    stored_bytes = sum(topic.bytes_in for topic in _topics(broker))
    histogram = HistogramMetricFamily(
        "rocketmq_message_size", "Bytes of message bodies.", labels=_NODE_LABELS
    )
    histogram.add_metric(_node_labels(broker), buckets, stored_bytes)
    return histogram


def _send_latencies(broker: BrokerState) -> "Metric":
    """Return the histogram of the latencies of sends, in seconds.

    A latency is the time from the first message of a group commit to its answers.
    """
    from prometheus_client.core import (  # noqa: PLC0415 - an optional dependency
        HistogramMetricFamily,
    )

    bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
    cumulative_counts = map(float, accumulate(broker.group_commit.latency_counts))
    buckets = list(zip(bounds, cumulative_counts, strict=True))
    histogram = HistogramMetricFamily(
        "sluicemq_send_latency_seconds",
        "Time from the first message of a group commit to its answers.",
        labels=_NODE_LABELS,
    )
    histogram.add_metric(_node_labels(broker), buckets, broker.group_commit.latency_sum_s)
    return histogram


class BrokerCollector:
    """A collector for prometheus-client that reads the counters of a broker."""

    def __init__(self, broker: Callable[[], BrokerState]) -> None:
        """Collect from the components that `broker()` returns: each role of a broker has others."""
        self._broker = broker

    def collect(self) -> "Iterator[Metric]":
        """Yield each metric of the broker with its present values, for prometheus-client.

        The metrics of access control are yielded only if it is enabled. The metrics of
        `broker.metric_collectors`, such as those of a proxy in the process, come last.
        """
        from prometheus_client.core import (  # noqa: PLC0415 - an optional dependency
            CounterMetricFamily,
            GaugeMetricFamily,
        )

        broker = self._broker()
        families = [*COUNTERS, *(family._replace(is_gauge=True) for family in GAUGES)]
        if broker.guard is not None:
            families += ACCESS_METRICS
        node_labels = _node_labels(broker)
        for family in families:
            metric_class: Any = GaugeMetricFamily if family.is_gauge else CounterMetricFamily
            metric = metric_class(family.name, family.text, labels=[*_NODE_LABELS, *family.labels])
            for *labels, sample in family.samples(broker):
                metric.add_metric([*node_labels, *labels], sample)
            yield metric
        yield _message_sizes(broker)
        yield _send_latencies(broker)
        for collect in broker.metric_collectors:
            yield from collect()

    def describe(self) -> "list[Metric]":
        """Return no descriptions.

        Without this method, a registry would collect all metrics when the collector is registered,
        and the store may not be ready then.
        """
        return []


def _store_failure(broker: BrokerState) -> list[str]:
    """Return a list of one sentence that says why the store refuses all writes until a restart.

    Return [] if the store does not refuse them.
    """
    error = broker.store.failure
    if error is None:
        return []
    return [
        f"the store refuses all writes until the broker is restarted: {error}."
        " Check the disk, then restart the broker."
    ]


def find_health_problems(broker: BrokerState) -> list[str]:
    """Return the reasons to restart the process, one sentence each, for `/health`."""
    return event_loop_problems(broker.clock.monotonic_s() - broker.last_sample_s) + _store_failure(
        broker
    )


def find_readiness_problems(broker: BrokerState, registration: Registration) -> list[str]:
    """Return the reasons why clients should use another broker now, for the page `/ready`.

    Each reason is one sentence. The list is empty if the broker is ready. Reasons are: the store
    refuses writes, the disk is full, replication refuses sends, or no name server accepts the
    registration. A broker without name servers needs no registration.
    """
    servers = registration.name_servers
    problems = _store_failure(broker)
    if broker.store.retention.is_refusing_sends:
        problems.append("the disk is full, so sends are refused.")
    if broker.in_sync is not None and broker.in_sync.refusal is not None:
        problems.append(f"sends are refused: {broker.in_sync.refusal.remark}")
    if servers and not any(server.is_registered and not server.failures for server in servers):
        problems.append(
            "no name server accepts the registration, so clients do not find the broker."
        )
    return problems
