"""Columns: the option's little language, and a user's own schema."""

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from sluicemq.errors import ConfigurationError
from sluicemq.record.arrow import COLUMNS
from sluicemq.spark.schema import (
    BASE_COLUMNS,
    BASE_TYPES,
    PROPERTY_TYPES,
    Column,
    parse_columns,
    resolve_schema,
    to_spark_schema,
)
from sluicemq.spark.sources.conversion import ARROW_TYPES


def test_the_whole_schema_is_exactly_what_the_decoder_makes() -> None:
    wanted = to_arrow_schema(to_spark_schema(BASE_COLUMNS), timezone="UTC")
    assert {field.name: field.type for field in wanted} == COLUMNS
    assert wanted.names == list(COLUMNS) == list(BASE_TYPES)


def test_promoted_types_are_exactly_what_the_typed_columns_have() -> None:
    fields = [StructField(name, data_type) for name, data_type in PROPERTY_TYPES.items()]
    wanted = to_arrow_schema(StructType(fields), timezone="UTC")
    assert {field.name: field.type for field in wanted} == ARROW_TYPES


def test_items_are_columns_and_properties_in_order() -> None:
    text = "topic, body,prop:dep_delay:int , prop:origin,prop:`a,b:c`:double as abc,PROP:n:long"
    assert parse_columns(text) == (
        Column("topic", None, "string"),
        Column("body", None, "binary"),
        Column("dep_delay", "dep_delay", "int"),
        Column("origin", "origin", "string"),
        Column("abc", "a,b:c", "double"),
        Column("n", "n", "bigint"),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("topic,boody", r"'boody'.*Did you mean 'body'\?.*prop:boody"),
        ("topic,,body", "empty item"),
        ("topic,prop:x:integre", "'integre' in 'prop:x:integre' is not a type"),
        ("prop:x:int:y", "not a column"),
        ("topic,Topic", "'Topic'"),
        ("prop:x:int,prop:x:string", "'x' occurs twice"),
        ("body:string", "not a column"),
        ("prop:", "not a column"),
    ],
)
def test_a_mistake_is_named_with_its_cure(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        parse_columns(text)


def test_a_schema_of_the_user_promotes_what_is_no_column() -> None:
    schema = StructType(
        [
            StructField("queue_offset", LongType()),
            StructField("distance", IntegerType()),
            StructField("place", StringType()),
        ]
    )
    declared = parse_columns("prop:origin as place")
    assert resolve_schema(schema, declared) == (
        Column("queue_offset", None, "bigint"),
        Column("distance", "distance", "int"),
        Column("place", "origin", "string"),
    )


def test_a_schema_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'queue_offset'.*'int'.*Use the type 'bigint'"):
        resolve_schema(StructType([StructField("queue_offset", IntegerType())]), ())
    with pytest.raises(ConfigurationError, match=r"'when'.*'timestamp'.*Use one of string, int"):
        resolve_schema(StructType([StructField("when", BASE_TYPES["born_time"])]), ())
