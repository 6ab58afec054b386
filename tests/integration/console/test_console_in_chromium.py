"""The console in Chromium: every page at two widths, light and dark.

No page may be wider than the screen, load or run anything that the policy forbids, or have an issue
that axe-core calls serious. Markup in messages is escaped. With SLUICEMQ_IMAGES=DIRECTORY the
screenshots are saved there, with a table of first paint and bytes.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chromium import Missing, axe, chromium
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.console.accounts import Accounts
from sluicemq.console.app import Console
from sluicemq.console.history import History
from sluicemq.console.serve import run_server
from sluicemq.model.message import Message
from sluicemq.pipelines.record import Recorder
from sluicemq.pipelines.run import Event
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from thorough import ALL
from waiting import limit

playwright = pytest.importorskip("playwright.async_api")
pytestmark = pytest.mark.slow

PROBE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
VIEWS = [(1280, "light"), (390, "dark"), (1280, "dark"), (390, "light")]
"""Widths and colours. The last two are looked at in the thorough run."""
PICTURES = {(1280, "light"), (390, "dark")}
SHOWN = "cluster", "group", "message", "lab", "account", "pipeline"
LOOKS = 40
OWN = "operations", "a-secret-of-operations"
RULES = """
globalWhiteRemoteAddresses: [10.20.30.40]
accounts:
- {accessKey: operations, secretKey: a-secret-of-operations, admin: true}
- accessKey: gate-displays
  secretKey: a-secret-of-gate-displays
  whiteRemoteAddress: 10.20.31.*
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms: [flights=SUB, gates=PUB|SUB]
- accessKey: booking-office
  secretKey: a-secret-of-booking-office
  topicPerms: [bookings=PUB, flights=SUB]
  groupPerms: [late=SUB]
"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
BYTES = (
    "performance.getEntries().filter(e => e.transferSize).reduce((s, e) => s + e.transferSize, 0)"
)
AXE_RUN = "async () => (await axe.run()).violations.map(v => [v.impact, v.id, v.nodes[0].html])"


def needed(find: Any) -> str:
    try:
        found: str = find()
    except Missing as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))
    return found


@pytest.fixture
async def console(tmp_path: Path) -> AsyncIterator[tuple[Console, str, str]]:
    """Yield a console of a cluster with flights, its address, and the id of a message."""
    rules = tmp_path / "plain_acl.yml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    settings = {"traceTopicEnable": "true", "aclEnable": "true", "plainAclFile": str(rules)}
    async with embedded(
        trace=True, store=tmp_path / "store", settings=settings, credentials=OWN
    ) as mq:
        message_id = await fill(mq)
        clock = PastClock()
        leave_runs(str(tmp_path / "runs"), clock)
        made = Console(
            lambda credentials: mq.servers.client(credentials=credentials or OWN),
            Accounts("/nowhere"),
            pipelines=(str(tmp_path / "runs"),),
        )
        made.history = await hours(mq, clock)
        async with run_server(made, "127.0.0.1", 0) as link:
            yield made, link.partition("/enter")[0], message_id


class Undecided(TransactionListener):
    def execute_local(self, message: Any, transaction_id: str, argument: object) -> Any:
        return TransactionState.UNKNOWN

    def check(self, message: Any) -> Any:
        return TransactionState.UNKNOWN


class PastClock:
    """A clock that is behind, so that events of a moment are drawn as if they had taken hours."""

    ago_s = 0.0

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms() - int(self.ago_s * 1000)

    def monotonic_s(self) -> float:
        return SYSTEM_CLOCK.monotonic_s() - self.ago_s


async def hours(mq: EmbeddedSluice, clock: PastClock) -> History:
    """Fill the history as if the console had measured a busy cluster for hours."""
    history = History(clock)
    for point in range(LOOKS):
        clock.ago_s = (LOOKS - 1 - point) * 300.0
        for number in range(point * 7 % 11):
            sent = {"origin": "JFK" if number % 2 else "EWR", "dep_delay": "75"}
            await mq.send("flights", b"{}", properties=sent)
        history.watch("late", await mq.admin.lag("late"))
        await history.sample(mq.admin)
        await asyncio.sleep(0.05)
    return history


