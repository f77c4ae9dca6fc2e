"""Showing that what is promised holds. Certifying needs nothing beside torch, exploring needs the extra ``verify``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ithaca.verify.certify import Certificate as Certificate
from ithaca.verify.certify import certify as certify

if TYPE_CHECKING:
    from ithaca.verify.exploration import Report as Report
    from ithaca.verify.exploration import explore as explore
else:

    def __getattr__(name: str) -> Any:
        """`explore` and `Report` are imported once they are asked for: only who explores needs the simulator."""
        if name in ("explore", "Report"):
            return getattr(import_module("ithaca.verify.exploration"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
