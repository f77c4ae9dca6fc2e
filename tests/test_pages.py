"""The pages' own examples, run as they stand: each may fail, for each compares what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Run

DOCS = Path(__file__).parent.parent / "docs"


def examples(page: str) -> list[tuple[int, str]]:
    """The Python of a page, with the line where each begins."""
    text = (DOCS / page).read_text()
    return [(text.count("\n", 0, m.start(1)) + 1, m[1]) for m in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def run_page(rank: int, page: str) -> list[int]:
    """All examples, one after the other, and the lines of those that ran."""
    names: dict[str, object] = {}
    ran = []
    for line, source in examples(page):
        exec(compile("\n" * (line - 1) + source, page, "exec"), names)
        ran.append(line)
    return ran


@pytest.mark.full
@pytest.mark.timeout(200)
def test_the_examples_of_shapes(on_ranks: Run) -> None:
    lines = [line for line, _ in examples("shapes.md")]
    assert len(lines) > 12
    assert on_ranks(3, run_page, "shapes.md", timeout=180) == [lines] * 3


@pytest.mark.fast
def test_each_kind_has_an_example() -> None:
    """A section that shows nothing, or compares nothing, is told here."""
    sections = re.split(r"^## ", (DOCS / "shapes.md").read_text(), flags=re.MULTILINE)[1:]
    shown = {s.splitlines()[0]: "".join(re.findall(r"```python\n(.*?)```", s, re.DOTALL)) for s in sections}
    kinds = [name for name in shown if name not in {"Agreement", "Bytes", "The peers", "Not yet"}]
    assert len(kinds) > 12
    for name in kinds:
        assert re.search(r"\b(same|assert|assert_close|raises)\b", shown[name]), name
