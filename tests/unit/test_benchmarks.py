"""What `make bench` computes from what it has measured, and what it sends and answers."""

import json
from collections.abc import Mapping

import pytest
from benchmarks.frames import batch_send, batch_sends, frame, single_sends, spread_sends
from benchmarks.measure import Span, percentile
from benchmarks.stub import Stub
from benchmarks.table import Aim, Case, Figure, Row, best, fraction, judged, summary, wanted


def case(name: str, *aims: Aim, needs: tuple[str, ...] = (), compare: str = "cpu_us") -> Case:
    return Case(name, lambda server, plan: Figure(), aims, compare, needs)


def row(one: Case, figures: Mapping[str, Figure]) -> Row:
    return judged(one, figures, {})


FIGURES = {
    "pure": Figure(rate=60_000, cpu_us=10),
    "compiled": Figure(rate=300_000, cpu_us=2.5),
    "Java 5.3.3": Figure(rate=40_000, cpu_us=36),
    "Java 5.5.0": Figure(rate=50_000, cpu_us=30),
    "Rust 1.0.0": Figure(rate=1_400, cpu_us=280),
}


def test_ours_are_set_against_the_better_java_of_the_run() -> None:
    assert row(case("send"), FIGURES).ratios == {
        "pure": pytest.approx(10 / 30),
        "compiled": pytest.approx(2.5 / 30),
    }
    assert row(case("send", compare="rate"), FIGURES).ratios["pure"] == pytest.approx(60 / 50)


def test_without_java_there_is_no_ratio_and_no_verdict_on_one() -> None:
    ours = {"pure": FIGURES["pure"], "Rust 1.0.0": FIGURES["Rust 1.0.0"]}
    found = row(case("send", Aim(1 / 3, 1 / 9)), ours)
    assert found.ratios == {}
    assert list(found.verdicts) == []


def test_an_aim_is_met_up_to_its_limit() -> None:
    found = row(case("send", Aim(1 / 3, 1 / 13)), FIGURES)
    assert {one.column: one.is_met for one in found.verdicts} == {"pure": True, "compiled": False}


def test_an_aim_at_least_compares_with_the_faster_java() -> None:
    found = row(case("drain", Aim(1.3, 6, "rate", is_minimum=True)), FIGURES)
    assert [one.found for one in found.verdicts] == pytest.approx([1.2, 6])
    assert [one.is_met for one in found.verdicts] == [False, True]


def test_an_aim_may_be_for_one_engine_or_for_the_number_itself() -> None:
    figures = {"pure": Figure(value=1.5, unit="ms"), "compiled": Figure(value=1.5, unit="ms")}
    found = row(case("wait", Aim(None, 1, "value", of="")), figures)
    assert [(one.column, one.found, one.is_met) for one in found.verdicts] == [
        ("compiled", 1.5, False)
    ]


def test_growth_is_set_against_an_earlier_row_of_the_same_server() -> None:
    few = {"pure": Figure(cpu_us=10), "compiled": Figure(cpu_us=2)}
    many = {"pure": Figure(cpu_us=12), "compiled": Figure(cpu_us=3)}
    found = judged(case("many", Aim(1.3, 1.3, of="few")), many, {"few": few})
    assert [(one.found, one.is_met) for one in found.verdicts] == [(1.2, True), (1.5, False)]


def test_further_numbers_are_compared_by_their_names() -> None:
    figures = {"pure": Figure(rate=9, more={"of_stub_%": 84.0})}
    found = row(case("java", Aim(85, 85, "of_stub_%", of="", is_minimum=True)), figures)
    assert [str(one) for one in found.verdicts] == ["of stub % 84.00 >= 85 MISSED"]


def test_a_figure_is_written_with_its_further_numbers() -> None:
    assert str(Figure(rate=1234.5, cpu_us=1.239, more={"errors_": 3})) == (
        "1,234/s [1.24 us], errors 3"
    )
    assert str(Figure(value=1.5, unit="ms", more={"p99_ms": 12.345, "resident_MiB": 1870})) == (
        "1.50 ms, p99 12.3 ms, resident 1,870 MiB"
    )


def test_the_summary_names_what_was_missed() -> None:
    rows = [row(case("send", Aim(1 / 3, 1 / 13)), FIGURES), row(case("pull"), FIGURES)]
    assert summary(rows) == [
        "1 of 2 aims met",
        "  send, compiled: CPU 0.08 <= 1/13 MISSED",
    ]


