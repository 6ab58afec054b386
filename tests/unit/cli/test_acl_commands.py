"""Test `sluice acl check` and `sluice acl lint`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluicemq.cli import main

RULES = """\
globalWhiteRemoteAddresses:
- 10.9.*.*
accounts:
- accessKey: account1
  secretKey: a-long-and-strange-secret-71
  whiteRemoteAddress: 10.8.1.1
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms: [T=PUB, U=DENY]
- accessKey: operator
  secretKey: 12345678
  admin: true
  topicPerms: [T=PUB]
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "plain_acl.yml"
    path.write_text(RULES)
    return path


@pytest.mark.parametrize(
    ("words", "is_allowed", "rule"),
    [
        (("--access-key", "account1", "--topic", "T", "--action", "PUB"), True, "topicPerms T=PUB"),
        (("--access-key", "account1", "--topic", "T"), False, "topicPerms T=PUB"),
        (("--access-key", "account1", "--topic", "X"), False, "defaultTopicPerm for X=DENY"),
        (("--access-key", "account1", "--group", "G"), True, "defaultGroupPerm for G=SUB"),
        (("--access-key", "operator", "--topic", "X"), True, "admin: true"),
        (("--access-key", "nobody", "--topic", "T"), False, "no such account"),
        (("--topic", "T"), False, "no AccessKey in the request"),
        (("--topic", "T", "--from", "10.9.1.1"), True, "globalWhiteRemoteAddresses 10.9.*.*"),
        (("--access-key", "account1", "--topic", "X", "--from", "10.8.1.1"), True, "10.8.1.1"),
    ],
)
def test_check_prints_the_verdict_and_its_rule(
    rules: Path, words: tuple[str, ...], is_allowed: bool, rule: str
) -> None:
    result = CliRunner().invoke(main, ["acl", "check", "--file", str(rules), "--json", *words])
    found = json.loads(result.output)
    assert (found["verdict"], result.exit_code) == (("refused", 1), ("allowed", 0))[is_allowed]
    assert found["rule"].endswith(rule)


def test_lint_finds_weak_rules_and_prints_no_secret(rules: Path) -> None:
    result = CliRunner().invoke(main, ["acl", "lint", "--file", str(rules), "--json"])
    texts = [json.loads(line)["text"] for line in result.output.splitlines()]
    assert texts == [
        "topic U of account1 repeats the default",
        "the secret of operator has 8 characters, fewer than 16",
        "operator is an admin: its 1 permissions have no effect",
    ]
    assert "12345678" not in result.output
    assert result.exit_code == 1


def test_lint_finds_open_white_lists_and_overridden_accounts(rules: Path) -> None:
    (rules.parent / "acl").mkdir()
    (rules.parent / "acl" / "first.yml").write_text(
        'globalWhiteRemoteAddresses: ["*"]\naccounts:\n- accessKey: account1\n'
        "  secretKey: rocketmq-rocketmq\n  whiteRemoteAddress: '*'\n"
    )
    result = CliRunner().invoke(main, ["acl", "lint", "--file", str(rules), "--json"])
    texts = "\n".join(json.loads(line)["text"] for line in result.output.splitlines())
    for words in (
        "allows every client to do everything",
        "every client act as account1",
        "easy to guess",
        "account account1 has no effect",
    ):
        assert words in texts


def test_valid_rules_have_no_findings(rules: Path) -> None:
    rules.write_text(RULES.split("- accessKey: operator", maxsplit=1)[0].replace(", U=DENY", ""))
    assert CliRunner().invoke(main, ["acl", "lint", "--file", str(rules)]).exit_code == 0
