"""What traces say, as Spark queries over the events: the tables of the pipeline `trace`.

    events      one row a record                                       (`trace_rows`)
    sends       one a message: when it was sent first, or committed
    deliveries  one a delivery: SubBefore and SubAfter with the same request and message
    journeys    one for each message and group: when it came first, how often, was it consumed

    latency     journeys by topic, group and hour: from the send to the first delivery
    failures    sends and deliveries by topic, group and cause
    consuming   what handlers cost, by topic and group, the slow ones first
    unconsumed  messages that were sent and never delivered to a group, by topic and group

Clients may tell an event twice (a trace message that was sent again), and Java tells each attempt
of a send: so everything is grouped by its ids before it is counted. A consumer does not tell the
topic: it is the one of the message's `Pub`, null when its producer does not trace. Latency leaves
out delayed messages, which are meant to be late; of a transaction it counts from the commit. Clocks
of two machines may differ: a delivery before its send is counted as `before_sent`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

_ACCURACY: Final = 10_000
"""Of percentiles: the rank is right to one part in so many, with memory that does not grow."""

_SENDS: Final = """
select message_id, max(topic) as topic,
       max(if(kind = 'Pub', `group`, null)) as producer, max(tags) as tags, max(keys) as keys,
       max(if(kind = 'Pub', message_kind, null)) as message_kind,
       min(if(kind = 'Pub', time, null)) as sent,
       max(if(state = 'COMMIT_MESSAGE', time, null)) as committed,
       coalesce(bool_or(if(kind = 'Pub', success, null)), false) as stored,
       coalesce(bool_or(kind = 'Recall' and success), false) as recalled,
       count_if(kind = 'Pub' and not success) as failed_tries
from {events}
where kind in ('Pub', 'EndTransaction', 'Recall') and message_id is not null
group by message_id having sent is not null
"""
_DELIVERIES: Final = """
select d.*, s.topic, s.tags, s.message_kind,
       if(s.message_kind = 'half', s.committed, s.sent) as sent
from (
  select request_id, message_id, max(`group`) as `group`,
         min(if(kind = 'SubBefore', time, null)) as taken,
         max(if(kind = 'SubAfter', time, null)) as finished,
         count_if(kind = 'SubAfter') > 0 as is_finished,
         max(retry_times) as retry_times, max(cost_ms) as cost_ms,
         bool_or(success) as success, max(outcome) as outcome
  from {events}
  where kind in ('SubBefore', 'SubAfter') and request_id is not null and message_id is not null
  group by request_id, message_id
) d left join {sends} s using (message_id)
"""
_JOURNEYS: Final = """
select message_id, `group`, max(topic) as topic, max(tags) as tags,
       max(message_kind) as message_kind, max(sent) as sent, min(taken) as received,
       count(*) as deliveries, min(retry_times) as first_round,
       coalesce(bool_or(success), false) as consumed
from {deliveries} group by message_id, `group`
"""
_LATENCY: Final = """
select topic, `group`, hour, count(*) as messages,
       {percentiles}, max(latency_ms) as max_ms, count_if(latency_ms < 0) as before_sent
from (
  select topic, `group`, date_trunc('hour', sent) as hour,
         unix_millis(received) - unix_millis(sent) as latency_ms
  from {journeys}
  where sent is not null and received is not null and first_round = 0
    and message_kind <> 'delayed'
) group by topic, `group`, hour order by topic, `group`, hour
"""
_FAILURES: Final = """
select topic, `group`, cause, count(*) as failures, approx_count_distinct(message_id) as messages,
       max(time) as last, max_by(message_id, time) as example
from (
  select topic, `group`, message_id, coalesce(finished, taken) as time,
         if(is_finished, coalesce(outcome, 'failed'), 'no result') as cause
  from {deliveries}
  where if(is_finished, not success, unix_millis(taken) <= {until_ms})
  union all
  select topic, producer, message_id, sent, if(stored, 'send repeated', 'send failed')
  from {sends} where failed_tries > 0
) group by topic, `group`, cause order by failures desc, topic, `group`, cause
"""
_CONSUMING: Final = """
select topic, `group`, count(*) as deliveries, {percentiles}, max(cost_ms) as max_ms,
       count_if(cost_ms >= {slow_ms}) as slow
