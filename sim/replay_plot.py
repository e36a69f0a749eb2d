"""Hit rates as bars: in a terminal, and as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

WIDTH: Final = 40  # of a full bar, in characters
BAR, GAP, LEFT, SCALE = 18, 8, 250, 420  # pixels


def bars(name: str, rate: float, ideal: float, note: str) -> str:
    """One row; a full bar is what an unlimited cache gives."""
    filled = round(WIDTH * rate / ideal) if ideal else 0
    return f"  {name:<26} {rate:.4f} {'#' * filled:<{WIDTH}} {note}"


def svg(rows: Sequence[Mapping[str, Any]], bounds: Mapping[str, float], ideal: float, title: str) -> str:
    """The rows as bars by budget, each budget's bound as a line, the unlimited cache as the right edge."""
    parts: list[str] = []
    name = escape(title.rsplit("/", 1)[-1])
    y, full = 48, ideal or 1.0
    for budget, bound in bounds.items():
        parts.append(f'<text x="12" y="{y + 12}" font-weight="bold">{escape(budget)} TB</text>')
        y += BAR + GAP
        top = y
        for row in rows:
            if f"{row['budget_tb']:g}" != budget:
                continue
            length = SCALE * row["token_hit_rate"] / full
            colour = "#1b6ca8" if row["policy"] == "worth" else "#a0a0a0"
            parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(row["name"])}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + SCALE + 10}" y="{y + 13}">{row["token_hit_rate"]:.4f}</text>')
            y += BAR + GAP
        at = LEFT + SCALE * bound / full
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" y2="{y - 4}" stroke="#c03020"/>')
        y += GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + SCALE + 80}" height="{y + 8}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="24" font-size="14">{name}: token hit rate (right edge: unlimited cache, '
        f"{ideal:.4f}; line: foresight)</text>"
    )
    return head + "".join(parts) + "</svg>\n"
