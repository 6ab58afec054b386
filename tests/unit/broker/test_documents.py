"""Documents whose offsets mean something in one store alone: which text this broker wrote last."""

from collections.abc import Callable

import pytest

from simulation.stepped import SteppedBroker, send_fields
from sluicemq.broker.documents import Document
from sluicemq.files import replace_text
from sluicemq.files.identity import IDENTITY_SUFFIX, FileVerdict, read_identity
from sluicemq.testing.files import CrashableFiles

PATH = "/store/config/table.json"


def document(broker: SteppedBroker, text: str = "") -> tuple[Document, str | None]:
    """A document as a start finds it, with what it renders next; and what was loaded."""
    found = Document(broker.files, PATH, lambda: text)
    found.use_identity_file(broker.store)
    return found, found.load(lambda content: content)


def save(broker: SteppedBroker, *texts: str) -> None:
    for text in texts:
        made, _ = document(broker, text)
        made.changed = True
        made.save()


@pytest.fixture
def stored(broker: SteppedBroker) -> SteppedBroker:
    """A broker with a record in its log, and two editions of the document."""
    assert broker.connect().call(310, send_fields()).code == 0
    broker.store.sync()
    save(broker, "first", "second")
    return broker


def other_store(_: CrashableFiles) -> bytes:
    broker = SteppedBroker()
    broker.clock.advance(1.0)
    assert broker.connect().call(310, send_fields()).code == 0
    broker.store.sync()
    save(broker, "second")
    return broker.files.content(PATH + IDENTITY_SUFFIX)


Change = Callable[[CrashableFiles], None]
CASES: dict[str, tuple[Change, FileVerdict]] = {
    "as it was written": (lambda files: None, FileVerdict.SEALED),
    "killed before the document": (
        lambda files: replace_text(files, PATH, "first"),
        FileVerdict.SEALED,
    ),
    "main edition removed": (lambda files: files.remove(PATH), FileVerdict.SEALED),
    "another text": (lambda files: replace_text(files, PATH, "third"), FileVerdict.CHANGED),
    "both editions removed": (
        lambda files: (files.remove(PATH), files.remove(PATH + ".bak"), None)[-1],
        FileVerdict.CHANGED,
    ),
    "identity of another log": (
        lambda files: files.put(PATH + IDENTITY_SUFFIX, other_store(files)),
        FileVerdict.FOREIGN,
    ),
    "without identity": (lambda files: files.remove(PATH + IDENTITY_SUFFIX), FileVerdict.UNKNOWN),
    "identity spoilt": (
        lambda files: files.put(PATH + IDENTITY_SUFFIX, b"{}"),
        FileVerdict.UNKNOWN,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_start_knows_the_document_that_was_written_last(stored: SteppedBroker, case: str) -> None:
    change, verdict = CASES[case]
    change(stored.files)
    made, _ = document(stored)
    assert made.verdict is verdict
    assert made.is_doubtful == (verdict in (FileVerdict.CHANGED, FileVerdict.FOREIGN))


def test_a_doubtful_document_is_trusted_again_when_it_is_written(stored: SteppedBroker) -> None:
    replace_text(stored.files, PATH, "of another store")
    assert document(stored)[0].is_doubtful
    save(stored, "of this store")
    made, text = document(stored)
    assert (made.verdict, text) == (FileVerdict.SEALED, "of this store")


def test_writes_that_fail_after_the_identity_leave_a_right_document(
    stored: SteppedBroker,
) -> None:
    texts = iter(["third", "fourth"])
    made = Document(stored.files, PATH, lambda: next(texts))
    made.use_identity_file(stored.store)
    made.load(str)
    for _ in range(2):
        made.changed = True
        stored.files.fail_next("open", 28, path_part="table.json.tmp")
        with pytest.raises(OSError, match="No space"):
            made.save()
    files = stored.files.kill()
    found = read_identity(files, PATH)
    assert found is not None
    later = SteppedBroker(files=files, clock=stored.clock)
    assert document(later)[0].verdict is FileVerdict.SEALED
