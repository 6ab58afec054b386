"""`sluice produce` and `sluice consume`: send and receive messages on the command line.

`produce` sends one message, copies of it, or the lines of a file or pipe as messages. It has at
most `IN_FLIGHT_MAX` messages in flight. Within a queue, messages have the order of the lines.

`consume --group` joins the group, and commits each message after printing it. Without a group, it
reads all queues, joins no group and commits nothing, so it does not affect other consumers.
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

from sluicemq.cli.ending import OptionError, describe_on_interrupt
from sluicemq.cli.output import (
    Access,
    body_record,
    client_options,
    format_body,
    format_time,
    json_option,
    parse_position_or_time,
    print_json,
    record_builder,
)
from sluicemq.client.aio.pull import LitePullConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import Start, make_subscription
from sluicemq.client.core.requests import SendResult
from sluicemq.errors import SluiceError
from sluicemq.model.system_names import TOOLS_GROUP

T = TypeVar("T")
IN_FLIGHT_MAX = 1000
"""The largest number of messages that are sent before their results have arrived."""
READ_BYTES = 1 << 16
PRINTED_MAX = 10
"""The number of sent messages that `produce` prints one by one."""
RECEIVED_MAX = 100
"""The largest number of messages that `consume` receives at once."""
BODY_SHOWN_BYTES = 200
_sent_record = record_builder(
    "status=status.name message_id offset_message_id broker=queue.broker queue_id=queue.queue_id "
    "queue_offset"
)
_received_record = record_builder(
    "topic broker=queue.broker queue_id=queue.queue_id queue_offset message_id tag keys properties "
    "born_time_ms store_time_ms reconsume_times"
)


@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--tag", help="Tag of the messages.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    help="Key by which the messages can be found. Repeat for more keys.",
)
@click.option(
    "-p",
    "--property",
    "pairs",
    multiple=True,
    metavar="K=V",
    help="Property of the messages. Repeat for more properties.",
)
@click.option(
    "--count",
    type=click.IntRange(1),
    metavar="N",
    default=1,
    show_default=True,
    help="Number of times to send BODY. Each {} in it is replaced by the number of the message, "
    "from 0.",
)
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send each line of this file as a message.",
)
@click.option(
    "--delay",
    type=float,
    metavar="SECONDS",
    help="Deliver the messages after this time, in seconds. Default: at once.",
)
@click.option(
    "--delay-level",
    type=int,
    metavar="LEVEL",
    default=0,
    help="Deliver the messages after a delay level of the brokers, 1 to 18 (1s 5s 10s 30s 1m … "
    "2h). Default: at once.",
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
    """Send messages to TOPIC: BODY, or each line of standard input (-) or of --file.

    Empty lines are skipped. Print the first 10 messages that are stored, then their number. With
    --json, print one JSON line for each message.
    """
    options["properties"] = parse_property_options(pairs)
    chunks = _iterate_chunks(body, path, count)
    stored_count = 0

    def describe_progress() -> str:
        return f"{stored_count:,} messages stored in {topic}."

    def count_and_print(send_result: SendResult) -> None:
        """Count a stored message, and print the first ones."""
        nonlocal stored_count
        if as_json or stored_count < PRINTED_MAX:
            _print_send_result(send_result, as_json)
        stored_count += 1

    async def send_all() -> None:
        """Send the bodies of all chunks, one chunk at a time."""
        async with Sluice(access.name_servers, credentials=access.credentials) as mq:
            while bodies := _next_chunk(chunks):
                # The first message is sent alone and opens the connection. Later ones are written
                # to it in the order in which their sends are created.
                batches = [bodies] if stored_count else [bodies[:1], bodies[1:]]
                for batch in batches:
                    sends = [mq.send(topic, message_body, **options) for message_body in batch]
                    await _run_all_sends(sends, count_and_print)

    describe_on_interrupt(describe_progress)
    try:
        with contextlib.closing(chunks):  # closes the file if a send fails
            asyncio.run(send_all())
    except SluiceError:
        if stored_count and not as_json:
            click.echo(describe_progress())
        raise
    if not as_json and stored_count != 1:
        click.echo(describe_progress())


def _print_send_result(send_result: SendResult, as_json: bool) -> None:
    """Print the result of one send: a line of JSON, or a line with id, queue and status."""
    if as_json:
        print_json(_sent_record(send_result))
        return
    queue = send_result.queue
    location = f"{queue.broker}/{queue.queue_id} offset {send_result.queue_offset:,}"
    click.echo(f"{send_result.message_id}  {location}  {send_result.status.name}")


async def _run_all_sends(
    sends: list[Coroutine[Any, Any, T]], on_result: Callable[[T], None]
) -> None:
    """Run all sends at once, and call `on_result` with each result, in the order of `sends`.

    The first error is raised after all sends have ended. After Ctrl-C, the sends that have begun
    are awaited and reported before CancelledError is raised.
    """
    all_results = asyncio.gather(*sends, return_exceptions=True)
    failures: list[BaseException] = []
    try:
        await asyncio.shield(all_results)
    finally:  # also after Ctrl-C: the shield lets the sends go on
        for result in await all_results:
            if isinstance(result, BaseException):
                failures.append(result)
            else:
                on_result(result)
    if failures:
        raise failures[0]


def _iterate_chunks(
    body: str | None, path: Path | None, count: int
) -> Generator[list[bytes], None, None]:
    """Return an iterator over the bodies to send, in lists of at most IN_FLIGHT_MAX.

    They are the lines of the file at `path`, the lines of stdin if `body` is "-", or else `count`
    copies of `body`. Raises click.UsageError unless exactly one of `body` and `path` is given.
    """
    if (body is None) == (path is None):
        raise click.UsageError("Give either BODY (or - for standard input) or --file.")
    if path is not None:
        return _read_lines(partial(path.open, "rb"))
    if body == "-":
        return _read_lines(lambda: sys.stdin.buffer)
    return _iterate_copies(str(body), count)


def _iterate_copies(body: str, count: int) -> Generator[list[bytes], None, None]:
    """Yield `count` copies of `body`, with each {} replaced by the number of the copy, from 0."""
    bodies = (body.replace("{}", str(copy_number)).encode() for copy_number in range(count))
    while chunk := list(itertools.islice(bodies, IN_FLIGHT_MAX)):
        yield chunk


def parse_property_options(pairs: Iterable[str]) -> dict[str, str]:
    """Return properties from texts: ("a=1", "b=2") becomes {"a": "1", "b": "2"}.

    Of two texts with the same name, the later one counts. Raises OptionError for a text without
    name or "=".
    """
    properties: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise OptionError(
                f"--property {pair!r} is not NAME=VALUE.", fix="For example: -p origin=JFK."
            )
        properties[name] = value
    return properties


def _read_lines(open_stream: Callable[[], Any]) -> Generator[list[bytes], None, None]:
    """Yield the lines of a stream in lists of at most IN_FLIGHT_MAX, without empty lines.

    `open_stream()` returns the stream as a context manager. It is called at the first `next`, and
    the stream is closed at the end. Line ends are removed. Lines are yielded as soon as they can be
    read, because a pipe may be written slowly.
    """
    unfinished_line = b""
    with open_stream() as stream:
        blocks = iter(partial(stream.read1, READ_BYTES), b"")
        # The last line may have no line end, so one is appended to the content.
        for block in itertools.chain(blocks, (b"\n",)):
            *finished_lines, unfinished_line = (unfinished_line + block).split(b"\n")
            stripped_lines = [line.rstrip(b"\r") for line in finished_lines]
            lines = [line for line in stripped_lines if line]
            for start in range(0, len(lines), IN_FLIGHT_MAX):
                yield lines[start : start + IN_FLIGHT_MAX]


def _next_chunk(chunks: Iterator[list[bytes]]) -> list[bytes]:
    """Return the next list of bodies, [] at the end. This blocks the event loop.

    Ctrl-C raises KeyboardInterrupt here. asyncio's handler would only cancel the task at its next
    await, so Python's own handler replaces it meanwhile. Raises CancelledError if asyncio's handler
    was called just before.
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

