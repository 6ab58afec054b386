"""A command: the one thing that travels, as a request or as the answer to one.

Frame, all integers big-endian:

    | total 4 | serialisation 1, header length 3 | header | body |

`total` does not count its own four bytes. The header is JSON (0) or ROCKETMQ binary (1); peers
may use either on any frame, a server answers in JSON always (as the real one does by default).
"""

from typing import Final

FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2
JSON: Final = 0
BINARY: Final = 1
VERSION: Final = 479
"""We speak as V5_3_3: ordinal 479 of the real MQVersion table."""
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024


class Command:
    """A request or an answer. Mutable and without invariants on purpose: it lives for one turn.

    `fields` are the header's extFields (text to text) or None when absent; `body` is never None;
    `serialization` is how the header was or will be written; `remark` may be None.
    """

    __slots__ = (
        "body",
        "code",
        "fields",
        "flag",
        "language",
        "opaque",
        "remark",
        "serialization",
        "version",
    )

    def __init__(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes | memoryview = b"",
        opaque: int = 0,
        flag: int = 0,
        remark: str | None = None,
        language: str = "PYTHON",
        version: int = VERSION,
        serialization: int = JSON,
    ) -> None:
        self.code = code
        self.fields = fields
        self.body = body
        self.opaque = opaque
        self.flag = flag
        self.remark = remark
        self.language = language
        self.version = version
        self.serialization = serialization

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)

    def __repr__(self) -> str:
        """Never shows field values: they can hold signatures."""
        kind = "answer" if self.is_response else "request"
        names = sorted(self.fields or ())
        return (
            f"<{kind} code={self.code} opaque={self.opaque} fields={names} body={len(self.body)} B>"
        )
