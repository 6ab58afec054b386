"""The sink: `df.write.format("rocketmq")` and `writeStream`, at least once, in batches.

| column | type | |
|---|---|---|
| body, or value | binary or string | required |
| topic | string | where the option `topic` is not given |
| tags, or tag | string | |
| keys | string or array<string> | |
| properties | map<string,string> | names that producer and broker set themselves are left out |
| queue_id | int | of the topic's first broker that has it; otherwise queues take turns |

Further columns of the source (broker, queue_offset, msg_id, times) are ignored, so what was read
can be written; any other column is an error. Each task sends batches of one topic and waits for the
broker's answer; the job succeeds when every batch is stored. A task that Spark runs again sends its
rows again: at least once.
"""

import difflib
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from sluicemq.client.sync.producer import DEFAULT_GROUP, Producer
from sluicemq.errors import ConfigurationError, RouteNotFoundError
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.cluster import open_admin
from sluicemq.spark.errors import plain_errors
from sluicemq.spark.options import Options
from sluicemq.spark.schema import BASE, SET_FOR_ALL

logger = logging.getLogger(__name__)

_ROLES: Final = {
    "body": "body", "value": "body", "topic": "topic", "tags": "tags", "tag": "tags",
    "keys": "keys", "properties": "properties", "queue_id": "queue_id",
}  # fmt: skip
_TYPES: Final = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queue_id": ("int", "bigint", "smallint", "tinyint"),
}
ROUTE_CHECKS: Final = 100
ROUTE_CHECK_S: Final = 0.05


@dataclass(frozen=True)
class Sent(WriterCommitMessage):  # type: ignore[misc]
    """What one task reports: messages stored."""

    messages: int


def roles_of(schema: StructType, options: Options) -> dict[str, str]:
    """Role -> column. Raises ConfigurationError naming the column that is missing or wrong."""
    roles: dict[str, str] = {}
    for one in schema.fields:
        role = _ROLES.get(one.name.lower())
        if role is None:
            if one.name.lower() not in BASE:
                raise _unknown_column(one.name)
            continue
        if role in roles:
            raise ConfigurationError(
                f"the columns {roles[role]!r} and {one.name!r} both mean the {role}.",
                cure="Keep one of them.",
            )
        found = one.dataType.simpleString()
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


