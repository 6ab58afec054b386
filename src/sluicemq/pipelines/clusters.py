"""Clusters: dead letters that probably have the same cause, and what distinguishes them.

Dead letters with the same origin topic, the same cause and the same values of the user's further
expressions are a cluster. Property values that are common in the cluster and rare among the newest
messages of the origin topic distinguish it. A value that every message has explains nothing.
"""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - the usual name of this module

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import SluiceError
from sluicemq.pipelines.ready import format_table, load_messages
from sluicemq.spark.sources.checkpoints import offsets_to_table

SAMPLE_MESSAGES: Final = 2_000
"""The number of newest messages of an origin topic with which its clusters are compared."""
TOPICS_SAMPLED_MAX: Final = 5
VALUES_SHOWN: Final = 3
"""The number of distinguishing values of a cluster."""
SHARE_MIN: Final = 0.3
"""The smallest share of a cluster's messages that have a distinguishing value."""


def format_clusters(
    letters: Any,
    admin: Admin,
    connection: Mapping[str, str],
    expressions: Sequence[str],
    count_max: int,
) -> list[str]:
    """Return the lines of a table of the largest clusters of dead letters.

    A cluster is a group of dead letters with the same origin topic, cause, and values of the Spark
    SQL `expressions`. At most `count_max` clusters are shown. Below the table, there is a line for
    each property value that is more frequent in a cluster than usual. `admin` and `connection` are
    used to read the newest messages of the origin topics for comparison.
    """
    # The expressions become the columns by_0, by_1 and so on.
    expression_by_name = {f"by_{index}": expression for index, expression in enumerate(expressions)}
    expression_columns = [
        f"cast({expression} as string) as {name}" for name, expression in expression_by_name.items()
    ]
    keyed = letters.selectExpr("*", *expression_columns)
    keys = ["origin_topic", "cause", *expression_by_name]
    clusters = _find_largest_clusters(keyed, keys, count_max)
    if not clusters:
        return ["no dead letters"]
    lines = _format_cluster_table(clusters, keys, expressions)

    cluster_sizes = [(*(row[key] for key in keys), row["messages"]) for row in clusters]
    for row in _find_distinguishing_values(keyed, keys, cluster_sizes, admin, connection):
        lines.append(_describe_distinguishing_value(row))
    return lines


def _find_largest_clusters(keyed: Any, keys: Sequence[str], count_max: int) -> list[Any]:
    """Return at most `count_max` clusters as rows, the largest first.

    `keyed` are dead letters with the columns `keys`, which identify the cluster. A row has these
    columns, messages (their number), first and last (store times), retries (the largest number of
    deliveries) and example (a message id).
    """
    clusters: list[Any] = (
        keyed.groupBy(*keys)
        .agg(
            F.expr("count(1) as messages"),
            F.expr("min(store_time) as first"),
            F.expr("max(store_time) as last"),
            F.expr("max(reconsume_times) as retries"),
            F.expr("max_by(msg_id, store_time) as example"),
        )
        .orderBy(F.desc("messages"), *keys)
        .limit(count_max)
        .collect()
    )
    return clusters


def _format_cluster_table(
    clusters: Sequence[Any], keys: Sequence[str], expressions: Sequence[str]
) -> list[str]:
    """Return the lines of a table of clusters.

    In the titles, the user's expressions replace the names of their columns.
    """
    columns = ["messages", *keys, "retries", "first", "last", "example"]
    titles = [
        "messages",
        "origin_topic",
        "cause",
        *expressions,
        "retries",
        "first",
        "last",
        "example",
    ]
    rows = [[cluster[column] for column in columns] for cluster in clusters]
    return format_table("Dead letters by cause", titles, rows)


def _describe_distinguishing_value(row: Any) -> str:
    """Return a line about a property value that is more frequent in a cluster than usual.

    `row` has the columns that `_find_distinguishing_values` returns.
    """
    comparison = ""
    if row["usual"] is not None:
        comparison = f", {row['usual']:.0%} of the topic's newest messages"
    return (
        f"  {row['origin_topic']}, {row['cause']}: {row['name']} = {row['value']!r} in"
        f" {row['share']:.0%}{comparison}"
    )


def _find_distinguishing_values(
    keyed: Any,
    keys: list[str],
    cluster_sizes: list[tuple[Any, ...]],
    admin: Admin,
    connection: Mapping[str, str],
) -> list[Any]:
    """Return the property values that are more frequent in a cluster than in its origin topic.

    A value must occur in at least two messages and a share of `SHARE_MIN` of the cluster. This
    share must be more than twice its share of the topic's newest messages. The second condition is
    left out for topics whose messages could not be read, and for all but `TOPICS_SAMPLED_MAX`
    topics. At most `VALUES_SHOWN` values of a cluster are returned, ordered by the difference of
    the shares, largest first. The clusters are ordered by size.

    `keyed` are dead letters with the columns `keys`, which identify the cluster. `cluster_sizes`
    has the values of these columns and the number of messages of each cluster. A row of the result
    has the columns `keys`, messages, name, value, share (of the cluster) and usual (the share of
    the newest messages, null if they could not be read).
    """
    spark = keyed.sparkSession
    values = _count_frequent_values(keyed, keys, cluster_sizes)
    topics = sorted({str(row[0]) for row in cluster_sizes if row[0]})[:TOPICS_SAMPLED_MAX]
    shares_by_topic = _compute_usual_shares(spark, admin, connection, topics)
    if shares_by_topic:
        values = _join_usual_shares(values, shares_by_topic)

    # Keep the values that are more than twice as common in the cluster as in its topic.
    cluster_columns = ", ".join(keys)
    distinguishing_values: list[Any] = (
        values.selectExpr("*", "n / messages as share")
        .where("usual is null or share > 2 * usual")
        .selectExpr(
            "*",
            f"row_number() over (partition by {cluster_columns} order by share - coalesce(usual, 0)"
            " desc, name, value) as place",
        )
        .where(f"place <= {VALUES_SHOWN}")
        .orderBy(F.desc("messages"), *keys, "place")
        .collect()
    )
    return distinguishing_values


