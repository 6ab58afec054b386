"""Bodies as texts or JSON instead of bytes, and what becomes of one that is neither.

    bodyFormat=utf-8                 the column `body` is a string
    bodyFormat=json, bodySchema=…    the column `body` is a struct of that schema

Both add the column `_error`: null where the body is what it should be, else the reason, and `body`
is null there: one malformed message stops no job, unless `badBody=fail` asks for it.

JSON is read strictly (RFC 8259: no NaN, one value a body), a missing field is null, a field that
the schema lacks is left out, a value of another type is an error of its row. The schema is Spark's
DDL in small, as a planning process has no JVM to parse it:

    schema = field ("," field)*          field = name [":"] type
    type   = string | int | bigint | double | float | boolean | array<type> | struct<schema>

Columns of the source: the whole schema, and the narrower ones a user asks for.

| column | type | |
|---|---|---|
| topic, broker | string | |
| queue_id | int | |
| queue_offset | bigint | position in the queue |
| msg_id | string | UNIQ_KEY; without one, store host and log offset in hex digits |
| keys | string | as sent: several are separated by one space; null without |
| tags | string | null without |
| properties | map<string,string> | without `SET_FOR_ALL`, unless the option `properties` is `all` |
| body | binary | decompressed when a client compressed it |
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
the column agree on every message. A text that is none is null (see the option `badProperties`).
The type `auto`, and `prop:*` for every property there is, are settled by `infer` before a read.
`body` may be a text or a struct, and there may be a column `_error` (see `bodies`).
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

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

from sluicemq.errors import ConfigurationError
from sluicemq.spark.options import Options

BINARY, TEXT, JSON = "binary", "utf-8", "json"
ERROR: Final = "_error"
_SCALARS: Final[dict[str, DataType]] = {
    "string": StringType(), "int": IntegerType(), "integer": IntegerType(), "bigint": LongType(),
    "long": LongType(), "double": DoubleType(), "float": FloatType(), "boolean": BooleanType(),
}  # fmt: skip
_TOKEN: Final = re.compile(r"\s*(?:`(?P<quoted>[^`]+)`|(?P<word>[\w.\-]+)|(?P<sign>[<>,:]))")


@dataclass(frozen=True, slots=True)
class BodyFormat:
    """How bodies are read: `kind` is BINARY, TEXT or JSON; `type` the Spark type of `body`."""

    kind: str
    type: DataType
    must_be_good: bool = False


def body_format(options: Options) -> BodyFormat | None:
    """What the options ask for; None: bytes as they are. Raises ConfigurationError."""
    kind, schema = options["bodyFormat"], options["bodySchema"]
    if kind != JSON and schema is not None:
        raise ConfigurationError(
            f"the option 'bodySchema' is given, and 'bodyFormat' is {kind!r}.",
            cure="A schema is for bodyFormat=json.",
        )
    if kind == BINARY:
        return None
    must_be_good = options["badBody"] == "fail"
    if kind == TEXT:
        return BodyFormat(TEXT, StringType(), must_be_good)
    if schema is None:
        raise ConfigurationError(
            "the option 'bodySchema' is missing, which bodyFormat=json needs.",
            cure='Add .option("bodySchema", "origin string, delay int").',
        )
    return BodyFormat(JSON, parse_schema(schema), must_be_good)


def parse_schema(text: str) -> StructType:
    """A schema as a Spark type. Raises ConfigurationError saying where it is wrong."""
    tokens = _Tokens(text)
    fields = _fields(tokens)
    if tokens.peek() is not None:
        raise tokens.wrong("a comma")
    return fields


class _Tokens:
    """Words and signs of a schema, one by one; a word carries the mark that it is one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._at = 0

    def peek(self) -> str | None:
        found = _TOKEN.match(self.text, self._at)
        return None if found is None else found["sign"] or "word"

    def take(self, sign: str) -> bool:
        found = _TOKEN.match(self.text, self._at)
        if found is None or found["sign"] != sign:
            return False
        self._at = found.end()
        return True

    def word(self, wanted: str) -> str:
        found = _TOKEN.match(self.text, self._at)
        name = None if found is None else found["quoted"] or found["word"]
        if found is None or name is None:
            raise self.wrong(wanted)
        self._at = found.end()
        return name

    def need(self, sign: str) -> None:
        if not self.take(sign):
            raise self.wrong(repr(sign))

    def wrong(self, wanted: str) -> ConfigurationError:
        return ConfigurationError(
            f"the option 'bodySchema' is wrong at character {self._at + 1}: {wanted} is missing"
            f" before {self.text[self._at :][:20]!r}.",
            cure="Write for example: origin string, delay int, legs array<struct<to:string>>.",
        )


def _fields(tokens: _Tokens) -> StructType:
    fields: list[StructField] = []
    while True:
        name = tokens.word("a name")
        tokens.take(":")
        fields.append(StructField(name, _type(tokens)))
        if not tokens.take(","):
            break
    names = [field.name.lower() for field in fields]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the option 'bodySchema' names {twice!r} twice.")
    return StructType(fields)


