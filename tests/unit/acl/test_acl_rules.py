"""Addresses, the file, the sources and the guard of access control."""

import contextlib
import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.stepped import SteppedBroker
from sluicemq.acl.guard import Guard
from sluicemq.acl.loading import RuleSource, load_rules
from sluicemq.acl.rules import (
    Permission,
    address_numbers,
    parse_pattern,
    parse_pattern_like_rocketmq,
)
from sluicemq.acl.verdict import REQUIREMENTS, requirement_of
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import BrokerConfig
from sluicemq.config.keys import InnerAccount
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.files import SYSTEM_FILES
from sluicemq.nameserver.requests import TABLE as NAME_SERVER_TABLE
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.signature import ACCESS_KEY, SIGNATURE, sign
from waiting import limit

SAMPLE = """\
accounts:
  - accessKey: rocketmq1
    secretKey: 12345678
    defaultTopicPerm: DENY
    topicPerms:
      - topicA=PUB|SUB
"""


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*", ["1.2.3.4", "::1"], []),
        ("10.10.103.*", ["10.10.103.0", "10.10.103.255"], ["10.10.104.1", "::1"]),
        ("10.10.103.{1,5}", ["10.10.103.1", "10.10.103.5"], ["10.10.103.2"]),
        ("10.1.2-4.*", ["10.1.2.9", "10.1.4.0"], ["10.1.5.1"]),
        ("10.0.0.1,10.0.0.9", ["10.0.0.1", "10.0.0.9"], ["10.0.0.2"]),
        ("2001:db8::1", ["2001:DB8:0:0:0:0:0:1", "[2001:db8::1]"], ["2001:db8::2"]),
        ("2001:db8:0:0:0:0:0:*", ["2001:db8::ff"], ["2001:db8::1:1"]),
        ("::1", ["0:0:0:0:0:0:0:1"], ["127.0.0.1"]),
        ("127.0.0.1", ["::ffff:127.0.0.1"], ["::1"]),
    ],
)
def test_a_pattern_matches_what_it_says(
    pattern: str, inside: list[str], outside: list[str]
) -> None:
    found = parse_pattern(pattern)
    assert all(found.matches(address_numbers(host)) for host in inside)
    assert not any(found.matches(address_numbers(host)) for host in outside)


@given(st.text(alphabet="0123456789abf.:*-{},% []/", max_size=24))
def test_any_text_is_a_pattern_or_an_error_with_a_cure(text: str) -> None:
    with contextlib.suppress(ConfigurationError):
        assert parse_pattern(text).matches(address_numbers("10.0.0.1")) in (True, False)
    with contextlib.suppress(ConfigurationError):
        found = parse_pattern_like_rocketmq(text)
        assert found is None or found.matches(address_numbers("10.0.0.1")) in (True, False)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (SAMPLE.replace("topicA=PUB|SUB", "topicA=pub"), 6, "'pub' is not a permission"),
        (SAMPLE.replace("12345678", "123456"), 3, "secretKey has 6 characters"),
        (SAMPLE.replace("defaultTopicPerm", "defaultTopicPerms"), 4, "is not a key of an account"),
        (SAMPLE + "    admin: 1\n", 7, "admin is '1'"),
        (SAMPLE + "    whiteRemoteAddress: 10.*.1.1\n", 7, "follows a star"),
        ("accounts: [*]\n", 1, "is not valid YAML"),
        ("accounts:\n  - accessKey: *a\n", 2, "alias"),
        ("accounts: " + "[" * 40 + "]" * 40, 1, "nested deeper"),
        ("accounts:\n  accessKey: rocketmq1\n", 2, "a list of accounts"),
    ],
)
def test_a_wrong_file_is_refused_with_line_and_cure(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=r"plain_acl\.yml") as caught:
        load_rules(text, "plain_acl.yml")
    assert words in str(caught.value)
    assert f":{line}" in str(caught.value)
    assert caught.value.fix


@given(st.text(max_size=200))
def test_any_text_is_rules_or_an_error(text: str) -> None:
    with contextlib.suppress(SluiceError):
        load_rules(text, "plain_acl.yml")


@given(st.text(alphabet="ab:-*&<[]{}=,.#'\" \t\n0|", max_size=200))
def test_any_text_is_compatible_rules_or_an_error(text: str) -> None:
    with contextlib.suppress(SluiceError):
        load_rules(text, "plain_acl.yml", is_compatible=True)


