"""Hugging Face's OLMoE and OLMo, both ways: one table of names, drives export and import.

Our names are theirs, except that we stack the experts of a layer: `experts.gate_up_proj` (E, 2I, H) with the gate rows
first is their `experts.<e>.gate_proj.weight` and `up_proj.weight` (I, H), `experts.down_proj` (E, H, I) their
`experts.<e>.down_proj.weight` (H, I). Both directions stream: one tensor of theirs is in memory at a time on export (a
shard while it is written), mapped files on import. Bits are kept unless another dtype is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mula_ray.checkpoint.failures import Damage, StoreFailure
from mula_ray.checkpoint.hf_config import hf_config, model_from_hf
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig
from mula_ray.plan.format import Facts
from mula_ray.plan.layout import ParamSpec, param_specs
from mula_ray.plan.pieces import Kind, Piece

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_DTYPES: dict[str, Literal["fp32", "bf16"]] = {"F32": "fp32", "BF16": "bf16"}


@dataclass(frozen=True)
class HfTensor:
    """One tensor of theirs: a box of one of our parameters, in the same element order."""

    name: str
    shape: tuple[int, ...]
    spec: ParamSpec
    offset: tuple[int, ...]
    box: tuple[int, ...]

    def piece(self, kind: Kind, dtype: Literal["fp32", "bf16"]) -> Piece:
        """The same elements as a piece."""
        numel = int(np.prod(self.box))
        return Piece(self.spec.name, kind, dtype, self.spec.shape, self.offset, self.box, 0, numel)


def hf_tensors(model: ModelConfig) -> Iterator[HfTensor]:
    """All of their tensors, in our order: the one table both directions use."""
    for spec in param_specs(model):
        if spec.family == "dense":
            yield HfTensor(spec.name, spec.shape, spec, (0,) * len(spec.shape), spec.shape)
            continue
        prefix, proj = spec.name.rsplit(".", 1)
        experts, rows, cols = spec.shape
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[proj]
        height = rows // len(parts)
        for expert in range(experts):
            for i, part in enumerate(parts):
                name = f"{prefix}.{expert}.{part}.weight"
                yield HfTensor(name, (height, cols), spec, (expert, i * height, 0), (1, height, cols))


def export_hf(
    checkpoint: Path,
    out: Path,
    *,
    dtype: Literal["stored", "fp32", "bf16"] = "stored",
    tokenizer: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[str]:
    """Write a folder that `transformers` loads: sharded safetensors, config.json, tokenizer; returns the file names.

    A full checkpoint gives its fp32 masters, a model-only one its weights. `dtype` bf16 rounds to nearest even.
    `tokenizer`: a tokenizer.json, or the folder that has one. Every block read is checked; the folder appears only when
    all of it is there.

    Raises:
        UserError: `out` exists, or the model is neither OLMoE- nor OLMo-shaped. DamagedCheckpoint: as reading.
    """
    if out.exists():
        raise UserError(f"{out} exists already; export to a new folder")
    with CheckpointReader(checkpoint) as reader:
        config = reader.manifest.facts.config
        model = _model_of(config, checkpoint)
        reader.expect(model)
        kind: Kind = "master" if reader.manifest.kind == "full" else "weight"
        stored = reader.sources(next(hf_tensors(model)).spec.name, kind)[0].piece.dtype
        target = stored if dtype == "stored" else dtype
        plain = hf_config(model, int(config.get("data", {}).get("context", 2048)), target)
        temp = out.with_name(f".{out.name}.tmp-{os.getpid()}")
        temp.mkdir(parents=True)
        try:
            names = _write_shards(temp, reader, model, kind, stored, target, shard_bytes)
            names += _write_tokenizer(temp, tokenizer, plain)
            names.append(_write_json(temp / "config.json", plain))
            os.rename(temp, out)
        except OSError as error:
            raise StoreFailure.of(error, out).as_stop(at_start=True) from error
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return sorted(names)


def import_hf(source: Path, root: Path, *, step: int = 0) -> tuple[Path, list[Damage]]:
    """Make `model-<step>` in the checkpoints folder `root` from a Hugging Face folder; returns it and what reads wrong.

    Raises:
        UserError: no such model, missing, extra or differently shaped tensors (by name), another dtype.
        StoreFailure: as saving.
    """
    config_path = source / "config.json"
    if not config_path.is_file():
        missing = "has no config.json" if source.is_dir() else "is not a folder"
        raise UserError(f"{source} {missing}; give the folder of a Hugging Face OLMoE or OLMo model")
    plain = json.loads(config_path.read_text(encoding="utf-8"))
    model = model_from_hf(plain)
    mapped = _map_folder(source)
    items = []
    for tensor in hf_tensors(model):
        array, hf_dtype = _take(mapped, tensor, source)
        items.append((tensor.piece("weight", hf_dtype), array))
    extra = sorted(mapped.keys() - {tensor.name for tensor in hf_tensors(model)})
    if extra:
        raise UserError(f"{source} has {len(extra)} tensors that the model does not have, such as {extra[0]}")
    manager = CheckpointManager(root, "import-hf")
    manager.acquire()
    try:
        run = {"model": model.model_dump(mode="json"), "data": {"context": plain.get("max_position_embeddings", 2048)}}
        facts = Facts(step, 0, 0, manager.generation, "import-hf", config=run, extra={"imported_from": source.name})
        shapes = {spec.name: spec.shape for spec in param_specs(model)}
        return root / f"model-{step}", manager.save(facts, items, "model", shapes)
    finally:
        manager.close()


def _write_shards(
    folder: Path, reader: CheckpointReader, model: ModelConfig, kind: Kind, stored: str, target: str, limit: int
) -> list[str]:
    import torch
    from safetensors.torch import save_file

    stored_dtype = torch.float32 if stored == "fp32" else torch.bfloat16
    target_dtype = torch.float32 if target == "fp32" else torch.bfloat16
    size = 4 if target == "fp32" else 2
    shards = _shard(list(hf_tensors(model)), size, limit)
    where, names = {}, []
    for index, tensors in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        content = {}
        for tensor in tensors:
            piece = tensor.piece(kind, "fp32" if stored == "fp32" else "bf16")
            flat = torch.empty(piece.numel, dtype=stored_dtype)
            reader.read_into(piece, flat)
            content[tensor.name] = flat.to(target_dtype).view(tensor.shape)
            where[tensor.name] = name
        save_file(content, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # the library makes it private
        _sync(folder / name)
        names.append(name)
    if len(shards) > 1:
        total = sum(int(np.prod(t.shape)) * size for tensors in shards for t in tensors)
        names.append(_write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where}))
    return names


def _shard(tensors: Sequence[HfTensor], size: int, limit: int) -> list[list[HfTensor]]:
    """Consecutive runs of at most `limit` bytes (a single larger tensor is a run of its own)."""
    shards: list[list[HfTensor]] = [[]]
    used = 0
    for tensor in tensors:
        nbytes = int(np.prod(tensor.shape)) * size
        if shards[-1] and used + nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += nbytes
    return shards


def _write_tokenizer(folder: Path, tokenizer: Path | None, config: dict[str, Any]) -> list[str]:
    """Copy the tokenizer's files; a bare tokenizer.json gets the small configuration that transformers wants."""
    if tokenizer is None:
        return []
    found = [tokenizer / name for name in _TOKENIZER_FILES] if tokenizer.is_dir() else [tokenizer]
    found = [path for path in found if path.is_file()]
    if not any(path.name == "tokenizer.json" or path == tokenizer for path in found):
        raise UserError(f"{tokenizer} has no tokenizer.json; give its path or leave --tokenizer out")
    names = []
    for path in found:
        name = "tokenizer.json" if path == tokenizer else path.name
        shutil.copyfile(path, folder / name)
        names.append(name)
    if "tokenizer_config.json" not in names:
        special = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens", [])
        end = next((t for t in special if "end" in t["content"] or t["content"] in ("</s>", "<eos>")), None)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if end is not None:
            settings["eos_token"] = end["content"]
            config["eos_token_id"] = end["id"]
        names.append(_write_json(folder / "tokenizer_config.json", settings))
    return names


