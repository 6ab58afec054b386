"""10,000 inputs that nobody sends, through the socket of a real broker, with a bystander.

`make fuzz` does the same with a million.
"""

from pathlib import Path
from random import Random

import pytest

from fuzz import connections, corpus, grpc_calls, rules
from fuzz.drive import BATCH, Bystander, Drive, GrpcSpeech, Process, Speech, make_batch
from sluicemq.errors import ConfigurationError
from sluicemq.net.grpc import Call
from sluicemq.net.http2 import Http2Connection, Stream

TRAFFIC = Path(__file__).parent.parent / "golden" / "traffic"
RECORDED = TRAFFIC / "grpc" / "grpcio.jsonl.gz"
SEED = 20
INPUTS = 10_000
P99_MAX_S = 15.0
"""Other tests run meanwhile; `make fuzz` has a machine for itself and the default."""


def test_a_broker_takes_ten_thousand_inputs_and_serves_others_meanwhile(tmp_path: Path) -> None:
    templates = corpus.load(TRAFFIC)
    assert len({template.code for template in templates}) > 30
    process = Process(tmp_path)
    try:
        result = Drive(process, Speech(process, templates, SEED), P99_MAX_S).run(0, INPUTS)
    finally:
        code = process.close()
    assert [finding.what for finding in result.findings] == []
    assert result.inputs >= INPUTS - 3 * BATCH
    assert len(result.kinds) == 12
    assert result.answers >= 10
    assert code == 0


def test_a_guarded_broker_takes_inputs_while_its_rules_are_written_anew(tmp_path: Path) -> None:
    process = Process(tmp_path, is_guarded=True)
    try:
        speech = Speech(process, corpus.load(TRAFFIC), SEED)
        result = Drive(process, speech, P99_MAX_S).run(0, INPUTS // 3)
    finally:
        code = process.close()
    assert [finding.what for finding in result.findings] == []
    assert result.inputs >= INPUTS // 3 - 3 * BATCH
    assert result.answers >= 10
    assert code == 0


def test_a_proxy_takes_calls_that_nobody_makes_and_serves_others_meanwhile(tmp_path: Path) -> None:
    process = Process(tmp_path)
    try:
        speech = GrpcSpeech(process, grpc_calls.load(RECORDED), SEED)
        result = Drive(process, speech, P99_MAX_S).run(0, INPUTS // 3)
    finally:
        code = process.close()
    assert [finding.what for finding in result.findings] == []
    assert result.inputs >= INPUTS // 3 - 3 * BATCH
    assert result.answers >= 10
    assert code == 0


def test_a_thousand_files_that_nearly_are_rules_are_read_or_refused() -> None:
    assert rules.check(Random(SEED), 1000) is None


def test_conversations_of_http2_in_memory_leave_nothing_behind() -> None:
    assert connections.check(grpc_calls.load(RECORDED), SEED, 0, 800) == ""


@pytest.mark.parametrize(
    ("owner", "name", "planted", "found"),
    [
        (Call, "_drop_buffer", lambda _call: None, "Error"),
        (Http2Connection, "_send_stalled", lambda it: it.close_with_reason("planted"), "Assertion"),
        (
            Call,
            "cancelled",
            lambda call: call.connection._make_stream(call.connection, 1, {}).cancelled(),
            "Error",
        ),
        (Stream, "close", lambda stream: setattr(stream, "is_closed", True), "Assertion"),
    ],
)
def test_planted_bugs_of_http2_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: object, found: str
) -> None:
    monkeypatch.setattr(owner, name, planted)
    assert found in connections.check(grpc_calls.load(RECORDED), SEED, 0, 800)


def test_a_batch_is_the_same_for_the_same_seed() -> None:
    templates = corpus.load(None)
    assert make_batch(templates, 1, 7) == make_batch(templates, 1, 7)
    assert make_batch(templates, 1, 7) != make_batch(templates, 2, 7)
    assert [each.breaks for each in make_batch(templates, 1, 7).inputs].count(True) == 1


def test_a_bystander_who_is_not_answered_is_a_finding(tmp_path: Path) -> None:
    process = Process(tmp_path)
    drive = Drive(process, Speech(process, corpus.load(None), SEED))
    process.close()
    result = drive.run(0, BATCH)
    assert any("the broker has ended" in finding.what for finding in result.findings)
    bystander = Bystander(process.address)
    bystander.start()
    bystander.stop()
    assert bystander.failure


def test_a_corpus_without_recordings_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no recordings"):
        corpus.load(tmp_path)
