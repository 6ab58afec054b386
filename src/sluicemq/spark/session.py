"""A Spark session that is ready for the source: Java found, the package visible to workers; and
frames that read anew.

Nothing here is needed where a session exists already.
"""

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import sluicemq
from sluicemq.errors import ConfigurationError
from sluicemq.spark.classic import activate, execution_of, is_classic
from sluicemq.spark.jvm import ensure_java
from sluicemq.spark.references import kind_of, nodes

DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
TOLD_AFTER_S: Final = 1.0
LOG_FILE: Final = Path(__file__).with_name("log4j2.properties")


def spark_session(
    name: str = "sluicemq",
    *,
    master: str = "local[*]",
    settings: dict[str, str] | None = None,
    log_level: str | None = None,
) -> Any:
    """Return a `SparkSession` on this machine, with `DEFAULTS` and `settings`; the running one if
    there is one. It becomes the active session of the calling thread, without which Spark does not
    find a Python sink: call this again in each thread that writes.

    `log_level` (off, error, warn …) is the level of the JVM's log; then Spark starts without its
    usual messages. None keeps Spark's own log. It has no effect when a JVM runs already.
    Raises ConfigurationError when there is no Java (see `jvm.ensure_java`).
    """
    if log_level is None:
        spark = _started(name, master, settings, log_level)
    else:
        # Ctrl-C in the middle of pyspark's own start would leave a JVM behind: it waits here.
        pool = ThreadPoolExecutor(1)
        with _told():
            starting = pool.submit(_started, name, master, settings, log_level)
            pool.shutdown(wait=False)
            spark = starting.result()
    activate(spark)
    return spark


def _started(name: str, master: str, settings: dict[str, str] | None, log_level: str | None) -> Any:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - starts nothing, but takes a second

    ensure_java(quiet=log_level is not None)
    make_importable()
    settings = dict(settings or {})
    if log_level is not None:
        given = settings.get(JAVA_OPTIONS, "")
        settings[JAVA_OPTIONS] = f"{log_options(log_level)} {given}".strip()
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in (DEFAULTS | settings).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


@contextmanager
def _told() -> Iterator[None]:
    """A dim line on a terminal, gone when Spark is there, when that takes longer than a second."""
    if not sys.stderr.isatty():
        yield
        return
    line = threading.Timer(TOLD_AFTER_S, _show, ["\x1b[2mstarting Spark…\x1b[0m"])
    line.daemon = True
    line.start()
    try:
        yield
    finally:
        line.cancel()
        line.join()
        _show("\r\x1b[K")


def _show(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def fresh(frame: Any) -> Any:
    """The same query, whose next use reads what is there then; `frame` itself does so as well,
    unless it was collected.

    Spark asks a Python source once for the ranges of a load and keeps the answer in the table
    object, for every query on it (design/0010). This makes it ask
    again. What is cached stays as it is, as do the names and types of columns. Raises
    ConfigurationError for a frame of Spark Connect, whose plan is out of reach.
    """
    if not is_classic(frame):
        raise ConfigurationError(
            "a frame of Spark Connect cannot be made fresh.",
            fix="Load it again: spark.read.format(…).options(…).load().",
        )
    for node, _ in nodes(execution_of(frame).analyzed()):
        if kind_of(node) != "DataSourceV2Relation" or kind_of(node.table()) != "PythonTable":
            continue
        for kept in node.table().getClass().getDeclaredFields():  # none in a Spark that keeps none
            if kept.getName() == "ds":
                kept.setAccessible(True)
                source = kept.get(node.table())
                if "setReadInfo" in [one.getName() for one in source.getClass().getMethods()]:
                    source.setReadInfo(None)
    return frame.select("*")


def log_options(level: str) -> str:
    """Options of a JVM that logs with our file, at a level; log options after them win."""
    return f"-Dlog4j2.configurationFile={LOG_FILE.as_uri()} -Dsluicemq.log.level={level}"


def make_importable() -> None:
    """Lets Spark's Python workers import this package.

    They inherit PYTHONPATH, not `sys.path`; without it a checkout that is not installed is
    invisible to them.
    """
    root = str(Path(sluicemq.__file__).parents[1])
    known = os.environ.get("PYTHONPATH", "")
    if root not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (root, known) if part)
