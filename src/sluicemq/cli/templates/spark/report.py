"""Print how many flights of each carrier were late, and the worst. Run: python report.py."""

import os

from pyspark.sql import functions as sf

from sluicemq.spark.session import spark_session

NAME_SERVERS = os.environ.get("NAMESRV_ADDR", "127.0.0.1:9876")


def main() -> None:
    # Runs Spark on this machine, with the Java that is installed. On a cluster, use your own
    # SparkSession, and install `sluicemq[spark]` on the workers.
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
    # The pipeline has written Parquet.
    late = (
        spark.read.parquet("out/late-flights")
        .groupBy("carrier")
        .agg(sf.sum("flights").alias("late"), sf.max("worst").alias("worst"))
    )
    flights.join(late, "carrier", "left").orderBy("carrier").show()
    spark.stop()


if __name__ == "__main__":
    main()
