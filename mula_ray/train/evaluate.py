"""Perplexity and multiple choice of a checkpoint, on local data, shared out over processes.

    sequences = windows_of(TokenSet.open(folder, "held_out"), context)          # or load_examples(path, …).sequences
    nlls = score_checkpoint(folder, sequences, ranks=2)
    perplexity = math.exp(nlls.sum() / sum(s.targets for s in sequences))

Everything is a list of `Sequence`s to be scored: the summed negative log-likelihood of its tokens from `first` on. They
are packed into batches before they are shared out, so the result has the same bits for any number of processes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
from collections.abc import Sequence as Many
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from tokenizers import Tokenizer
from torch import nn

from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig
from mula_ray.data.shards import TokenSet
from mula_ray.data.tokenizer import eos_of
from mula_ray.model.transformer import Transformer
from mula_ray.plan.pieces import Kind, Piece

Dtype = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Sequence:
    """Tokens, of which those from `first` on are scored."""

    tokens: tuple[int, ...]
    first: int = 1

    @property
    def targets(self) -> int:
        """How many tokens are scored."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Choice:
    """A multiple-choice question: which of the scored sequences are its answers, and which one is right."""

    sequences: tuple[int, ...]
    bytes: tuple[int, ...]
    """Length of every answer's text."""
    answer: int


@dataclass
class Examples:
    """What a JSONL file holds."""

    sequences: list[Sequence] = field(default_factory=list)
    text: list[int] = field(default_factory=list)
    """Sequences that are running text."""
    text_bytes: int = 0
    choices: list[Choice] = field(default_factory=list)
    cut: int = 0
    """Questions that were cut on the left to fit the context."""


def windows_of(tokens: TokenSet, context: int, most: int = 0) -> list[Sequence]:
    """The first `most` (0: all) windows of a split, each token scored once.

    Raises:
        UserError: not one whole window.
    """
    count = tokens.count(context)
    if not count:
        raise UserError(
            f"the {tokens.split} split of {tokens.folder} has {tokens.tokens} tokens; a context of {context} needs "
            f"{context + 1}; choose another --split or a smaller --context"
        )
    rows = tokens.windows(np.arange(min(count, most or count)), context)
    return [Sequence(tuple(row.tolist())) for row in rows]


def load_examples(path: Path, tokenizer: Tokenizer, context: int) -> Examples:
    """Rows of a JSONL file: `{"text": …}` for perplexity, `{"question": …, "choices": […], "answer": n}` for accuracy.

    `answer` is the index of the right choice, from 0, or its letter. Running text starts and ends with the end-of-text
    token and is scored in windows of `context` tokens; a question that is too long loses its beginning.

    Raises:
        UserError: a row that is neither, with its line.
    """
    found, eos = Examples(), eos_of(tokenizer)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {path} cannot be read as JSON lines in UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _add_row(found, json.loads(line), tokenizer, eos, context)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(
                f'{path} line {number}: {error}; a row must be {{"text": "…"}} or '
                '{"question": "…", "choices": ["…", …], "answer": 0}'
            ) from error
    if not found.sequences:
        raise UserError(f"--data {path} has no rows; give at least one")
    return found


def _add_row(found: Examples, row: dict[str, Any], tokenizer: Tokenizer, eos: int | None, context: int) -> None:
    ends = [] if eos is None else [eos]
    if "choices" not in row:
        text = row["text"]
        ids = [*ends, *tokenizer.encode(text, add_special_tokens=False).ids, *ends]
        for begin in range(0, len(ids) - 1, context):
            found.text.append(len(found.sequences))
            found.sequences.append(Sequence(tuple(ids[begin : begin + context + 1])))
        found.text_bytes += len(text.encode())
        return
    question, choices, answer = row["question"], list(row["choices"]), row["answer"]
    right = ord(answer.upper()) - ord("A") if isinstance(answer, str) else int(answer)
    if not 0 <= right < len(choices):
        raise ValueError(f"answer {answer!r} is none of the {len(choices)} choices")
    prompt = [*ends, *tokenizer.encode(question, add_special_tokens=False).ids]
    cut = False
    mine = []
    for choice in choices:
        text = choice if choice[:1].isspace() else f" {choice}"
        ids = [*ends, *tokenizer.encode(question + text, add_special_tokens=False).ids]
        first = max(1, min(len(prompt), len(ids) - 1))
        over = max(0, len(ids) - context - 1)
        if over >= first:
            raise ValueError(f"choice {choice[:40]!r} alone is longer than the context of {context} tokens")
        cut = cut or over > 0
        mine.append(len(found.sequences))
        found.sequences.append(Sequence(tuple(ids[over:]), max(1, first - over)))
    found.cut += cut
    found.choices.append(Choice(tuple(mine), tuple(len(choice.encode()) for choice in choices), right))


def perplexity(nlls: NDArray[np.float64], sequences: Many[Sequence], text_bytes: int = 0) -> dict[str, float]:
    """Loss in nats a token, its exponential, and bits a byte of text where that is known."""
    tokens, total = sum(sequence.targets for sequence in sequences), float(nlls.sum())
    result = {"loss": total / tokens, "perplexity": math.exp(min(700.0, total / tokens)), "tokens": tokens}
    if text_bytes:
        result["bits_per_byte"] = total / math.log(2) / text_bytes
    return result


