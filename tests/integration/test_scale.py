"""The simulator behind docs/design/0024-scale.md, small: what it counts is what the note says."""

import re

from simulation.scale import OneOfEach, whole

BROKERS = 6


async def test_what_happens_at_one_broker_is_not_multiplied_by_the_others() -> None:
    said: dict[str, str] = {}
    await whole(BROKERS, 2, lambda text: said.update([text.partition(": ")[::2]]))

    def asked(what: str, code: int) -> int:
        found = re.search(rf"{code} to \w+(?: \w+)?s: (\d+)", said[what])
        return int(found[1]) if found else 0

    assert asked("a minute at rest", 34) == 2 * BROKERS * 2, "two clients, every 30 s"
    assert asked("a minute at rest", 103) == BROKERS
    at_rest = 3 * (BROKERS - 1) * 2
    assert asked("a broker goes", 34) <= at_rest + 3, "only its own are tried again"
    assert said[f"{2 * BROKERS * 8} sends use {BROKERS - 1} brokers, broker-005 is one"] == "False"
    assert int(said["consumed"]) >= 2 * BROKERS * 8


def test_one_of_each_is_measured_with_full_tables() -> None:
    each = OneOfEach(brokers=4, topics=40, spread=2)
    figures = each.figures()
    names = [one for one in each.server.table.list_topics() if one.startswith("orders")]
    assert len(names) == 40
    assert len(each.server.table.find_route(names[0]).brokers) == 2  # type: ignore[union-attr]
    assert all(seconds > 0 for seconds, _ in figures.values())
