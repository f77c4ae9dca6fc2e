"""Faults planted in the exchange by operators that go over every step of it, and whether exploration finds them.

The steps are the statements of a module's functions, so that a step which is added later is mutated too. A mutant that
no scenario and no schedule tells from the original has *survived*: it is either equivalent, or a check is missing.
"""

from __future__ import annotations

import ast
import copy
import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import FrameType, ModuleType
from typing import Any

from ithaca.exchange import slots
from ithaca.exchange.slots import SlotExchange
from ithaca.verify.exploration import COPIES, Finding, explore
from ithaca.verify.scenarios import SCENARIOS

#: Names that stand for a rank in `slots`, and collections of ranks.
_RANKS, _GROUPS = {"me", "rank", "dest", "source"}, {"sources", "ranks"}
#: Calls that do something beside giving a result.
_EFFECTS = {"announcement", "_next_header", "_lease"}
#: Longest that one mutant may run in one scenario, in seconds: some never end.
_PATIENCE = 20


@dataclass(frozen=True)
class Mutant:
    """``step`` is the statement as it was."""

    operator: str
    function: str
    step: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.function}: {self.operator}: {self.step}"

    def exchange(self) -> type[SlotExchange]:
        """The class under test."""
        return compiled(self.tree)


def compiled(source: ast.Module | str) -> type[SlotExchange]:
    """The exchange, made anew from a changed text of its module."""
    module = ModuleType("ithaca.exchange.slots_mutant")
    code = compile(source, f"{slots.__file__} (mutant)", "exec")
    exec(code, module.__dict__)
    made: type[SlotExchange] = module.__dict__["SlotExchange"]
    return made


def mutants() -> Iterator[Mutant]:
    """Every mutant of ``exchange/slots.py``."""
    source = ast.parse(inspect.getsource(slots))
    seen = set()
    for function, path in _functions(source):
        for operator, step, change in _changes(_at(source, path)):
            tree = copy.deepcopy(source)
            change(_at(tree, path))
            ast.fix_missing_locations(tree)
            text = ast.unparse(tree)
            if text not in seen and text != ast.unparse(source):
                seen.add(text)
                yield Mutant(operator, function, step, ast.parse(text))


def hunted(mutant: Mutant, schedules: int) -> Finding | None:
    """What exploration finds wrong with a mutant, first of all; None if it survives."""
    with _limited() as too_long:
        try:
            exchange = mutant.exchange()
        except Exception as error:
            return Finding("-", "-", f"it does not even start: {type(error).__name__}: {error}")
        rounds = ((2, 2), (2, schedules), (3, schedules))  # most die at once, so every scenario gets a little first
        for (ranks, budget), scenario, copies in product(rounds, SCENARIOS, COPIES):
            too_long()
            try:
                report = explore(
                    scenario, ranks=ranks, copies=copies, schedules=budget, exchange=exchange, stop_at_first=True
                )
            except Exception as error:
                return Finding(scenario, "-", f"{type(error).__name__}: {error}")
            if report.findings:
                return report.findings[0]
    return None


class _TooLong(Exception):
    pass


@contextmanager
def _limited() -> Iterator[Callable[[], object]]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLong("it did not end")

    before = signal.signal(signal.SIGALRM, end)
    try:
        yield lambda: signal.alarm(_PATIENCE)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


_Path = tuple[int, ...]
_Change = Callable[[Any], None]


def _functions(tree: ast.Module) -> Iterator[tuple[str, _Path]]:
    for i, node in enumerate(tree.body):
        if isinstance(node, ast.FunctionDef):
            yield node.name, (i,)
        elif isinstance(node, ast.ClassDef):
            for j, inner in enumerate(node.body):
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", (i, j)


def _at(tree: ast.Module, path: _Path) -> Any:
    node: Any = tree
    for step in path:
        node = node.body[step]
    return node


