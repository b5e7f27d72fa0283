"""Export loads in transformers with our logits; import(export) gives the same bits; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from states import MOE, facts

from mula_ray.checkpoint.hf import export_hf, hf_tensors, import_hf
from mula_ray.checkpoint.manager import CheckpointManager
from mula_ray.checkpoint.reader import CheckpointReader
from mula_ray.config.errors import UserError
from mula_ray.config.model import ModelConfig, MoEConfig
from mula_ray.model.transformer import Transformer
from mula_ray.plan.format import FULL_KINDS
from mula_ray.plan.layout import param_specs
from mula_ray.plan.pieces import Piece

MODELS = {
    "olmoe": ModelConfig(
        vocab_size=96, hidden=32, layers=2, heads=4, moe=MoEConfig(experts=4, top_k=2, expert_width=24)
    ),
    "olmo": ModelConfig(vocab_size=96, hidden=32, layers=2, heads=4, ffn=48, norm="layernorm", qk_norm=False),
}


def saved(root: Path, model: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Path]:
    """A model with random weights and its checkpoint: full in fp32, model-only in bf16."""
    torch.manual_seed(0)
    module = Transformer(model).to(dtype)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    kinds = FULL_KINDS if dtype == torch.float32 else ("weight",)
    stored = "fp32" if dtype == torch.float32 else "bf16"
    items = [
        (Piece(s.name, k, stored, s.shape, (0,) * len(s.shape), s.shape, 0, s.numel),
         module.get_parameter(s.name))
        for s in param_specs(model) for k in kinds
    ]  # fmt: skip
    manager = CheckpointManager(root / "checkpoints", "run")
    manager.acquire(renew=False)
    config = {"model": model.model_dump(mode="json"), "data": {"context": 64}}
    manager.save(facts(5, manager.generation, config=config), items, "full" if len(kinds) == 3 else "model")
    manager.close()
    return module, root / "checkpoints" / ("full-a" if len(kinds) == 3 else "model-5")


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_gives_our_logits(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    module, checkpoint = saved(tmp_path, MODELS[kind])
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(bpe())
    names = export_hf(checkpoint, tmp_path / "hf", tokenizer=tokenizer, shard_bytes=30_000)
    assert sum(name.startswith("model-0") for name in names) > 1
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(theirs).__name__.lower() == f"{kind}forcausallm"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(40).view(2, 20) * 7 % 96
    with torch.no_grad():
        ours = torch.nn.functional.linear(module(tokens), module.get_parameter("lm_head.weight"))
        logits = theirs(tokens).logits
    assert (ours - logits).abs().max() <= 1e-5 * logits.abs().max()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded.decode(loaded("ab ba").input_ids) == "ab ba"
    assert loaded.eos_token == "<|endoftext|>"


def bpe() -> str:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=90, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(["ab ba abba"], trainer)
    return tokenizer.to_str()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_import_of_export_is_bitwise(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    module, checkpoint = saved(tmp_path, MODELS[kind], dtype)
    export_hf(checkpoint, tmp_path / "hf")
    path, damages = import_hf(tmp_path / "hf", tmp_path / "again" / "checkpoints", step=3)
    assert (path.name, damages) == ("model-3", [])
    with CheckpointReader(path) as reader:
        assert ModelConfig.model_validate(reader.manifest.facts.config["model"]) == MODELS[kind]
        reader.expect(MODELS[kind])
        for spec in param_specs(MODELS[kind]):
            stored = "fp32" if dtype == torch.float32 else "bf16"
            piece = Piece(spec.name, "weight", stored, spec.shape, (0,) * len(spec.shape), spec.shape, 0, spec.numel)
            out = torch.empty(spec.numel, dtype=dtype)
            reader.read_into(piece, out)
            assert torch.equal(out.view(spec.shape), module.get_parameter(spec.name))
    with pytest.raises(UserError, match="exists already"):
        export_hf(checkpoint, tmp_path / "hf")


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    _, checkpoint = saved(tmp_path, MODELS["olmoe"])
    export_hf(checkpoint, tmp_path / "hf", dtype="bf16")
    config_path = tmp_path / "hf" / "config.json"
    config = json.loads(config_path.read_text())
    assert config["dtype"] == "bfloat16"
    for change, message in [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_experts": 5}, r"gate.weight has shape \(4, 32\)"),
        ({"num_hidden_layers": 3}, r"no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "21 tensors that the model does not have, such as model.layers.1"),
    ]:
        config_path.write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            import_hf(tmp_path / "hf", tmp_path / "x")
    config_path.write_text(json.dumps(config))
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        import_hf(tmp_path / "hf", tmp_path / "x")
    file.unlink()
    with pytest.raises(UserError, match="not pickles"):
        import_hf(tmp_path / "hf", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_table_covers_the_model_exactly() -> None:
    for model in (*MODELS.values(), MOE):
        tensors = list(hf_tensors(model))
        assert len({tensor.name for tensor in tensors}) == len(tensors)
        assert sum(int(np.prod(t.shape)) for t in tensors) == sum(spec.numel for spec in param_specs(model))


def test_a_dense_model_with_qk_norm_has_no_class(tmp_path: Path) -> None:
    model = ModelConfig(vocab_size=96, hidden=32, layers=2, heads=4, ffn=48)
    _, checkpoint = saved(tmp_path, model)
    with pytest.raises(UserError, match="has no Hugging Face class"):
        export_hf(checkpoint, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
