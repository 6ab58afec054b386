"""Bodies as texts and JSON: the schema in small, strict values, reasons instead of dead jobs."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from sluicemq.errors import ConfigurationError
from sluicemq.spark.options import parse_options
from sluicemq.spark.schema import (
    JSON,
    TEXT,
    BodyFormat,
    declared_columns,
    parse_body_format,
    parse_schema,
    resolve_schema,
    to_spark_schema,
)
from sluicemq.spark.sources.json_bodies import decode_bodies


def decoded(schema: str | None, *bodies: bytes | str) -> tuple[list[Any], list[str | None]]:
    raw = [body.encode() if isinstance(body, str) else body for body in bodies]
    how = BodyFormat(TEXT, StringType()) if schema is None else _json(schema)
    found = decode_bodies(pa.array(raw, pa.binary()), how, pa.nulls(len(raw), pa.string()))
    return found.bodies.to_pylist(), found.errors.to_pylist()


def _json(schema: str) -> BodyFormat:
    return BodyFormat(JSON, parse_schema(schema))


def test_a_schema_is_read_as_spark_reads_it() -> None:
    wanted = StructType([
        StructField("origin", StringType()), StructField("a b", IntegerType()),
        StructField("legs", ArrayType(StructType([StructField("to", StringType()),
                                                  StructField("km", DoubleType())]))),
        StructField("n", LongType()),
    ])  # fmt: skip
    text = "origin STRING, `a b` int,legs array<struct<to:string, km: double>>, n long"
    assert parse_schema(text) == wanted


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("a", "a type is missing before ''"),
        ("a int,", "a name is missing"),
        ("a int b int", "character 6: a comma is missing before ' b int'"),
        ("a array<int", "'>' is missing"),
        ("a timestamp", "'timestamp' in the option 'bodySchema' is not a type"),
        ("a int, A int", "names 'a' twice"),
    ],
)
def test_a_wrong_schema_says_where(schema: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        parse_schema(schema)


def test_texts() -> None:
    assert decoded(None, "ü", "") == (["ü", ""], [None, None])
    values, errors = decoded(None, "a", b"\xff\xfe", "b")
    assert values == ["a", None, "b"]
    assert errors == [None, "not UTF-8: invalid start byte at byte 0", None]


def test_json_of_the_schema() -> None:
    values, errors = decoded("a int, b array<double>", '{"a":1,"b":[1,2.5,null],"c":{}}', "{}",
                             "null")  # fmt: skip
    assert values == [{"a": 1, "b": [1.0, 2.5, None]}, {"a": None, "b": None}, None]
    assert errors == [None, None, None]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{", "not JSON: Expecting property name"),
        ("", "not JSON: Expecting value"),
        ("{} {}", "not JSON: Extra data"),
        ('{"x": NaN}', "not JSON: NaN is not a JSON number"),
        ("[" * 100_000, "not JSON: maximum recursion"),
        (b"\xff", "not UTF-8"),
        ("[1]", r"not of the schema: body is \[1\], not an object"),
        ('{"a": 1.5}', r"not of the schema: body.a is 1.5, not int"),
        ('{"a": true}', "body.a is true, not int"),
        ('{"a": 2147483648}', "body.a is 2147483648, not int"),
        ('{"t": 5}', "body.t is 5, not string"),
        ('{"t": "\\ud800"}', "body.t contains half a surrogate pair"),
        ('{"s": {"f": [1, "x"]}}', r'body.s.f\[\] is "x", not double'),
        ('{"s": {"f": "x"}}', 'body.s.f is "x", not a list'),
    ],
)
def test_a_malformed_body_is_null_with_a_reason(body: bytes | str, reason: str) -> None:
    import re

    schema = "a int, t string, s struct<f: array<double>>"
    values, errors = decoded(schema, "{}", body, '{"a": 7}')
    assert values[1] is None
    assert errors[1] is not None
    assert re.match(f".*{reason}", errors[1])
    assert (errors[0], errors[2]) == (None, None)
    assert values[2] == {"a": 7, "t": None, "s": None}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.lists(st.binary(max_size=20) | JSON_VALUES.map(json.dumps), max_size=6))
@settings(max_examples=100, deadline=None)
def test_no_body_stops_a_batch(bodies: list[bytes | str]) -> None:
    schema = "a int, b struct<a: double, c: array<string>>, c boolean"
    values, errors = decoded(schema, *bodies)
    assert len(values) == len(errors) == len(bodies)
    assert all(value is None for value, error in zip(values, errors, strict=True) if error)


def columns(**options: str) -> list[tuple[str, str]]:
    found = declared_columns(parse_options(options))
    schema = to_spark_schema(found)
    assert resolve_schema(schema, found) == found
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]


def test_the_format_changes_the_columns() -> None:
    assert columns(columns="tags,body", bodyFormat="utf-8") == [
        ("tags", "string"), ("body", "string"), ("_error", "string"),
    ]  # fmt: skip
    assert columns(columns="body", bodyFormat="json", bodySchema="a int")[0] == (
        "body", "struct<a:int>",
    )  # fmt: skip
    assert columns(columns="tags", bodyFormat="utf-8") == [("tags", "string")]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bodyFormat": "json"}, "'bodySchema' is missing"),
        ({"bodySchema": "a int"}, "'bodyFormat' is 'binary'"),
        ({"bodyFormat": "xml"}, "it must be binary or utf-8 or json"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        parse_body_format(parse_options(options))
