"""Dead letters: which groups have some, why they died, what would become of them if they were sent
now, edited or not, and sending them.

A selection is a cluster or single letters, of what was stored until the time in the address: what
comes meanwhile changes nothing. The dry run is an address too, and its button sends what it shows
as sendable: judged once more, the oldest first, each with the id that follows from its place.
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
from sluicemq.console.pages.messages import address
from sluicemq.console.parts import parts
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.message import KEYS, TAGS, StoredMessage
from sluicemq.model.system_names import is_dead_letter_topic
from sluicemq.model.topic import DLQ_PREFIX

BATCH_MAX: Final = 500
FAILURES_MAX: Final = 3
"""So many sends that fail in a row end a batch: each may have waited for its time-out."""
TEXT_MAX: Final = 4_000
SELECTION: Final = ("origin", "cause", "until")
EDITS: Final = ("find", "put", "set", "remove", "tag", "keys", "to", "topic")
PICK: Final = "pick."
TARGETS: Final = ("origin", RETRY, "topic")
SENT, FAILED = "sent", "failed"


async def show_all(context: Context) -> Answer:
    """A page of groups; how many letters each has comes with the live part."""
    wanted = context.query.get("q", "").strip()
    names = await context.listed("topics", context.admin.topics)
    groups = [name.removeprefix(DLQ_PREFIX) for name in names if is_dead_letter_topic(name)]
    paged = context.paged([name for name in groups if wanted.lower() in name.lower()])
    details: dict[str, dict[str, Any]] = {}
    if context.is_live:
        told = await parts(
            {name: context.admin.topic_offsets(DLQ_PREFIX + name) for name in paged.rows}
        )
        for name, one in told.items():
            queues = (one.value or {}).values()
            details[name] = {
                "reason": one.reason,
                "count": sum(queue.offset_max - queue.offset_min for queue in queues),
                "newest_ms": max((queue.last_time_ms for queue in queues), default=0),
            }
    return Answer({"paged": paged, "details": details, "q": wanted})


async def show(context: Context) -> Answer:
    """The newest letters of a group by cause."""
    found = await newest(context)
    return Answer({
        "group": context.path["group"], "found": found, "until_ms": until_ms(context, found),
        "clusters": cluster_dead_letters(found.messages), "address": address,
    })  # fmt: skip


async def show_cluster(context: Context) -> Answer:
    """The letters of one cluster, or all: to choose from, and to edit."""
    found = await newest(context)
    chosen = selected(context, found.messages)
    asked = asked_of(context)
    return Answer({
        "group": context.path["group"], "paged": context.paged(chosen), "address": address,
        "pick": pick_of, "origin_of": origin_of,
        "origin": asked.get("origin", ""), "cause": asked.get("cause", ""),
        "until_ms": until_ms(context, found), "targets": TARGETS, "most": TEXT_MAX,
        "topics": await context.listed("topics", context.admin.topics),
    })  # fmt: skip


async def dry_run(context: Context) -> Answer:
    """What would become of a selection: nothing is sent."""
    plan = await planned(context)
    paged = context.paged(plan.rows)
    return Answer(said_of(context, plan, plan.rows, paged.rows) | {"paged": paged})


async def replay(context: Context) -> Answer:
    """Sends what is sendable of one batch."""
    plan = await planned(context)
    rows: list[Row] = []
    failures = 0
    for one, verdict, reason in reversed(plan.rows):  # the oldest first
        outcome, why = verdict, reason
        if verdict in SENDABLE and failures >= FAILURES_MAX:
            outcome, why = FAILED, f"not tried: {FAILURES_MAX} sends in a row have failed."
        elif verdict in SENDABLE:
            try:
                await send(context, one)
            except SluiceError as error:
                outcome, why, failures = FAILED, str(error), failures + 1
            else:
                outcome, why, failures = SENT, "", 0
        rows.append((one, outcome, why))
    values = said_of(context, plan, rows, rows)
    return Answer(values | {"paged": None}, noted=values["counts"])


async def send(context: Context, replay: DeadLetterReplay) -> None:
    """Send the message of a replay. Raises the errors of a send."""
    await context.mq.cluster.run(send_replay(context.mq.sender, replay))


# ------------------------------------------------------------------------------ selections


async def newest(context: Context) -> NewestDeadLetters:
    """The newest letters, until the time of the address."""
    until = context.number("until", 0)
    return await context.admin.dead_letters(context.path["group"], until_ms=until or None)


def until_ms(context: Context, found: NewestDeadLetters) -> int:
    """The time that names these letters, whatever comes meanwhile."""
    last_ms = found.messages[0].store_time_ms if found.messages else context.clock.now_ms()
    return context.number("until", last_ms)


def asked_of(context: Context) -> dict[str, str]:
    """Selection and edit, as query or form say them. Raises ConfigurationError."""
    given = context.form or context.query
    asked = {
        name: text for name, text in given.items()
        if name in (*SELECTION, *EDITS) or name.startswith(PICK)
    }  # fmt: skip
    for name in EDITS:
        if len(asked.get(name, "")) > TEXT_MAX:
            raise ConfigurationError(
                f"{name} has {len(asked[name]):,} characters, the limit is {TEXT_MAX:,}.",
                fix="Larger edits are for the pipeline dead-letters.",
            )
    return asked


def pick_of(letter: StoredMessage) -> str:
    """The name of a letter's field."""
    return f"{PICK}{letter.broker}.{letter.queue_id}.{letter.queue_offset}"


