"""The certificate: in-tree backends pass in all configurations for which they opt in, bad ones are refused by name."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_backends import (
    KeepsView,
    KeepsViewOfView,
    LeavesGarbage,
    Promising,
    ReadsLater,
    RecordsStream,
    ReturnsV,
    SavesForBackward,
    WritesQ,
)
from cases import GatedBackend
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from ithaca import AttentionBackend, Capabilities, Layout, SdpaBackend
from ithaca.cli import app
from ithaca.verify import certify
from ithaca.verify.certify import Certificate, Result, cases
from ithaca.verify.report import table

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("backend", [SdpaBackend(), SdpaBackend(Layout.NHD)], ids=lambda b: b.capabilities.layout.value)
def test_a_good_backend_passes(backend: AttentionBackend) -> None:
    certificate = certify(backend)
    assert certificate.passed, [r for r in certificate.results if r.error]
    assert len(certificate.results) == 4 * 2 * 3 * (
        3 * 4 + 1
    )  # dtypes, batches, heads of K; lengths by masks, and causal
    assert all(result.difference is not None for result in certificate.results)
    assert {result.case.layout for result in certificate.results} == {backend.capabilities.layout.value}


def test_gates_are_tried_and_held_against_what_the_backend_says_of_them() -> None:
    certificate = certify(GatedBackend())
    assert certificate.passed, [r for r in certificate.results if r.error]
    assert len(certificate.results) == 4 * 2 * 3 * (3 * 4 + 1) * 3
    assert {result.case.gate_dim for result in certificate.results} == {0, 1, 32}
    for kind, words in ((Silent, "was required to say what its gates do"), (DropsGates, "within")):
        certificate = certify(kind())
        assert not certificate.passed
        assert all((words in r.error) == (r.case.gate_dim > 0) for r in certificate.results)


class Silent(GatedBackend):
    """Does not say what its gates do."""

    reference = AttentionBackend.reference


class DropsGates(GatedBackend):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Any = None, **options: Any) -> Tensor:
        return super().forward(q, k, v, **options)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            KeepsView,
            "RetainedInputError: KeepsView was required to let go of its inputs when it returned; it still holds k",
        ),
        (KeepsViewOfView, "RetainedInputError: KeepsViewOfView .* still holds v"),
        (
            ReturnsV,
            "AliasedOutputError: ReturnsV was required to return memory of its own; it returned that of the slot of v",
        ),
        (WritesQ, "MutatedInputError: WritesQ .* wrote into the slot of q"),
        (RecordsStream, "RecordedStreamError: RecordsStream recorded a stream on the slot of k"),
        (SavesForBackward, "RetainedInputError: SavesForBackward .* still holds q"),
    ],
)
def test_a_bad_backend_is_refused_for_what_it_does(kind: type[Promising], words: str) -> None:
    import re

    certificate = certify(kind())
    assert certificate.accepts_unowned_inputs and not certificate.passed
    assert all(re.match(words, result.error) for result in certificate.results), certificate.results[0]


def test_garbage_is_no_breach() -> None:
    assert certify(LeavesGarbage()).passed


def test_a_late_reader_shows_every_time() -> None:
    backend = ReadsLater()
    certificate = certify(backend, after_poison=backend.go.set)
    assert len(certificate.results) == 6
    for result in certificate.results:
        assert result.error.startswith("CertificateError: the result was required") and result.difference == float(
            "inf"
        )


class Wrong(SdpaBackend):
    """Forgets the scale."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return super().forward(q, k, v, **{**options, "scale": 1.0})


class WrongShape(SdpaBackend):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return super().forward(q, k, v, **options)[:, :1]


class Raises(SdpaBackend):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("kind", "words"), [(Wrong, "within"), (WrongShape, "was required; it returned"), (Raises, "no such kernel")]
)
def test_wrong_results_are_breaches(kind: type[SdpaBackend], words: str) -> None:
    certificate = certify(kind())
    breaches = [result for result in certificate.results if result.error]
    assert not certificate.passed and all(words in result.error for result in breaches)
    assert len(breaches) > 50


def test_what_is_said_decides_what_is_tried() -> None:
    plain = Capabilities(layout=SdpaBackend().capabilities.layout, dtypes=frozenset({torch.float32}))
    assert len(list(cases(plain))) == 2 * 3
    assert len(list(cases(replace(plain, masks=True, gqa=True)))) == 2 * 3 * 3 * 4


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    good = run(app, ["certify", "ithaca:SdpaBackend", "--json", str(tmp_path / "good.json")])
    assert good.exit_code == 0 and "SdpaBackend, which accepts unowned inputs: passed" in good.output
    assert json.loads((tmp_path / "good.json").read_text())["passed"] is True
    bad = run(app, ["certify", "bad_backends:KeepsView", "--json", str(tmp_path / "bad.json")])
    assert bad.exit_code == 1 and "BREACH" in bad.output and "RetainedInputError" in bad.output
    assert json.loads((tmp_path / "bad.json").read_text())["passed"] is False
    for nonsense in ("ithaca", "ithaca:Nothing", "no.such:Thing", "ithaca:Layout"):
        assert run(app, ["certify", nonsense]).exit_code == 1


def test_the_table_holds_what_stands_in_brackets() -> None:
    result = Result(next(cases(SdpaBackend().capabilities)), "received [b, s] and [/s]", None)
    console = Console(width=200, file=io.StringIO())
    console.print(table(Certificate("Tiled[bf16]", True, (result,))))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "Tiled[bf16], which" in shown and "received [b, s] and [/s]" in shown
