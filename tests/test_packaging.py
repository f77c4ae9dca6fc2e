"""What an installation has: the wheel, what each extra brings, and what works where an extra is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from functools import cache
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ithaca
from ithaca.extras import EXTRAS

ROOT = Path(__file__).parent.parent
#: Extras that serve those who work on the library: nothing in it imports what they bring.
OURS = {"test", "check", "bench"}
#: Read by the interpreter before all else, in every process: what would not be there is not found, nor its version.
HIDE = """
from importlib.machinery import PathFinder

hidden, there = {hidden!r}, {there!r}
spec, versions = PathFinder.find_spec, PathFinder.find_distributions
PathFinder.find_spec = lambda name, *where: None if name.partition(".")[0] in hidden else spec(name, *where)
PathFinder.find_distributions = lambda context: (
    versions(context) if context.name is None or context.name.lower().replace("_", "-") in there else []
)
"""

Ran = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree and unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    zipfile.ZipFile(path).extractall(folder / "unpacked")
    return folder / "unpacked"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    (path,) = wheel.glob("*.dist-info/METADATA")
    return Parser().parsestr(path.read_text())


@cache
def owners() -> dict[str, set[str]]:
    """The distributions that each importable name comes from."""
    found: dict[str, set[str]] = defaultdict(set)
    for distribution in importlib.metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        for line in (distribution.read_text("RECORD") or "").splitlines():
            path = line.partition(",")[0]
            if path.endswith((".py", ".so")):
                found[re.split(r"[./]", path)[0]].add(name)
    return found


def needed(requirements: list[str], *extras: str) -> set[str]:
    """The distributions that ``requirements`` lead to, with those of ``ithaca[extra]`` for each of ``extras``."""
    found: set[str] = set()
    todo = [(requirement, extra) for requirement in requirements for extra in ("", *extras)]
    while todo:
        text, extra = todo.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if name == "ithaca":
            todo += [(each, inner) for each in requirements for inner in requirement.extras]
        elif name not in found:
            found.add(name)
            own = importlib.metadata.requires(name) or []
            todo += [(each, inner) for each in own for inner in ("", *requirement.extras)]
    return found


@pytest.fixture
def installed(wheel: Path, metadata: Message, tmp_path: Path) -> Callable[..., Ran]:
    """``installed("demo")`` runs Python as `pip install 'ithaca[demo]'` would leave it: nothing else is found."""

    def with_extras(*extras: str) -> Ran:
        there = needed(metadata.get_all("Requires-Dist", []), *extras)
        hidden = {module for module, names in owners().items() if module != "ithaca" and not there & names}
        (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden, there=there | {"ithaca"}))

        def run(*args: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
            path = os.pathsep.join((str(tmp_path), str(wheel)))
            environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", "PYTHONWARNINGS": "ignore"}
            command = [sys.executable, *args]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
            assert done.returncode == rc, done.stdout + done.stderr
            return done

        where = run("-c", "import ithaca; print(ithaca.__file__)").stdout
        assert where.startswith(str(wheel)), where
        return run

    return with_extras


@pytest.mark.fast
def test_the_wheel_says_that_it_is_typed_and_holds_all(wheel: Path, metadata: Message) -> None:
    source = Path(ithaca.__file__).parent
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path.relative_to(wheel / "ithaca") for path in (wheel / "ithaca").rglob("*") if path.is_file()} == files
    assert Path("py.typed") in files
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert {path.name.split("-")[0] for path in wheel.iterdir()} == {"ithaca"}


@pytest.mark.fast
def test_the_base_is_torch_and_what_the_command_line_needs(metadata: Message) -> None:
    base = [Requirement(each) for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert {each.name.replace("-", "_") for each in base} == {"torch", "typing_extensions", "typer", "rich"}


@pytest.mark.fast
def test_the_table_of_extras_is_that_of_the_wheel(metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS.keys() | OURS
    requirements = metadata.get_all("Requires-Dist", [])
    base = needed(requirements)
    for extra, modules in EXTRAS.items():
        brought = needed(requirements, extra)
        for module in modules:
            assert owners()[module] & brought and not owners()[module] & base, f"{extra} was required to bring {module}"
    assert needed(requirements, *EXTRAS) <= needed(requirements, "test"), "the tests were required to have every extra"


@pytest.mark.fast
def test_every_import_of_another_package_is_declared() -> None:
    declared = {"ithaca", "torch", "typing_extensions", "typer", "rich"}
    declared |= {*(module for modules in EXTRAS.values() for module in modules)}
    for path in Path(ithaca.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            tops = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names
            assert tops <= declared, f"{path.name} imports {tops - declared}"


@pytest.mark.full
def test_the_base_install_does_all_but_what_an_extra_is_for(installed: Callable[..., Ran]) -> None:
    run = installed()
    for module in ("greenlet", "diffusers", "numpy", "pytest"):
        assert f"No module named '{module}'" in run("-c", f"import {module}", rc=1).stderr
    doctor = run("-m", "ithaca", "doctor").stdout
    works = re.findall(r"(slots|collective) +│ works", doctor)
    assert works == ["slots", "collective"], doctor
    assert all(f"ithaca[{extra}]" in doctor for extra in EXTRAS), doctor
    assert "passed" in run("-m", "ithaca", "certify", "ithaca:SdpaBackend").stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "args, extra, lacking",
    [
        (("-m", "ithaca", "explore", "self"), "verify", "greenlet"),
        (("-m", "ithaca", "demo"), "demo", "diffusers, safetensors, imageio, numpy, torchmetrics"),
        (("-c", "import ithaca.verify; ithaca.verify.certify; ithaca.verify.explore"), "verify", "greenlet"),
        (("-c", "from ithaca.verify.exploration import explore"), "verify", "greenlet"),
    ],
)
def test_what_is_missing_is_asked_for_by_name(
    installed: Callable[..., Ran], args: tuple[str, ...], extra: str, lacking: str
) -> None:
    last = installed()(*args, rc=1).stderr.splitlines()[-1]
    assert last.endswith(f"required to find {lacking}: pip install 'ithaca[{extra}]'"), last


@pytest.mark.full
def test_each_extra_is_enough_for_what_it_is_for(installed: Callable[..., Ran]) -> None:
    assert "1 schedules explored" in installed("verify")("-m", "ithaca", "explore", "self", "--schedules", "1").stdout
    demo = [f"ithaca.demo.{path.stem}" for path in (Path(ithaca.__file__).parent / "demo").glob("[a-z]*.py")]
    run = installed("demo")
    run("-c", f"import {', '.join(demo)}")
    assert "No module named 'greenlet'" in run("-c", "import greenlet", rc=1).stderr


@pytest.mark.full
def test_the_module_is_the_command() -> None:
    def told(*command: str) -> str:
        return subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout

    script = told(sys.executable, "-c", "import sys; sys.argv[0] = 'ithaca'; from ithaca.cli import main; main()")
    module = told(sys.executable, "-m", "ithaca")
    assert "Usage: ithaca [OPTIONS]" in script and "Usage: python -m ithaca [OPTIONS]" in module
    assert script.split("Options", 1)[1].split() == module.split("Options", 1)[1].split()


@pytest.mark.full
@pytest.mark.parametrize("name", ["x[/y]", "zork[abc]"])
def test_an_error_is_told_as_it_is(name: str) -> None:
    """Brackets are no markup, and a message is one line however narrow the terminal."""
    command = [sys.executable, "-m", "ithaca", "certify", f"{name}:f"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "40"})
    expected = f"InvalidInputError: MODULE:FACTORY was required; received '{name}:f': No module named '{name}'\n"
    assert told.returncode == 1 and told.stderr == expected, told.stderr
