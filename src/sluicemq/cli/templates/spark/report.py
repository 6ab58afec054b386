"""How many flights of each carrier were late, and the worst: python report.py"""

import os

from pyspark.sql import functions as sf

from sluicemq.spark.session import spark_session

NAME_SERVERS = os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876")


def main() -> None:
    # Spark on this machine, with a Java found. On a cluster: your own SparkSession, and
    # `sluicemq[spark]` on the workers.
    spark = spark_session("report", log_level="error")
    flights = (
        spark.read.format("rocketmq")
        .option("nameServers", NAME_SERVERS)
        .option("topic", "flights")
        .option("columns", "tags,prop:dep_delay:int")
        .load()
        .groupBy(sf.col("tags").alias("carrier"))
        .agg(sf.count("*").alias("flights"))
    )
    # What the pipeline wrote is plain Parquet.
    late = (
        spark.read.parquet("out/late-flights")
        .groupBy("carrier")
        .agg(sf.sum("flights").alias("late"), sf.max("worst").alias("worst"))
    )
    flights.join(late, "carrier", "left").orderBy("carrier").show()
    spark.stop()


if __name__ == "__main__":
    main()
