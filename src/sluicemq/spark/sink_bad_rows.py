"""Rows that no message can be made of: named, and what becomes of them (the option `badRows`).

A row is bad for what it holds: no body, a tag with a bar, properties that are too large, what a
broker calls illegal (larger than it takes, a delay that is too long). That a topic or a queue is
not there is no fault of a row; it may be mended, and the task fails. Batches are checked as
columns; only one that fails, here or at the broker, is halved until its bad rows are found, so good
data costs nothing.

    fail         the first bad row is the error: its number, its keys, the column, the cure
    skip         it is left out, counted and logged
    topic:NAME   it goes to that topic as JSON, with the reason in properties; exactly once too
"""

import base64
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from sluicemq.client.core.messages import BODY_BYTES_MAX
from sluicemq.spark.sink_rows import RowError
from sluicemq.spark.sink_send import DirectSender, Rows, StagingSender

logger = logging.getLogger(__name__)
FAIL: Final = "fail"
SKIP: Final = "skip"
TOPIC: Final = "topic:"
REASON_PROPERTY: Final = "SLUICE_BAD_ROW"
COLUMN_PROPERTY: Final = "SLUICE_BAD_COLUMN"
CUT_PROPERTY: Final = "SLUICE_BAD_ROW_CUT"
_NAMED_BY: Final = ("message_id", "keys", "sharding_key")
_DELAYS: Final = ("delay_level", "delay_ms", "deliver_at")
_SHOWN: Final = 100
_LOGGED_MAX: Final = 5
_CUT_LENGTH: Final = 1_000


class RowSorter:
    """Sorts the rows of one task. `count` and `bad` are how many it has seen, and how many of them
    were bad. `policy` is the option `badRows`."""

    def __init__(
        self,
        roles: Mapping[str, str],
        topic: str | None,
        policy: str,
        sender: DirectSender | StagingSender,
    ) -> None:
        self._roles = roles
        self._topic = topic
        self._policy = policy
        self._sender = sender
        self.count = 0
        self.bad = 0

    def rows(self, batches: Iterator[Any]) -> Iterator[Rows]:
        """The good rows of each batch, then bad ones as messages where they are kept. Raises
        RowError under the policy `fail`."""
        for batch in batches:
            if batch.num_rows:
                yield from self._sorted(batch)
                self.count += batch.num_rows
                yield from self._refused()
        self._sender.lane.wait()
        yield from self._refused()

    def _sorted(self, batch: Any) -> Iterator[Rows]:
        numbers = range(self.count + 1, self.count + batch.num_rows + 1)
        try:
            whole = self._checked(batch, numbers)
        except RowError:
            bad = dict(self._bad_rows(batch, numbers))
        else:
            yield whole
            return
        good = [index for index in range(batch.num_rows) if index + self.count + 1 not in bad]
        if good:
            chosen = batch.take(pa.array(good, pa.int64()))
            yield self._checked(chosen, [numbers[index] for index in good])
        indices = {number - self.count - 1: error for number, error in bad.items()}
        yield from self._put_away(batch, numbers, indices)

    def _refused(self) -> Iterator[Rows]:
        """What brokers refuse of the rows that were sent."""
        by_batch: dict[int, tuple[Rows, dict[int, RowError]]] = {}
        while self._sender.refused:
            rows, index, error = self._sender.refused.pop(0)
            if not rows.numbers:  # a bad row that was to be kept
                raise error
            delays = [role for role in _DELAYS if role in self._roles and "delay" in error.fact]
            row_error = RowError(f"{error.fact}.", role=(*delays, "body")[0], cure=error.cure)
            by_batch.setdefault(id(rows), (rows, {}))[1][index] = row_error
        for rows, errors in by_batch.values():
            if self._policy == FAIL:
                index = min(errors)
                raise self._failure(rows.batch, index, rows.numbers[index], errors[index])
            yield from self._put_away(rows.batch, rows.numbers, errors)

    def _put_away(
        self, batch: Any, numbers: Sequence[int], errors: Mapping[int, RowError]
    ) -> Iterator[Rows]:
        for index, error in list(errors.items())[: max(0, _LOGGED_MAX - self.bad)]:
            logger.warning("%s", self._told(batch, index, numbers[index], error))
        self.bad += len(errors)
        if self._policy.startswith(TOPIC):
            kept = _kept(batch, errors, self._roles)
            yield Rows(kept, _KEPT_ROLES, self._policy.removeprefix(TOPIC))

    def _checked(self, batch: Any, numbers: Sequence[int]) -> Rows:
        rows = Rows(batch, self._roles, self._topic, numbers)
        topics = [self._topic] if rows.topics is None else pc.unique(rows.topics).to_pylist()
        rows.check_sizes(max(self._sender.added_bytes(topic or "") for topic in topics))
        return rows

    def _bad_rows(self, batch: Any, numbers: Sequence[int]) -> Iterator[tuple[int, RowError]]:
        """Number and reason of each bad row, in their order."""
        try:
            self._checked(batch, numbers)
        except RowError as error:
            if batch.num_rows > 1:
                half = batch.num_rows // 2
                yield from self._bad_rows(batch.slice(0, half), numbers[:half])
                yield from self._bad_rows(batch.slice(half), numbers[half:])
            elif self._policy == FAIL:
                raise self._failure(batch, 0, numbers[0], error) from None
            else:
                yield numbers[0], error

    def _failure(self, batch: Any, index: int, number: int, error: RowError) -> RowError:
        cure = f"{error.cure} Or set badRows=skip, or badRows=topic:NAME to keep such rows."
        return RowError(self._told(batch, index, number, error), role=error.role, cure=cure)

    def _told(self, batch: Any, index: int, number: int, error: RowError) -> str:
        """`row 18 of partition 3 (keys 'k17'), column 'tag': …`."""
        context = TaskContext.get()
        partition = "" if context is None else f" of partition {context.partitionId()}"
        names = [
            f"{role} {str(value)[:_SHOWN]!r}"
            for role in _NAMED_BY
            if role in self._roles and (value := batch.column(self._roles[role])[index].as_py())
        ]
        named = f" ({', '.join(names)})" if names else ""
        column = self._roles.get(error.role, error.role)
        return f"row {number}{partition}{named}, column {column!r}: {error.fact}."


