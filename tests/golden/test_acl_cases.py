"""1,131 verdicts of RocketMQ's own ACL code (5.3.2), one by one, but for the listed differences.

`acl/differences.json` names each case where we decide otherwise, under the reason for it; the
reasons are those of docs/security.md. A case that is listed and agrees is an error as well. With
`sluiceAclCompatible` only those reasons are left that are not about what a file means.
`acl/divergences.jsonl` are cases that were found at random, with their rule files.
"""

import base64
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from sluicemq.acl.loading import load_rules
from sluicemq.acl.rules import Rules
from sluicemq.acl.verdict import Request, Verdict, authorize, identify
from sluicemq.errors import SluiceError

DIRECTORY = Path(__file__).parent / "acl"
CASES = [json.loads(line) for line in (DIRECTORY / "cases.jsonl").read_text().splitlines()]
DIFFERENCES = json.loads((DIRECTORY / "differences.json").read_text())
OURS = {case: verdict for cases in DIFFERENCES.values() for case, verdict in cases.items()}


@functools.cache
def rules_of(name: str, is_compatible: bool) -> Rules | str:
    """Those of a file and of the directory beside it; a text when they do not load."""
    main, more = DIRECTORY / "rules" / f"{name}.yml", DIRECTORY / "rules" / f"{name}.d"
    paths = [path for path in sorted(more.rglob("*")) if path.suffix in (".yml", ".yaml")]
    try:
        return Rules.merge(
            load_rules(
                path.read_bytes().decode("utf-8-sig"), path.name, is_compatible=is_compatible
            ).rules
            for path in [*paths, main]
            if path.exists()
        )
    except SluiceError as error:
        return str(error)


def body_of(case: dict[str, Any]) -> bytes:
    if "bodyB64" in case:
        return base64.b64decode(case["bodyB64"])
    return (case.get("afterBody") or case.get("body") or "").encode()


def check(rules: Rules, request: Request) -> Verdict:
    verdict = identify(rules, request)
    return authorize(verdict.account, request) if verdict.account is not None else verdict


def verdict_of(case: dict[str, Any], *, is_compatible: bool = False) -> str:
    rules = rules_of(case["acl"], is_compatible)
    if isinstance(rules, str):
        return "error"
    if case.get("loadOnly"):
        return "ok"
    remote = case["remote"] or ""
    host = remote.rpartition(":")[0] or remote
    request = Request(
        case["code"], case["wireFields"] or {}, body_of(case), case["version"], host
    )  # fmt: skip
    try:
        return "allow" if check(rules, request).is_allowed else "deny"
    except SluiceError:
        return "error"


def real_verdict(case: dict[str, Any]) -> str:
    expected = case["expect"]
    if case.get("loadOnly"):
        return "ok" if expected["load"] == "ok" else "error"
    return str(expected["verdict"])


@pytest.mark.parametrize("group", sorted({case["group"] for case in CASES}))
def test_verdicts_are_those_of_the_real_code(group: str) -> None:
    wrong = [
        (case["id"], case["note"], verdict_of(case))
        for case in CASES
        if case["group"] == group
        and verdict_of(case) != OURS.get(case["id"], real_verdict(case))
    ]  # fmt: skip
    assert not wrong


def test_what_is_listed_as_different_is_different() -> None:
    cases = {case["id"]: case for case in CASES}
    assert not [case for case in OURS if verdict_of(cases[case]) == real_verdict(cases[case])]


ABOUT_REQUESTS = (
    "Every request code has a rule: requests about topics and groups need their permission, other "
    "administration needs an admin",
    "Bodies are read only if permissions depend on the topics and groups in them",
    "An invalid address of a client matches no pattern except *, and fails no request",
    "IPv6 white lists work",
)
"""The reasons that are not about what a file means."""
MAPPED = {"h0922": "deny", "h0925": "deny"}
"""A caller at ::ffff:10.10.103.5 is one at 10.10.103.5 before its address is compared."""


def test_compatible_files_mean_what_they_mean_to_the_real_code() -> None:
    listed = {case for reason in ABOUT_REQUESTS for case in DIFFERENCES[reason]} | MAPPED.keys()
    wrong = [
        (case["id"], case["note"], verdict)
        for case in CASES
        if case["id"] not in listed
        and (verdict := verdict_of(case, is_compatible=True)) != real_verdict(case)
    ]
    assert not wrong
    assert not listed - {case["id"] for case in CASES}


def test_compatible_files_open_nothing_but_by_ipv6_and_by_bodies_that_do_not_matter() -> None:
    opened = {
        case["id"]
        for case in CASES
        if verdict_of(case, is_compatible=True) == "allow" and real_verdict(case) != "allow"
    }
    assert opened == {"h0007", "h0350", "h0838", "h0841", "h0847", "h0848"}


RANDOM = [json.loads(line) for line in (DIRECTORY / "divergences.jsonl").read_text().splitlines()]
RANDOM_RULES = {entry["rules"]: entry["yml"] for entry in RANDOM if "rules" in entry}
RANDOM_CASES = [entry for entry in RANDOM if "rules" not in entry]
STRICTER_CODES = frozenset({14, 26, 33, 37, 200050})
"""Of the random cases, those of codes that RocketMQ lets every account use."""


def random_verdict(case: dict[str, Any], *, is_compatible: bool) -> str:
    request = Request(
        case["code"], case["wireFields"] or {}, body_of(case), case["version"],
        case["remote"].rpartition(":")[0],
    )  # fmt: skip
    try:
        rules = load_rules(RANDOM_RULES[case["acl"]], "plain_acl.yml", is_compatible=is_compatible)
        return "allow" if check(rules.rules, request).is_allowed else "deny"
    except SluiceError:
        return "error"


@pytest.mark.parametrize("case", RANDOM_CASES, ids=lambda case: str(case["id"]))
def test_random_cases_open_nothing_but_by_any(case: dict[str, Any]) -> None:
    expected, code = case["expect"]["verdict"], case["code"]
    compatible = random_verdict(case, is_compatible=True)
    assert compatible == expected or (compatible == "deny" and code in STRICTER_CODES)
    strict = random_verdict(case, is_compatible=False)
    if strict == "allow" and expected != "allow":
        assert "ANY" in RANDOM_RULES[case["acl"]]
    if code in (41, 46):
        assert strict == expected == "allow"


def test_every_rule_file_found_at_random_loads_when_compatible() -> None:
    assert len(RANDOM_RULES) == 31
    for text in RANDOM_RULES.values():
        assert load_rules(text, "plain_acl.yml", is_compatible=True).rules.accounts


def test_no_difference_opens_what_the_real_code_refuses() -> None:
    """But for ANY, tabs and blanks, IPv6, and bodies that are not looked at for who may do all."""
    cases = {case["id"]: case for case in CASES}
    opened = {
        reason.split()[0]
        for reason, listed in DIFFERENCES.items()
        for case, ours in listed.items()
        if ours == "allow" and real_verdict(cases[case]) != "allow"
    }
    assert opened == {"A", "ANY", "Blanks", "Bodies", "IPv6", "Tabs"}


def test_every_reason_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    flat = " ".join(page.split())
    assert not [reason for reason in DIFFERENCES if reason not in flat]