def _blocks(function: Any) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _changes(function: Any) -> Iterator[tuple[str, str, _Change]]:
    for b, block in enumerate(_blocks(function)):
        for s, statement in enumerate(block):
            step = ast.unparse(statement).splitlines()[0]
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # the docstring
            pure = _pure(statement)
            yield "drop", step, partial(_drop, b=b, s=s)
            if s + 1 < len(block) and not (pure and _independent(statement, block[s + 1])):
                yield "swap with the next", step, partial(_swap, b=b, s=s)
            if s > 1 and not pure:
                yield "do early", step, partial(_early, b=b, s=s)
            if isinstance(statement, ast.Expr | ast.AugAssign) or (
                isinstance(statement, ast.Assign) and _acts(statement)
            ):
                yield "do twice", step, partial(_twice, b=b, s=s)
    lines = _lines(function)
    for n, node in enumerate(ast.walk(function)):
        text = f"{ast.unparse(node)} in {lines[node]}" if isinstance(node, ast.expr) else ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _RANKS:
            yield "wrong rank", text, partial(_rewrite, n=n, template="({} + 1) % 2")
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _GROUPS) or (
            isinstance(node, ast.Attribute) and node.attr == "_everyone" and isinstance(node.ctx, ast.Load)
        ):
            yield "one rank less", text, partial(_rewrite, n=n, template="tuple({})[1:]")
        if isinstance(node, ast.Attribute) and node.attr in ("ARRIVED", "CREDIT"):
            other = "Signal.CREDIT" if node.attr == "ARRIVED" else "Signal.ARRIVED"
            yield "the other signal", text, partial(_rewrite, n=n, template=other)
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            test = ast.unparse(node.test)
            yield "negated", test, partial(_negate, n=n)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Gt | ast.GtE | ast.Lt | ast.LtE):
            yield "off by one", text, partial(_off_by_one, n=n)


def _lines(function: Any) -> dict[ast.AST, str]:
    """The first line of the statement that each node is part of."""
    lines: dict[ast.AST, str] = {}
    for node in ast.walk(function):  # outer statements come first
        if isinstance(node, ast.stmt):
            lines.update(dict.fromkeys(ast.walk(node), ast.unparse(node).splitlines()[0]))
    return lines


def _pure(statement: ast.stmt) -> bool:
    """Whether it only gives names to values: doing that twice, or a little earlier, changes nothing."""
    return (
        isinstance(statement, ast.Assign)
        and all(isinstance(node, ast.Name | ast.Tuple) for node in statement.targets)
        and not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(statement))
        and not any(isinstance(n, ast.Attribute) and n.attr in _EFFECTS for n in ast.walk(statement))
    )


def _acts(statement: ast.stmt) -> bool:
    """Whether an assignment could be more than that."""
    return not _pure(statement) and any(
        isinstance(n, ast.Call | ast.Yield | ast.YieldFrom) for n in ast.walk(statement)
    )


def _independent(one: ast.stmt, other: ast.stmt) -> bool:
    def names(statement: ast.stmt, kind: type) -> set[str]:
        return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}

    return not (names(one, ast.Store) & (names(other, ast.Load) | names(other, ast.Store))) and not (
        names(other, ast.Store) & names(one, ast.Load)
    )


def _nth(function: Any, block: int) -> list[ast.stmt]:
    return list(_blocks(function))[block]


def _drop(function: Any, b: int, s: int) -> None:
    _nth(function, b)[s] = ast.Pass()


def _swap(function: Any, b: int, s: int) -> None:
    block = _nth(function, b)
    block[s], block[s + 1] = block[s + 1], block[s]


def _early(function: Any, b: int, s: int) -> None:
    block = _nth(function, b)
    block.insert(0, block.pop(s))


def _twice(function: Any, b: int, s: int) -> None:
    block = _nth(function, b)
    block.insert(s, copy.deepcopy(block[s]))


def _rewrite(function: Any, n: int, template: str) -> None:
    target = list(ast.walk(function))[n]
    new = ast.parse(template.format(ast.unparse(target)), mode="eval").body
    for node in ast.walk(function):
        for name, value in ast.iter_fields(node):
            if value is target:
                setattr(node, name, new)
            elif isinstance(value, list):
                setattr(node, name, [new if each is target else each for each in value])


def _negate(function: Any, n: int) -> None:
    node: Any = list(ast.walk(function))[n]
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _off_by_one(function: Any, n: int) -> None:
    node: Any = list(ast.walk(function))[n]
    flipped = {ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt}
    node.ops[0] = flipped[type(node.ops[0])]()
