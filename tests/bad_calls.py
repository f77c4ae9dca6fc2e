"""Ways to spoil a call of this rank, each with a name: all are wrong on one rank as on all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import torch
from bad_tensors import NO_LANE, NO_MASK
from cases import GatedBackend
from torch import Tensor
from torch._subclasses import FakeTensorMode
from weird import Evil, Unreadable, UnreadableOfOurs, Weird, WeirdList, WeirdNumber, WeirdText

from ithaca import AttentionBackend, Capabilities


@dataclass
class Given:
    """What a rank calls with. ``closures``: given instead of a lane's tensor where the call is async."""

    rank: int
    lanes: dict[str, Any]
    gates: Any
    options: dict[str, Any] = field(default_factory=dict)
    order: Any = None
    project_out: Any = None
    closures: dict[str, Any] = field(default_factory=dict)
    backend: AttentionBackend = field(default_factory=GatedBackend)
    #: Makes the call.
    inside: Callable[[Callable[[], Tensor]], Tensor] = lambda call: call()


@dataclass(frozen=True)
class Fault:
    """``forms``: of the call that can have it. ``late``: the peers are done by then, and have no error."""

    spoil: Callable[[Given], None]
    forms: tuple[str, ...] = ("sync", "async")
    late: bool = False


# -- backends ---------------------------------------------------------------------------------------------------------


