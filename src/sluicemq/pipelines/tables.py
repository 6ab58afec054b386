"""Names in a SQL query -> topics, archives, dead letters, retries and traces.

    flights, topics.flights    the topic
    dead_letters.GROUP         what the group gave up: the topic %DLQ%GROUP
    retries.GROUP              what it has to retry: %RETRY%GROUP
    traces                     the events that clients traced (see pipelines.trace)
    NAME, archive.NAME         an archive or Parquet directory that was given; without a name of its
                               own, `archive.flights` is the topic in it and `archive` all of it

The names are found by Spark itself: the query is analysed, Spark says which relation it does not
know and where it stands in the text, a view is made for that place, and so on until it knows them
all. So nothing is read but what the query names, in any place that SQL has for a name.

Topics are read narrowly, each reference by itself. The views are stand-ins at first; Spark's
optimizer tells what is left of their columns (`find_used_columns`) and which predicates they are
under (`references`), and the real views read that alone. They have all the columns still, null
where nothing looks. When the map `properties` is only used as `properties['origin']`, it is a map
of promoted columns, which Spark's optimizer sees through: then `properties['origin'] = 'JFK'` is
the broker's, which it is not for a map from a source.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from sluicemq.errors import ConfigurationError
from sluicemq.hints import did_you_mean, suggest
from sluicemq.model.system_names import is_dead_letter_topic, is_system_topic, revealed_names
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX
from sluicemq.spark.classic import get_session_state
from sluicemq.spark.options import READ, parse_options
from sluicemq.spark.references import (
    PlaceholderTable,
    UsedColumns,
    can_parse,
    extract_predicates,
    find_used_columns,
    quote_name,
    replace_unknown_tables,
    split_name,
)
from sluicemq.spark.schema import AUTOMATIC_PROPERTIES, BASE_TYPES, parse_columns, to_spark_schema
from sluicemq.spark.selectors import string_literal
from sluicemq.spark.sources.offsets import (
    fetch_bounds,
    offsets_to_table,
    open_admin,
    resolve_ending_offsets,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRACES, ARCHIVE, TOPICS = "traces", "archive", "topics"
PREFIXES: Final = {"dead_letters": DLQ_PREFIX, "retries": RETRY_PREFIX, TOPICS: ""}
_MAP: Final = "properties"
_EVERYTHING: Final = UsedColumns(frozenset(BASE_TYPES))


@dataclass(frozen=True, slots=True)
class Relation:
    """What a name in the query stands for: a `topic`, whose every place has a view of its own, or
    something else, whose view is made once. `view` is the view's name."""

    name: str
    view: str
    topic: str | None = None


