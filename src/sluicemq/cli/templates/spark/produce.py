"""Send a thousand flights. Run: python produce.py."""

import asyncio

from sluicemq import Message, Sluice

CARRIERS = ("AA", "DL", "UA", "WN")
ORIGINS = ("EWR", "JFK", "LGA")


def flight(number: int) -> Message:
    """Return a flight with invented data. Filters and columns read its properties."""
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
        # A batch is sent in a few requests. The broker stores all messages of a request, or none.
        results = await mq.send_batch([flight(number) for number in range(1000)])
    print(f"{len(results)} flights sent", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
