"""`NativeDraftModel`: the DSpark drafter in C++, behind `model.drafting.DraftModel`."""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from model.drafter.config import DrafterConfig
from model.drafter.rotary import amplitude, attention_scale, frequencies
from model.drafting import NOTHING, DraftRequest, Proposal
from model.errors import BackendUnavailable
from model.native.backend import WRONG_PASS, BatchError, library
from model.native.draft_ffi import DraftMatrix, DraftPass, DraftPool, DraftRows, DraftShape, DraftVector
from model.native.ffi import Join, Source
from model.native.loader import GLOBAL, kind_of, source_of

if TYPE_CHECKING:
    from model.batch import PoolLayout, Segment


class NativeDraftModel:
    """Agrees with `model.drafter.paged.TorchDraftModel`; one draft does not depend on its batch.

    All products, of rows and of blocks, run in bytes, about one part in a hundred off: the target judges every draft
    anyway, and laws are those that were drawn from. `exact` computes with the weights as stored.

    Raises: BackendUnavailable for a form that is not written in C++, MemoryError.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        drafter_id: str,
        layout: PoolLayout,
        threads: int = 1,
        *,
        exact: bool = False,
    ) -> None:
        self._handle: int | None = None  # set first: __del__ runs even when the rest fails
        if config.form != "dspark":
            raise BackendUnavailable(f"the C++ drafter takes the form 'dspark', not {config.form!r}")
        self._lib = library()
        self._config = config
        self.drafter_id = drafter_id
        self.target_layers = config.target_layers
        self.block_len = config.block_len
        self.draft_width = config.layers * config.row_width
        self._token_floats = layout.mla_floats // layout.block_tokens + self.draft_width
        self._handle = self._lib.mr_draft_create(ctypes.byref(_shape(config, layout, exact)), threads)
        if not self._handle:
            raise BackendUnavailable(self._lib.mr_error().decode())
        self._load(tensors, lm_head, exact)
        self._embedding = embedding  # read in place, so kept
        self._lib.mr_draft_embedding(self._handle, embedding.data_ptr(), kind_of(embedding))
        self._must(self._lib.mr_draft_check(self._handle))
        self._one_pass = threading.Lock()  # the scratch serves one pass at a time

    def __del__(self) -> None:
        if self._handle:
            self._lib.mr_draft_destroy(self._handle)

    def write_rows(self, segments: Sequence[Segment], taps: torch.Tensor, rows: torch.Tensor) -> None:
        """See `DraftModel.write_rows`. Raises BatchError (nothing touched) or MemoryError."""
        config = self._config
        expected = (sum(len(s.ids) for s in segments), len(config.target_layers), config.hidden)
        if taps.shape != expected or taps.dtype != torch.float32 or not taps.is_contiguous():
            raise BatchError(f"taps: expected contiguous fp32 {list(expected)}, found {list(taps.shape)}")
        tokens = array("i", [len(s.ids) for s in segments])
        start = array("q", [s.start for s in segments])
        blocks, num_blocks = _tables([s.blocks for s in segments])
        pool = self._pool(rows)
        arrays = (tokens, start, blocks, num_blocks)
        work = DraftRows(len(segments), *(a.buffer_info()[0] for a in arrays), pool, taps.data_ptr())
        with self._one_pass:
            self._must(self._lib.mr_draft_write(self._handle, ctypes.byref(work)))

    def draft(self, requests: Sequence[DraftRequest], rows: torch.Tensor) -> list[Proposal]:
        """See `DraftModel.draft`. Raises BatchError (nothing touched) or MemoryError."""
        lengths = [r.length for r in requests]
        uniforms = array("d")
        for request in requests:
            if request.temperature > 0 and len(request.uniforms) != request.length:
                raise BatchError(f"expected {request.length} uniform numbers, found {len(request.uniforms)}")
            uniforms.extend(request.uniforms if request.temperature > 0 else [0.0] * request.length)
        try:
            arrays = (
                array("i", [r.anchor for r in requests]),
                array("q", [r.position for r in requests]),
                array("q", [r.first for r in requests]),
                array("i", lengths),
                array("f", [r.temperature for r in requests]),
                uniforms,
                *_guesses(requests),
                *_tables([r.blocks for r in requests]),
            )
        except OverflowError as error:
            raise BatchError(f"an index is no 32-bit number: {error}") from error
        total = max(0, sum(lengths))
        drawn = sum(r.length for r in requests if r.temperature > 0)
        tokens, confidence = array("i", bytes(4 * total)), array("f", bytes(4 * total))
        laws = np.empty((max(0, drawn), self._config.vocab), np.float32)
        good = array("i", bytes(4 * len(requests)))
        work = DraftPass(
            len(requests), *(a.buffer_info()[0] if a else None for a in arrays), self._pool(rows),
            tokens.buffer_info()[0], confidence.buffer_info()[0], laws.ctypes.data, good.buffer_info()[0],
        )  # fmt: skip
        with self._one_pass:
            self._must(self._lib.mr_draft_propose(self._handle, ctypes.byref(work), self.block_len))
        proposals, at, law = [], 0, 0
        for request, count in zip(requests, good, strict=True):
            share = slice(at, at + count)
            own = laws[law : law + count] if request.temperature > 0 else None
            at, law = at + request.length, law + (0 if own is None else request.length)
            proposals.append(
                Proposal(tokens=tokens[share].tolist(), confidence=confidence[share].tolist(), laws=own)
                if count
                else NOTHING
            )
        return proposals

    def _pool(self, rows: torch.Tensor) -> DraftPool:
        if rows.dim() != 2 or rows.dtype != torch.float32 or not rows.is_contiguous():
            raise BatchError("rows: expected a contiguous two-dimensional fp32 CPU tensor")
        return DraftPool(rows.data_ptr(), *rows.shape, rows.shape[1] // self._token_floats)

    def _must(self, status: int) -> None:
        if status:
            raise (BatchError if status == WRONG_PASS else MemoryError)(self._lib.mr_error().decode())

    def _load(self, tensors: Mapping[str, torch.Tensor], lm_head: torch.Tensor, exact: bool) -> None:
        config = self._config

        def vector(layer: int, slot: DraftVector, values: torch.Tensor) -> None:
            data = values.float().contiguous().flatten()
            self._must(self._lib.mr_draft_vector(self._handle, layer, slot, data.data_ptr(), data.numel()))

        matrix = self._matrix if exact else self._rounded
        matrix(GLOBAL, DraftMatrix.CONTEXT, tensors["context_proj.weight"])
        rows = [tensors[f"layers.{i}.self_attn.kv_a_proj_with_mqa.weight"] for i in range(config.layers)]
        if not exact:
            self._rounded(GLOBAL, DraftMatrix.ROWS, *rows)
        matrix(GLOBAL, DraftMatrix.HEAD, lm_head)
        matrix(GLOBAL, DraftMatrix.MARKOV_OUT, tensors["markov_head.markov_w2.weight"])
        vector(GLOBAL, DraftVector.CONTEXT_NORM, tensors["context_norm.weight"])
        vector(GLOBAL, DraftVector.FINAL_NORM, tensors["final_norm.weight"])
        vector(GLOBAL, DraftVector.FREQUENCY, frequencies(config.rope))
        vector(GLOBAL, DraftVector.MARKOV_IN, tensors["markov_head.markov_w1.weight"])
        if config.confidence:
            vector(GLOBAL, DraftVector.CONFIDENCE, tensors["confidence_head.proj.weight"])
            vector(GLOBAL, DraftVector.CONFIDENCE_BIAS, tensors["confidence_head.proj.bias"])
        for layer in range(config.layers):
            own = {n.removeprefix(f"layers.{layer}."): t for n, t in tensors.items()}
            vector(layer, DraftVector.IN_NORM, own["input_layernorm.weight"])
            vector(layer, DraftVector.POST_NORM, own["post_attention_layernorm.weight"])
            vector(layer, DraftVector.QA_NORM, own["self_attn.q_a_layernorm.weight"])
            vector(layer, DraftVector.ROW_NORM, own["self_attn.kv_a_layernorm.weight"])
            (self._attention_as_stored if exact else self._attention_rounded)(layer, own)
            matrix(layer, DraftMatrix.MLP_IN, own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"], join=Join.GLU)
            matrix(layer, DraftMatrix.MLP_OUT, own["mlp.down_proj.weight"])

    def _attention_as_stored(self, layer: int, own: Mapping[str, torch.Tensor]) -> None:
        nope = self._config.nope
        self._matrix(layer, DraftMatrix.ROWS, own["self_attn.kv_a_proj_with_mqa.weight"])
        self._matrix(layer, DraftMatrix.Q_A, own["self_attn.q_a_proj.weight"])
        self._matrix(layer, DraftMatrix.Q_B, own["self_attn.q_b_proj.weight"])
        for head in self._heads(own):
            self._matrix(layer, DraftMatrix.KEY_UP, head[:nope].T)
            self._matrix(layer, DraftMatrix.VALUE_UP, head[nope:])
        self._matrix(layer, DraftMatrix.OUT, own["self_attn.o_proj.weight"])

    def _attention_rounded(self, layer: int, own: Mapping[str, torch.Tensor]) -> None:
        """Fewer and larger products: see `DraftMatrix` in drafter.h. Queries are padded to 16 floats a head."""
        config = self._config
        rows = own["self_attn.kv_a_proj_with_mqa.weight"]
        self._rounded(layer, DraftMatrix.Q_A, own["self_attn.q_a_proj.weight"], rows)
        queries, outs = [], []
        of_head = torch.split(own["self_attn.q_b_proj.weight"].float(), config.nope + config.rope.dim)
        out_of_head = torch.split(own["self_attn.o_proj.weight"].float(), config.v_dim, 1)
        for head, q, out in zip(self._heads(own), of_head, out_of_head, strict=True):
            queries += [head[: config.nope].float().T @ q[: config.nope], q[config.nope :]]
            queries.append(q.new_zeros(-config.row_width % 16, config.q_lora))
            outs.append(out @ head[config.nope :].float())
        self._rounded(layer, DraftMatrix.Q_B, torch.cat(queries))
        self._rounded(layer, DraftMatrix.OUT, torch.cat(outs, 1))

    def _heads(self, own: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Per head: latent to keys, then latent to values."""
        return torch.split(own["self_attn.kv_b_proj.weight"], self._config.nope + self._config.v_dim)

    def _matrix(self, layer: int, slot: DraftMatrix, *parts: torch.Tensor, join: Join = Join.ROWS) -> None:
        sources = (Source * len(parts))(*(source_of(part)[0] for part in parts))
        self._must(self._lib.mr_draft_pack(self._handle, layer, slot, sources, len(parts), join))

    def _rounded(self, layer: int, slot: DraftMatrix, *parts: torch.Tensor, join: Join = Join.ROWS) -> None:
        sources = (Source * len(parts))(*(source_of(part)[0] for part in parts))
        self._must(self._lib.mr_draft_round(self._handle, layer, slot, sources, len(parts), join))