class Returns(GatedBackend):
    """Gives what ``change`` makes of the right result."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, *args: Any, **options: Any) -> Tensor:
        out: Tensor = self.change(super().forward(*args, **options))
        return out


class Can(GatedBackend):
    """Its capabilities are what ``say`` makes of those of the gated backend."""

    def __init__(self, say: Callable[[Capabilities], Any]) -> None:
        super().__init__()
        self.say = say

    @property
    def capabilities(self) -> Capabilities:
        said: Capabilities = self.say(replace(GatedBackend().capabilities, accepts_unowned_inputs=False))
        return said


def raising(error: BaseException) -> Callable[..., Any]:
    def fn(*args: Any) -> Any:
        raise error

    return fn


def backend(make: Callable[[], AttentionBackend], **options: Any) -> Fault:
    def spoil(given: Given) -> None:
        given.backend = make()
        given.options.update(options)

    return Fault(spoil)


# -- the table --------------------------------------------------------------------------------------------------------


def lane(role: str, make: Callable[[Tensor], Any], **options: Any) -> Fault:
    def spoil(given: Given) -> None:
        if role == "gate":
            given.gates = {"fine": make(given.gates["fine"])}
        else:
            given.lanes[role] = make(given.lanes[role])
        given.options.update(options)

    return Fault(spoil)


def closure(role: str, make: Callable[[Any], Any]) -> Fault:
    def spoil(given: Given) -> None:
        given.closures[role] = make(given.lanes[role])

    return Fault(spoil, forms=("async",))


def option(**options: Any) -> Fault:
    return Fault(lambda given: given.options.update(options))


def mask(make: Callable[[Tensor], Any], sharded: bool = False) -> Fault:
    def spoil(given: Given) -> None:
        whole = torch.ones(2, given.lanes["k"].shape[1] if sharded else 9, dtype=torch.bool)
        given.options.update(mask=make(whole), mask_sharded=sharded)

    return Fault(spoil)


def gates(make: Callable[[Tensor], Any]) -> Fault:
    def spoil(given: Given) -> None:
        given.gates = make(given.gates["fine"])

    return Fault(spoil)


def order(what: Any) -> Fault:
    def spoil(given: Given) -> None:
        given.order = what

    return Fault(spoil, forms=("async",))


def projecting(project: Callable[[Tensor], Any]) -> Fault:
    def spoil(given: Given) -> None:
        given.project_out = project

    return Fault(spoil, forms=("async",), late=True)


def in_fake_mode(given: Given) -> None:
    def inside(call: Callable[[], Tensor]) -> Tensor:
        with FakeTensorMode():
            return call()

    given.inside = inside


def in_transform(transform: Callable[..., Any]) -> Fault:
    """K is what a function sees inside of a transform of `torch.func`."""

    def spoil(given: Given) -> None:
        def inside(call: Callable[[], Tensor]) -> Tensor:
            def fn(k: Tensor) -> Tensor:
                given.lanes["k"] = k
                return call().sum()

            return transform(fn)(given.lanes["k"])  # type: ignore[no-any-return]

        given.inside = inside

    return Fault(spoil)


LANES = ("q", "k", "v", "gate")
_OUT = {"out": "int8"}
#: Of `NO_LANE`, what a backend may as well return.
_RETURNED = ("None", "a list", "a mock", "3-D", "5-D", "another batch", "doubles", "sparse", "nested", "jagged")
_RETURNED += ("on meta", "fake", "freed", "a wrapper", "scaled", "a raising one", "batched", "quantized", "masked")

FAULTS: dict[str, Fault] = {
    f"{role} that is {name}": lane(role, make) for role in LANES for name, make in NO_LANE.items()
}
FAULTS |= {f"{role} with one token more": lane(role, lambda t: torch.cat((t, t[:, :1]), dim=1)) for role in LANES}
FAULTS |= {f"{role} of another head dim": lane(role, lambda t: t[..., :3]) for role in "qk"}
FAULTS |= {
    f"{role} as bytes that requires grad": lane(role, lambda t: t.requires_grad_(), compress="int8") for role in "qkv"
}
FAULTS |= {
    f"whole {role} that is {name}": lane(role, NO_LANE[name], kv_replicated=True)
    for role in "kv"
    for name in ("on meta", "fake", "freed", "jagged", "too long", "a wrapper")
}
FAULTS |= {
    f"{role} as bytes that is {name}": lane(role, NO_LANE[name], compress="float8")
    for role in "qkv"
    for name in ("on meta", "fake", "freed", "too long", "too many bytes")
}
FAULTS |= {f"a mask that is {name}": mask(make) for name, make in NO_MASK.items()}
FAULTS |= {f"a shard of a mask that is {name}": mask(make, True) for name, make in NO_MASK.items()}
FAULTS |= {
    f"a closure that raises {type(error).__name__}": closure(role, lambda t, e=error: raising(e))
    for role, error in zip(
        "qkvq", (Unreadable(), UnreadableOfOurs(), ValueError("\udcff\0"), MemoryError("x" * 10**6)), strict=True
    )
}
FAULTS |= {
    f"a closure of {role} that returns {name}": closure(role, lambda t, m=NO_LANE[name]: lambda: m(t))
    for role in "qkv"
    for name in ("None", "a mock", "3-D", "on meta", "fake", "freed", "jagged", "a raising one")
}
FAULTS |= {
    "a closure that calls itself": closure("k", lambda t: (lambda f: f(f))(lambda f: lambda: f(f)())),
    "a closure that takes an argument": closure("k", lambda t: lambda x: t),
    "scale beyond a float": option(scale=10**400),
    "scale of 10,000 digits": option(scale=10**10000),
    "scale NaN": option(scale=math.nan),
    "scale infinite": option(scale=-math.inf),
    "scale text": option(scale="a lot"),
    "scale complex": option(scale=1j),
    "scale a tensor": option(scale=torch.tensor(0.5)),
    "scale a decimal": option(scale=Decimal("0.5")),
    "scale a weird number": option(scale=WeirdNumber(0.5)),
    "scale weird": option(scale=Weird()),
    "scale that differs": Fault(lambda given: given.options.update(scale=0.5 + given.rank)),
    "an option nobody knows": option(scal=1.0),
    "an option of no name": Fault(lambda given: given.options.update({"": 1})),
    "no gates but a list": gates(lambda t: [t]),
    "gates weird": gates(lambda t: Weird()),
    "gates that raise": gates(lambda t: Evil()),
    "gates as text": gates(lambda t: "fine"),
    "too many gates": gates(lambda t: {f"g{i}": t for i in range(6)}),
    "a gate that the backend does not take": gates(lambda t: {"other": t}),
    **{
        f"a gate named {what}": gates(lambda t, name=name: {name: t})
        for what, name in {
            "by a number": 7,
            "by nothing": "",
            "by None": None,
            "by bytes": b"fine",
            "by a tuple": ("fine",),
            "by what is no text": "\udcff",
            "with a comma": "fi,ne",
            "with a slash": "fi/ne",
            "with NUL": "fine\0",
            "with a line break": "fi\nne",
            "too long": "abcdefghijkl",
            "too long in bytes": "ä" * 6,
            "weirdly": WeirdText("fine"),
            "by something weird": Weird(),
        }.items()
    },
    "an order of numbers": order((1, 2, 3, 4)),
    "an order with one twice": order(("q", "k", "k", "gate.fine")),
    "an order without a gate": order(("q", "k", "v")),
    "an order that is no sequence": order({"q", "k", "v", "gate.fine"}),
    "an order that is weird": order(Weird()),
    "an order of weird texts": order(tuple(map(WeirdText, ("q", "k", "v", "gate.fine")))),
    "an order that raises": order(WeirdList([1, 2])),
    **{
        f"{name} {what}": option(**{name: value})
        for name in ("head_splits", "seq_splits", "kv_seq_splits")
        for what, value in {
            "a number": 10**30,
            "huge": [10**30, 10**30, 10**30],
            "of 10,000 digits": [10**10000, 0, 0],
            "negative": [-1, 5, 5],
            "empty": [],
            "of floats": [2.0, 2.0, 2.0],
            "of flags": [True, True, True],
            "of two ranks": [4, 5],
            "of another sum": [1, 1, 1],
            "weird": Weird(),
            "of weird numbers": [Weird()] * 3,
            "that raise": WeirdList([2, 2, 2]),
            "text": "222",
        }.items()
    },
    **{
        f"{name} {what}": option(**{name: value})
        for name in ("kv_replicated", "mask_sharded", "causal", "text_first")
        for what, value in {"a number": 1, "None": None, "weird": Weird(), "a tensor": torch.ones(2)}.items()
    },
    **{
        f"text_tokens {what}": option(text_tokens=value)
        for what, value in {
            "negative": -1,
            "huge": 10**30,
            "more than there are": 100,
            "a float": 1.0,
            "a flag": True,
            "weird": Weird(),
        }.items()
    },
    **{
        f"compress {what}": option(compress=value)
        for what, value in {
            "unknown": "int4",
            "a number": 8,
            "a list": ["int8"],
            "of an unknown lane": {"x": "int8"},
            "of a lane, unknown": {"q": "int4"},
            "of a lane, a list": {"q": ["int8"]},
            "weird": Weird(),
            "weird by lane": {"q": Weird()},
            "a mapping that raises": Evil(),
            "weird text": WeirdText("int8"),
        }.items()
    },
    "a shard of no mask": option(mask_sharded=True),
    "splits of K and V that are whole": option(kv_replicated=True, kv_seq_splits=[3, 2, 4]),
    "causal over other lengths": Fault(
        lambda given: (
            given.options.update(causal=True, kv_replicated=True),
            given.lanes.update({role: given.lanes[role][:, :1] for role in "kv"}),
        )[0]
    ),
    "a backend that raises": backend(lambda: Returns(raising(RuntimeError("on fire")))),
    "a backend that raises what has no text": backend(lambda: Returns(raising(Unreadable()))),
    "a backend that raises ours without text": backend(lambda: Returns(raising(UnreadableOfOurs()))),
    **{f"a backend that returns {name}": backend(lambda m=NO_LANE[name]: Returns(m)) for name in _RETURNED},
    **{
        f"a backend that returns {name}, as bytes": backend(
            lambda m=NO_LANE[name]: Returns(m), compress={"out": "int8"}
        )
        for name in ("3-D", "on meta", "fake", "freed", "jagged", "complex", "too long")
    },
    "capabilities that raise": backend(lambda: Can(raising(ValueError("no")))),
    "capabilities that raise what has no text": backend(lambda: Can(raising(Unreadable()))),
    "capabilities that are none": backend(lambda: Can(lambda said: None)),
    "capabilities of no layout": backend(lambda: Can(lambda said: replace(said, layout="HND"))),
    "capabilities of weird dtypes": backend(lambda: Can(lambda said: replace(said, dtypes=Weird()))),
    "capabilities of weird gates": backend(lambda: Can(lambda said: replace(said, gates=Weird()))),
    "no masks": Fault(
        lambda given: (
            given.options.update(mask=torch.ones(2, 9, dtype=torch.bool)),
            setattr(given, "backend", Can(lambda said: replace(said, masks=False))),
        )[1]
    ),
    "a projection that raises": projecting(raising(ValueError("boom"))),
    "a projection that raises what has no text": projecting(raising(Unreadable())),
    "a projection that returns nothing": projecting(lambda heads: None),
    "a projection that returns a mock": projecting(lambda heads: NO_LANE["a mock"](heads)),
    "a projection that returns its argument": projecting(lambda heads: heads),
    "a projection that returns a view": projecting(lambda heads: heads[:, :1].as_subclass(Tensor).transpose(1, 2)),
    "a projection that is none": projecting(7),  # type: ignore[arg-type]
    "a call in fake mode": Fault(in_fake_mode),
    "a call in fake mode, of fake tensors": Fault(
        lambda given: (
            in_fake_mode(given),
            given.lanes.update({role: NO_LANE["fake"](t) for role, t in given.lanes.items()}),
        )[0]
    ),
    "a call in vmap": in_transform(torch.vmap),
    "a call in grad": in_transform(torch.func.grad),
    "a call in functionalize": in_transform(torch.func.functionalize),
    "a call in jvp": in_transform(lambda fn: lambda t: torch.func.jvp(fn, (t,), (t,))),
}