def leave_runs(directory: str, clock: PastClock) -> None:
    """Write progress files of a running stream, a failed one, and a finished batch."""
    for name, kind, ending in (
        ("bookings-archive", "archive", ""),
        ("late-flights", "batch", "late.yaml:12: sinks[2].url: the database cannot be reached."),
        ("copy-flights", "streaming", None),
    ):
        clock.ago_s = 600.0
        recorder = Recorder(directory, name, f"{name}.yaml", kind, clock=clock)
        left = 90_000
        for batch in range(40):
            clock.ago_s = 600.0 - batch * 15
            rows = 1200 + batch % 7 * 180
            left = max(0, left - rows - 600) + (batch % 5) * 300
            figures = {
                "sink": "topic-copy", "rows": rows, "rows_per_second": rows / 3, "lag": left,
                "eta_s": left / rows * 3,
            }  # fmt: skip
            told = f"{name} topic-copy: batch {batch}: {rows:,} rows, lag {left:,}"
            recorder.record_event(Event("batch", told, figures))
        if ending is None:
            recorder.refresh()
        else:
            recorder.finish(ending)


async def fill(mq: EmbeddedSluice) -> str:
    await mq.admin.create_topic("flights", queues=4)
    for name in ("bookings", "gates", "weather"):
        await mq.admin.create_topic(name, queues=2)
    for number in range(240):
        sent = await mq.send(
            "flights",
            b'{"carrier": "UA", "dep_delay": %d}' % number,
            tag="UA",
            keys=[f"N{number}"],
            properties={"origin": "EWR" if number % 3 else "JFK", "dep_delay": str(number)},
        )
    probe = await mq.send(
        "flights", PROBE.encode(), tag="<b>", keys=["<i>key"], properties={"note": PROBE}
    )
    count = 0
    async with asyncio.timeout(limit(20)):
        async for message in mq.subscribe(
            "flights", group="late", where="origin = 'JFK' AND dep_delay > 60"
        ):
            await message.ack()
            count += 1
            if count == 20:
                break
    await mq.send("flights", b"{}", properties={"origin": "JFK", "dep_delay": "99"})
    await mq.send("flights", b"{}", tag="<b>", keys=["<i>key"], delay=3600)
    payers = mq.producer("payers", listener=Undecided())
    await payers.send_in_transaction(Message("flights", PROBE.encode(), keys=("<i>key",)))
    (stored,) = await mq.admin.messages_with_id("flights", probe.message_id)
    for address in (await mq.admin.masters()).values():
        dead = requests.send_back("late", stored, "flights", -1, 16)
        assert (await mq.admin.send_request(Call(address, dead))).code == 0
    assert sent
    return probe.message_id


def pages(message_id: str) -> dict[str, str]:
    lab = "origin%20%3D%20'JFK'%20AND%20dep_delay%20%3E%2060"
    return {
        "sign-in": "/sign-in", "cluster": "/", "topics": "/topics", "topic": "/topics/flights",
        "groups": "/groups", "group": "/groups/late",
        "reset": "/groups/late/reset?topic=flights&place=first",
        "messages": "/messages?topic=flights&by=time&where=dep_delay%20%3E%20230",
        "message": f"/messages/flights/{message_id}", "trace": f"/trace?id={message_id}",
        "dead letters": "/dead-letters", "dead group": "/dead-letters/late",
        "dead cluster": "/dead-letters/late/letters",
        "dry run": "/dead-letters/late/replay?find=b%3E&put=%3Cbr%3E&set=a%3D%3Ci%3E&remove=note",
        "delayed": "/delayed", "transactions": "/transactions",
        "lab": f"/lab?topic=flights&kind=SQL92&expression={lab}",
        "pipelines": "/pipelines", "pipeline": "/pipelines/copy-flights",
        "access": "/access", "account": "/access/account?key=gate-displays",
        "try": "/access/try?key=gate-displays&request=PULL_MESSAGE&topic=flights&group=late",
        "error": "/topics/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
    }  # fmt: skip


