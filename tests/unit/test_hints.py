"""Did you mean …? Of options, of methods, of what the package exports."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import pytest

import sluicemq
from sluicemq import GroupConfig, Message, Sluice, Tls, idempotent
from sluicemq.client.core.conversations import operation
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer, LitePullConsumer, PushConsumer
from sluicemq.hints import (
    did_you_mean,
    intended_name,
    nearest_name,
    suggest,
    with_call_hints,
    with_hints,
)
from sluicemq.testing.embedded import embedded


def wrong(call: Callable[[], object]) -> str:
    with pytest.raises(TypeError) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def mq() -> Sluice:
    return Sluice("127.0.0.1:1")


WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("send", {"tags": "A"}, "'tag'"),
    ("send", {"key": "7"}, "'keys'"),
    ("send", {"headers": {}}, "'properties'"),
    ("send", {"value": b"x"}, "'body'"),
    ("send", {"delay_ms": 5}, "'delay' (seconds or a timedelta)"),
    ("send", {"countdown": 5}, "'delay' (seconds or a timedelta)"),
    ("send", {"eta": 5}, "'deliver_at' (a datetime with a time zone, or ms since 1970)"),
    ("send", {"partition": 5}, "'queue' (a MessageQueue)"),
    ("send", {"timeout": 5}, "'timeout_ms' (milliseconds)"),
    ("send", {"message_group": "a"}, "'sharding_key'"),
    ("send", {"routing_key": "a"}, "'tag'"),
    ("send", {"propertys": {}}, "'properties'"),
    ("send_oneway", {"tags": "A"}, "'tag'"),
    ("send_batch", {"timeout": 3}, "'timeout_ms' (milliseconds)"),
    ("send_soon", {"callback": 3}, "'on_done'"),
    ("request", {"timeout_ms": 3}, "'timeout_s' (seconds)"),
    ("request", {"tags": "A"}, "'tag'"),
    ("transaction", {"tags": "A"}, "'tag'"),
    ("subscribe", {"tag": "A"}, "'tags' (text, 'A||B')"),
    ("subscribe", {"filter": "A"}, "'where' (SQL92, 'price > 3')"),
    ("subscribe", {"sql": "A"}, "'where' (SQL92, 'price > 3')"),
    ("subscribe", {"selector": "A"}, "'where' (SQL92, 'price > 3')"),
    ("subscribe", {"group_id": "A"}, "'group'"),
    ("subscribe", {"auto_offset_reset": "A"}, "'start' ('first', 'last' or a time)"),
    ("subscribe", {"prefetch": 3}, "'prefetch_count'"),
    ("subscribe", {"max_retries": 3}, "'max_reconsume_times'"),
    ("subscribe", {"broadcasting": True}, "'broadcast'"),
    ("consumer", {"callback": 3}, "'handler'"),
    ("consumer", {"workers": 3}, "'concurrency'"),
    ("lite_pull", {"enable_auto_commit": 3}, "'auto_commit'"),
    ("lite_pull", {"max_records": 3}, "'count_max'"),
    ("producer", {"max_retries": 3}, "'retries'"),
]


@pytest.mark.parametrize(("method", "words", "ours"), WORDS)
def test_a_word_of_others_names_ours(
    mq: Sluice, method: str, words: dict[str, Any], ours: str
) -> None:
    text = wrong(lambda: getattr(mq, method)(**words))
    assert text == (
        f"{method}() got an unexpected keyword argument {next(iter(words))!r}. Did you mean {ours}?"
    )


def test_blocking_and_embedded_forms_say_it_too() -> None:
    made: list[tuple[Callable[..., object], dict[str, object]]] = [
        (Sluice, {"bootstrap_servers": "a"}),
        (Sluice, {"ssl": True}),
        (Producer, {"send_timeout": 3}),
        (Consumer, {"filter": 3}),
        (PushConsumer, {"workers": 3}),
        (LitePullConsumer, {"enable_auto_commit": 3}),
        (Message, {"tags": "A"}),
        (GroupConfig, {"name": "g", "retry_times": 3}),
        (Tls, {"cert": "a.pem"}),
        (embedded, {"access_key": "A"}),
        (idempotent, {"database": "a.db", "tabel": "A"}),
    ]
    said = [wrong(lambda make=make, words=words: make(**words)) for make, words in made]
    assert [text.partition("Did you mean ")[2].partition("'?")[0].strip("'?") for text in said] == [
        "name_servers", "tls", "timeout_ms' (milliseconds)", "where' (SQL92, 'price > 3')",
        "concurrency", "auto_commit", "tag", "retry_times_max", "certificate",
        "credentials' (a pair (access_key, secret_key))", "table",
    ]  # fmt: skip
    with Producer("127.0.0.1:1") as producer:
        assert wrong(lambda: producer.send("t", b"x", tags="A")).startswith("send() got")  # type: ignore[call-arg]
    with Admin("127.0.0.1:1") as admin:
        assert "Did you mean 'topic'?" in wrong(lambda: admin.queues(topics="t"))  # type: ignore[call-arg]


def test_what_nobody_could_guess_is_answered_with_all_options(mq: Sluice) -> None:
    text = wrong(lambda: mq.send_batch([], zzz=1))  # type: ignore[call-arg]
    assert text == (
        "send_batch() got an unexpected keyword argument 'zzz'. It takes queue, timeout_ms."
    )


def test_an_option_without_its_name_is_told_it(mq: Sluice) -> None:
    text = wrong(lambda: mq.send("t", b"x", "A"))  # type: ignore[call-arg, misc]
    assert "Options are given by name: tag=, keys=, properties=" in text
    assert "missing 1 required" in wrong(lambda: mq.subscribe("t"))  # type: ignore[call-arg]


def test_a_type_error_of_the_body_is_left_alone() -> None:
    class Options(TypedDict, total=False):
        inner: int

    @with_hints
    class Own:
        def plain(self, one: int = 0) -> None:
            int(one, inner=1)  # type: ignore[call-overload]

        def handing_on(self, **options: Unpack[Options]) -> None:
            raise TypeError("of the body was given")

    assert "inner" in wrong(Own().plain)
    assert "Did you mean" not in wrong(Own().plain)
    assert wrong(Own().handing_on) == "of the body was given"
    assert "Did you mean 'inner'?" in wrong(lambda: Own().handing_on(iner=1))  # type: ignore[call-arg]


def test_signatures_and_docstrings_stay() -> None:
    import inspect

    parameters = inspect.signature(Sluice.send).parameters
    assert {"tag", "keys", "properties", "delay", "timeout_ms"} <= parameters.keys()
    assert Sluice.send.__name__ == "send"
    assert (Sluice.send.__doc__ or "").startswith("Send one message")
    assert (
        inspect.signature(Sluice.subscribe).parameters["group"].default is inspect.Parameter.empty
    )
    assert with_call_hints(operation).__doc__ == operation.__doc__


@pytest.mark.parametrize(
    ("verb", "ours"),
    [("publish", "send"), ("produce", "send"), ("basic_publish", "send"), ("poll", "lite_pull"),
     ("consume", "subscribe"), ("send_many", "send_batch"), ("shutdown", "close")],
)  # fmt: skip
def test_a_verb_of_others_names_ours(mq: Sluice, verb: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=f"'Sluice' has no attribute '{verb}'.*'{ours}'"):
        getattr(mq, verb)
    assert not hasattr(mq, verb)
    assert verb not in dir(mq)


async def test_what_was_received_knows_them_too() -> None:
    async with embedded() as mq:
        await mq.send("t", b"x")
        stream = mq.subscribe("t", group="g")
        message = await stream.receive()
        for verb, ours in (("nack", "reject"), ("value", "body"), ("offset", "queue_offset")):
            with pytest.raises(AttributeError, match=f"Did you mean '{ours}'"):
                getattr(message, verb)
        with pytest.raises(AttributeError, match="Did you mean 'receive'"):
            stream.poll  # type: ignore[attr-defined]  # noqa: B018


def test_a_table_of_words_goes_before_likeness() -> None:
    assert intended_name("key", ["key_id", "keys"]) == "keys"
    assert intended_name("wher", ["where", "tags"]) == "where"
    assert intended_name("nothing", ["where", "tags"]) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from sluicemq import Slucie",
            "ImportError: cannot import name 'Slucie' from 'sluicemq'. Did you mean 'Sluice'?",
        ),
        ("from sluicemq import Consumer", "Did you mean 'PushConsumer'?"),
        (
            "import sluicemq; sluicemq.Slucie",
            "AttributeError: module 'sluicemq' has no attribute 'Slucie'. Did you mean 'Sluice'?",
        ),
        ("from sluicemq import Nothing", "ImportError: cannot import name 'Nothing'"),
        ("from sluicemq import errors, rocketmq, console, cli, spark", ""),
        ("import sluicemq; assert not hasattr(sluicemq, 'Slucie')", ""),
    ],
)
def test_a_misspelt_import_names_ours(line: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert said in done.stderr
    assert bool(done.returncode) == bool(said)


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sluicemq.nothing  # type: ignore[attr-defined]  # noqa: B018


# ---- names that are nearly right


def test_the_nearest_name_is_found_whatever_its_case() -> None:
    assert nearest_name("FLIHTS", ["Flights", "orders"]) == "Flights"
    assert nearest_name("A", ["a", "b"]) == "a"
    assert nearest_name("zzz", ["flights"]) is nearest_name("x", []) is None
    assert nearest_name("flights", ["flights", "flight"]) is None  # it is not what was wrong
    assert nearest_name("flghs", ["flights"], cutoff=0.9) is None
    assert did_you_mean("flihts", ["flights", "orders"]) == "Did you mean 'flights'?"
    assert did_you_mean("zzz", ["flights"]) == ""


def test_without_a_near_name_the_known_ones_are_listed() -> None:
    assert suggest("flihts", ["flights", "orders"]) == "Did you mean 'flights'?"
    assert suggest("zzz", ["a", "b"]) == "There are: a, b."
    assert suggest("zzz", []) == "There are: none."
    assert suggest("zzz", map(str, range(1022))).endswith(", 18, 19 and 1,002 more.")
