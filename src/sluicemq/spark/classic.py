"""Access to the JVM behind a Spark session. No other module uses pyspark's private members.

A session of Spark Connect has no JVM. Its sessions and frames raise an error of pyspark when a
private member is read, in the middle of the caller's work. So code that needs the JVM calls the
functions here, which raise a ConfigurationError that says what to do instead. Code that can do
without it asks `is_classic` first.
"""

from typing import Any

from sluicemq.errors import ConfigurationError


def is_classic(session_or_frame: Any) -> bool:
    """Return whether a session or DataFrame has a JVM. Those of Spark Connect have none."""
    return not type(session_or_frame).__module__.startswith("pyspark.sql.connect")


def get_query_execution(frame: Any) -> Any:
    """Return the JVM's QueryExecution of a DataFrame.

    Raises ConfigurationError for a frame of Spark Connect.
    """
    _check_classic(frame)
    return frame._jdf.queryExecution()


def get_session_state(spark: Any) -> Any:
    """Return the JVM's SessionState. Raises ConfigurationError for a session of Spark Connect."""
    _check_classic(spark)
    return spark._jsparkSession.sessionState()


def get_jvm(spark: Any) -> Any:
    """Return py4j's view of the JVM, whose attributes are the JVM's packages.

    Raises ConfigurationError for a session of Spark Connect.
    """
    _check_classic(spark)
    return spark._jvm


def get_gateway(spark: Any) -> Any:
    """Return py4j's gateway to the JVM.

    Raises ConfigurationError for a session of Spark Connect.
    """
    return get_spark_context(spark)._gateway


def get_spark_context(spark: Any) -> Any:
    """Return the SparkContext. Raises ConfigurationError for a session of Spark Connect."""
    _check_classic(spark)
    return spark.sparkContext


def explain_plan(frame: Any, mode: str) -> str:
    """Return the text that `frame.explain(mode)` would print.

    Raises ConfigurationError for a frame of Spark Connect.
    """
    execution = get_query_execution(frame)
    return str(get_jvm(frame.sparkSession).PythonSQLUtils.explainString(execution, mode))


def activate_session(spark: Any) -> None:
    """Make a session the active one of the calling thread. A session of Spark Connect is ignored.

    Spark looks a Python data source up in the active session, which only the thread that created
    the session has. In every other thread a write fails with DATA_SOURCE_NOT_FOUND.
    """
    if is_classic(spark):
        sessions = spark._jvm.org.apache.spark.sql.classic.SparkSession
        sessions.setActiveSession(spark._jsparkSession)


def _check_classic(session_or_frame: Any) -> None:
    """Raise ConfigurationError for a session or frame of Spark Connect."""
    if not is_classic(session_or_frame):
        raise ConfigurationError(
            "this needs the JVM of Spark, and a session of Spark Connect has none.",
            fix="Use a session without spark.remote, such as spark_session() returns. Sources,"
            " sinks and load_where work with Spark Connect.",
        )
