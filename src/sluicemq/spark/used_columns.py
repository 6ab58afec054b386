"""Which columns of a relation a query needs, asked of Spark's own optimizer.

Spark asks a Python source for all its columns (spec/spark.md), so whoever knows the query can read
much less. The query is first planned over stand-ins that have the columns and no rows; what is left
of them in the optimized plan is what it needs:

    Project [origin …]              names that are referenced anywhere above a stand-in,
    +- Filter (tags = UA)           and of the map `properties` the keys, when every use of it is
       +- stand-in [topic, tags …]  properties['KEY']

Where the plan does not show it by names (UNION ALL goes by position, subqueries stand inside of
expressions) the answer is "all of them": always right, only slower.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

_NARROWING: Final = ("Project", "Aggregate")
_PASSING: Final = ("Filter", "Join", "Sort", "GlobalLimit", "LocalLimit")
"""Nodes whose own output is not the query's need: what they read stands in them."""
_STAND_IN: Final = "LogicalRDD"


@dataclass(frozen=True, slots=True)
class Used:
    """Names of columns, and the keys of the map when only single values of it are used."""

    columns: frozenset[str]
    keys: frozenset[str] = frozenset()


def used_columns(frame: Any, map_name: str) -> Used | None:
    """What the query of a DataFrame over stand-ins uses of them; None: all of it."""
    nodes = json.loads(frame._jdf.queryExecution().optimizedPlan().toJSON())
    if any(_hides_plans(name) for name in _classes(nodes)):
        return None
    if not _are_narrowed(nodes):
        return None
    outputs = [node for node in nodes if _kind(node) == _STAND_IN]
    own = {_identity(one) for node in outputs for one in _attributes(node["output"])}
    uses = _Uses()
    for node in nodes:
        if _kind(node) != _STAND_IN:
            for value in node.values():
                uses.look(value)
    columns = {name for name, at in uses.attributes if at in own}
    keys = {key for name, at, key in uses.elements if at in own and name == map_name}
    # Spark adds `IS NOT NULL` to a condition on an element; the map is never null.
    columns |= {name for name, at in uses.presences if at in own and (name != map_name or not keys)}
    return Used(frozenset(columns), frozenset() if map_name in columns else frozenset(keys))


class _Uses:
    """Attributes by name and identity; `properties['KEY']` and `… IS NOT NULL` apart."""

    def __init__(self) -> None:
        self.attributes: list[tuple[str, Any]] = []
        self.elements: list[tuple[str, Any, str]] = []
        self.presences: list[tuple[str, Any]] = []

    def look(self, value: Any) -> None:
        """Expressions are lists of nodes, the parent before its children."""
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            return
        skipped = 0
        for at, node in enumerate(value):
            if not isinstance(node, dict):
                self.look(node)
            elif skipped:
                skipped -= 1
            elif (key := _element_key(value[at : at + 3])) is not None:
                self.elements.append((value[at + 1]["name"], _identity(value[at + 1]), key))
                skipped = 2
            elif [_kind(one) for one in value[at : at + 2]] == ["IsNotNull", "AttributeReference"]:
                self.presences.append((value[at + 1]["name"], _identity(value[at + 1])))
                skipped = 1
            elif _kind(node) == "AttributeReference":
                self.attributes.append((node["name"], _identity(node)))
            else:
                for inner in node.values():
                    self.look(inner)


def _element_key(nodes: Sequence[Any]) -> str | None:
    """The key, of a column's element by a constant string."""
    if [_kind(node) for node in nodes] != ["GetMapValue", "AttributeReference", "Literal"]:
        return None
    literal = nodes[2]
    return literal["value"] if literal.get("dataType") == "string" else None


def _are_narrowed(nodes: Sequence[dict[str, Any]]) -> bool:
    """Whether above each stand-in comes a node that names what it takes, before one that does not.

    The nodes are a tree in pre-order, each with the number of its children.
    """
    path: list[tuple[str, int]] = []
    for node in nodes:
        while path and path[-1][1] == 0:
            path.pop()
        if path:
            path[-1] = (path[-1][0], path[-1][1] - 1)
        if _kind(node) == _STAND_IN:
            above = next((kind for kind, _ in reversed(path) if kind not in _PASSING), None)
            if above not in _NARROWING:
                return False
        path.append((_kind(node), node["num-children"]))
    return True


def _classes(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield _kind(value)
        for inner in value.values():
            yield from _classes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _classes(inner)


def _hides_plans(kind: str) -> bool:
    """Whether it holds a plan of its own, which stands somewhere else or nowhere."""
    return "Subquery" in kind or "CTE" in kind or kind in ("Exists", "InMemoryRelation")


def _kind(node: Any) -> str:
    name = node.get("class", "") if isinstance(node, dict) else ""
    return str(name).rpartition(".")[2]


def _attributes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if _kind(value) == "AttributeReference":
            yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _attributes(inner)


def _identity(attribute: dict[str, Any]) -> Any:
    return attribute["exprId"]["id"]
