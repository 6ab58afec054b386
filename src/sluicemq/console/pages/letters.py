"""The pages of dead letters: groups, causes, a dry run of sending them again, and the replay.

A selection is a cluster or single dead letters, among those that were stored until the time in the
address of the page. So dead letters that arrive in the meantime change nothing. The dry run has an
address too. Its button sends the messages that it shows as sendable: they are checked again, and
sent with the oldest first. Each has the id that follows from the place of its dead letter.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from sluicemq.client.admin.dead_letters import (
    RETRY,
    SENDABLE,
    DeadLetterEdit,
    DeadLetterReplay,
    NewestDeadLetters,
    body_changes,
    cluster_dead_letters,
    cluster_key,
    origin_of,
    prepare_replay,
    property_changes,
    send_replay,
)
from sluicemq.console.context import Answer, Context
from sluicemq.console.pages.messages import message_path
from sluicemq.console.parts import fetch_parts
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.message import KEYS, TAGS, StoredMessage
from sluicemq.model.system_names import is_dead_letter_topic
from sluicemq.model.topic import DLQ_PREFIX

BATCH_MAX: Final = 500
"""The number of dead letters that are checked and sent by one request."""
FAILURES_MAX: Final = 3
"""After this many failed sends in a row, the rest of a batch is not tried: each may time out."""
TEXT_MAX: Final = 4_000
"""The longest text of a field of the form, in characters."""
SELECTION: Final = ("origin", "cause", "until")
"""The fields that select dead letters."""
EDITS: Final = ("find", "put", "set", "remove", "tag", "keys", "to", "topic")
"""The fields that edit them."""
PICK: Final = "pick."
"""The prefix of the fields that select single dead letters."""
TARGETS: Final = ("origin", RETRY, "topic")
"""The values of the field `to`."""
SENT = "sent"
FAILED = "failed"
"""The outcomes of a send, in place of a verdict."""


async def show_all(context: Context) -> Answer:
    """Return a page of groups with dead letters.

    The numbers of dead letters are added only to the live part of the page, which it loads by
    itself afterwards.
    """
    search_text = context.query.get("q", "").strip()
    topics = await context.get_cached("topics", context.admin.topics)
    dead_letter_topics = filter(is_dead_letter_topic, topics)
    groups = [topic.removeprefix(DLQ_PREFIX) for topic in dead_letter_topics]
    paged = context.paginate([group for group in groups if search_text.lower() in group.lower()])
    # The page loads the numbers afterwards, because each group needs a request.
    details: dict[str, dict[str, Any]] = {}
    if context.is_live:
        offset_parts = await fetch_parts(
            {group: context.admin.topic_offsets(DLQ_PREFIX + group) for group in paged.rows}
        )
        for group, fetched in offset_parts.items():
            queues = (fetched.value or {}).values()
            details[group] = {
                "reason": fetched.reason,
                "count": sum(queue.offset_max - queue.offset_min for queue in queues),
                "newest_ms": max((queue.last_time_ms for queue in queues), default=0),
            }
    return Answer({"paged": paged, "details": details, "q": search_text})


async def show(context: Context) -> Answer:
    """Return the page with the newest dead letters of a group, grouped by topic and cause."""
    newest = await fetch_newest(context)
    return Answer(
        {
            "group": context.path["group"],
            "found": newest,
            "until_ms": find_until_ms(context, newest),
            "clusters": cluster_dead_letters(newest.messages),
            "address": message_path,
        }
    )


async def show_cluster(context: Context) -> Answer:
    """Return the page where the dead letters with one cause, or all, can be selected and edited."""
    newest = await fetch_newest(context)
    selected = select_letters(context, newest.messages)
    fields = read_fields(context)
    return Answer(
        {
            "group": context.path["group"],
            "paged": context.paginate(selected),
            "address": message_path,
            "pick": pick_name,
            "origin_of": origin_of,
            "origin": fields.get("origin", ""),
            "cause": fields.get("cause", ""),
            "until_ms": find_until_ms(context, newest),
            "targets": TARGETS,
            "most": TEXT_MAX,
            "topics": await context.get_cached("topics", context.admin.topics),
        }
    )


async def dry_run(context: Context) -> Answer:
    """Return the page with what would become of the selection. Nothing is sent."""
    plan = await build_plan(context)
    paged = context.paginate(plan.rows)
    return Answer(describe_batch(context, plan, plan.rows, paged.rows) | {"paged": paged})


async def replay(context: Context) -> Answer:
    """Send the messages of a batch that may be sent, the oldest first; return the outcomes.

    After `FAILURES_MAX` failures in a row, the remaining messages are not tried.
    """
    plan = await build_plan(context)
    outcome_rows: list[Row] = []
    failures_in_a_row = 0
    for row in reversed(plan.rows):  # the oldest first
        letter_replay, verdict, _ = row
        if verdict not in SENDABLE:
            outcome_rows.append(row)
        elif failures_in_a_row >= FAILURES_MAX:
            reason = f"not tried: {FAILURES_MAX} sends in a row have failed."
            outcome_rows.append((letter_replay, FAILED, reason))
        else:
            try:
                await send(context, letter_replay)
            except SluiceError as error:
                failures_in_a_row += 1
                outcome_rows.append((letter_replay, FAILED, str(error)))
            else:
                failures_in_a_row = 0
                outcome_rows.append((letter_replay, SENT, ""))
    values = describe_batch(context, plan, outcome_rows, outcome_rows)
    return Answer(values | {"paged": None}, audit_values=values["counts"])


async def send(context: Context, replay: DeadLetterReplay) -> None:
    """Send the message of a replay. Raises the errors of a send."""
    await context.mq.cluster.run(send_replay(context.mq.sender, replay))


# ---- selections


async def fetch_newest(context: Context) -> NewestDeadLetters:
    """Return the newest dead letters that were stored until the time in the request."""
    until = context.parse_number("until", 0)
    return await context.admin.dead_letters(context.path["group"], until_ms=until or None)


def find_until_ms(context: Context, newest: NewestDeadLetters) -> int:
    """Return the time until which dead letters are selected, in milliseconds since 1970.

    If the request has none, it is the store time of the newest one, or now if there are none.
    """
    last_ms = newest.messages[0].store_time_ms if newest.messages else context.clock.now_ms()
    return context.parse_number("until", last_ms)


def read_fields(context: Context) -> dict[str, str]:
    """Return the fields of the form, or of the query, that select and edit dead letters.

    Raises ConfigurationError if a text to replace or to insert is too long.
    """
    submitted = context.form or context.query
    fields = {name: field_text for name, field_text in submitted.items() if _is_read(name)}
    for name in EDITS:
        length = len(fields.get(name, ""))
        if length > TEXT_MAX:
            raise ConfigurationError(
                f"{name} has {length:,} characters, the limit is {TEXT_MAX:,}.",
                fix="Use the pipeline dead-letters for larger edits.",
            )
    return fields


def _is_read(field_name: str) -> bool:
    """Return whether a field belongs to a selection or to an edit."""
    return field_name in (*SELECTION, *EDITS) or field_name.startswith(PICK)


def pick_name(letter: StoredMessage) -> str:
    """Return the name of the field that selects a dead letter."""
    return f"{PICK}{letter.broker}.{letter.queue_id}.{letter.queue_offset}"


def select_letters(context: Context, letters: list[StoredMessage]) -> list[StoredMessage]:
    """Return the dead letters that the user has picked.

    If none is picked, return those with the chosen origin topic and cause. If no cause is chosen,
    return all.
    """
    fields = read_fields(context)
    picked_names = {name for name in fields if name.startswith(PICK)}
    if picked_names:
        return [letter for letter in letters if pick_name(letter) in picked_names]
    if "cause" not in fields:
        return letters
    selected_key = (fields.get("origin", ""), fields["cause"])
    return [letter for letter in letters if cluster_key(letter) == selected_key]


def parse_edit(fields: Mapping[str, str]) -> DeadLetterEdit:
    """Return the edit of dead letters that the fields of a form describe.

    `find` and `put` are a text and its replacement in bodies, `set` and `remove` change properties.
    Raises ConfigurationError if a field is invalid.
    """
    # None removes a property.
    properties: dict[str, str | None] = dict.fromkeys(fields.get("remove", "").split())
    properties |= _parse_properties(fields.get("set", ""))
    if tag := fields.get("tag", "").strip():
        properties[TAGS] = tag
    if keys := fields.get("keys", "").strip():
        properties[KEYS] = keys

    target = _parse_target(fields)
    # Browsers send the line ends of a text as \r\n.
    find = fields.get("find", "").replace("\r\n", "\n").encode()
    put = fields.get("put", "").replace("\r\n", "\n").encode()
    return DeadLetterEdit(find, put, properties, target)


def _parse_properties(lines: str) -> dict[str, str]:
    """Return properties from lines: "a=1" and "b=2" become {"a": "1", "b": "2"}.

    Blank lines are skipped. Raises ConfigurationError for any other line.
    """
    properties = {}
    for line in lines.splitlines():
        if not line.strip():
            continue
        name, separator, value = line.partition("=")
        if not separator or not name.strip():
            raise ConfigurationError(
                f"{line!r} does not set a property.", fix="Write name=value, one on each line."
            )
        properties[name.strip()] = value
    return properties


def _parse_target(fields: Mapping[str, str]) -> str:
    """Return where the messages are sent: one of `TARGETS`, or the topic that the user named.

    Raises ConfigurationError for another target, or if the target is a topic and none is named.
    """
    target = fields.get("to") or TARGETS[0]
    if target not in TARGETS:
        raise ConfigurationError(
            f"There is no target {target!r}.", fix=f"Choose one of {', '.join(TARGETS)}."
        )
    if target != "topic":
        return target
    topic = fields.get("topic", "").strip()
    if not topic:
        raise ConfigurationError("No topic is named.", fix="Enter one, or choose the origin.")
    return topic


# ---- plans

Row = tuple[DeadLetterReplay, str, str]
"""A message to send, its verdict or outcome, and the reason."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch of a selection of `count` dead letters, which begins at index `begin`.

    `rows` have verdicts. `fields` are the fields of the request, with the time until which dead
    letters are selected.
    """

    rows: list[Row]
    edit: DeadLetterEdit
    fields: dict[str, str]
    begin: int
    count: int


async def build_plan(context: Context) -> Plan:
    """Return the batch of dead letters to send, each with a verdict on whether it would arrive.

    The field `from` says how many of the selected letters are skipped. Messages are checked against
    the present subscription of the group.
    """
    group = context.path["group"]
    newest = await fetch_newest(context)
    fields = read_fields(context)
    begin = max(0, context.parse_number("from", 0))
    fields["until"] = str(find_until_ms(context, newest))
    edit = parse_edit(fields)
    selected = select_letters(context, newest.messages)
    batch = selected[begin : begin + BATCH_MAX]
    replays = [prepare_replay(letter, edit, group) for letter in batch]
    rows = await _judge_replays(context, group, replays)
    return Plan(rows, edit, fields, begin, len(selected))


async def _judge_replays(
    context: Context, group: str, replays: list[DeadLetterReplay]
) -> list[Row]:
    """Return (replay, verdict, reason) for each replay.

    The verdict says whether brokers would accept the message, and whether the group would receive
    it.
    """
    target_topics = {letter_replay.message.topic for letter_replay in replays} - {""}
    read_topics = {letter_replay.read_as for letter_replay in replays} - {""}
    judge = await context.admin.dead_letter_judge(group, target_topics, read_topics)
    rows = []
    for letter_replay in replays:
        verdict, reason = judge.verdict(letter_replay.row)
        rows.append((letter_replay, verdict, reason))
    return rows


def describe_batch(
    context: Context, plan: Plan, rows: list[Row], shown: list[Row]
) -> dict[str, Any]:
    """Return the values of a batch for the template: the number of `rows` with each verdict, etc.

    `shown` are the rows whose changes are shown in detail.
    """
    counts = Counter(verdict for _, verdict, _ in rows)
    end = plan.begin + len(plan.rows)
    next_batch_query = ""
    if end < plan.count:
        next_batch_query = urlencode(plan.fields | {"from": str(end)})
    return {
        "group": context.path["group"],
        "asked": plan.fields | {"from": str(plan.begin)},
        "count": plan.count,
        "counts": dict(counts),
        "begin": plan.begin,
        "end": end,
        "following": next_batch_query,
        "sendable": sum(counts[verdict] for verdict in SENDABLE),
        "address": message_path,
        "shown": [_describe_row(row, plan.edit) for row in shown],
    }


def _describe_row(row: Row, edit: DeadLetterEdit) -> dict[str, Any]:
    """Return what the template shows of one message: its verdict, and what the edit changes."""
    letter_replay, verdict, reason = row
    letter = letter_replay.dead_letter
    body = letter.body_or_raw
    return {
        "letter": letter,
        "to": letter_replay.message.topic,
        "verdict": verdict,
        "reason": reason,
        "new_id": letter_replay.message_id if verdict == SENT else "",
        "body": list(body_changes(body, edit)),
        "places": body.count(edit.find) if edit.find else 0,
        "properties": property_changes(letter, edit),
    }