def _count_frequent_values(
    keyed: Any, keys: list[str], cluster_sizes: list[tuple[Any, ...]]
) -> Any:
    """Return the property values that are frequent in a cluster, as a DataFrame.

    A value is frequent if at least two messages and a share of `SHARE_MIN` of the cluster have it.
    `keyed` are dead letters with the columns `keys`, which identify the cluster. `cluster_sizes`
    has the values of these columns and the number of messages of each cluster. The columns are
    `keys`, messages, name, value, n (the number of messages of the cluster with the value) and
    usual (null).
    """
    schema = ", ".join(f"{key} string" for key in keys) + ", messages long"
    clusters = F.broadcast(keyed.sparkSession.createDataFrame(cluster_sizes, schema).alias("s"))
    is_same_cluster = [F.col(f"s.{key}").eqNullSafe(F.col(f"l.{key}")) for key in keys]
    return (
        _explode_properties(keyed)
        .alias("l")
        .join(clusters, is_same_cluster)
        .select(*(F.col(f"s.{key}") for key in keys), "s.messages", "l.name", "l.value")
        .groupBy(*keys, "messages", "name", "value")
        .agg(F.expr("count(1) as n"))
        .where(f"n > 1 and n >= {SHARE_MIN} * messages")
        .withColumn("usual", F.expr("cast(null as double)"))
    )


def _compute_usual_shares(
    spark: Any, admin: Admin, connection: Mapping[str, str], topics: Sequence[str]
) -> dict[str, Any]:
    """Return, for each topic, how frequent each property value is in its newest messages.

    Each item is a DataFrame with the columns name, value, usual (the share of the messages) and
    origin_topic. Topics that cannot be read or have no messages are left out.
    """
    shares_by_topic = {}
    for topic in topics:
        newest_rows = _load_newest(spark, admin, connection, topic)
        newest_count = 0 if newest_rows is None else newest_rows.count()
        if newest_count:
            shares = (
                _explode_properties(newest_rows)
                .groupBy("name", "value")
                .agg((F.count(F.lit(1)) / newest_count).alias("usual"))
            )
            shares_by_topic[topic] = shares.withColumn("origin_topic", F.lit(topic))
    return shares_by_topic


def _explode_properties(rows: Any) -> Any:
    """Return one row for each property of each message, with the added columns `name` and `value`.

    The tag of a message counts as a property with the name "tag".
    """
    other_properties = "map_filter(properties, (name, value) -> name <> 'tag')"
    tag = "if(tags is null, cast(map() as map<string,string>), map('tag', tags))"
    entries = f"map_entries(map_concat({other_properties}, {tag}))"
    exploded = rows.selectExpr("*", f"explode({entries}) as entry")
    return exploded.selectExpr("*", "entry.key as name", "entry.value as value")


def _join_usual_shares(values: Any, shares_by_topic: Mapping[str, Any]) -> Any:
    """Return frequent values with the column `usual`, their share of the topic's newest messages.

    `values` has the columns of `_count_frequent_values`. `usual` is null for topics that are not in
    `shares_by_topic`, and 0 for values that do not occur in the topic's newest messages.
    """
    all_shares = reduce(lambda left, right: left.unionByName(right), shares_by_topic.values())
    joined = values.drop("usual").join(all_shares, ["origin_topic", "name", "value"], "left")
    is_sampled = F.col("origin_topic").isin(list(shares_by_topic))
    return joined.withColumn("usual", F.when(is_sampled, F.expr("coalesce(usual, 0.0)")))


def _load_newest(spark: Any, admin: Admin, connection: Mapping[str, str], topic: str) -> Any | None:
    """Return about `SAMPLE_MESSAGES` newest messages of a topic, with tags and properties.

    Return None if the topic cannot be read or has no queue.
    """
    try:
        bounds = {queue: admin.offsets(queue) for queue in admin.queues(topic)}
    except SluiceError:
        return None
    if not bounds:
        return None
    count_per_queue = max(1, SAMPLE_MESSAGES // len(bounds))
    starts = {queue: max(lowest, end - count_per_queue) for queue, (lowest, end) in bounds.items()}
    return load_messages(
        spark,
        connection,
        topic=topic,
        columns="tags,properties",
        startingOffsets=json.dumps(offsets_to_table(starts, by_topic=False)),
    )