from {deliveries} where is_finished and cost_ms is not null
group by topic, `group` order by p95_ms desc, topic, `group`
"""
_WANTED: Final = """
select s.message_id, s.topic, p.`group`, s.tags, s.keys, s.sent, p.expression
from {sends} s join {pairs} p on s.topic = p.topic
where s.stored and not s.recalled and s.message_kind <> 'delayed'
  and if(s.message_kind = 'half', s.committed, s.sent) <= timestamp_millis({until_ms})
  and (size(p.tags) = 0 or array_contains(p.tags, s.tags))
"""
_MISSING: Final = """
select w.* from {wanted} w left anti join {journeys} j
on w.message_id = j.message_id and w.`group` = j.`group`
"""
_UNCONSUMED: Final = """
select w.topic, w.`group`, max(w.expression) as filter, count(*) as sent,
       count(j.message_id) as delivered, count_if(j.consumed) as consumed,
       count(*) - count(j.message_id) as never,
       min(if(j.message_id is null, w.message_id, null)) as example
from {wanted} w left join {journeys} j
on w.message_id = j.message_id and w.`group` = j.`group`
group by w.topic, w.`group` order by never desc, w.topic, w.`group`
"""


@dataclass(frozen=True, slots=True)
class Pair:
    """A group that reads a topic; `tags` what it wants, empty when it wants all or it is not known
    from the tags; `expression` its filter as text."""

    topic: str
    group: str
    tags: tuple[str, ...] = ()
    expression: str | None = None


@dataclass(frozen=True, slots=True)
class TraceTables:
    """DataFrames; nothing is computed before it is asked for. `missing` has a row for each message
    and group that `unconsumed` counts under `never`."""

    events: DataFrame
    sends: DataFrame
    deliveries: DataFrame
    journeys: DataFrame
    latency: DataFrame
    failures: DataFrame
    consuming: DataFrame
    unconsumed: DataFrame
    missing: DataFrame


def sends_of(events: DataFrame) -> DataFrame:
    """One row a message that was sent."""
    return events.sparkSession.sql(_SENDS, events=events)


def deliveries_of(events: DataFrame, sends: DataFrame) -> DataFrame:
    """One row a delivery, with the topic and the time of its message's send."""
    return events.sparkSession.sql(_DELIVERIES, events=events, sends=sends)


def trace_tables(
    events: DataFrame,
    sends: DataFrame,
    deliveries: DataFrame,
    pairs: Sequence[Pair],
    *,
    until_ms: int,
    slow_ms: int,
) -> TraceTables:
    """The tables. What was sent or taken after `until_ms` may still be on its way: it is no loss
    yet. `pairs`: which groups are asked about; a handler is slow from `slow_ms` on."""
    spark = events.sparkSession
    journeys = spark.sql(_JOURNEYS, deliveries=deliveries)
    wanted = spark.sql(_WANTED, sends=sends, pairs=_frame(spark, pairs), until_ms=until_ms)
    return TraceTables(
        events, sends, deliveries, journeys,
        latency=_with_percentiles(spark, _LATENCY, "latency_ms", journeys=journeys),
        failures=spark.sql(_FAILURES, deliveries=deliveries, sends=sends, until_ms=until_ms),
        consuming=_with_percentiles(
            spark, _CONSUMING, "cost_ms", deliveries=deliveries, slow_ms=slow_ms
        ),
        unconsumed=spark.sql(_UNCONSUMED, wanted=wanted, journeys=journeys),
        missing=spark.sql(_MISSING, wanted=wanted, journeys=journeys),
    )  # fmt: skip


def traced_pairs(deliveries: DataFrame, count_max: int) -> list[tuple[str, str]]:
    """(topic, group) of what was delivered, at most so many."""
    found = deliveries.where("topic is not null and `group` is not null")
    rows = found.select("topic", "group").distinct().orderBy("topic", "group").limit(count_max)
    return [(row[0], row[1]) for row in rows.collect()]


def _with_percentiles(spark: SparkSession, query: str, column: str, **values: Any) -> DataFrame:
    texts = ", ".join(
        f"percentile_approx({column}, {share}, {_ACCURACY}) as {name}"
        for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99))
    )
    return spark.sql(query.replace("{percentiles}", texts), **values)


def _frame(spark: SparkSession, pairs: Sequence[Pair]) -> DataFrame:
    rows = [(pair.topic, pair.group, list(pair.tags), pair.expression) for pair in pairs]
    schema = "topic string, `group` string, tags array<string>, expression string"
    return spark.createDataFrame(rows, schema)
