"""What a prepared data folder says about itself: `manifest.json`, written last, so that its presence means complete.

folder/manifest.json       this file's types, as JSON
folder/tokenizer.json      the tokenizer, when one is known
folder/train-00000.arrow   shards (see `shards.py`), and held_out-00000.arrow
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mula_ray.config.errors import UserError

FORMAT = "mula-tokens"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class ShardEntry:
    """One shard file."""

    file: str
    tokens: int
    documents: int
    bytes: int
    """Size of the file: a cheap test for truncation."""
    max_id: int
    """Largest token id, -1 when there is none."""
    sha256: str
    """Of the content (token ids, then document lengths), not of the file's framing."""


@dataclass(frozen=True)
class DataManifest:
    """The facts of a data folder."""

    vocab_size: int
    eos_id: int | None
    dtype: Literal["uint16", "uint32"]
    tokenizer_sha256: str | None
    splits: dict[Split, tuple[ShardEntry, ...]]
    report: dict[str, Any] = field(default_factory=dict)
    """What preparation counted: documents, cuts, skipped input. For people; nothing depends on it."""

    def tokens(self, split: Split) -> int:
        """Tokens of a split."""
        return sum(entry.tokens for entry in self.splits[split])

    def documents(self, split: Split) -> int:
        """Documents of a split."""
        return sum(entry.documents for entry in self.splits[split])

    def content_hash(self, split: Split) -> str:
        """Hash of a split's content: of what is in the shards, in order, and never of where they lie."""
        digest = hashlib.sha256(f"{FORMAT}/{VERSION}/{self.vocab_size}".encode())
        for entry in self.splits[split]:
            digest.update(entry.sha256.encode())
        return digest.hexdigest()


def write_manifest(folder: Path, manifest: DataManifest) -> None:
    """Commit a data folder: temporary name, fsync, rename."""
    body = {"format": FORMAT, "version": VERSION, "content_hash": {s: manifest.content_hash(s) for s in SPLITS}}
    text = json.dumps(body | asdict(manifest), indent=1, sort_keys=True)
    write_atomic(folder / MANIFEST, (text + "\n").encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a small file so that a reader sees the whole of it or nothing, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_manifest(folder: Path) -> DataManifest:
    """The manifest of `folder`.

    Raises:
        UserError: there is none, or it is not one of ours.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(
            f"data.path {folder} is not a folder; prepare one with `mula-ray data prepare SOURCE --out {folder}`"
        )
    if not path.exists():
        raise UserError(
            f"{folder} has no {MANIFEST}: it is not a prepared data folder, or its preparation has not finished; "
            f"run `mula-ray data prepare … --out {folder}` (again: finished work is kept)"
        )
    try:
        return _parse(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as format {FORMAT} version {VERSION}: {error}; prepare the data again"
        ) from error


def _parse(raw: dict[str, Any]) -> DataManifest:
    if raw["format"] != FORMAT or raw["version"] != VERSION:
        raise ValueError(f"it is {raw['format']} version {raw['version']}")
    manifest = DataManifest(
        vocab_size=int(raw["vocab_size"]),
        eos_id=raw["eos_id"],
        dtype=raw["dtype"],
        tokenizer_sha256=raw["tokenizer_sha256"],
        splits={split: tuple(ShardEntry(**entry) for entry in raw["splits"][split]) for split in SPLITS},
        report=raw["report"],
    )
    for split in SPLITS:
        if raw["content_hash"][split] != manifest.content_hash(split):
            raise ValueError(f"the content hash of {split} does not match its shards' hashes (edited by hand?)")
    return manifest
