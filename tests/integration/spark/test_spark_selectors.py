"""SQL92 selectors as Spark columns say what the scalar evaluator says, on every row.

Recorded cases of Java, and random expressions of the same strategies as the vectorised engine's
test. Many expressions are evaluated in one job. SLUICEMQ_EXAMPLES sets the number of generated
expressions (300 without it), and with it every recorded expression is run, not a part.
"""

import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions

from sluicemq.errors import ConfigurationError, FilterSyntaxError
from sluicemq.filter.plan import evaluate_verdict
from sluicemq.filter.subscriptions import compile_sql92
from sluicemq.spark.report import pushdown
from sluicemq.spark.selectors import VERDICTS, column, compiled, selector_sql, verdict

TESTS = Path(__file__).parents[2]
ALL = "SLUICEMQ_EXAMPLES" in os.environ
CASES = min(int(os.environ.get("SLUICEMQ_EXAMPLES", "300")), 4000)
IN_ONE_JOB = 300
SCHEMA = "properties map<string,string>"

pytestmark = pytest.mark.timeout(300)


def strategies() -> Any:
    """The module of the vectorised engine's test."""
    spec = importlib.util.spec_from_file_location(
        "vectorised_strategies", TESTS / "property" / "test_vectorised.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (TESTS / "golden" / name).read_text().splitlines()]
    return [
        case for case in found
        if case["result"] != "compile_error" and "\\ud" not in json.dumps(case["props"])
    ]  # fmt: skip


def compilable(texts: Sequence[str]) -> list[str]:
    kept = []
    for text in texts:
        try:
            compile_sql92(text)
        except FilterSyntaxError:
            continue
        kept.append(text)
    return kept


@pytest.fixture
def interpreted(spark: Any) -> Any:
    """Spark walks the expressions instead of compiling them: hundreds at once take a second."""
    values = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    for key, value in values.items():
        spark.conf.set(key, value)
    yield spark
    for key in values:
        spark.conf.unset(key)


def check(spark: Any, texts: Sequence[str], rows: Sequence[dict[str, str]]) -> None:
    frame = spark.createDataFrame([(row,) for row in rows], SCHEMA)
    for at in range(0, len(texts), IN_ONE_JOB):
        chunk = texts[at : at + IN_ONE_JOB]
        both = [compiled(compile_sql92(text), columns="") for text in chunk]
        verdicts = functions.array(*(one.verdict for one in both))
        matches = functions.array(*(one.match for one in both))
        found = frame.select(verdicts.alias("v"), matches.alias("m")).collect()
        for row, said in zip(rows, found, strict=True):
            for place, text in enumerate(chunk):
                wanted = VERDICTS[evaluate_verdict(compile_sql92(text).evaluate, row)]
                assert said.v[place] == wanted, (text, row)
                assert said.m[place] is (wanted == "TRUE"), (text, row)


def test_recorded_cases_come_out_as_in_java(interpreted: Any) -> None:
    cases = recorded("sql92_cases.jsonl")
    rows = [case["props"] for case in cases[::40]]
    written = [case["expr"] for case in cases]
    random = [case["expr"] for case in recorded("sql92_random_cases.jsonl")]
    texts = written + random if ALL else written[::2] + random[::10]
    check(interpreted, list(dict.fromkeys(texts)), rows)


def drawn(count: int) -> tuple[list[str], list[dict[str, str]]]:
    """Different expressions that compile, and rows; the same ones in every run."""
    known = strategies()
    texts: dict[str, None] = {}
    rows: list[dict[str, str]] = []

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.lists(known.expressions, min_size=4, max_size=4), known.rows_of)
    def draw(some: list[str], few: list[dict[str, str]]) -> None:
        texts.update(dict.fromkeys(compilable(some)))
        rows.extend(few[:1])

    draw()
    return list(texts)[:count], rows


@pytest.mark.thorough
def test_random_expressions_come_out_as_the_scalar_engine_says(interpreted: Any) -> None:
    texts, rows = drawn(CASES)
    assert len(texts) >= min(CASES, 300)
    known = [{"a": text, "b": "5"} for text in strategies().TEXTS[::4]]
    check(interpreted, texts, [{}, *known, *rows[-12:]])


def test_a_job_that_needs_python_as_well_says_the_same(interpreted: Any) -> None:
    rows = [{"a": text} for text in strategies().TEXTS] + [{}]
    check(interpreted, ["TRUE = (a >= a)", "a = '\ud83d' OR a > 4", "NOT (a < a)"], rows)


def test_compiled_by_spark_the_common_conditions_come_out_the_same(spark: Any) -> None:
    known = strategies()
    rows = [{"a": text, "b": "5"} for text in known.TEXTS] + [{}, {"b": "x"}]
    texts = [
        "a > 4", "a = 5.0 OR b = 'x'", "NOT (a <> 5) AND b IS NOT NULL", "a >= b",
        "TRUE = (a >= a)",
        "a BETWEEN 1 AND 2147483648", "a NOT IN ('5', 'abc')", "a STARTSWITH '5'",
    ]  # fmt: skip
    check(spark, texts, rows)


def test_promoted_columns_are_used_and_pushed_down(spark: Any, tmp_path: Path) -> None:
    rows = [("UA", "JFK", 70), ("AA", "EWR", 5), (None, None, None)]
    path = str(tmp_path / "rows")
    spark.createDataFrame(rows, "tags string, origin string, dep_delay int").write.parquet(path)
    columns = "tags,prop:origin,prop:dep_delay:int"
    frame = spark.read.parquet(path).where(
        column("TAGS = 'UA' AND origin IN ('JFK') AND dep_delay > 60", columns=columns)
    )
    assert [tuple(row) for row in frame.collect()] == [("UA", "JFK", 70)]
    pushed = pushdown(frame).broker  # here the file's
    for one in ("EqualTo(tags,UA)", "EqualTo(origin,JFK)", "GreaterThan(dep_delay,60)"):
        assert one in pushed


def test_half_a_character_goes_through_python_and_is_said(spark: Any) -> None:
    found = compiled("a CONTAINS '\ud83d'", columns="")
    assert found.python is not None
    assert "half a surrogate pair" in found.python
    frame = spark.createDataFrame([({"a": "x😀"},), ({"a": "y"},), ({},)], SCHEMA)
    assert [row[0] for row in frame.select(found.match).collect()] == [True, False, False]


def test_a_property_in_no_column_is_an_error_with_its_cure() -> None:
    with pytest.raises(ConfigurationError, match="prop:dep_delay"):
        column("dep_delay > 60", columns="tags,prop:origin")


def test_the_text_serves_in_a_query(spark: Any) -> None:
    frame = spark.createDataFrame([({"a": "5"},), ({"a": "it's"},)], SCHEMA)
    text = selector_sql("a = 'it''s'", columns="")
    query = f"select count(*) from {{frame}} where {text}"
    assert spark.sql(query, frame=frame).collect()[0][0] == 1
    named = frame.select(verdict("a > 4", columns=""))
    assert [row[0] for row in named.collect()] == ["TRUE", "ERROR"]
