"""A run of the tests says at its end what it did not run, and why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parent.parent
TESTS = """
import pytest

@pytest.mark.fast
def test_runs(): pass

@pytest.mark.full
@pytest.mark.parametrize("n", [0, 1])
def test_waits(n): pytest.skip(f"lacks part {n}")

@pytest.mark.full
@pytest.mark.skipif(True, reason="of another system")
def test_belongs_elsewhere(): pass

@pytest.mark.chaos
@pytest.mark.parametrize("n", [0, 1, 2])
def test_kills(n): pass

@pytest.mark.soak
def test_lasts(): pass
"""
CHAOS, SOAK = "3 of the tier chaos, which `make chaos` runs", "1 of the tier soak, which `make soak` runs"


def not_run(folder: Path, *args: str) -> list[str]:
    """The lines on what a run of `TESTS`, with this project's own settings, left out."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(TESTS)
    shutil.copy(ROOT / "tests" / "conftest.py", folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and "passed" in lines[-1], done.stdout + done.stderr
    (start,) = (number for number, line in enumerate(lines) if line.strip("= ") == "not run")
    return lines[start + 1 : -1]


def test_skipped_tests_other_tiers_and_what_no_test_is_for(tmp_path: Path) -> None:
    assert not_run(tmp_path) == [
        "tests/test_it.py::test_waits[0]: lacks part 0",
        "tests/test_it.py::test_waits[1]: lacks part 1",
        "tests/test_it.py::test_belongs_elsewhere: of another system",
        CHAOS,
        SOAK,
        f"CUDA and NCCL: {'there is a' if torch.cuda.is_available() else 'no'} device here"
        f"{', but no test for it' if torch.cuda.is_available() else ''}; nothing of them is tested",
        "several hosts, macOS: nothing of them is tested",
    ]


def test_one_tier_tells_of_the_others(tmp_path: Path) -> None:
    assert not_run(tmp_path, "-m", "fast")[:3] == [CHAOS, "3 of the tier full, which `pytest -m full` runs", SOAK]


def test_tests_side_by_side_tell_it_too(tmp_path: Path) -> None:
    lines = not_run(tmp_path, "-n", "2", "-m", "not chaos and not soak")
    assert [line for line in lines if "of the tier" in line] == [CHAOS, SOAK] and len(lines) == 7


def test_a_tier_of_which_a_part_runs_is_not_told(tmp_path: Path) -> None:
    assert not_run(tmp_path, "-k", "runs or waits")[2:4] == [CHAOS, SOAK]
