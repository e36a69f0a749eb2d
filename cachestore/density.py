"""How often a snapshot will be hit: learned from what became of earlier ones of its class. Pure.

A snapshot's life since it was made, or since its last hit, is cut into octaves: the first second, then up to 2, 4,
8 ... seconds. Per class and octave we count how many lives entered it and how many met a hit in it. The density is
the best rate of hits per second that keeping the snapshot for some more octaves can have (the Gittins index of that
table), so that a class whose next turn comes after a minute is worth as much in its first second. Evicted snapshots
live on as ghosts and are counted too: what the cache itself decides does not bend what it learns.

Source: LHD (NSDI'18) for density by class and age; Marconi (MLSys'25) for saved compute per byte.
"""

from __future__ import annotations

from typing import Final

OCTAVES: Final = 16  # the last one begins after 4.5 hours
WIDTH_S: Final = (1.0, *(2.0 ** (octave - 1) for octave in range(1, OCTAVES)))
# Before anything is known, an octave meets a hit with this chance whatever its length: the density then falls as
# 1/age, and entries of one size leave in the order of their last use.
PRIOR: Final = 0.1
PRIOR_WEIGHT: Final = 10.0  # lives; how many it takes to believe a class more than the wider class around it
REFRESH_MIN, REFRESH_MAX = 16, 256  # lives between two looks at the tables: an eighth of what there was

Class = tuple[int, ...]  # from wide to narrow: an unknown one starts from its prefix


class HitDensity:
    """Counts, forgotten by half every `half_life` lives, and the densities that follow from them."""

    def __init__(self, half_life: int = 4_096) -> None:
        self._half_life = half_life
        self._entered: dict[Class, list[float]] = {}
        self._hits: dict[Class, list[float]] = {}
        self._densities: dict[Class, list[float]] = {}
        self._lives = self._refresh_at = 0

    def enter(self, kind: Class, octave: int) -> None:
        """A life of this class has reached this octave."""
        _row(self._entered, kind)[octave] += 1
        if octave == 0:
            self._lives += 1
            if self._lives % self._half_life == 0:
                self._forget()
            if self._lives >= self._refresh_at:
                self._refresh_at = self._lives + min(REFRESH_MAX, max(REFRESH_MIN, self._lives // 8))
                self._densities.clear()

    def hit(self, kind: Class, octave: int) -> None:
        """A life of this class was hit in this octave, and begins anew."""
        _row(self._hits, kind)[octave] += 1

    def density(self, kind: Class, octave: int) -> float:
        """Expected hits per second, at the best time to stop waiting for one."""
        known = self._densities.get(kind)
        if known is None:
            known = self._densities[kind] = _best_rates(self._chances(kind))
        return known[octave]

    def _chances(self, kind: Class) -> list[float]:
        """Of a hit within each octave once it is reached; a class leans on the wider ones while it is young."""
        chances = [PRIOR] * OCTAVES
        for end in range(len(kind) + 1):
            entered, hits = _total(self._entered, kind[:end]), _total(self._hits, kind[:end])
            chances = [
                min(0.99, (hit + PRIOR_WEIGHT * chance) / (lives + PRIOR_WEIGHT))
                for lives, hit, chance in zip(entered, hits, chances, strict=True)
            ]
        return chances

    def _forget(self) -> None:
        for table in (self._entered, self._hits):
            for row in table.values():
                row[:] = [count / 2 for count in row]


def octave_end_s(octave: int) -> float:
    """The age at which it ends."""
    return float(1 << octave)


def _row(table: dict[Class, list[float]], kind: Class) -> list[float]:
    row = table.get(kind)
    if row is None:
        row = table[kind] = [0.0] * OCTAVES
    return row


def _total(table: dict[Class, list[float]], prefix: Class) -> list[float]:
    """Over the classes that begin so."""
    rows = [row for kind, row in table.items() if kind[: len(prefix)] == prefix]
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * OCTAVES


def _best_rates(chances: list[float]) -> list[float]:
    """For each octave: the largest hits / seconds over all later octaves to wait through."""
    rates = []
    for begin in range(OCTAVES):
        best = hits = seconds = 0.0
        alive = 1.0
        for octave in range(begin, OCTAVES):
            hits += alive * chances[octave]
            seconds += alive * WIDTH_S[octave] * (1 - chances[octave] / 2)
            alive *= 1 - chances[octave]
            best = max(best, hits / seconds)
        rates.append(best)
    return rates
