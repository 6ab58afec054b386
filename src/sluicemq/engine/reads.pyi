from typing import Final

Units = bytes | bytearray | memoryview

HEAD: Final[list[str]]

def copied(
    units: Units, view: memoryview, base: int, limit: int, bytes_max: int
) -> bytes | None: ...
def tagged(units: Units, codes: tuple[int, ...], offset: int) -> tuple[list[int], bytes]: ...
def columns(
    units: Units, view: memoryview, base: int, names: tuple[bytes, ...]
) -> tuple[list[bytearray], list[list[str]], bool, list[int]]: ...