start_option = click.option(
    "--from",
    "start",
    default="first",
    show_default=True,
    help="Where a new group begins: first, last, 1h for an hour ago, a Unix timestamp in "
    "milliseconds, or 2013-01-01T00:00.",
)
"""The option whose value `parse_position_or_time` parses."""


@click.command()
@click.argument("topic")
@click.option(
    "-g",
    "--group",
    help="Consumer group to join. Without it, all messages are read and nothing is committed.",
)
@click.option("--tags", help='Receive only messages with one of these tags, such as "A||B".')
@click.option(
    "--where",
    help="Receive only messages that match this SQL92 filter, such as \"origin = 'JFK' AND "
    'dep_delay > 60".',
)
@start_option
@click.option(
    "--max",
    "count_max",
    type=click.IntRange(1),
    metavar="N",
    help="Stop after N messages. Default: no limit.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    help="Stop if no message arrives for this time, in seconds. Default: never.",
)
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
    """Print the messages of TOPIC until --max, --timeout or Ctrl-C. The exit code is 0 for each."""
    start_at = parse_position_or_time(start, "--from")
    printed_count = 0

    async def print_messages() -> None:
        """Print messages until there are `count_max`, or none arrives for `timeout_s`."""
        nonlocal printed_count
        fetch: Callable[..., Awaitable[list[ReceivedMessage]]]
        async with Sluice(access.name_servers, credentials=access.credentials) as mq:
            if group is not None:
                stream = mq.subscribe(topic, group=group, start=start_at, tags=tags, where=where)
                fetch = stream.receive_many
            else:
                reader = await _open_reader(mq, topic, start_at, tags=tags, where=where)
                fetch = reader.poll

            while count_max is None or printed_count < count_max:
                fetched_max = RECEIVED_MAX
                if count_max is not None:
                    fetched_max = min(RECEIVED_MAX, count_max - printed_count)
                messages = await fetch(count_max=fetched_max, timeout_s=timeout_s)
                if not messages:
                    break
                for message in messages:
                    _print_message(message, as_json)
                    printed_count += 1
                    await message.ack()
                sys.stdout.flush()

    asyncio.run(run_until_interrupted(print_messages()))
    if not as_json:
        click.echo(f"{printed_count:,} messages.", err=True)


