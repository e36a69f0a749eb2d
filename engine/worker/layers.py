"""Where some of a slot's layers lie: the unit in which a state is lent early."""

from __future__ import annotations

from collections.abc import Sequence

from engine.worker.memory import Extent


def layer_extents(state_parts: Sequence[Extent], num_layers: int, first: int, end: int) -> tuple[Extent, Extent]:
    """KDA layers [first, end) of a slot's recurrent state and of its conv history (`Holding.state_parts`).

    Both are stored layer after layer (`model.batch.PoolLayout`), so that each is one range.
    """
    recurrent, conv = (
        Extent(part.pool, part.offset + part.length // num_layers * first, part.length // num_layers * (end - first))
        for part in state_parts
    )
    return recurrent, conv
