"""The public names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sluicemq
import sluicemq.errors
from sluicemq import rocketmq
from waiting import limit


def test_every_public_name_can_be_had_and_the_three_lists_agree():
    for name in sluicemq.__all__:
        assert getattr(sluicemq, name) is not None
    tree = ast.parse(Path(sluicemq.__file__).read_text())
    typed = {
        alias.name
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(sluicemq.__all__) - {"__version__"}
    errors = {name for name in typed if hasattr(sluicemq.errors, name)}
    assert typed - errors == set(sluicemq._MODULE_OF_EXPORT)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nosuch"):
        _ = sluicemq.nosuch


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, sluicemq; "
        "print([m for m in ('asyncio', 'orjson', 'numpy', 'lark', 'click') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(sluicemq.__file__).parents[1])},
        timeout=limit(30),
    )
    assert shown.stdout.strip() == "[]"


def test_every_client_error_is_public_and_rocketmq_names_are_there():
    errors = {
        name
        for name, value in vars(sluicemq.errors).items()
        if isinstance(value, type) and issubclass(value, sluicemq.errors.ClientError)
    }
    assert errors <= set(sluicemq.__all__)
    for name in rocketmq.__all__:
        assert hasattr(rocketmq, name)
