"""The JVM behind a session of Spark: the only module that touches pyspark's private members.

A session of Spark Connect has no JVM. Its sessions and frames raise pyspark's own error when such a
member is read, in the middle of whatever asked. So what needs the JVM asks here, and gets a
ConfigurationError that says what to do instead; what can do without asks `is_classic` first.
"""

from typing import Any

from sluicemq.errors import ConfigurationError


def is_classic(it: Any) -> bool:
    """Return whether a session or DataFrame has a JVM, and is not of Spark Connect."""
    return not type(it).__module__.startswith("pyspark.sql.connect")


def execution_of(frame: Any) -> Any:
    """Return the JVM's QueryExecution of a DataFrame. Raises ConfigurationError for a frame of
    Spark Connect."""
    _check(frame)
    return frame._jdf.queryExecution()


def session_state_of(spark: Any) -> Any:
    """Return the JVM's SessionState. Raises ConfigurationError for a session of Spark Connect."""
    _check(spark)
    return spark._jsparkSession.sessionState()


def jvm_of(spark: Any) -> Any:
    """Return the packages of the JVM. Raises ConfigurationError for a session of Spark Connect."""
    _check(spark)
    return spark._jvm


def gateway_of(spark: Any) -> Any:
    """Return py4j's gateway to the JVM. Raises ConfigurationError as `context_of`."""
    return context_of(spark)._gateway


def context_of(spark: Any) -> Any:
    """Return the SparkContext. Raises ConfigurationError for a session of Spark Connect."""
    _check(spark)
    return spark.sparkContext


def explained(frame: Any, mode: str) -> str:
    """Return what `frame.explain(mode)` would print. Raises ConfigurationError as
    `execution_of`."""
    execution = execution_of(frame)
    return str(jvm_of(frame.sparkSession).PythonSQLUtils.explainString(execution, mode))


def activate(spark: Any) -> None:
    """Make a session the active one of the calling thread; do nothing for one of Spark Connect.

    Spark looks a Python data source up in the active session, which only the thread that created
    the session has. In every other thread a write fails with DATA_SOURCE_NOT_FOUND.
    """
    if is_classic(spark):
        sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession
        sessions.setActiveSession(spark._jsparkSession)


def _check(it: Any) -> None:
    if not is_classic(it):
        raise ConfigurationError(
            "this needs the JVM of Spark, and a session of Spark Connect has none.",
            fix="Use a session without spark.remote, as spark_session() makes. Sources, sinks and"
            " load_where work with Spark Connect.",
        )