def _unknown_column(name: str) -> ConfigurationError:
    near = difflib.get_close_matches(name.lower(), _ROLES, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return ConfigurationError(
        f"the column {name!r} cannot be written.",
        cure=f"{hint}A message has {', '.join(_ROLES)}; put further values into properties.",
    )


class _Sink:
    """What both sinks share. Checked on the driver when the query is planned."""

    def __init__(self, options: Options, schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ConfigurationError("a topic cannot be overwritten.", cure='Use mode("append").')
        self.options = options
        self.roles = roles_of(schema, options)
        self._check_topic()

    def _check_topic(self) -> None:
        """Reaches the name server now, not first in every task. Sending may create the topic."""
        topic = self.options["topic"]
        if topic is not None:
            with open_admin(self.options) as admin:
                admin.route(topic, create=True)

    def write(self, iterator: Iterator[Any]) -> Sent:
        """Sends the rows of one task; every batch is acknowledged when it returns."""
        with plain_errors(), _producer(self.options) as producer:
            sender = Sender(producer, self.options["batchMessages"])
            for batch in iterator:
                for message, queue_id in messages_of(batch, self.roles, self.options["topic"]):
                    sender.add(message, queue_id)
            sender.flush()
            return Sent(sender.sent)

    def _finished(self, messages: list[Sent | None], what: str) -> int:
        """Logs and returns how many messages the tasks stored."""
        done = [one.messages for one in messages if one is not None]
        logger.info("%s: %d messages of %d tasks are stored", what, sum(done), len(done))
        return sum(done)

    def _await_route(self) -> None:
        """A topic that sending made is in the name server a moment later: read after write waits
        here, not in every reader."""
        topic = self.options["topic"]
        if topic is None:
            return
        with open_admin(self.options) as admin:
            for _ in range(ROUTE_CHECKS):
                if admin.find_route(topic) is not None:
                    return
                threading.Event().wait(ROUTE_CHECK_S)
        logger.warning("the topic %r is written but not in the name server yet", topic)


class BatchSink(_Sink, DataSourceArrowWriter):  # type: ignore[misc]
    """`df.write.format("rocketmq").mode("append").save()`."""

    def commit(self, messages: list[Sent | None]) -> None:
        with plain_errors():
            if self._finished(messages, "written"):
                self._await_route()

    def abort(self, messages: list[Sent | None]) -> None:
        self._finished(messages, "failed, and not taken back")


class StreamSink(_Sink, DataSourceStreamArrowWriter):  # type: ignore[misc]
    """`df.writeStream.format("rocketmq")`."""

    def commit(self, messages: list[Sent | None], batchId: int) -> None:  # noqa: N803 - Spark's
        self._finished(messages, f"micro-batch {batchId} written")

    def abort(self, messages: list[Sent | None], batchId: int) -> None:  # noqa: N803 - Spark's
        self._finished(messages, f"micro-batch {batchId} failed, and not taken back")


def _producer(options: Options) -> Producer:
    return Producer(
        options.required("nameServers").split(";"),
        group=options["group"] or DEFAULT_GROUP,
        credentials=options.credentials,
        timeout_ms=options["timeoutMs"],
    )


class Sender:
    """Collects messages by topic and queue and sends them in batches. `sent` counts the stored."""

    def __init__(self, producer: Producer, messages_max: int) -> None:
        self.sent = 0
        self._producer = producer
        self._messages_max = messages_max
        self._waiting: dict[tuple[str, int | None], list[Message]] = {}

    def add(self, message: Message, queue_id: int | None) -> None:
        """Takes one message; sends when its batch is full."""
        waiting = self._waiting.setdefault((message.topic, queue_id), [])
        waiting.append(message)
        if len(waiting) >= self._messages_max:
            self._send(message.topic, queue_id)

    def flush(self) -> None:
        """Sends what is left."""
        for topic, queue_id in list(self._waiting):
            self._send(topic, queue_id)

    def _send(self, topic: str, queue_id: int | None) -> None:
        messages = self._waiting.pop((topic, queue_id))
        queue = None if queue_id is None else self._queue(topic, queue_id)
        self._producer.send_batch(messages, queue=queue)
        self.sent += len(messages)

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        queues = self._producer.write_queues(topic)
        for queue in queues:
            if queue.queue_id == queue_id:
                return queue
        raise RouteNotFoundError(
            f"the topic {topic!r} has no queue {queue_id} that can be written to.",
            cure=f"It has {sorted({queue.queue_id for queue in queues})}.",
        )


def messages_of(
    batch: Any, roles: Mapping[str, str], topic: str | None
) -> Iterator[tuple[Message, int | None]]:
    """The rows of an Arrow batch as messages, each with the queue it asks for."""
    count = batch.num_rows
    values = {role: batch.column(name).to_pylist() for role, name in roles.items()}
    nothing = [None] * count
    topics = values.get("topic", [topic] * count)
    for row_topic, body, tag, keys, properties, queue_id in zip(
        topics,
        values["body"],
        values.get("tags", nothing),
        values.get("keys", nothing),
        values.get("properties", nothing),
        values.get("queue_id", nothing),
        strict=True,
    ):
        if row_topic is None or body is None:
            raise ConfigurationError(
                f"a row has no {'topic' if row_topic is None else 'body'}: it is null.",
                cure="Filter such rows, or fill the column.",
            )
        yield (
            Message(
                topic=row_topic,
                body=body.encode() if isinstance(body, str) else body,
                tag=tag or None,
                keys=_keys(keys),
                properties=_own(properties),
            ),
            queue_id,
        )


def _keys(keys: str | list[str | None] | None) -> tuple[str, ...]:
    if isinstance(keys, str):
        return tuple(keys.split())
    return tuple(key for key in keys or () if key)


def _own(properties: list[tuple[str, str | None]] | None) -> dict[str, str]:
    """A map column's entries without empty values and what others set."""
    return {name: value for name, value in properties or () if value and name not in SET_FOR_ALL}
