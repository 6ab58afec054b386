"""The pages of messages: search, one message, what became of it, sending it again, its trace."""

from typing import Final
from urllib.parse import quote

from sluicemq.console import bodies
from sluicemq.console.context import PAGE_ROWS, Answer, Context
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import StoredMessage
from sluicemq.model.properties import settable_properties

WAYS: Final = "time", "key", "id"
"""The ways to search."""
HOUR_MS: Final = 3_600_000


async def search(context: Context) -> Answer:
    """Return the page with the messages that the query asks for, or redirect to the only one.

    `by` in the query is one of `WAYS`.
    """
    query = context.query
    topic, by, text = (query.get(name, "").strip() for name in ("topic", "by", "text"))
    by = by if by in WAYS else WAYS[0]
    now_ms = context.clock.now_ms()
    begin_ms = context.parse_time("begin", now_ms - HOUR_MS)
    end_ms = context.parse_time("end", now_ms)
    found: list[StoredMessage] | None = None
    read = 0
    if by == "id" and text:
        message = await context.admin.message_by_id(text, topic=topic or None, anywhere=False)
        return Answer(redirect=message_path(message))
    if by == "key" and topic and text:
        found = await context.admin.messages_by_key(topic, text, begin_ms=0)
    elif by == "time" and topic:
        scan = await context.admin.messages_between(
            topic, begin_ms, end_ms, where=query.get("where", "").strip(), count_max=PAGE_ROWS
        )
        found = scan.messages
        read = scan.read
    return Answer(
        {
            "topic": topic,
            "by": by,
            "text": text,
            "where": query.get("where", ""),
            "begin_ms": begin_ms,
            "end_ms": end_ms,
            "found": found,
            "read": read,
            "topics": await context.get_cached("topics", context.admin.topics),
            "address": message_path,
            "most": PAGE_ROWS,
        }
    )


def message_path(message: StoredMessage) -> str:
    """Return the path of the page of a message."""
    return f"/messages/{quote(message.topic, safe='')}/{quote(message.message_id, safe='')}"


async def _fetch_message(context: Context) -> StoredMessage:
    """Return the message that the path names. Raises MessageNotFoundError."""
    path = context.path
    return await context.admin.message_by_id(path["message_id"], topic=path["topic"])


async def show(context: Context) -> Answer:
    """Return the page of one message."""
    message = await _fetch_message(context)
    settable = settable_properties(message.properties)
    body = message.body_or_raw
    forms = bodies.find_forms(body)
    wanted = context.query.get("as", "")
    form = wanted if wanted in forms else next(iter(forms))
    return Answer(
        {
            "message": message,
            "forms": list(forms),
            "form": form,
            "body": forms[form](),
            "body_bytes": len(body),
            "body_error": message.body_error,
            "is_cut": len(body) > bodies.SHOWN_BYTES_MAX,
            "own": settable,
            "reserved": {
                name: value for name, value in message.properties.items() if name not in settable
            },
            "address": message_path(message),
        }
    )


async def explain(context: Context) -> Answer:
    """Return the page with what became of a message in each group that reads its topic."""
    path = context.path
    _, found = await context.admin.explain_message(path["message_id"], topic=path["topic"])
    return Answer({"found": found, "message_id": path["message_id"], "topic": path["topic"]})


async def resend(context: Context) -> Answer:
    """Send the body, tag, keys and properties of a message to its topic, as a new message.

    Raises ConfigurationError if the user has not confirmed that.
    """
    message = await _fetch_message(context)
    if context.form.get("sure") != "yes":
        raise ConfigurationError(
            "The confirmation box is not checked.", fix="Check it to send the message again."
        )
    settable = settable_properties(message.properties)
    sent = await context.mq.send(
        message.topic, message.body, tag=message.tag, keys=message.keys, properties=settable
    )
    return Answer(
        redirect=f"/messages/{quote(message.topic, safe='')}/{sent.message_id}?done=resent"
    )


# ---- its trace

CHART_PX: Final = 640
"""The width of the timeline, in units of the SVG."""


async def trace(context: Context) -> Answer:
    """Return the page with the trace of one message as a timeline."""
    message_id = context.query.get("id", "").strip()
    if not message_id:
        return Answer({"id": "", "told": None, "bars": []})
    found = await context.admin.trace(message_id, anywhere=False)
    begin_ms = min((step.time_ms for step in found.steps), default=0)
    end_ms = max((step.time_ms + (step.cost_ms or 0) for step in found.steps), default=0)
    scale = CHART_PX / max(1, end_ms - begin_ms)
    bars = [
        {
            "step": step,
            "x": round((step.time_ms - begin_ms) * scale, 1),
            "width": max(3.0, round((step.cost_ms or 0) * scale, 1)),
            "after_ms": step.time_ms - begin_ms,
        }
        for step in found.steps
    ]
    return Answer({"id": message_id, "told": found, "bars": bars, "span_ms": end_ms - begin_ms})
