"""Messages: found by key, id, or time and SQL92; one with its body, and why a group has it or not;
sent again.
"""

from typing import Final
from urllib.parse import quote

from sluicemq.console import bodies
from sluicemq.console.context import PAGE_ROWS, Answer, Context
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import StoredMessage
from sluicemq.model.properties import settable_properties

WAYS: Final = "time", "key", "id"
HOUR_MS: Final = 3_600_000


async def search(context: Context) -> Answer:
    """What the query asks for: `by` one of `WAYS`, in a topic."""
    query = context.query
    topic, by, text = (query.get(name, "").strip() for name in ("topic", "by", "text"))
    by = by if by in WAYS else WAYS[0]
    now_ms = context.clock.now_ms()
    begin_ms = context.time("begin", now_ms - HOUR_MS)
    end_ms = context.time("end", now_ms)
    found: list[StoredMessage] | None = None
    read = 0
    if by == "id" and text:
        message = await context.admin.message_by_id(text, topic=topic or None, anywhere=False)
        return Answer(redirect=address(message))
    if by == "key" and topic and text:
        found = await context.admin.messages_by_key(topic, text, begin_ms=0)
    elif by == "time" and topic:
        scan = await context.admin.messages_between(
            topic, begin_ms, end_ms, where=query.get("where", "").strip(), count_max=PAGE_ROWS
        )
        found, read = scan.messages, scan.read
    return Answer(
        {
            "topic": topic, "by": by, "text": text, "where": query.get("where", ""),
            "begin_ms": begin_ms, "end_ms": end_ms, "found": found, "read": read,
            "topics": await context.listed("topics", context.admin.topics), "address": address,
            "most": PAGE_ROWS,
        }
    )  # fmt: skip


def address(message: StoredMessage) -> str:
    """Where a message is shown."""
    return f"/messages/{quote(message.topic, safe='')}/{quote(message.message_id, safe='')}"


async def _message(context: Context) -> StoredMessage:
    """Raises MessageNotFoundError."""
    path = context.path
    return await context.admin.message_by_id(path["message_id"], topic=path["topic"])


async def show(context: Context) -> Answer:
    """One message."""
    message = await _message(context)
    own = settable_properties(message.properties)
    body = message.body_or_raw
    forms = bodies.forms(body)
    wanted = context.query.get("as", "")
    form = wanted if wanted in forms else next(iter(forms))
    return Answer({
        "message": message,
        "forms": list(forms),
        "form": form,
        "body": forms[form](),
        "body_bytes": len(body),
        "body_error": message.body_error,
        "is_cut": len(body) > bodies.SHOWN_BYTES_MAX,
        "own": own,
        "reserved": {
            name: value for name, value in message.properties.items() if name not in own
        },
        "address": address(message),
    })  # fmt: skip


async def explain(context: Context) -> Answer:
    """What became of it in each group that reads its topic."""
    path = context.path
    _, found = await context.admin.explain_message(path["message_id"], topic=path["topic"])
    return Answer({"found": found, "message_id": path["message_id"], "topic": path["topic"]})


async def resend(context: Context) -> Answer:
    """Sends its body, tag, keys and properties to its topic once more, as a new message."""
    message = await _message(context)
    if context.form.get("sure") != "yes":
        raise ConfigurationError("the box is not ticked.", fix="Tick it to send once more.")
    own = settable_properties(message.properties)
    sent = await context.mq.send(
        message.topic, message.body, tag=message.tag, keys=message.keys, properties=own
    )
    return Answer(
        redirect=f"/messages/{quote(message.topic, safe='')}/{sent.message_id}?done=resent"
    )


# --------------------------------------------------------------------------------- its way

CHART_PX: Final = 640
"""The width of the picture, in units of its own."""


async def trace(context: Context) -> Answer:
    """The way of one message, as traces tell it."""
    message_id = context.query.get("id", "").strip()
    if not message_id:
        return Answer({"id": "", "told": None, "bars": []})
    told = await context.admin.trace(message_id, anywhere=False)
    begin_ms = min((step.time_ms for step in told.steps), default=0)
    end_ms = max((step.time_ms + (step.cost_ms or 0) for step in told.steps), default=0)
    scale = CHART_PX / max(1, end_ms - begin_ms)
    bars = [
        {
            "step": step,
            "x": round((step.time_ms - begin_ms) * scale, 1),
            "width": max(3.0, round((step.cost_ms or 0) * scale, 1)),
            "after_ms": step.time_ms - begin_ms,
        }
        for step in told.steps
    ]
    return Answer({"id": message_id, "told": told, "bars": bars, "span_ms": end_ms - begin_ms})
