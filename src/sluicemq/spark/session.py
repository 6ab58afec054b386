"""A Spark session that is ready for the source: Java found, predicates pushed, the package visible.

Nothing here is needed where a session exists already; there, one line switches push-down on:

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
"""

import os
from pathlib import Path
from typing import Any, Final

import sluicemq
from sluicemq.spark.jvm import ensure_java
from sluicemq.spark.source import PUSHDOWN_CONFIG

DEFAULTS: Final = {
    PUSHDOWN_CONFIG: "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
LOG_FILE: Final = Path(__file__).with_name("log4j2.properties")


def spark_session(
    name: str = "sluicemq",
    *,
    master: str = "local[*]",
    settings: dict[str, str] | None = None,
    log_level: str | None = None,
) -> Any:
    """A `SparkSession` on this machine, with `DEFAULTS` and `settings`.

    `log_level` (off, error, warn …): the JVM logs that much, and starts without a word. None:
    Spark's own log, and its words about it. Where a JVM runs already it makes no difference.
    Raises ConfigurationError when there is no Java (see `jvm.ensure_java`).
    """
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
