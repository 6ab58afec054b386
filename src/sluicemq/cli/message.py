"""`sluice message show|query|consume`: single messages out of the brokers' key index."""

from datetime import datetime

import click

from sluicemq.cli.output import (
    client_options,
    credentials,
    json_option,
    print_json,
    print_records,
    print_table,
    show_time,
)
from sluicemq.client.core.operations.messages import COUNT_MAX, TIME_MAX_MS
from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import StoredMessage
from sluicemq.wire.bodies import ConsumeResult

BODY_SHOWN_BYTES = 4096
BODY_BEGIN_BYTES = 60
RESULTS: dict[str, str] = {
    ConsumeResult.SUCCESS: "handled",
    ConsumeResult.COMMIT: "handled",
    ConsumeResult.LATER: "given back, to come again",
    ConsumeResult.ROLLBACK: "given back",
    ConsumeResult.EXCEPTION: "not handled, its handler failed",
    ConsumeResult.NOTHING: "not handled, its handler returned nothing",
}


@click.group()
def command() -> None:
    """Find stored messages by key or id, and have them handled again."""


@command.command("show")
@click.argument("message_id", metavar="ID")
@click.option("-t", "--topic", help="Topic of the message; without it all are searched.")
@client_options
@json_option
def show(
    message_id: str,
    topic: str | None,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Show the message ID: the id that its producer made, or the one that says where it lies."""
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        message = admin.message_by_id(message_id, topic=topic)
    record = record_of(message)
    if as_json:
        print_json(record)
        return
    rows = [[name, value] for name, value in record.items() if name not in ("properties", "body")]
    for row in rows:
        if str(row[0]).endswith("_time_ms") and isinstance(row[1], int):
            row[:] = [str(row[0]).removesuffix("_ms"), show_time(row[1])]
    rows += [[f"  {name}", value] for name, value in message.properties.items()]
    print_table(f"Message {message.message_id}", ["field", "value"], rows)
    click.echo(shown_body(message.body, BODY_SHOWN_BYTES))


@command.command("query")
@click.option("-t", "--topic", required=True, help="Topic of the messages.")
@click.option("-k", "--key", required=True, help="One of their keys.")
@click.option("--begin", help="Stored from then on: milliseconds since 1970 or 2013-01-01T00:00.")
@click.option("--end", help="Stored up to then.")
@click.option(
    "--max", "count_max", type=click.IntRange(1), default=COUNT_MAX, show_default=True,
    help="So many at most, the newest; a broker gives no more than its maxMsgsNumBatch.",
)  # fmt: skip
@client_options
@json_option
def query(
    topic: str,
    key: str,
    begin: str | None,
    end: str | None,
    count_max: int,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """The messages of a topic that bear a key, newest first."""
    begin_ms = parse_moment("--begin", begin, 0)
    end_ms = parse_moment("--end", end, TIME_MAX_MS)
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        found = admin.messages_by_key(
            topic, key, begin_ms=begin_ms, end_ms=end_ms, count_max=count_max
        )
    records = [record_of(message) if as_json else _row(message) for message in found]
    print_records("", records, as_json=as_json, empty=f"No message of {topic} has the key {key}.")


@command.command("consume")
@click.argument("message_id", metavar="ID")
@click.option("-g", "--group", required=True, help="The consumer group whose handler is called.")
@click.option("-c", "--client", "client_id", help="Which of its members; without it the first.")
@click.option("-t", "--topic", help="Topic of the message; without it all are searched.")
@client_options
@json_option
def consume(
    message_id: str,
    group: str,
    client_id: str | None,
    topic: str | None,
    name_servers: str,
    access_key: str | None,
    secret_key: str | None,
    as_json: bool,
) -> None:
    """Let a consumer handle the message ID now, and show how that went; exit code 1 when it failed.

    The handler of the client is called once more with the stored message, beside its other work. No
    offset changes, nothing is retried.
    """
    with Admin(name_servers, credentials=credentials(access_key, secret_key)) as admin:
        message, result = admin.consume_directly(message_id, group, client_id, topic=topic)
    is_done = result.result in (ConsumeResult.SUCCESS, ConsumeResult.COMMIT)
    if as_json:
        print_json(
            {
                "message_id": message.message_id,
                "group": group,
                "result": result.result,
                "remark": result.remark,
                "spent_ms": result.spent_ms,
                "ordered": result.is_ordered,
            }
        )
    else:
        word = RESULTS.get(result.result, result.result)
        remark = f": {result.remark}" if result.remark else "."
        click.echo(
            f"Message {message.message_id} of {message.topic} was {word} after {result.spent_ms} ms"
            f"{remark}"
        )
    if not is_done:
        raise SystemExit(1)


def parse_moment(option: str, text: str | None, default: int) -> int:
    """Milliseconds since 1970, given as such or as a date. Raises ConfigurationError."""
    if text is None:
        return default
    if text.isascii() and text.isdigit():
        return min(int(text), TIME_MAX_MS)
    try:
        return int(datetime.fromisoformat(text).astimezone().timestamp() * 1000)
    except ValueError:
        raise ConfigurationError(
            f"{option} {text!r} is no moment.",
            cure="Use milliseconds since 1970, or a date: 2013-01-01T00:00.",
        ) from None


def _row(message: StoredMessage) -> dict[str, object]:
    return {
        "stored": show_time(message.store_time_ms),
        "broker": message.broker,
        "queue": message.queue_id,
        "offset": message.queue_offset,
        "tag": message.tag,
        "keys": " ".join(message.keys),
        "id": message.message_id,
        "body": shown_body(message.body, BODY_BEGIN_BYTES),
    }


def record_of(message: StoredMessage) -> dict[str, object]:
    """A message for --json: the names of `sluice consume --json`, and where it lies."""
    body: dict[str, object]
    try:
        body = {"body": message.body.decode()}
    except UnicodeDecodeError:
        body = {"body_hex": message.body.hex()}
    return {
        "topic": message.topic,
        "broker": message.broker,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "message_id": message.message_id,
        "offset_message_id": message.offset_message_id,
        "physical_offset": message.physical_offset,
        "size_bytes": message.size_bytes,
        "tag": message.tag,
        "keys": list(message.keys),
        "properties": dict(message.properties),
        "born_time_ms": message.born_time_ms,
        "born_host": str(message.born_host),
        "store_time_ms": message.store_time_ms,
        "store_host": str(message.store_host),
        "reconsume_times": message.reconsume_times,
        **body,
    }


def shown_body(body: bytes, bytes_max: int) -> str:
    """The beginning as text; what is not text as escapes."""
    text = body[:bytes_max].decode("utf-8", "backslashreplace")
    return text + ("…" if len(body) > bytes_max else "")
