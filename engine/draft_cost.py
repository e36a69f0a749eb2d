"""What steps and drafts cost by their size, learned from those that ran. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

OWN_RATE, SHARED_RATE = 0.1, 0.05  # how much of a surprise moves a size's own figure, and all figures
SURPRISE_MAX = math.log(1.5)  # one step that waited for another process says little
RELIEF_MAX = math.log(4.0)  # nothing makes a step faster than it is: the figure before was too high
LINE_WEIGHT = 4.0  # steps that the line through all sizes counts for, beside those of a size's own
WEIGHT_MAX = 64.0  # steps that a size counts for in the line
FADE, FADE_EVERY = 0.8, 64  # what was seen long ago counts less: a size that seemed dear once is tried again
MORE = 0.2  # a token more, in steps of as many sequences over their number: hopeful, so that the truth is soon tried
MORE_TOKENS, MORE_WEIGHT = 8, 1.0  # as if one step with so many tokens more had been seen to take that
FLOOR = 0.1  # of the smallest size: no size is thought to take less
LOOKS = 32  # at a curve before it is drawn anew


@dataclass(slots=True)
class _Size:
    """`figure`: log seconds, without what all sizes share. `weight`: steps seen, older ones counting less."""

    figure: float
    weight: float = 1.0
    times: int = 1


@dataclass(slots=True)
class _Curve:
    seconds: list[float]
    looks: int = 0


@dataclass(slots=True)
class _Row:
    """Of one number of sequences: by tokens, and the line through them, drawn anew now and then."""

    sizes: dict[int, _Size] = field(default_factory=dict)
    line: tuple[int, float, float] | None = None  # tokens, seconds at so many, seconds for each one more
    steps: int = 0

    def seconds(self, tokens: int) -> float:
        """The line, and by how much the sizes beside are off it, as far as they were seen: one slow step must not
        rule a size out."""
        first, base, more = self.line or self._draw()
        line = base + more * (tokens - first)
        if tokens in self.sizes:
            return max(line + self._off(tokens), base * FLOOR)
        below = max((n for n in self.sizes if n < tokens), default=None)
        above = min((n for n in self.sizes if n > tokens), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None
            return max(line + self._off(nearest), base * FLOOR)
        low, high = self._off(below), self._off(above)
        return max(line + low + (high - low) * (tokens - below) / (above - below), base * FLOOR)

    def seen(self) -> None:
        self.steps += 1
        if self.steps % FADE_EVERY == 0:
            for size in self.sizes.values():
                size.weight *= FADE
        if self.steps % (FADE_EVERY // 4) == 0:
            self.line = None

    def _off(self, tokens: int) -> float:
        assert self.line is not None
        first, base, more = self.line
        size = self.sizes[tokens]
        off = math.exp(size.figure) - base - more * (tokens - first)
        return off * size.weight / (size.weight + LINE_WEIGHT)

    def _draw(self) -> tuple[int, float, float]:
        """Through the smallest size, which is seen most; its slope has the least squares of relative errors."""
        first = min(self.sizes)
        base = math.exp(self.sizes[first].figure)
        trust = MORE_WEIGHT * (MORE_TOKENS / base) ** 2
        xx, xy = trust, trust * MORE * base / first
        for tokens, size in self.sizes.items():
            seconds, x = math.exp(size.figure), tokens - first
            weight = min(size.weight, WEIGHT_MAX) / seconds**2
            xx, xy = xx + weight * x * x, xy + weight * x * (seconds - base)
        self.line = first, base, max(xy / xx, 0.0)
        return self.line


@dataclass(slots=True, kw_only=True)
class Costs:
    """Seconds by (sequences, tokens): running averages of logarithms, drawn towards a line.

    What all sizes have in common, a longer context or a busier machine, moves every figure: so that sizes that are
    rarely run stay comparable with those that are run all the time.
    """

    _rows: dict[int, _Row] = field(default_factory=dict)
    _shared: float = 0.0
    _curves: dict[int, _Curve] = field(default_factory=dict)

    def observe(self, sequences: int, tokens: int, seconds: float) -> None:
        if not seconds > 0.0:
            return
        row = self._rows.setdefault(sequences, _Row())
        row.seen()
        figure, size = math.log(seconds) - self._shared, row.sizes.get(tokens)
        if size is None:
            if row.sizes:
                expected = math.log(row.seconds(tokens))
                figure = expected + min(max(figure - expected, -RELIEF_MAX), SURPRISE_MAX)
            row.sizes[tokens], row.line = _Size(figure), None
            self._curves.pop(sequences, None)
            return
        surprise = min(max(figure - size.figure, -RELIEF_MAX), SURPRISE_MAX)
        self._shared += SHARED_RATE * min(max(surprise, -SURPRISE_MAX), SURPRISE_MAX)
        size.times += 1
        size.weight += 1.0
        size.figure += max(OWN_RATE, 1.0 / size.times) * surprise  # the first few count alike

    def times(self, sequences: int, tokens: int) -> int:
        """How often this very size was seen."""
        row = self._rows.get(sequences)
        size = row.sizes.get(tokens) if row is not None else None
        return size.times if size is not None else 0

    def curve(self, sequences: int, more: int) -> Sequence[float]:
        """Seconds of steps of so many sequences and 0, 1, .. `more` tokens beside theirs, never falling; drawn anew
        after a few looks. Empty: nothing was seen."""
        curve = self._curves.get(sequences)
        if curve is None or len(curve.seconds) <= more or curve.looks >= LOOKS:
            known = [self.estimate(sequences, sequences + n) for n in range(more + 1)]
            curve = self._curves[sequences] = _Curve(rising([seconds for seconds in known if seconds is not None]))
        curve.looks += 1
        return curve.seconds

    def estimate(self, sequences: int, tokens: int) -> float | None:
        """Seconds, also of sizes that were not seen. None: nothing was seen at all."""
        row = self._rows.get(sequences)
        if row is None:
            if not self._rows:
                return None
            # The nearest number of sequences, with as many tokens.
            row = self._rows[min(self._rows, key=lambda other: (abs(other - sequences), other))]
        return row.seconds(tokens) * math.exp(self._shared)


def rising(values: Sequence[float]) -> list[float]:
    """The nearest values, by least squares, that never fall: neighbours that do are pooled. More tokens take longer;
    what was seen of single sizes is rough."""
    pools: list[tuple[float, int]] = []  # (mean, values)
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, others = pools.pop()
            mean, count = (mean * count + before * others) / (count + others), count + others
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
