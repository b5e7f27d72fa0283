"""Looking at a data folder (counts, lengths, a decoded sample), and checking every byte and id of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mula_ray.config.errors import UserError
from mula_ray.data.manifest import SPLITS, TOKENIZER, Split, read_manifest
from mula_ray.data.shards import TokenSet, open_shard, shard_digest
from mula_ray.data.tokenizer import load_tokenizer, tokenizer_digest, vocab_size_of

_PERCENTILES = (1, 10, 50, 90, 99)
_SLICE = 1 << 24


@dataclass(frozen=True)
class SplitFacts:
    """What a split holds."""

    split: Split
    tokens: int
    documents: int
    shards: int
    content_hash: str
    longest: int
    percentiles: dict[int, int]
    """Document length in tokens at percentiles."""
    histogram: list[tuple[int, int]]
    """(length up to, documents): powers of two."""
    sample_ids: list[int]
    sample_text: str | None


def inspect_folder(folder: Path, sample_tokens: int = 120, sample: int = 0) -> list[SplitFacts]:
    """Facts of every split; a few tokens of document number `sample`, decoded where the tokenizer is known.

    Raises:
        UserError: no data folder there, or a damaged shard.
    """
    tokenizer = load_tokenizer(folder / TOKENIZER) if (folder / TOKENIZER).exists() else None
    facts = []
    for split in SPLITS:
        tokens = TokenSet.open(folder, split)
        lengths = np.concatenate([np.empty(0, np.int64), *(shard.lengths for _, shard in tokens.shards())])
        ids = _document(tokens, sample, sample_tokens)
        facts.append(
            SplitFacts(
                split=split,
                tokens=tokens.tokens,
                documents=lengths.size,
                shards=len(tokens.manifest.splits[split]),
                content_hash=tokens.content_hash,
                longest=int(lengths.max(initial=0)),
                percentiles=_percentiles(lengths),
                histogram=_histogram(lengths),
                sample_ids=ids,
                sample_text=tokenizer.decode(ids, skip_special_tokens=False) if tokenizer is not None else None,
            )
        )
    return facts


def _document(tokens: TokenSet, number: int, most: int) -> list[int]:
    for entry, shard in tokens.shards():
        if number < entry.documents:
            begin, end = int(shard.offsets[number]), int(shard.offsets[number + 1])
            return [int(value) for value in shard.values[begin : min(end, begin + most)]]
        number -= entry.documents
    return []


def _percentiles(lengths: NDArray[np.int64]) -> dict[int, int]:
    if not lengths.size:
        return {}
    return dict(zip(_PERCENTILES, (int(v) for v in np.percentile(lengths, _PERCENTILES)), strict=True))


def _histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    if not lengths.size:
        return []
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(powers)
    first = int(np.flatnonzero(counts)[0])
    return [(1 << power, int(counts[power])) for power in range(first, len(counts))]


@dataclass(frozen=True)
class Checked:
    """One thing that `verify` looked at."""

    what: str
    problem: str
    """Empty if it is as it should be."""
    tokens: int = 0


def verify_folder(folder: Path) -> Iterator[Checked]:
    """Check the manifest, every checksum, every id against the vocabulary, every boundary, and the tokenizer.

    Raises:
        UserError: no data folder there.
    """
    manifest = read_manifest(folder)
    for split in SPLITS:
        for entry in manifest.splits[split]:
            problem = ""
            try:
                shard = open_shard(folder, entry)
                problem = _problem(shard.values, shard.lengths, entry.sha256, manifest.vocab_size)
            except UserError as error:
                problem = str(error)
            yield Checked(entry.file, problem, entry.tokens)
    if manifest.tokenizer_sha256 is not None:
        yield Checked(TOKENIZER, _tokenizer_problem(folder, manifest.tokenizer_sha256, manifest.vocab_size))


def _problem(values: NDArray[Any], lengths: NDArray[np.int64], sha256: str, vocab_size: int) -> str:
    if lengths.size and int(lengths.min()) < 1:
        return "a document has no tokens, or boundaries run backwards"
    for begin in range(0, values.size, _SLICE):
        highest = int(values[begin : begin + _SLICE].max())
        if highest >= vocab_size:
            return f"token id {highest} is outside the vocabulary of {vocab_size}"
    if shard_digest(values, lengths) != sha256:
        return "the checksum differs from the manifest: the content was changed or damaged"
    return ""


def _tokenizer_problem(folder: Path, sha256: str, vocab_size: int) -> str:
    path = folder / TOKENIZER
    if not path.exists():
        return ""  # tokens whose tokenizer is known by its hash only
    try:
        tokenizer = load_tokenizer(path)
    except UserError as error:
        return str(error)
    if tokenizer_digest(tokenizer) != sha256:
        return "is not the tokenizer that made the tokens"
    if vocab_size_of(tokenizer) != vocab_size:
        return f"has {vocab_size_of(tokenizer)} ids, the manifest says {vocab_size}"
    return ""