_KEPT_ROLES: Final = {"body": "body", "properties": "properties"}


def _kept(batch: Any, bad: Mapping[int, RowError], roles: Mapping[str, str]) -> Any:
    """Bad rows as rows of a sink: JSON, and properties."""
    bodies, properties = [], []
    for index, error in bad.items():
        body = _json(batch, index)
        column = roles.get(error.role, error.role)
        about = {REASON_PROPERTY: str(error)[:_CUT_LENGTH], COLUMN_PROPERTY: column}
        if len(body) > BODY_BYTES_MAX:
            body = _json(batch, index, _CUT_LENGTH)
            about[CUT_PROPERTY] = "true"
        bodies.append(body)
        properties.append([(name, _plain(text)) for name, text in about.items()])
    return pa.record_batch(
        {
            "body": pa.array(bodies, pa.binary()),
            "properties": pa.array(properties, pa.map_(pa.string(), pa.string())),
        }
    )


def _plain(text: str) -> str:
    """Without the two characters that separate properties."""
    return text.replace("\x01", "\N{SYMBOL FOR START OF HEADING}").replace(
        "\x02", "\N{SYMBOL FOR START OF TEXT}"
    )


def _json(batch: Any, index: int, length_max: int | None = None) -> bytes:
    """A row as Spark's `to_json` writes it: binary in base64, maps as objects. Values longer than
    `length_max` are cut."""
    (row,) = batch.slice(index, 1).to_pylist(maps_as_pydicts="strict")
    return orjson.dumps(_cut(row, length_max), default=_text)


def _cut(value: Any, length_max: int | None) -> Any:
    if isinstance(value, dict):
        return {name: _cut(one, length_max) for name, one in value.items()}
    if isinstance(value, list):
        return [_cut(one, length_max) for one in value]
    return value[:length_max] if isinstance(value, str | bytes) else value


def _text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