@dataclass(slots=True)
class Tables:
    """The relations of queries in one session.

    `connection` are options of the source (`nameServers`, credentials); `topics` gives the names of
    all topics; `archives` are paths by name ("" for one without); times are milliseconds.
    """

    spark: "SparkSession"
    connection: Mapping[str, str]
    list_topics: Callable[[], Sequence[str]]
    archives: Mapping[str, str] = field(default_factory=dict)
    since_ms: int | None = None
    until_ms: int | None = None

    def query(self, text: str) -> "DataFrame":
        """The query as a DataFrame. Raises ConfigurationError for what is no query and for names
        of nothing; what else is wrong with it, Spark raises."""
        check_is_query(self.spark, text)
        known: list[Relation] = []

        def view_of(name: str) -> str:
            shared = (one for one in known if one.name == name and one.topic is None)
            relation = next(shared, None)
            if relation is None:
                relation = self._relation(name, f"{name.replace('`', '')} {len(known) + 1}")
                known.append(relation)
            return relation.view

        try:
            text, frame = replace_unknown_tables(self.spark, text, view_of)
            topics = [one for one in known if one.topic is not None]
            if not topics:
                return frame
            columns, shown = narrow_columns(find_used_columns(frame, _MAP) or _EVERYTHING)
            schema = to_spark_schema(parse_columns(columns))
            stand_ins = [PlaceholderTable.create(self.spark, schema) for _ in topics]
            for one, stand_in in zip(topics, stand_ins, strict=True):
                self._show(one.view, stand_in.frame.selectExpr(*shown))
            found = extract_predicates(self.spark.sql(text), stand_ins)
            moments = self._moments([one.topic for one in topics if one.topic is not None])
            for one, predicates in zip(topics, found, strict=True):
                assert one.topic is not None
                options = {"topic": one.topic, "columns": columns, **moments[one.topic]}
                options |= {"predicates": predicates} if predicates else {}
                reader = self.spark.read.format("rocketmq").options(**options, **self.connection)
                self._show(one.view, reader.load().selectExpr(*shown))
            return self.spark.sql(text)
        finally:  # a frame keeps what its views meant
            for one in known:
                self.spark.catalog.dropTempView(one.view)

    def _moments(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """Options that say from when to when a topic is read: to one end in all its places."""
        times = (("startingTimestamp", self.since_ms), ("endingTimestamp", self.until_ms))
        given = {option: str(time_ms) for option, time_ms in times if time_ms is not None}
        found = {topic: dict(given) for topic in topics}
        for topic, places in Counter(topics).items():
            if places > 1 and self.until_ms is None:
                options = parse_options({"topic": topic, **self.connection}, READ)
                with open_admin(options) as admin:
                    ends = resolve_ending_offsets(admin, options, fetch_bounds(admin, [topic]))
                found[topic]["endingOffsets"] = json.dumps(offsets_to_table(ends, by_topic=False))
        return found

    def _relation(self, name: str, view: str) -> Relation:
        parts = split_name(name)
        first = parts[0].lower()
        topic = None
        if len(parts) == 1 and parts[0] in self.archives:
            frame = self._archive(parts[0])
        elif first == ARCHIVE and self.archives and len(parts) <= 2:
            frame = self._archive(*parts[1:])
        elif len(parts) == 1 and first == TRACES:
            from sluicemq.pipelines.trace import read_events  # noqa: PLC0415 - pyarrow

            begin, end = (None if at is None else str(at) for at in (self.since_ms, self.until_ms))
            frame = read_events(self.spark, self.connection, begin=begin, end=end)
        elif len(parts) == 1 or (len(parts) == 2 and first in PREFIXES):
            topic = parts[0] if len(parts) == 1 else PREFIXES[first] + parts[1]
            topics = self.list_topics()
            if topic not in topics:
                raise _unknown_topic(topic, [*topics, *self.archives])
            frame = PlaceholderTable.create(self.spark, to_spark_schema(parse_columns(None))).frame
        else:
            raise ConfigurationError(
                f"there is nothing by the name {name}.",
                fix="Name a topic, dead_letters.GROUP, retries.GROUP, traces, or an archive that "
                "was given; write names with other signs than letters, digits and _ in"
                " `backquotes`.",
            )
        self._show(view, frame)
        return Relation(name, view, topic)

    def _show(self, view: str, frame: "DataFrame") -> None:
        frame.createOrReplaceTempView(quote_name(view))

    def _archive(self, name: str = "") -> "DataFrame":
        """A directory by its name; else the topic of that name in the one that has no name."""
        path = self.archives.get(name, self.archives.get(""))
        if path is None:
            raise ConfigurationError(
                f"there is no archive {name!r}.", fix=f"Given are: {', '.join(self.archives)}."
            )
        frame = read_archive_or_parquet(self.spark, path)
        if name and name not in self.archives:
            frame = frame.where(f"topic = {string_literal(name)}")
        for symbol, time_ms in ((">=", self.since_ms), ("<", self.until_ms)):
            if time_ms is not None:
                frame = frame.where(f"store_time {symbol} timestamp_millis({time_ms})")
        return frame


def read_archive_or_parquet(spark: "SparkSession", path: str) -> "DataFrame":
    """What the pipeline `archive` wrote, or any other directory of Parquet files."""
    from sluicemq.pipelines.archive import read_archive  # noqa: PLC0415 - heavy

    try:
        return read_archive(spark, path)
    except ConfigurationError:
        return spark.read.parquet(path)


def narrow_columns(used: UsedColumns) -> tuple[str, list[str]]:
    """The option `columns`, and the view's expressions: every column, null where it is not used."""
    # In `properties` of a topic these are never there, as they have columns of their own.
    promoted = sorted(key for key in used.map_keys - AUTOMATIC_PROPERTIES if key and "`" not in key)
    by_key = bool(used.map_keys) and used.map_keys - AUTOMATIC_PROPERTIES == set(promoted)
    columns = [name for name in BASE_TYPES if name in used.names]
    if used.map_keys and not by_key:
        columns, promoted = [*columns, _MAP], []
    aliases = {key: f"__property_{at}" for at, key in enumerate(promoted)}
    items = [*columns, *(f"prop:`{key}`:string as {alias}" for key, alias in aliases.items())]
    shown = []
    for name, kind in BASE_TYPES.items():
        if name in columns:
            shown.append(name)
        elif name == _MAP and aliases:
            pairs = ", ".join(f"{string_literal(key)}, {at}" for key, at in aliases.items())
            shown.append(f"map({pairs}) AS {_MAP}")
        else:
            shown.append(f"CAST(NULL AS {kind.simpleString()}) AS {name}")
    return ",".join(items) or "queue_id", shown


def check_is_query(spark: "SparkSession", text: str) -> None:
    """Raises ConfigurationError for a command (`DROP TABLE`, `INSERT` …), and Spark's own error
    for a text that does not parse, ConfigurationError for a session of Spark Connect too. Nothing
    is run."""
    get_session_state(spark).sqlParser().parsePlan(text)
    if not can_parse(spark, f"SELECT * FROM (\n{text}\n)"):
        raise ConfigurationError(
            "this is a command, and only queries are run.", fix="Write select … from TOPIC."
        )


def _unknown_topic(topic: str, names: Sequence[str]) -> ConfigurationError:
    if topic.startswith(tuple(prefix for prefix in PREFIXES.values() if prefix)):
        prefix = DLQ_PREFIX if is_dead_letter_topic(topic) else RETRY_PREFIX
        groups = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return ConfigurationError(
            f"the group {topic.removeprefix(prefix)!r} has no topic {topic}.",
            fix=f"There are such topics of: {', '.join(sorted(groups)) or 'no group'}.",
        )
    own_names = revealed_names(names)
    users_topics = sorted(
        name for name in names if not name.startswith("%") and not is_system_topic(name, own_names)
    )
    fix = did_you_mean(topic, names, cutoff=0.5) or suggest(topic, users_topics)
    return ConfigurationError(f"there is no topic {topic!r}.", fix=fix)
