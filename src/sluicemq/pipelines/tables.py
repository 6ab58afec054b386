"""Run SQL queries whose tables are topics, archives, dead letters, retries and traces.

    flights, topics.flights    the topic
    dead_letters.GROUP         the dead letters of the group: the topic %DLQ%GROUP
    retries.GROUP              the messages that the group has to retry: the topic %RETRY%GROUP
    traces                     the events that clients traced (see pipelines.trace)
    NAME, archive.NAME         an archive or Parquet directory that was passed to `Tables`; if it
                               has no name, `archive.flights` is the topic in it, and `archive` is
                               all of it

Spark itself finds the names. It analyses the query and reports which relation it does not know, and
the position of the name in the text. A view is created for that position, and so on until all
relations are known. So nothing is read but what the query names, and names are found wherever SQL
allows them.

Each reference to a topic only reads what it needs. Its view is a placeholder at first. Spark's
optimizer reports which of the columns are used (`find_used_columns`) and which predicates apply
(`spark.references`). The final view reads only these. It still has all columns, with null in those
that are not used. If the map `properties` is only used in the form `properties['origin']`, it is
built from promoted columns, because Spark's optimizer simplifies that. So the broker can evaluate
`properties['origin'] = 'JFK'`, which it cannot for a map that the source returns.
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
    GENERATED_PREFIX,
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
from sluicemq.spark.sources.checkpoints import offsets_to_table
from sluicemq.spark.sources.offsets import fetch_bounds, open_admin, resolve_ending_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRACES = "traces"
ARCHIVE = "archive"
TOPICS = "topics"
"""The first parts of names in a query."""
PREFIXES: Final = {"dead_letters": DLQ_PREFIX, "retries": RETRY_PREFIX, TOPICS: ""}
"""The prefix of the topic for each first part of a name."""
_MAP: Final = "properties"
"""The map column."""
_ALL_COLUMNS: Final = UsedColumns(frozenset(BASE_TYPES))


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation of a query: the name in the query, and the name of its view.

    `topic` is the topic, or None for another relation. Each reference to a topic has its own view.
    References to another relation share one.
    """

    name: str
    view: str
    topic: str | None = None


