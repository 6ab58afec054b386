"""Dead letters as rows, their edits, and what would become of each that is sent again.

A dead letter says by its properties where it comes from (RETRY_TOPIC) and how it was called there
(ORIGIN_MESSAGE_ID); why it failed is nowhere in RocketMQ's format, so `cause` is what the message
itself tells: a property that is named like an error, else a body that is no text or no JSON.

    columns of the view: topic, broker, queue_id, queue_offset, msg_id, keys, tags, properties
    (the producer's own), body, text (the body as UTF-8), born_time, store_time, reconsume_times,
    origin_topic, origin_id, sharding_key, cause
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from sluicemq.client.core.explanations.rules import verdict_on
from sluicemq.client.core.messages import BODY_BYTES_MAX, PROPERTIES_BYTES_MAX
from sluicemq.client.core.names import (
    check_keys,
    check_properties,
    check_tag,
    check_topic_to_send,
)
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.ids import Host
from sluicemq.model.message import (
    KEYS,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    SHARDING_KEY,
    TAGS,
    UNIQ_KEY,
    StoredMessage,
)
from sluicemq.model.subscription import Subscription
from sluicemq.spark.pipelines.replay import OWN_PROPERTIES

MATCHES, UNCHECKED, FILTERED, INVALID = "matches", "unchecked", "filtered", "invalid"
NO_HINT: Final = "no hint in the message"
_HINT: Final = "(?i)exception|error|cause|reason|fail|stack"
_TEXT_MAX: Final = 100
_NOWHERE: Final = Host("0.0.0.0", 0)
EDITABLE: Final = ("body", "topic", "tags", "keys", "sharding_key", "properties")
SOURCE_COLUMNS: Final = (
    "topic,broker,queue_id,queue_offset,msg_id,keys,tags,properties,body,born_time,store_time,"
    "reconsume_times"
)


def letters_of(rows: Any) -> Any:
    """The view of messages of a dead-letter topic, read with `SOURCE_COLUMNS`, properties=all."""
    named = f"filter(map_entries(own), one -> one.key rlike '{_HINT}' and one.value <> '')"
    told = f"array_sort({named})[0]"
    first_line = f"substring_index({told}.value, '\\n', 1)"
    numbers = r"\\b0x[0-9a-fA-F]+|[0-9a-fA-F-]{16,}|[0-9]+"
    hint = (
        f"concat({told}.key, ': ', left(regexp_replace({first_line}, '{numbers}', '#'),"
        f" {_TEXT_MAX}))"
    )
    cause = (
        f"coalesce(if(size({named}) > 0, {hint}, null), "
        "case when not is_valid_utf8(cast(body as string)) then 'the body is not UTF-8' "
        "when text rlike '^\\\\s*[\\\\[{]' and try_parse_json(text) is null "
        f"then 'the body is no JSON' else '{NO_HINT}' end)"
    )
    return (
        rows.withColumn("text", F.expr("make_valid_utf8(cast(body as string))"))
        .withColumn("own", F.expr(OWN_PROPERTIES))
        .withColumn("origin_topic", F.expr(_either(RETRY_TOPIC, "DLQ_ORIGIN_TOPIC")))
        .withColumn("origin_id", F.expr(_either(ORIGIN_MESSAGE_ID, "DLQ_ORIGIN_MESSAGE_ID")))
        .withColumn("sharding_key", F.expr(f"properties['{SHARDING_KEY}']"))
        .withColumn("cause", F.expr(cause))
        .drop("properties")
        .withColumnRenamed("own", "properties")
    )


def _either(*names: str) -> str:
    looked_up = ", ".join(f"properties['{name}']" for name in names)
    return f"coalesce({looked_up})"


def edited(letters: Any, edits: Mapping[str, str], to: str, group: str) -> Any:
    """The letters as they would be sent: `new_body`, `new_tags`, `new_keys`, `new_properties`,
    `new_sharding_key`, and `target`. Raises ConfigurationError for what cannot be edited.

    `properties.NAME` sets one property, null takes it away; every expression sees the letter as it
    lies there.
    """
    known = dict.fromkeys(EDITABLE) | {"topic": "origin_topic", "keys": "keys"}
    names = {name: how or name for name, how in known.items()}
    single: dict[str, str] = {}
    for name, how in edits.items():
        part, _, rest = name.partition(".")
        if part == "properties" and rest:
            single[rest] = how
        elif name in EDITABLE:
            names[name] = how
        else:
            raise ConfigurationError(
                f"{name!r} cannot be edited.",
                cure=f"There are {', '.join(EDITABLE)}, and properties.NAME.",
            )
    target = {"origin": names["topic"], "retry": f"'%RETRY%{group}'"}.get(to, f"'{to}'")
    columns = {
        "new_body": f"cast({names['body']} as binary)",
        "new_tags": f"cast({names['tags']} as string)",
        "new_keys": _key_text(letters, names["keys"]),
        "new_sharding_key": f"cast({names['sharding_key']} as string)",
        "new_properties": _properties(names["properties"], single),
        "target": f"cast({target} as string)",
        "read_as": f"cast({names['topic'] if to == 'retry' else target} as string)",
    }
    return letters.selectExpr("*", *(f"{how} as {name}" for name, how in columns.items()))


def _key_text(letters: Any, how: str) -> str:
    kind = letters.selectExpr(f"{how} as it").schema["it"].dataType.simpleString()
    return f"array_join({how}, ' ')" if kind.startswith("array") else f"cast({how} as string)"


def _properties(whole: str, single: Mapping[str, str]) -> str:
    """The map with single entries set, or taken away by a null."""
    if not single:
        return whole
    names = ", ".join(_literal(name) for name in single)
    entries = ", ".join(f"{_literal(name)}, cast({how} as string)" for name, how in single.items())
    rest = f"map_filter({whole}, (name, value) -> name not in ({names}))"
    return f"map_filter(map_concat({rest}, map({entries})), (name, value) -> value is not null)"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@dataclass(frozen=True, slots=True)
class Judge:
    """What becomes of a message that is sent: `subscriptions` of the group by topic (None: not
    known), and the topics that are not there."""

    subscriptions: Mapping[str, tuple[Subscription, ...]] | None
    missing: frozenset[str] = frozenset()

    def verdict(self, row: Mapping[str, Any]) -> tuple[str, str]:
        """(verdict, reason). Never raises a SluiceError."""
        try:
            self._check(row)
        except SluiceError as error:
            return INVALID, str(error)
        if self.subscriptions is None:
            return UNCHECKED, "no member of the group is online, and its filter is not known"
        wanted = self.subscriptions.get(row["read_as"], ())
        if not wanted:
            return FILTERED, f"the group does not subscribe to {row['read_as']!r}"
        message = _as_stored(row)
        for said in wanted:
            _, finding = verdict_on(message, said)
            if finding is not None:
                return FILTERED, finding.what
        return MATCHES, ""

    def _check(self, row: Mapping[str, Any]) -> None:
        target, size = row["target"], row["size"]
        if not target:
            raise ConfigurationError("its origin topic is not known.", cure="Edit its topic.")
        check_topic_to_send(target)
        if target in self.missing:
            raise ConfigurationError(f"the topic {target!r} does not exist.", cure="Create it.")
        if not size or size > BODY_BYTES_MAX:
            raise ConfigurationError(
                f"the body has {size or 0:,} bytes.", cure=f"It takes 1 to {BODY_BYTES_MAX:,}."
            )
        if row["tags"]:
            check_tag(row["tags"])
        check_keys(tuple((row["keys"] or "").split()))
        check_properties(row["properties"])
        total = sum(len(f"{name}{text}".encode()) + 2 for name, text in row["properties"].items())
        if total > PROPERTIES_BYTES_MAX:
            raise ConfigurationError(
                f"the properties have {total:,} bytes.", cure=f"At most {PROPERTIES_BYTES_MAX:,}."
            )


def _as_stored(row: Mapping[str, Any]) -> StoredMessage:
    """The message as a filter will see it."""
    named = {TAGS: row["tags"], KEYS: row["keys"], UNIQ_KEY: row["new_id"], "WAIT": "true"}
    properties = {**row["properties"], **{name: text for name, text in named.items() if text}}
    return StoredMessage(
        row["read_as"], 0, 0, 0, 0, b"", properties, 0, 0, 0, _NOWHERE, 0, _NOWHERE, 0, 0, 0
    )


def judged(rows: Any, judge: Judge) -> Any:
    """The rows with `verdict` and `reason`; bodies do not travel to Python for that."""

    def verdicts(asked: pa.Array) -> pa.Array:
        found = []
        for row in asked.to_pylist():
            row["properties"] = {name: text or "" for name, text in row["properties"] or ()}
            found.append("\x01".join(judge.verdict(row)))
        return pa.array(found, pa.string())

    asked = (
        "struct(target, read_as, new_tags as tags, new_keys as keys, new_properties as properties,"
        " new_id, octet_length(new_body) as size)"
    )
    said = F.arrow_udf(verdicts, "string")(F.expr(asked))
    return (
        rows.withColumn("said", said)
        .withColumn("verdict", F.expr("substring_index(said, '\\u0001', 1)"))
        .withColumn("reason", F.expr("nullif(substring_index(said, '\\u0001', -1), '')"))
        .drop("said")
    )


def numbered(rows: Any, bases: Iterable[tuple[str, int, int]], first_id: str) -> Any:
    """The rows with `new_id`: the id of a row is settled by its place. `bases`: (broker, queue,
    what to add to an offset); `first_id` as `client.identity` makes it."""
    prefix, time = first_id[:20], int(first_id[20:28], 16)
    known = rows.sparkSession.createDataFrame(list(bases), "broker string, queue_id int, base long")
    number = "(queue_offset + base)"
    new_id = (
        f"concat('{prefix}', lpad(hex({time} + {number} div 65536), 8, '0'),"
        f" lpad(hex({number} % 65536), 4, '0'))"
    )
    joined = rows.join(known.hint("broadcast"), ["broker", "queue_id"])
    return joined.withColumn("new_id", F.expr(new_id)).drop("base")
