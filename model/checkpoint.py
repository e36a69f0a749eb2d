"""Memory-mapped, checked loading of safetensors checkpoints, sharded or single.

Weights stay in their stored form: `Weights` hands out views of the mapped files, and each backend converts.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from model.config import ModelConfig, load_config
from model.errors import CheckpointError
from model.tensors import VISION_PREFIXES, TensorSpec, expected_tensors, expert_name, name_prefix

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_BYTES_MAX = 256 << 20  # K3's largest shard header is about 1 MB
HASH_CHUNK_BYTES = 1 << 24
MAP_NORESERVE = 0x4000  # Linux; a private map of a file larger than memory is refused without it

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """MXFP4: two E2M1 codes a byte, the low nibble first, and one E8M0 scale per 32 columns.

    Shapes: packed uint8 [out, in/2]; scale uint8 [out, in/32].
    """

    packed: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]


@dataclass(frozen=True, slots=True)
class _Entry:
    shard: int
    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    data: mmap.mmap
    entries: Mapping[str, _Entry]


class Weights:
    """A checkpoint's text tensors by their K3 name without `language_model.`; checked, mapped, never copied.

    Every tensor has its stored dtype and the shape of `model.tensors`; only A_log comes as [kda_heads].
    The map is private: writing to a view changes this process's copy only, and nothing here does.
    """

    def __init__(
        self, config: ModelConfig, shards: list[_Shard], entries: dict[str, _Entry], experts_packed: bool
    ) -> None:
        self.config = config
        self.experts_packed = experts_packed
        self._shards = shards
        self._entries = entries
        self._revision: str | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        tensor = _view(self._shards[entry.shard], entry)
        if name.endswith(".A_log"):
            return tensor.flatten()[: self.config.kda_heads]
        return tensor

    def expert(self, layer: int, index: int, matrix: str) -> torch.Tensor | PackedTensor:
        """w1 (gate), w3 (up) or w2 (down) of one routed expert, in the form it is stored in."""
        name = expert_name(layer, index, matrix)
        if self.experts_packed:
            return PackedTensor(self[f"{name}.weight_packed"], self[f"{name}.weight_scale"])
        return self[f"{name}.weight"]

    def revision(self) -> str:
        """32 hex digits over every byte of every shard and the parsed config: equal if the network is equal.

        Reads all shards once (xxh3, about memory speed), then remembers.
        """
        if self._revision is None:
            digest = xxhash.xxh3_128(repr(self.config).encode())
            for shard in self._shards:
                digest.update(f"{shard.path.name}:{len(shard.data)}".encode())
                with memoryview(shard.data) as view:
                    for start in range(0, len(view), HASH_CHUNK_BYTES):
                        digest.update(view[start : start + HASH_CHUNK_BYTES])
            self._revision = digest.hexdigest()
        return self._revision


def load_weights(model_dir: Path, config: ModelConfig) -> Weights:
    """Map and check model_dir's safetensors files.

    Raises: CheckpointError, naming the file, the tensor, what was expected and what was found.
    """
    shards, where = _open_all(model_dir)
    entries = {name: entry for shard in shards for name, entry in shard.entries.items()}
    packed = _experts_packed(model_dir, config, entries)
    expected = expected_tensors(config, experts_packed=packed)
    prefix = name_prefix(config)
    for name in expected:
        if prefix + name not in entries:
            raise CheckpointError(where, prefix + name, f"shape {expected[name].describe_shape()}", "no such tensor")
    kept: dict[str, _Entry] = {}
    for name, entry in entries.items():
        path = shards[entry.shard].path
        if config.family == "kimi_k3" and name.startswith(VISION_PREFIXES):
            continue
        spec = expected.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if spec is None:
            raise CheckpointError(path, name, "only tensors that config.json calls for", _describe(entry))
        _check_entry(path, name, spec, entry)
        kept[name.removeprefix(prefix)] = entry
    return Weights(config, shards, kept, packed)


def weights_revision(model_dir: Path) -> str:
    """`Weights.revision` of a checkpoint on disk: a part of the cache's fingerprint."""
    return load_weights(model_dir, load_config(model_dir)).revision()


def load_tensors(
    model_dir: Path, expected: Mapping[str, TensorSpec], optional: Mapping[str, TensorSpec]
) -> dict[str, torch.Tensor]:
    """A small checkpoint's tensors by name: all of `expected`, and of `optional` what is there. Mapped and checked.

    Raises: CheckpointError, also for a tensor that is neither.
    """
    shards, where = _open_all(model_dir)
    tensors = {}
    for shard in shards:
        for name, entry in shard.entries.items():
            spec = expected.get(name) or optional.get(name)
            if spec is None:
                raise CheckpointError(shard.path, name, "only tensors that config.json calls for", _describe(entry))
            _check_entry(shard.path, name, spec, entry)
            tensors[name] = _view(shard, entry)
    for name, spec in expected.items():
        if name not in tensors:
            raise CheckpointError(where, name, f"shape {spec.describe_shape()}", "no such tensor")
    return tensors