def test_any_is_pub_or_sub_and_said_and_deny_when_compatible() -> None:
    text = SAMPLE.replace("topicA=PUB|SUB", "topicA=ANY")
    loaded = load_rules(text, "plain_acl.yml")
    assert loaded.rules.accounts["rocketmq1"].permission("topicA") == (Permission.ANY, True)
    assert "plain_acl.yml:6: ANY is read as PUB|SUB" in loaded.warnings[0]
    found = load_rules(text, "plain_acl.yml", is_compatible=True)
    assert found.rules.accounts["rocketmq1"].permission("topicA") == (Permission.NOTHING, True)
    assert not found.warnings


def test_dead_letters_need_the_permission_of_a_topic() -> None:
    text = SAMPLE + "    defaultGroupPerm: PUB|SUB\n    groupPerms: [g=PUB|SUB]\n"
    account = load_rules(text, "x").rules.accounts["rocketmq1"]
    assert account.permission("%DLQ%g") == account.permission("%DLQ%other")
    assert account.permission("%DLQ%g") == (Permission.NOTHING, False)


def test_aliases_cannot_make_a_small_file_a_large_one() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    begin = time.perf_counter()
    with pytest.raises(ConfigurationError, match="too many aliases"):
        load_rules("\n".join(lines), "plain_acl.yml", is_compatible=True)
    assert time.perf_counter() - begin < limit(5)
    with pytest.raises(ConfigurationError, match="alias"):
        load_rules("a: &a [*a]", "plain_acl.yml", is_compatible=True)


def test_a_server_reads_its_rules_as_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(SAMPLE.replace("topicA=PUB|SUB", "topicA=pub") + "      - topicB=PUB\n")
    files = (str(path),)
    strict = Guard.from_config(
        SYSTEM_FILES, SYSTEM_CLOCK, BrokerConfig(acl_enable=True, acl_files=files)
    )
    assert strict is not None
    with pytest.raises(ConfigurationError, match="'pub' is not a permission"):
        strict.load()
    config = BrokerConfig(acl_enable=True, acl_files=files, acl_compatible=True)
    guard = Guard.from_config(SYSTEM_FILES, SYSTEM_CLOCK, config)
    assert guard is not None
    guard.load()
    assert ask(guard, "12345678", "topicA") == "No permission for topic:topicA"
    assert ask(guard, "12345678", "topicB") == ""
    path.write_text(path.read_text() + "      - topicC=nonsense\n")
    guard.apply_checked_files(guard.check_files())
    assert ask(guard, "12345678", "topicC") == "No permission for topic:topicC"
    assert Guard.from_config(SYSTEM_FILES, SYSTEM_CLOCK, BrokerConfig()) is None


def test_scalars_are_the_text_they_look_like() -> None:
    rules = load_rules(SAMPLE.replace("12345678", "01234567"), "x").rules
    assert rules.accounts["rocketmq1"].secret_key == "01234567"


def test_secrets_are_in_no_text_of_an_account() -> None:
    rules = load_rules(SAMPLE, "x").rules
    assert "12345678" not in repr(rules)


def test_a_thousand_accounts_load_within_a_tenth_of_a_second() -> None:
    entries = (SAMPLE.replace("rocketmq1", f"account{number:04d}") for number in range(1000))
    text = "accounts:\n" + "".join(entry.split("\n", 1)[1] for entry in entries)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        assert len(load_rules(text, "x").rules.accounts) == 1000
        best = min(best, time.perf_counter() - start)
    assert best < 0.3  # 0.06 s on a quiet machine; reading is off the loop


def test_every_request_that_a_broker_answers_has_its_decision() -> None:
    """What is not in the table needs admin: so nothing is open by oversight. What it names is open
    to accounts for a reason."""
    handlers = SteppedBroker().dispatcher.handlers
    open_to_all = [
        code
        for code in handlers
        if code in REQUIREMENTS and requirement_of(code) == requirement_of(305)
    ]
    assert sorted(open_to_all) == [305]
    assert all(requirement_of(code).is_admin for code in handlers if code not in REQUIREMENTS)
    for code in (17, 25, 26, 28, 43, 200, 207, 215, 222, 306, 314, 329):
        assert requirement_of(code).is_admin


def write(path: Path, text: str) -> Guard:
    path.write_text(text)
    guard = Guard(RuleSource(SYSTEM_FILES, str(path)))
    guard.load()
    return guard


def ask(guard: Guard, secret: str, topic: str = "topicA", code: int = 10) -> str:
    fields = {"topic": topic, ACCESS_KEY: "rocketmq1"}
    fields[SIGNATURE] = sign(fields, b"body", secret)
    return guard.check(code, fields, b"body", 477, "10.0.0.1").reason


