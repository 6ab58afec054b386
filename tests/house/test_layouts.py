"""What is stored has one declaration of its layout, in `record/layout.py`.

Nobody packs or unpacks a record head, a queue unit, an index header or an index entry by a format
of their own.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sluicemq.record.layout import INDEX_ENTRY, INDEX_HEADER, RECORD_BEGIN, RECORD_HEAD, UNIT

SOURCE = Path(__file__).parents[2] / "src"
PLACE = SOURCE / "sluicemq" / "record" / "layout.py"
FORMAT = re.compile(r"[<>=!@]?(\d*[xcbB?hHiIlLqQnNefdspP])+")
LETTERS = {"u1": "B", "i2": "h", "i4": "i", "i8": "q"}
LAYOUTS = {
    name: layout.struct.format.removeprefix(">")
    for name, layout in {
        "record head": RECORD_HEAD,
        "record head to the sys flag": RECORD_BEGIN,
        "unit": UNIT,
        "index header": INDEX_HEADER,
        "index entry": INDEX_ENTRY,
    }.items()
}


def written_again(tree: ast.AST) -> Iterator[str]:
    """The layouts that a module declares: as a struct's format, or as fields of a NumPy type."""
    for node in ast.walk(tree):
        written = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if FORMAT.fullmatch(node.value):
                written = node.value.lstrip("<>=!@")
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            written = "".join(kinds(node))
        for name, letters in LAYOUTS.items():
            if written == letters or (len(letters) > 5 and letters in written):
                yield f"line {getattr(node, 'lineno', 0)}: {name}"


def kinds(node: ast.List | ast.Tuple | ast.Call) -> Iterator[str]:
    """The kinds of pairs (name, kind) that stand side by side."""
    for pair in node.args if isinstance(node, ast.Call) else node.elts:
        match pair:
            case ast.Tuple(elts=[ast.Constant(value=str()), ast.Constant(value=str(kind))]):
                yield LETTERS.get(kind.lstrip("<>"), "")


def test_a_layout_is_declared_once() -> None:
    again = [
        f"{path.relative_to(SOURCE)}: {found}"
        for path in SOURCE.rglob("*.py")
        if path != PLACE
        for found in written_again(ast.parse(path.read_text()))
    ]
    assert not again
    assert (
        len(set(written_again(ast.parse(PLACE.read_text())))) >= 2
    )  # the index: what is searched for


def test_planted_breaches_are_found() -> None:
    planted = ast.parse(
        'A = Struct(">qiq")\nB = np.dtype([("p", ">i8"), ("s", ">i4"), ("c", ">i8")])\n'
        'C = "qqqqii"\nD = struct.unpack_from(">iiiiiqqi", data)\nE = Struct(">iqiqiqiiq")'
    )
    assert sorted(written_again(planted)) == [
        "line 1: unit",
        "line 2: unit",
        "line 3: index header",
        "line 4: record head to the sys flag",
    ]
