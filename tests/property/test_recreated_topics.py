"""Every message of a topic that was deleted and created again arrives, whatever the consumer, the
broker, the moment and the lengths are.

`make simulate` runs more seeds; SLUICEMQ_SEEDS says how many here."""

from pathlib import Path

import pytest

from simulation.recreated import BROKERS, KINDS, run
from thorough import seeds

pytestmark = pytest.mark.slow

SEEDS = seeds(3)


@pytest.mark.parametrize("broker", BROKERS)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_message_of_the_new_topic_arrives(
    kind: str, broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(SEEDS):
        try:
            with monkeypatch.context() as patches:
                await run(seed, kind, broker, tmp_path / str(seed), patches)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