def test_an_edit_is_in_force_at_the_next_look_and_a_wrong_one_never(tmp_path: Path) -> None:
    path = tmp_path / "plain_acl.yml"
    guard = write(path, SAMPLE)
    assert ask(guard, "12345678") == ""
    assert ask(guard, "12345678", "topicB") == "No default permission for topic:topicB"
    path.write_text(SAMPLE.replace("12345678", "87654321"))
    guard.apply_checked_files(guard.check_files())
    assert ask(guard, "87654321") == ""
    assert "Check signature failed" in ask(guard, "12345678")
    path.write_text("accounts: nonsense")
    guard.apply_checked_files(guard.check_files())
    assert ask(guard, "87654321") == ""
    assert "a list of accounts" in guard.error
    path.write_text(SAMPLE)
    guard.apply_checked_files(guard.check_files())
    assert guard.error == ""
    assert ask(guard, "12345678") == ""


def test_a_missing_file_stops_the_start_and_does_not_open_a_running_server(tmp_path: Path) -> None:
    path = tmp_path / "plain_acl.yml"
    guard = write(path, SAMPLE)
    path.unlink()
    guard.apply_checked_files(guard.check_files())
    assert "does not exist" in guard.error
    assert ask(guard, "12345678") == ""
    with pytest.raises(ConfigurationError, match="does not exist"):
        Guard(RuleSource(SYSTEM_FILES, str(path))).load()


def test_files_of_the_directory_come_first(tmp_path: Path) -> None:
    (tmp_path / "acl" / "deep").mkdir(parents=True)
    (tmp_path / "acl" / "deep" / "team.yaml").write_text(SAMPLE.replace("topicA", "topicT"))
    guard = write(tmp_path / "plain_acl.yml", SAMPLE)
    assert ask(guard, "12345678", "topicT") == ""
    assert ask(guard, "12345678", "topicA") != ""
    assert guard.rules.accounts["rocketmq1"].permission("topicT") == (Permission.ANY, True)


def test_the_documentation_has_what_each_request_needs() -> None:
    """Every code of the dispatch tables, each with its need and a reason."""
    page = (Path(__file__).parents[3] / "docs" / "permissions.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    codes = {int(code) for code in (*SteppedBroker().dispatcher.handlers, *NAME_SERVER_TABLE)}
    assert {int(code) for code, *_ in rows} == codes
    for code, name, need, reason in rows:
        assert name == RequestCode(int(code)).name
        assert need == requirement_of(int(code)).text, code
        assert len(reason) >= 10


def test_a_bug_report_has_no_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong with a file or a request is told without the secrets in them."""
    caplog.set_level("DEBUG")
    path = tmp_path / "plain_acl.yml"
    guard = write(path, SAMPLE.replace("12345678", "topsecretkey"))
    ask(guard, "notsosecretkey")
    texts = [repr(guard.rules), repr(vars(guard)), str(guard.status())]
    for broken in (
        "secretKey: topsecretkey\n  x",
        "secretKey: [topsecretkey]",
        "secretKey: {a: b",
        "{secretKey:topsecretkey}",
    ):
        path.write_text(SAMPLE.replace("secretKey: 12345678", broken))
        guard.apply_checked_files(guard.check_files())
        assert guard.error
        texts.append(guard.error)
    texts += [record.getMessage() for record in caplog.records]
    assert not [text for text in texts if "topsecretkey" in text or "notsosecretkey" in text]


def test_an_inner_account_is_accepted_over_every_reload_and_shown_to_nobody(tmp_path: Path) -> None:
    path = tmp_path / "plain_acl.yml"
    path.write_text(SAMPLE)
    inner = InnerAccount("inner-key", "inner-secret")
    guard = Guard(RuleSource(SYSTEM_FILES, str(path)), inner_account=inner)
    guard.load()
    path.write_text(SAMPLE + "# an edit\n")
    guard.apply_checked_files(guard.check_files())
    fields = {ACCESS_KEY: inner.access_key}
    fields[SIGNATURE] = sign(fields, b"body", inner.secret_key)
    assert guard.check(103, fields, b"body", 477, "10.0.0.1").is_allowed
    fields[SIGNATURE] = sign(fields, b"body", "another-secret")
    assert not guard.check(103, fields, b"body", 477, "10.0.0.1").is_allowed
    assert inner.access_key not in guard.accounts
    assert guard.status()["accounts"] == len(guard.accounts)
    for text in (repr(guard.rules), json.dumps(guard.status())):
        assert inner.secret_key not in text
