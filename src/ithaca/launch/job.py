"""What travels between a caller and its ranks: where a rank finds its functions, the job, and the answer."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from multiprocessing import process, spawn
from types import FunctionType
from typing import Any

from ithaca.errors import InvalidInputError

#: Where this process was started, which relative paths of its own are relative to.
_ORIGIN: str = process.ORIGINAL_DIR  # type: ignore[attr-defined]
#: Whether this process is a rank that is finding the function of its job.
_importing = False


class UnguardedError(InvalidInputError):
    """A module starts ranks whenever it is imported, and a rank has imported it."""


class Outcome(Enum):
    """How a rank's part of a job ended."""

    RESULT = "result"
    FAILED = "failed"
    UNGUARDED = "unguarded"


@dataclass(frozen=True)
class Setup:
    """All that a rank has to know of its group and of its caller."""

    rank: int
    ranks: int
    #: That of the store, on the loopback.
    port: int
    environ: dict[str, str]
    #: As `multiprocessing.spawn.prepare` takes it: the caller's path, arguments, directory and main module.
    preparation: dict[str, Any]


def setup_of(rank: int, ranks: int, port: int) -> Setup:
    """The setup of a rank of this process."""
    preparation = {
        "name": f"ithaca-rank-{rank}",
        "authkey": bytes(process.current_process().authkey),
        "sys_path": [path or _ORIGIN for path in sys.path],
        "sys_argv": sys.argv,
        "orig_dir": _ORIGIN,
        "dir": os.getcwd(),
        **_main_module(),
    }
    return Setup(rank, ranks, port, dict(os.environ), preparation)


def _main_module() -> dict[str, str]:
    """Where a rank can import the main module from; empty for a session, standard input, ``-c`` and ``__main__.py``."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None:
        return {} if name == "__main__" or name.endswith(".__main__") else {"init_main_from_name": name}
    path = os.path.join(_ORIGIN, getattr(main, "__file__", None) or "")
    return {"init_main_from_path": os.path.normpath(path)} if os.path.isfile(path) else {}


def prepare(setup: Setup) -> None:
    """Make this rank's process like its caller's, main module included."""
    os.environ.clear()
    os.environ.update(setup.environ)
    with importing():
        spawn.prepare(setup.preparation)


@contextmanager
def importing() -> Iterator[None]:
    """Code of the caller runs here only because it is imported."""
    global _importing
    _importing = True
    try:
        yield
    finally:
        _importing = False


def check_guarded() -> None:
    """Refuse to start ranks of ranks of ranks."""
    if _importing:
        raise UnguardedError(
            'a script or module that starts ranks was required to do so under `if __name__ == "__main__":` or in a '
            "function, since every rank imports it; received one that starts them when it is imported"
        )


class _Pickler(pickle.Pickler):
    """Refuses what a rank could not find, where the caller's main module cannot be imported."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise InvalidInputError(
                f"functions and classes of a module that ranks can import were required; received {obj.__qualname__} "
                "of an interactive session, standard input, `-c` or a package's __main__: write it to a file of its "
                "own, and import it"
            )
        return NotImplemented


def pickle_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A job's two pickles in one stream: its function, then its arguments."""
    stream = io.BytesIO()
    pickler = (pickle.Pickler if _main_module() else _Pickler)(stream)
    try:
        pickler.dump(fn)
        pickler.dump(args)
    except InvalidInputError:
        raise
    except Exception as error:
        raise InvalidInputError(
            f"a module's own function and arguments that can be pickled were required; received "
            f"{text_of(fn)}: {text_of(error)}"
        ) from error
    return stream.getvalue()


def text_of(value: object) -> str:
    """What a value of the caller's looks like, if it can say so."""
    try:
        return str(value)
    except Exception:
        return f"{type(value).__name__} that cannot be shown"
