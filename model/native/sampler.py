"""`NativeSampler`: the engine's draws in C++, one call for all of a step's (`model.sampling.Sampler`)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from model.native.draw_ffi import WANTED, Rule
from moonrelay.errors import InvariantError

if TYPE_CHECKING:
    from model.sampling import Logits, Wanted

RULES = {"standard": Rule.STANDARD.value, "block": Rule.BLOCK.value}
ROOM = 64  # draws that fit before the buffers grow
REFUSED = 2  # mr_draw: nothing was read


class NativeSampler:
    """Holds no state but buffers for what is asked, so one is for one thread."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib, self._draw = lib, lib.mr_draw
        self._make_room(ROOM)

    def _make_room(self, draws: int) -> None:
        self._room = draws
        self._wanted = bytearray(WANTED.size * draws)
        self._wanted_at = ctypes.addressof(ctypes.c_char.from_buffer(self._wanted))
        self._found = array("i", bytes(8 * draws))
        self._found_at = self._found.buffer_info()[0]

    def draw(
        self,
        logits: Logits,
        draws: Sequence[Wanted],
        shifted: Mapping[int, Logits],
        rule: Literal["standard", "block"],
    ) -> Sequence[int]:
        """See `Sampler.draw`. Raises MemoryError too."""
        count, (num_rows, vocab) = len(draws), logits.shape
        if count > self._room:
            self._make_room(2 * count)
        logits = _plain(logits)
        row, stride, drafted, held = _address(logits), 4 * vocab, array("i"), []
        end = row + stride * num_rows
        pack, wanted, size, at = WANTED.pack_into, self._wanted, WANTED.size, 0
        for index, draw in enumerate(draws):
            params, tokens, here, laws_at, num_drafted = draw.params, draw.drafted, row, 0, 0
            row += stride
            if tokens:
                num_drafted, laws = len(tokens), draw.laws
                row += stride * num_drafted
                drafted.extend(tokens)
                if laws is not None:
                    held.append(laws := _plain(laws))
                    _must_be(laws, num_drafted, vocab)
                    laws_at = _address(laws)
            if shifted and index in shifted:
                held.append(own := _plain(shifted[index]))
                _must_be(own, 1 + num_drafted, vocab)
                here = _address(own)
            top_k = params.top_k
            pack(
                wanted, at, here, laws_at, params.seed, draw.position, params.top_p, params.temperature,
                params.choice, top_k if top_k < vocab else 0, num_drafted,
            )  # fmt: skip
            at += size
        if row != end:
            raise InvariantError(f"{num_rows} rows of logits do not fit these draws")
        status = self._draw(self._wanted_at, count, vocab, drafted.buffer_info()[0], RULES[rule], self._found_at)
        if status:
            raise (InvariantError if status == REFUSED else MemoryError)(self._lib.mr_error().decode())
        return self._found[: 2 * count]


def _plain(values: Logits) -> Logits:
    if values.flags.c_contiguous and values.dtype == np.float32:
        return values
    return np.ascontiguousarray(values, dtype=np.float32)


def _address(values: Logits) -> int:
    address: int = values.__array_interface__["data"][0]
    return address


def _must_be(values: Logits, rows: int, vocab: int) -> None:
    if values.shape != (rows, vocab):
        raise InvariantError(f"expected [{rows}, {vocab}], found {list(values.shape)}")
