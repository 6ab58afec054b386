"""Signatures that Java made (spec/acl), recomputed."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.wire.frames import Command
from sluicemq.wire.signature import SIGNATURE, sign, sign_command, signed_content

GOLDEN = Path(__file__).parents[2] / "golden" / "acl" / "signatures.jsonl"
CASES = [json.loads(line) for line in GOLDEN.read_text("utf-8").splitlines()]
SIGNED = [case for case in CASES if "signature" in case]


def verify(command: Command, secret_key: str) -> bool:
    fields = command.fields or {}
    signed = sign(fields, command.body, secret_key, version=command.version)
    return fields[SIGNATURE] == signed


def command_of(case: dict[str, Any]) -> Command:
    return Command(10, case["extFields"], base64.b64decode(case.get("bodyB64", "")))


def test_all_cases_are_there() -> None:
    assert (len(CASES), len(SIGNED)) == (46, 45)


@pytest.mark.parametrize("case", SIGNED, ids=lambda case: case["note"])
def test_signatures_are_those_of_java(case: dict[str, Any]) -> None:
    command = command_of(case)
    sign_command(command, case["accessKey"], case["secretKey"], case.get("securityToken"))
    assert command.fields == case["wireFields"]
    assert signed_content(command.fields, command.body) == base64.b64decode(case["contentB64"])
    assert verify(command, case["secretKey"])
    assert not verify(command, case["secretKey"] + "x")


def test_an_empty_secret_cannot_sign() -> None:
    with pytest.raises(ConfigurationError, match="empty"):
        sign({"AccessKey": "a"}, b"", "")


def test_old_clients_do_not_sign_the_unique_key_query() -> None:
    fields = {"AccessKey": "a", "_UNIQUE_KEY_QUERY": "true"}
    assert signed_content(fields, version=399) == b"a"
    assert signed_content(fields, version=400) == b"atrue"


def test_a_changed_body_does_not_verify() -> None:
    command = Command(10, {"topic": "T"}, b"body")
    sign_command(command, "access", "secret")
    command.body = b"another"
    assert not verify(command, "secret")
