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
"""

import re
from dataclasses import dataclass
from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
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
