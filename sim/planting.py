"""How a bug is planted into a real core: a named context manager, and what has to find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sim.faults import Fault
from sim.scenario import CALM_EVERY, Scenario, scenario, struck_by

Patch = Callable[[], Any]  # a context manager


@dataclass(frozen=True, slots=True)
class Bug:
    """`invariants`: what may find it, by name; `seeds`: within how many runs it must be found.

    `fault`: without it the bug shows too rarely to wait for; runs with the bug have just this one. `calm`: it shows
    in calm runs alone.
    """

    about: str
    invariants: frozenset[str]
    patch: Patch
    seeds: int
    fault: Fault | None
    calm: bool

    def scenario(self, seed: int) -> Scenario:
        if self.calm:
            return scenario(seed * CALM_EVERY)
        return scenario(seed) if self.fault is None else struck_by(seed, self.fault)


BUGS: Final[dict[str, Bug]] = {}


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` in the body."""
    before = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def planted(
    *invariants: str, seeds: int = 150, fault: Fault | None = None, calm: bool = False
) -> Callable[[Patch], Patch]:
    """Registers a context manager under its own name; its docstring says what the bug is."""

    def register(patch: Patch) -> Patch:
        about = (patch.__doc__ or "").strip()
        BUGS[patch.__name__] = Bug(about, frozenset(invariants), patch, seeds, fault, calm)
        return patch

    return register
