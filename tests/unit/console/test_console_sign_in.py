"""Signing in: accounts, access keys, links, throttling, and forms of other sites."""

import asyncio
import stat
from pathlib import Path

import httpx
import orjson
import pytest

from console_app import SECRETS, Browser, browsing
from sluicemq.console.accounts import Accounts, Role
from sluicemq.console.serve import run_server
from sluicemq.console.sessions import FAILURES_FREE, IDLE_S, LIFE_S, Session, Sessions, Throttle
from sluicemq.errors import ConfigurationError
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.wire.frames import Command

pytestmark = pytest.mark.slow


class HandClock:
    """A clock that the test moves."""

    now_s = 1000.0

    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s


def connect_to(mq: EmbeddedSluice):
    return lambda credentials: mq.servers.client(credentials=credentials)


@pytest.fixture
async def browser(tmp_path: Path):
    async with embedded() as mq, browsing(connect_to(mq), tmp_path, roles=True) as made:
        yield made


def test_accounts_are_hashed_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    accounts = Accounts(str(tmp_path / "own" / "console.json"))
    accounts.add("ann", "correct horse battery", Role.OPERATE)
    path = Path(accounts.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "correct" not in path.read_text()
    found = accounts.authenticate("ann", "correct horse battery")
    assert found is not None
    assert found.role is Role.OPERATE
    assert accounts.authenticate("ann", "wrong") is None
    assert accounts.authenticate("nobody", "correct horse battery") is None
    accounts.remove("ann")
    assert Accounts(accounts.path).load() == {}


def test_invalid_accounts_are_refused_with_a_fix(tmp_path: Path) -> None:
    accounts = Accounts(str(tmp_path / "console.json"))
    with pytest.raises(ConfigurationError, match="12 or more"):
        accounts.add("ann", "short", Role.READ)
    with pytest.raises(ConfigurationError, match="no role"):
        Role.parse("root")
    Path(accounts.path).write_text("[1]")
    with pytest.raises(ConfigurationError, match="not a valid file of accounts"):
        accounts.load()


def test_sessions_end_when_idle_and_after_their_lifetime() -> None:
    clock = HandClock()
    sessions = Sessions(clock)
    token = sessions.start(Session("ann", Role.READ))
    clock.now_s += IDLE_S - 1
    assert sessions.find(token)
    clock.now_s += IDLE_S + 1
    assert sessions.find(token) is None
    token = sessions.start(Session("ann", Role.READ))
    for _ in range(int(LIFE_S // IDLE_S) + 1):
        clock.now_s += IDLE_S - 1
        sessions.find(token)
    assert sessions.find(token) is None


def test_requests_without_the_user_do_not_renew_a_session() -> None:
    clock = HandClock()
    sessions = Sessions(clock)
    token = sessions.start(Session("ann", Role.READ))
    clock.now_s += IDLE_S - 1
    assert sessions.find(token, renews=False)
    clock.now_s += 2
    assert sessions.find(token) is None


def test_the_wait_doubles_with_each_wrong_secret() -> None:
    clock = HandClock()
    throttle = Throttle(clock)
    for _ in range(FAILURES_FREE - 1):
        throttle.add_failure("ann", "10.0.0.1")
        assert throttle.wait_s("ann", "10.0.0.1") == 0
    waits = []
    for _ in range(3):
        throttle.add_failure("ann", "10.0.0.1")
        waits.append(throttle.wait_s("ann", "10.0.0.1"))
    assert waits == [1, 2, 4]
    assert throttle.wait_s("bob", "10.0.0.1") == 0
    assert throttle.wait_s("ann", "10.0.0.2") == 0
    for number in range(FAILURES_FREE * 4):
        throttle.add_failure(f"name {number}", "10.0.0.1")
    assert throttle.wait_s("bob", "10.0.0.1") > 0


async def test_nothing_is_shown_before_signing_in(browser: Browser) -> None:
    for path in ("/", "/topics", "/topics/flights", "/groups", "/groups/late"):
        answer = await browser.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/sign-in")
        live = await browser.get(path, live=True)
        assert live.status_code == 204
        assert live.headers["hx-redirect"] == "/sign-in"


async def test_the_link_works_once(tmp_path: Path) -> None:
    async with embedded() as mq, browsing(connect_to(mq), tmp_path) as browser:
        await enters_once(browser)


async def test_the_link_is_invalid_once_there_are_accounts(browser: Browser) -> None:
    assert (await browser.enter()).status_code == 403


async def enters_once(browser: Browser) -> None:
    token = browser.console.sessions.create_link()
    assert (await browser.get(f"/enter?token={token}x")).status_code == 403
    assert (await browser.get(f"/enter?token={token}")).status_code == 303
    assert (await browser.get("/")).status_code == 200
    assert (await browser.get(f"/enter?token={token}")).status_code == 403
    assert (await browser.get("/enter?token=")).status_code == 403


async def test_signing_in_makes_a_new_session_and_ends_the_old_one(browser: Browser) -> None:
    name = "sluice_console_8082"
    browser.http.cookies.set(name, "chosen-by-somebody-else")
    answer = await browser.sign_in("read", SECRETS[Role.READ])
    assert answer.status_code == 303
    token = answer.cookies[name]
    assert token != "chosen-by-somebody-else"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert browser.console.sessions.find("chosen-by-somebody-else") is None
    await browser.sign_in("read", SECRETS[Role.READ])
    assert browser.console.sessions.find(token) is None


async def test_after_signing_out_the_token_is_invalid(browser: Browser) -> None:
    answer = await browser.sign_in("read", SECRETS[Role.READ])
    token = answer.cookies["sluice_console_8082"]
    await browser.submit("/sign-out")
    browser.http.cookies.set("sluice_console_8082", token)
    assert (await browser.get("/")).status_code == 303


async def test_wrong_secrets_are_throttled_and_logged(browser: Browser, tmp_path: Path) -> None:
    for _ in range(FAILURES_FREE):
        assert (await browser.sign_in("read", "wrong")).status_code == 401
    assert (await browser.sign_in("read", SECRETS[Role.READ])).status_code == 429
    lines = [orjson.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    assert [line["state"] for line in lines] == ["refused"] * FAILURES_FREE + ["throttled"]
    assert "wrong" not in (tmp_path / "audit.jsonl").read_text()


async def test_concurrent_attempts_are_throttled_too(browser: Browser) -> None:
    answers = await asyncio.gather(*(browser.sign_in("read", "wrong") for _ in range(12)))
    codes = [answer.status_code for answer in answers]
    assert codes.count(401) == FAILURES_FREE
    assert codes.count(429) == 12 - FAILURES_FREE


async def test_correct_secrets_never_wait(browser: Browser) -> None:
    for _ in range(FAILURES_FREE * 5):
        assert (await browser.sign_in("read", SECRETS[Role.READ])).status_code == 303


async def test_the_sessions_of_a_removed_account_end_at_once(browser: Browser) -> None:
    await browser.sign_in("read", SECRETS[Role.READ])
    assert (await browser.get("/")).status_code == 200
    browser.console.accounts.remove("read")
    assert (await browser.get("/")).status_code == 303


async def test_old_sessions_end_when_the_secret_is_changed(browser: Browser) -> None:
    await browser.sign_in("read", SECRETS[Role.READ])
    assert (await browser.get("/")).status_code == 200
    browser.console.accounts.add("read", "another secret of it", Role.READ)
    assert (await browser.get("/")).status_code == 303


async def test_live_parts_do_not_renew_a_session(tmp_path: Path) -> None:
    clock = HandClock()
    async with embedded() as mq, browsing(connect_to(mq), tmp_path, clock=clock) as browser:
        await browser.enter()
        clock.now_s += IDLE_S - 1
        assert (await browser.get("/groups", live=True)).status_code == 200
        clock.now_s += 2
        assert (await browser.get("/groups")).status_code == 303


async def test_long_names_and_forms_are_neither_logged_nor_counted(
    browser: Browser, tmp_path: Path
) -> None:
    assert (await browser.sign_in("n" * 129, "wrong")).status_code == 401
    assert (await browser.sign_in("n" * 5000, "wrong")).status_code == 403
    assert not (tmp_path / "audit.jsonl").read_bytes()
    assert not browser.console.throttle._failures


@pytest.mark.parametrize(
    ("next_page", "location"),
    [("/topics?q=a", "/topics?q=a"), ("//evil.test", "/"), ("https://evil.test", "/"),
     ("/\\evil.test", "/"), ("/\r\nx: y", "/")],
)  # fmt: skip
async def test_signing_in_never_redirects_to_another_site(
    browser: Browser, next_page: str, location: str
) -> None:
    answer = await browser.http.post(
        "/sign-in",
        params={"next": next_page},
        data={"name": "read", "secret": SECRETS[Role.READ], "kind": "account"},
    )
    assert answer.headers["location"] == location


async def test_other_sites_cannot_sign_a_user_in(browser: Browser) -> None:
    data = {"name": "read", "secret": SECRETS[Role.READ], "kind": "account"}
    for headers in ({"origin": "http://evil.test"}, {"sec-fetch-site": "cross-site"}):
        assert (await browser.post("/sign-in", data, **headers)).status_code == 403
    own = await browser.post("/sign-in", data, origin="http://console:8082")
    assert own.status_code == 303


async def test_behind_a_proxy_with_tls_the_cookie_is_secure(browser: Browser) -> None:
    data = {"name": "read", "secret": SECRETS[Role.READ], "kind": "account"}
    for origin, is_secure in (("https://console:8082", True), ("http://console:8082", False)):
        answer = await browser.post("/sign-in", data, origin=origin)
        assert ("secure" in answer.headers["set-cookie"].lower()) is is_secure


async def test_the_client_address_is_that_of_the_connection(
    browser: Browser, tmp_path: Path
) -> None:
    data = {"name": "read", "secret": "wrong", "kind": "account"}
    forwarded = {"x-forwarded-for": "203.0.113.9"}
    async with run_server(browser.console, "127.0.0.1", 0) as base, httpx.AsyncClient() as http:
        answer = await http.post(f"{base}sign-in", data=data, headers=forwarded)
    assert answer.status_code == 401
    noted = orjson.loads((tmp_path / "audit.jsonl").read_bytes())
    assert noted["address"] == "127.0.0.1"


ADMIN = "admin-key", "admin-secret"
RULES = """
accounts:
- {accessKey: admin-key, secretKey: admin-secret, admin: true}
- {accessKey: plain-key, secretKey: plain-secret, defaultTopicPerm: SUB, defaultGroupPerm: SUB}
"""


async def test_an_access_key_is_checked_by_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(RULES)
    path.chmod(0o600)
    settings = {"aclEnable": "true", "plainAclFile": str(path)}
    async with (
        embedded(
            store=tmp_path / "store", settings=settings, credentials=("admin-key", "admin-secret")
        ) as mq,
        browsing(connect_to(mq), tmp_path) as browser,
    ):
        wrong = await browser.sign_in("plain-key", "wrong-secret", kind="key")
        assert wrong.status_code == 401
        right = await browser.sign_in("plain-key", "plain-secret", kind="key")
        assert right.status_code == 303
        assert "plain-key <small>operator" in (await browser.get("/topics")).text
        await browser.sign_in("admin-key", "admin-secret", kind="key")
        assert "admin-key <small>administrator" in (await browser.get("/topics")).text


async def test_a_cluster_that_does_not_check_keys_admits_none(browser: Browser) -> None:
    answer = await browser.sign_in("any-key", "any-secret", kind="key")
    assert answer.status_code == 401


async def test_another_error_than_a_refusal_admits_no_key(tmp_path: Path) -> None:
    """The check with a random secret fails at a busy broker, that with the given one succeeds."""
    answers = iter([Command(2, remark="busy"), Command(0), Command(0)])

    class Busy:
        def __init__(self) -> None:
            self.admin = self.cluster = self

        async def masters(self) -> dict[str, str]:
            return {"a": "10.0.0.1:10911"}

        async def call(self, _address: str, _command: Command) -> Command:
            return next(answers)

        async def access_status(self) -> None:
            return None

        async def close(self) -> None:
            return None

    async with browsing(lambda _: Busy(), tmp_path) as browser:  # type: ignore[arg-type, return-value]
        answer = await browser.sign_in("any-key", "any-secret", kind="key")
        assert answer.status_code == 502
        assert "busy" in answer.text
        assert "set-cookie" not in answer.headers
