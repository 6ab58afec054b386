"""Names in a SQL query -> topics, archives, dead letters, retries and traces.

    flights, topics.flights    the topic
    dead_letters.GROUP         what the group gave up: the topic %DLQ%GROUP
    retries.GROUP              what it has to retry: %RETRY%GROUP
    traces                     the events that clients traced (see pipelines.trace)
    NAME, archive.NAME         an archive or Parquet directory that was given; without a name of its
                               own, `archive.flights` is the topic in it and `archive` all of it

The names are found by Spark itself: the query is analysed, Spark says which relation it does not
know and where it stands in the text, a view of it is made, and so on until it knows them all. So
nothing is read but what the query names, in any place that SQL has for a name.

Topics are read narrowly. The views are stand-ins at first; Spark's optimizer tells what is left of
their columns (`used_columns`), and the real views read that alone. They have all the columns still,
null where nothing looks. When the map `properties` is only used as `properties['origin']`, it is a
map of promoted columns, which Spark's optimizer sees through: then `properties['origin'] = 'JFK'`
goes to the broker, which it does not for a map from a source.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX
from sluicemq.spark.schema import BASE, SET_FOR_ALL, parse_columns, struct_type
from sluicemq.spark.selector_sql import string_literal
from sluicemq.spark.used_columns import Used, used_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRACES, ARCHIVE, TOPICS = "traces", "archive", "topics"
PREFIXES: Final = {"dead_letters": DLQ_PREFIX, "retries": RETRY_PREFIX, TOPICS: ""}
RELATIONS_MAX: Final = 64
_MISSING: Final = "TABLE_OR_VIEW_NOT_FOUND"
_MAP: Final = "properties"
_EVERYTHING: Final = Used(frozenset(BASE))


@dataclass(frozen=True, slots=True)
class Relation:
    """What a name stands for: a `topic`, or a view that is there already; `view` is its name."""

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
    topics: Callable[[], Sequence[str]]
    archives: Mapping[str, str] = field(default_factory=dict)
    since_ms: int | None = None
    until_ms: int | None = None

    def query(self, text: str) -> "DataFrame":
        """The query as a DataFrame. Raises ConfigurationError for what is no query and for names
        of nothing; what else is wrong with it, Spark raises."""
        check_is_query(self.spark, text)
        known: dict[str, Relation] = {}
        try:
            text, frame = self._analysed(text, known)
            topics = [one for one in known.values() if one.topic is not None]
            if not topics:
                return frame
            used = used_columns(frame, _MAP) or _EVERYTHING
            for one in topics:
                self._read_topic(one, used)
            return self.spark.sql(text)
        finally:  # a frame keeps what its views meant
            for one in known.values():
                self.spark.catalog.dropTempView(one.view)

    def _analysed(self, text: str, known: dict[str, Relation]) -> tuple[str, "DataFrame"]:
        """The text with views for names of two parts, and what it means over stand-ins."""
        from pyspark.errors import AnalysisException  # noqa: PLC0415 - heavy

        for _ in range(RELATIONS_MAX):
            try:
                with _quiet():
                    return text, self.spark.sql(text)
            except AnalysisException as error:
                if error.getCondition() != _MISSING:
                    raise
                name = error.getMessageParameters()["relationName"]
                relation = known.get(name) or self._relation(name, _parts(name))
                known[name] = relation
                text = self._renamed(text, error, relation)
        raise ConfigurationError(f"the query names more than {RELATIONS_MAX} tables.")

    def _renamed(self, text: str, error: Any, relation: Relation) -> str:
        """A view that is not named as in the query, as its name has one part, takes that place; it
        keeps the last part as alias where the query gives no other."""
        context = error.getQueryContext()[0]
        start, end = context.startIndex(), context.stopIndex() + 1
        parts = _parts(text[start:end])
        if parts == [relation.view]:
            return text
        named = f"{text[:start]}{_quoted(relation.view)} AS {_quoted(parts[-1])}{text[end:]}"
        plain = f"{text[:start]}{_quoted(relation.view)}{text[end:]}"
        return named if _parses(self.spark, named) else plain

    def _relation(self, name: str, parts: Sequence[str]) -> Relation:
        view = ".".join(parts)
        first = parts[0].lower()
        if len(parts) == 1 and parts[0] in self.archives:
            return self._viewed(view, self._archive(parts[0]))
        if first == ARCHIVE and self.archives and len(parts) <= 2:
            return self._viewed(view, self._archive(*parts[1:]))
        if len(parts) == 1 and first == TRACES:
            return self._viewed(view, self._traces())
        if len(parts) == 1:
            return self._topic(view, parts[0])
        if len(parts) == 2 and first in PREFIXES:
            return self._topic(view, PREFIXES[first] + parts[1])
        raise ConfigurationError(
            f"there is nothing by the name {name}.",
            cure="Name a topic, dead_letters.GROUP, retries.GROUP, traces, or an archive that was "
            "given; write names with other signs than letters, digits and _ in `backquotes`.",
        )

    def _viewed(self, view: str, frame: "DataFrame") -> Relation:
        frame.createOrReplaceTempView(_quoted(view))
        return Relation(view)

    def _topic(self, view: str, topic: str) -> Relation:
        topics = self.topics()
        if topic not in topics:
            raise _unknown_topic(topic, [*topics, *self.archives])
        if any(one != topic and one.lower() == topic.lower() for one in topics):
            view = f"{view} {topic.encode().hex()}"  # names of views have no case, topics have
        rows = self.spark.sparkContext.emptyRDD()
        stand_in = self.spark.createDataFrame(rows, struct_type(parse_columns(None)))
        stand_in.createOrReplaceTempView(_quoted(view))
        return Relation(view, topic)

    def _read_topic(self, relation: Relation, used: Used) -> None:
        assert relation.topic is not None
        columns, shown = narrowed(used)
        options = {"topic": relation.topic, "columns": columns, **self.connection}
        for option, time_ms in (
            ("startingTimestamp", self.since_ms), ("endingTimestamp", self.until_ms),
        ):  # fmt: skip
            if time_ms is not None:
                options[option] = str(time_ms)
        frame = self.spark.read.format("rocketmq").options(**options).load()
        frame.selectExpr(*shown).createOrReplaceTempView(_quoted(relation.view))

    def _archive(self, name: str = "") -> "DataFrame":
        """A directory by its name; else the topic of that name in the one that has no name."""
        path = self.archives.get(name, self.archives.get(""))
        if path is None:
            raise ConfigurationError(
                f"there is no archive {name!r}.", cure=f"Given are: {', '.join(self.archives)}."
            )
        frame = archived(self.spark, path)
        if name and name not in self.archives:
            frame = frame.where(f"topic = {string_literal(name)}")
        for symbol, time_ms in ((">=", self.since_ms), ("<", self.until_ms)):
            if time_ms is not None:
                frame = frame.where(f"store_time {symbol} timestamp_millis({time_ms})")
        return frame

    def _traces(self) -> "DataFrame":
        from sluicemq.spark.pipelines.trace import read_events  # noqa: PLC0415 - pyarrow

        begin, end = (None if at is None else str(at) for at in (self.since_ms, self.until_ms))
        return read_events(self.spark, self.connection, begin=begin, end=end)


def archived(spark: "SparkSession", path: str) -> "DataFrame":
    """What the pipeline `archive` wrote, or any other directory of Parquet files."""
    from sluicemq.spark.pipelines.archive import read_archive  # noqa: PLC0415 - heavy

    try:
        return read_archive(spark, path)
    except ConfigurationError:
        return spark.read.parquet(path)


def narrowed(used: Used) -> tuple[str, list[str]]:
    """The option `columns`, and the view's expressions: every column, null where it is not used."""
    # In `properties` of a topic these are never there, as they have columns of their own.
    promoted = sorted(key for key in used.keys - SET_FOR_ALL if key and "`" not in key)
    by_key = bool(used.keys) and used.keys - SET_FOR_ALL == set(promoted)
    columns = [name for name in BASE if name in used.columns]
    if used.keys and not by_key:
        columns, promoted = [*columns, _MAP], []
    aliases = {key: f"__property_{at}" for at, key in enumerate(promoted)}
    items = [*columns, *(f"prop:`{key}`:string as {alias}" for key, alias in aliases.items())]
    shown = []
    for name, kind in BASE.items():
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
    for a text that does not parse. Nothing is run."""
    parser = spark._jsparkSession.sessionState().sqlParser()
    parser.parsePlan(text)
    if not _parses(spark, f"SELECT * FROM (\n{text}\n)"):
        raise ConfigurationError(
            "this is a command, and only queries are run.", cure="Write select … from TOPIC."
        )


def _parses(spark: "SparkSession", text: str) -> bool:
    from pyspark.errors import ParseException  # noqa: PLC0415 - heavy

    try:
        spark._jsparkSession.sessionState().sqlParser().parsePlan(text)
    except ParseException:
        return False
    return True


def _unknown_topic(topic: str, names: Sequence[str]) -> ConfigurationError:
    if topic.startswith(tuple(prefix for prefix in PREFIXES.values() if prefix)):
        prefix = DLQ_PREFIX if topic.startswith(DLQ_PREFIX) else RETRY_PREFIX
        groups = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return ConfigurationError(
            f"the group {topic.removeprefix(prefix)!r} has no topic {topic}.",
            cure=f"There are such topics of: {', '.join(sorted(groups)) or 'no group'}.",
        )
    near = difflib.get_close_matches(topic, names, n=1, cutoff=0.5)
    own = sorted(name for name in names if not name.startswith(("%", "rmq_sys_", "RMQ_SYS_")))
    cure = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(own[:20]) or 'none'}."
    return ConfigurationError(f"there is no topic {topic!r}.", cure=cure)


@contextmanager
def _quiet() -> Iterator[None]:
    """pyspark logs every error of an analysis, whole stack and all, before it raises it. The logger
    is of a class of its own: one that `logging` makes fails on pyspark's arguments."""
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 - heavy

    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


_PART: Final = re.compile(r"`((?:[^`]|``)*)`|([^.`\s]+)")


def _parts(name: str) -> list[str]:
    """`a`.`b``c`, with or without backquotes, as its parts."""
    return [
        found[1].replace("``", "`") if found[1] is not None else found[2]
        for found in _PART.finditer(name)
    ]


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
