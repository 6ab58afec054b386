"""`sluice produce` and `sluice consume`: messages from the command line, a pipe or a file, and out.

`produce` sends over one connection; lines of a file or pipe go as they come, 1,000 at a time, in
the order of the lines for each queue, and the last line of output says how many are stored.

`consume` with --group consumes for that group and commits what it printed. Without, it only looks:
it reads all queues, joins no group and commits nothing, so it disturbs nobody and leaves no trace.
"""

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from sluicemq.cli.ending import OptionError, when_interrupted
from sluicemq.cli.output import (
    Access,
    body_record,
    client_options,
    fields,
    json_option,
    parse_time,
    print_json,
    show_body,
    show_time,
)
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import Start, make_subscription
from sluicemq.client.core.requests import SendResult
from sluicemq.errors import SluiceError
from sluicemq.model.system_names import TOOLS_GROUP

T = TypeVar("T")
IN_FLIGHT_MAX = 1000
BLOCK_BYTES = 1 << 16
SHOWN_MAX = 10
_STARTS: dict[str, Start] = {"first": "first", "last": "last"}
TEXT_BYTES_MAX = 200
_sent = fields(
    "status=status.name message_id offset_message_id broker=queue.broker queue_id=queue.queue_id "
    "queue_offset"
)
_received = fields(
    "topic broker=queue.broker queue_id=queue.queue_id queue_offset message_id tag keys properties "
    "born_time_ms store_time_ms reconsume_times"
)


@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--tag", help="Tag of the messages.")
@click.option("--key", "keys", multiple=True, help="Key to find them by; several are allowed.")
@click.option(
    "-p", "--property", "pairs", multiple=True, metavar="K=V", help="A property; repeat for more."
)
@click.option(
    "--count", type=click.IntRange(1), metavar="N", default=1, show_default=True,
    help="How often to send BODY; {} in it becomes the number.",
)  # fmt: skip
@click.option(
    "-f", "--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send each line of a file as a message.",
)  # fmt: skip
@click.option("--delay", type=float, metavar="SECONDS", help="Deliver so long from now.")
@click.option(
    "--delay-level", type=int, metavar="LEVEL", default=0, help="Or after a level, 1 to 18."
)
@client_options
@json_option
def produce(
    access: Access,
    topic: str,
    body: str | None,
    pairs: tuple[str, ...],
    count: int,
    path: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Send messages to TOPIC: BODY, each line of stdin (-), or each line of --file
    (empty lines are passed over).

    Prints one line a message (up to 10, then a sum), with --json one JSON line each.
    """
    options["properties"] = parse_pairs(pairs)
    chunks, stored = _chunks(body, path, count), 0

    def tell() -> str:
        return f"{stored:,} messages stored in {topic}."

    def note(result: SendResult) -> None:
        nonlocal stored
        if as_json or stored < SHOWN_MAX:
            _print_sent(result, as_json)
        stored += 1

    async def run() -> None:
        async with Sluice(access.name_servers, credentials=access.credentials) as mq:
            # The first one alone opens the connection; later ones leave in the order they are made.
            while chunk := _arrived(chunks):
                for some in (chunk[:1], chunk[1:]) if not stored else (chunk,):
                    await _all_of([mq.send(topic, one, **options) for one in some], note)

    when_interrupted(tell)
    try:
        with contextlib.closing(chunks):  # a send that fails leaves it before its end
            asyncio.run(run())
    except SluiceError:
        if stored and not as_json:
            click.echo(tell())
        raise
    if not as_json and stored != 1:
        click.echo(tell())


def _print_sent(result: SendResult, as_json: bool) -> None:
    if as_json:
        print_json(_sent(result))
        return
    place = f"{result.queue.broker}/{result.queue.queue_id} offset {result.queue_offset:,}"
    click.echo(f"{result.message_id}  {place}  {result.status.name}")


async def _all_of(sends: list[Coroutine[Any, Any, T]], note: Callable[[T], None]) -> None:
    """Each result to `note`, also of those under way when Ctrl-C comes. Raises the first error."""
    work = asyncio.gather(*sends, return_exceptions=True)
    failures: list[BaseException] = []
    try:
        await asyncio.shield(work)
    finally:
        for one in await work:
            if isinstance(one, BaseException):
                failures.append(one)
            else:
                note(one)
    if failures:
        raise failures[0]


def _chunks(body: str | None, path: Path | None, count: int) -> Generator[list[bytes], None, None]:
    """Return what is to be sent, at most IN_FLIGHT_MAX bodies in each list."""
    if (body is None) == (path is None):
        raise click.UsageError("Give BODY (or - for stdin) or --file, one of the two.")
    if path is not None:
        return _lines(partial(path.open, "rb"))
    if body == "-":
        return _lines(lambda: sys.stdin.buffer)
    return _numbered(str(body), count)


def _numbered(body: str, count: int) -> Generator[list[bytes], None, None]:
    """Yield `body` `count` times, with its number for each {} in it."""
    bodies = (body.replace("{}", str(number)).encode() for number in range(count))
    while some := list(itertools.islice(bodies, IN_FLIGHT_MAX)):
        yield some


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """`k=v` texts as a mapping. Raises OptionError for one without `=`."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise OptionError(
                f"--property {pair!r} is not NAME=VALUE.", fix="For example: -p origin=JFK."
            )
        found[name] = value
    return found


