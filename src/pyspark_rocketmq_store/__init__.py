"""How Spark finds the data source `rocketmq_store`, as it finds `rocketmq` by `pyspark_rocketmq`: a
module holds one source, and this is the second one. Nothing else is here.
"""

from sluicemq.spark.source import StoreSource as DefaultSource

__all__ = ["DefaultSource"]
