"""Columns of the source: the whole schema, and the narrower ones a user asks for.

| column | type | |
|---|---|---|
| topic, broker | string | |
| queue_id | int | |
| queue_offset | bigint | position in the queue |
| msg_id | string | UNIQ_KEY; without one, store host and log offset in hex digits |
| keys | string | as sent: several are separated by one space; null without |
| tags | string | null without |
| properties | map<string,string> | without `SET_FOR_ALL`, unless the option `properties` is `all` |
| body | binary | decompressed when a client compressed it; null when that fails |
| born_time, store_time | timestamp | clocks of producer and broker, in milliseconds |
| reconsume_times | int | |

Only by name in `columns` (an archive has them): born_host, store_host (string), flag, sys_flag,
body_crc, size_bytes (int), physical_offset, prepared_offset (bigint), as the record holds them.

Spark's Python sources have no column pruning (spec/spark.md), so a narrower read is asked for: by
the option `columns`, or by a user's own `.schema(…)`, whose further columns are properties:

    columns = item ("," item)*
    item    = column name | "prop:" name [":" type] [" as " column name]
    name    = characters without , : and blanks, or anything in `backquotes`
    type    = string (default) | int | bigint | double | boolean | auto

    "topic,queue_offset,body,prop:dep_delay:int,prop:origin,prop:`a:b`:double as ab"

A promoted property is a column of its own, so that Spark can push predicates on it (it pushes none
on map elements). Its text is read as Java reads it (Integer.valueOf …): then a SQL92 selector and
the column agree on every message. A text that is no value of the type is null (see the option
`badProperties`).

The type `auto`, and `prop:*` for every property there is, are settled before a read (`settled`):
the newest messages of every queue are read and every value of a property is tried as int, bigint,
double and boolean, as Java reads them; the narrowest type that all of them have is the column's,
else string. Later messages may hold others: such a text is null and counted, as ever (the option
`badProperties`). A stream whose types must not change between restarts names them.

Bodies may be texts or JSON instead of bytes:

    bodyFormat=utf-8                 the column `body` is a string
    bodyFormat=json, bodySchema=…    the column `body` is a struct of that schema

Both add the column `_error`: null where the body is what it should be, else the reason, and `body`
is null there: one malformed message stops no job, unless `badBody=fail` asks for it. A body that
cannot be decompressed is bad in every format; with bytes, `_error` is read when `columns` names it,
and `badBody=raw` delivers the stored bytes. Reads without `body` and `_error` decode no body.

JSON is read strictly (RFC 8259: no NaN, one value a body), a missing field is null, a field that
the schema lacks is left out, a value of another type is an error of its row. The schema is a subset
of Spark's DDL, as a planning process has no JVM to parse it:

    schema = field ("," field)*          field = name [":"] type
    type   = string | int | bigint | double | float | boolean | array<type> | struct<schema>
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sluicemq.errors import ConfigurationError, FilterEvaluationError
from sluicemq.filter.evaluate import double_of, integer_of, long_of
from sluicemq.hints import did_you_mean
from sluicemq.spark.options import Options

SET_FOR_ALL: Final = frozenset({
    "KEYS", "TAGS", "UNIQ_KEY", "WAIT", "MSG_REGION", "TRACE_ON", "CLUSTER",
})  # fmt: skip
"""Properties that producer and broker put on every message: three have columns of their own, the
others say nothing about it (spec/remoting.md §11). Neither read into `properties` nor written."""
BASE: Final[dict[str, DataType]] = {
    "topic": StringType(),
    "broker": StringType(),
    "queue_id": IntegerType(),
    "queue_offset": LongType(),
    "msg_id": StringType(),
    "keys": StringType(),
    "tags": StringType(),
    "properties": MapType(StringType(), StringType()),
    "body": BinaryType(),
    "born_time": TimestampType(),
    "store_time": TimestampType(),
    "reconsume_times": IntegerType(),
}
"""Every column of a message, in order."""
EXTRA: Final[dict[str, DataType]] = {
    "born_host": StringType(),
    "store_host": StringType(),
    "flag": IntegerType(),
    "sys_flag": IntegerType(),
    "physical_offset": LongType(),
    "prepared_offset": LongType(),
    "body_crc": IntegerType(),
    "size_bytes": IntegerType(),
}
"""What a record holds besides; read when `columns` names it."""
PROMOTED: Final[dict[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
}
"""The types that a promoted property may have."""
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""What a look takes for a number: not 007 (a code), nor Java's 5d and 0x1p3."""
NUMBERS: Final = (("int", integer_of), ("bigint", long_of), ("double", double_of))
AUTO: Final = "auto"
EVERY: Final = "*"
BINARY, TEXT, JSON = "binary", "utf-8", "json"
FAIL, RAW = "fail", "raw"
ERROR: Final = "_error"
_NAMED: Final = BASE | EXTRA
_TYPE_ALIASES: Final = {"integer": "int", "long": "bigint", "bool": "boolean", "str": "string"}
_BODY_TYPES: Final = PROMOTED | {
    "integer": IntegerType(), "long": LongType(), "float": FloatType(),
}  # fmt: skip
_ITEM: Final = re.compile(
    r"(?P<prop>prop:)?(?:`(?P<quoted>[^`]+)`|(?P<name>[^\s`,:]+))"
    r"(?::(?P<type>\w+))?(?:\s+as\s+(?P<alias>\S+))?",
    re.IGNORECASE,
)
logger = logging.getLogger(__name__)
_TOKEN: Final = re.compile(r"\s*(?:`(?P<quoted>[^`]+)`|(?P<word>[\w.\-]+)|(?P<sign>[<>,:]))")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the result: of `BASE`, of `EXTRA`, or a property. `kind` names its type, unless
    `given` is another one (`body`, `_error`)."""

    name: str
    property_name: str | None
    kind: str
    given: DataType | None = None

    @property
    def type(self) -> DataType:
        if self.given is not None:
            return self.given
        return _NAMED[self.name] if self.property_name is None else PROMOTED[self.kind]


ALL_COLUMNS: Final = tuple(Column(name, None, kind.simpleString()) for name, kind in BASE.items())
ERROR_COLUMN: Final = Column(ERROR, None, "string", StringType())


def parse_columns(text: str | None) -> tuple[Column, ...]:
    """The option `columns` -> columns in order; None is the whole schema. ConfigurationError."""
    if text is None:
        return ALL_COLUMNS
    columns = []
    # a comma in backquotes is part of a name
    for part in re.findall(r"(?:`[^`]*`?|[^,`])+|(?<=,)(?=,)", text):
        item = part.strip()
        if not item:
            raise ConfigurationError(f"the option 'columns' has an empty item: {text!r}.")
        found = _ITEM.fullmatch(item)
        name = "" if found is None else found["quoted"] or found["name"]
        if item == ERROR:
            columns.append(ERROR_COLUMN)
            continue
        if found is None or (found["prop"] is None and (name not in _NAMED or name != item)):
            fix = "Write a column name, or prop:NAME:TYPE as COLUMN."
            if found is not None:
                fix = (
                    f"{did_you_mean(name, _NAMED)} There are {', '.join(_NAMED)};"
                    f" a property is prop:{name}."
                ).lstrip()
            raise ConfigurationError(f"{item!r} in the option 'columns' is not a column.", fix=fix)
        kind = (found["type"] or "string").lower()
        kind = _TYPE_ALIASES.get(kind, kind)
        if found["prop"] is None:
            columns.append(Column(name, None, _NAMED[name].simpleString()))
        elif name == EVERY and found["quoted"] is None:
            columns.append(Column(EVERY, EVERY, AUTO))
        elif kind in PROMOTED or kind == AUTO:
            columns.append(Column(found["alias"] or name, name, kind))
        else:
            raise ConfigurationError(
                f"{found['type']!r} in {item!r} is not a type of a property.",
                fix=f"Use one of {', '.join((*PROMOTED, AUTO))}.",
            )
    return _distinct(tuple(columns))


def declared_columns(options: Options) -> tuple[Column, ...]:
    """The columns that the options ask for, types `auto` unsettled: `body` as the body format has
    it, and `_error` at the end if it is read. Raises ConfigurationError."""
    columns, how = parse_columns(options["columns"]), body_format(options)
    if how is None or all(column.name != "body" for column in columns):
        return columns
    body = Column("body", None, how.type.simpleString(), how.type)
    changed = [body if column.name == "body" else column for column in columns]
    return _distinct((*changed, *(() if ERROR_COLUMN in changed else (ERROR_COLUMN,))))


def _distinct(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns again. Raises when two have one name (Spark compares names without case)."""
    seen: set[str] = set()
    for column in columns:
        if column.name.lower() in seen:
            raise ConfigurationError(
                f"the column {column.name!r} is there twice.",
                fix="Give one another name: prop:NAME:TYPE as OTHER.",
            )
        seen.add(column.name.lower())
    return columns


