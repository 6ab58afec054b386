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
    """Return a page of groups. The numbers of their dead letters are only in the live part."""
    wanted = context.query.get("q", "").strip()
    names = await context.get_cached("topics", context.admin.topics)
    groups = [name.removeprefix(DLQ_PREFIX) for name in names if is_dead_letter_topic(name)]
    paged = context.paginate([name for name in groups if wanted.lower() in name.lower()])
    details: dict[str, dict[str, Any]] = {}
    if context.is_live:
        offsets = await fetch_parts(
            {name: context.admin.topic_offsets(DLQ_PREFIX + name) for name in paged.rows}
        )
        for name, one in offsets.items():
            queues = (one.value or {}).values()
            details[name] = {
                "reason": one.reason,
                "count": sum(queue.offset_max - queue.offset_min for queue in queues),
                "newest_ms": max((queue.last_time_ms for queue in queues), default=0),
            }
    return Answer({"paged": paged, "details": details, "q": wanted})


async def show(context: Context) -> Answer:
    """Return the page with the newest dead letters of a group, by cause."""
    found = await fetch_newest(context)
    return Answer(
        {
            "group": context.path["group"],
            "found": found,
            "until_ms": until_ms(context, found),
            "clusters": cluster_dead_letters(found.messages),
            "address": message_path,
        }
    )


