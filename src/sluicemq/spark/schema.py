"""The columns of the sources: the default schema, and the columns that a user asks for.

| column | type | |
|---|---|---|
| topic, broker | string | |
| queue_id | int | |
| queue_offset | bigint | offset in the queue |
| msg_id | string | UNIQ_KEY; without one, store host and log position in hexadecimal digits |
| keys | string | as sent: several keys are separated by one space; null without keys |
| tags | string | null without a tag |
| properties | map<string,string> | without automatic properties, unless `properties=all` |
| body | binary | decompressed if a client compressed it; null if that fails |
| born_time, store_time | timestamp | clocks of producer and broker, in milliseconds |
| reconsume_times | int | |

Further columns are read only if `columns` names them: born_host, store_host (string), flag,
sys_flag, body_crc, size_bytes (int), physical_offset, prepared_offset (bigint). They have the
values of the stored record, and archives use them.

Spark's Python sources have no column pruning (spec/spark.md). A user asks for fewer columns by the
option `columns`, or by `.schema(…)`, in which unknown names are properties. The grammar of
`columns`:

    columns = item ("," item)*
    item    = column name | "prop:" name [":" type] [" as " column name]
    name    = characters without , : and blanks, or anything in `backquotes`
    type    = string (default) | int | bigint | double | boolean | auto

    "topic,queue_offset,body,prop:dep_delay:int,prop:origin,prop:`a:b`:double as ab"

A promoted property is a property with a column of its own. Spark can push predicates on a column,
but not on an element of a map. The string value is converted as Java converts it (Integer.valueOf
…), so that a SQL92 selector and the column agree on every message. A value that is not of the
type is null (see the option `badProperties`).

The type `auto`, and `prop:*` for all properties, are inferred before a read (`infer_types`). The
newest messages of every queue are read, and every value of a property is tried as int, bigint,
double and boolean. The column gets the narrowest type that fits all of them, else string. Later
messages may have other values; these are null and counted, as for any promoted property. A stream
whose types must not change between restarts should name them.

Bodies may be strings or structs instead of bytes:

    bodyFormat=utf-8                 the column `body` is a string
    bodyFormat=json, bodySchema=…    the column `body` is a struct of that schema

Both add the column `_error`. It is null if the body is valid, else it is the reason and `body` is
null. So one malformed message does not stop a job, unless `badBody=fail`. A body that cannot be
decompressed is bad in every format. With bodyFormat=binary, `_error` is read only if `columns`
names it, and `badBody=raw` reads the stored bytes. A read without `body` and `_error` decodes no
bodies.

JSON is read strictly (RFC 8259: no NaN, one value for each body). A missing field is null, a field
that the schema does not have is ignored, and a value of another type makes the body bad. The schema
is a subset of Spark's DDL, because the planner's process has no JVM to parse it:

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
from sluicemq.filter.evaluate import parse_double, parse_integer, parse_long
from sluicemq.hints import did_you_mean
from sluicemq.spark.options import Options

AUTOMATIC_PROPERTIES: Final = frozenset(
    {"KEYS", "TAGS", "UNIQ_KEY", "WAIT", "MSG_REGION", "TRACE_ON", "CLUSTER"}
)
"""Properties that producer and broker set on every message (spec/remoting.md §11).

