"""The console before a real RocketMQ cluster: each page answers, none fails or is empty without a
word, and what such a broker cannot tell is grey, with the reason.
"""

import asyncio
import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from peer.clusters import Cluster
from peer.names import own

from console_app import Browser, browsing
from sluicemq import Sluice
from sluicemq.console.table import PAGES


def words_of(text: str) -> str:
    """What a page says in its main part."""
    main = text.partition("<main")[2].partition("</main>")[0] or text
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", main)))


async def shown(browser: Browser, path: str, *, live: bool = False) -> str:
    """A page that answers and says something. Its words. Of what is not there it says why."""
    answer = await browser.get(path, live=live)
    wanted = 404 if path.startswith(("/trace", "/dead-letters/")) else 200
    assert answer.status_code == wanted, (path, answer.status_code, words_of(answer.text))
    text = words_of(answer.text)
    assert len(text) > 20, path
    return text


async def test_every_page_answers_before_a_rocketmq_cluster(
    cluster: Callable[[str], Cluster], tmp_path: Path
) -> None:
    names = cluster("rocketmq").name_server
    topic = group = own("console")
    over = asyncio.Event()

    async def take(_message: Any) -> None:
        """Holds what it gets, so that there is a lag."""
        await over.wait()

    async with Sluice(names) as mq:
        await mq.admin.create_topic(topic, queues=1, type="normal")
        sent = [await mq.send(topic, b'{"n": 1}', keys=["k1"], properties={"n": str(n)})
                for n in range(3)]  # fmt: skip
        await mq.consumer(group, take).subscribe(topic).start()
        try:
            async with browsing(lambda _: Sluice(names), tmp_path) as browser:
                await browser.enter()
                where = f"topic={topic}&n=1"
                paths = {
                    "/": "RocketMQ", "/topics": topic, "/groups": "",
                    f"/topics/{topic}": "Settings",
                    f"/groups/{group}": "the number of matching messages and the time left",
                    f"/groups/{group}/reset?topic={topic}&place=first": "What would change",
                    f"/messages?topic={topic}&by=key&text=k1": sent[0].message_id,
                    f"/messages?topic={topic}&by=time": sent[2].message_id,
                    f"/messages/{topic}/{sent[1].message_id}": "json",
                    f"/messages/{topic}/{sent[1].message_id}/explain": "What became of the message",
                    f"/trace?id={sent[1].message_id}": "no broker has the trace topic",
                    f"/lab?topic={topic}&expression={quote('n > 1')}": "",
                    "/access": "No broker reports access rules",
                    "/access/account?key=anybody": "No broker reports access rules",
                    f"/access/try?request=SUB&{where}": "No broker reports access rules",
                    "/dead-letters": "", f"/dead-letters/{group}": "has no dead letters",
                    f"/dead-letters/{group}/letters": "", f"/dead-letters/{group}/replay": "",
                    "/delayed": "900101 not supported", "/transactions": "900111 not supported",
                }  # fmt: skip
                said = {path: await shown(browser, path) for path in paths}
                for path in ("/", "/topics", "/groups", f"/topics/{topic}", f"/groups/{group}"):
                    said[f"live {path}"] = await shown(browser, path, live=True)
        finally:
            over.set()
    assert "Time left –" in said[f"live /groups/{group}"]
    for path, wanted in paths.items():
        assert wanted in said[path], path
    ours = {page.path for page in PAGES if page.template and "pipelines" not in page.path}
    known = {path.partition("?")[0] for path in paths}  # pipelines are of no cluster
    assert len(known) == len(ours), "a page is left out"