def selected(context: Context, letters: list[StoredMessage]) -> list[StoredMessage]:
    """The letters that are ticked, else those of the cluster, else all."""
    asked = asked_of(context)
    picked = {name for name in asked if name.startswith(PICK)}
    if picked:
        return [one for one in letters if pick_of(one) in picked]
    if "cause" not in asked:
        return letters
    key = asked.get("origin", ""), asked["cause"]
    return [one for one in letters if cluster_key(one) == key]


def edit_of(asked: Mapping[str, str]) -> DeadLetterEdit:
    """What the form says. Raises ConfigurationError."""
    properties: dict[str, str | None] = dict.fromkeys(asked.get("remove", "").split())
    for line in asked.get("set", "").splitlines():
        name, is_set, value = line.partition("=")
        if line.strip() and not (is_set and name.strip()):
            raise ConfigurationError(
                f"{line!r} sets no property.", fix="Write name=value, one a line."
            )
        properties |= {name.strip(): value} if line.strip() else {}
    named = {TAGS: asked.get("tag", "").strip(), KEYS: asked.get("keys", "").strip()}
    properties |= {name: text for name, text in named.items() if text}
    to = asked.get("to") or TARGETS[0]
    if to not in TARGETS:
        raise ConfigurationError(f"to is {to!r}.", fix=f"It is one of {', '.join(TARGETS)}.")
    if to == "topic" and not asked.get("topic", "").strip():
        raise ConfigurationError("no topic is named.", fix="Name one, or choose the origin.")
    find, put = (asked.get(name, "").replace("\r\n", "\n").encode() for name in ("find", "put"))
    return DeadLetterEdit(find, put, properties, asked["topic"].strip() if to == "topic" else to)


# ------------------------------------------------------------------------------------ plans


Row = tuple[DeadLetterReplay, str, str]
"""With its verdict, or what became of it, and the reason."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch of a selection of `count` letters, from number `begin` on: each with its verdict
    and reason. `asked` says it again."""

    rows: list[Row]
    edit: DeadLetterEdit
    asked: dict[str, str]
    begin: int
    count: int


async def planned(context: Context) -> Plan:
    """What would be sent, judged by what the group subscribes to now."""
    group, found = context.path["group"], await newest(context)
    asked, begin = asked_of(context), max(0, context.number("from", 0))
    asked["until"] = str(until_ms(context, found))
    edit, chosen = edit_of(asked), selected(context, found.messages)
    replays = [prepare_replay(one, edit, group) for one in chosen[begin : begin + BATCH_MAX]]
    judge = await context.admin.dead_letter_judge(
        group,
        {one.message.topic for one in replays} - {""},
        {one.read_as for one in replays} - {""},
    )
    rows = [(one, *judge.verdict(one.row)) for one in replays]
    return Plan(rows, edit, asked, begin, len(chosen))


def said_of(context: Context, plan: Plan, rows: list[Row], shown: list[Row]) -> dict[str, Any]:
    """What both pages say of a batch: of all its rows how many, of those shown what changes."""
    counts, group = Counter(verdict for _, verdict, _ in rows), context.path["group"]
    end, find = plan.begin + len(plan.rows), plan.edit.find
    following = urlencode(plan.asked | {"from": str(end)}) if end < plan.count else ""
    return {
        "group": group, "asked": plan.asked | {"from": str(plan.begin)}, "count": plan.count,
        "counts": dict(counts), "begin": plan.begin, "end": end, "following": following,
        "sendable": sum(counts[verdict] for verdict in SENDABLE), "address": address,
        "shown": [
            {
                "letter": one.dead_letter, "to": one.message.topic, "verdict": verdict,
                "reason": why,
                "new_id": one.message_id if verdict == SENT else "",
                "body": list(body_changes(one.dead_letter.body_or_raw, plan.edit)),
                "places": one.dead_letter.body_or_raw.count(find) if find else 0,
                "properties": property_changes(one.dead_letter, plan.edit),
            }
            for one, verdict, why in shown
        ],
    }  # fmt: skip
