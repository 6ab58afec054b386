"""docs/spark.md says what the source does: every option and column, as the code declares them."""

from pathlib import Path

from sluicemq.spark.options import render_options_table
from sluicemq.spark.schema import BASE_TYPES, PROPERTY_TYPES

PAGE = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()


def test_the_table_of_options_is_the_declared_one() -> None:
    assert PAGE.endswith(render_options_table()), (
        "paste render_options_table() at the end of docs/spark.md"
    )


def test_every_column_and_type_is_there() -> None:
    missing = [f"`{name}`" for name in BASE_TYPES if f"`{name}`" not in PAGE]
    missing += [name for name in PROPERTY_TYPES if name not in PAGE]
    assert not missing
