"""Find the rows of a task that cannot be sent, and treat them as the option `badRows` says.

A row is bad because of its content: it has no body, its tag contains a bar, its properties are too
large, or a broker calls it illegal (larger than the broker accepts, or a delay that is too long).

Whole batches are checked as columns, so good rows cost nothing extra. Only a batch that fails, here
or at the broker, is halved until its bad rows are found. The option `badRows` decides their fate:

    fail         the first bad row is an error that names its number, its keys, the column and a fix
    skip         bad rows are left out, counted and logged
    topic:NAME   bad rows are sent to that topic as JSON, with the reason in properties; with
                 exactly-once delivery they are part of the epoch
"""

import base64
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from sluicemq.client.core.messages import BODY_BYTES_MAX
from sluicemq.spark.rows import RowError, split_batch
from sluicemq.spark.senders import PreparedRows, Sender

REASON_PROPERTY: Final = "SLUICE_BAD_ROW"
COLUMN_PROPERTY: Final = "SLUICE_BAD_COLUMN"
TRUNCATED_PROPERTY: Final = "SLUICE_BAD_ROW_CUT"
FAIL: Final = "fail"
TOPIC_PREFIX: Final = "topic:"
_IDENTIFYING_ROLES: Final = ("message_id", "keys", "sharding_key")
"""The roles whose values an error shows, so that a user finds the row."""
_DELAY_ROLES: Final = ("delay_level", "delay_ms", "deliver_at")
_SHOWN_LENGTH_MAX: Final = 100
_LOGGED_ROWS_MAX: Final = 5
_VALUE_LENGTH_MAX: Final = 1_000
"""Characters or bytes that are kept of each value of a bad row that is too large."""
logger = logging.getLogger(__name__)


