"""The loss curve as an SVG, without a plotting package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 720, 360, 48
SERIES = (
    ("loss", "#4a7ebb", "training loss, nats a token"),
    ("validation_bpb", "#c0504d", "validation, bits a byte"),
)


def write(log: Path, target: Path, *, series: Sequence[tuple[str, str, str]] = SERIES, along: str = "tokens") -> None:
    """Plot a run's log: each series (field, colour, label) over the field `along`, of the records that have both."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    records, reached = [], 0
    for line in lines:  # a record that does not say how far the run was stands where the last one did
        reached = line.get(along, reached)
        records.append(line | {along: reached})
    end = max(1, *(record[along] for record in records))
    top = max(record[name] for record in records for name, *_ in series if name in record)

    def place(at: float, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * at / end
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / top
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for value in range(int(top) + 1):
        x, y = place(0, value).split(",")
        parts.append(f'<path d="M{x},{y}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 16}" y="{y}" font-size="11">{value}</text>')
    for i, (name, colour, label) in enumerate(series):
        points = " ".join(place(record[along], record[name]) for record in records if name in record)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{WIDTH - 260}" y="{MARGIN + 18 * i}" font-size="12" fill="{colour}">{label}</text>')
    parts.append(f'<text x="{WIDTH - 2 * MARGIN}" y="{HEIGHT - 16}" font-size="11">{int(end):,} {along}</text>')
    target.write_text("\n".join([*parts, "</svg>"]) + "\n")
