"""Frames of headers that no peer writes."""

import struct


def frame(header: bytes, body: bytes | memoryview = b"", serialization: int = 0) -> bytes:
    """Header bytes, whatever they are, and a body as a whole frame."""
    start = struct.pack(">II", 4 + len(header) + len(body), serialization << 24 | len(header))
    return start + header + body
