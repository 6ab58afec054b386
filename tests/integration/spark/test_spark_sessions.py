"""Sessions of another thread, with 64-bit offsets in its columns, and of Spark Connect."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluicemq.spark.session import spark_session
from waiting import limit

ROOT = Path(__file__).parents[3]
CLIENT = """
import logging
import sys
import warnings

warnings.simplefilter("ignore")  # of pandas
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from pyspark.sql import SparkSession

from sluicemq.errors import ConfigurationError
from sluicemq.spark.references import load_where
from sluicemq.spark.report import pushdown

url, name_servers, topic = sys.argv[1:]
spark = SparkSession.builder.remote(url).getOrCreate()
found = load_where(
    spark, "tags = 'A' and number > 6", nameServers=name_servers, topic=topic,
    columns="tags,prop:number:int",
)
print("rows", sorted(row.number for row in found.collect()))
try:
    pushdown(found)
except ConfigurationError as error:
    print("refused", error)
"""


LARGE = "spark.sql.execution.arrow.useLargeVarTypes"
ROWS = (
    "cast(cast(id as string) as binary) as body",
    "upper(hex(md5(cast(id as string)))) as message_id",
    "'A' as tags",
    "array('k', cast(id as string)) as keys",
    "map('n', cast(id as string)) as properties",
)


def test_a_session_with_a_log_level_writes_large_columns_in_the_thread_that_asked_for_it(
    spark: Any, name_server: str, topic: str, read: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "JAVA_HOME" in os.environ:
        monkeypatch.setenv("JAVA_HOME", os.environ["JAVA_HOME"])  # and what it is set to ends here
    else:
        monkeypatch.delenv("JAVA_HOME", raising=False)
    failures: list[Exception] = []

    def write() -> None:
        try:
            mine = spark_session("tests", log_level="error")
            mine.conf.set(LARGE, "true")
            sink = mine.range(3).selectExpr(*ROWS).write.format("rocketmq").mode("append")
            sink.options(nameServers=name_server, topic=topic).save()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join(limit(120))
    try:
        assert not failures
        found = read(columns="body,msg_id,tags,keys,properties").collect()
    finally:
        spark.conf.unset(LARGE)
    assert sorted(bytes(row.body) for row in found) == [b"0", b"1", b"2"]
    assert {row.properties["n"] for row in found} == {"0", "1", "2"}
    assert {(row.tags, row.keys.split()[0], len(row.msg_id)) for row in found} == {("A", "k", 64)}


def test_load_where_on_spark_connect_gives_the_rows_and_pushdown_says_no(
    spark: Any, name_server: str, topic: str, publish: Callable[..., None]
) -> None:
    for package in ("grpc_status", "pandas", "zstandard"):
        if importlib.util.find_spec(package) is None and os.environ.get("CI") != "true":
            pytest.skip(f"Spark Connect needs {package}: pip install 'pyspark[connect]'")
    publish(0, 20)
    context = spark.sparkContext._jsc.sc()
    context.conf().set("spark.connect.grpc.binding.port", "0")
    package = spark._jvm.org.apache.spark.sql.connect.service
    service = getattr(getattr(package, "SparkConnectService$"), "MODULE$")
    service.start(context)
    try:
        url = f"sc://127.0.0.1:{service.localPort()}"
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, url, name_server, topic],
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False,
            capture_output=True, text=True, timeout=limit(120),
        )  # fmt: skip
    finally:
        nothing = spark._jvm.scala.Option.empty()
        service.stop(nothing, nothing)
    assert done.returncode == 0, done.stderr
    assert "rows [9, 12, 15, 18]\n" in done.stdout
    assert "every message is read" in done.stdout
    assert "refused this needs the JVM of Spark" in done.stdout