@pytest.mark.timeout(300)
async def test_every_page_in_a_real_browser(
    console: tuple[Console, str, str], tmp_path: Path
) -> None:
    made, base, message_id = console
    script, executable = needed(axe), needed(chromium)
    images = Path(os.environ.get("SLUICEMQ_IMAGES") or tmp_path)
    faults: list[str] = []

    def note(kind: str, text: str) -> None:
        """Record an error of the page, except that a page was not found."""
        if kind == "error" and "status of 40" not in text:
            faults.append(text)

    table = ["| page | first paint | bytes |", "|---|---|---|"]
    async with playwright.async_playwright() as tools:
        browser = await tools.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for width, scheme in VIEWS if ALL else VIEWS[:2]:
            context = await browser.new_context(
                viewport={"width": width, "height": 860}, color_scheme=scheme
            )
            page = await context.new_page()
            page.set_default_timeout(limit(30) * 1000)
            page.on("console", lambda said: note(said.type, said.text))
            page.on("pageerror", lambda error: note("error", str(error)))
            await page.goto(f"{base}/enter?token={made.sessions.create_link()}")
            for name, path in pages(message_id).items():
                if (width, scheme) not in PICTURES and name not in SHOWN:
                    continue
                where = f"{name} {width} {scheme}"
                await page.goto(base + path, wait_until="networkidle")
                if await page.evaluate("document.documentElement.scrollWidth") > width:
                    faults.append(f"{where}: wider than the screen")
                if await page.title() == "owned":
                    faults.append(f"{where}: ran what stands in a message")
                if (width, scheme) in PICTURES and name in SHOWN:
                    await page.screenshot(path=images / f"{name}-{width}.png")
                if width == 1280 and scheme == "light":
                    paint, size = await page.evaluate(PAINT), await page.evaluate(BYTES)
                    table.append(f"| {name} | {paint:.0f} ms | {size:,} |")
                await page.evaluate(script)
                found = await page.evaluate(AXE_RUN)
                faults += [f"{where}: {one}" for one in found if one[0] in ("serious", "critical")]
            await context.close()
        await browser.close()
    (images / "pages.md").write_text("\n".join(table) + "\n")
    assert not faults, "\n".join(faults)


async def test_actions_in_a_real_browser(console: tuple[Console, str, str]) -> None:
    made, base, message_id = console
    async with playwright.async_playwright() as tools:
        browser = await tools.chromium.launch(
            executable_path=needed(chromium), args=["--no-sandbox"]
        )
        page = await browser.new_page()
        page.set_default_timeout(limit(30) * 1000)
        await page.goto(f"{base}/enter?token={made.sessions.create_link()}")
        await page.goto(f"{base}/topics")
        await page.click("summary")
        await page.fill("details [name=topic]", "fresh")
        await page.click("details button")
        assert await page.inner_text(".notice") == "The topic is created."
        await page.click("summary")
        await page.fill("[name=typed]", "fresh")
        await page.click("button.bad")
        assert await page.inner_text(".notice") == "The topic is deleted."
        await page.goto(f"{base}/messages/flights/{message_id}")
        await page.check("[name=sure]")
        await page.click("form.card button")
        assert "done=resent" in page.url
        await page.goto(f"{base}/groups/late/reset?topic=flights&place=first")
        await page.click("form.do button")
        assert await page.inner_text(".notice") == "The group continues at the new offsets."
        await page.goto(f"{base}/dead-letters/late/letters")
        await page.check("[type=checkbox]")
        await page.fill("[name=find]", "<script>")
        await page.fill("[name=put]", "<b>")
        await page.fill("[name=set]", "origin=JFK\ndep_delay=99")
        await page.click("button.main")
        assert await page.inner_text("del") == "<script>"
        await page.click("form.chosen button")
        assert await page.inner_text(".badge.good") == "sent"
        await page.goto(f"{base}/delayed")
        await page.click("td a[href*=handle]")
        await page.check("[name=sure]")
        await page.click("form.chosen button")
        assert await page.inner_text(".notice") == "The message will never be delivered."
        await page.goto(f"{base}/lab?topic=flights")
        await page.fill("[name=expression]", "dep_delay > 229")
        await page.wait_for_selector("#result table")
        assert "dep_delay" in await page.inner_text("#result table")
        await page.click("a[hreflang=zh]")
        assert await page.get_attribute("html", "lang") == "zh"
        await browser.close()