def _lines(open_stream: Callable[[], Any]) -> Generator[list[bytes], None, None]:
    """Yield the lines of a stream as soon as they can be read, at most IN_FLIGHT_MAX at a time: a
    pipe may be written slowly. The stream is opened by the first `next`, and closed at the end."""
    rest = b""
    with open_stream() as stream:
        for data in itertools.chain(iter(partial(stream.read1, BLOCK_BYTES), b""), (b"\n",)):
            *found, rest = (rest + data).split(b"\n")
            lines = [line for one in found if (line := one.rstrip(b"\r"))]
            for begin in range(0, len(lines), IN_FLIGHT_MAX):
                yield lines[begin : begin + IN_FLIGHT_MAX]


def _arrived(chunks: Iterator[list[bytes]]) -> list[bytes]:
    """Return the next bodies, or none at the end. Blocks the loop until they have come.

    Ctrl-C ends the wait: the handler of asyncio, which only cancels the task at its next await, is
    replaced meanwhile. Raises CancelledError if that handler was called before it was replaced.
    """
    handler = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return next(chunks, [])
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, handler)


# -------------------------------------------------------------------------------- consume


@click.command()
@click.argument("topic")
@click.option("-g", "--group", help="Consumer group; without it nothing is committed.")
@click.option("--tags", help='Tags: "A||B".')
@click.option("--where", help="SQL92 filter: \"origin = 'JFK' AND dep_delay > 60\".")
@click.option(
    "--from", "start", default="first", show_default=True,
    help="Where a new group begins: first, last, milliseconds since 1970, or 2013-01-01T00:00.",
)  # fmt: skip
@click.option(
    "--max", "count_max", type=click.IntRange(1), metavar="N", help="Stop after so many messages."
)
@click.option(
    "--timeout", "timeout_s", type=float, metavar="SECONDS", help="Stop when none came for so long."
)  # fmt: skip
@client_options
@json_option
def consume(
    access: Access,
    topic: str,
    group: str | None,
    tags: str | None,
    where: str | None,
    start: str,
    count_max: int | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Print the messages of TOPIC until --max, --timeout or Ctrl-C; exit code 0 in each case."""
    begin = parse_start(start)
    printed = 0

    async def run() -> None:
        nonlocal printed
        fetch: Callable[..., Awaitable[list[ReceivedMessage]]]
        async with Sluice(access.name_servers, credentials=access.credentials) as mq:
            if group is not None:
                stream = mq.subscribe(topic, group=group, start=begin, tags=tags, where=where)
                fetch = stream.receive_many
            else:  # only looks; a bad filter is said before a missing topic
                make_subscription(topic, tags=tags, where=where)
                reader = mq.lite_pull(TOOLS_GROUP, start=begin, auto_commit=False)
                await reader.assign(await mq.queues(topic), tags=tags, where=where)
                fetch = reader.poll
            while count_max is None or printed < count_max:
                wanted = 100 if count_max is None else min(100, count_max - printed)
                messages = await fetch(count_max=wanted, timeout_s=timeout_s)
                if not messages:
                    break
                for message in messages:
                    _print_message(message, as_json)
                    printed += 1
                    await message.ack()
                sys.stdout.flush()

    asyncio.run(until_interrupted(run()))
    if not as_json:
        click.echo(f"{printed:,} messages.", err=True)


async def until_interrupted(work: Coroutine[None, None, None]) -> None:
    """Ctrl-C and SIGTERM end the work in order: offsets are committed, the group is left."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


def parse_start(text: str) -> Start:
    """`first`, `last`, milliseconds or an ISO date. Raises OptionError."""
    try:
        return _STARTS[text] if text in _STARTS else parse_time(text)
    except OptionError:
        raise OptionError(
            f"--from {text!r} is no place to begin.",
            fix="Use first, last, milliseconds since 1970, or a date: 2013-01-01T00:00.",
        ) from None


def _print_message(message: ReceivedMessage, as_json: bool) -> None:
    if as_json:
        print_json(_received(message) | body_record(message))
        return
    place = f"{message.queue.broker}/{message.queue.queue_id}@{message.queue_offset}"
    marks = " ".join(filter(None, [message.tag or "", " ".join(message.keys)]))
    body = show_body(message, TEXT_BYTES_MAX)
    sys.stdout.write(f"{show_time(message.store_time_ms)}  {place}  [{marks}]  {body}\n")