def _type(tokens: _Tokens) -> DataType:
    word = tokens.word("a type").lower()
    if word in ("array", "struct"):
        tokens.need("<")
        inner = ArrayType(_type(tokens)) if word == "array" else _fields(tokens)
        tokens.need(">")
        return inner
    if word not in _SCALARS:
        raise ConfigurationError(
            f"{word!r} in the option 'bodySchema' is not a type.",
            cure=f"Use {', '.join(_SCALARS)}, array<…>, struct<…>; times and decimals as string.",
        )
    return _SCALARS[word]


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
_NAMED: Final = BASE | EXTRA
PROMOTED: Final[dict[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
}
"""The types that a promoted property may have."""
_TYPE_ALIASES: Final = {"integer": "int", "long": "bigint", "bool": "boolean", "str": "string"}
_ITEM: Final = re.compile(
    r"(?P<prop>prop:)?(?:`(?P<quoted>[^`]+)`|(?P<name>[^\s`,:]+))"
    r"(?::(?P<type>\w+))?(?:\s+as\s+(?P<alias>\S+))?",
    re.IGNORECASE,
)


AUTO: Final = "auto"
EVERY: Final = "*"


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
    columns = tuple(_column(item) for item in _items(text))
    return _distinct(columns)


def _items(text: str) -> Iterator[str]:
    """The parts between commas; a comma in backquotes is part of a name."""
    for item in re.findall(r"(?:`[^`]*`?|[^,`])+|(?<=,)(?=,)", text):
        if not item.strip():
            raise ConfigurationError(f"the option 'columns' has an empty item: {text!r}.")
        yield item.strip()


def _column(item: str) -> Column:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise ConfigurationError(
            f"{item!r} in the option 'columns' is not a column.",
            cure="Write a column name, or prop:NAME:TYPE as COLUMN.",
        )
    name = found["quoted"] or found["name"]
    if found["prop"] is None:
        return _base_column(name, item)
    kind = (found["type"] or "string").lower()
    kind = _TYPE_ALIASES.get(kind, kind)
    if name == EVERY and found["quoted"] is None:
        return Column(EVERY, EVERY, AUTO)
    if kind not in PROMOTED and kind != AUTO:
        raise ConfigurationError(
            f"{found['type']!r} in {item!r} is not a type of a property.",
            cure=f"Use one of {', '.join((*PROMOTED, AUTO))}.",
        )
    return Column(found["alias"] or name, name, kind)


def _base_column(name: str, item: str) -> Column:
    if name not in _NAMED or name != item:
        near = difflib.get_close_matches(name, _NAMED, n=1)
        hint = f"Did you mean {near[0]!r}? " if near and near[0] != item else ""
        raise ConfigurationError(
            f"{item!r} in the option 'columns' is not a column.",
            cure=f"{hint}There are {', '.join(_NAMED)}; a property is prop:{name}.",
        )
    return Column(name, None, _NAMED[name].simpleString())


def with_bodies(columns: tuple[Column, ...], how: BodyFormat | None) -> tuple[Column, ...]:
    """The columns with `body` as the body format has it, and `_error` at the end if it is read."""
    if how is None or all(column.name != "body" for column in columns):
        return columns
    body = Column("body", None, how.type.simpleString(), how.type)
    changed = [body if column.name == "body" else column for column in columns]
    return _distinct((*changed, ERROR_COLUMN))


def declared_columns(options: Options) -> tuple[Column, ...]:
    """The columns that the options ask for, types `auto` unsettled. Raises ConfigurationError."""
    return with_bodies(parse_columns(options["columns"]), body_format(options))


def _distinct(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """The columns again. Raises when two have one name (Spark compares names without case)."""
    seen: set[str] = set()
    for column in columns:
        if column.name.lower() in seen:
            raise ConfigurationError(
                f"the column {column.name!r} is there twice.",
                cure="Give one another name: prop:NAME:TYPE as OTHER.",
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
    return _distinct(tuple(_asked(field, known.get(field.name)) for field in schema.fields))


def _asked(field: Any, known: Column | None) -> Column:
    wanted = field.dataType
    if known is not None and known.type == wanted:
        return known
    if known is None or known.property_name is not None:
        name = field.name if known is None else known.property_name
        for kind, data_type in PROMOTED.items():
            if data_type == wanted:
                return Column(field.name, name, kind)
        raise ConfigurationError(
            f"the column {field.name!r} of the schema is a property of type"
            f" {wanted.simpleString()!r}.",
            cure=f"A property can be {', '.join(PROMOTED)}.",
        )
    raise ConfigurationError(
        f"the column {field.name!r} of the schema has the type {wanted.simpleString()!r}.",
        cure=f"It is {known.type.simpleString()!r}.",
    )
