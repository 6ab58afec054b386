"""Pages of an embedded cluster, and of a large simulated one: contents, roles, and escaping."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from console_app import SECRETS, Browser, browsing
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.console.accounts import Role
from sluicemq.console.app import HEADERS
from sluicemq.console.pages import groups
from sluicemq.errors import NameServerUnreachableError, PermissionDeniedError
from sluicemq.model.topic import GroupConfig
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire import bodies
from stored_bodies import BAD, send_stored

pytestmark = pytest.mark.slow

PROBE = "\"'><script>alert(1)</script>"
CHANGES = {
    "/topics": {"topic": "fresh", "queues": "2", "perm": "6", "type": "normal"},
    "/topics/flights/change": {"perm": "4"},
    "/topics/flights/delete": {"typed": "flights"},
    "/groups/late/reset": {"topic": "flights", "place": "first"},
}
NEEDED = dict.fromkeys(CHANGES, Role.ADMIN) | {"/groups/late/reset": Role.OPERATE}


def connect_to(mq: EmbeddedSluice) -> Any:
    return lambda credentials: mq.servers.client(credentials=credentials)


@pytest.fixture
async def mq() -> AsyncIterator[EmbeddedSluice]:
    async with embedded() as made:
        await made.admin.create_topic("flights", queues=2)
        await made.admin.create_group(GroupConfig("late"))
        yield made


@pytest.fixture
async def browser(mq: EmbeddedSluice, tmp_path: Path) -> AsyncIterator[Browser]:
    async with browsing(connect_to(mq), tmp_path) as made:
        await made.enter()
        yield made


async def test_every_response_has_the_security_headers(browser: Browser) -> None:
    for path in ("/", "/topics", "/sign-in", "/nowhere", "/static/htmx.min.js"):
        answer = await browser.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert (await browser.get("/")).headers["cache-control"] == "no-store"


async def test_markup_in_all_parts_of_a_message_is_escaped(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    sent = await mq.send(
        "flights", PROBE.encode(), tag=PROBE, keys=["<b>key"], properties={"note": PROBE}
    )
    for path in (
        f"/messages/flights/{sent.message_id}",
        f"/messages/flights/{sent.message_id}?as=text",
        f"/messages/flights/{sent.message_id}/explain",
        f"/messages?topic=flights&by=time&where={PROBE}",
        "/messages?topic=flights&by=time",
        f"/messages?topic={PROBE}&by=key&text={PROBE}",
        f"/topics?q={PROBE}",
        f"/topics/{PROBE}",
        f"/groups/{PROBE}",
        f"/trace?id={PROBE}",
        f"/lab?topic=flights&expression={PROBE}",
        "/lab?topic=flights&expression=note%20IS%20NOT%20NULL",
        f"/groups/late/reset?topic={PROBE}&place=first",
    ):
        text = (await browser.get(path)).text
        assert "<script>alert" not in text, path
        assert "<b>key" not in text, path
    shown = (await browser.get(f"/messages/flights/{sent.message_id}?as=text")).text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown


@pytest.mark.parametrize("path", CHANGES)
async def test_a_form_without_its_token_changes_nothing(browser: Browser, path: str) -> None:
    data, token = CHANGES[path], await browser.form_token()
    assert (await browser.post(path, data)).status_code == 403
    assert (await browser.post(path, data | {"form_token": token[:-1]})).status_code == 403
    from_elsewhere = await browser.post(
        path, data | {"form_token": token}, origin="http://evil.test"
    )
    assert from_elsewhere.status_code == 403
    assert (await browser.get(path)).status_code in (200, 404, 405)


async def test_each_role_can_change_only_what_it_may(mq: EmbeddedSluice, tmp_path: Path) -> None:
    async with browsing(connect_to(mq), tmp_path, roles=True) as browser:
        for role in (Role.READ, Role.OPERATE):
            await browser.sign_in(role.name.lower(), SECRETS[role])
            for path, needed in NEEDED.items():
                answer = await browser.submit(path, **CHANGES[path])
                assert (answer.status_code == 403) is (role < needed), (role, path)
            assert "Create a topic" not in (await browser.get("/topics")).text
    assert "fresh" not in await mq.admin.topics()
    assert "flights" in await mq.admin.topics()


async def test_a_read_only_console_changes_nothing(mq: EmbeddedSluice, tmp_path: Path) -> None:
    async with browsing(connect_to(mq), tmp_path, is_read_only=True) as browser:
        await browser.enter()
        for path, data in CHANGES.items():
            assert (await browser.submit(path, **data)).status_code == 403
        assert "form_token" in (await browser.get("/topics")).text  # to sign out
        assert "Create a topic" not in (await browser.get("/topics")).text


async def test_changes_are_written_to_the_audit_log_before_and_after(
    browser: Browser, mq: EmbeddedSluice, tmp_path: Path
) -> None:
    made = await browser.submit("/topics", **CHANGES["/topics"])
    assert made.headers["location"] == "/topics/fresh?done=created"
    wrong = await browser.submit("/topics/fresh/delete", typed="fish")
    assert wrong.status_code == 400
    assert "fresh" in await mq.admin.topics()
    await browser.submit("/topics/fresh/delete", typed="fresh")
    assert "fresh" not in await mq.admin.topics()
    lines = [orjson.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    events = [(line["event"], line["state"]) for line in lines[1:]]
    assert events == [
        ("create topic", "begun"), ("create topic", "done"), ("delete topic", "begun"),
        ("delete topic", "failed"), ("delete topic", "begun"), ("delete topic", "done"),
    ]  # fmt: skip
    assert lines[1]["account"] == "owner"
    assert "form_token" not in (tmp_path / "audit.jsonl").read_text()


async def test_an_undecodable_message_is_shown_as_stored_and_not_sent_again(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    await send_stored(mq, "flights", "BAD0", BAD["zlib, garbage"], KEYS="k")
    page = await browser.get("/messages/flights/BAD0")
    assert page.status_code == 200
    assert "This body cannot be decoded" in page.text
    assert "incorrect header check" in page.text
    assert "not compressed" in page.text
    assert "BAD0" in (await browser.get("/messages?topic=flights&by=time")).text
    told = (await browser.get("/messages/flights/BAD0/explain")).text
    assert told
    again = await browser.submit("/messages/flights/BAD0/resend", sure="yes")
    assert again.status_code >= 400
    assert "cannot be decoded" in again.text


async def test_a_message_is_found_by_key_id_time_and_properties(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    ids = [
        (await mq.send("flights", b"{}", keys=[f"k{n}"], properties={"n": str(n)})).message_id
        for n in range(8)
    ]
    by_key = (await browser.get("/messages?topic=flights&by=key&text=k3")).text
    assert ids[3] in by_key
    assert ids[4] not in by_key
    nowhere = await browser.get(f"/messages?by=id&text={ids[5]}")
    assert nowhere.status_code == 404
    assert "Name its topic" in nowhere.text
    by_id = await browser.get(f"/messages?by=id&topic=flights&text={ids[5]}")
    assert by_id.headers["location"] == f"/messages/flights/{ids[5]}"
    by_time = (await browser.get("/messages?topic=flights&by=time&where=n%20%3E%205")).text
    assert [one for one in ids if one in by_time] == ids[6:]
    long_ago = "&begin=2001-01-01T00:00&end=2001-01-02T00:00"
    assert "No such message" in (await browser.get(f"/messages?topic=flights{long_ago}")).text
    assert (await browser.get("/messages?topic=flights&begin=never")).status_code == 400


async def test_the_live_part_of_the_lab_has_the_counts(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    for number in range(10):
        await mq.send("flights", b"x", properties={"n": str(number)})
    live = await browser.get("/lab?topic=flights&expression=n%20%3E%206", live=True)
    assert "<html" not in live.text
    assert "30.0 %" in live.text
    broken = await browser.get("/lab?topic=flights&expression=n%20%3E", live=True)
    assert broken.status_code == 200
    assert "finding" in broken.text


async def test_language_and_theme_are_kept(browser: Browser) -> None:
    answer = await browser.get("/topics?language=zh&theme=dark&q=a")
    assert answer.headers["location"] == "/topics?q=a"
    text = (await browser.get("/topics")).text
    assert 'lang="zh" data-theme="dark"' in text
    assert "主题" in text


async def test_a_refused_lag_is_not_shown_as_0_and_not_in_the_chart(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_admin: object, _group: str) -> None:
        raise PermissionDeniedError(16, "no rights on the group.")

    await browser.get("/groups/late")
    ring = browser.console.history.groups["late"]
    before = ring.chart_data("lag")
    monkeypatch.setattr(type(browser.console.client(None).admin), "lag", refused)
    text = (await browser.get("/groups/late", live=True)).text
    assert "no rights on the group" in text
    assert re.search(r"<dt>Lag</dt>\s*<dd[^>]*>\s*–", text)
    assert ring.chart_data("lag") == before


async def test_a_form_belongs_to_the_group_of_its_page(
    browser: Browser, mq: EmbeddedSluice
) -> None:
    for name in ("%41bc", "Abc"):
        await mq.admin.create_group(GroupConfig(name))
    text = (await browser.get("/groups/%2541bc/reset?topic=flights&place=first")).text
    assert 'method="post" action="/groups/%2541bc/reset"' in text


async def test_no_link_leads_to_another_site(browser: Browser) -> None:
    text = (await browser.http.get("http://console:8082//evil.example/")).text
    assert 'href="//' not in text
    assert 'href="/evil.example/' in text


async def test_members_that_are_connected_to_a_proxy_are_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take(_message: Any) -> None:
        pass

    async with embedded(tcp=True, proxy=True) as mq:
        await mq.admin.create_topic("flights", queues=1)
        await mq.consumer("late", take).subscribe("flights").start()
        (member,) = await mq.admin.consumers("late")
        at, page = mq.servers.proxy_address, "/groups/late"
        async with browsing(connect_to(mq), tmp_path, proxies=(at,)) as browser:
            await browser.enter()
            assert '<td data-label="Protocol">Remoting</td>' in (await browser.get(page)).text
            clients = [{"client_id": member.client_id, "group": "late"}]
            monkeypatch.setattr(groups, "fetch_proxy_status", lambda *_given: {"clients": clients})
            assert f"gRPC</span> <code>{at}</code>" in (await browser.get(page)).text
            monkeypatch.undo()
            browser.console.proxies = ("127.0.0.1:1",)
            text = (await browser.get(page)).text
            assert "127.0.0.1:1: Not known:" in text
            assert '<td data-label="Protocol">–</td>' in text


class LargeAdmin:
    """The admin interface of a cluster with 10,000 topics and 2,000 groups."""

    async def topics(self) -> list[str]:
        return [f"topic-{number:05}" for number in range(10_000)]

    async def groups(self) -> dict[str, GroupConfig]:
        names = (f"group-{number:04}" for number in range(2_000))
        return {name: GroupConfig(name) for name in names}

    async def cluster_info(self) -> bodies.ClusterInfo:
        return bodies.ClusterInfo({}, {})


class Unreachable:
    async def topics(self) -> list[str]:
        raise NameServerUnreachableError("no name server answers.", fix="Start one.")


class Fake:
    def __init__(self, admin: object) -> None:
        self.admin = admin

    async def close(self) -> None:
        pass


async def test_the_first_page_of_a_large_cluster_is_fast(tmp_path: Path) -> None:
    async with browsing(lambda _: Fake(LargeAdmin()), tmp_path) as browser:  # type: ignore[arg-type, return-value]
        await browser.enter()
        for path, last in (("/topics", "topic-00049"), ("/groups", "group-0049")):
            spans = []
            for _ in range(5):
                browser.console.cache.clear()
                begun_s = SYSTEM_CLOCK.monotonic_s()
                text = (await browser.get(path)).text
                spans.append(SYSTEM_CLOCK.monotonic_s() - begun_s)
                assert last in text
            assert min(spans) < 0.3
        assert "topic-09999" in (await browser.get("/topics?page=200")).text
        assert "topic-00777" in (await browser.get("/topics?q=777")).text


async def test_an_error_page_has_the_text_and_the_fix(tmp_path: Path) -> None:
    async with browsing(lambda _: Fake(Unreachable()), tmp_path) as browser:  # type: ignore[arg-type, return-value]
        await browser.enter()
        answer = await browser.get("/topics")
        assert answer.status_code == 502
        assert "no name server answers" in answer.text
        assert "Start one." in answer.text
        assert "Traceback" not in answer.text
