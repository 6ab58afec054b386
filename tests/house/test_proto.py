"""The descriptors and the types of the proxy's messages are those of the public proto files."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("google.protobuf")
TOOL = Path(__file__).parents[2] / "tools" / "proto.py"
PROTO = SimpleNamespace(**runpy.run_path(str(TOOL)))


def test_the_descriptors_are_compiled_from_the_files() -> None:
    pytest.importorskip("grpc_tools")
    assert PROTO.compiled() == PROTO.DESCRIPTORS.read_bytes(), "run python tools/proto.py"


def test_the_types_are_those_of_the_descriptors() -> None:
    written = PROTO.typed(PROTO.DESCRIPTORS.read_bytes())
    assert written == PROTO.STUB.read_text(), "run python tools/proto.py"


def test_the_files_keep_their_license() -> None:
    for name in PROTO.FILES:
        head = (PROTO.PROTO / name).read_text()[:800]
        assert "Licensed to the Apache Software Foundation (ASF)" in head
        assert "Apache License, Version 2.0" in head
    assert "Apache Software Foundation" in (PROTO.PROTO / "NOTICE").read_text()