def accuracy(nlls: NDArray[np.float64], choices: Many[Choice]) -> dict[str, float]:
    """Part of the questions whose right answer is the likeliest: by its sum, and by its sum for each byte of it."""
    plain = sum(int(np.argmin(nlls[list(c.sequences)])) == c.answer for c in choices)
    each = [nlls[list(c.sequences)] / np.maximum(1, np.array(c.bytes)) for c in choices]
    normed = sum(int(np.argmin(scores)) == c.answer for scores, c in zip(each, choices, strict=True))
    return {"accuracy": plain / len(choices), "accuracy_per_byte": normed / len(choices), "questions": len(choices)}


def make_batches(sequences: Many[Sequence]) -> list[list[int]]:
    """Sequences of like length together, about `_BATCH_TOKENS` tokens with padding."""
    batches: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=lambda at: (-len(sequences[at].tokens), at)):
        longest = len(sequences[batches[-1][0]].tokens) if batches else 0
        if not batches or longest * (len(batches[-1]) + 1) > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(index)
    return batches


def model_config_of(reader: CheckpointReader) -> ModelConfig:
    """The model of a checkpoint.

    Raises:
        UserError: its configuration is not one of ours.
    """
    try:
        return ModelConfig.model_validate(reader.manifest.facts.config["model"])
    except (KeyError, ValidationError) as error:
        raise UserError(f"{reader.path} does not say what model it is: {error}") from error


def load_model(reader: CheckpointReader, dtype: Dtype, device: torch.device | str = "cpu") -> Transformer:
    """The whole model of a checkpoint, whatever layout wrote it; masters where it has them.

    Raises:
        DamagedCheckpoint: missing or damaged tensors.
    """
    config = model_config_of(reader)
    reader.expect(config)
    kind: Kind = "master" if reader.manifest.kind == "full" else "weight"
    model = Transformer(config, device=torch.device("meta"), dtype=_DTYPES[dtype])
    for name, meta in list(model.named_parameters()):
        shape = tuple(meta.shape)
        flat = torch.empty(meta.numel(), dtype=_DTYPES[dtype])
        reader.read_into(Piece(name, kind, dtype, shape, (0,) * len(shape), shape, 0, meta.numel()), flat)
        _set(model, name, nn.Parameter(flat.view(shape).to(device), requires_grad=False))
    return model.eval()


def _set(model: nn.Module, name: str, value: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, value)


@torch.no_grad()
def score_batch(model: Transformer, batch: Many[Sequence]) -> NDArray[np.float64]:
    """(n,) summed negative log-likelihood, nats, of the scored tokens of each sequence."""
    device = next(model.parameters()).device
    width = max(len(sequence.tokens) for sequence in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.int64)
    scored = torch.zeros(len(batch), width - 1)
    for row, sequence in enumerate(batch):
        tokens[row, : len(sequence.tokens)] = torch.tensor(sequence.tokens)
        scored[row, sequence.first - 1 : len(sequence.tokens) - 1] = 1.0
    tokens, scored = tokens.to(device), scored.to(device)
    logits = model.logits(model(tokens[:, :-1])).float()
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return np.asarray((nll.view_as(scored).double() * scored).sum(dim=1).cpu(), dtype=np.float64)


def score_checkpoint(
    checkpoint: Path, sequences: Many[Sequence], *, ranks: int = 1, dtype: Dtype = "fp32", device: str = "cpu"
) -> NDArray[np.float64]:
    """(n,) summed negative log-likelihood of each sequence; the batches are shared out over `ranks` processes.

    Raises:
        UserError: a token outside the model's vocabulary. DamagedCheckpoint: as reading.
    """
    with CheckpointReader(checkpoint) as reader:
        vocab = model_config_of(reader).vocab_size
    highest = max(max(sequence.tokens) for sequence in sequences)
    if highest >= vocab:
        raise UserError(
            f"the data have token id {highest}, the model of {checkpoint} has {vocab} ids; "
            "use data of the tokenizer that the model was trained with"
        )
    batches = make_batches(sequences)
    shares = [[[sequences[at] for at in batch] for batch in batches[rank::ranks]] for rank in range(ranks)]
    if ranks == 1:
        results = [_score_share(checkpoint, shares[0], dtype, device)]
    else:
        with ProcessPoolExecutor(ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
            jobs = [pool.submit(_score_share, checkpoint, share, dtype, device) for share in shares]
            results = [job.result() for job in jobs]
    out = np.empty(len(sequences))
    for rank, result in enumerate(results):
        for batch, values in zip(batches[rank::ranks], result, strict=True):
            out[batch] = values
    return out


def _score_share(checkpoint: Path, share: list[list[Sequence]], dtype: Dtype, device: str) -> list[NDArray[np.float64]]:
    torch.set_num_threads(1)
    with CheckpointReader(checkpoint) as reader:
        model = load_model(reader, dtype, device)
    return [score_batch(model, batch) for batch in share]
