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
    """Return the page with the messages that the query selects: by id, key or time.

    `by` is one of `WAYS`. A message that is found by its id is not listed: the answer redirects to
    its page. Without the fields that a way needs, nothing is searched.
    """
    query = context.query
    topic = query.get("topic", "").strip()
    id_or_key = query.get("text", "").strip()
    way = query.get("by", "").strip()
    if way not in WAYS:
        way = WAYS[0]
    now_ms = context.clock.now_ms()
    begin_ms = context.parse_time("begin", now_ms - HOUR_MS)
    end_ms = context.parse_time("end", now_ms)

    messages: list[StoredMessage] | None = None  # None means that nothing was searched
    read_count = 0
    if way == "id" and id_or_key:
        message = await context.admin.message_by_id(id_or_key, topic=topic or None, anywhere=False)
        return Answer(redirect=message_path(message))
    if way == "key" and topic and id_or_key:
        messages = await context.admin.messages_by_key(topic, id_or_key, begin_ms=0)
    elif way == "time" and topic:
        scan = await context.admin.messages_between(
            topic, begin_ms, end_ms, where=query.get("where", "").strip(), count_max=PAGE_ROWS
        )
        messages = scan.messages
        read_count = scan.read
    return Answer(
        {
            "topic": topic,
            "by": way,
            "text": id_or_key,
            "where": query.get("where", ""),
            "begin_ms": begin_ms,
            "end_ms": end_ms,
            "found": messages,
            "read": read_count,
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
    """Return the page of one message, with its body in the form that the query value `as` names.

    The default is the most likely form of the body.
    """
    message = await _fetch_message(context)
    settable = settable_properties(message.properties)
    reserved = {name: text for name, text in message.properties.items() if name not in settable}
    body = message.body_or_raw
    forms = bodies.find_forms(body)
    form = context.query.get("as", "")
    if form not in forms:
        form = next(iter(forms))
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
            "reserved": reserved,
            "address": message_path(message),
        }
    )


async def explain(context: Context) -> Answer:
    """Return the page that explains what happened to a message in each group of its topic."""
    message_id = context.path["message_id"]
    topic = context.path["topic"]
    _, explanations = await context.admin.explain_message(message_id, topic=topic)
    return Answer({"found": explanations, "message_id": message_id, "topic": topic})


async def resend(context: Context) -> Answer:
    """Send a copy of a message to its topic, and redirect to the page of the copy.

    The copy has the same body, tag, keys and properties, and a new id. Raises ConfigurationError if
    the user has not confirmed it.
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
    """Return the page with the trace of one message as a timeline.

    Each step has a bar: `x` and `width` are in pixels of the chart. Without an id in the query, the
    page is empty.
    """
    message_id = context.query.get("id", "").strip()
    if not message_id:
        return Answer({"id": "", "told": None, "bars": []})
    timeline = await context.admin.trace(message_id, anywhere=False)
    begin_ms = min((step.time_ms for step in timeline.steps), default=0)
    end_ms = max((step.time_ms + (step.cost_ms or 0) for step in timeline.steps), default=0)
    span_ms = end_ms - begin_ms
    px_per_ms = CHART_PX / max(1, span_ms)
    bars = []
    for step in timeline.steps:
        after_ms = step.time_ms - begin_ms
        width = round((step.cost_ms or 0) * px_per_ms, 1)
        bars.append(
            {
                "step": step,
                "x": round(after_ms * px_per_ms, 1),
                "width": max(3.0, width),
                "after_ms": after_ms,
            }
        )
    return Answer({"id": message_id, "told": timeline, "bars": bars, "span_ms": span_ms})
