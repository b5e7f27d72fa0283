"""`mula-ray eval`: the numbers of a plain forward pass, the same bits for any number of ranks, and clear refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import make_set, make_tokenizer, texts, write_jsonl

from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.config.errors import NoCheckpoint, UserError
from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.data.shards import TokenSet
from mula_ray.data.tokenizer import load_tokenizer
from mula_ray.model.transformer import Transformer
from mula_ray.plan.format import FULL_KINDS, Facts
from mula_ray.plan.layout import param_specs
from mula_ray.plan.pieces import Piece
from mula_ray.train.evaluate import load_examples, make_batches, score_checkpoint, windows_of

MODEL = ModelConfig(
    vocab_size=320, hidden=32, layers=2, heads=4, moe=MoEConfig(experts=4, top_k=2, expert_width=24, backend="classic")
)
CONTEXT = 32


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Path]:
    """A model with random weights and a run folder with its checkpoint."""
    run = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    module = Transformer(MODEL)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    items = [
        (Piece(s.name, k, "fp32", s.shape, (0,) * len(s.shape), s.shape, 0, s.numel), module.get_parameter(s.name))
        for s in param_specs(MODEL)
        for k in FULL_KINDS
    ]
    manager = CheckpointManager(run / "checkpoints", "run")
    manager.acquire(renew=False)
    config = {"model": MODEL.model_dump(mode="json"), "data": {"context": CONTEXT}}
    facts = Facts(step=5, cursor=40, tokens=4000, generation=manager.generation, run_id="run", config=config)
    manager.save(facts, items, "full")
    manager.close()
    return module, run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 ids."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@torch.no_grad()
def plain_nll(module: Transformer, ids: list[int], first: int) -> float:
    """Negative log-likelihood of ids[first:], one sequence at a time."""
    tokens = torch.tensor([ids])
    logp = module.logits(module(tokens[:, :-1])).double().log_softmax(-1)
    return -float(logp[0].gather(1, tokens[0, 1:, None])[first - 1 :].sum())


def test_scores_are_those_of_a_plain_pass(saved: tuple[Transformer, Path], tmp_path: Path) -> None:
    module, run = saved
    held = TokenSet.open(make_set(tmp_path / "set", [[100]], vocab=320), "held_out")
    windows = windows_of(held, CONTEXT)
    assert sum(window.targets for window in windows) == len(windows) * CONTEXT
    folder = run / "checkpoints" / "full-a"
    alone = score_checkpoint(folder, windows)
    expected = [plain_nll(module, list(window.tokens), 1) for window in windows]
    assert alone == pytest.approx(expected, rel=1e-5)
    assert np.array_equal(score_checkpoint(folder, windows, ranks=2), alone), "the same bits for any number of ranks"
    order = [at for batch in make_batches(windows) for at in batch]
    assert sorted(order) == list(range(len(windows)))


def test_texts_and_questions(saved: tuple[Transformer, Path], tokenizer: Path, tmp_path: Path) -> None:
    module, run = saved
    loaded = load_tokenizer(tokenizer)
    rows = [{"text": text} for text in texts(3, 4)]
    questions = [("alpha beta", ["gamma", "delta müü", "x"], 1), ("def", ["import", "class"], "A")]
    path = write_jsonl(
        tmp_path / "in.jsonl", rows + [{"question": q, "choices": c, "answer": a} for q, c, a in questions]
    )
    found = load_examples(path, loaded, CONTEXT)
    nlls = score_checkpoint(run / "checkpoints" / "full-a", found.sequences)
    tokens = sum(len(loaded.encode(row["text"]).ids) + 1 for row in rows)
    assert sum(found.sequences[at].targets for at in found.text) == tokens, "every token and the end, once"
    for (question, choices, answer), choice in zip(questions, found.choices, strict=True):
        prompt = [0, *loaded.encode(question).ids]
        for text, at in zip(choices, choice.sequences, strict=True):
            whole = [0, *loaded.encode(f"{question} {text}").ids]
            assert nlls[at] == pytest.approx(plain_nll(module, whole, len(prompt)), rel=1e-5)
        assert choice.answer == (answer if isinstance(answer, int) else 0)


def run_cli(*words: object) -> str:
    """Run the verb, as `main` does, and return what it prints."""
    import typer
    from typer.testing import CliRunner

    from mula_ray.cli.eval import evaluate

    app = typer.Typer()
    app.command()(evaluate)
    result = CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_command_line(saved: tuple[Transformer, Path], tokenizer: Path, tmp_path: Path) -> None:
    run = saved[1]
    folder = make_set(tmp_path / "set", [[100]], vocab=320)
    said = json.loads(run_cli(run, "--data", folder, "--samples", 5, "--json"))
    assert said["tokens"] == 5 * CONTEXT
    assert said["perplexity"] == pytest.approx(math.exp(said["loss"]))
    assert said["step"] == 5
    rows = [{"text": "alpha beta"}, {"question": "a", "choices": ["b", "c"], "answer": 1}]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    said = json.loads(run_cli(run, "--data", path, "--tokenizer", tokenizer, "--json"))
    assert said["questions"] == 1
    assert said["bits_per_byte"] > 0
    assert "perplexity" in run_cli(run, "--data", path, "--tokenizer", tokenizer)
    with pytest.raises(UserError, match="--tokenizer"):
        run_cli(run, "--data", path)
    with pytest.raises(UserError, match="does not exist"):
        run_cli(run, "--data", tmp_path / "nowhere")
    with pytest.raises(NoCheckpoint, match="no valid checkpoint"):
        run_cli(tmp_path, "--data", path)
    other = make_set(tmp_path / "large", [[100]], vocab=4000)
    with pytest.raises(UserError, match="320 ids"):
        run_cli(run, "--data", other)
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"text": "a"}, {"question": "a", "choices": ["b"], "answer": 3}])
    with pytest.raises(UserError, match="line 2: answer 3"):
        run_cli(run, "--data", bad, "--tokenizer", tokenizer)
