"""Packages that only a part of the library needs, by the extra that brings them: `pip install 'ithaca[EXTRA]'`."""

from __future__ import annotations

from importlib.util import find_spec

#: Each extra's modules, by the names that they are imported under.
EXTRAS = {
    "diffusers": ("diffusers",),
    "demo": ("diffusers", "safetensors", "imageio", "numpy", "torchmetrics"),
    "train": ("sklearn",),
    "verify": ("greenlet",),
}


def missing(extra: str) -> list[str]:
    """The modules of ``extra`` that are not installed."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def install(extra: str) -> str:
    """The command that brings ``extra``."""
    return f"pip install 'ithaca[{extra}]'"


def require(extra: str, what: str) -> None:
    """Raise `ModuleNotFoundError`, with the command that helps, where ``what`` needs ``extra`` and lacks it."""
    if lacking := missing(extra):
        raise ModuleNotFoundError(
            f"{what} was required to find {', '.join(lacking)}: {install(extra)}", name=lacking[0]
        )
