"""`sluice produce TOPIC [BODY|-]`: send messages from the command line, a pipe or a file.

One connection; lines of a file or pipe are sent 1,000 at a time, in the order of the lines for each
queue, and the last line of output says how many are stored.
"""

import asyncio
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from sluicemq.cli.output import client_options, credentials, json_option, print_json
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.answers import SendResult
from sluicemq.errors import ConfigurationError

IN_FLIGHT_MAX = 1000


@click.command()
@click.argument("topic")
@click.argument("body", required=False)
@click.option("--tag", help="Tag of the messages.")
@click.option("--key", "keys", multiple=True, help="Key to find them by; several are allowed.")
@click.option(
    "-p", "--property", "pairs", multiple=True, metavar="K=V", help="A property; repeat for more."
)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How often to send BODY; {} in it becomes the number.",
)
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Send each line of a file as a message.",
)
@click.option("--delay", type=float, help="Deliver so many seconds from now.")
@click.option("--delay-level", type=int, default=0, help="Deliver after a level of the brokers.")
@client_options
@json_option
def command(
    topic: str,
    body: str | None,
    tag: str | None,
    keys: tuple[str, ...],
    pairs: tuple[str, ...],
    count: int,
    path: Path | None,
    delay: float | None,
    delay_level: int,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Send messages to TOPIC: BODY, each line of stdin (-), or each line of --file
    (empty lines are passed over).

    Prints one line a message (up to 10, then a sum), with --json one JSON line each.
    """
    options = {
        "tag": tag,
        "keys": keys,
        "properties": parse_pairs(pairs),
        "delay": delay,
        "delay_level": delay_level,
    }
    bodies = _bodies(body, count, path)
    pair = credentials(access_key, secret_key)
    sent = asyncio.run(_send(name_servers, pair, topic, bodies, options, as_json))
    if not as_json and sent != 1:
        click.echo(f"{sent:,} messages stored in {topic}.")


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """`k=v` texts as a mapping. Raises ConfigurationError for one without `=`."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigurationError(
                f"--property {pair!r} is not NAME=VALUE.", cure="For example: -p origin=JFK."
            )
        found[name] = value
    return found


def _bodies(body: str | None, count: int, path: Path | None) -> Iterator[bytes]:
    if (body is None) == (path is None):
        raise click.UsageError("Give BODY (or - for stdin) or --file, one of the two.")
    if path is not None:
        return _lines(path.open("rb"))
    assert body is not None
    if body == "-":
        return _lines(sys.stdin.buffer)
    return (body.replace("{}", str(number)).encode() for number in range(count))


def _lines(stream: Any) -> Iterator[bytes]:
    with stream:
        for line in stream:
            if body := line.rstrip(b"\r\n"):
                yield body


async def _send(
    name_servers: str,
    pair: tuple[str, str] | None,
    topic: str,
    bodies: Iterator[bytes],
    options: dict[str, Any],
    as_json: bool,
) -> int:
    sent = 0
    async with Sluice(name_servers, credentials=pair) as mq:
        # The first one alone opens the connection; later ones leave in the order they are made.
        size = 1
        while chunk := list(itertools.islice(bodies, size)):
            size = IN_FLIGHT_MAX
            results = await asyncio.gather(*(mq.send(topic, one, **options) for one in chunk))
            for result in results:
                _show(result, sent, as_json)
                sent += 1
    return sent


def _show(result: SendResult, index: int, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "status": result.status.name,
                "message_id": result.message_id,
                "offset_message_id": result.offset_message_id,
                "broker": result.queue.broker,
                "queue_id": result.queue.queue_id,
                "queue_offset": result.queue_offset,
            }
        )
    elif index < 10:
        where = f"{result.queue.broker}/{result.queue.queue_id} offset {result.queue_offset:,}"
        click.echo(f"{result.message_id}  {where}  {result.status.name}")