Three of them have columns of their own, and the others say nothing about a message. The column
`properties` does not contain them by default, and the sink does not write them from it."""
BASE_TYPES: Final[dict[str, DataType]] = {
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
"""The columns of the default schema, in order, with their types."""
EXTRA_TYPES: Final[dict[str, DataType]] = {
    "born_host": StringType(),
    "store_host": StringType(),
    "flag": IntegerType(),
    "sys_flag": IntegerType(),
    "physical_offset": LongType(),
    "prepared_offset": LongType(),
    "body_crc": IntegerType(),
    "size_bytes": IntegerType(),
}
"""The columns that are read only if the option `columns` names them, with their types."""
PROPERTY_TYPES: Final[dict[str, DataType]] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
}
"""The types that a promoted property may have, by name."""
_DECIMAL_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""A value that is inferred to be a number: not 007 (a code), nor Java's 5d and 0x1p3."""
NUMBER_PARSERS: Final = (("int", parse_integer), ("bigint", parse_long), ("double", parse_double))
"""The number types, narrowest first, each with the function that parses a string as Java does."""
AUTO: Final = "auto"
ALL_PROPERTIES: Final = "*"
BINARY = "binary"
TEXT = "utf-8"
JSON = "json"
BAD_BODY_FAIL = "fail"
BAD_BODY_RAW = "raw"
ERROR_NAME: Final = "_error"
_COLUMN_TYPES: Final = BASE_TYPES | EXTRA_TYPES
_TYPE_ALIASES: Final = {"integer": "int", "long": "bigint", "bool": "boolean", "str": "string"}
_BODY_FIELD_TYPES: Final = PROPERTY_TYPES | {
    "integer": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
}
_ITEM: Final = re.compile(
    r"(?P<prop>prop:)?(?:`(?P<quoted>[^`]+)`|(?P<name>[^\s`,:]+))"
    r"(?::(?P<type>\w+))?(?:\s+as\s+(?P<alias>\S+))?",
    re.IGNORECASE,
)
"""One item of the option `columns`."""
_ITEM_TEXT: Final = re.compile(r"(?:`[^`]*`?|[^,`])+|(?<=,)(?=,)")
"""The items of the option `columns`; a comma in backquotes is part of a name."""
_TOKEN: Final = re.compile(r"\s*(?:`(?P<quoted>[^`]+)`|(?P<word>[\w.\-]+)|(?P<sign>[<>,:]))")
"""One token of the option `bodySchema`."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the result.

    `property_name` is the property that a promoted column contains, else None. `type_name` is the
    name of the type, or `auto` before types are inferred. `explicit_type` is the type of a column
    that depends on other options (`body`, `_error`), else None.
    """

    name: str
    property_name: str | None
    type_name: str
    explicit_type: DataType | None = None

    @property
    def data_type(self) -> DataType:
        """The column's Spark type. Raises KeyError if the type is still to be inferred (`auto`)."""
        if self.explicit_type is not None:
            return self.explicit_type
        if self.property_name is None:
            return _COLUMN_TYPES[self.name]
        return PROPERTY_TYPES[self.type_name]


BASE_COLUMNS: Final = tuple(
    Column(name, None, data_type.simpleString()) for name, data_type in BASE_TYPES.items()
)
"""The columns of the default schema, in order."""
ERROR_COLUMN: Final = Column(ERROR_NAME, None, "string", StringType())


# ---- the columns that are read


def parse_columns(columns_option: str | None) -> tuple[Column, ...]:
    """Return the columns that the option `columns` names, in order.

    None means the default columns. Raises ConfigurationError for an item that is not a column, and
    for a repeated name.
    """
    if columns_option is None:
        return BASE_COLUMNS
    columns = []
    for padded_item in _ITEM_TEXT.findall(columns_option):
        column_item = padded_item.strip()
        if not column_item:
            raise ConfigurationError(f"the option 'columns' has an empty item: {columns_option!r}.")
        columns.append(_parse_column(column_item))
    return _check_distinct(tuple(columns))


def _parse_column(item: str) -> Column:
    """Return the column that one item of the option `columns` names, such as `prop:delay:int as d`.

    `prop:*` becomes a column named `*` of the type `auto`. Raises ConfigurationError for an item of
    another form, an unknown column and an unknown type.
    """
    if item == ERROR_NAME:
        return ERROR_COLUMN
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ConfigurationError(
            f"{item!r} in the option 'columns' is not a column.",
            fix="Write a column name, or prop:NAME:TYPE as COLUMN.",
        )
    name = match["quoted"] or match["name"]
    if match["prop"] is None:
        if name not in _COLUMN_TYPES or name != item:
            raise ConfigurationError(
                f"{item!r} in the option 'columns' is not a column.",
                fix=f"{did_you_mean(name, _COLUMN_TYPES)} The columns are"
                f" {', '.join(_COLUMN_TYPES)}; a property is prop:{name}.".lstrip(),
            )
        return Column(name, None, _COLUMN_TYPES[name].simpleString())
    if name == ALL_PROPERTIES and match["quoted"] is None:
        return Column(ALL_PROPERTIES, ALL_PROPERTIES, AUTO)
    type_name = _parse_property_type(match["type"], item)
    return Column(match["alias"] or name, name, type_name)


