"""Body columns of one Arrow batch: bytes -> texts or structs, and the reasons where that fails.

Texts are converted by Arrow all at once, and looked at one by one only when that fails; JSON is
read body by body. Heavy to import: executors only.
"""

import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructType,
)

from sluicemq.spark.bodies import TEXT, BodyFormat

_REASON_LENGTH_MAX: Final = 200
Reader = Callable[[Any], Any]


class Decoded(NamedTuple):
    """The column, the column `_error`, and the first bad row with its reason (or None)."""

    bodies: Any
    errors: Any
    first_bad: tuple[int, str] | None


def decoded_bodies(bodies: Any, how: BodyFormat) -> Decoded:
    """`bodies` is a pa.binary() array without nulls."""
    if how.kind == TEXT:
        return _texts(bodies)
    values, errors = _values(bodies, _reader(how.type))
    return _result(pa.array(values, to_arrow_type(how.type)), errors)


def _texts(bodies: Any) -> Decoded:
    try:
        return _result(bodies.cast(pa.string()), {})
    except pa.ArrowInvalid:
        pass
    errors: dict[int, str] = {}
    texts: list[str | None] = []
    for row, body in enumerate(bodies.to_pylist()):
        try:
            texts.append(body.decode())
        except UnicodeDecodeError as error:
            texts.append(None)
            errors[row] = _not_text(error)
    return _result(pa.array(texts, pa.string()), errors)


def _values(bodies: Any, read: Reader) -> tuple[list[Any], dict[int, str]]:
    """Values of the schema (or None), and the reasons of the rows that are none."""
    errors: dict[int, str] = {}
    values: list[Any] = []
    for row, body in enumerate(bodies.to_pylist()):
        value = None
        try:
            value = read(_json(body.decode()))
        except UnicodeDecodeError as error:
            errors[row] = _not_text(error)
        except _MisfitError as error:
            errors[row] = str(error)
        except (ValueError, RecursionError) as error:
            errors[row] = f"not JSON: {error}"
        values.append(value)
    return values, errors


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


_json: Final = json.JSONDecoder(parse_constant=_refuse).decode


class _MisfitError(Exception):
    """A value that is not of the schema's type; its text says which field."""


def _reader(kind: DataType, place: str = "body") -> Reader:
    """A function from a JSON value to what Arrow takes for the type; it raises _MisfitError.

    Arrow's own conversion would take 1.5 for a whole number, and a text for a list of letters.
    """
    if isinstance(kind, StructType):
        return _struct_reader(kind, place)
    if isinstance(kind, ArrayType):
        return _list_reader(_reader(kind.elementType, f"{place}[]"), place)
    return _scalar_reader(kind, place)


def _struct_reader(kind: StructType, place: str) -> Reader:
    fields = [
        (field.name, _reader(field.dataType, f"{place}.{field.name}")) for field in kind.fields
    ]

    def read(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not dict:
            raise _misfit(place, value, "an object")
        return {name: inner(value.get(name)) for name, inner in fields}

    return read


def _list_reader(inner: Reader, place: str) -> Reader:
    def read(value: Any) -> Any:
        if value is None:
            return None
        if type(value) is not list:
            raise _misfit(place, value, "a list")
        return [inner(one) for one in value]

    return read


def _scalar_reader(kind: DataType, place: str) -> Reader:
    takes, bits = _TAKEN[type(kind)]
    name, limit = kind.simpleString(), 1 << bits
    is_text, is_float = str in takes, float in takes

    def read(value: Any) -> Any:
        if value is None:
            return None
        if type(value) not in takes or (bits and not -limit <= value < limit):
            raise _misfit(place, value, name)
        if is_text and not value.isascii():
            _check_text(place, value)
        return float(value) if is_float else value

    return read


_TAKEN: Final[dict[type[DataType], tuple[tuple[type, ...], int]]] = {
    StringType: ((str,), 0), IntegerType: ((int,), 31), LongType: ((int,), 63),
    DoubleType: ((float, int), 0), FloatType: ((float, int), 0), BooleanType: ((bool,), 0),
}  # fmt: skip
"""Spark type -> the Python types that JSON gives for it, and the bits of a whole number."""


def _check_text(place: str, value: str) -> None:
    """JSON can write half of a surrogate pair, which no UTF-8 holds."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _MisfitError(f"not of the schema: {place} holds half a surrogate pair") from None


def _misfit(place: str, value: Any, wanted: str) -> _MisfitError:
    shown = json.dumps(value)[:40]
    return _MisfitError(f"not of the schema: {place} is {shown}, not {wanted}")


def _not_text(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: {error.reason} at byte {error.start}"


def _result(column: Any, errors: dict[int, str]) -> Decoded:
    if not errors:
        return Decoded(column, pa.nulls(len(column), pa.string()), None)
    texts: list[str | None] = [None] * len(column)
    for row, reason in errors.items():
        texts[row] = reason.splitlines()[0][:_REASON_LENGTH_MAX]
    first = min(errors)
    return Decoded(column, pa.array(texts, pa.string()), (first, texts[first] or ""))
