"""Wrong calls, options, settings and filters, and what a user sees of each.

`CASES` maps a title to a function that does something wrong. `message_of` returns the text that the
user sees. `python tests/lib/wrong_calls.py` prints all of them, for a reader who judges whether
each text names the value, the rule and the fix in idiomatic English.
"""

import asyncio
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from click.testing import CliRunner

from sluicemq import Message, Sluice
from sluicemq.cli import main
from sluicemq.config.load import load_broker_config, load_name_server_config, load_proxy_config
from sluicemq.errors import SluiceError
from sluicemq.testing import embedded

Case = Callable[[], Any]
UNREACHABLE: Final = "127.0.0.1:1"
"""An address at which nothing listens. The calls below fail before they connect."""


def client(call: Callable[[Any], Any], name_servers: str = UNREACHABLE, **options: Any) -> Case:
    """Return a case that calls `call` with a client, and awaits the result if it can be awaited."""

    async def run() -> None:
        async with Sluice(name_servers, **options) as mq:
            result = call(mq)
            if hasattr(result, "__await__"):
                await result

    return lambda: asyncio.run(run())


def cluster(call: Callable[[Any], Any]) -> Case:
    """Return a case that awaits `call` with a client of an embedded cluster."""

    async def run() -> None:
        async with embedded.embedded() as mq:
            await call(mq)

    return lambda: asyncio.run(run())


def command(*arguments: str) -> Case:
    """Return a case that runs `sluice` with these arguments, and raises what it prints."""

    def run() -> None:
        result = CliRunner().invoke(main, list(arguments))
        if result.exit_code == 0:
            raise AssertionError(f"sluice {' '.join(arguments)} succeeded: {result.output}")
        raise SluiceError(result.output)

    return run


def setting(text: str) -> Case:
    """Return a case that loads a broker.conf of this text, and raises the warnings if it loads."""
    return lambda: _raise_warnings(load_broker_config(text, environment={})[-1])


def _raise_warnings(warnings: list[str]) -> None:
    if warnings:
        raise SluiceError(" ".join(warnings))


def sql92(expression: str) -> Case:
    """Return a case that subscribes with an SQL92 filter."""
    return client(lambda mq: mq.subscribe("orders", group="billing", where=expression))


def send(mq: Any) -> Any:
    """Send a message correctly, for cases in which the client is wrong."""
    return mq.send("orders", b"x")