def _parse_property_type(written_type: str | None, item: str) -> str:
    """Return the name of a type that is written in an item of the option `columns`.

    None means "string". Raises ConfigurationError for an unknown type. The error contains the whole
    `item`.
    """
    type_name = (written_type or "string").lower()
    type_name = _TYPE_ALIASES.get(type_name, type_name)
    if type_name not in PROPERTY_TYPES and type_name != AUTO:
        raise ConfigurationError(
            f"{written_type!r} in {item!r} is not a type of a property.",
            fix=f"Use one of {', '.join((*PROPERTY_TYPES, AUTO))}.",
        )
    return type_name


def declared_columns(options: Options) -> tuple[Column, ...]:
    """Return the columns that the options ask for, without inferring the types `auto`.

    If the option `bodyFormat` is not binary, the column `body` has the type of the format, and the
    column `_error` is appended unless it is listed. Raises ConfigurationError for a wrong column or
    body format.
    """
    columns = parse_columns(options["columns"])
    body_format = parse_body_format(options)
    has_body = any(column.name == "body" for column in columns)
    if body_format is None or not has_body:
        return columns
    typed_body = Column("body", None, body_format.type.simpleString(), body_format.type)
    typed_columns = [typed_body if column.name == "body" else column for column in columns]
    if ERROR_COLUMN not in typed_columns:
        typed_columns.append(ERROR_COLUMN)
    return _check_distinct(tuple(typed_columns))


