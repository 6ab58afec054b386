"""`sluice store verify` has an error for each store on which no broker starts.

The command tries to start a broker. Each file of a store is damaged in every way; if a real start
is refused then, this trial start must be refused too.
"""

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from damage import CONFIG, built, damages, paths_below
from simulation.stepped import START_MS, ManualClock, SteppedBroker, send_fields
from sluicemq.broker.trial import find_start_error
from sluicemq.cli import main
from sluicemq.errors import SluiceError
from sluicemq.testing.embedded import embedded
from sluicemq.testing.files import CrashableFiles


def real_refusal(files: CrashableFiles) -> SluiceError | None:
    """Return the error with which a broker refuses to start on these files, or None."""
    try:
        SteppedBroker(store_config=CONFIG, files=files, clock=ManualClock(START_MS + 1_000_000))
    except SluiceError as error:
        return error
    return None


def trial_refusal(files: CrashableFiles) -> SluiceError | None:
    """Return the error of a trial start on these files, or None. It must not change them."""
    before = {path: files.content(path) for path in paths_below(files, "/store")}
    found = asyncio.run(find_start_error(CONFIG, files=files))
    assert {path: files.content(path) for path in paths_below(files, "/store")} == before
    return found


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_the_trial_refuses_every_damage_that_a_start_refuses(killed: bool) -> None:
    template = built(killed=killed)
    assert trial_refusal(template.kill()) is None
    refused, missed = 0, []
    for path in paths_below(template, "/store"):
        for kind in ("deleted", "truncated", "emptied", "swapped"):
            for name, damage in damages(template, path, kind):
                files = template.kill()
                damage(files)
                real = real_refusal(files.kill())
                if real is None:
                    continue
                refused += 1
                if trial_refusal(files) is None:
                    missed.append(f"{path} {name}: {real}")
    assert refused > 5
    assert not missed, "\n".join(missed)


def test_an_unreadable_document_of_any_part_of_the_broker_is_refused_by_both() -> None:
    broker = SteppedBroker(store_config=CONFIG)
    assert broker.connect().call(310, send_fields(), b"x").code == 0
    paths = [document.path for document in broker.core.documents]
    broker.close()
    refused = []
    for path in paths:
        files = broker.files.kill()
        files.put(path, b"")
        files.put(f"{path}.bak", b"")
        if real_refusal(files.kill()) is not None:
            refused.append(path)
            found = trial_refusal(files)
            assert found is not None, path
            assert path in str(found)
    assert len(refused) >= 6, refused


async def stored(root: str) -> None:
    async with embedded(store=root) as mq:
        for number in range(5):
            await mq.send("T", b"%d" % number, keys=[f"k{number}"])


def test_the_command_reports_a_store_on_which_no_broker_starts(tmp_path: Path) -> None:
    asyncio.run(stored(str(tmp_path)))
    root = str(tmp_path / "broker-a")
    whole = CliRunner().invoke(main, ["store", "verify", root, "-q"])
    assert (whole.exit_code, "no errors" in whole.output) == (0, True), whole.output
    for name in ("topics.json", "topics.json.bak"):
        (tmp_path / "broker-a" / "config" / name).write_bytes(b"")
    broken = CliRunner().invoke(main, ["store", "verify", root, "-q"])
    assert broken.exit_code == 1
    assert f"a broker cannot start on this store: {root}/config/topics.json" in broken.output
    assert "[start]" in broken.output
