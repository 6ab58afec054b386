"""How Spark finds the data source `rocketmq`: it imports every module named `pyspark_…` and takes
its `DefaultSource` (pyspark.sql.worker.lookup_data_sources, Spark 4.0 and later). Nothing else is
here.
"""

from sluicemq.spark.source import RocketSource as DefaultSource

__all__ = ["DefaultSource"]