async def show_cluster(context: Context) -> Answer:
    """Return the page where the dead letters of one cluster, or all, can be selected and edited."""
    found = await fetch_newest(context)
    chosen = select(context, found.messages)
    fields = read_fields(context)
    return Answer(
        {
            "group": context.path["group"],
            "paged": context.paginate(chosen),
            "address": message_path,
            "pick": pick_name,
            "origin_of": origin_of,
            "origin": fields.get("origin", ""),
            "cause": fields.get("cause", ""),
            "until_ms": until_ms(context, found),
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
    """Send the sendable messages of one batch, and return the page with the outcomes."""
    plan = await build_plan(context)
    rows: list[Row] = []
    failures = 0
    for one, verdict, verdict_reason in reversed(plan.rows):  # the oldest first
        outcome = verdict
        reason = verdict_reason
        if verdict in SENDABLE and failures >= FAILURES_MAX:
            outcome = FAILED
            reason = f"not tried: {FAILURES_MAX} sends in a row have failed."
        elif verdict in SENDABLE:
            try:
                await send(context, one)
            except SluiceError as error:
                outcome = FAILED
                reason = str(error)
                failures = failures + 1
            else:
                outcome = SENT
                reason = ""
                failures = 0
        rows.append((one, outcome, reason))
    values = describe_batch(context, plan, rows, rows)
    return Answer(values | {"paged": None}, audit_values=values["counts"])


async def send(context: Context, replay: DeadLetterReplay) -> None:
    """Send the message of a replay. Raises the errors of a send."""
    await context.mq.cluster.run(send_replay(context.mq.sender, replay))


# ---- selections


async def fetch_newest(context: Context) -> NewestDeadLetters:
    """Return the newest dead letters that were stored until the time in the request."""
    until = context.parse_number("until", 0)
    return await context.admin.dead_letters(context.path["group"], until_ms=until or None)


def until_ms(context: Context, found: NewestDeadLetters) -> int:
    """Return the time until which dead letters are selected, in milliseconds since 1970.

    If the request has none, it is the store time of the newest one, or now if there are none.
    """
    last_ms = found.messages[0].store_time_ms if found.messages else context.clock.now_ms()
    return context.parse_number("until", last_ms)


def read_fields(context: Context) -> dict[str, str]:
    """Return the fields of the selection and of the edit, from the form or the query.

    Raises ConfigurationError if an edit is too long.
    """
    given = context.form or context.query
    fields = {
        name: text
        for name, text in given.items()
        if name in (*SELECTION, *EDITS) or name.startswith(PICK)
    }
    for name in EDITS:
        if len(fields.get(name, "")) > TEXT_MAX:
            raise ConfigurationError(
                f"{name} has {len(fields[name]):,} characters, the limit is {TEXT_MAX:,}.",
                fix="Use the pipeline dead-letters for larger edits.",
            )
    return fields


def pick_name(letter: StoredMessage) -> str:
    """Return the name of the field that selects a dead letter."""
    return f"{PICK}{letter.broker}.{letter.queue_id}.{letter.queue_offset}"


def select(context: Context, letters: list[StoredMessage]) -> list[StoredMessage]:
    """Return the dead letters that are picked, else those of the cluster, else all."""
    fields = read_fields(context)
    picked = {name for name in fields if name.startswith(PICK)}
    if picked:
        return [one for one in letters if pick_name(one) in picked]
    if "cause" not in fields:
        return letters
    key = fields.get("origin", ""), fields["cause"]
    return [one for one in letters if cluster_key(one) == key]


def parse_edit(fields: Mapping[str, str]) -> DeadLetterEdit:
    """Return the edit in the fields of a form. Raises ConfigurationError if one is invalid."""
    properties: dict[str, str | None] = dict.fromkeys(fields.get("remove", "").split())
    for line in fields.get("set", "").splitlines():
        name, is_set, value = line.partition("=")
        if line.strip() and not (is_set and name.strip()):
            raise ConfigurationError(
                f"{line!r} does not set a property.", fix="Write name=value, one on each line."
            )
        properties |= {name.strip(): value} if line.strip() else {}
    named = {TAGS: fields.get("tag", "").strip(), KEYS: fields.get("keys", "").strip()}
    properties |= {name: text for name, text in named.items() if text}
    to = fields.get("to") or TARGETS[0]
    if to not in TARGETS:
        raise ConfigurationError(
            f"There is no target {to!r}.", fix=f"Choose one of {', '.join(TARGETS)}."
        )
    if to == "topic" and not fields.get("topic", "").strip():
        raise ConfigurationError("No topic is named.", fix="Enter one, or choose the origin.")
    find, put = (fields.get(name, "").replace("\r\n", "\n").encode() for name in ("find", "put"))
    target = fields["topic"].strip() if to == "topic" else to
    return DeadLetterEdit(find, put, properties, target)


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
    """Return the batch that the request names, checked against the group's present subscription."""
    group = context.path["group"]
    found = await fetch_newest(context)
    fields = read_fields(context)
    begin = max(0, context.parse_number("from", 0))
    fields["until"] = str(until_ms(context, found))
    edit = parse_edit(fields)
    chosen = select(context, found.messages)
    replays = [prepare_replay(one, edit, group) for one in chosen[begin : begin + BATCH_MAX]]
    judge = await context.admin.dead_letter_judge(
        group,
        {one.message.topic for one in replays} - {""},
        {one.read_as for one in replays} - {""},
    )
    rows = [(one, *judge.verdict(one.row)) for one in replays]
    return Plan(rows, edit, fields, begin, len(chosen))


def describe_batch(
    context: Context, plan: Plan, rows: list[Row], shown: list[Row]
) -> dict[str, Any]:
    """Return the template values of a batch: how many `rows` have each verdict, and what changes.

    `shown` are the rows whose changes are shown.
    """
    counts = Counter(verdict for _, verdict, _ in rows)
    group = context.path["group"]
    end = plan.begin + len(plan.rows)
    find = plan.edit.find
    following = urlencode(plan.fields | {"from": str(end)}) if end < plan.count else ""
    return {
        "group": group,
        "asked": plan.fields | {"from": str(plan.begin)},
        "count": plan.count,
        "counts": dict(counts),
        "begin": plan.begin,
        "end": end,
        "following": following,
        "sendable": sum(counts[verdict] for verdict in SENDABLE),
        "address": message_path,
        "shown": [
            {
                "letter": one.dead_letter,
                "to": one.message.topic,
                "verdict": verdict,
                "reason": reason,
                "new_id": one.message_id if verdict == SENT else "",
                "body": list(body_changes(one.dead_letter.body_or_raw, plan.edit)),
                "places": one.dead_letter.body_or_raw.count(find) if find else 0,
                "properties": property_changes(one.dead_letter, plan.edit),
            }
            for one, verdict, reason in shown
        ],
    }
