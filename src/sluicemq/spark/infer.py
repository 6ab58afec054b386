"""Types of promoted properties found by looking: `prop:NAME:auto`, and `prop:*` for all of them.

The newest messages of every queue are read and every value of a property is tried as int, bigint,
double and boolean, as Java reads them; the narrowest type that all of them have is the column's,
else string. Later messages may hold others: such a text is null and counted, as ever (the option
`badProperties`). A stream whose types must not change between restarts names them.

Runs where Spark plans, once a DataFrame, and only when a type is asked for.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from sluicemq.client.sync.bulk import READ_GROUP, BulkReader
from sluicemq.errors import FilterEvaluationError
from sluicemq.filter.java import double_of, integer_of, long_of
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records
from sluicemq.spark.cluster import broker_addresses, open_admin, queue_bounds
from sluicemq.spark.options import Options
from sluicemq.spark.schema import AUTO, BASE, EVERY, SET_FOR_ALL, Column
from sluicemq.spark.topics import topics_of

logger = logging.getLogger(__name__)
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""What a look takes for a number: not 007 (a code), nor Java's 5d and 0x1p3."""
_NUMBERS: Final = (("int", integer_of), ("bigint", long_of), ("double", double_of))


def settled(
    columns: tuple[Column, ...], options: Options, look: "Look | None" = None
) -> tuple[Column, ...]:
    """The columns with every `auto` replaced by a type, and `prop:*` by the properties seen by
    `look`, at the brokers if it is None."""
    if all(column.kind != AUTO for column in columns):
        return columns
    kinds = {name: kind_of(values) for name, values in (look or _values)(options).items()}
    taken = {column.name.lower() for column in columns} | {name.lower() for name in BASE}
    result: list[Column] = []
    for column in columns:
        if column.property_name == EVERY:
            result += _every(kinds, taken)
        elif column.kind == AUTO:
            result.append(replace(column, kind=kinds.get(column.property_name or "", "string")))
        else:
            result.append(column)
    return tuple(result)


Look = Callable[[Options], Mapping[str, set[str]]]
"""Property -> the distinct values of it in the newest messages."""


def _every(kinds: Mapping[str, str], taken: set[str]) -> Iterator[Column]:
    """Each property that has no column yet, but for those whose name another column has."""
    for name in sorted(kinds):
        if name.lower() in taken:
            logger.warning("prop:* leaves out the property %r: a column has that name", name)
        elif name not in SET_FOR_ALL:
            taken.add(name.lower())
            yield Column(name, name, kinds[name])


def kind_of(values: Iterable[str]) -> str:
    """The narrowest type of which all texts are values."""
    texts = set(values)
    if all(text.lower() in ("true", "false") for text in texts):
        return "boolean"
    if not all(map(_NUMBER.fullmatch, texts)):
        return "string"
    for kind, read in _NUMBERS:
        try:
            for text in texts:
                read(text, "")
        except FilterEvaluationError:
            continue
        return kind
    return "string"


def _values(options: Options) -> dict[str, set[str]]:
    """Property -> the distinct values it has in the newest messages."""
    found: dict[str, set[str]] = defaultdict(set)
    with open_admin(options) as admin:
        names = topics_of(options).found(admin)
        bounds = queue_bounds(admin, names)
        filled = {queue: bound for queue, bound in bounds.items() if bound[0] < bound[1]}
        addresses = broker_addresses(admin, names)
        for queue, (lowest, highest) in filled.items():
            start = max(lowest, highest - -(-options["inferMessages"] // len(filled)))
            for properties in _properties(
                options, queue, addresses[queue.broker], range(start, highest)
            ):
                for name, value in properties.items():
                    found[name].add(value)
    return found


def _properties(
    options: Options, queue: MessageQueue, address: str, offsets: range
) -> Iterator[Mapping[str, str]]:
    reader = BulkReader(
        address, queue.topic, queue.queue_id, offsets.start, offsets.stop, broker=queue.broker,
        group=options["group"] or READ_GROUP, credentials=options.credentials,
        tls=options.tls or False,
        timeout_s=options["timeoutMs"] / 1000,
    )  # fmt: skip
    with reader:
        for chunk in reader:
            for message in decode_records(bytes(chunk), broker=queue.broker):
                yield message.properties
