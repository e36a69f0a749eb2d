"""What steps and drafts cost by their size, learned from those that ran. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

OWN_RATE, SHARED_RATE = 0.1, 0.05  # how much of a surprise moves a size's own figure, and all figures
SURPRISE_MAX = math.log(1.5)  # one step that waited for another process says little
RELIEF_MAX = math.log(4.0)  # nothing makes a step faster than it is: the figure before was too high
MORE = 0.1  # a token more, in steps of one sequence's one token: hopeful, so that the truth is soon tried
LOOKS = 32  # at a curve before it is drawn anew


@dataclass(slots=True)
class _Curve:
    seconds: list[float]
    looks: int = 0


@dataclass(slots=True, kw_only=True)
class Costs:
    """Seconds by (sequences, tokens), running averages of logarithms.

    What all sizes have in common, a longer context or a busier machine, moves every figure: so that sizes that are
    rarely run stay comparable with those that are run all the time.
    """

    _seen: dict[int, dict[int, float]] = field(default_factory=dict)  # log seconds, without what is shared
    _times: dict[tuple[int, int], int] = field(default_factory=dict)  # how often each was seen
    _shared: float = 0.0
    _curves: dict[int, _Curve] = field(default_factory=dict)

    def observe(self, sequences: int, tokens: int, seconds: float) -> None:
        if not seconds > 0.0:
            return
        row, figure = self._seen.setdefault(sequences, {}), math.log(seconds)
        known, times = row.get(tokens), self.times(sequences, tokens)
        self._times[sequences, tokens] = times + 1
        if known is None:
            row[tokens] = figure - self._shared
            self._curves.pop(sequences, None)
            return
        surprise = min(max(figure - known - self._shared, -RELIEF_MAX), SURPRISE_MAX)
        self._shared += SHARED_RATE * min(max(surprise, -SURPRISE_MAX), SURPRISE_MAX)
        row[tokens] = known + max(OWN_RATE, 1.0 / (times + 1)) * surprise  # the first few count alike

    def times(self, sequences: int, tokens: int) -> int:
        """How often this very size was seen."""
        return self._times.get((sequences, tokens), 0)

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
        """Seconds; between sizes that were seen on a line, beyond them as they rise. None: nothing was seen."""
        row = self._seen.get(sequences)
        if row is None:
            if not self._seen:
                return None
            # The nearest number of sequences, with as many tokens more or less.
            near = min(self._seen, key=lambda other: (abs(other - sequences), other))
            return self._along(self._seen[near], tokens)
        known = row.get(tokens)
        return self._seconds(known) if known is not None else self._along(row, tokens)

    def _along(self, row: dict[int, float], tokens: int) -> float:
        below = max((n for n in row if n <= tokens), default=None)
        above = min((n for n in row if n >= tokens), default=None)
        if below is not None and above is not None:
            low, high = self._seconds(row[below]), self._seconds(row[above])
            return low if below == above else low + (high - low) * (tokens - below) / (above - below)
        nearest = below if below is not None else above
        assert nearest is not None
        base = self._seconds(row[nearest])
        other = min(row) if below is not None else max(row)
        rise = (self._seconds(row[other]) - base) / (other - nearest) if other != nearest else MORE * base / nearest
        return max(base + max(rise, 0.0) * (tokens - nearest), base * min(tokens / nearest, 1.0) * MORE)

    def _seconds(self, figure: float) -> float:
        return math.exp(figure + self._shared)


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
