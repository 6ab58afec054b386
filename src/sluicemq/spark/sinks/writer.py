"""The sink: `df.write.format("rocketmq")` and `writeStream`, at least once or exactly once.

| column | type | |
|---|---|---|
| body, or value | binary or string | required |
| topic | string | where the option `topic` is not given |
| tags, or tag | string | |
| keys | string or array<string> | |
| properties | map<string,string> | names that producer and broker set themselves are left out |
| queue_id | int | of the topic's first broker that has it; otherwise queues take turns |
| sharding_key | string | rows with the same key go to the same queue, in order |
| delay_level, delay_ms, deliver_at | int, bigint, timestamp | when it is delivered; one of them |
| message_id | string | its unique id; null, or no column: a new one |
| system_properties | map<string,string> | properties with reserved names, as replays need them |

Further columns of the source (broker, queue_offset, msg_id, times) are ignored, so what was read
can be written; any other column is an error.

At least once: each task sends batches and waits for the broker's answers; the job succeeds when
every batch is stored. A task that Spark runs again sends its rows again.

Exactly once (docs/design/0007): tasks stage, the driver commits the epoch, which is the micro-batch
of a stream, or the whole of a batch. Spark calls from several processes, and what they have to know
travels in the sink and in the commit messages:

    planner    __init__          do the brokers have epochs?
    executor   write             stage (`sink_send`)             -> `Sent`: ranges, query, epoch
    planner    commit            `client.core.epochs` with all the ranges
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from sluicemq.client.core.answers import expect_success
from sluicemq.client.core.epochs import EpochCommitter, commit_epoch, is_unknown_request
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import DEFAULT_GROUP, Producer
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import (
    ConfigurationError,
    ProtocolError,
    RequestError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.spark.errors import did_you_mean, keep_imports, plain_errors, ride_out
from sluicemq.spark.options import EXACTLY_ONCE, Options
from sluicemq.spark.schema import BASE, EXTRA
from sluicemq.spark.sources.offset_reader import open_admin
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import StagedRange, check_query

logger = logging.getLogger(__name__)

_INTEGERS: Final = ("int", "bigint", "smallint", "tinyint")
_TYPES: Final = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queue_id": _INTEGERS,
    "sharding_key": ("string",),
    "delay_level": _INTEGERS,
    "delay_ms": _INTEGERS,
    "deliver_at": ("timestamp",),
    "message_id": ("string",),
    "system_properties": ("map<string,string>",),
}
_ROLES: Final = {role: role for role in _TYPES} | {"value": "body", "tag": "tags"}
"""What a column of this name means."""
ROUTE_CHECKS: Final = 100
ROUTE_CHECK_S: Final = 0.05
PROBE: Final = "probe"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):  # type: ignore[misc]
    """What one task reports: messages stored, and rows that were bad; of a task that staged them,
    where, and for what."""

    messages: int
    bad: int = 0
    query: str = ""
    epoch: int = 0
    topics: tuple[str, ...] = ()
    ranges: tuple[StagedRange, ...] = ()


def roles_of(schema: StructType, options: Options) -> dict[str, str]:
    """Role -> column. Raises ConfigurationError naming the column that is missing or wrong."""
    roles: dict[str, str] = {}
    for one in schema.fields:
        name, found = one.name.lower(), one.dataType.simpleString()
        role = _ROLES.get(name)
        if role is None and name in BASE | EXTRA:
            continue
        if role is None:
            raise ConfigurationError(
                f"the column {one.name!r} cannot be written.",
                cure=f"{did_you_mean(name, _ROLES)}A message has {', '.join(_ROLES)}; put further"
                " values into properties.",
            )
        if role in roles:
            raise ConfigurationError(
                f"the columns {roles[role]!r} and {one.name!r} both mean the {role}.",
                cure="Keep one of them.",
            )
        if found not in _TYPES[role]:
            raise ConfigurationError(
                f"the column {one.name!r} has the type {found!r}.",
                cure=f"Cast it to {' or '.join(_TYPES[role])}.",
            )
        roles[role] = one.name
    if "body" not in roles:
        raise ConfigurationError(
            "there is no column 'body' or 'value'.",
            cure="Name the bytes to send, for example to_json(struct(*)) as value.",
        )
    if "topic" not in roles:
        options.required("topic")
    return roles


class _Sink:
    """What both sinks share. Checked on the driver when the query is planned."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigurationError("a topic cannot be overwritten.", cure='Use mode("append").')
        self.options = options
        self.roles = roles_of(schema, options)
        self.query: str | None = None
        self.brokers: tuple[str, ...] = ()
        self.is_exact = options["delivery"] == EXACTLY_ONCE
        """Asked for; `brokers` says whether it can be had."""
        self.check_topics()

    def check_topics(self) -> None:
        """Reaches the name server now, not first in every task. Sending may create the topics."""
        bad = self.options["badRows"].partition(":")[2] or None
        if bad is not None and bad == self.options["topic"]:
            raise ConfigurationError(
                f"the option 'badRows' names the topic that is written, {bad!r}.",
                cure="Name another topic for bad rows.",
            )
        topics = [topic for topic in (self.options["topic"], bad) if topic is not None]
        if not topics and not self.is_exact:
            return
        with open_admin(self.options) as admin:
            for topic in topics:
                admin.route(topic, create=True)
            if self.is_exact:
                self.brokers = brokers_with_epochs(admin)

    def write(self, iterator: Iterator[Any]) -> Sent:
        """Sends the rows of one task; every batch is acknowledged when it returns."""
        from sluicemq.spark.sinks import senders  # noqa: PLC0415 - executors only

        options, size = self.options, self.options["batchMessages"]

        def send(sender: senders.Sender) -> int:
            sorter = senders.RowSorter(self.roles, options["topic"], options["badRows"], sender)
            senders.send_all(sorter.rows(iterator), sender)
            return sorter.bad

        keep_imports()
        with plain_errors(), producer_of(options) as producer:
            task = senders.task_now(self.query, options["queryEpoch"]) if self.is_exact else None
            if task is None or not self.brokers:
                direct = senders.DirectSender(producer, size, task)
                bad = send(direct)
                return Sent(direct.sent, bad)
            staging = senders.StagingSender(producer, size, task, self.brokers)
            bad, staged = send(staging), staging.staged
            topics = tuple(sorted(staging.topics))
            return Sent(staged.messages, bad, task.query, task.epoch, topics, staged.ranges)

    def _commit(self, messages: list[Sent | None], what: str) -> int:
        """Commits what was staged; logs and returns how many messages the tasks stored."""
        done = [one for one in messages if one is not None]
        staged = [one for one in done if one.ranges]
        if staged:
            ranges = tuple(one for sent in staged for one in sent.ranges)
            topics = {topic for sent in staged for topic in sent.topics}
            timeout_s = self.options["timeoutMs"] / 1000
            with open_admin(self.options) as admin:
                committer = EpochCommitter(
                    _call_master(admin), self.brokers, staged[0].query, topics, pause=_pause,
                    monotonic_s=SYSTEM_CLOCK.monotonic_s, timeout_s=timeout_s,
                )  # fmt: skip
                ride_out(lambda: committer.commit(staged[0].epoch, ranges), timeout_s)
        total = sum(one.messages for one in done)
        logger.info("%s: %d messages of %d tasks are stored", what, total, len(done))
        if bad := sum(one.bad for one in done):
            logger.warning("%s: %d bad rows, badRows=%s", what, bad, self.options["badRows"])
        return total

    def _abort(self, messages: list[Sent | None], what: str) -> None:
        total = sum(one.messages for one in messages if one is not None)
        end = "expire unseen" if self.brokers else "are stored, and not taken back"
        logger.warning("%s failed: %d messages of it %s", what, total, end)

    def _await_route(self) -> None:
        """A topic that sending made is in the name server a moment later: read after write waits
        here, not in every reader."""
        topic = self.options["topic"]
        if topic is None:
            return
        with open_admin(self.options) as admin:
            for _ in range(ROUTE_CHECKS):
                if ride_out(lambda: admin.find_route(topic), admin.timeout_s) is not None:
                    return
                _pause(ROUTE_CHECK_S)
        logger.warning("the topic %r is written but not in the name server yet", topic)


