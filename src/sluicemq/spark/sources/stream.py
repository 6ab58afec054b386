"""The streaming source: offsets, admission control, recovery.

Spark keeps one process with one reader for a running query, and calls it at each trigger:

    latestOffset(start, limit)   where the micro-batch ends: at everything there is, or after
                                 `limit` offsets of it
    partitions(start, end)       the ranges of the micro-batch; called again after a restart, with
                                 offsets from the checkpoint
    commit(end)                  everything before `end` is processed: the offsets are committed to
                                 the consumer group

Offsets are exact positions in queues, so a micro-batch that is planned again after a failure reads
the same messages. The reader detects what can go wrong: retention that deleted messages before they
were read, a topic that was deleted and created again, queues and topics that disappeared
(`identity`), a checkpoint of another topic or another filter. If two queries use one checkpoint,
Spark notices that: the second one to write the offsets of a micro-batch fails, or in one session
stops the first. A queue that appears while the stream runs is read from its first message. A broker
that does not respond keeps the offsets of its queues until it is back.

Filters do not change offsets: messages that the broker leaves out count as read. Admission control
counts offsets, so with a filter a micro-batch may contain fewer rows.

An end offset that equals the last one is returned as Spark passed it. Spark compares offsets as
text, and would run empty micro-batches without end for two texts of the same offset.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from sluicemq.client.core import requests
from sluicemq.client.core.requests import PullResponse, PullStatus, parse_pull_response
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import (
    ConfigurationError,
    FilterSyntaxError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.filter.subscriptions import to_tree
from sluicemq.model.subscription import ALL, SQL92, Subscription
from sluicemq.model.topic import RETRY_PREFIX, MessageQueue
from sluicemq.spark.errors import errors_without_traceback, retry_during_outage
from sluicemq.spark.filters import (
    PushedFilters,
    build_subscription,
    log_filter_findings,
    try_at_brokers,
)
from sluicemq.spark.options import STREAM, Options, parse_options
from sluicemq.spark.sources.checkpoints import (
    Anchors,
    Offsets,
    make_checkpoint,
    offsets_to_table,
    parse_anchors,
    parse_checkpoint,
    wrong_topic_error,
)
from sluicemq.spark.sources.identity import (
    TopicIdentity,
    fetch_existing_bounds,
    find_gone_queues,
    set_anchors,
)
from sluicemq.spark.sources.offsets import (
    Bounds,
    QueueRange,
    RangePartition,
    check_selector,
    fetch_bounds,
    find_broker_addresses,
    make_partitions,
    make_read_plan,
    open_admin,
    parse_topics,
    queue_label,
    resolve_starting_offsets,
)
from sluicemq.wire.bodies import CONSUME_ACTIVELY, ConsumerData, Heartbeat

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # Spark 4.1: no admission control
    SupportsTriggerAvailableNow = None

logger = logging.getLogger(__name__)
T = TypeVar("T")
SAMPLE_MESSAGES: Final = 32
SAMPLE_BYTES: Final = 256 * 1024
SAMPLE_ROUNDS_MAX: Final = 4


# ---- admission control


def admit_offsets(
    start: Mapping[MessageQueue, int], latest: Offsets, count_max: int | None
) -> Offsets:
    """Return the end offset of each queue for the next micro-batch.

    `start` has the offset of each queue; a queue that is not in it begins at 0. `latest` has the
    largest possible ends. If the queues have more than `count_max` offsets in total, each gets a
    part of the limit in proportion to its lag, so that every queue advances over time. None means
    no limit. A queue never goes back: if `latest` is lower than its start, it ends at its start.
    """
    lags = {queue: max(0, end - start.get(queue, 0)) for queue, end in latest.items()}
    shares = lags
    if count_max is not None and sum(lags.values()) > count_max:
        shares = _share_limit(lags, count_max)
    return {queue: start.get(queue, 0) + share for queue, share in shares.items()}


def _share_limit(lags: Mapping[MessageQueue, int], count_max: int) -> Offsets:
    """Divide `count_max` among the queues, in proportion to their lags.

    The shares add up to `count_max`. The sum of the lags must be greater than `count_max`.
    """
    lag_sum = sum(lags.values())
    shares = {}
    remainders = {}
    for queue, lag in lags.items():
        shares[queue], remainders[queue] = divmod(count_max * lag, lag_sum)
    # Rounding down leaves some offsets of the limit, which the largest remainders get.
    unassigned_count = count_max - sum(shares.values())
    by_remainder = sorted(lags, key=lambda queue: (-remainders[queue], queue))
    for queue in by_remainder[:unassigned_count]:
        shares[queue] += 1
    return shares


def admit_bytes(
    admin: Admin, group: str, start: Mapping[MessageQueue, int], latest: Offsets, bytes_max: int
) -> Offsets:
    """Return the end offset of each queue for a micro-batch with about `bytes_max` stored bytes.

    `start` has the start of each queue, and `latest` the largest possible ends. The queues with a
    lag share the limit equally, and each advances by at least one message.

    RocketMQ has no request for the bytes of a range. So the mean size of a message is estimated
    from samples at the start, in the middle and at the end of the range. If sizes change slowly,
    the result is accurate to some per cent. It is not if a queue alternates between thousands of
    small and thousands of large messages. Raises SluiceError if a broker fails.
    """
    ends = dict(latest)
    lagging = [queue for queue, end in latest.items() if end > start.get(queue, 0)]
    bytes_per_queue = max(1, bytes_max // max(1, len(lagging)))
    for queue in lagging:
        first_offset = start.get(queue, 0)
        lagging_range = QueueRange(queue, first_offset, latest[queue])
        ends[queue] = first_offset + _admit_count(admin, group, lagging_range, bytes_per_queue)
    return ends


def _admit_count(admin: Admin, group: str, lagging: QueueRange, bytes_max: int) -> int:
    """Return how many messages from the start of a range have about `bytes_max` stored bytes.

    The result is from 1 to the size of the range. It is first estimated from a sample at the start.
    Then samples in the middle and at the end of that part are added, and again as long as this
    reduces the result by more than a fifth.
    """
    first_mean = sample_mean_bytes(admin, group, lagging.queue, lagging.start)
    count = min(lagging.size, _messages_in(bytes_max, first_mean))
    for _ in range(SAMPLE_ROUNDS_MAX):
        middle_and_last = {lagging.start + count // 2, lagging.start + count - 1}
        further_means = [
            sample_mean_bytes(admin, group, lagging.queue, offset)
            for offset in middle_and_last - {lagging.start}
        ]
        known_means = [mean for mean in (first_mean, *further_means) if mean]
        mean_bytes = sum(known_means) / max(1, len(known_means))
        previous_count = count
        count = min(count, _messages_in(bytes_max, mean_bytes))
        has_shrunk_much = count * 5 < previous_count * 4
        if not has_shrunk_much:
            break
    return count


def _messages_in(bytes_max: int, mean_bytes: float) -> int:
    """Return how many messages of a mean size fit into `bytes_max`; 1 if the size is unknown."""
    if not mean_bytes:
        return 1
    return max(1, int(bytes_max / mean_bytes))


def sample_mean_bytes(admin: Admin, group: str, queue: MessageQueue, offset: int) -> float:
    """Return the mean stored size of up to 32 messages from `offset` on, in bytes.

    It is 0.0 if there is no message. Raises SluiceError.
    """
    answer = _pull(admin, group, queue, offset, SAMPLE_MESSAGES, SAMPLE_BYTES)
    if answer is None:
        return 0.0
    return len(answer.data) / max(1, answer.next_offset - offset)


def _pull(
    admin: Admin, group: str, queue: MessageQueue, offset: int, count_max: int, bytes_max: int
) -> PullResponse | None:
    """Pull messages from `offset` on and return the response, or None if there are no messages.

    At most `count_max` messages and `bytes_max` bytes are pulled. Raises SluiceError.
    """
    command = requests.pull(
        group,
        queue,
        offset,
        count_max=count_max,
        bytes_max=bytes_max,
        subscription=Subscription(queue.topic, ALL),
    )
    address = admin.address(queue)
    answer = parse_pull_response(admin.call(address, command), address)
    return answer if answer.status is PullStatus.FOUND else None


def register_group(admin: Admin, group: str, topics: Sequence[str]) -> None:
    """Make a consumer group visible to mqadmin, if it has never had a consumer.

    mqadmin finds the brokers of a group by its retry topic. Do nothing if this topic exists.
    Otherwise send a heartbeat to each broker of `topics`, which creates the topic. Then the client
    leaves the group, because the group's consumers would otherwise leave queues to it. Raises
    SluiceError if a broker fails.
    """
    if admin.find_route(RETRY_PREFIX + group) is not None:
        return
    client_id = f"spark@{os.getpid()}"
    consumer = ConsumerData(group, CONSUME_ACTIVELY)
    for address in find_broker_addresses(admin, topics).values():
        admin.call(address, requests.heartbeat(Heartbeat(client_id, consumers=(consumer,))))
        admin.call(address, requests.unregister(client_id, consumer=group))


# ---- the readers


def create_stream_reader(user_options: Mapping[str, str], schema: StructType) -> Any:
    """Return the stream reader for the Spark version that is running.

    `user_options` are the options as Spark passes them. If they are wrong, no error is raised here.
    The result is then a `FailedStreamReader`, which raises the error when Spark uses it.
    """
    try:
        options = parse_options(user_options, STREAM)
        if SupportsTriggerAvailableNow is not None:
            return AdmissionControlStreamReader(options, schema)
        for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger"):
            if options[name] is not None:
                raise ConfigurationError(
                    f"the option {name!r} needs Spark 4.2 or later.",
                    fix="Remove it, or upgrade pyspark.",
                )
        return PlainStreamReader(options, schema)
    except SluiceError as error:
        return FailedStreamReader(error)


class FailedStreamReader(DataSourceStreamReader):  # type: ignore[misc]
    """Takes the place of a reader whose creation failed, and raises the error when Spark uses it.

    If the creation of a reader raises an error, pyspark 4.2 tries to stop the reader that does not
    exist, and reports that failure (python_streaming_source_runner, `finally: reader.stop()`)
    instead of the reason.
    """

    def __init__(self, error: SluiceError) -> None:
        self.error = error

    def initialOffset(self, *_: Any) -> Any:  # noqa: N802 - Spark's name
        """Raise the error."""
        with errors_without_traceback():
            raise self.error

    latestOffset = partitions = read = initialOffset  # noqa: N815 - Spark's names


class _MicroBatch(NamedTuple):
    """The plan of a micro-batch.

    `starts` has the first offset of each queue that exists, and `ends` the offset after its last
    one. `ends` also contains queues whose broker does not respond, with their old offset. `anchors`
    are the anchors at the end. `restarted` are the queues that begin at another offset than the
    checkpoint says, because their topic was created again or messages were lost.
    """

    starts: Offsets
    ends: Offsets
    anchors: Anchors
    restarted: Collection[MessageQueue]


class StreamReader(DataSourceStreamReader):  # type: ignore[misc]
    """The common part of the readers for both Spark versions.

    The reader in the driver's process keeps an Admin with its connections. `available_now_end` is
    where a query with Trigger.AvailableNow ends, else None.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        """Parse the options, and build the plan for reading. No broker is asked.

        Raises ConfigurationError for wrong options or a schema that does not fit, and
        FilterSyntaxError for a wrong filter.
        """
        self.options = options
        self.topics = parse_topics(options)
        self.has_several_topics = self.topics.pattern is not None or len(self.topics.names) > 1
        options.require("nameServers")
        self.available_now_end: Offsets | None = None
        self._admin: Admin | None = None
        self._is_filter_checked = False
        self._is_filter_change_logged = False
        self._is_group_registered = False
        self._known_offsets: Offsets = {}
        """The end of the last micro-batch; only `PlainStreamReader` needs it."""
        self._known_anchors: Anchors = {}
        """The anchors at that end."""
        self._planned_end: dict[str, Any] | None = None
        """The last checkpoint of `latestOffset`, whose queues were checked when it was made."""
        self._set_plan(schema)
        self.identity = TopicIdentity(self.plan.group, fail_on_data_loss=options["failOnDataLoss"])

    def _set_plan(self, schema: StructType) -> None:
        """Set `plan`, which says how executors read, and the attributes of the filter.

        These are `expression`, the filter as checkpoints contain it, and `matches_nothing`.
        """
        label = self.topics.label
        subscription_and_tags = build_subscription(
            label, self.options["filter.tags"], self.options["filter.sql"], PushedFilters()
        )
        self.matches_nothing = subscription_and_tags is None
        subscription, exact_tags = subscription_and_tags or (Subscription(label), None)
        self.plan = replace(
            make_read_plan(self.options, schema), subscription=subscription, exact_tags=exact_tags
        )
        # In the form in which checkpoints contain it.
        self.expression = f"{subscription.kind} {subscription.expression}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_admin": None}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the checkpoint at which a new stream starts.

        Its offsets come from the options, by default `latest`. If a broker is not reachable, the
        error is raised at once, without a retry.
        """

        def find_start(admin: Admin) -> tuple[Bounds, Offsets]:
            bounds = fetch_bounds(admin, self.topics.resolve(admin))
            return bounds, resolve_starting_offsets(admin, self.options, bounds, "latest")

        with errors_without_traceback():
            bounds, offsets = self._call_admin(find_start, is_first=True)
            moved = {queue: (lowest, offsets[queue]) for queue, (lowest, _) in bounds.items()}
            anchors = self._call_admin(self.identity.renew_anchors, {}, moved)
            return self._make_checkpoint(offsets, anchors) | {"initial": True}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the partitions of the micro-batch between the checkpoints `start` and `end`.

        The list is empty if no queue has advanced. After a restart, Spark passes checkpoints that
        were written before. Then each queue is checked by its anchor, a message that shows whether
        the queue is still the same.

        Raises OffsetOutOfRangeError if messages are gone and loss is an error, RouteNotFoundError
        if a broker with a queue to read is not registered, and the client's errors.
        """
        with errors_without_traceback():
            starts = self._parse_offsets(start)
            ends = self._parse_offsets(end)
            restarts = self._parse_offsets(end, "from")
            starts |= restarts
            # The queues to read, with their ends. A queue that is in no start is new.
            moved = {queue: stop for queue, stop in ends.items() if stop > starts.get(queue, -1)}
            if not moved or self.matches_nothing:
                return []

            end_anchors = parse_anchors(end)
            anchors_to_check: tuple[Anchors, ...] = ()
            if end != self._planned_end:
                # The queues of a micro-batch that this process has just planned were checked then.
                start_anchors = {
                    queue: anchor
                    for queue, anchor in parse_anchors(start).items()
                    if queue not in restarts
                }
                anchors_to_check = (end_anchors, start_anchors)
            ranges, addresses = self._call_admin(self._plan_ranges, starts, moved, anchors_to_check)
            partitions = make_partitions(self.options, ranges, addresses)
            return list(set_anchors(partitions, end_anchors, is_batch=False))

    def _plan_ranges(
        self, admin: Admin, starts: Offsets, ends: Offsets, anchors: Sequence[Anchors]
    ) -> tuple[list[QueueRange], dict[str, str]]:
        """Return the ranges to read of the queues in `ends`, and the addresses of their brokers.

        A queue that does not exist any more is left out. A queue that is not in `starts` is read
        from its first offset. `anchors` are messages by which the queues are recognised. Raises
        OffsetOutOfRangeError if messages are gone and loss is an error, RouteNotFoundError if the
        broker of a queue is not registered, and the client's errors.
        """
        bounds, _ = fetch_existing_bounds(admin, sorted({queue.topic for queue in ends}))
        gone = find_gone_queues(admin, ends, bounds)
        self.identity.check_gone(gone)
        present = {queue: stop for queue, stop in ends.items() if queue not in gone}
        addresses = find_broker_addresses(admin, sorted({queue.topic for queue in present}))
        ranges = []
        for queue, stop in sorted(present.items()):
            if queue.broker not in addresses:
                raise RouteNotFoundError(
                    f"the broker of {queue_label(queue)} is not in the route of {queue.topic!r}.",
                    fix="Start it again; the stream continues where it was.",
                )
            queue_bounds = admin.offsets(queue)
            planned = QueueRange(queue, starts.get(queue, queue_bounds[0]), stop)
            queue_anchors = [anchor_by_queue.get(queue) for anchor_by_queue in anchors]
            ranges.append(self.identity.clip_range(admin, planned, queue_bounds, queue_anchors))
        return ranges, addresses

    def read(self, partition: RangePartition) -> Any:
        """Yield the messages of one partition as Arrow batches. Spark calls this in an executor."""
        from sluicemq.spark.sources.reader import read_range  # noqa: PLC0415 - executors only

        with errors_without_traceback():
            yield from read_range(self.plan, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the offsets of a checkpoint to the consumer group, for monitoring.

        Do nothing without the option `group`. The first call also makes the group visible to
        mqadmin. An error is only logged, because the stream itself continues from its checkpoint.
        """
        group = self.options["group"]
        if group is None:
            return
        try:
            offsets = self._parse_offsets(end)
            if not self._is_group_registered:
                topics = sorted({queue.topic for queue in offsets})
                self._call_admin(register_group, group, topics)
                self._is_group_registered = True
            self._call_admin(_commit_offsets, group, offsets)
        except SluiceError as error:
            logger.warning("cannot commit offsets to the group %r: %s", group, error)

    def stop(self) -> None:
        """Close the connections of this process. The next call opens them again."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _call_admin(self, work: Callable[..., T], *arguments: Any, is_first: bool = False) -> T:
        """Return `work(admin, *arguments)`, and repeat the call during an outage.

        After a failure, the connections are closed, and the next attempt opens new ones. The
        attempts end after the option timeoutMs. With `is_first`, there is only one attempt, because
        the stream has not reached a broker yet, and the address may be wrong. Raises the error of
        `work`.
        """

        def attempt() -> T:
            """Call `work` once, with an admin that is opened if there is none."""
            if self._admin is None:
                self._admin = open_admin(self.options)
            try:
                return work(self._admin, *arguments)
            except SluiceError:
                self.stop()
                raise

        return attempt() if is_first else retry_during_outage(attempt, self.plan.timeout_s)

    def _parse_offsets(self, checkpoint: Mapping[str, Any], section: str = "queues") -> Offsets:
        """Return the offsets in one section of a checkpoint, "queues" or "from", and check them.

        Raises ConfigurationError for a checkpoint of another topic. Under `onFilterChange=fail`,
        also raises it for a checkpoint with another filter. Otherwise the first change of the
        filter is logged, and the filters of later checkpoints are not compared.
        """
        label = self.topics.label
        only_topic = None if self.has_several_topics else label
        offsets = parse_checkpoint(checkpoint, only_topic, section)
        for queue in offsets:
            if not self.topics.includes(queue.topic):
                raise wrong_topic_error(queue.topic, label)
        if not self._is_filter_change_logged:
            self._check_filter(checkpoint.get("filter"))
        return offsets

    def _check_filter(self, written: str | None) -> None:
        """Compare the filter in a checkpoint with the filter of the stream.

        `written` is the field `filter` of the checkpoint, such as `TAG UA||AA`. If the filters
        differ, ConfigurationError is raised under `onFilterChange=fail`. Under
        `onFilterChange=continue`, the change is logged, and `_is_filter_change_logged` becomes
        True.
        """
        if written == self.expression or _have_equal_trees(str(written), self.expression):
            return
        if self.options["onFilterChange"] == "fail":
            raise ConfigurationError(
                f"the checkpoint was written with the filter {written!r}, but the stream has"
                f" {self.expression!r}.",
                fix="Use another checkpointLocation, or onFilterChange=continue.",
            )
        logger.warning("the filter changed from %r to %r", written, self.expression)
        self._is_filter_change_logged = True

    def _plan_micro_batch(
        self,
        start: Offsets,
        anchors: Anchors,
        count_max: int | None = None,
        bytes_max: int | None = None,
    ) -> _MicroBatch:
        """Plan the next micro-batch, which begins at the offsets `start`.

        A queue that is not in `start` is new and begins at its first offset. `anchors` are the
        messages in the checkpoint by which the queues are recognised. The micro-batch has at most
        `count_max` offsets and about `bytes_max` bytes; None means no limit. It ends at
        `available_now_end` at the latest. Queues that begin again at another offset than `start`
        are logged. Raises OffsetOutOfRangeError if messages are gone and loss is an error,
        RouteNotFoundError if a topic cannot be read, and the client's errors.
        """
        bounds, gone = self._call_admin(self._fetch_bounds_and_gone, start)
        start = {queue: offset for queue, offset in start.items() if queue not in gone}
        anchors = {queue: anchor for queue, anchor in anchors.items() if queue not in gone}

        starts = self._find_starts(start, bounds, anchors)
        latest = self._find_latest_ends(bounds)
        if bytes_max is not None:
            latest = self._call_admin(admit_bytes, self.plan.group, starts, latest, bytes_max)
        # A queue whose broker does not respond keeps its offset of the checkpoint.
        ends = start | admit_offsets(starts, latest, count_max)

        restarted = {
            queue for queue, offset in starts.items() if start.get(queue, offset) != offset
        }
        for queue in restarted:
            anchors.pop(queue, None)  # it is of the deleted topic, or of lost messages
        moved = {}
        for queue, end in ends.items():
            has_moved = queue in restarted or start.get(queue) != end
            if queue in bounds and has_moved:
                lowest, _ = bounds[queue]
                moved[queue] = (lowest, end)
        end_anchors = self._call_admin(self.identity.renew_anchors, anchors, moved)
        return _MicroBatch(starts, ends, end_anchors, restarted)

    def _find_starts(self, start: Offsets, bounds: Bounds, anchors: Anchors) -> Offsets:
        """Return the offset at which the next micro-batch begins, for each queue in `bounds`.

        `start` and `anchors` come from the checkpoint. A queue that is not in `start` begins at its
        first offset. Topics that were deleted and created again are logged. For these,
        OffsetOutOfRangeError is raised if loss is an error.
        """
        starts = {queue: lowest for queue, (lowest, _) in bounds.items()}
        for queue, offset in start.items():  # in the order of the checkpoint
            if queue in bounds:
                starts[queue] = self._call_admin(
                    self.identity.find_resume_offset,
                    queue,
                    offset,
                    bounds[queue],
                    anchors.get(queue),
                )
        self.identity.log_recreated_topics()
        return starts

    def _find_latest_ends(self, bounds: Bounds) -> Offsets:
        """Return the largest offset, by queue, at which the next micro-batch may end.

        With Trigger.AvailableNow, the result contains only the queues of `available_now_end`.
        """
        if self.available_now_end is None:
            return {queue: highest for queue, (_, highest) in bounds.items()}
        latest = {}
        for queue, stop in self.available_now_end.items():
            if queue in bounds:
                _, highest = bounds[queue]
                latest[queue] = min(highest, stop)
        return latest

    def _fetch_bounds_and_gone(
        self, admin: Admin, known_offsets: Offsets
    ) -> tuple[Bounds, Offsets]:
        """Return the bounds of every existing queue, and the queues that do not exist any more.

        `known_offsets` are the offsets of the checkpoint. Queues that do not exist any more are
        logged. For these, OffsetOutOfRangeError is raised if loss is an error. Raises
        RouteNotFoundError for a listed topic that was never read, or whose broker is not
        registered.
        """
        bounds, missing_topics = self._fetch_bounds(admin)
        gone = find_gone_queues(admin, known_offsets, bounds)
        self.identity.check_gone(gone)
        for topic in missing_topics:
            known_queues = {queue for queue in known_offsets if queue.topic == topic}
            was_never_read = not known_queues
            are_some_not_gone = not known_queues <= gone.keys()
            if are_some_not_gone or (was_never_read and self.options["failOnDataLoss"]):
                admin.route(topic)  # raises RouteNotFoundError with the reason
        return bounds, gone

    def _fetch_bounds(self, admin: Admin) -> tuple[Bounds, list[str]]:
        """Return the bounds of every existing queue, and the listed topics that do not exist.

        At the first existing topic, the brokers also check the filter, and surprising properties of
        the option `filter.sql` are logged. Raises RequestError if a broker does not accept the
        filter, and the client's errors.
        """
        topics = self.topics.resolve(admin, allow_empty=True)
        bounds, missing_topics = fetch_existing_bounds(admin, topics)
        existing_topics = [topic for topic in topics if topic not in missing_topics]
        if existing_topics and not self._is_filter_checked:
            self._check_filter_at_brokers(admin, existing_topics)
        return bounds, missing_topics

    def _check_filter_at_brokers(self, admin: Admin, topics: Sequence[str]) -> None:
        """Ask each broker of the topics whether it accepts the filter, and log findings about it.

        Raises RequestError if a broker does not accept it.
        """
        subscription = self.plan.subscription
        if subscription is None:
            return
        if subscription.kind == SQL92:
            check_selector(admin, topics, self.plan.group, subscription.expression)
        log_filter_findings(
            self.options["filter.sql"],
            lambda expression: try_at_brokers(admin, topics, expression),
        )
        self._is_filter_checked = True

    def _make_checkpoint(self, offsets: Offsets, anchors: Anchors | None = None) -> dict[str, Any]:
        """Return the checkpoint of this stream with these offsets and anchors."""
        return make_checkpoint(
            self.topics.label,
            self.expression,
            offsets,
            has_several_topics=self.has_several_topics,
            anchors=anchors,
        )

    def _make_end_checkpoint(self, stored: Offsets, micro_batch: _MicroBatch) -> dict[str, Any]:
        """Return the checkpoint at the end of a micro-batch.

        `stored` are the offsets of the previous checkpoint. The section `from` of the new
        checkpoint has the start of each queue whose start is not in `stored`: a new queue, or a
        queue that begins again at another offset. It is left out if there are none.
        """
        unstored_starts = {}
        for queue, offset in micro_batch.starts.items():
            is_start_stored = queue in stored and queue not in micro_batch.restarted
            if queue in micro_batch.ends and not is_start_stored:
                unstored_starts[queue] = offset
        checkpoint = self._make_checkpoint(micro_batch.ends, micro_batch.anchors)
        if unstored_starts:
            table = offsets_to_table(unstored_starts, by_topic=self.has_several_topics)
            checkpoint["from"] = table
        return checkpoint


def _commit_offsets(admin: Admin, group: str, offsets: Offsets) -> None:
    """Commit the offset of each queue to a consumer group. Raises the client's errors."""
    for queue, offset in offsets.items():
        admin.commit_offset(group, queue, offset)


def _have_equal_trees(first_filter: str, second_filter: str) -> bool:
    """Return whether two filters are SQL92 expressions with equal trees.

    A filter is its kind and its expression, such as `SQL92 delay > 60`. The texts of equal
    expressions may differ, because an earlier version joined conditions in another way. Return
    False if one of the expressions does not compile.
    """
    trees = []
    for described_filter in (first_filter, second_filter):
        kind, _, expression = described_filter.partition(" ")
        if kind != SQL92:
            return False
        try:
            trees.append(to_tree(Subscription("", expression, kind)))
        except FilterSyntaxError:
            return False
    return trees[0] == trees[1]


class PlainStreamReader(StreamReader):
    """The reader for Spark 4.1. Every micro-batch ends at the messages that exist then.

    Spark does not pass it the start of a micro-batch, so the reader remembers the end of the last
    one.
    """

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the checkpoint at the end of the next micro-batch, and remember its offsets."""
        with errors_without_traceback():
            micro_batch = self._plan_micro_batch(self._known_offsets, self._known_anchors)
            self._known_offsets = micro_batch.ends
            self._known_anchors = micro_batch.anchors
            # The ends contain every queue, so `from` contains restarted queues only.
            return self._make_end_checkpoint(micro_batch.ends, micro_batch)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the partitions of the micro-batch between the checkpoints `start` and `end`.

        The offsets and anchors of `start` are stored first, for queues that this process does not
        know yet, as after a restart. Raises the errors of `StreamReader.partitions`.
        """
        with errors_without_traceback():
            self._known_offsets = self._parse_offsets(start) | self._known_offsets
            self._known_anchors = parse_anchors(start) | self._known_anchors
        return super().partitions(start, end)


if SupportsTriggerAvailableNow is not None:

    class AdmissionControlStreamReader(StreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
        """The reader for Spark 4.2 and later.

        It supports admission control, Trigger.AvailableNow and the report of the latest offset.
        """

        def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
            """Return the limit that the options set for a micro-batch."""
            count_max = self.options["maxOffsetsPerTrigger"]
            bytes_max = self.options["maxBytesPerTrigger"]
            if count_max is not None:
                return ReadMaxRows(count_max)
            return ReadAllAvailable() if bytes_max is None else ReadMaxBytes(bytes_max)

        def latestOffset(  # noqa: N802 - Spark's name
            self, start: dict[str, Any], limit: Any
        ) -> dict[str, Any]:
            """Return the checkpoint at the end of the micro-batch that begins at `start`.

            Return `start` itself if there is nothing to read.
            """
            with errors_without_traceback():
                is_limited = not isinstance(limit, ReadAllAvailable)
                count_max = getattr(limit, "max_rows", None)
                bytes_max = self.options["maxBytesPerTrigger"] if is_limited else None
                known = self._parse_offsets(start)
                micro_batch = self._plan_micro_batch(
                    known, parse_anchors(start), count_max, bytes_max
                )
                if micro_batch.ends == known and not micro_batch.restarted:
                    return start
                # Spark does not store the initial offsets, so the checkpoint has to contain them.
                stored = {} if start.get("initial") else known
                self._planned_end = self._make_end_checkpoint(stored, micro_batch)
                return self._planned_end

        def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
            """Return a checkpoint with the end of every queue, for Spark's progress reports."""
            with errors_without_traceback():
                bounds, _ = self._call_admin(self._fetch_bounds)
                ends = {queue: highest for queue, (_, highest) in bounds.items()}
                return self._make_checkpoint(ends)

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
            """Let the query end at the messages that exist now.

            Store the present end offset of every queue in `available_now_end`. Micro-batches do not
            read past these offsets.
            """
            with errors_without_traceback():
                bounds, _ = self._call_admin(self._fetch_bounds)
                self.available_now_end = {queue: highest for queue, (_, highest) in bounds.items()}
