"""Send ten orders. Run: python produce.py."""

import asyncio
import json

from sluicemq import Sluice


async def main() -> None:
    # Connects to the name servers in NAMESRV_ADDR, or to the one on this machine.
    async with Sluice() as mq:
        for number in range(1, 11):
            amount = 15 * number
            # Filters read the properties; the body is only for the application. The key finds the
            # message again: sluice message query --topic orders --key order-7
            result = await mq.send(
                "orders",
                json.dumps({"number": number, "amount": amount}),
                tag="new",
                keys=[f"order-{number}"],
                properties={"amount": str(amount)},
            )
            # The message is stored now. Otherwise send() raises an error that says how to fix it.
            print(f"order {number} of {amount} is message {result.message_id}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