class BadRowHandler:
    """Separates the good rows of one task from its bad rows.

    `row_count` is the number of rows that were read from the task's input, `bad_count` the number
    of bad ones among them.
    """

    def __init__(
        self, roles: Mapping[str, str], topic: str | None, policy: str, sender: Sender
    ) -> None:
        """Create a handler for the rows of one task.

        `roles` maps each role, such as "body", to the column that contains it. `topic` is the
        option `topic`, None if the topic is a column. `policy` is the value of the option
        `badRows`: `fail`, `skip` or `topic:NAME`. `sender` sends the rows. The handler removes
        refused rows from its `refused_rows`.
        """
        self._roles = roles
        self._topic = topic
        self._policy = policy
        self._sender = sender
        self.row_count = 0
        self.bad_count = 0
        self._logged_properties: set[str] = set()

    def prepare_rows(self, batches: Iterator[Any]) -> Iterator[PreparedRows]:
        """Yield the rows to send: the good rows of each Arrow batch, then messages for bad rows.

        The caller must send each item before it asks for the next one. Then the handler sees which
        rows the brokers have refused, and treats these as bad rows too. Bad rows are counted, and
        the first ones are logged. Messages for them are yielded only under the policy `topic:NAME`.

        Raises RowError for the first bad row under the policy `fail`, and the errors of sending.
        """
        for whole_batch in batches:
            for batch in split_batch(whole_batch):
                if batch.num_rows:
                    yield from self._prepare_batch(batch)
                    # The caller has sent the batch, so brokers may have refused rows of it.
                    yield from self._handle_refused_rows()
        # Wait for the responses to the last rows, which brokers may refuse too.
        self._sender.send_thread.flush()
        yield from self._handle_refused_rows()

    def _prepare_batch(self, batch: Any) -> Iterator[PreparedRows]:
        """Yield the good rows of `batch`, then messages for its bad rows, and count all its rows.

        Messages are yielded only under the policy `topic:NAME`. Raises RowError for the first bad
        row under the policy `fail`.
        """
        row_numbers = range(self.row_count + 1, self.row_count + batch.num_rows + 1)
        try:
            checked_rows = self._check_rows(batch, row_numbers)
        except RowError:
            # The error does not say which rows are bad, so the batch is searched.
            yield from self._separate_bad_rows(batch, row_numbers)
        else:
            yield checked_rows
        self.row_count += batch.num_rows

    def _separate_bad_rows(self, batch: Any, row_numbers: Sequence[int]) -> Iterator[PreparedRows]:
        """Yield the good rows of a batch that has bad rows, then messages for the bad rows.

        `row_numbers` are the numbers of the rows in the task. Messages are yielded only under the
        policy `topic:NAME`. Raises RowError for the first bad row under the policy `fail`.
        """
        errors = dict(self._find_bad_rows(batch, 0, batch.num_rows))
        good_indexes = [index for index in range(batch.num_rows) if index not in errors]
        if good_indexes:
            good_batch = batch.take(pa.array(good_indexes, pa.int64()))
            good_numbers = [row_numbers[index] for index in good_indexes]
            yield self._check_rows(good_batch, good_numbers)
        yield from self._handle_bad_rows(batch, row_numbers, errors)

    def _check_rows(self, batch: Any, row_numbers: Sequence[int]) -> PreparedRows:
        """Convert the rows of `batch` to the form in which they are sent, and return them.

        Raises RowError if one of them is bad. `row_numbers` are the numbers of the rows in the
        task. The names of properties that the sink does not write are logged, each once in a task.
        """
        checked_rows = PreparedRows(batch, self._roles, self._topic, row_numbers)
        self._log_skipped_properties(checked_rows.skipped_properties)

        # The sender adds properties to each message, and their size depends on the topic. All rows
        # are checked with the largest size.
        if checked_rows.topics is None:
            topics = [self._topic]
        else:
            topics = pc.unique(checked_rows.topics).to_pylist()
        added_bytes_max = max(
            self._sender.added_property_bytes_max(topic or "") for topic in topics
        )
        checked_rows.check_sizes(added_bytes_max)
        return checked_rows

    def _log_skipped_properties(self, skipped_properties: Set[str]) -> None:
        """Log the names of properties that the sink does not write, each once in a task."""
        unlogged_properties = skipped_properties - self._logged_properties
        if unlogged_properties:
            self._logged_properties |= unlogged_properties
            logger.info(
                "Properties of a message's first delivery are not written: %s",
                ", ".join(sorted(unlogged_properties)),
            )

    def _find_bad_rows(self, batch: Any, start: int, stop: int) -> Iterator[tuple[int, RowError]]:
        """Yield (index, error) of each bad row of `batch` from `start` up to `stop` - 1, in order.

        The rows are checked together. If the check fails, each half is checked, until single bad
        rows remain. Raises RowError for the first bad row under the policy `fail`.
        """
        try:
            self._check_rows(batch.slice(start, stop - start), ())
        except RowError as error:
            if stop - start > 1:
                middle = (start + stop) // 2
                yield from self._find_bad_rows(batch, start, middle)
                yield from self._find_bad_rows(batch, middle, stop)
            elif self._policy == FAIL:
                raise self._make_error(batch, start, self.row_count + start + 1, error) from None
            else:
                yield start, error

    def _handle_refused_rows(self) -> Iterator[PreparedRows]:
        """Treat the rows that brokers have refused since the last call as bad rows.

        Yield messages for them under the policy `topic:NAME`. The sender's `refused_rows` is empty
        afterwards. Raises RowError for the first refused row under the policy `fail`. Raises the
        broker's RequestError if the broker refused a message that was made for a bad row.
        """
        # Collect the errors by the batch of the rows, with id(rows) as the key.
        errors_by_batch: dict[int, tuple[PreparedRows, dict[int, RowError]]] = {}
        while self._sender.refused_rows:
            rows, index, error = self._sender.refused_rows.pop(0)
            if not rows.row_numbers:  # the message of a bad row, for the topic of bad rows
                raise error
            role = self._find_refused_role(error.fact)
            row_error = RowError(f"{error.fact}.", role=role, fix=error.fix)
            _, errors = errors_by_batch.setdefault(id(rows), (rows, {}))
            errors[index] = row_error

        for rows, errors in errors_by_batch.values():
            if self._policy == FAIL:
                index = min(errors)
                raise self._make_error(rows.batch, index, rows.row_numbers[index], errors[index])
            yield from self._handle_bad_rows(rows.batch, rows.row_numbers, errors)

    def _find_refused_role(self, error_fact: str) -> str:
        """Return the role of the column that made a broker refuse a row.

        The broker names no column. It refuses a row for its delay or its size, so the role is that
        of the delay if `error_fact` mentions a delay, and otherwise "body".
        """
        if "delay" in error_fact:
            for role in _DELAY_ROLES:
                if role in self._roles:
                    return role
        return "body"

    def _handle_bad_rows(
        self, batch: Any, row_numbers: Sequence[int], errors: Mapping[int, RowError]
    ) -> Iterator[PreparedRows]:
        """Count and log bad rows, and yield messages for them under the policy `topic:NAME`.

        `errors` maps the index of each bad row in `batch` to its error. `row_numbers` are the
        numbers of all rows of `batch` in the task. At most `_LOGGED_ROWS_MAX` rows of a task are
        logged. Nothing is yielded under the policy `skip`.
        """
        remaining_log_lines = max(0, _LOGGED_ROWS_MAX - self.bad_count)
        for index, error in list(errors.items())[:remaining_log_lines]:
            logger.warning("%s", self._describe(batch, index, row_numbers[index], error))
        self.bad_count += len(errors)
        if self._policy.startswith(TOPIC_PREFIX):
            roles = {"body": "body", "properties": "properties"}
            messages = _make_messages(batch, errors, self._roles)
            yield PreparedRows(messages, roles, self._policy.removeprefix(TOPIC_PREFIX))

    def _make_error(self, batch: Any, index: int, row_number: int, error: RowError) -> RowError:
        """Return the error that fails the task because of one bad row."""
        fix = f"{error.fix} Or set badRows=skip, or badRows=topic:NAME to keep such rows."
        description = self._describe(batch, index, row_number, error)
        return RowError(description, role=error.role, fix=fix)

    def _describe(self, batch: Any, index: int, row_number: int, error: RowError) -> str:
        """Return a text such as `row 18 of partition 3 (keys 'k17'), column 'tag': …`."""
        partition = ""
        context = TaskContext.get()
        if context is not None:
            partition = f" of partition {context.partitionId()}"
        identifiers = self._list_identifiers(batch, index)
        identification = f" ({', '.join(identifiers)})" if identifiers else ""
        column = self._roles.get(error.role, error.role)
        return f"row {row_number}{partition}{identification}, column {column!r}: {error.fact}."

    def _list_identifiers(self, batch: Any, index: int) -> list[str]:
        """Return texts such as `keys 'k17'` for the values that identify the row at `index`."""
        identifiers = []
        for role in _IDENTIFYING_ROLES:
            if role in self._roles:
                column_value = batch.column(self._roles[role])[index].as_py()
                if column_value:
                    identifiers.append(f"{role} {str(column_value)[:_SHOWN_LENGTH_MAX]!r}")
        return identifiers


