"""Stop strings, found in text as it streams. No text that may still become a stop string leaves."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until the first stop string ends; how the text is cut into pushes changes nothing.

    The first to end wins, and of two that end together the longer. The stop string itself is never passed on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """What may leave now."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := seen.find(stop)) >= 0]
        if found:
            self.matched = True
            self._held = ""
            return seen[: min(found)[1]]
        keep = self._suffix_to_hold(seen)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _suffix_to_hold(self, seen: str) -> int:
        """Length of the longest end of `seen` with which some stop string begins."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(seen)), 0, -1):
            if any(stop.startswith(seen[-length:]) for stop in self._stops):
                return length
        return 0