def _map_folder(source: Path) -> dict[str, tuple[np.ndarray[Any, Any], str, tuple[int, ...]]]:
    """Name -> (bytes mapped from the file, safetensors dtype, shape) of every tensor of a Hugging Face folder."""
    index = source / INDEX
    if index.is_file():
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    mapped: dict[str, tuple[np.ndarray[Any, Any], str, tuple[int, ...]]] = {}
    for file in files:
        path = source / file
        if Path(file).name != file or not path.is_file():
            raise UserError(f"{path} is missing; import needs safetensors files, not pickles")
        mapped.update(_map_file(path))
    return mapped


def _map_file(path: Path) -> Iterator[tuple[str, tuple[np.ndarray[Any, Any], str, tuple[int, ...]]]]:
    try:
        data = np.memmap(path, np.uint8, "r")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + at for at in entry["data_offsets"])
            if end > data.size:
                raise ValueError(f"{name} ends after the file")
            yield name, (data[begin:end], entry["dtype"], tuple(entry["shape"]))
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise UserError(f"{path} is not a whole safetensors file: {error}") from error


def _take(
    mapped: Mapping[str, tuple[np.ndarray[Any, Any], str, tuple[int, ...]]], tensor: HfTensor, source: Path
) -> tuple[np.ndarray[Any, Any], Literal["fp32", "bf16"]]:
    if tensor.name not in mapped:
        raise UserError(f"{source} has no tensor {tensor.name}, which config.json calls for")
    array, dtype, shape = mapped[tensor.name]
    if shape != tensor.shape:
        raise UserError(f"{tensor.name} has shape {shape} in {source}; config.json calls for {tensor.shape}")
    if dtype not in _DTYPES:
        raise UserError(f"{tensor.name} is {dtype} in {source}; convert the model to F32 or BF16")
    return array, _DTYPES[dtype]


def _model_of(config: Mapping[str, Any], checkpoint: Path) -> ModelConfig:
    with contextlib.suppress(KeyError, ValueError):
        return ModelConfig.model_validate(config["model"])
    raise UserError(f"the manifest of {checkpoint} holds no model configuration; only checkpoints of runs are exported")


def _write_json(path: Path, data: Mapping[str, Any]) -> str:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _sync(path)
    return path.name


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