def _open_all(model_dir: Path) -> tuple[list[_Shard], Path]:
    """The checkpoint's files, and the one that says which tensors there are."""
    index_path = model_dir / INDEX_FILE
    if not index_path.exists():
        return [_open_shard(model_dir / SINGLE_FILE, 0)], model_dir / SINGLE_FILE
    weight_map = _read_index(index_path)
    names = sorted(set(weight_map.values()))
    shards = [_open_shard(model_dir / name, number) for number, name in enumerate(names)]
    _check_index(index_path, weight_map, shards)
    return shards, index_path


def _view(shard: _Shard, entry: _Entry) -> torch.Tensor:
    dtype = DTYPES[entry.dtype]
    count = math.prod(entry.shape)
    if entry.begin % dtype.itemsize:  # the format does not promise alignment; kernels assume it
        raw = torch.frombuffer(bytearray(shard.data[entry.begin : entry.begin + entry.num_bytes]), dtype=dtype)
        return raw.view(entry.shape)
    return torch.frombuffer(shard.data, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)


def _describe(entry: _Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _check_entry(path: Path, name: str, spec: TensorSpec, entry: _Entry) -> None:
    if not spec.accepts_shape(entry.shape):
        raise CheckpointError(path, name, f"shape {spec.describe_shape()}", f"shape {list(entry.shape)}")
    if entry.dtype not in spec.dtypes:
        raise CheckpointError(path, name, f"dtype {' or '.join(spec.dtypes)}", f"dtype {entry.dtype}")


def _experts_packed(model_dir: Path, config: ModelConfig, entries: Mapping[str, _Entry]) -> bool:
    """Whether experts are MXFP4: the tensors say so, and config.json must agree."""
    packed = any(name.endswith(".weight_packed") for name in entries)
    has_experts = config.dense_layers < config.num_layers
    if packed and config.mxfp4_group is None:
        name = next(name for name in entries if name.endswith(".weight_packed"))
        raise CheckpointError(model_dir, name, "a quantization_config in config.json", "none")
    if not packed and config.mxfp4_group is not None and has_experts:
        expected = "experts as .weight_packed, since config.json has a quantization_config"
        raise CheckpointError(model_dir, None, expected, "no tensor of that name")
    return packed


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(path, None, "a readable JSON index", error) from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, None, "an object weight_map of tensor names to files", type(weight_map).__name__)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(path, name, "the name of a .safetensors file beside the index", repr(file))
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], shards: list[_Shard]) -> None:
    for shard in shards:
        for name in shard.entries:
            if weight_map.get(name) != shard.path.name:
                raise CheckpointError(shard.path, name, f"{path.name} to place it here", repr(weight_map.get(name)))
    present = {shard.path.name: shard.entries for shard in shards}
    for name, file in weight_map.items():
        if name not in present[file]:
            raise CheckpointError(path.parent / file, name, f"the tensor, as {path.name} says", "no such tensor")


def _open_shard(path: Path, number: int) -> _Shard:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise CheckpointError(path, None, "at least 8 bytes", f"{size}: the file is cut short")
            data = mmap.mmap(
                file.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except OSError as error:
        raise CheckpointError(path, None, "a readable file", error.strerror or error) from error
    header_bytes = int.from_bytes(data[:8], "little")
    if header_bytes > min(HEADER_BYTES_MAX, size - 8):
        expected = f"a header of at most {min(HEADER_BYTES_MAX, size - 8)} bytes"
        raise CheckpointError(path, None, expected, f"{header_bytes}: the file is cut short or no safetensors")
    try:
        header = json.loads(data[8 : 8 + header_bytes].decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(path, None, "a JSON header", error) from error
    if not isinstance(header, dict):
        raise CheckpointError(path, None, "an object as header", type(header).__name__)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, raw, number, 8 + header_bytes) for name, raw in header.items()}
    end = 8 + header_bytes
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if entry.begin != end:  # the format has neither gaps nor overlaps
            raise CheckpointError(path, name, f"data from byte {end}", f"from byte {entry.begin}")
        end += entry.num_bytes
    if end != size:
        raise CheckpointError(
            path, None, f"{end} bytes", f"{size}: the file is {'cut short' if size < end else 'too long'}"
        )
    return _Shard(path, data, entries)


def _entry(path: Path, name: str, raw: Any, number: int, base: int) -> _Entry:
    try:
        dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        itemsize = DTYPES[dtype].itemsize
        numbers = (*shape, begin, end)
        well_formed = all(isinstance(n, int) and n >= 0 for n in numbers)
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(path, name, "dtype, shape and data_offsets", repr(raw)) from error
    if not well_formed or end - begin != math.prod(shape) * itemsize:
        raise CheckpointError(
            path, name, f"{dtype} {list(shape)} to span its own bytes", f"data_offsets {raw['data_offsets']}"
        )
    return _Entry(number, dtype, shape, base + begin, end - begin)
