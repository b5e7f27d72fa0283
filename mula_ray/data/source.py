"""The data of a run: resolved, held against the configuration, and described in a few numbers that travel.

The launcher calls `open_run_data` once; the frozen `RunData` goes to agents and ranks, which open the same folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mula_ray.config.errors import UserError
from mula_ray.config.run import RunConfig
from mula_ray.data.corpus import STDLIB, ensure_stdlib
from mula_ray.data.manifest import Split
from mula_ray.data.shards import TokenSet
from mula_ray.plan.order import SampleOrder


@dataclass(frozen=True)
class RunData:
    """What every process of a run must know to read the same samples."""

    path: str
    context: int
    vocab_size: int
    content_hash: str
    """Of the training split; stored in checkpoints, refused on resume if it differs."""
    train_count: int
    """Samples an epoch."""
    held_out_count: int
    seed: int

    @property
    def order(self) -> SampleOrder:
        """The order of the training samples."""
        return SampleOrder.of(self.content_hash, self.seed, self.train_count)

    def open(self, split: Split = "train") -> TokenSet:
        """Open the folder here."""
        return TokenSet.open(self.path, split)


def resolve_path(path: str, cache_dir: Path | None = None) -> Path:
    """Folder of `data.path`; the name `stdlib` stands for the default corpus, prepared on first use."""
    return ensure_stdlib(cache_dir) if path == STDLIB else Path(path).expanduser().resolve()


def open_run_data(config: RunConfig, cache_dir: Path | None = None) -> RunData:
    """Everything that can be wrong with the data of a run is found here, before anything starts.

    Raises:
        UserError: no prepared folder, missing or truncated shards, an id outside the vocabulary, a vocabulary larger
            than the model's, too few tokens for one sample, no held-out sample although an evaluation is asked for.
    """
    folder = resolve_path(config.data.path, cache_dir)
    train, held = TokenSet.open(folder, "train"), TokenSet.open(folder, "held_out")
    if train.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the data in {folder} have a vocabulary of {train.vocab_size} ids, but model.vocab_size is "
            f"{config.model.vocab_size}; set model.vocab_size to at least {train.vocab_size}, "
            "or prepare the data with another tokenizer"
        )
    train.check()
    held.check()
    context = config.data.context
    if train.count(context) < 1:
        raise UserError(
            f"the training split in {folder} has {train.tokens} tokens; one sample of data.context {context} "
            f"needs {context + 1}; prepare more text or lower data.context"
        )
    if config.train.eval_samples and held.count(context) < 1:
        raise UserError(
            f"the held-out split in {folder} has {held.tokens} tokens; one sample of data.context {context} "
            f"needs {context + 1}; prepare with a larger --held-out, lower data.context, or set train.eval_samples to 0"
        )
    return RunData(
        path=str(folder),
        context=context,
        vocab_size=train.vocab_size,
        content_hash=train.content_hash,
        train_count=train.count(context),
        held_out_count=held.count(context),
        seed=config.train.seed,
    )
