"""Pages of access rules: accounts without secrets, deciding rules, tried requests, and changes.

Only an admin may change them. A broker without rules is shown with the reason.

"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from console_app import SECRETS, Browser, browsing
from sluicemq.acl.rules import Account, Permission, Rules
from sluicemq.acl.verdict import REQUIREMENTS, requirement_of
from sluicemq.console.accounts import Role
from sluicemq.console.pages.access import REQUESTS, evaluate_request
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import GroupConfig
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire.codes import RequestCode

RULES = """
globalWhiteRemoteAddresses: [10.9.*.*]
accounts:
- {accessKey: admin-key, secretKey: admin-secret-of-one, admin: true}
- accessKey: reader-key
  secretKey: reader-secret-of-one
  whiteRemoteAddress: 10.8.1.1
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms: [flights=SUB, "%3Cb%3E=PUB"]
"""
CHANGES = {
    "/access/account": {
        "access_key": "fresh-key", "secret_key": "fresh-secret-of-one", "white_address": "",
        "topic_default": "DENY", "group_default": "SUB", "topic_permissions": "flights=PUB|SUB",
    },
    "/access/account/delete": {"access_key": "reader-key", "typed": "reader-key"},
    "/access/white": {"addresses": "10.7.0.1\n10.6.*.*"},
}  # fmt: skip


@asynccontextmanager
async def guarded(directory: Path) -> AsyncIterator[EmbeddedSluice]:
    path = directory / "plain_acl.yml"
    path.write_text(RULES)
    path.chmod(0o600)
    settings = {"aclEnable": "true", "plainAclFile": str(path)}
    credentials = "admin-key", "admin-secret-of-one"
    async with embedded(
        store=directory / "store", settings=settings, credentials=credentials
    ) as mq:
        await mq.admin.create_topic("flights", queues=1)
        await mq.admin.create_topic("gates", queues=1)
        await mq.admin.create_group(GroupConfig("late"))
        yield mq


def connect_to(mq: EmbeddedSluice) -> Any:
    """Connect with the console's own key if no credentials are given."""
    own = "admin-key", "admin-secret-of-one"
    return lambda credentials: mq.servers.client(credentials=credentials or own)


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[EmbeddedSluice]:
    async with guarded(tmp_path) as made:
        yield made


@pytest.fixture
async def browser(mq: EmbeddedSluice, tmp_path: Path) -> AsyncIterator[Browser]:
    async with browsing(connect_to(mq), tmp_path) as made:
        await made.enter()
        yield made


def badges(text: str, name: str) -> list[str]:
    """Return the verdicts in the row of a resource."""
    row = text.partition(f">{name}</a></th>")[2].partition("</tr>")[0]
    return re.findall(r"(allowed|denied)</span>", row)


async def test_accounts_are_shown_without_their_secrets(browser: Browser) -> None:
    pages = [
        (await browser.get(path)).text
        for path in ("/access", "/access/account?key=reader-key", "/access/try?key=reader-key")
    ]
    assert "reader-key" in pages[0]
    assert "flights=SUB" in pages[0]
    assert "10.9.*.*" in pages[0]
    assert "In force since" in pages[0]
    for text in pages:
        assert "secret-of-one" not in text
        assert "******" not in text


async def test_permissions_are_shown_with_the_deciding_rule(browser: Browser) -> None:
    text = (await browser.get("/access/account?key=reader-key")).text
    assert badges(text, "flights") == ["denied", "allowed"]
    assert badges(text, "gates") == ["denied", "denied"]
    assert "reader-key: topicPerms flights=SUB" in text
    assert "reader-key: defaultTopicPerm for gates=DENY" in text
    groups = (await browser.get("/access/account?key=reader-key&kind=groups&q=LAT")).text
    assert badges(groups, "late") == ["allowed"]
    admin = (await browser.get("/access/account?key=admin-key&q=gates")).text
    assert badges(admin, "gates") == ["allowed", "allowed"]
    assert "admin-key: admin: true" in admin
    missing = await browser.get("/access/account?key=<b>nobody")
    assert missing.status_code == 400
    assert "<b>nobody" not in missing.text


TRIED = [
    ("key=reader-key&request=SUB&topic=flights", True, "topicPerms flights=SUB"),
    ("key=reader-key&request=PUB&topic=flights", False, "No permission for topic:flights"),
    ("key=reader-key&request=SUB&group=late", True, "defaultGroupPerm for late=SUB"),
    ("request=SUB&topic=flights", False, "No accessKey is configured"),
    ("request=SUB&topic=flights&host=10.9.3.4", True, "globalWhiteRemoteAddresses 10.9.*.*"),
    ("key=nobody&request=SUB&topic=flights", False, "No acl config for nobody"),
    ("key=reader-key&request=SUB&topic=gates&host=10.8.1.1", True, "whiteRemoteAddress"),
    ("key=reader-key&request=SEND_MESSAGE_V2&topic=flights", False, "No permission"),
    ("key=reader-key&request=PULL_MESSAGE&topic=flights&group=late", True, "late=SUB"),
    ("key=reader-key&request=HEART_BEAT&topic=gates&group=late", False, "topic:gates"),
    ("key=reader-key&request=DELETE_TOPIC_IN_BROKER", False, "Need admin permission"),
    ("key=admin-key&request=DELETE_TOPIC_IN_BROKER", True, "admin: true"),
]
REFUSED = [
    ("request=PUB", "Enter one of them"),
    ("request=SEND_MESSAGE", "needs a topic"),
    ("request=HEART_BEAT&topic=gates", "needs a group"),
    ("request=SUB&topic=t&host=nowhere", "is not an IP address"),
    ("request=nonsense", "There is no request"),
]


