"""The pages of dead letters: causes, selecting, editing, the dry run, sending, and roles.

Markup in dead letters is escaped.

"""

import html
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest

from console_app import SECRETS, Browser, browsing
from sluicemq.client.admin import dead_letters as core
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call
from sluicemq.console.accounts import Role
from sluicemq.console.pages import letters as pages
from sluicemq.errors import SendUnknownError
from sluicemq.model.topic import GroupConfig
from sluicemq.testing.embedded import EmbeddedSluice, embedded

PROBE = "\"'><script>alert(1)</script>"
AT = "/dead-letters/billing"
LETTERS = 12


async def bury(mq: EmbeddedSluice, body: bytes, **options: Any) -> str:
    """Store a dead letter of the group billing."""
    sent = await mq.send("orders", body, **options)
    (stored,) = await mq.admin.messages_with_id("orders", sent.message_id)
    (address,) = (await mq.admin.masters()).values()
    answer = await mq.admin.send_request(
        Call(address, requests.send_back("billing", stored, "orders", -1, 16))
    )
    assert answer.code == 0
    return str(sent.message_id)


async def listening(mq: EmbeddedSluice, expression: str) -> None:
    """Register a member of the group with this subscription of the topic."""
    await mq.subscribe("orders", group="billing", where=expression).start()


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    """Yield a cluster with twelve dead letters: every third is not JSON, the others timed out."""
    async with embedded() as made:
        await made.admin.create_topic("orders", queues=1)
        await made.admin.create_group(GroupConfig("billing"))
        for number in range(LETTERS):
            bad = number % 3 == 0
            own = {"amount": str(number), "region": "eu"}
            own |= {} if bad else {"exception": f"TimeoutError: none in {number} ms\n at x"}
            body = b'{"amount": NaN}' if bad else b'{"amount": 1}'
            await bury(made, body, tag="A", keys=[f"o{number}"], properties=own)
        yield made


def connect_to(mq: EmbeddedSluice) -> Any:
    return lambda credentials: mq.servers.client(credentials=credentials)


@pytest.fixture
async def browser(mq: EmbeddedSluice, tmp_path: Path) -> AsyncIterator[Browser]:
    async with browsing(connect_to(mq), tmp_path) as made:
        await made.enter()
        yield made


def hidden(text: str) -> dict[str, str]:
    """Return the hidden fields of the form that sends."""
    form = text.partition('class="card chosen"')[2].partition("</form>")[0]
    found = re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', form)
    return {html.unescape(name): html.unescape(value) for name, value in found}


def counts(text: str) -> dict[str, str]:
    """Return the number of each verdict on the page."""
    return dict(re.findall(r"<dt>(\w+)</dt><dd>(\d+)", text))


def link(text: str, cause: str) -> str:
    """Return the path of the dead letters of a cluster."""
    found = re.search(rf'href="([^"]*)">{cause}<', text)
    assert found
    return html.unescape(found[1])


def no_json(**edit: str) -> str:
    """Return the path of a dry run of the first cause with an edit."""
    asked = {"origin": "orders", "cause": "the body is not JSON", **edit}
    return f"{AT}/replay?{urlencode(asked)}"


