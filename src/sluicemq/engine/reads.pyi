from typing import Final

Units = bytes | bytearray | memoryview

HEAD: Final[list[str]]

def columns(
    units: Units, view: memoryview, base: int, names: tuple[bytes, ...]
) -> tuple[list[bytearray], list[list[str]], bool, list[int]]: ...
