"""Byte-level BPE: training, loading, and encoding in bounded memory."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mula_ray.config.errors import UserError

EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<eos>", "<|end_of_document|>")
PIECE_CHARS = 1 << 18
"""A longer text is encoded piece by piece: an encoding takes over a hundred bytes a token while it lives."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` ids, id 0 being the end of a text.

    Raises:
        UserError: the texts are too few for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"training the tokenizer gave {tokenizer.get_vocab_size()} ids instead of {vocab_size}: "
            "the input has too little text, or none; ask for a smaller vocabulary (at least 257) or give more text"
        )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from its `tokenizer.json`.

    Raises:
        UserError: the file is missing or not a tokenizer.
    """
    if not path.is_file():
        raise UserError(f"tokenizer {path} does not exist; give the path of a tokenizer.json")
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"tokenizer {path} cannot be read: {error}; it must be a tokenizer.json of the tokenizers library"
        ) from error


def tokenizer_text(tokenizer: Tokenizer) -> str:
    """The JSON that is stored beside the shards."""
    return str(tokenizer.to_str(pretty=False))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """sha256 of the stored JSON: two tokenizers are the same if this is."""
    return hashlib.sha256(tokenizer_text(tokenizer).encode()).hexdigest()


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """One more than the largest id (a vocabulary may have holes)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def eos_of(tokenizer: Tokenizer) -> int | None:
    """Id of the end-of-text token, if it has one under a usual name."""
    ids = (tokenizer.token_to_id(name) for name in _EOS_NAMES)
    return next((int(found) for found in ids if found is not None), None)


def pieces(text: str, limit: int = PIECE_CHARS) -> Iterator[str]:
    """Cut a text into pieces of at most `limit` characters, at line ends, else at blanks, else anywhere.

    With byte-level BPE a cut after a line end that a word follows changes no token.
    """
    begin = 0
    while len(text) - begin > limit:
        end = _cut(text, begin, begin + limit)
        yield text[begin:end]
        begin = end
    yield text[begin:] if begin else text


def _cut(text: str, begin: int, end: int) -> int:
    floor = begin + (end - begin) // 2
    at = text.rfind("\n", floor, end - 1)
    while at >= 0 and text[at + 1].isspace():
        at = text.rfind("\n", floor, at)
    if at >= 0:
        return at + 1
    at = text.rfind(" ", floor, end)
    return at if at > floor else end


class Encoder:
    """Texts to token ids, a bounded amount of text at a time."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any], *, batch_chars: int = 4 * PIECE_CHARS) -> None:
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._batch_chars = batch_chars

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """(tokens,) ids of each text, without special tokens."""
        out: list[list[NDArray[Any]]] = [[] for _ in texts]
        batch: list[str] = []
        owners: list[int] = []
        size = 0
        for owner, text in enumerate(texts):
            for piece in pieces(text):
                if batch and size + len(piece) > self._batch_chars:
                    self._flush(batch, owners, out)
                    size = 0
                batch.append(piece)
                owners.append(owner)
                size += len(piece)
        self._flush(batch, owners, out)
        return [parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._dtype), *parts]) for parts in out]

    def _flush(self, batch: list[str], owners: list[int], out: list[list[NDArray[Any]]]) -> None:
        encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for owner, encoding in zip(owners, encodings, strict=True):
            out[owner].append(np.array(array("I", encoding.ids), dtype=self._dtype))  # twice as fast as from a list
        batch.clear()
        owners.clear()
