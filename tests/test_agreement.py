"""Headers: what is said is what is heard, nothing else is believed, and all ranks judge alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ithaca import CorruptHeaderError, Layout, PeerRefusedError, PlanMismatchError
from ithaca.exchange.agreement import DTYPES, HEADER_NBYTES, MAX_LANES, Claim, Header, clipped, settle
from ithaca.geometry import Splits

pytestmark = pytest.mark.fast

ROLES = st.sampled_from(["q", "k", "v", "gate:fine"])
CLAIMS = st.builds(
    Claim,
    role=ROLES,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(Layout),
    shape=st.tuples(*[st.integers(0, 2**40)] * 4),
    stands_for=st.sampled_from([None, *DTYPES]),
)
HEADERS = st.builds(
    Header,
    call=st.integers(0, 2**62),
    step=st.integers(0, 100),
    order=st.lists(ROLES, min_size=1, max_size=4).map(tuple),
    claims=st.lists(CLAIMS, max_size=MAX_LANES).map(tuple),
    gathered=st.booleans(),
    terms=st.text("abc =0.5", max_size=80).map(str.strip),
    digest=st.binary(min_size=16, max_size=16),
    refusal=st.text("why? ", max_size=200).map(str.strip),
)

V = Header(
    call=3,
    step=0,
    order=("v", "q", "k"),
    claims=(Claim("v", torch.bfloat16, Layout.HND, (2, 5, 6, 8)),),
    wanted=(Splits((3, 3)).spans,),
)


@given(HEADERS)
def test_a_header_survives_the_wire(header: Header) -> None:
    data = header.encode()
    assert len(data) == HEADER_NBYTES
    assert Header.decode(data, rank=1) == header


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES), st.booleans())
def test_noise_gives_an_error_or_a_valid_header(noise: bytes, with_magic: bool) -> None:
    data = V.encode()[:20] + noise[20:] if with_magic else noise
    try:
        header = Header.decode(data, rank=1)
    except CorruptHeaderError as error:
        assert "rank 1" in str(error)
    else:
        assert len(header.claims) <= MAX_LANES
        assert all(c.dtype in DTYPES and all(0 <= n <= 2**40 for n in c.shape) for c in header.claims)


def test_a_header_of_another_length_is_refused() -> None:
    with pytest.raises(CorruptHeaderError, match=f"{HEADER_NBYTES - 1} bytes"):
        Header.decode(V.encode()[:-1], rank=0)


def test_only_the_number_of_tokens_may_differ() -> None:
    other = replace(V, claims=(replace(V.claims[0], shape=(2, 9, 6, 8)),))
    (lane,) = settle([V, other], rank=0)
    assert [len(held.tokens) for held in lane.holds] == [5, 9]
    assert [len(wanted.heads) for wanted in lane.wants] == [3, 3]


@pytest.mark.parametrize(
    "other",
    [
        replace(V, step=1),
        replace(V, call=4),
        replace(V, order=("q", "k", "v")),
        replace(V, gathered=True),
        replace(V, terms="scale 2.0"),
        replace(V, digest=b"x" * 16),
        replace(V, version="9.9"),
        replace(V, claims=()),
        replace(V, claims=V.claims * 2),
        replace(V, claims=(replace(V.claims[0], role="q"),)),
        replace(V, claims=(replace(V.claims[0], dtype=torch.float16),)),
        replace(V, claims=(replace(V.claims[0], layout=Layout.NHD),)),
        replace(V, claims=(replace(V.claims[0], stands_for=torch.float16),)),
        replace(V, claims=(replace(V.claims[0], shape=(1, 5, 6, 8)),)),
        replace(V, claims=(replace(V.claims[0], shape=(2, 5, 7, 8)),)),
        replace(V, claims=(replace(V.claims[0], shape=(2, 5, 6, 9)),)),
    ],
)
def test_any_other_difference_is_an_error_that_says_who_sent_what(other: Header) -> None:
    for rank in (0, 1):
        with pytest.raises(PlanMismatchError) as raised:
            settle([V, other], rank)
        assert f"rank 0 sent {V}" in str(raised.value) and f"rank 1 sent {other}" in str(raised.value)


@given(st.text(max_size=400), st.text(max_size=400))
@example("\0", "")
@example("\udcff", "\\udcff")
@example("ä" * 300, "a" + "ä" * 300)
@example("aä" * 300, "ä" * 300)
def test_terms_that_differ_differ_when_clipped_too(terms: str, others: str) -> None:
    assert (clipped(terms) == clipped(others)) == (terms == others)
    assert Header.decode(replace(V, terms=clipped(terms)).encode(), rank=0).terms == clipped(terms)


def test_a_refusal_goes_before_everything_else() -> None:
    with pytest.raises(PeerRefusedError, match="rank 1 refused: ValueError: no"):
        settle([V, replace(V, step=7).refused("ValueError: no")], rank=0)
