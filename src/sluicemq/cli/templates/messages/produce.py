"""Sends ten orders: python produce.py"""

import asyncio
import json

from sluicemq import Sluice


async def main() -> None:
    # The address of the cluster is that of NAMESRV_ADDR, or this machine.
    async with Sluice() as mq:
        for number in range(1, 11):
            amount = 15 * number
            # The properties are what filters see; the body is yours. The key finds the message
            # again: sluice message query --topic orders --key order-7
            result = await mq.send(
                "orders",
                json.dumps({"number": number, "amount": amount}),
                tag="new",
                keys=[f"order-{number}"],
                properties={"amount": str(amount)},
            )
            # Here it is stored: send() raises an error that says what to do when it is not.
            print(f"order {number} of {amount} is message {result.message_id}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
