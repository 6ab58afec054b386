"""From the file to a DataFrame: the source, pinned to a range for a batch, and the transform.

A transform is one query over the view `source`. A batch loads topics anew for each place of the
query that names the view, with the predicates that hold there (`references`): the broker decides
them. Spark runs a command (`DROP TABLE`, `INSERT`) at
the moment it is given the text, so the text is parsed first and anything but a query refused: a
dry run must change nothing. Errors come back with the line of the file they are in.
"""

import re
from typing import TYPE_CHECKING, Any, Final

from sluicemq.errors import SluiceError
from sluicemq.spark.pipelines.document import Problem
from sluicemq.spark.pipelines.pipeline import PARQUET, ROCKETMQ, STORE, VIEW, Pipeline, PlaceError
from sluicemq.spark.references import StandIn, named_apart, predicates_in, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS: Final = {ROCKETMQ: "rocketmq", STORE: "rocketmq_store", PARQUET: "parquet"}
_PLANS: Final = "org.apache.spark.sql.catalyst.plans.logical"
_PLACE: Final = re.compile(r"\(line (\d+), pos (\d+)\)|;? ?line (\d+),? pos (\d+)")
_TAIL: Final = re.compile(r"(;? ?\(?line \d+,? pos \d+\)?|SQLSTATE: \w+|== SQL.*|JVM stacktrace:.*"
                          r"|;\n'.*|;\n\w.*)", re.DOTALL)  # fmt: skip


def source_frame(
    pipeline: Pipeline, spark: "SparkSession", schema: Any = None, **more: str
) -> "DataFrame":
    """The source as a DataFrame, a stream's when the mode says so. `more` options replace those of
    the file; `schema` is the source's when it is known. Raises PlaceError."""
    source = pipeline.source
    assert source is not None
    reader = spark.readStream if pipeline.is_streaming else spark.read
    options = dict(source.options) | more
    try:
        if source.kind == PARQUET:
            schema = options.pop("schema", None)
            if schema is None and pipeline.is_streaming:
                schema = spark.read.parquet(options["path"]).schema
        reader = reader if schema is None else reader.schema(schema)
        return reader.format(FORMATS[source.kind]).options(**options).load()
    except Exception as error:
        raise spark_error(error, source.line, "source") from error


def transformed(pipeline: Pipeline, spark: "SparkSession", frame: "DataFrame") -> "DataFrame":
    """The transform's result; the frame itself without one. Raises PlaceError."""
    if pipeline.transform is None:
        return frame
    try:
        _check_query(spark, pipeline.transform)
        frame.createOrReplaceTempView(VIEW)
        try:
            whole = spark.sql(pipeline.transform)
        finally:
            spark.catalog.dropTempView(VIEW)
        return _pushed(pipeline, spark, frame.schema) or whole
    except PlaceError as error:
        problem = error.problem
        place = Problem(pipeline.transform_line, "transform", problem.what, problem.cure)
        raise PlaceError(place) from None
    except Exception as error:
        raise spark_error(error, pipeline.transform_line, "transform") from error


def _pushed(pipeline: Pipeline, spark: "SparkSession", schema: Any) -> "DataFrame | None":
    """The transform over loads with predicates; None when there are none to be had. A store is
    read at one moment, so by one load, with the predicates that hold in all places."""
    source, transform = pipeline.source, pipeline.transform
    assert source is not None
    assert transform is not None
    if pipeline.is_streaming or source.kind == PARQUET:
        return None
    stand_ins: dict[str, StandIn] = {}

    def view_of(_: str) -> str:
        view = VIEW if source.kind == STORE else f"{VIEW} {len(stand_ins) + 1}"
        stand_ins[view] = StandIn.of(spark, schema)
        stand_ins[view].frame.createOrReplaceTempView(quoted(view))
        return view

    try:
        text, query = named_apart(spark, transform, view_of)
        found = predicates_in(query, list(stand_ins.values()))
        if not any(found):
            return None
        for view, predicates in zip(stand_ins, found, strict=True):
            more = {"predicates": predicates} if predicates else {}
            loaded = source_frame(pipeline, spark, schema, **more)
            loaded.createOrReplaceTempView(quoted(view))
        return spark.sql(text)
    finally:
        for view in stand_ins:
            spark.catalog.dropTempView(view)


def _check_query(spark: "SparkSession", text: str) -> None:
    """Raises PlaceError for a statement that does something, and Spark's error for one that does
    not parse."""
    state: Any = spark._jsparkSession.sessionState()
    plan = state.sqlParser().parsePlan(text)
    if _acts(spark, plan):
        raise PlaceError(
            Problem(0, "", "it is a command, not a query.", "Write select … from source.")
        )


def _acts(spark: "SparkSession", plan: Any) -> bool:
    from py4j.java_gateway import (  # type: ignore[import-untyped]  # noqa: PLC0415 - Spark's
        is_instance_of,
    )

    gateway = spark.sparkContext._gateway
    if any(
        is_instance_of(gateway, plan, f"{_PLANS}.{kind}") for kind in ("Command", "ParsedStatement")
    ):
        return True
    children = plan.children()
    return any(_acts(spark, children.apply(index)) for index in range(children.length()))


def spark_error(error: Exception, line: int, key: str) -> PlaceError:
    """Spark's complaint (or ours) at a place of the file: its sentence, without plan and stack.

    `line` is where the SQL begins, so that a place that Spark names becomes a line of the file.
    """
    if isinstance(error, PlaceError):
        return error
    if isinstance(error, SluiceError):
        return PlaceError(Problem(line, key, str(error)))
    text = sentence_of(error)
    found = _PLACE.search(str(error)) if key == "transform" else None
    if found is not None:
        line += int(found[1] or found[3]) - 1
        text = f"at position {int(found[2] or found[4]) + 1} of the line: {text}"
    return PlaceError(Problem(line, key, text))


def sentence_of(error: BaseException) -> str:
    """The first thing that an exception of Spark says: our own sentence when it carries one."""
    text = str(error)
    ours = re.search(r"sluicemq\.errors\.\w+: (.+)", text)
    if ours is not None:
        return ours[1].strip()
    plain = re.search(r"(?:PySparkRuntimeError|\[PYTHON_DATA_SOURCE_ERROR\])[^\n]*\n?(.*)", text)
    cut = _TAIL.sub("", text if plain is None else plain[0]).strip()
    return " ".join(cut.split())[:600] or type(error).__name__
