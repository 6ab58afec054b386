"""1,131 verdicts of RocketMQ's own ACL code (5.3.2), one by one, but for the listed differences.

`acl/differences.json` names each case where we decide otherwise, under the reason for it; the
reasons are those of docs/security.md. A case that is listed and agrees is an error as well.
"""

import base64
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from sluicemq.acl.loading import load_rules
from sluicemq.acl.rules import Rules
from sluicemq.acl.verdict import Request, check
from sluicemq.errors import SluiceError

DIRECTORY = Path(__file__).parent / "acl"
CASES = [json.loads(line) for line in (DIRECTORY / "cases.jsonl").read_text().splitlines()]
DIFFERENCES = json.loads((DIRECTORY / "differences.json").read_text())
OURS = {case: verdict for cases in DIFFERENCES.values() for case, verdict in cases.items()}


@functools.cache
def rules_of(name: str) -> Rules | str:
    """Those of a file and of the directory beside it; a text when they do not load."""
    main, more = DIRECTORY / "rules" / f"{name}.yml", DIRECTORY / "rules" / f"{name}.d"
    paths = [path for path in sorted(more.rglob("*")) if path.suffix in (".yml", ".yaml")]
    try:
        return Rules.merged(
            load_rules(path.read_bytes().decode("utf-8-sig"), path.name).rules
            for path in [*paths, main]
            if path.exists()
        )
    except SluiceError as error:
        return str(error)


def body_of(case: dict[str, Any]) -> bytes:
    if "bodyB64" in case:
        return base64.b64decode(case["bodyB64"])
    return (case.get("afterBody") or case.get("body") or "").encode()


def verdict_of(case: dict[str, Any]) -> str:
    rules = rules_of(case["acl"])
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


def test_no_difference_opens_what_the_real_code_refuses() -> None:
    """But for ANY, tabs and blanks, IPv6, dead letters, and bodies that are not looked at for who
    may do all."""
    cases = {case["id"]: case for case in CASES}
    opened = {
        reason.split()[0]
        for reason, listed in DIFFERENCES.items()
        for case, ours in listed.items()
        if ours == "allow" and real_verdict(cases[case]) != "allow"
    }
    assert opened == {"ANY", "IPv6", "a", "blanks", "dataVersion", "tabs", "the"}


def test_every_reason_stands_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    flat = " ".join(page.split())
    assert not [reason for reason in DIFFERENCES if reason not in flat]
