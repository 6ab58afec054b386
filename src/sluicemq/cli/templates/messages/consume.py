"""Ships the orders of 50 and more, until Ctrl-C: python consume.py"""

import asyncio
import contextlib
import json
import signal

from sluicemq import ReceivedMessage, Sluice


class Shipping:
    """What is done with orders. A handler may be a method, a function or a coroutine function."""

    def __init__(self) -> None:
        self.shipped = 0

    async def ship(self, message: ReceivedMessage) -> None:
        """Return, and the message is done with. Raise, and it comes again: after 10 s, 30 s and so
        on, sixteen times, then it lies in the dead letters (topic %DLQ%shipping).

        It may come twice, when this process dies before its progress is stored: do what may be
        repeated, or see `idempotent`.
        """
        order = json.loads(message.body)
        self.shipped += 1
        print(f"shipped order {order['number']} of {order['amount']}", flush=True)


async def main() -> None:
    shipping = Shipping()
    async with Sluice() as mq:
        consumer = mq.consumer("shipping", shipping.ship)
        # The broker decides the filter: what does not match is never sent here.
        consumer.subscribe("orders", where="amount >= 50")
        print("shipping; Ctrl-C ends it", flush=True)
        try:
            await consumer.run()
        finally:
            print(f"{shipping.shipped} orders shipped", flush=True)


if __name__ == "__main__":
    # Service managers and containers end a program with SIGTERM: here that is Ctrl-C, which
    # cancels main(). Leaving `async with` then stores how far the group is.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