async def test_a_request_is_tried(browser: Browser) -> None:
    for query, is_allowed, words in TRIED:
        text = (await browser.get(f"/access/try?{query}")).text
        said = ">allowed</span>" in text, ">denied</span>" in text
        assert said == (is_allowed, not is_allowed), query
        assert words in text
    for query, words in REFUSED:
        answer = await browser.get(f"/access/try?{query}")
        assert answer.status_code == 200
        assert words in answer.text


def test_every_request_on_the_list_can_be_tried() -> None:
    one = Account("reader-key", "", topic_default=Permission.ANY, group_default=Permission.ANY)
    given = {"key": "reader-key", "host": "", "topic": "flights", "group": "late"}
    for name in REQUESTS:
        verdict = evaluate_request(Rules({"reader-key": one}), name, given)
        need = requirement_of(RequestCode[name])
        assert verdict.is_allowed is not need.is_admin, name
        if need.resources is not None and RequestCode[name] in REQUIREMENTS:
            assert "default" in verdict.rule, name
    with pytest.raises(ConfigurationError):
        evaluate_request(Rules(), "BATCH_ACK_MESSAGE", given)


async def test_accounts_and_addresses_are_changed(
    browser: Browser, mq: EmbeddedSluice, tmp_path: Path
) -> None:
    made = await browser.submit("/access/account", **CHANGES["/access/account"])
    assert made.headers["location"] == "/access/account?key=fresh-key&done=account_saved"
    assert "flights=PUB|SUB" in (await browser.get("/access")).text
    kept = {"access_key": "fresh-key", "white_address": "10.1.1.1", "topic_default": "SUB"}
    await browser.submit("/access/account", **kept)
    file = (tmp_path / "plain_acl.yml").read_text()
    assert "fresh-secret-of-one" in file  # a secret that is not given stays
    assert "10.1.1.1" in file
    wrong = await browser.submit("/access/account/delete", access_key="fresh-key", typed="fresh")
    assert wrong.status_code == 400
    gone = await browser.submit("/access/account/delete", access_key="fresh-key", typed="fresh-key")
    assert gone.headers["location"] == "/access?done=account_deleted"
    await browser.submit("/access/white", **CHANGES["/access/white"])
    text = (await browser.get("/access")).text
    assert "fresh-key" not in text
    assert "10.6.*.*" in text
    refused = await browser.submit("/access/account", access_key="short-one", secret_key="x")
    assert refused.status_code == 400
    assert "made at 0 of 1 brokers" in refused.text
    log = (tmp_path / "audit.jsonl").read_text()
    assert "fresh-secret-of-one" not in log
    lines = [orjson.loads(line) for line in log.splitlines()]
    events = [
        line["event"] for line in lines if line.get("state") == "done" and line["event"] != "link"
    ]
    assert events == [
        "change access account", "change access account", "delete access account",
        "change white addresses",
    ]  # fmt: skip


async def test_only_an_admin_can_see_and_change_access_rules(
    mq: EmbeddedSluice, tmp_path: Path
) -> None:
    async with browsing(connect_to(mq), tmp_path, roles=True) as browser:
        for role in (Role.READ, Role.OPERATE):
            await browser.sign_in(role.name.lower(), SECRETS[role])
            assert 'href="/access"' not in (await browser.get("/topics")).text
            for path in ("/access", "/access/account?key=reader-key", "/access/try"):
                assert (await browser.get(path)).status_code == 403
            for path, data in CHANGES.items():
                assert (await browser.submit(path, **data)).status_code == 403
        await browser.sign_in("admin", SECRETS[Role.ADMIN])
        for path, data in CHANGES.items():
            assert (await browser.post(path, data)).status_code == 403  # without its token
        assert "reader-key" in (await browser.get("/access")).text
    (tmp_path / "other").mkdir()
    async with browsing(connect_to(mq), tmp_path / "other", is_read_only=True) as browser:
        await browser.enter()
        text = (await browser.get("/access")).text
        assert "reader-key" in text
        assert "Create an account" not in text
        for path, data in CHANGES.items():
            assert (await browser.submit(path, **data)).status_code == 403


async def test_the_access_key_of_the_session_cannot_be_deleted(browser: Browser) -> None:
    await browser.sign_in("admin-key", "admin-secret-of-one", kind="key")
    answer = await browser.submit(
        "/access/account/delete", access_key="admin-key", typed="admin-key"
    )
    assert answer.status_code == 400
    assert "signs its requests with" in answer.text


async def test_without_rules_the_pages_show_the_reason(tmp_path: Path) -> None:
    async with (
        embedded() as open_mq,
        browsing(
            lambda credentials: open_mq.servers.client(credentials=credentials), tmp_path
        ) as browser,
    ):
        await browser.enter()
        for path in ("/access", "/access/account?key=anybody", "/access/try?request=SUB&topic=t"):
            answer = await browser.get(path)
            assert answer.status_code == 200
            assert "aclEnable is false" in answer.text
            assert "No broker reports access rules" in answer.text
            assert 'action="/access/' not in answer.text.partition("<main")[2]
