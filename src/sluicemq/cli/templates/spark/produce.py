"""Sends a thousand flights: python produce.py"""

import asyncio

from sluicemq import Message, Sluice

CARRIERS = ("AA", "DL", "UA", "WN")
ORIGINS = ("EWR", "JFK", "LGA")


def flight(number: int) -> Message:
    """Made up, and the same each time. What filters and columns are to see is a property."""
    delay = number * 37 % 180 - 30
    return Message(
        "flights",
        f"flight {number}".encode(),
        tag=CARRIERS[number % len(CARRIERS)],
        keys=(f"flight-{number}",),
        properties={"origin": ORIGINS[number % len(ORIGINS)], "dep_delay": str(delay)},
    )


async def main() -> None:
    async with Sluice() as mq:
        # A batch travels in few requests, each of which is stored as a whole or not at all.
        results = await mq.send_batch([flight(number) for number in range(1000)])
    print(f"{len(results)} flights sent", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
