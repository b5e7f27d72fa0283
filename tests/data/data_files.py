"""Input files and small data sets for the tests of this room."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mula_ray.data.inputs import InputRules, Source
from mula_ray.data.job import PrepareSettings, plan_job
from mula_ray.data.manifest import DataManifest, ShardEntry, write_manifest
from mula_ray.data.prepare import run_here, run_job
from mula_ray.data.shards import TokenSet, token_dtype, write_shard
from mula_ray.data.tokenizer import tokenizer_text, train_bpe

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "müü", "ξ", "日本", "def", "import", "class"]


def text(rng: random.Random, words: int) -> str:
    """Lines of made-up words."""
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", "\n", ".\n"]) for _ in range(words))


def texts(seed: int, number: int, longest: int = 120) -> list[str]:
    """Documents of mixed length."""
    rng = random.Random(seed)
    return [text(rng, rng.randint(3, longest)) for _ in range(number)]


def make_tokenizer(path: Path, vocab: int = 300, seed: int = 0) -> Path:
    """A small byte-level BPE in a file."""
    path.write_text(tokenizer_text(train_bpe(texts(seed, 60), vocab)))
    return path


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Rows as JSON lines, gzipped or zstd-packed if the name says so."""
    raw = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(raw, mtime=0))
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(raw)
    else:
        path.write_bytes(raw)
    return path


def write_parquet(path: Path, columns: dict[str, list[Any]], rows_per_group: int = 7) -> Path:
    """A Parquet file of several row groups."""
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


def prepare(out: Path, *sources: Path | str | Source, rules: dict[str, Any] | None = None, **more: Any) -> DataManifest:
    """`data prepare` in this process."""
    specs = tuple(source if isinstance(source, Source) else Source(str(source)) for source in sources)
    settings = PrepareSettings(sources=specs, rules=InputRules(**(rules or {})), **more)
    with plan_job(out, settings) as job:
        return run_job(job, run_here)


def documents(folder: Path, split: str = "train") -> list[list[int]]:
    """Token ids of every document, in stored order."""
    found = []
    for _, shard in TokenSet.open(folder, split).shards():  # type: ignore[arg-type]
        for begin, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            found.append(shard.values[begin:end].tolist())
    return found


def shard_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a data folder but the note of the input's times."""
    names = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "prepared.json")
    return {path.name: path.read_bytes() for path in names}


def make_set(folder: Path, lengths: list[list[int]], vocab: int = 1000, held: int = 400) -> Path:
    """A data folder of random tokens: `lengths` are the document lengths of every training shard."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(lengths))
    dtype = token_dtype(vocab)

    def one(name: str, of: list[int]) -> ShardEntry:
        return write_shard(folder / name, rng.integers(0, vocab, sum(of)).astype(dtype), np.array(of, dtype=np.int64))

    train = tuple(one(f"train-{number:05d}.arrow", of) for number, of in enumerate(lengths))
    splits: Any = {"train": train, "held_out": (one("held_out-00000.arrow", [held]),)}
    write_manifest(folder, DataManifest(vocab, None, dtype.name, None, splits))  # type: ignore[arg-type]
    return folder
