"""What mostly waits for brokers runs side by side with others of its module."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def side_by_side(runs: Mapping[str, Callable[[], None]]) -> Iterator[Callable[[str], None]]:
    """All of them begin now. What is yielded waits for the end of one, by name, and raises what it
    raised; asked once more for the same it runs that again, as a second try of a test wants."""
    with ThreadPoolExecutor(len(runs)) as executor:
        begun = {name: executor.submit(run) for name, run in runs.items()}

        def end(name: str) -> None:
            if name in begun:
                begun.pop(name).result()
            else:
                runs[name]()

        yield end
