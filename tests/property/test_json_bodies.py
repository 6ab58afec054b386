"""Bodies that Arrow reads together have the values and errors that Python gives each of them."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, StringType, StructType

from sluicemq.spark.schema import JSON, BodyFormat
from sluicemq.spark.sources import json_bodies
from sluicemq.spark.sources.json_bodies import decode_bodies

pytestmark = pytest.mark.slow

PLACE = StructType().add("x", "double").add("y", "integer")
LINE = StructType().add("sku", "string").add("q", "integer")
SCHEMA = StructType()
for name, kind in {"id": "long", "n": "integer", "amount": "double", "rate": "float"}.items():
    SCHEMA.add(name, kind)
SCHEMA.add("name", "string").add("ok", "boolean").add("tags", ArrayType(StringType()))
SCHEMA.add("place", PLACE).add("lines", ArrayType(LINE))
FORMAT = BodyFormat(JSON, SCHEMA)
TEXTS = st.one_of(st.text(max_size=6), st.sampled_from(["", "ü", "\ud800", "\u2028", "a\nb", "\0"]))
NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 0]),
    st.floats(),
    st.floats(width=32),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["x", "y", "sku", "q", "other"]), inner, max_size=3),
    ),
    max_leaves=5,
)


@st.composite
def fitting_objects(draw: st.DrawFn) -> dict[str, Any]:
    """An object of the schema: fields may be missing, null or unknown."""
    strategies: dict[str, st.SearchStrategy[Any]] = {
        "id": st.integers(-(2**63), 2**63 - 1),
        "n": st.integers(-(2**31), 2**31 - 1),
        "amount": st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers()),
        "rate": st.floats(width=32, allow_nan=False, allow_infinity=False),
        "name": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        "ok": st.booleans(),
        "tags": st.lists(st.one_of(st.none(), st.text("abü", max_size=3)), max_size=3),
        "place": st.fixed_dictionaries({}, optional={"x": st.floats(0, 1), "y": st.integers(0, 9)}),
        "lines": st.lists(
            st.one_of(st.none(), st.fixed_dictionaries({}, optional={"sku": st.just("a")})),
            max_size=2,
        ),
        "unknown": st.one_of(st.integers(), st.lists(st.text("ab"), max_size=2)),
    }
    names = draw(st.lists(st.sampled_from(sorted(strategies)), unique=True))
    return {name: draw(st.one_of(st.none(), strategies[name])) for name in names}


def dump(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent).encode()


UNUSUAL = st.sampled_from(
    [
        b"", b" ", b"{}", b"{ }", b"null", b"1", b"[]", b'"a"', b"{", b'{"id":1', b'{"id":1}}',
        b'{"id":1}{"id":2}', b'{"id":1} {"id":2}', b'{"id":1}} {"body":{"id":2}',
        b'{"id":1}\n{"id":2}', b'{"id":1},', b'{"id":01}', b'{"id":1.0}', b'{"id":1e2}',
        b'{"amount":1e999}', b'{"amount":-0}', b'{"amount":NaN}', b'{"amount":Infinity}',
        b'{"id":1,"id":2}', b'{"id":1,"id":"a"}', b'{"other":1,"other":2}', b'{"\\u0069d":7}',
        b'{"name":"\\ud800"}', b'{"name":"\xff"}', b'{"name":"a\nb"}', b'{"name":"a\\nb"}',
        b'{"name":"\x00"}', b'{"name":"\\u0000"}', b"{'id':1}", b'{"id":+1}', b'{"id":.5}',
        b'{"amount":1.}', b'{"amount":.5}', b"\xef\xbb\xbf{}", b'{"id":1}x', b'{"id":1} ',
        b' {"id":1}', b'\n{"id":1}\n', b'{"place":{}}', b'{"place":[]}', b'{"tags":{}}',
        b'{"tags":[[]]}', b'{"ok":1}', b'{"ok":"true"}', b'{"name":1}', b'{"x":/**/1}',
        b'{"other":[[[[[[]]]]]]}', b'{"other":"\xff"}', b'{"n":2147483648}',
        b'{"id":9223372036854775808}', b'{"rate":1e300}',
        b'{"amount":123456789012345678901234567890}', b'{"":1}', b'{"a.b":1}',
    ]
)  # fmt: skip
BODIES = st.one_of(
    fitting_objects().map(dump),
    fitting_objects().map(lambda value: dump(value, 1)),
    st.dictionaries(st.sampled_from(["id", "n", "name", "place"]), VALUES, max_size=2).map(dump),
    UNUSUAL,
    st.none(),
)


def text_of(values: Any) -> list[str]:
    """Values as texts, in which 1 is not 1.0 or True. -0.0 counts as 0.0, as in SQL."""
    return [repr(value).replace("-0.0,", "0.0,") for value in values.to_pylist()]


@settings(max_examples=400, deadline=None)
@given(st.lists(BODIES, max_size=6))
@example([b'{"id":1}} {"body":{"id":2}', b""])
def test_arrow_reads_bodies_as_python_does(bodies: list[bytes | None]) -> None:
    column = pa.array(bodies, pa.binary())
    errors = pa.array([None if body is not None else "gone" for body in bodies], pa.string())
    found = decode_bodies(column, FORMAT, errors)
    expected = json_bodies._decode_one_by_one(column, FORMAT, errors)
    assert text_of(found.bodies) == text_of(expected.bodies)
    assert found.errors.to_pylist() == expected.errors.to_pylist()
    assert found.bodies.type == expected.bodies.type


@settings(max_examples=200, deadline=None)
@given(st.lists(fitting_objects().map(dump), min_size=1, max_size=6))
def test_bodies_of_the_schema_are_read_by_arrow(bodies: list[bytes]) -> None:
    values_type = json_bodies.to_arrow_type(SCHEMA)
    values = json_bodies._read_json_chunk(pa.array(bodies, pa.binary()), values_type)
    assert values is not None
