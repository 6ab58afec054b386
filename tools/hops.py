"""The way of one warm message through an embedded cluster: which functions run, in which files.

    python tools/hops.py [--messages 12] [--calls]

A producer sends, the broker stores, a pull that waits is woken, the handler gets the message and it
is acknowledged; the consumer's next pull, which waits at the broker again, ends the way. All of it
happens in one process and one loop, over `net.network`. Every call of a function of ours is seen
(`sys.setprofile`), for several messages one after the other. What only some of them call (a sweep,
a heartbeat, the saving of an offset) is no part of the way. Printed are the files in the order in
which the way enters them first, with their functions, and the totals. A coroutine or generator that
is resumed is the same function.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import sluicemq
from sluicemq.client.aio.sluice import Sluice
from sluicemq.model.message import StoredMessage
from sluicemq.testing.embedded import EmbeddedSluice, embedded

SOURCE: Final = f"{Path(sluicemq.__file__).parents[1]}/"
"""Where the package is imported from: that need not be the checkout of this file."""
KIT: Final = f"{SOURCE}sluicemq/testing/"
TOPIC: Final = "hops"
WARM: Final = 8
"""So many messages come before the first one that is looked at."""
SETTLE_S: Final = 0.05
"""What follows the handler (acknowledgement, the next pull) has so long."""


@contextmanager
def watched(calls: list[CodeType]) -> Iterator[None]:
    """Notes the functions of ours that are called meanwhile, in this thread."""

    def see(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and is_ours(code):
            calls.append(code)

    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(None)


def is_ours(code: CodeType) -> bool:
    """A function of the product: none of the test kit, whose files lie in memory, and no
    comprehension, for which newer Pythons have no call."""
    name, function = code.co_filename, code.co_name
    is_product = name.startswith(SOURCE) and not name.startswith(KIT)
    return is_product and (not function.startswith("<") or function == "<lambda>")


async def send_and_wait(mq: Sluice, handled: asyncio.Event) -> None:
    """One message, from `send` until its consumer waits for the next one."""
    handled.clear()
    await mq.send(TOPIC, b"body", tag="A")
    await handled.wait()
    await asyncio.sleep(SETTLE_S)


async def ways(messages: int) -> list[list[CodeType]]:
    """The calls of so many messages."""
    handled = asyncio.Event()

    async def handle(message: StoredMessage) -> None:
        handled.set()

    async with embedded() as mq:
        assert isinstance(mq, EmbeddedSluice)
        await mq.admin.create_topic(TOPIC, queues=1)
        consumer = mq.consumer("hops-group", handle)
        consumer.subscribe(TOPIC)
        await consumer.start()
        for _ in range(WARM):
            await send_and_wait(mq, handled)
        found = []
        for _ in range(messages):
            calls: list[CodeType] = []
            with watched(calls):
                await send_and_wait(mq, handled)
            found.append(calls)
    return found


def common(found: list[list[CodeType]]) -> list[CodeType]:
    """The calls of the shortest way whose functions are on all of them."""
    shared = set(found[0]).intersection(*found)
    return [code for code in min(found, key=len) if code in shared]


def report(calls: list[CodeType]) -> str:
    """File by file, and the totals."""
    files: dict[str, dict[str, None]] = {}
    for code in calls:
        files.setdefault(code.co_filename, {}).setdefault(code.co_qualname)
    lines = []
    for name, functions in files.items():
        lines.append(name.removeprefix(SOURCE))
        lines += [f"    {function.replace('<locals>.', '')}" for function in functions]
    lines.append(f"{len(calls)} calls of {len(set(calls))} functions in {len(files)} files")
    return "\n".join(lines)


def main() -> None:
    """Prints the way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=12, help="so many are looked at")
    parser.add_argument("--calls", action="store_true", help="every call, in order")
    options = parser.parse_args()
    calls = common(asyncio.run(ways(options.messages)))
    if options.calls:
        for code in calls:
            place = f"{code.co_filename.removeprefix(SOURCE)}:{code.co_firstlineno}"
            sys.stdout.write(f"{place} {code.co_qualname}\n")
    sys.stdout.write(f"{report(calls)}\n")


if __name__ == "__main__":
    main()