class BatchSink(_Sink, DataSourceArrowWriter):  # type: ignore[misc]
    """`df.write.format("rocketmq").mode("append").save()`."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        if options["queryEpoch"] and options["queryId"] is None:
            raise ConfigurationError(
                "the option 'queryEpoch' is given without 'queryId'.", cure="Name the query too."
            )
        self.query = checked_query(options["queryId"]) or f"batch-{uuid.uuid4()}"

    def commit(self, messages: list[Sent | None]) -> None:
        with plain_errors():
            if self._commit(messages, f"{self.query} written"):
                self._await_route()

    def abort(self, messages: list[Sent | None]) -> None:
        self._abort(messages, f"the write {self.query}")


class StreamSink(_Sink, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """`df.writeStream.format("rocketmq")`."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite=overwrite)
        if options["queryId"] is not None or options["queryEpoch"]:
            raise ConfigurationError(
                "the options 'queryId' and 'queryEpoch' do not go with a stream.",
                cure="A stream's checkpoint holds its id.",
            )

    def check_topics(self) -> None:
        """A stream has been there before: Spark plans a sink for each micro-batch."""
        ride_out(super().check_topics, self.options["timeoutMs"] / 1000)

    def commit(self, messages: list[Sent | None], batchId: int) -> None:  # noqa: N803 - Spark's
        with plain_errors():
            self._commit(messages, f"micro-batch {batchId} written")

    def abort(self, messages: list[Sent | None], batchId: int) -> None:  # noqa: N803 - Spark's
        self._abort(messages, f"micro-batch {batchId}")


