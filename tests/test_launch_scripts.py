"""Ranks of scripts, sessions and standard input: what works, and what those that cannot are told, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.alone]

UNGUARDED = """
from ithaca import run_ranks

def fn(rank):
    return rank

print("results:", run_ranks(fn, 2))
"""
GUARDED = UNGUARDED.replace("print(", 'if __name__ == "__main__": print(')
OF_A_MODULE = "from ithaca import run_ranks; import math; print('results:', run_ranks(math.factorial, 2))"
#: What is said to a script, and to a session.
GUARD = 'a script or module that starts ranks was required to do so under `if __name__ == "__main__":`'
FILE = "functions and classes of a module that ranks can import were required; received fn of an interactive session"


def run(command: list[str], text: str = "", cwd: Path | None = None, **environ: str) -> tuple[int, str, str]:
    """Exit code, output and errors, within a time that one start of ranks takes, and no more."""
    done = subprocess.run(
        [sys.executable, *command],
        input=text,
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def told_once(err: str, what: str) -> bool:
    return what in err and err.count("Traceback") == 1 and len(err.splitlines()) < 20


def test_an_unguarded_script_is_told(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(UNGUARDED)
    code, out, err = run([str(script)])
    assert code == 1 and out == "" and told_once(err, f"InvalidInputError: {GUARD}"), err


def test_a_guarded_script_works_wherever_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(GUARDED)
    for command in (["job.py"], ["-m", "job"]):
        assert run(command, cwd=tmp_path)[:2] == (0, "results: [0, 1]\n")


def test_an_unguarded_module_is_told(tmp_path: Path) -> None:
    """The script is guarded; the module of its function is not, and would start ranks of ranks without an end."""
    (tmp_path / "its_module.py").write_text(UNGUARDED.replace("print", "if True: print"))
    script = tmp_path / "job.py"
    script.write_text(
        "import importlib.util as util, sys, types\n"
        "from ithaca import run_ranks\n"
        "if __name__ == '__main__':\n"
        "    module = types.ModuleType('its_module')\n"
        "    exec('def fn(rank): return rank', module.__dict__)\n"
        "    sys.modules['its_module'] = module\n"
        "    run_ranks(module.fn, 2)\n"
    )
    code, _, err = run([str(script)])
    assert code == 1 and told_once(err, f"InvalidInputError: {GUARD}"), err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["-"], UNGUARDED),
        ([], UNGUARDED),
        (["-c", UNGUARDED], ""),
        (["-i", "-q"], UNGUARDED.replace("\n\nprint", "\n\n\nprint")),
    ],
    ids=["dash", "standard-input", "c", "session"],
)
def test_functions_without_a_file_are_told(command: list[str], text: str) -> None:
    _, out, err = run(command, text)
    assert "results" not in out and told_once(err.replace(">>> ", ""), f"InvalidInputError: {FILE}"), err


@pytest.mark.parametrize(("command", "text"), [(["-"], OF_A_MODULE), (["-c", OF_A_MODULE], "")], ids=["dash", "c"])
def test_functions_of_a_module_need_no_file(command: list[str], text: str) -> None:
    assert run(command, text)[:2] == (0, "results: [1, 1]\n")


def test_a_function_under_the_guard_is_told(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "from ithaca import run_ranks\nif __name__ == '__main__':\n    def fn(rank): ...\n    run_ranks(fn, 1)\n"
    )
    code, _, err = run([str(script)])
    assert (
        code == 1 and "RankFailedError: rank 0 failed" in err and "no attribute 'fn'" in err.replace("Can't get", "no")
    ), err


def test_a_script_that_raises_when_it_is_imported_is_told(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(GUARDED + "\nelse: raise SystemExit('not to be imported')\n")
    code, _, err = run([str(script)])
    assert code == 1 and "rank 0 failed" in err and "SystemExit: not to be imported" in err


def test_any_folder_for_temporary_files_does(tmp_path: Path) -> None:
    script, folder = tmp_path / "job.py", tmp_path / ("long" * 40)
    script.write_text(GUARDED)
    folder.mkdir()
    assert run([str(script)], TMPDIR=str(folder)) == (0, "results: [0, 1]\n", "")
    assert os.listdir(folder) == []


def test_much_output_of_a_rank_comes_whole(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(GUARDED.replace("return rank", "print(('x' * 999 + '\\n') * 5000, end='')"))
    code, out, err = run([str(script)])
    assert code == 0 and out.count("x") == 2 * 999 * 5000 and out.endswith("results: [None, None]\n"), err


def test_ranks_of_a_script_whose_threads_have_other_limits(tmp_path: Path) -> None:
    """A default timeout of sockets, and signals that are blocked, are the caller's and not its ranks'."""
    script = tmp_path / "job.py"
    script.write_text(
        "import signal, socket\n"
        + GUARDED.replace("if __name__", "socket.setdefaulttimeout(0.2)\nif __name__").replace(
            'if __name__ == "__main__": ',
            'if __name__ == "__main__": signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals());',
        )
    )
    assert run([str(script)])[:2] == (0, "results: [0, 1]\n")
