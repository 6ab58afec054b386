"""Test `sluice filter check`, and the format of `sluice filter eval`, on which scripts depend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sluicemq.cli.filter import filter_group
from waiting import limit

GOLDEN = Path(__file__).parents[2] / "golden" / "sql92_cases.jsonl"


def run(*arguments: str, data: bytes | None = None) -> Result:
    return CliRunner().invoke(filter_group, list(arguments), input=data)


def results(output: str) -> list[str]:
    return [json.loads(line)["result"] for line in output.splitlines()]


def test_check_of_a_valid_expression_exits_0() -> None:
    done = run("check", "a = 5")
    assert done.exit_code == 0
    assert "There are no warnings." in done.output


def test_check_of_an_invalid_expression_marks_the_error_and_exits_1() -> None:
    done = run("check", "a > 'x'")
    assert done.exit_code == 1
    assert "    a > 'x'\n        ^^^\n" in done.output
    assert "does not compile" in done.output


def test_check_with_a_warning_exits_1_and_reports_that_it_compiles() -> None:
    done = run("check", "NOT a = 5")
    assert done.exit_code == 1
    assert "compiles, with warnings" in done.output


def test_check_json_has_all_findings() -> None:
    done = run("check", "--json", "a > ‘x’")
    report = json.loads(done.output)
    assert done.exit_code == 1
    assert report["compiles"] is False
    assert [found["code"] for found in report["findings"]] == ["look-alike", "order-string"]
    assert set(report["findings"][0]) == {
        "severity",
        "code",
        "position",
        "length",
        "what",
        "instead",
    }


def test_check_json_of_an_expression_that_is_not_utf_8_is_json() -> None:
    done = run("check", "a = '\udcff'", "--json")
    assert json.loads(done.output)["expression"] == "a = '\\udcff'"


def test_check_prints_the_type_of_each_property_and_values_that_fail() -> None:
    done = run("check", "price > 30 AND region = 'hz'")
    assert done.exit_code == 0
    assert "price is read as Integer: it is compared with 30." in done.output
    assert "Errors, which drop the message: '30.5', '1e3'" in done.output
    assert "For values with a fraction: Write 30.0." in done.output
    assert "region is read as String" in done.output
    ignoring = run("check", "a > 5 garbage")
    assert ignoring.output.count("is read as Integer") == 1
    assert "clients, commands and Spark refuse it" in ignoring.output
    assert "is read as" not in run("check", "a >").output


def test_check_json_has_the_type_of_each_property() -> None:
    report = json.loads(run("check", "--json", "rate < 1.5 AND vip = TRUE").output)
    assert [(note["name"], note["read_as"]) for note in report["properties"]] == [
        ("rate", "Double"),
        ("vip", "Boolean"),
    ]
    assert set(report["properties"][0]) == {
        "name",
        "read_as",
        "because",
        "accepts",
        "errors",
        "instead",
    }


@pytest.mark.parametrize("arguments", [[], ["check"], ["eval"], ["eval", "/no/such/file"], ["x"]])
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_eval_agrees_with_java_on_all_recorded_cases() -> None:
    done = run("eval", str(GOLDEN))
    wanted = [json.loads(line)["result"] for line in GOLDEN.read_text().splitlines()]
    assert done.exit_code == 0
    assert results(done.output) == wanted


def test_eval_accepts_a_last_line_without_line_end() -> None:
    done = run("eval", "-", data=b'{"expr": "a > 1", "props": {"a": "2"}}\r\n\n{"expr": "a = 1"}')
    assert done.exit_code == 0
    assert done.output == '{"result":"true"}\n{"result":"null"}\n'


def test_eval_treats_null_as_absent_and_accepts_lone_surrogates() -> None:
    lines = [
        {"expr": "a IS NULL", "props": {"a": None}},
        {"expr": "a CONTAINS '\ud83d'", "props": {"a": "😀"}},
    ]
    done = run("eval", "-", data="\n".join(map(json.dumps, lines)).encode())
    assert results(done.output) == ["true", "true"]


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b'{"props": {}}',
        b'{"expr": "a = 1", "props": {"a": 1}}',
        b'{"expr": 5}',
        b'{"expr": "a = 1", "props": 5}',
    ],
)
def test_eval_answers_the_lines_before_an_invalid_one_and_exits_2(line: bytes) -> None:
    done = run("eval", "-", data=b'{"expr": "TRUE"}\n' + line + b'\n{"expr": "TRUE"}\n')
    assert done.exit_code == 2
    assert done.stdout == '{"result":"true"}\n'
    assert "Line 2 is invalid" in done.stderr


def test_eval_answers_each_line_of_a_pipe_at_once() -> None:
    code = "from sluicemq.cli.filter import filter_group; filter_group(['eval', '-'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        for expression, wanted in (("TRUE", b"true"), ("a b #", b"null"), ("5", b"compile_error")):
            process.stdin.write(json.dumps({"expr": expression}).encode() + b"\n")
            process.stdin.flush()
            assert wanted in process.stdout.readline()
        process.stdin.close()
        assert process.wait(timeout=limit(20)) == 0