def checked_query(query: str | None) -> str | None:
    if query is None:
        return None
    try:
        return check_query(query)
    except ProtocolError as error:
        raise ConfigurationError(str(error), cure="Choose another queryId.") from None


def brokers_with_epochs(admin: Admin) -> tuple[str, ...]:
    """The masters, when all of them know epochs (which makes their staging topics); else none.
    Raises RouteNotFoundError when no broker is registered."""
    masters = admin.masters()
    if not masters:
        raise RouteNotFoundError(
            "no broker is registered with the name servers.", cure="See sluice cluster list."
        )
    for broker, address in sorted(masters.items()):
        try:
            expect_success(admin.call(address, commit_epoch(PROBE, 0)), address)
        except RequestError as error:
            if not is_unknown_request(error):
                raise
            logger.warning(
                "delivery=exactly-once: the broker %r does not know COMMIT_EPOCH (it is no SluiceMQ"
                " broker, or an old one). Rows are written AT LEAST ONCE, each with the property"
                " SLUICE_DEDUP_KEY (query/epoch/partition/row), by which readers can tell those"
                " that a repeated task or micro-batch has sent again.", broker,
            )  # fmt: skip
            return ()
    return tuple(sorted(masters))


def _call_master(admin: Admin) -> Callable[[str, Command], Command]:
    """Asks a broker by its name, wherever it is now."""
    masters: dict[str, str] = {}

    def call(broker: str, request: Command) -> Command:
        if broker not in masters:
            masters.update(admin.masters())
        if broker not in masters:
            raise RouteNotFoundError(
                f"the broker {broker!r} is not in the cluster.", cure="Start it again."
            )
        try:
            return admin.call(masters[broker], request)
        except SluiceError:  # it may come back at another address
            masters.clear()
            raise

    return call


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def producer_of(options: Options) -> Producer:
    return Producer(
        options.required("nameServers").split(";"),
        group=options["group"] or DEFAULT_GROUP,
        credentials=options.credentials,
        tls=options.tls or False,
        timeout_ms=options["timeoutMs"],
    )
