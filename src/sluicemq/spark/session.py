"""Create Spark sessions that are ready for the sources, and DataFrames that read again.

`spark_session` finds a Java and makes the package importable for Spark's workers. A program that
has a session already needs nothing of this module.
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
from sluicemq.spark.classic import activate_session, get_query_execution, is_classic
from sluicemq.spark.jvm import ensure_java
from sluicemq.spark.references import class_name, iterate_nodes

DEFAULT_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
}
JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
MESSAGE_DELAY_S: Final = 1.0
LOG_FILE: Final = Path(__file__).with_name("log4j2.properties")


def spark_session(
    name: str = "sluicemq",
    *,
    master: str = "local[*]",
    settings: dict[str, str] | None = None,
    log_level: str | None = None,
) -> Any:
    """Return a `SparkSession` on this machine, with `DEFAULT_SETTINGS` and `settings`.

    If a session is running already, return that one. It becomes the active session of the calling
    thread. Spark finds a Python sink only in such a thread, so call this function in each thread
    that writes.

    `log_level` (off, error, warn …) is the level of the JVM's log. It also suppresses the messages
    that Spark prints when it starts. It has no effect if a JVM is running already. None means
    Spark's own logging. Raises ConfigurationError if there is no Java.
    """
    if log_level is None:
        spark = _start_session(name, master, settings, log_level)
    else:
        # The session starts in another thread: Ctrl-C in the middle of pyspark's own start would
        # leave a JVM behind, but here it only interrupts the waiting.
        pool = ThreadPoolExecutor(1)
        with _start_message():
            starting = pool.submit(_start_session, name, master, settings, log_level)
            pool.shutdown(wait=False)
            spark = starting.result()
    activate_session(spark)
    return spark


def _start_session(
    name: str, master: str, settings: dict[str, str] | None, log_level: str | None
) -> Any:
    """Start a session, or return the running one. `spark_session` has the same arguments.

    The environment variables that Spark's workers need are set. Raises ConfigurationError if there
    is no Java.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415 - starts nothing, but takes a second

    ensure_java(quiet=log_level is not None)
    make_package_importable()
    session_settings = DEFAULT_SETTINGS | (settings or {})
    if log_level is not None:
        # The user's options come last, because later options override earlier ones.
        user_java_options = (settings or {}).get(JAVA_OPTIONS, "")
        java_options = f"{jvm_log_options(log_level)} {user_java_options}"
        session_settings[JAVA_OPTIONS] = java_options.strip()
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

    builder = SparkSession.builder.master(master).appName(name)
    for setting, setting_value in session_settings.items():
        builder = builder.config(setting, setting_value)
    return builder.getOrCreate()


@contextmanager
def _start_message() -> Iterator[None]:
    """Return a context manager that shows "starting Spark…" on the terminal after one second.

    The message is erased at the end of the block. It is not shown if stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(MESSAGE_DELAY_S, _write_stderr, ["\x1b[2mstarting Spark…\x1b[0m"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        _write_stderr("\r\x1b[K")


def _write_stderr(message: str) -> None:
    """Write a message to stderr, and flush it."""
    sys.stderr.write(message)
    sys.stderr.flush()


def fresh(frame: Any) -> Any:
    """Return a DataFrame with the same query that reads the messages that exist now.

    Spark asks a Python source for the offsets to read only once, and uses the answer in every later
    query of the DataFrame (design/0010). This function makes Spark ask again. The argument `frame`
    then reads the new messages too, unless its rows were collected before. Cached rows and the
    names and types of columns do not change. Raises ConfigurationError for a frame of Spark
    Connect.
    """
    if not is_classic(frame):
        raise ConfigurationError(
            "a DataFrame of Spark Connect cannot be made fresh.",
            fix="Load it again: spark.read.format(…).options(…).load().",
        )
    for node, _ in iterate_nodes(get_query_execution(frame).analyzed()):
        if class_name(node) != "DataSourceV2Relation":
            continue
        table = node.table()
        if class_name(table) == "PythonTable":
            _forget_read_info(table)
    return frame.select("*")


def _forget_read_info(table: Any) -> None:
    """Make a table object of Spark's JVM forget the offset ranges that its source has returned.

    Do nothing in a Spark version that does not store them, because it has no such field or method.
    """
    for java_field in table.getClass().getDeclaredFields():
        if java_field.getName() == "ds":
            java_field.setAccessible(True)
            source = java_field.get(table)
            methods = [method.getName() for method in source.getClass().getMethods()]
            if "setReadInfo" in methods:
                source.setReadInfo(None)


def jvm_log_options(level: str) -> str:
    """Return the JVM options for logging with our `LOG_FILE` at `level`.

    Logging options that follow them override them.
    """
    return f"-Dlog4j2.configurationFile={LOG_FILE.as_uri()} -Dsluicemq.log.level={level}"


def make_package_importable() -> None:
    """Add the directory of this package to PYTHONPATH, so that Spark's workers can import it.

    Workers inherit PYTHONPATH, but not `sys.path`. Without it, they would not find a checkout that
    is not installed.
    """
    root = str(Path(sluicemq.__file__).parents[1])
    python_path = os.environ.get("PYTHONPATH", "")
    if root not in python_path.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{python_path}" if python_path else root
