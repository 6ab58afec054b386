"""What nobody gets yet: messages that wait for their time, and transactions without a verdict.

Each broker is asked for itself: one of RocketMQ's does not know these questions, and is shown with
that reason beside those that do. A row is chosen by the address, and decided in a form above the
list.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from sluicemq.client.admin.messages import LISTED_MAX
from sluicemq.client.core.transactions import TransactionState
from sluicemq.console.context import Answer, Context
from sluicemq.console.parts import parts
from sluicemq.errors import ConfigurationError, MessageNotFoundError

T = TypeVar("T")
OUTCOMES: Final = {
    "commit": (TransactionState.COMMIT, "committed"),
    "rollback": (TransactionState.ROLLBACK, "rolled_back"),
}


async def listed(
    context: Context,
    question: Callable[..., Awaitable[dict[str, list[T]]]],
    when_ms: Callable[[T], int],
) -> dict[str, Any]:
    """What all masters list as (broker, item), by time: a page of it; and who cannot say."""
    masters = await context.listed("masters", context.admin.masters)
    told = await parts({name: question(address=address) for name, address in masters.items()})
    rows = [
        (name, item)
        for name, one in told.items()
        for items in (one.value or {}).values()
        for item in items
    ]
    rows.sort(key=lambda row: when_ms(row[1]))
    return {
        "rows": rows,
        "paged": context.paged(rows),
        "refused": {name: one.reason for name, one in told.items() if one.value is None},
        "is_known": any(one.value is not None for one in told.values()) or not told,
        "now_ms": context.clock.now_ms(),
        "most": LISTED_MAX,
    }


async def show_delayed(context: Context) -> Answer:
    """What waits, that which is due first on top; of a topic, or with a key."""
    topic, key = (context.query.get(name, "").strip() for name in ("topic", "key"))
    ask = partial(context.admin.delayed, topic or None, key=key or None)
    values = await listed(context, ask, lambda item: item.due_ms)
    handle = context.query.get("handle", "")
    chosen = next((row for row in values.pop("rows") if row[1].handle == handle), None)
    topics = await context.listed("topics", context.admin.topics)
    return Answer({"topic": topic, "key": key, "topics": topics, "chosen": chosen, **values})


async def cancel(context: Context) -> Answer:
    """Takes one back. Raises RequestError when it is too late."""
    address = await address_of(context)
    expect_sure(context)
    await context.admin.cancel_delayed(address, context.form.get("handle", ""))
    return back_to("/delayed", context, "cancelled")


async def show_transactions(context: Context) -> Answer:
    """Those without a verdict, the oldest on top; of a topic, or a producer group."""
    topic, group = (context.query.get(name, "").strip() for name in ("topic", "group"))
    ask = partial(context.admin.transactions, group=group or None, topic=topic or None)
    values = await listed(context, ask, lambda item: item.began_ms)
    wanted = context.query.get("id", "")
    at = context.query.get("broker", "")
    rows = values.pop("rows")
    chosen = next((row for row in rows if (row[0], row[1].transaction_id) == (at, wanted)), None)
    topics = await context.listed("topics", context.admin.topics)
    return Answer({"topic": topic, "group": group, "topics": topics, "chosen": chosen, **values})


async def decide(context: Context) -> Answer:
    """Commits or rolls back. Raises MessageNotFoundError when it is undecided nowhere."""
    found = OUTCOMES.get(context.form.get("outcome", ""))
    if found is None:
        raise ConfigurationError("no outcome is chosen.", fix="Choose one of the two.")
    address = await address_of(context)
    expect_sure(context)
    state, done = found
    wanted = context.form.get("id", "")
    if await context.admin.resolve_transaction(wanted, state, address=address) is None:
        raise MessageNotFoundError(
            f"the broker has no undecided transaction {wanted!r}.",
            fix="It may be decided already.",
        )
    return back_to("/transactions", context, done)


async def address_of(context: Context) -> str:
    """Of the broker that the form names. Raises ConfigurationError."""
    masters, name = await context.admin.masters(), context.form.get("broker", "")
    if name not in masters:
        raise ConfigurationError(f"there is no broker {name!r}.", fix="Choose from the list.")
    return masters[name]


def expect_sure(context: Context) -> None:
    """Raises ConfigurationError."""
    if context.form.get("sure") != "yes":
        raise ConfigurationError("the box is not ticked.", fix="Tick it if it is what you want.")


def back_to(path: str, context: Context, done: str) -> Answer:
    """The list as it was looked at, saying what is done."""
    kept = {name: context.form.get(name, "") for name in ("topic", "key", "group")}
    query = {name: value for name, value in kept.items() if value} | {"done": done}
    return Answer(redirect=f"{path}?{urlencode(query)}")