def struct_type(columns: Sequence[Column]) -> StructType:
    """The Spark schema of columns."""
    return StructType([StructField(column.name, column.type) for column in columns])


def columns_of(schema: StructType, declared: Sequence[Column]) -> tuple[Column, ...]:
    """The columns a reader has to deliver for the schema Spark asks of it.

    That is the source's own one, or a user's `.schema(…)`: a name of `declared` or `BASE` means
    that column and every other one a property of the same name. Raises ConfigurationError when a
    type does not fit.
    """
    bodies = [one for one in (*declared, ERROR_COLUMN) if one.given is not None]
    settled = [one for one in declared if one.kind != AUTO]
    named = [Column(one.name, one.property_name, "string") for one in declared if one.kind == AUTO]
    columns = (*ALL_COLUMNS, *settled, *named, *(bodies if len(bodies) > 1 else ()))
    known = {column.name: column for column in columns}
    kinds = {data_type: kind for kind, data_type in PROMOTED.items()}
    found = []
    for field in schema.fields:
        wanted, column = field.dataType, known.get(field.name)
        if column is not None and column.type == wanted:
            found.append(column)
        elif column is not None and column.property_name is None:
            raise ConfigurationError(
                f"the column {field.name!r} of the schema has the type {wanted.simpleString()!r}.",
                fix=f"It is {column.type.simpleString()!r}.",
            )
        elif wanted in kinds:
            name = field.name if column is None else column.property_name
            found.append(Column(field.name, name, kinds[wanted]))
        else:
            raise ConfigurationError(
                f"the column {field.name!r} of the schema is a property of type"
                f" {wanted.simpleString()!r}.",
                fix=f"A property can be {', '.join(PROMOTED)}.",
            )
    return _distinct(tuple(found))


