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
    """Fetch the waiting items of all brokers, and return values for the template.

    `request(address=…)` returns the items of one broker. `rows` are pairs (broker, item), sorted by
    `when_ms(item)`, and `paged` is a page of them. `refused` maps brokers that did not answer to
    the reasons.
    """
    masters = await context.get_cached("masters", context.admin.masters)
    listings = await fetch_parts(
        {broker: request(address=address) for broker, address in masters.items()}
    )
    rows: list[tuple[str, T]] = []
    refused: dict[str, str] = {}
    for broker, listing in listings.items():
        if listing.value is None:
            refused[broker] = listing.reason
            continue
        for items in listing.value.values():
            rows += [(broker, item) for item in items]
    rows.sort(key=lambda row: when_ms(row[1]))
    has_answer = len(refused) < len(listings)
    return {
        "rows": rows,
        "paged": context.paginate(rows),
        "refused": refused,
        "is_known": has_answer or not listings,
        "now_ms": context.clock.now_ms(),
        "most": LISTED_MAX,
    }


async def show_delayed(context: Context) -> Answer:
    """Return the page of messages that wait for their delivery time, the next one first.

    The query selects them by topic and key. A message whose handle is in the query is shown in
    detail.
    """
    topic = context.query.get("topic", "").strip()
    key = context.query.get("key", "").strip()
    request = partial(context.admin.delayed, topic or None, key=key or None)
    values = await list_items(context, request, lambda delayed: delayed.due_ms)

    # The row that the address of the page selects.
    handle = context.query.get("handle", "")
    rows = values.pop("rows")
    chosen_row = next((row for row in rows if row[1].handle == handle), None)
    topics = await context.get_cached("topics", context.admin.topics)
    return Answer({"topic": topic, "key": key, "topics": topics, "chosen": chosen_row, **values})


async def cancel(context: Context) -> Answer:
    """Recall a delayed message, so that it is not delivered, and redirect to the list.

    Raises ConfigurationError if the user has not confirmed it, RequestError if it is too late.
    """
    address = await find_broker_address(context)
    require_confirmation(context)
    await context.admin.cancel_delayed(address, context.form.get("handle", ""))
    return redirect_to_list("/delayed", context, "cancelled")


async def show_transactions(context: Context) -> Answer:
    """Return the page of open transactions, the oldest first.

    The query selects them by topic and producer group. A transaction whose id and broker are in the
    query is shown in detail.
    """
    topic = context.query.get("topic", "").strip()
    group = context.query.get("group", "").strip()
    request = partial(context.admin.transactions, group=group or None, topic=topic or None)
    values = await list_items(context, request, lambda transaction: transaction.began_ms)

    # The row that the address of the page selects.
    selection = (context.query.get("broker", ""), context.query.get("id", ""))
    chosen_row = None
    for broker, transaction in values.pop("rows"):
        if (broker, transaction.transaction_id) == selection:
            chosen_row = (broker, transaction)
            break
    topics = await context.get_cached("topics", context.admin.topics)
    return Answer(
        {"topic": topic, "group": group, "topics": topics, "chosen": chosen_row, **values}
    )


async def decide(context: Context) -> Answer:
    """Commit or roll back an open transaction, and redirect to the list.

    Raises ConfigurationError if the form has no outcome, broker or confirmation, and
    MessageNotFoundError if the broker does not have the transaction open.
    """
    outcome = OUTCOMES.get(context.form.get("outcome", ""))
    if outcome is None:
        raise ConfigurationError("No outcome is chosen.", fix="Choose commit or rollback.")
    state, notice = outcome
    address = await find_broker_address(context)
    require_confirmation(context)
    transaction_id = context.form.get("id", "")
    if await context.admin.resolve_transaction(transaction_id, state, address=address) is None:
        raise MessageNotFoundError(
            f"The broker has no open transaction {transaction_id!r}.",
            fix="Reload the list; the transaction may have ended.",
        )
    return redirect_to_list("/transactions", context, notice)


async def find_broker_address(context: Context) -> str:
    """Return the address of the master of the broker that the form names.

    Raises ConfigurationError if there is no such broker.
    """
    masters = await context.admin.masters()
    name = context.form.get("broker", "")
    if name not in masters:
        raise ConfigurationError(f"There is no broker {name!r}.", fix="Choose one from the list.")
    return masters[name]


def require_confirmation(context: Context) -> None:
    """Raise ConfigurationError if the user has not checked the box that confirms the action."""
    if context.form.get("sure") != "yes":
        raise ConfigurationError(
            "The confirmation box is not checked.", fix="Check it to confirm the action."
        )


def redirect_to_list(path: str, context: Context, notice: str) -> Answer:
    """Return a redirect to the list at `path`, which then shows `notice`.

    The list keeps its selection: the fields topic, key and group of the form.
    """
    query = {}
    for name in ("topic", "key", "group"):
        if field_text := context.form.get(name):
            query[name] = field_text
    query["done"] = notice
    return Answer(redirect=f"{path}?{urlencode(query)}")