def test_a_row_shows_a_server_that_failed_and_none_that_it_is_not_for() -> None:
    one = Case("client", lambda server, plan: Figure(), servers=("pure", "compiled"))
    lines = row(one, {"pure": FIGURES["pure"]}).lines(["pure", "compiled", "Java 5.5.0"])
    assert [line.split() for line in lines] == [
        ["client"],
        ["pure", "60,000/s", "[10.00", "us]"],
        ["compiled", "-"],
    ]


def test_the_record_of_a_row_has_what_a_user_has_as_ours() -> None:
    record = row(case("send", Aim(1 / 3, 1 / 13)), FIGURES).record()
    assert record["ours"] == "300,000/s [2.50 us]"
    assert record["figures"]["Rust 1.0.0"]["cpu_us"] == 280
    assert [one["met"] for one in record["aims"]] == [True, False]


def test_the_best_of_a_kind_is_none_where_nobody_has_the_number() -> None:
    assert best(FIGURES, "Java", "cpu_us", is_larger_better=False) == 30
    assert best(FIGURES, "Java", "value", is_larger_better=False) is None


def test_chosen_rows_bring_those_that_they_need_in_order() -> None:
    cases = [case("fill"), case("first", needs=("fill",)), case("next", needs=("first",))]
    assert [one.name for one in wanted(cases, ["next"])] == ["fill", "first", "next"]
    assert [one.name for one in wanted(cases, ["fill", "nothing"])] == ["fill"]
    assert wanted(cases, []) == cases


@pytest.mark.parametrize(
    ("limit", "text"), [(1 / 9, "1/9"), (1 / 2.5, "1/2.5"), (1, "1"), (0.8, "0.8"), (85, "85")]
)
def test_a_limit_is_written_as_the_fraction_it_is(limit: float, text: str) -> None:
    assert fraction(limit) == text


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (51, 100)
    assert percentile([7.0], 0.99) == 7


def test_a_span_begins_when_it_is_first_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("benchmarks.measure.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("benchmarks.measure.exact_cpu_s", lambda pid: now[0] / 2)
    span = Span(1, warm_s=1, measure_s=2)
    seen = []
    for at, count in [(200.0, 0), (200.9, 90), (201.0, 100), (202.9, 290), (203.0, 300)]:
        now[0] = at
        seen.append(span.over(count))
    assert seen == [False, False, False, False, True]
    assert span.cost.per_second == 100
    assert span.cost.cpu_us == pytest.approx(5000)


def test_tagged_batches_have_their_shares_exactly() -> None:
    sent = b"".join(
        bytes(part) for part in batch_sends("T", batch=100, count=40, tagged=True).take(40)
    )
    assert sent.count(b"TAGS\x01T10") == 400
    assert sent.count(b"TAGS\x01T01") == 40
    assert {sent.count(b"level\x01%02d" % level) for level in range(100)} == {40}


def test_spread_sends_go_to_each_topic_in_turn() -> None:
    sent = b"".join(bytes(part) for part in spread_sends(["T1", "T2", "T3"]).take(6))
    assert [sent.count(b'"b":"%b"' % topic) for topic in (b"T1", b"T2", b"T3")] == [2, 2, 2]


class Written:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def answers(self) -> list[tuple[dict[str, object], bytes]]:
        """Headers and bodies."""
        found, at = [], 0
        while at < len(self.data):
            size, header_size = (
                int.from_bytes(self.data[at + first : at + first + 4]) for first in (0, 4)
            )
            end = at + 8 + header_size
            found.append((json.loads(self.data[at + 8 : end]), self.data[end : at + 4 + size]))
            at += 4 + size
        return found


@pytest.mark.parametrize("cut", [1, 7, 100, 100_000])
def test_the_stub_answers_each_request_however_the_bytes_come(cut: int) -> None:
    requests = [
        frame(105, {"topic": "T"}, 1),
        frame(34, {}, 2, b"{}"),
        *(bytes(part) for part in single_sends("T", count=1).take(1)),
        batch_send("T", 4, 0, b"parts"),
    ]
    sent, written, stub = b"".join(requests), Written(), Stub(port=4711)
    stub.connection_made(written)  # type: ignore[arg-type]
    for at in range(0, len(sent), cut):
        stub.data_received(sent[at : at + cut])
    (route, body), (beat, nothing), (single, _), (batch, _) = written.answers()
    assert [one["opaque"] for one in (route, beat, single, batch)] == [
        1, 2, 1_000_000_000, 1_000_000_004,
    ]  # fmt: skip
    assert json.loads(body)["brokerDatas"][0]["brokerAddrs"] == {"0": "127.0.0.1:4711"}
    assert (beat["code"], nothing) == (0, b"")
    assert single["extFields"] == batch["extFields"] == {
        "msgId": "7F00000100002A9F0000000000000000", "queueId": "0", "queueOffset": "0",
    }  # fmt: skip
