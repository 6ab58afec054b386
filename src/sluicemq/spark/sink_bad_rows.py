"""Rows that no message can be made of: named, and what becomes of them (the option `badRows`).

A row is bad for what it holds: no body, a tag with a bar, properties that are too large. That a
topic or a queue is not there, or a broker refuses, is no fault of a row; it may be mended, and the
task fails. Batches are checked as columns; only one that fails is halved until its bad rows are
found, so good data costs nothing.

    fail         the first bad row is the error: its number, its keys, the column, the cure
    skip         it is left out, counted and logged
    topic:NAME   it goes to that topic as JSON, with the reason in properties; exactly once too
"""

import base64
import logging
from collections.abc import Iterator, Mapping
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
        """The good rows of each batch, then its bad ones as messages where they are kept. Raises
        RowError under the policy `fail`."""
        for batch in batches:
            if batch.num_rows:
                yield from self._sorted(batch)
                self.count += batch.num_rows

    def _sorted(self, batch: Any) -> Iterator[Rows]:
        try:
            whole = self._checked(batch)
        except RowError:
            bad = dict(self._bad_rows(batch, 0))
        else:
            yield whole
            return
        good = [index for index in range(batch.num_rows) if index not in bad]
        if good:
            yield self._checked(batch.take(pa.array(good, pa.int64())))
        for index, error in list(bad.items())[: max(0, _LOGGED_MAX - self.bad)]:
            logger.warning("%s", self._told(batch, index, error))
        self.bad += len(bad)
        if self._policy.startswith(TOPIC):
            kept = _kept(batch, bad, self._roles)
            yield Rows(kept, _KEPT_ROLES, self._policy.removeprefix(TOPIC))

    def _checked(self, batch: Any) -> Rows:
        rows = Rows(batch, self._roles, self._topic)
        topics = [self._topic] if rows.topics is None else pc.unique(rows.topics).to_pylist()
        rows.check_sizes(max(self._sender.added_bytes(topic or "") for topic in topics))
        return rows

    def _bad_rows(self, batch: Any, first: int) -> Iterator[tuple[int, RowError]]:
        """Index and reason of each bad row, in their order."""
        try:
            self._checked(batch)
        except RowError as error:
            if batch.num_rows > 1:
                half = batch.num_rows // 2
                yield from self._bad_rows(batch.slice(0, half), first)
                yield from self._bad_rows(batch.slice(half), first + half)
            elif self._policy == FAIL:
                cure = f"{error.cure} Or set badRows=skip, or badRows=topic:NAME to keep such rows."
                told = self._told(batch, 0, error, first)
                raise RowError(told, role=error.role, cure=cure) from None
            else:
                yield first, error

    def _told(self, batch: Any, index: int, error: RowError, first: int = 0) -> str:
        """`row 18 of partition 3 (keys 'k17'), column 'tag': …`."""
        context = TaskContext.get()
        partition = "" if context is None else f" of partition {context.partitionId()}"
        names = [
            f"{role} {str(value)[:_SHOWN]!r}"
            for role in _NAMED_BY
            if role in self._roles and (value := batch.column(self._roles[role])[index].as_py())
        ]
        named = f" ({', '.join(names)})" if names else ""
        number = self.count + first + index + 1
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