# ---- types that messages show

Look = Callable[[Options], Iterable[Mapping[str, str]]]
"""The properties of the newest messages."""


def settled(columns: tuple[Column, ...], options: Options, look: Look) -> tuple[Column, ...]:
    """The columns with every `auto` replaced by a type, and `prop:*` by the properties that `look`
    sees."""
    if all(column.kind != AUTO for column in columns):
        return columns
    values: dict[str, set[str]] = defaultdict(set)
    for properties in look(options):
        for name, value in properties.items():
            values[name].add(value)
    kinds = {name: kind_of(texts) for name, texts in values.items()}
    taken = {column.name.lower() for column in columns} | {name.lower() for name in BASE}
    result: list[Column] = []
    for column in columns:
        if column.property_name == EVERY:
            for name in sorted(kinds.keys() - SET_FOR_ALL):
                if name.lower() in taken:
                    logger.warning("prop:* leaves out the property %r: a column has that name",
                                   name)  # fmt: skip
                else:
                    taken.add(name.lower())
                    result.append(Column(name, name, kinds[name]))
        elif column.kind == AUTO:
            result.append(replace(column, kind=kinds.get(column.property_name or "", "string")))
        else:
            result.append(column)
    return tuple(result)


def kind_of(values: Iterable[str]) -> str:
    """The narrowest type of which all texts are values."""
    texts = set(values)
    if all(text.lower() in ("true", "false") for text in texts):
        return "boolean"
    if not all(map(_NUMBER.fullmatch, texts)):
        return "string"
    for kind, read in NUMBERS:
        try:
            for text in texts:
                read(text, "")
        except FilterEvaluationError:
            continue
        return kind
    return "string"


