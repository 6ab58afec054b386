"""The messages of `apache.rocketmq.v2` as protobuf classes.

`proto/` has the public .proto files and their compiled descriptors. `tools/proto.py` writes the
descriptors and the types for mypy (`messages.pyi`). The classes are created here from the
descriptors, in a descriptor pool of their own. They therefore work with every release of protobuf,
and do not conflict with the official Python client, which registers the same names in the pool of
the process.
"""

from enum import IntEnum
from importlib.resources import files
from typing import Any

from sluicemq.errors import ConfigurationError, install_extra

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "The proxy needs the package protobuf.", fix=install_extra("grpc")
    ) from error


def _build_message_classes() -> dict[str, Any]:
    """Return the protobuf class of each message and an `IntEnum` of each enumeration, by name.

    They are built from the file `proto/descriptors.binpb`, a serialized FileDescriptorSet. Names
    have no package. Nested messages and enumerations are not included.
    """
    descriptors_path = files("sluicemq.proxy").joinpath("proto/descriptors.binpb")
    descriptors = descriptor_pb2.FileDescriptorSet.FromString(descriptors_path.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    classes: dict[str, Any] = {}
    for file in descriptors.file:
        pool.Add(file)
        for enum in file.enum_type:
            members = {member.name: member.number for member in enum.value}
            classes[enum.name] = IntEnum(enum.name, members)
        for message in file.message_type:
            descriptor = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            classes[message.name] = message_factory.GetMessageClass(descriptor)
    return classes


globals().update(_build_message_classes())
