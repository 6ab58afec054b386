"""Pages of delayed messages and open transactions: lists, recalling, deciding, and roles.

A broker that does not support these requests is listed with the reason.

"""

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from console_app import SECRETS, Browser, browsing
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.console.accounts import Role
from sluicemq.errors import RequestError
from sluicemq.model.message import Message
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock

pytestmark = pytest.mark.slow

PROBE = "\"'><script>alert(1)</script>"


class Undecided(TransactionListener):
    def execute_local(self, message: Any, transaction_id: str, argument: object) -> Any:
        return TransactionState.UNKNOWN

    def check(self, message: Any) -> Any:
        return TransactionState.UNKNOWN


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded(clock=VirtualClock()) as made:
        for topic in ("flights", "gates"):
            await made.admin.create_topic(topic, queues=1)
        yield made


@pytest.fixture
async def browser(mq: EmbeddedSluice, tmp_path: Path) -> AsyncIterator[Browser]:
    async with browsing(connect_to(mq), tmp_path, clock=mq.servers.clock) as made:
        await made.enter()
        yield made


def connect_to(mq: EmbeddedSluice) -> Any:
    return lambda credentials: mq.servers.client(credentials=credentials)


async def undecided(mq: EmbeddedSluice, **options: Any) -> str:
    """Return the id of a transaction whose producer does not report the outcome."""
    producer = mq.producer("payers", listener=Undecided())
    sent = await producer.send_in_transaction(Message("flights", b"paid", **options))
    return str(sent.transaction_id)


def link_to(text: str, name: str) -> str:
    """Return the first address on the page with this word in its query."""
    found = re.search(rf'href="([^"]*{name}=[^"]*)"', text)
    assert found
    return html.unescape(found[1])


def hidden(text: str) -> dict[str, str]:
    """Return the hidden fields of the form of the selected row."""
    form = text.partition('class="card chosen"')[2].partition("</form>")[0]
    found = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form)
    return {name: html.unescape(value) for name, value in found}


async def test_delayed_messages_are_listed_by_time_and_recalled(
    browser: Browser, mq: EmbeddedSluice, tmp_path: Path
) -> None:
    later = await mq.send("flights", b"1", delay_level=5, keys=["later"])
    sooner = await mq.send("gates", b"2", delay=20, keys=["sooner"])
    text = (await browser.get("/delayed")).text
    assert text.index(sooner.message_id) < text.index(later.message_id)
    only = (await browser.get("/delayed?topic=gates")).text
    assert sooner.message_id in only
    assert later.message_id not in only
    assert later.message_id not in (await browser.get("/delayed?key=sooner")).text
    for key, sent in (("later", later), ("sooner", sooner)):
        chosen = (await browser.get(link_to((await browser.get(f"/delayed?key={key}")).text,
                                            "handle"))).text  # fmt: skip
        form = hidden(chosen)
        unsure = await browser.post("/delayed/cancel", form)
        assert unsure.status_code == 400
        done = await browser.post("/delayed/cancel", form | {"sure": "yes"})
        assert done.headers["location"] == f"/delayed?key={key}&done=cancelled"
        await mq.servers.clock.advance(seconds=3)  # type: ignore[attr-defined]
        assert sent.message_id not in (await browser.get("/delayed")).text
    assert "No message is delayed" in (await browser.get("/delayed?done=cancelled")).text
    lines = [orjson.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    noted = [one["state"] for one in lines if one["event"] == "cancel delayed message"]
    assert noted == ["begun", "failed", "begun", "done"] * 2
    assert lines[-1]["form"]["handle"]


async def test_a_form_names_a_broker_and_not_its_address(browser: Browser) -> None:
    wrong = await browser.submit("/delayed/cancel", broker="10.0.0.1:22", handle="x", sure="yes")
    assert wrong.status_code == 400
    assert "There is no broker &#39;10.0.0.1:22&#39;" in wrong.text


@pytest.mark.parametrize(("outcome", "count"), [("commit", 1), ("rollback", 0)])
async def test_a_transaction_can_be_committed_by_the_user(
    browser: Browser, mq: EmbeddedSluice, outcome: str, count: int
) -> None:
    wanted = await undecided(mq)
    text = (await browser.get("/transactions?group=payers&topic=flights")).text
    assert wanted in text
    assert wanted not in (await browser.get("/transactions?group=others")).text
    form = hidden((await browser.get(link_to(text, "id"))).text)
    for unfinished in (form, form | {"outcome": outcome}, form | {"sure": "yes"}):
        assert (await browser.post("/transactions/decide", unfinished)).status_code == 400
    whole = form | {"outcome": outcome, "sure": "yes"}
    done = await browser.post("/transactions/decide", whole)
    assert "done=" in done.headers["location"]
    assert wanted not in (await browser.get("/transactions")).text
    queue = (await mq.admin.queues("flights"))[0]
    assert await mq.admin.offsets(queue) == (0, count)
    late = await browser.post("/transactions/decide", whole)
    assert late.status_code == 404


async def test_the_role_read_changes_nothing(mq: EmbeddedSluice, tmp_path: Path) -> None:
    wanted = await undecided(mq)
    sent = await mq.send("flights", b"1", delay_level=5)
    async with browsing(connect_to(mq), tmp_path, roles=True) as browser:
        await browser.sign_in("read", SECRETS[Role.READ])
        for path, shown in (("/delayed", sent.message_id), ("/transactions", wanted)):
            text = (await browser.get(path)).text
            assert shown in text
            assert "Cancel" not in text
            assert "Decide" not in text
        for path in ("/delayed/cancel", "/transactions/decide"):
            assert (await browser.submit(path, id=wanted, sure="yes")).status_code == 403


async def test_a_form_without_its_token_decides_nothing(browser: Browser) -> None:
    for path in ("/delayed/cancel", "/transactions/decide"):
        assert (await browser.post(path, {"id": "1", "sure": "yes"})).status_code == 403


async def test_markup_in_delayed_messages_and_transactions_is_escaped(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    await undecided(mq, tag=PROBE, keys=("<b>key",), properties={"note": PROBE})
    await mq.send("flights", PROBE.encode(), delay=60, tag=PROBE, keys=["<b>key"])
    for path in ("/delayed", "/transactions", f"/delayed?topic={PROBE}&key={PROBE}",
                 f"/transactions?topic={PROBE}&group={PROBE}&id={PROBE}"):  # fmt: skip
        text = (await browser.get(path)).text
        assert "<script>alert" not in text, path
        assert "<b>key" not in text, path
    for path, name in (("/delayed", "handle"), ("/transactions", "id")):
        chosen = await browser.get(link_to((await browser.get(path)).text, name))
        assert "<script>alert" not in chosen.text


async def test_a_broker_without_these_requests_is_listed_with_the_reason(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_admin: object, *_asked: object, **_options: object) -> None:
        raise RequestError(3, "request type 900101 not supported")

    admin = type(browser.console.client(None).admin)
    for path, name in (("/delayed", "delayed"), ("/transactions", "transactions")):
        monkeypatch.setattr(admin, name, refused)
        text = (await browser.get(path)).text
        assert 'class="grey"' in text
        assert "not supported" in text
        assert "No message is delayed" not in text
        assert "No transaction" not in text