# ---- bodies


@dataclass(frozen=True, slots=True)
class BodyFormat:
    """How bodies are read: `kind` is TEXT or JSON; `type` the Spark type of `body`."""

    kind: str
    type: DataType


def body_format(options: Options) -> BodyFormat | None:
    """What the options ask for; None: bytes as they are. Raises ConfigurationError."""
    kind, schema = options["bodyFormat"], options["bodySchema"]
    if kind != JSON and schema is not None:
        raise ConfigurationError(
            f"the option 'bodySchema' is given, and 'bodyFormat' is {kind!r}.",
            fix="A schema is for bodyFormat=json.",
        )
    if kind == BINARY:
        return None
    if options["badBody"] == RAW:
        raise ConfigurationError(
            f"the option 'badBody' is 'raw', and 'bodyFormat' is {kind!r}.",
            fix="Stored bytes fit bodyFormat=binary alone: use badBody=null.",
        )
    if kind == TEXT:
        return BodyFormat(TEXT, StringType())
    if schema is None:
        raise ConfigurationError(
            "the option 'bodySchema' is missing, which bodyFormat=json needs.",
            fix='Add .option("bodySchema", "origin string, delay int").',
        )
    return BodyFormat(JSON, parse_schema(schema))


def parse_schema(text: str) -> StructType:
    """A schema as a Spark type. Raises ConfigurationError saying where it is wrong."""
    schema = _SchemaText(text)
    fields = schema.fields()
    if _TOKEN.match(text, schema.position) is not None:
        raise schema.lacks("a comma")
    return fields


class _SchemaText:
    """Reads a schema by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def fields(self) -> StructType:
        fields: list[StructField] = []
        while not fields or self._took(","):
            name = self._word("a name")
            self._took(":")
            if name.lower() in [field.name.lower() for field in fields]:
                raise ConfigurationError(f"the option 'bodySchema' names {name.lower()!r} twice.")
            fields.append(StructField(name, self._type()))
        return StructType(fields)

    def _type(self) -> DataType:
        word = self._word("a type").lower()
        if word in ("array", "struct"):
            if not self._took("<"):
                raise self.lacks("'<'")
            inner = ArrayType(self._type()) if word == "array" else self.fields()
            if not self._took(">"):
                raise self.lacks("'>'")
            return inner
        if word not in _BODY_TYPES:
            raise ConfigurationError(
                f"{word!r} in the option 'bodySchema' is not a type.",
                fix=f"Use {', '.join(_BODY_TYPES)}, array<…>, struct<…>; times and decimals as"
                " string.",
            )
        return _BODY_TYPES[word]

    def _word(self, wanted: str) -> str:
        found = _TOKEN.match(self.text, self.position)
        name = None if found is None else found["quoted"] or found["word"]
        if found is None or name is None:
            raise self.lacks(wanted)
        self.position = found.end()
        return name

    def _took(self, sign: str) -> bool:
        found = _TOKEN.match(self.text, self.position)
        if found is None or found["sign"] != sign:
            return False
        self.position = found.end()
        return True

    def lacks(self, wanted: str) -> ConfigurationError:
        return ConfigurationError(
            f"the option 'bodySchema' is wrong at character {self.position + 1}: {wanted} is"
            f" missing before {self.text[self.position :][:20]!r}.",
            fix="Write for example: origin string, delay int, legs array<struct<to:string>>.",
        )
