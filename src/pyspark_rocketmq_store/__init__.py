"""Make the data source `rocketmq_store` known to Spark.

A module can register only one source, so this one is apart from `pyspark_rocketmq`.
"""

from sluicemq.spark.source import StoreSource as DefaultSource

__all__ = ["DefaultSource"]
