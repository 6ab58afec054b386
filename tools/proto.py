"""What is made of the public proto files of RocketMQ: their descriptors, and types for mypy.

    python tools/proto.py     needs grpcio-tools, of the extra dev; a test compares

The files are those of apache/rocketmq-apis v2.1.2 (68c2cc9442928f769f8938515a05af6fa05c9993), as
the released Node client, rocketmq-client-nodejs 1.0.8, brings them along; `definition.proto` ends
with a newline more. A newer release: put its files there, run this, read the difference.

No generated module is kept: one that protoc writes works with two releases of protobuf at most, and
puts its messages into a pool of the whole process, where the official Python client has its own.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

PROXY = Path(__file__).parents[1] / "src" / "sluicemq" / "proxy"
PROTO = PROXY / "proto"
FILES = ("apache/rocketmq/v2/definition.proto", "apache/rocketmq/v2/service.proto")
DESCRIPTORS = PROTO / "descriptors.binpb"
STUB = PROXY / "messages.pyi"

HEAD = """# Written by tools/proto.py; do not edit.
from collections.abc import MutableMapping, MutableSequence
from enum import IntEnum
from typing import Any, Self, TypeVar

T = TypeVar("T", bound="Record")

class Record:
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...
    def SerializeToString(self) -> bytes: ...
    def CopyFrom(self, other: Self) -> None: ...
    def HasField(self, name: str) -> bool: ...
    def WhichOneof(self, name: str) -> str | None: ...
    def ClearField(self, name: str) -> None: ...

class Messages(list[T]):
    def add(self, **fields: Any) -> T: ...

class Timestamp(Record):
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...
    seconds: int
    nanos: int

class Duration(Record):
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...
    seconds: int
    nanos: int
"""
F = FieldDescriptorProto
TYPES = {
    F.TYPE_STRING: "str", F.TYPE_BYTES: "bytes", F.TYPE_BOOL: "bool", F.TYPE_FLOAT: "float",
    F.TYPE_DOUBLE: "float", F.TYPE_INT32: "int", F.TYPE_INT64: "int", F.TYPE_ENUM: "int",
}  # fmt: skip


def compiled() -> bytes:
    """The descriptors of all files, imported ones first."""
    from grpc_tools import protoc

    known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"
        command = ["-m", "grpc_tools.protoc", "--include_imports", f"-I{PROTO}", f"-I{known}"]
        subprocess.run(
            [sys.executable, *command, f"--descriptor_set_out={out}", *FILES], check=True
        )
        return out.read_bytes()


def typed(descriptors: bytes) -> str:
    """What mypy is told of them."""
    lines = [HEAD]
    for file in FileDescriptorSet.FromString(descriptors).file:
        if file.name in FILES:
            lines += _of_file(file)
    return "\n".join(lines) + "\n"


def _of_file(file: FileDescriptorProto) -> Iterator[str]:
    for enum in file.enum_type:
        yield f"class {enum.name}(IntEnum):"
        yield from (f"    {value.name} = {value.number}" for value in enum.value)
        yield ""
    for message in file.message_type:
        types = {field.name: _type(message, field) for field in message.field}
        yield f"class {message.name}(Record):"
        given = [f"{name}: {_given(kind)} | None = ..." for name, kind in types.items()]
        parameters = ", ".join(["self", "*", *given] if given else ["self"])
        yield f"    def __init__({parameters}) -> None: ..."
        yield from (f"    {name}: {kind}" for name, kind in types.items())
        yield ""


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    name = TYPES.get(field.type) or field.type_name.rpartition(".")[2]
    if field.label != F.LABEL_REPEATED:
        return name
    if any(inner.name == name for inner in message.nested_type):
        return "MutableMapping[str, str]"
    return f"MutableSequence[{name}]" if field.type in TYPES else f"Messages[{name}]"


def _given(kind: str) -> str:
    """What a constructor takes for a field."""
    return kind.replace("Messages[", "MutableSequence[")


def main() -> None:
    descriptors = compiled()
    DESCRIPTORS.write_bytes(descriptors)
    STUB.write_text(typed(descriptors))


if __name__ == "__main__":
    main()