def _check_distinct(columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Return the columns unchanged.

    Raises ConfigurationError if two have the same name; Spark compares names without case.
    """
    names: set[str] = set()
    for column in columns:
        if column.name.lower() in names:
            raise ConfigurationError(
                f"the column {column.name!r} occurs twice.",
                fix="Rename one of them: prop:NAME:TYPE as OTHER.",
            )
        names.add(column.name.lower())
    return columns


def to_spark_schema(columns: Sequence[Column]) -> StructType:
    """Return the Spark schema of the columns. None of them may have the type `auto`."""
    return StructType([StructField(column.name, column.data_type) for column in columns])


def resolve_schema(schema: StructType, declared: Sequence[Column]) -> tuple[Column, ...]:
    """Return the columns that a reader must deliver for the schema that Spark asks for.

    The schema is the source's own, or a user's from `.schema(…)`. `declared` are the columns
    of the options. A field with the name of one of these, or of a default column, is that column.
    Every other field is a property of the same name. If a property has another type in the schema
    than in the options, the type of the schema counts. Raises ConfigurationError if the type of any
    other column differs, or if a type is not possible for a property.
    """
    column_by_name = _known_columns(declared)
    resolved = [_resolve_field(field, column_by_name.get(field.name)) for field in schema.fields]
    return _check_distinct(tuple(resolved))


def _resolve_field(field: StructField, column: Column | None) -> Column:
    """Return the column for one field of a schema that the user gave.

    `column` is the known column with the name of the field. If it is None, or if its type differs
    from the field's type, the field is a property. Raises ConfigurationError if the type is not
    possible.
    """
    field_type = field.dataType
    if column is not None and column.data_type == field_type:
        return column
    if column is not None and column.property_name is None:
        raise ConfigurationError(
            f"the column {field.name!r} of the schema has the type {field_type.simpleString()!r}.",
            fix=f"Use the type {column.data_type.simpleString()!r}.",
        )
    property_name = field.name if column is None else column.property_name
    for type_name, property_type in PROPERTY_TYPES.items():
        if property_type == field_type:
            return Column(field.name, property_name, type_name)
    raise ConfigurationError(
        f"the column {field.name!r} of the schema is a property of type"
        f" {field_type.simpleString()!r}.",
        fix=f"Use one of {', '.join(PROPERTY_TYPES)}.",
    )


def _known_columns(declared: Sequence[Column]) -> dict[str, Column]:
    """Return the columns that a schema may name without declaring a property, by name.

    They are the default columns and those in `declared`. A column whose type is not inferred yet
    counts as string. If the body has a format, `_error` is one of them.
    """
    known = {column.name: column for column in BASE_COLUMNS}
    for column in declared:
        if column.type_name != AUTO:
            known[column.name] = column
    for column in declared:
        if column.type_name == AUTO:
            known[column.name] = Column(column.name, column.property_name, "string")
    explicit_columns = [column for column in declared if column.explicit_type is not None]
    if explicit_columns:
        explicit_columns.append(ERROR_COLUMN)  # belongs to every body format
    for column in explicit_columns:
        known[column.name] = column
    return known


# ---- inferred types

PropertySampler = Callable[[Options], Iterable[Mapping[str, str]]]
"""A function that returns the properties of the newest messages, for the options of a load."""


def infer_types(
    columns: tuple[Column, ...], options: Options, read_newest: PropertySampler
) -> tuple[Column, ...]:
    """Return the columns with inferred types in place of `auto`.

    `prop:*` is replaced by a column for each property. `read_newest(options)` yields the properties
    of the newest messages. It is called once if there is a column of type `auto`, else not at all.
    A property that these messages do not have is a string. A property whose name is that of another
    column is left out of `prop:*`, with a warning.
    """
    if all(column.type_name != AUTO for column in columns):
        return columns
    type_names = _infer_property_types(read_newest(options))
    used_names = {column.name.lower() for column in columns}
    used_names |= {name.lower() for name in BASE_TYPES}
    typed_columns: list[Column] = []
    for column in columns:
        if column.property_name == ALL_PROPERTIES:
            typed_columns += _make_property_columns(type_names, used_names)
        elif column.type_name == AUTO:
            type_name = type_names.get(column.property_name or "", "string")
            typed_columns.append(replace(column, type_name=type_name))
        else:
            typed_columns.append(column)
    return tuple(typed_columns)


def _infer_property_types(messages: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the narrowest type of each property, by the name of the property.

    `messages` are the properties of some messages. The type is a name such as "int" or "string".
    """
    texts_by_property: dict[str, set[str]] = defaultdict(set)
    for properties in messages:
        for name, text in properties.items():
            texts_by_property[name].add(text)
    return {name: infer_type(texts) for name, texts in texts_by_property.items()}


def _make_property_columns(type_names: Mapping[str, str], used_names: set[str]) -> list[Column]:
    """Return a column for each property that an application has set, sorted by name.

    `type_names` has the type of each property. `used_names` are the names of other columns in lower
    case. A property with such a name gets no column. The name of each new column is added to the
    set.
    """
    columns = []
    for name in sorted(type_names.keys() - AUTOMATIC_PROPERTIES):
        if name.lower() in used_names:
            logger.warning("prop:* leaves out the property %r: a column has that name", name)
        else:
            used_names.add(name.lower())
            columns.append(Column(name, name, type_names[name]))
    return columns


def infer_type(texts: Iterable[str]) -> str:
    """Return the narrowest type to which all texts can be converted, by its name.

    The types are boolean, int, bigint and double. The result is `string` if none of these fits, and
    boolean if there are no texts.
    """
    distinct_texts = set(texts)
    if all(text.lower() in ("true", "false") for text in distinct_texts):
        return "boolean"
    if not all(map(_DECIMAL_NUMBER.fullmatch, distinct_texts)):
        return "string"
    for type_name, parse_number in NUMBER_PARSERS:
        try:
            for text in distinct_texts:
                parse_number(text, "")
        except FilterEvaluationError:
            continue
        return type_name
    return "string"


# ---- bodies


@dataclass(frozen=True, slots=True)
class BodyFormat:
    """How bodies are read: `kind` is TEXT or JSON, `type` is the Spark type of the column."""

    kind: str
    type: DataType


def parse_body_format(options: Options) -> BodyFormat | None:
    """Return the body format that the options ask for; None means that bodies stay bytes.

    Raises ConfigurationError for options that contradict each other, and for a wrong schema.
    """
    body_format = options["bodyFormat"]
    schema = options["bodySchema"]
    if body_format != JSON and schema is not None:
        raise ConfigurationError(
            f"the option 'bodySchema' is given, but 'bodyFormat' is {body_format!r}.",
            fix="Set bodyFormat=json, or remove the schema.",
        )
    if body_format == BINARY:
        return None
    if options["badBody"] == BAD_BODY_RAW:
        raise ConfigurationError(
            f"the option 'badBody' is 'raw', but 'bodyFormat' is {body_format!r}.",
            fix="Use badBody=null; only bodyFormat=binary can contain stored bytes.",
        )
    if body_format == TEXT:
        return BodyFormat(TEXT, StringType())
    if schema is None:
        raise ConfigurationError(
            "the option 'bodySchema' is missing, which bodyFormat=json needs.",
            fix='Add .option("bodySchema", "origin string, delay int").',
        )
    return BodyFormat(JSON, parse_schema(schema))


def parse_schema(schema: str) -> StructType:
    """Return the Spark type for a text such as `origin string, delay int` (option `bodySchema`).

    Raises ConfigurationError, which says where the text is wrong.
    """
    parser = _SchemaParser(schema)
    fields = parser.parse_fields()
    has_more_tokens = _TOKEN.match(schema, parser.position) is not None
    if has_more_tokens:
        raise parser.missing_error("a comma")
    return fields


class _SchemaParser:
    """A recursive-descent parser of one schema. `position` is the index of the next character."""

    def __init__(self, schema: str) -> None:
        """Create a parser at the beginning of `schema`, a value of the option `bodySchema`."""
        self.schema = schema
        self.position = 0

    def parse_fields(self) -> StructType:
        """Parse fields such as `a int, b string`, and return them as a struct.

        The text after the last field remains unread. Raises ConfigurationError if the text is
        malformed or names a field twice.
        """
        fields: list[StructField] = []
        while not fields or self._take_sign(","):
            name = self._take_word("a name")
            self._take_sign(":")
            if name.lower() in [field.name.lower() for field in fields]:
                raise ConfigurationError(f"the option 'bodySchema' names {name.lower()!r} twice.")
            fields.append(StructField(name, self._parse_type()))
        return StructType(fields)

    def _parse_type(self) -> DataType:
        """Parse one type, such as `array<int>`, and return it.

        Raises ConfigurationError if the text is malformed or the type is unknown.
        """
        type_name = self._take_word("a type").lower()
        if type_name in ("array", "struct"):
            if not self._take_sign("<"):
                raise self.missing_error("'<'")
            if type_name == "array":
                nested: DataType = ArrayType(self._parse_type())
            else:
                nested = self.parse_fields()
            if not self._take_sign(">"):
                raise self.missing_error("'>'")
            return nested
        if type_name not in _BODY_FIELD_TYPES:
            raise ConfigurationError(
                f"{type_name!r} in the option 'bodySchema' is not a type.",
                fix=f"Use {', '.join(_BODY_FIELD_TYPES)}, array<…>, struct<…>; times and decimals"
                " as string.",
            )
        return _BODY_FIELD_TYPES[type_name]

    def _take_word(self, expected: str) -> str:
        """Return the next token, which must be a word or quoted name.

        Otherwise raise ConfigurationError, which says that `expected` is missing.
        """
        token = _TOKEN.match(self.schema, self.position)
        if token is None or token["sign"] is not None:
            raise self.missing_error(expected)
        self.position = token.end()
        return token["quoted"] or token["word"]

    def _take_sign(self, sign: str) -> bool:
        """Skip the next token if it is `sign`, and return True; otherwise return False."""
        token = _TOKEN.match(self.schema, self.position)
        if token is None or token["sign"] != sign:
            return False
        self.position = token.end()
        return True

    def missing_error(self, expected: str) -> ConfigurationError:
        """Return the error that `expected` is missing at the current position."""
        return ConfigurationError(
            f"the option 'bodySchema' is wrong at character {self.position + 1}: {expected} is"
            f" missing before {self.schema[self.position :][:20]!r}.",
            fix="Write for example: origin string, delay int, legs array<struct<to:string>>.",
        )