def _guesses(requests: Sequence[DraftRequest]) -> tuple[array[int], array[float]]:
    """Both with a place for each slot, or empty where nobody has any."""
    guess, more = array("i"), array("f")
    if any(request.guess for request in requests):
        for request in requests:
            if not len(request.guess) == len(request.more) <= request.length:
                raise BatchError(f"a guess of {len(request.guess)} tokens for a draft of {request.length}")
            if min(request.guess, default=0) < 0:  # what stands for no guess below
                raise BatchError(f"a guess outside the vocabulary: {list(request.guess)}")
            spare = request.length - len(request.guess)
            guess.extend((*request.guess, *[-1] * spare))
            more.extend((*request.more, *[0.0] * spare))
    return guess, more


def _tables(tables: Sequence[Sequence[int]]) -> tuple[array[int], array[int]]:
    """All block tables in a row, and the length of each."""
    blocks = array("i")
    for table in tables:
        blocks.extend(table)
    return blocks, array("i", [len(table) for table in tables])


def _shape(config: DrafterConfig, layout: PoolLayout, exact: bool) -> DraftShape:
    return DraftShape(
        vocab=config.vocab, hidden=config.hidden, inter=config.intermediate, layers=config.layers, heads=config.heads,
        taps=len(config.target_layers), q_lora=config.q_lora, kv_lora=config.kv_lora, nope=config.nope,
        rope=config.rope.dim, v_dim=config.v_dim, markov_rank=config.markov_rank, confidence=config.confidence,
        confidence_markov=config.confidence and config.confidence_sees_markov, mask_id=config.mask_id, exact=exact,
        eps=config.eps, embedding_scale=config.embedding_scale,
        score_scale=attention_scale(config.rope, config.nope + config.rope.dim), amplitude=amplitude(config.rope),
        mla_width=layout.mla_floats // layout.block_tokens,
    )  # fmt: skip
