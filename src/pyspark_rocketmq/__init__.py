"""Make the data source `rocketmq` known to Spark.

Spark 4.0 and later imports every module named `pyspark_…` and registers its `DefaultSource`
(pyspark.sql.worker.lookup_data_sources).
"""

from sluicemq.spark.source import RocketSource as DefaultSource

__all__ = ["DefaultSource"]
