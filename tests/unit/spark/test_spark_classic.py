"""What needs the JVM of Spark: refused on Spark Connect, and the session of the calling thread."""

import ast
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.pipelines.ready import Folder
from sluicemq.pipelines.tables import Tables
from sluicemq.spark import classic, session
from sluicemq.spark.references import (
    PlaceholderTable,
    extract_predicates,
    find_used_columns,
    load_where,
    make_translator,
)
from sluicemq.spark.report import pushdown

SPARK = Path(classic.__file__).parent
JVM_MEMBERS = {"_jdf", "_jvm", "_jsparkSession", "_jsc", "_gateway", "sparkContext"}


class Remote:
    """A session or frame of Spark Connect: it raises an error of pyspark's for a JVM member."""

    __module__ = "pyspark.sql.connect.session"

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"[JVM_ATTRIBUTE_NOT_SUPPORTED] {name}")


SESSION = Remote(createDataFrame=lambda *_: None)
FRAME = Remote(sparkSession=SESSION)


@pytest.mark.parametrize(
    "use",
    [
        lambda: pushdown(FRAME),
        lambda: session.fresh(FRAME),
        lambda: Tables(SESSION, {}, list).query("select 1"),  # type: ignore[arg-type]
        lambda: extract_predicates(FRAME, []),  # type: ignore[arg-type]
        lambda: find_used_columns(FRAME, "properties"),
        lambda: make_translator(SESSION),  # type: ignore[arg-type]
        lambda: PlaceholderTable.create(SESSION, None),  # type: ignore[arg-type]
        lambda: Folder(SESSION, "/somewhere"),
        lambda: classic.get_gateway(SESSION),
        lambda: classic.explain_plan(FRAME, "simple"),
    ],
)
def test_what_needs_the_jvm_says_so_on_spark_connect(use: Any) -> None:
    with pytest.raises(ConfigurationError, match="Spark Connect"):
        use()


def test_load_where_leaves_the_condition_to_spark_connect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Any] = []
    frame = Remote(where=lambda condition: seen.append(condition) or "filtered")
    reader = SimpleNamespace(
        format=lambda name: seen.append(name) or reader,
        options=lambda **given: seen.append(given) or reader,
        load=lambda: frame,
    )
    spark: Any = Remote(read=reader)
    with caplog.at_level(logging.WARNING):
        assert load_where(spark, "tags = 'UA'", topic="t") == "filtered"  # type: ignore[comparison-overlap]
    assert seen == ["rocketmq", {"topic": "t"}, "tags = 'UA'"]
    assert "every message is read" in caplog.text


def test_only_one_module_touches_members_of_the_jvm() -> None:
    """Elsewhere they would end in an error of pyspark's on Spark Connect."""
    found = {
        f"{path.relative_to(SPARK)}:{node.lineno} {node.attr}"
        for path in SPARK.rglob("*.py")
        if path.name != "classic.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in JVM_MEMBERS
    }
    # A SparkContext of classic.get_spark_context.
    assert {one for one in found if not one.endswith(" _jsc")} == set()
    assert {one.partition(":")[0] for one in found} <= {"pipelines/run.py", "pipelines/ready.py"}


class Sessions:
    """The class SparkSession of the JVM; `active` are the threads that have an active session."""

    def __init__(self) -> None:
        self.active: list[int] = []

    def setActiveSession(self, _: Any) -> None:  # noqa: N802 - Spark's name
        self.active.append(threading.get_ident())


@pytest.mark.parametrize("log_level", [None, "error"])
def test_the_session_is_active_in_the_thread_that_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, log_level: str | None
) -> None:
    sessions = Sessions()
    packages = SimpleNamespace(sql=SimpleNamespace(classic=SimpleNamespace(SparkSession=sessions)))
    jvm = SimpleNamespace(org=SimpleNamespace(apache=SimpleNamespace(spark=packages)))
    made = SimpleNamespace(_jvm=jvm, _jsparkSession=object())
    monkeypatch.setattr(session, "_start_session", lambda *_: made)
    assert session.spark_session(log_level=log_level) is made
    assert sessions.active == [threading.get_ident()]


def test_a_session_of_spark_connect_needs_no_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_start_session", lambda *_: SESSION)
    assert session.spark_session() is SESSION