CASES: Final[dict[str, Case]] = {
    # --- calls of the client
    "a topic with a space": client(lambda mq: mq.send("my orders", b"x")),
    "an empty topic": client(lambda mq: mq.send("", b"x")),
    "a body that is a list": client(lambda mq: mq.send("orders", [b"x"])),
    "a number as a body": client(lambda mq: mq.send("orders", 7)),
    "an empty body": client(lambda mq: mq.send("orders", b"")),
    "a delay level that does not exist": client(lambda mq: mq.send("orders", b"x", delay_level=30)),
    "a negative delay level": client(lambda mq: mq.send("orders", b"x", delay_level=-1)),
    "a delay level and a time": client(
        lambda mq: mq.send("orders", b"x", delay_level=3, deliver_at=datetime.now(UTC))
    ),
    "a time without a time zone": client(
        lambda mq: mq.send("orders", b"x", deliver_at=datetime(2030, 1, 1))  # noqa: DTZ001 - the case
    ),
    "a reserved property": client(
        lambda mq: mq.send("orders", b"x", properties={"REAL_TOPIC": "other"})
    ),
    "a property that is no string": client(
        lambda mq: mq.send("orders", b"x", properties={"price": 7})
    ),
    "a misspelt option of send": client(lambda mq: mq.send("orders", b"x", tga="red")),
    "a misspelt option of the client": client(lambda mq: mq, namesrv="127.0.0.1:9876"),
    "a name server whose port is no number": client(send, "localhost:abc"),
    "a name server with a wrong port": client(send, "localhost:99999"),
    "a negative timeout": client(lambda mq: mq.send("orders", b"x", timeout_ms=-5)),
    "a client id that is a number": client(lambda mq: mq, client_id=7),
    "half of the credentials": client(lambda mq: mq, credentials=("key",)),
    "an empty batch": client(lambda mq: mq.producer().send_batch([])),
    "a batch for two topics": client(
        lambda mq: mq.producer().send_batch([Message("a", b"1"), Message("b", b"2")])
    ),
    "a group with a slash": client(lambda mq: mq.consumer("my/group", print)),
    "a handler that is no function": client(lambda mq: mq.consumer("group", "handler")),
    "tags and SQL92": client(
        lambda mq: mq.subscribe("orders", group="g", tags="red", where="price > 3")
    ),
    "a start that does not exist": client(
        lambda mq: mq.subscribe("orders", group="g", start="end")
    ),
    "a concurrency of zero": client(lambda mq: mq.consumer("group", print, concurrency=0)),
    "a transaction without a listener": client(
        lambda mq: mq.producer("tx").send_in_transaction(Message("orders", b"x"))
    ),
    "a cluster that is not reachable": client(send),
    "a topic that does not exist": cluster(lambda mq: mq.admin.topic_stats("missing")),
    "a message id that is none": cluster(lambda mq: mq.admin.message_by_id("12")),
    # --- options of the command line
    "an unknown command": command("topics"),
    "an unknown option": command("produce", "orders", "--boddy", "x"),
    "a topic with a space, as an option": command("topic", "create", "my orders"),
    "zero queues": command("topic", "create", "orders", "--queues", "0"),
    "a missing argument": command("topic", "create"),
    "a time that is none": command("group", "reset", "billing", "--topic", "orders", "--to", "5x"),
    "an unknown topic type": command("topic", "create", "orders", "--type", "SORTED"),
    "no name server": command("topic", "list", "--nameserver", UNREACHABLE),
    "an error that does not exist": command("explain", "error", "SendEror"),
    "a store that does not exist": command("store", "verify", "/missing/store"),
    "a filter that is none": command("filter", "check", "price >"),
    "a pipeline file that does not exist": command("pipeline", "check", "missing.toml"),
    # --- settings of a server
    "an unknown setting": setting("brokerNmae=a"),
    "a number that is none": setting("listenPort=abc"),
    "a port out of range": setting("listenPort=70000"),
    "a boolean that is none": setting("autoCreateTopicEnable=maybe"),
    "a role that does not exist": setting("brokerRole=MASTER"),
    "a flush mode that does not exist": setting("flushDiskType=SYNC"),
    "delay levels without units": setting("messageDelayLevel=1 5 10"),
    "a hour of the day that is none": setting("deleteWhen=25"),
    "a negative retention": setting("fileReservedTime=-1"),
    "a name with a slash": setting("brokerName=a/b"),
    "an unknown setting of the name server": lambda: _raise_warnings(
        load_name_server_config("listenPrt=1")[-1]
    ),
    "a file of the proxy that is no JSON": lambda: load_proxy_config(
        "{grpcServerPort: 1}", path="rmq-proxy.json"
    ),
    # --- filters
    "an unfinished comparison": sql92("price >"),
    "an unfinished string": sql92("color = 'red"),
    "a string in double quotes": sql92('color = "red"'),
    "two equals signs": sql92("price == 3"),
    "a BETWEEN without AND": sql92("price BETWEEN 1"),
    "a list of numbers": sql92("price IN (1, 2)"),
    "parentheses that do not match": sql92("(price > 3"),
    "a function": sql92("lower(color) = 'red'"),
    "a number that is too large": sql92("price > 99999999999999999999"),
    "an empty expression": sql92(""),
    "a tag expression that is a number": client(
        lambda mq: mq.subscribe("orders", group="g", tags=7)
    ),
    "a property that is compared with IS": sql92("color IS 'red'"),
}


def message_of(case: Case) -> str:
    """Return the text that a user sees of a case; "" if nothing is refused."""
    try:
        case()
    except (SluiceError, TypeError) as error:
        notes = getattr(error, "__notes__", [])
        return "\n".join(
            [str(error).strip(), *(note for note in notes if "sluice explain" not in note)]
        )
    return ""


if __name__ == "__main__":
    for number, (title, case) in enumerate(CASES.items(), 1):
        sys.stdout.write(f"{number}. {title}\n    {message_of(case) or '(accepted)'}\n")
