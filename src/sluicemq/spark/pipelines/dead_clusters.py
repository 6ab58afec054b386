"""Dead letters by cause: how many, since when, and what their properties have in common.

A cluster is an origin topic with a cause (and what else the user groups by). What distinguishes it
are property values that are common in it and rare in its topic: the newest messages of the topic
are the comparison, since a value that every message has explains nothing.
"""

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import SluiceError
from sluicemq.spark.pipelines.ready import table_lines
from sluicemq.spark.sources.offsets import to_table

SAMPLE_MESSAGES: Final = 2_000
TOPICS_SAMPLED_MAX: Final = 5
VALUES_SHOWN: Final = 3
SHARE_MIN: Final = 0.3
_ENTRIES: Final = (
    "explode(map_entries(map_concat(map_filter(properties, (name, value) -> name <> 'tag'),"
    " if(tags is null, cast(map() as map<string,string>), map('tag', tags)))))"
)


def cluster_lines(
    letters: Any, admin: Admin, connection: Mapping[str, str], by: Sequence[str], top: int
) -> list[str]:
    """The largest clusters as lines, each with what distinguishes it."""
    named = [f"by_{turn}" for turn in range(len(by))]
    keyed = letters.selectExpr("*", *(f"cast({how} as string) as {name}" for how, name in
                                      zip(by, named, strict=True)))  # fmt: skip
    keys = ["origin_topic", "cause", *named]
    clusters = (
        keyed.groupBy(*keys)
        .agg(
            F.expr("count(1) as messages"), F.expr("min(store_time) as first"),
            F.expr("max(store_time) as last"), F.expr("max(reconsume_times) as retries"),
            F.expr("max_by(msg_id, store_time) as example"),
        )
        .orderBy(F.desc("messages"), *keys)
        .limit(top)
        .collect()
    )  # fmt: skip
    if not clusters:
        return ["no dead letters"]
    names = ["messages", "origin_topic", "cause", *by, "retries", "first", "last", "example"]
    table = [
        [row["messages"], row["origin_topic"], row["cause"], *(row[name] for name in named),
         row["retries"], row["first"], row["last"], row["example"]]
        for row in clusters
    ]  # fmt: skip
    lines = table_lines("Dead letters by cause", names, table)
    counts = [(*(row[key] for key in keys), row["messages"]) for row in clusters]
    return lines + _distinguished(keyed, keys, counts, admin, connection)


def _distinguished(
    keyed: Any, keys: list[str], counts: list[tuple[Any, ...]], admin: Admin,
    connection: Mapping[str, str],
) -> list[str]:  # fmt: skip
    spark = keyed.sparkSession
    schema = ", ".join(f"{key} string" for key in keys) + ", messages long"
    sizes = spark.createDataFrame(counts, schema)
    same = [F.col(f"s.{key}").eqNullSafe(F.col(f"l.{key}")) for key in keys]
    values = (
        keyed.alias("l")
        .join(F.broadcast(sizes.alias("s")), same)
        .select(*(F.col(f"s.{key}") for key in keys), "s.messages", F.expr(_entries("l")))
        .selectExpr(*keys, "messages", "col.key as name", "col.value as value")
        .groupBy(*keys, "messages", "name", "value")
        .agg(F.expr("count(1) as n"))
        .where(f"n > 1 and n >= {SHARE_MIN} * messages")
    )
    topics = sorted({str(row[0]) for row in counts if row[0]})[:TOPICS_SAMPLED_MAX]
    values = _with_usual(values, _usual(spark, admin, connection, topics))
    share = "n / messages"
    order = ", ".join(keys)
    ranked = (
        values.where(f"usual is null or {share} > 2 * usual")
        .selectExpr("*", f"{share} as share")
        .selectExpr(
            "*", f"row_number() over (partition by {order} order by share - coalesce(usual, 0)"
            " desc, name, value) as place",
        )
        .where(f"place <= {VALUES_SHOWN}")
        .orderBy(F.desc("messages"), *keys, "place")
        .collect()
    )  # fmt: skip
    return [_told(row) for row in ranked]


def _entries(alias: str) -> str:
    return _ENTRIES.replace("(properties,", f"({alias}.properties,").replace(
        "tags", f"{alias}.tags"
    ) + " as col"  # fmt: skip


def _told(row: Any) -> str:
    usual = row["usual"]
    beside = "" if usual is None else f", {usual:.0%} of the topic's newest messages"
    return (
        f"  {row['origin_topic']}, {row['cause']}: {row['name']} = {row['value']!r} in"
        f" {row['share']:.0%}{beside}"
    )


def _with_usual(values: Any, usual: Mapping[str, Any]) -> Any:
    """The values with their share in the topic; null where nothing of it could be read."""
    joined = values.withColumn("usual", F.expr("cast(null as double)"))
    if not usual:
        return joined
    shares = reduce(lambda one, other: one.unionByName(other), usual.values())
    joined = values.join(shares, ["origin_topic", "name", "value"], "left")
    share = F.when(F.col("origin_topic").isin(list(usual)), F.expr("coalesce(usual, 0.0)"))
    return joined.withColumn("usual", share)


def _usual(
    spark: Any, admin: Admin, connection: Mapping[str, str], topics: Sequence[str]
) -> dict[str, Any]:
    """Topic -> how common values are among its newest messages."""
    found = {}
    for topic in topics:
        rows = _newest(spark, admin, connection, topic)
        if rows is None:
            continue
        total = rows.count()
        if not total:
            continue
        found[topic] = (
            rows.selectExpr(_ENTRIES + " as col")
            .groupBy("col.key", "col.value")
            .agg((F.count(F.lit(1)) / total).alias("usual"))
            .selectExpr(f"'{topic}' as origin_topic", "key as name", "value", "usual")
        )
    return found


def _newest(spark: Any, admin: Admin, connection: Mapping[str, str], topic: str) -> Any | None:
    try:
        bounds = {queue: admin.offsets(queue) for queue in admin.queues(topic)}
    except SluiceError:
        return None
    if not bounds:
        return None
    each = max(1, SAMPLE_MESSAGES // len(bounds))
    starts = {queue: max(low, high - each) for queue, (low, high) in bounds.items()}
    return (
        spark.read.format("rocketmq")
        .options(**connection)
        .options(topic=topic, columns="tags,properties", reportPushdown="false",
                 startingOffsets=json.dumps(to_table(starts, several=False)))
        .load()
    )  # fmt: skip
