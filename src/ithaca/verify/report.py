"""What was shown, as tables."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ithaca.backends.interface import AttentionBackend
from ithaca.errors import InvalidInputError
from ithaca.verify.certify import Certificate, certify
from ithaca.verify.scenarios import SCENARIOS

if TYPE_CHECKING:
    from ithaca.verify.exploration import Report


def certified(factory: str) -> Certificate:
    """Certify what ``MODULE:FACTORY`` makes; modules of the working directory are found too."""
    module, _, name = factory.partition(":")
    sys.path.insert(0, "")
    try:
        backend = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidInputError(f"MODULE:FACTORY was required; received {factory!r}: {error}") from error
    finally:
        sys.path.remove("")
    if not isinstance(backend, AttentionBackend):
        raise InvalidInputError(f"{factory} was required to make an AttentionBackend; it made {type(backend).__name__}")
    return certify(backend)


def exploration_table(reports: dict[str, Report]) -> Table:
    """One row a scenario."""
    total = sum(report.schedules for report in reports.values())
    findings = sum(len(report.findings) for report in reports.values())
    result = Table(title=f"{total} schedules explored, {findings} with a finding")
    result.add_column("scenario")
    for column in ("schedules", "steps", "accesses", "findings"):
        result.add_column(column, justify="right")
    for name, report in reports.items():
        schedules = f"{report.schedules}{', all' if report.exhausted else ''}"
        numbers = (schedules, str(report.steps), str(report.accesses), str(len(report.findings)))
        result.add_row(f"[bold]{name}[/]: {SCENARIOS[name].about}", *numbers)
    return result


def table(certificate: Certificate) -> Table:
    """One row a configuration; breaches in full."""
    promise = "accepts" if certificate.accepts_unowned_inputs else "does not accept"
    verdict = "passed" if certificate.passed else "BREACH"
    result = Table(title=f"{escape(certificate.backend)}, which {promise} unowned inputs: {verdict}")
    result.add_column("configuration")
    result.add_column("off the reference", justify="right")
    result.add_column("verdict")
    for each in certificate.results:
        off = "" if each.difference is None else f"{each.difference:.1e}"
        result.add_row(escape(str(each.case)), off, escape(each.error or "passed"))
    return result