@dataclass(slots=True)
class Tables:
    """Runs queries over topics and archives in one Spark session.

    `connection` are options of the source (`nameServers`, credentials). `list_topics` returns the
    names of all topics. `archives` maps names to paths; the name "" is an archive without a name.
    Only messages with since_ms <= store time < until_ms are read, in milliseconds since 1970; None
    means no limit.
    """

    spark: "SparkSession"
    connection: Mapping[str, str]
    list_topics: Callable[[], Sequence[str]]
    archives: Mapping[str, str] = field(default_factory=dict)
    since_ms: int | None = None
    until_ms: int | None = None

    def query(self, text: str) -> "DataFrame":
        """Return the result of a query as a DataFrame, without reading messages yet.

        Topics, archives and traces are tables of the query. Raises ConfigurationError if the text
        is a command, or a name in it does not exist. Spark raises its own errors for other mistakes
        in the query.
        """
        check_is_query(self.spark, text)
        relations: list[Relation] = []

        def create_view(name: str) -> str:
            """Return the view for one reference. References to one archive share a view."""
            for relation in relations:
                is_archive = relation.topic is None
                if is_archive and relation.name == name:
                    return relation.view
            view = f"{name.replace('`', '')} {len(relations) + 1}"
            relations.append(self._create_relation(name, view))
            return view

        try:
            query_over_views, frame = replace_unknown_tables(self.spark, text, create_view)
            topic_relations = [relation for relation in relations if relation.topic is not None]
            if not topic_relations:
                return frame
            self._narrow_views(query_over_views, frame, topic_relations)
            return self.spark.sql(query_over_views)
        finally:  # the DataFrame keeps the meaning of its views
            for relation in relations:
                self.spark.catalog.dropTempView(relation.view)

    def _narrow_views(
        self, query_over_views: str, frame: "DataFrame", topic_relations: Sequence[Relation]
    ) -> None:
        """Replace the placeholder views of topics by views that read only what the query needs.

        `query_over_views` is the query with the names of the views, and `frame` its result over
        placeholders. `topic_relations` are the places in the query that name a topic.
        """
        used_columns = find_used_columns(frame, _MAP) or _ALL_COLUMNS
        columns, expressions = narrow_columns(used_columns)

        # Find the predicates: replace the views by placeholders with only the used columns.
        schema = to_spark_schema(parse_columns(columns))
        placeholders = [PlaceholderTable.create(self.spark, schema) for _ in topic_relations]
        for relation, placeholder in zip(topic_relations, placeholders, strict=True):
            self._create_view(relation.view, placeholder.frame.selectExpr(*expressions))
        narrowed_frame = self.spark.sql(query_over_views)
        predicates_by_relation = extract_predicates(narrowed_frame, placeholders)

        # Replace the placeholders by the topics.
        topics = [relation.topic for relation in topic_relations if relation.topic is not None]
        range_options = self._build_range_options(topics)
        for relation, predicates in zip(topic_relations, predicates_by_relation, strict=True):
            assert relation.topic is not None
            options = {"topic": relation.topic, "columns": columns}
            options |= range_options[relation.topic]
            if predicates:
                options["predicates"] = predicates
            reader = self.spark.read.format("rocketmq").options(**options, **self.connection)
            self._create_view(relation.view, reader.load().selectExpr(*expressions))

    def _build_range_options(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return, for each topic, the options of the source that limit the time or the offsets.

        If a query names a topic several times, and `until_ms` does not limit it, the topic gets
        fixed end offsets. So all places read the same messages.
        """
        time_options = {}
        if self.since_ms is not None:
            time_options["startingTimestamp"] = str(self.since_ms)
        if self.until_ms is not None:
            time_options["endingTimestamp"] = str(self.until_ms)
        options_by_topic = {}
        for topic, reference_count in Counter(topics).items():
            options_by_topic[topic] = dict(time_options)
            if reference_count > 1 and self.until_ms is None:
                options_by_topic[topic]["endingOffsets"] = self._fetch_end_offsets(topic)
        return options_by_topic

    def _fetch_end_offsets(self, topic: str) -> str:
        """Return the present end offsets of a topic, as JSON for the option `endingOffsets`."""
        options = parse_options({"topic": topic, **self.connection}, READ)
        with open_admin(options) as admin:
            ends = resolve_ending_offsets(admin, options, fetch_bounds(admin, [topic]))
        return json.dumps(offsets_to_table(ends, by_topic=False))

    def _create_relation(self, name: str, view: str) -> Relation:
        """Create a view for one table name in the query, and return both as a relation.

        `view` is the name of the view. The view of a topic is only a placeholder without rows.
        Raises ConfigurationError if there is neither a topic, a group's topic, an archive nor
        `traces` of this name.
        """
        name_parts = split_name(name)
        is_single = len(name_parts) == 1
        prefix = name_parts[0].lower()
        topic = None
        if is_single and name_parts[0] in self.archives:
            frame = self._load_archive(name_parts[0])
        elif prefix == ARCHIVE and self.archives and len(name_parts) <= 2:
            frame = self._load_archive(*name_parts[1:])
        elif is_single and prefix == TRACES:
            frame = self._load_traces()
        elif is_single:
            topic = name_parts[0]
            frame = self._create_placeholder(topic)
        elif prefix in PREFIXES and len(name_parts) == 2:
            topic = PREFIXES[prefix] + name_parts[1]
            frame = self._create_placeholder(topic)
        else:
            raise ConfigurationError(
                f"there is no table {name}.",
                fix="Name a topic, dead_letters.GROUP, retries.GROUP, traces, or an archive that"
                " was passed; write names with other characters than letters, digits and _ in"
                " `backquotes`.",
            )
        self._create_view(view, frame)
        return Relation(name, view, topic)

    def _load_traces(self) -> "DataFrame":
        """Return the events of the traces between `since_ms` and `until_ms`."""
        from sluicemq.pipelines.trace import read_events  # noqa: PLC0415 - imports pyarrow

        begin = None if self.since_ms is None else str(self.since_ms)
        end = None if self.until_ms is None else str(self.until_ms)
        return read_events(self.spark, self.connection, begin=begin, end=end)

    def _create_placeholder(self, topic: str) -> "DataFrame":
        """Return a DataFrame without rows and with the columns of messages.

        Raises ConfigurationError if the topic does not exist.
        """
        topics = self.list_topics()
        if topic not in topics:
            raise _unknown_topic(topic, [*topics, *self.archives])
        return PlaceholderTable.create(self.spark, to_spark_schema(parse_columns(None))).frame

    def _create_view(self, view: str, frame: "DataFrame") -> None:
        """Create a temporary view of `frame`, or replace the view of this name."""
        frame.createOrReplaceTempView(quote_name(view))

    def _load_archive(self, name: str = "") -> "DataFrame":
        """Return the messages of an archive between `since_ms` and `until_ms`.

        `name` is the name of an archive, or of a topic in the archive that has no name. Raises
        ConfigurationError if there is neither.
        """
        path = self.archives.get(name, self.archives.get(""))
        if path is None:
            raise ConfigurationError(
                f"there is no archive {name!r}.",
                fix=f"The archives are: {', '.join(self.archives)}.",
            )
        frame = read_archive_or_parquet(self.spark, path)
        if name and name not in self.archives:
            frame = frame.where(f"topic = {string_literal(name)}")
        for symbol, time_ms in ((">=", self.since_ms), ("<", self.until_ms)):
            if time_ms is not None:
                frame = frame.where(f"store_time {symbol} timestamp_millis({time_ms})")
        return frame


def read_archive_or_parquet(spark: "SparkSession", path: str) -> "DataFrame":
    """Return the archive at `path`; if there is none, the Parquet files in this directory."""
    from sluicemq.pipelines.archive import read_archive  # noqa: PLC0415 - a slow import

    try:
        return read_archive(spark, path)
    except ConfigurationError:
        return spark.read.parquet(path)


def narrow_columns(used: UsedColumns) -> tuple[str, list[str]]:
    """Return the option `columns` that reads only what a query uses, and the view's expressions.

    The view has every default column, in order. A column that is not used is null. If the query
    uses only single values of the map `properties`, these properties are read as columns of their
    own, and the view builds the map from them. For example, for the columns `tags` and
    `properties['origin']`:

        "tags,prop:`origin`:string as __property_0",
        ["CAST(NULL AS string) AS topic", …, "tags", "map('origin', __property_0) AS properties", …]

    If a key cannot be written in the option (it is empty or contains a backquote), the whole map is
    read. If the query uses no column, the option is `queue_id`.
    """
    columns = [name for name in BASE_TYPES if name in used.names]
    # The map `properties` never contains these, because they have columns of their own.
    map_keys = used.map_keys - AUTOMATIC_PROPERTIES
    promoted_keys = sorted(key for key in map_keys if key and "`" not in key)
    can_promote_all = map_keys == set(promoted_keys)
    if used.map_keys and not can_promote_all:
        columns.append(_MAP)
        promoted_keys = []
    alias_by_key = {key: f"{GENERATED_PREFIX}{index}" for index, key in enumerate(promoted_keys)}
    promoted_columns = [f"prop:`{key}`:string as {alias}" for key, alias in alias_by_key.items()]

    expressions = []
    for name, spark_type in BASE_TYPES.items():
        if name in columns:
            expressions.append(name)
        elif name == _MAP and alias_by_key:
            expressions.append(f"{_build_map(alias_by_key)} AS {_MAP}")
        else:
            expressions.append(f"CAST(NULL AS {spark_type.simpleString()}) AS {name}")
    columns_option = ",".join([*columns, *promoted_columns]) or "queue_id"
    return columns_option, expressions


def _build_map(column_by_key: Mapping[str, str]) -> str:
    """Return the Spark SQL expression of a map with the value of a column for each key."""
    entries = [f"{string_literal(key)}, {column}" for key, column in column_by_key.items()]
    return f"map({', '.join(entries)})"


def check_is_query(spark: "SparkSession", text: str) -> None:
    """Raise ConfigurationError if the text is a command, such as `DROP TABLE`. The text is not run.

    Raises Spark's own error if the text does not parse, and ConfigurationError for a session of
    Spark Connect.
    """
    get_session_state(spark).sqlParser().parsePlan(text)
    if not can_parse(spark, f"SELECT * FROM (\n{text}\n)"):
        raise ConfigurationError(
            "the text is a command, and only queries are run.", fix="Write select … from TOPIC."
        )


def _unknown_topic(topic: str, names: Sequence[str]) -> ConfigurationError:
    """Return the error for a topic that does not exist, with suggestions from `names`.

    `names` are the topics and archives that exist. For the topic of a group, the groups that have
    such a topic are listed.
    """
    if topic.startswith((DLQ_PREFIX, RETRY_PREFIX)):
        prefix = DLQ_PREFIX if is_dead_letter_topic(topic) else RETRY_PREFIX
        groups = sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))
        listed_groups = ", ".join(groups) or "none"
        return ConfigurationError(
            f"the group {topic.removeprefix(prefix)!r} has no topic {topic}.",
            fix=f"Groups with such a topic: {listed_groups}.",
        )
    own_names = revealed_names(names)
    users_topics = sorted(
        name for name in names if not name.startswith("%") and not is_system_topic(name, own_names)
    )
    fix = did_you_mean(topic, names, cutoff=0.5) or suggest(topic, users_topics)
    return ConfigurationError(f"there is no topic {topic!r}.", fix=fix)
