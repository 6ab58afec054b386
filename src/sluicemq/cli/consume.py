"""`sluice consume TOPIC`: print messages as they come.

With --group it consumes for that group and commits what it printed. Without, it only looks: it
reads all queues, joins no group and commits nothing, so it disturbs nobody and leaves no trace.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime

import click

from sluicemq.cli.output import client_options, credentials, json_option, print_json, show_time
from sluicemq.client.aio.pull import READ_GROUP
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import Start, make_subscription
from sluicemq.errors import ConfigurationError

TEXT_BYTES_MAX = 200
_STARTS: dict[str, Start] = {"first": "first", "last": "last"}


@click.command()
@click.argument("topic")
@click.option("-g", "--group", help="Consumer group; without it nothing is committed.")
@click.option("--tags", help='Tags: "A||B".')
@click.option("--where", help="SQL92 filter: \"origin = 'JFK' AND dep_delay > 60\".")
@click.option(
    "--from",
    "start",
    default="first",
    show_default=True,
    help="Where a new group begins: first, last, milliseconds since 1970, or 2013-01-01T00:00.",
)
@click.option("--max", "count_max", type=click.IntRange(1), help="Stop after that many messages.")
@click.option(
    "--timeout", "timeout_s", type=float, help="Stop when none came for that many seconds."
)
@client_options
@json_option
def command(
    topic: str,
    group: str | None,
    tags: str | None,
    where: str | None,
    start: str,
    count_max: int | None,
    timeout_s: float | None,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Print the messages of TOPIC until --max, --timeout or Ctrl-C; exit code 0 in each case."""
    begin = parse_start(start)
    pair = credentials(access_key, secret_key)

    async def run() -> int:
        async with Sluice(name_servers, credentials=pair) as mq:
            fetch = await _open(mq, topic, group, begin, tags, where)
            printed = 0
            while count_max is None or printed < count_max:
                wanted = 100 if count_max is None else min(100, count_max - printed)
                messages = await fetch(wanted, timeout_s)
                if not messages:
                    break
                for message in messages:
                    _show(message, as_json)
                    await message.ack()
                sys.stdout.flush()
                printed += len(messages)
            return printed

    printed = asyncio.run(_until_interrupted(run()))
    if not as_json and printed is not None:
        click.echo(f"{printed:,} messages.", err=True)


Fetch = Callable[[int, float | None], Awaitable[list[ReceivedMessage]]]


async def _open(
    mq: Sluice, topic: str, group: str | None, start: Start, tags: str | None, where: str | None
) -> Fetch:
    """How to get the next messages: as a member of the group, or as somebody who only looks."""
    if group is not None:
        stream = mq.subscribe(topic, group=group, start=start, tags=tags, where=where)
        return stream.receive_many
    make_subscription(topic, tags=tags, where=where)  # A bad filter is said before a missing topic.
    reader = mq.lite_pull(READ_GROUP, start=start, auto_commit=False)
    await reader.assign(await mq.queues(topic), tags=tags, where=where)

    async def look(count_max: int, timeout_s: float | None) -> list[ReceivedMessage]:
        return await reader.poll(timeout_s, count_max=count_max)

    return look


async def _until_interrupted(work: Coroutine[None, None, int]) -> int | None:
    """Ctrl-C and SIGTERM end the work in order: offsets are committed, the group is left."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(number, task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        return None


def parse_start(text: str) -> Start:
    """`first`, `last`, milliseconds or an ISO date. Raises ConfigurationError."""
    if text in _STARTS:
        return _STARTS[text]
    if text.isdigit():
        return int(text)
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise ConfigurationError(
            f"--from {text!r} is no place to begin.",
            cure="Use first, last, milliseconds since 1970, or a date: 2013-01-01T00:00.",
        ) from None


def _show(message: ReceivedMessage, as_json: bool) -> None:
    if as_json:
        print_json(_record(message))
        return
    place = f"{message.queue.broker}/{message.queue.queue_id}@{message.queue_offset}"
    marks = " ".join(filter(None, [message.tag or "", " ".join(message.keys)]))
    body = message.body[:TEXT_BYTES_MAX].decode("utf-8", "backslashreplace")
    more = "…" if len(message.body) > TEXT_BYTES_MAX else ""
    sys.stdout.write(f"{show_time(message.store_time_ms)}  {place}  [{marks}]  {body}{more}\n")


def _record(message: ReceivedMessage) -> dict[str, object]:
    body: dict[str, object]
    try:
        body = {"body": message.body.decode()}
    except UnicodeDecodeError:
        body = {"body_hex": message.body.hex()}
    return {
        "topic": message.topic,
        "broker": message.queue.broker,
        "queue_id": message.queue.queue_id,
        "queue_offset": message.queue_offset,
        "message_id": message.message_id,
        "tag": message.tag,
        "keys": message.keys,
        "properties": dict(message.properties),
        "born_time_ms": message.born_time_ms,
        "store_time_ms": message.store_time_ms,
        "reconsume_times": message.reconsume_times,
        **body,
    }