async def _open_reader(
    mq: Sluice, topic: str, start_at: Start, *, tags: str | None, where: str | None
) -> LitePullConsumer:
    """Return a consumer that reads all queues of a topic from `start_at`, and commits nothing.

    Raises FilterSyntaxError if the filter `where` is invalid.
    """
    # Check the filter first, so that its error comes even if the topic does not exist.
    make_subscription(topic, tags=tags, where=where)
    reader = mq.lite_pull(TOOLS_GROUP, start=start_at, auto_commit=False)
    await reader.assign(await mq.queues(topic), tags=tags, where=where)
    return reader


async def run_until_interrupted(work: Coroutine[None, None, None]) -> None:
    """Run `work` until it ends, or until Ctrl-C or SIGTERM cancels it, and return normally.

    A client in `work` then closes in order: it commits its offsets and leaves its group. An error
    of `work` is raised.
    """
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    assert task is not None
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(signal_number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


def _print_message(message: ReceivedMessage, as_json: bool) -> None:
    """Print one received message: a line of JSON, or a line with time, queue, keys and body."""
    if as_json:
        print_json(_received_record(message) | body_record(message))
        return
    location = f"{message.queue.broker}/{message.queue.queue_id}@{message.queue_offset}"
    labels = " ".join(filter(None, [message.tag or "", " ".join(message.keys)]))
    body = format_body(message, BODY_SHOWN_BYTES)
    sys.stdout.write(f"{format_time(message.store_time_ms)}  {location}  [{labels}]  {body}\n")
