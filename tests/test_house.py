"""The structure of the house: imports run one way, and files stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ithaca

pytestmark = pytest.mark.fast

SOURCE = Path(ithaca.__file__).parent
#: From the ground up; a module may import from its own floor and those below.
FLOORS = (
    {"version", "errors", "extras"},
    {"geometry", "heads"},
    {"plan"},
    {"backends", "exchange", "launch"},
    {"strategies", "sharding"},
    {"diffusers", "doctor", "verify"},
    {"demo"},
    {"cli"},
    {"__init__", "__main__"},
)
#: Neighbours on one floor that must not know each other.
STRANGERS = ({"backends", "exchange"},)


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def imports() -> list[tuple[str, str]]:
    found = []
    for path in SOURCE.rglob("*.py"):
        importer = ".".join(("ithaca", *path.relative_to(SOURCE).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ithaca":
                names = (
                    [f"{node.module}.{a.name}" for a in node.names] if node.module == "ithaca" else [node.module or ""]
                )
                found += [(importer, name) for name in names]
    return found


def test_imports_run_one_way() -> None:
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    edges = imports()
    assert len(edges) > 50
    for importer, imported in edges:
        up, down = part(importer), part(imported)
        assert floor[down] <= floor[up], f"{importer} imports {imported}, which lies above it"
        for strangers in STRANGERS:
            assert {up, down} != strangers, f"{importer} imports {imported}"


def test_no_module_is_two() -> None:
    long = {path.name: n for path in SOURCE.rglob("*.py") if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_the_public_names_are_there() -> None:
    assert all(hasattr(ithaca, name) for name in ithaca.__all__)