async def test_pages_link_from_groups_and_causes_to_dead_letters(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    assert ">Dead letters</a>" in (await browser.get("/")).text
    assert f'href="{AT}"' in (await browser.get("/groups/billing")).text
    listed = (await browser.get("/dead-letters?q=bill", live=True)).text
    assert "billing" in listed
    assert f">{LETTERS}</td>" in listed
    assert "billing" not in (await browser.get("/dead-letters?q=other")).text
    text = (await browser.get(AT)).text
    assert f"The newest {LETTERS} of {LETTERS} dead letters were examined." in text
    causes = re.findall(r"cause=[^>]*>([^<]+)</a>", text)
    assert causes == ["exception: TimeoutError: none in # ms", "the body is not JSON"]
    example = re.search(r'href="(/messages/%25DLQ%25billing/\w+)"', text)
    assert example
    assert (await browser.get(example[1])).status_code == 200
    cluster = (await browser.get(link(text, "the body is not JSON"))).text
    assert cluster.count('type="checkbox"') == LETTERS // 3
    assert (await browser.get("/dead-letters/nobody")).status_code == 404


async def test_examined_dead_letters_are_limited_and_a_link_shows_older_ones(
    browser: Browser, mq: EmbeddedSluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = await mq.admin.dead_letters("billing", count_max=5)
    assert (len(newest.messages), newest.stored) == (5, LETTERS)
    assert newest.older_ms == newest.messages[-1].store_time_ms
    until_ms = newest.messages[0].store_time_ms
    await bury(mq, b"later")
    again = await mq.admin.dead_letters("billing", until_ms=until_ms)
    assert (len(again.messages), again.stored) == (LETTERS, LETTERS)
    assert again.older_ms is None
    assert b"later" not in {one.body for one in again.messages}
    monkeypatch.setattr(core, "_PAGE", 4)
    few = await mq.admin.dead_letters("billing", bytes_max=1)
    assert (len(few.messages), few.stored) == (4, LETTERS + 1)
    older = (await browser.get(f"{AT}?until={few.older_ms}")).text
    assert "stored until" in older


async def test_a_dry_run_shows_the_result_of_each_and_sends_nothing(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    unchecked = (await browser.get(no_json())).text
    assert counts(unchecked) == {"unchecked": "4"}
    await listening(mq, "amount > 3")
    text = (
        await browser.get(no_json(find="NaN", put="null", set="fixed=yes", remove="region"))
    ).text
    assert counts(text) == {"matches": "2", "filtered": "2"}
    assert "amount &gt; 3 is false (amount is &#39;0&#39;" in text
    assert "<del>NaN</del><ins>null</ins>}" in text
    assert "<code>fixed</code>: <ins>yes</ins>" in text
    assert "<code>region</code>: <del>eu</del>" in text
    for edit, reason in (
        ({"tag": "A|B"}, "separates tags"),
        ({"to": "topic", "topic": "gone"}, "does not exist"),
        ({"set": "DELAY=3"}, "is reserved"),
        ({"find": '{"amount": NaN}'}, "the body has 0 bytes"),
    ):
        invalid = (await browser.get(no_json(**edit))).text
        assert counts(invalid) == {"invalid": "4"}, edit
        assert reason in invalid
        assert "None of them can be sent" in invalid
    for wrong in ({"set": "novalue"}, {"to": "x"}, {"to": "topic"}, {"put": "x" * 4_001}):
        assert (await browser.get(no_json(**wrong))).status_code == 400, wrong
    (queue,) = await mq.admin.queues("orders")
    assert await mq.admin.offsets(queue) == (0, LETTERS)


async def test_a_replay_sends_what_the_dry_run_showed_with_stable_ids(
    browser: Browser, mq: EmbeddedSluice, tmp_path: Path
) -> None:
    await listening(mq, "amount > 3")
    form = hidden((await browser.get(no_json(find="NaN", put="null", set="fixed=yes"))).text)
    for _ in range(2):
        done = await browser.post(f"{AT}/replay", form)
        assert done.status_code == 200
        assert counts(done.text) == {"sent": "2", "filtered": "2"}
        assert "At least once" in done.text
    ids = set(re.findall(r"/messages/orders/(\w{32})", done.text))
    assert len(ids) == 2
    for message_id in ids:
        first, again = await mq.admin.messages_with_id("orders", message_id)
        assert first.body == again.body == b'{"amount": null}'
        assert (first.tag, first.properties["fixed"], first.properties["region"]) == (
            "A", "yes", "eu",
        )  # fmt: skip
    lines = [orjson.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    noted = [one for one in lines if one["event"] == "replay dead letters"]
    assert [one["state"] for one in noted] == ["begun", "done"] * 2
    assert (noted[-1]["sent"], noted[-1]["filtered"]) == (2, 2)
    assert noted[-1]["form"]["cause"] == "the body is not JSON"
    assert "NaN" not in (tmp_path / "audit.jsonl").read_text()


async def test_single_dead_letters_can_be_sent_to_the_retry_topic(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    (queue,) = await mq.admin.queues("%DLQ%billing")
    pick = f"pick.{queue.broker}.{queue.queue_id}.3"
    early = (await browser.get(f"{AT}/replay?{pick}=1&to=retry")).text
    assert "the topic &#39;%RETRY%billing&#39; does not exist" in early
    await listening(mq, "amount = 3")
    form = hidden((await browser.get(f"{AT}/replay?{pick}=1&to=retry")).text)
    assert form[pick] == "1"
    done = (await browser.post(f"{AT}/replay", form)).text
    assert counts(done) == {"sent": "1"}
    (copy,) = await mq.admin.messages_by_key("%RETRY%billing", "o3")
    (letter,) = await mq.admin.messages_by_key("%DLQ%billing", "o3")
    assert copy.properties["RETRY_TOPIC"] == "orders"
    assert copy.properties["ORIGIN_MESSAGE_ID"] == letter.properties["ORIGIN_MESSAGE_ID"]
    assert copy.body == letter.body


async def test_a_batch_is_limited_and_a_link_shows_the_next_one(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "BATCH_MAX", 5)
    path, sent = f"{AT}/replay", []
    while path:
        text = (await browser.get(path)).text
        done = (await browser.post(f"{AT}/replay", hidden(text))).text
        sent.append(counts(done)["sent"])
        found = re.search(rf'href="({AT}/replay\?[^"]*from=\d+[^"]*)"', done)
        path = html.unescape(found[1]) if found else ""
    assert sent == ["5", "5", "2"]


async def test_failed_sends_are_shown_and_end_the_batch(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = hidden((await browser.get(f"{AT}/replay")).text)

    async def refused(_context: object, _one: object) -> None:
        raise SendUnknownError("no answer: it may be stored or not.")

    monkeypatch.setattr(pages, "send", refused)
    text = (await browser.post(f"{AT}/replay", form)).text
    assert counts(text) == {"failed": str(LETTERS)}
    assert text.count("it may be stored or not") == pages.FAILURES_MAX
    assert text.count("not tried") == LETTERS - pages.FAILURES_MAX


async def test_the_role_read_sees_all_and_sends_nothing(mq: EmbeddedSluice, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    async with browsing(connect_to(mq), tmp_path, roles=True) as browser:
        await browser.sign_in("read", SECRETS[Role.READ])
        for path in ("/dead-letters", AT, f"{AT}/letters", f"{AT}/replay"):
            assert (await browser.get(path)).status_code == 200
        assert "Send 12 letters" not in (await browser.get(f"{AT}/replay")).text
        assert (await browser.submit(f"{AT}/replay", to="origin")).status_code == 403
    async with browsing(connect_to(mq), tmp_path / "open", is_read_only=True) as browser:
        await browser.enter()
        assert "Send 12 letters" not in (await browser.get(f"{AT}/replay")).text
        assert (await browser.submit(f"{AT}/replay", to="origin")).status_code == 403
    (queue,) = await mq.admin.queues("orders")
    assert await mq.admin.offsets(queue) == (0, LETTERS)


async def test_a_form_without_its_token_sends_nothing(browser: Browser, mq: EmbeddedSluice) -> None:
    form = hidden((await browser.get(f"{AT}/replay")).text)
    assert (await browser.post(f"{AT}/replay", form | {"form_token": "x"})).status_code == 403
    elsewhere = await browser.post(f"{AT}/replay", form, origin="http://evil.test")
    assert elsewhere.status_code == 403
    (queue,) = await mq.admin.queues("orders")
    assert await mq.admin.offsets(queue) == (0, LETTERS)


async def test_markup_in_dead_letters_and_edits_is_escaped(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    own = {"error": PROBE, PROBE: PROBE}
    await bury(mq, PROBE.encode(), tag=PROBE, keys=["<b>key"], properties=own)
    cause = f"error: {PROBE}".replace("1", "#")
    edit = {
        "cause": cause, "origin": "orders", "find": "<", "put": PROBE, "set": f"{PROBE}={PROBE}",
        "remove": "error", "tag": PROBE, "keys": PROBE, "to": "topic", "topic": PROBE,
    }  # fmt: skip
    shown = 0
    for path in (AT, f"{AT}/letters", f"{AT}/letters?{urlencode(edit)}",
                 f"{AT}/replay?{urlencode(edit)}", f"{AT}/replay?set=a{PROBE}",
                 f"{AT}/replay?to={PROBE}", f"/dead-letters?q={PROBE}",
                 f"/dead-letters/{PROBE}/replay?{PROBE}={PROBE}",
                 f"{AT}/replay?pick.{PROBE}=1"):  # fmt: skip
        text = (await browser.get(path)).text
        assert "<script>alert" not in text, path
        assert "<b>key" not in text, path
        shown += "&lt;script&gt;" in text
    assert shown >= 5
    sendable = edit | {"to": "origin", "tag": "", "set": "a=b", "keys": "k"}
    dry = (await browser.get(f"{AT}/replay?{urlencode(sendable)}")).text
    assert "<ins>&#34;&#39;&gt;&lt;script&gt;" in dry
    done = (await browser.post(f"{AT}/replay", hidden(dry))).text
    assert counts(done) == {"sent": "1"}
    assert "<script>alert" not in done