def _make_messages(batch: Any, errors: Mapping[int, RowError], roles: Mapping[str, str]) -> Any:
    """Return an Arrow batch with a message for each bad row: `body` and `properties`.

    The body is the row as JSON, as Spark's `to_json` writes it: binary values are base64, and maps
    are objects. The properties contain the reason and the name of the column. If the body would be
    too large for RocketMQ, its long values are cut, and a property says so.
    """
    bodies = []
    properties = []
    for index, error in errors.items():
        (row,) = batch.slice(index, 1).to_pylist(maps_as_pydicts="strict")
        body, is_truncated = _encode_row(row)
        row_properties = {
            REASON_PROPERTY: str(error)[:_VALUE_LENGTH_MAX],
            COLUMN_PROPERTY: roles.get(error.role, error.role),
        }
        if is_truncated:
            row_properties[TRUNCATED_PROPERTY] = "true"
        bodies.append(body)
        properties.append([(name, _show_separators(text)) for name, text in row_properties.items()])
    map_type = pa.map_(pa.string(), pa.string())
    return pa.record_batch(
        {"body": pa.array(bodies, pa.binary()), "properties": pa.array(properties, map_type)}
    )


def _encode_row(row: dict[str, Any]) -> tuple[bytes, bool]:
    """Return (row as JSON, whether long values were cut so that it fits into a body)."""
    body = orjson.dumps(row, default=_to_json_string)
    if len(body) <= BODY_BYTES_MAX:
        return body, False
    return orjson.dumps(_truncate(row), default=_to_json_string), True


def _to_json_string(value: Any) -> str:
    """Return a value of a row that JSON does not have: binary values in base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def _show_separators(text: str) -> str:
    """Return `text` with visible symbols instead of the characters that separate properties."""
    visible_start = "\N{SYMBOL FOR START OF HEADING}"
    visible_end = "\N{SYMBOL FOR START OF TEXT}"
    return text.replace("\x01", visible_start).replace("\x02", visible_end)


def _truncate(value: Any) -> Any:
    """Return a copy of `value` in which all strings and bytes are cut to `_VALUE_LENGTH_MAX`.

    Lists and dicts are searched at all depths.
    """
    if isinstance(value, dict):
        return {name: _truncate(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_truncate(element) for element in value]
    if isinstance(value, str | bytes):
        return value[:_VALUE_LENGTH_MAX]
    return value
