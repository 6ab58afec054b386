"""Ship the orders of 50 and more, until Ctrl-C. Run: python consume.py."""

import asyncio
import contextlib
import json
import signal

from sluicemq import ReceivedMessage, Sluice


class Shipping:
    """The handler of orders. A handler may be a method, a function or a coroutine function."""

    def __init__(self) -> None:
        self.shipped = 0

    async def ship(self, message: ReceivedMessage) -> None:
        """Ship an order.

        When the handler returns, the message is acknowledged. If it raises, the message is
        delivered again after 10 s, 30 s and so on, 16 times. Then it becomes a dead letter, in the
        topic %DLQ%shipping.

        If this process ends before its progress is stored, the message is delivered again. So a
        handler must be idempotent; see also `idempotent`.
        """
        order = json.loads(message.body)
        self.shipped += 1
        print(f"shipped order {order['number']} of {order['amount']}", flush=True)


async def main() -> None:
    shipping = Shipping()
    async with Sluice() as mq:
        consumer = mq.consumer("shipping", shipping.ship)
        # The broker evaluates the filter, and sends only messages that match.
        consumer.subscribe("orders", where="amount >= 50")
        print("shipping; Ctrl-C ends it", flush=True)
        try:
            await consumer.run()
        finally:
            print(f"{shipping.shipped} orders shipped", flush=True)


if __name__ == "__main__":
    # Service managers and containers end a program with SIGTERM. Let it do what Ctrl-C does: cancel
    # main(). Leaving `async with` then commits the offsets of the group.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process ignores it
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
