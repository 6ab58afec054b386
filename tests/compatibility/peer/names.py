"""Names of topics and groups that belong to one try of one test.

A test that failed runs once more in the same clusters. What its first try left there (messages,
offsets, consumers that are just leaving) must not be found by the second: so whatever a test makes
is named by `own`, which adds the number of a later try. What a fixture makes for several tests is
made once and keeps its name.
"""

import pytest

_TRY = {"number": 1}


def begin_try(item: pytest.Item) -> None:
    """Called before each try of each test (conftest.py); pytest-rerunfailures counts them."""
    _TRY["number"] = getattr(item, "execution_count", 1)


def number_of_try() -> int:
    return _TRY["number"]


def own(name: str) -> str:
    """The name itself at the first try, NAME_2 at the second."""
    return name if number_of_try() == 1 else f"{name}_{number_of_try()}"
