"""The pages of messages that are not visible yet: delayed messages and open transactions.

Each broker is asked separately. A RocketMQ broker does not support these requests, and is listed
with that reason. The address of the page selects a row, and a form above the list acts on it.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from sluicemq.client.admin.messages import LISTED_MAX
from sluicemq.client.core.transactions import TransactionState
from sluicemq.console.context import Answer, Context
from sluicemq.console.parts import fetch_parts
from sluicemq.errors import ConfigurationError, MessageNotFoundError

T = TypeVar("T")
OUTCOMES: Final = {
    "commit": (TransactionState.COMMIT, "committed"),
    "rollback": (TransactionState.ROLLBACK, "rolled_back"),
}


async def list_items(
    context: Context,
    request: Callable[..., Awaitable[dict[str, list[T]]]],
    when_ms: Callable[[T], int],
) -> dict[str, Any]:
    """Return the template values of a list of (broker, item), ordered by `when_ms(item)`.

    `request(address=…)` returns the items of one broker in lists. The values contain all `rows`, a
    page of them, and the brokers that refused with their reasons.
    """
    masters = await context.get_cached("masters", context.admin.masters)
    listed = await fetch_parts(
        {name: request(address=address) for name, address in masters.items()}
    )
    rows = [
        (name, item)
        for name, one in listed.items()
        for items in (one.value or {}).values()
        for item in items
    ]
    rows.sort(key=lambda row: when_ms(row[1]))
    return {
        "rows": rows,
        "paged": context.paginate(rows),
        "refused": {name: one.reason for name, one in listed.items() if one.value is None},
        "is_known": any(one.value is not None for one in listed.values()) or not listed,
        "now_ms": context.clock.now_ms(),
        "most": LISTED_MAX,
    }


async def show_delayed(context: Context) -> Answer:
    """Return the page of delayed messages, ordered by due time, of a topic or with a key."""
    topic, key = (context.query.get(name, "").strip() for name in ("topic", "key"))
    request = partial(context.admin.delayed, topic or None, key=key or None)
    values = await list_items(context, request, lambda item: item.due_ms)
    handle = context.query.get("handle", "")
    chosen = next((row for row in values.pop("rows") if row[1].handle == handle), None)
    topics = await context.get_cached("topics", context.admin.topics)
    return Answer({"topic": topic, "key": key, "topics": topics, "chosen": chosen, **values})


async def cancel(context: Context) -> Answer:
    """Recall a delayed message. Raises RequestError if it is too late."""
    address = await broker_address(context)
    require_confirmation(context)
    await context.admin.cancel_delayed(address, context.form.get("handle", ""))
    return redirect_to_list("/delayed", context, "cancelled")


async def show_transactions(context: Context) -> Answer:
    """Return the page of open transactions, the oldest first, of a topic or producer group."""
    topic, group = (context.query.get(name, "").strip() for name in ("topic", "group"))
    request = partial(context.admin.transactions, group=group or None, topic=topic or None)
    values = await list_items(context, request, lambda item: item.began_ms)
    wanted = context.query.get("broker", ""), context.query.get("id", "")
    rows = values.pop("rows")
    chosen = next((row for row in rows if (row[0], row[1].transaction_id) == wanted), None)
    topics = await context.get_cached("topics", context.admin.topics)
    return Answer({"topic": topic, "group": group, "topics": topics, "chosen": chosen, **values})


async def decide(context: Context) -> Answer:
    """Commit or roll back an open transaction.

    Raises ConfigurationError if the form is incomplete, and MessageNotFoundError if the broker has
    no such open transaction.
    """
    found = OUTCOMES.get(context.form.get("outcome", ""))
    if found is None:
        raise ConfigurationError("No outcome is chosen.", fix="Choose commit or rollback.")
    address = await broker_address(context)
    require_confirmation(context)
    state, done = found
    wanted = context.form.get("id", "")
    if await context.admin.resolve_transaction(wanted, state, address=address) is None:
        raise MessageNotFoundError(
            f"The broker has no open transaction {wanted!r}.",
            fix="Reload the list; the transaction may have ended.",
        )
    return redirect_to_list("/transactions", context, done)


async def broker_address(context: Context) -> str:
    """Return the address of the broker that the form names. Raises ConfigurationError."""
    masters = await context.admin.masters()
    name = context.form.get("broker", "")
    if name not in masters:
        raise ConfigurationError(f"There is no broker {name!r}.", fix="Choose one from the list.")
    return masters[name]


def require_confirmation(context: Context) -> None:
    """Raise ConfigurationError if the box of the form is not checked."""
    if context.form.get("sure") != "yes":
        raise ConfigurationError(
            "The confirmation box is not checked.", fix="Check it to confirm the action."
        )


def redirect_to_list(path: str, context: Context, done: str) -> Answer:
    """Return a redirect to the list with the same selection, and the notice `done`."""
    selection = {name: context.form.get(name, "") for name in ("topic", "key", "group")}
    query = {name: value for name, value in selection.items() if value} | {"done": done}
    return Answer(redirect=f"{path}?{urlencode(query)}")
