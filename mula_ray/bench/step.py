"""`mula-ray bench step`: a whole training step.

`l4-h512-i256-e64-k8-t4096`: our engine (one rank) against transformers' OLMoE with `grouped_mm` experts and torch's
fused AdamW. Same sizes, fp32, 8 sequences of 512 tokens, vocabulary 4,096; both clip the gradient norm, both add the
auxiliary loss. The first step's loss is compared first, from the same weights.

`ep4`: see `step_ep.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from mula_ray.bench.step_ep import ep4_rows
from mula_ray.bench.timing import Row, bench_threads, chosen, fresh_processes, interleaved, median_ratio, report, row
from mula_ray.config.model import ModelConfig, MoEConfig, RouterConfig
from mula_ray.config.run import DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from mula_ray.parallel.groups import Groups
from mula_ray.plan.topology import Topology
from mula_ray.train.engine import Engine, MicroBatch

WHOLE = "l4-h512-i256-e64-k8-t4096"
PEER = "transformers-grouped_mm"
BATCH, CONTEXT, VOCAB = 8, 512, 4096
PROCESSES, ROUNDS = 5, 3


def run(cases: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Measure the named cases, or both."""
    rows: list[Row] = []
    for case in chosen("step", cases, (WHOLE, "ep4")):
        if case == WHOLE:
            times = fresh_processes(PROCESSES, measure)
            ours = statistics.median(t["ours"] for t in times)
            ratio = median_ratio(times, PEER, "ours") if PEER in times[0] else None
            rows.append(row(case, "step", ours, "s", PEER, ratio))
        else:
            rows += [row(**each) for each in ep4_rows()]
    return report("step", rows, threads=bench_threads())


def measure() -> dict[str, float]:
    """Seconds of a step of both sides, in this process."""
    torch.set_num_threads(bench_threads())
    tokens = torch.randint(0, VOCAB, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    engine = _engine()
    variants: dict[str, Callable[[], float]] = {"ours": _our_step(engine, tokens)}
    theirs = _their_step(engine, tokens)
    if theirs is not None:
        variants[PEER] = theirs
    first = {name: step() for name, step in variants.items()}
    assert max(first.values()) - min(first.values()) <= 1e-3 * max(first.values()), f"losses differ: {first}"
    return interleaved(dict(variants), ROUNDS)


def config() -> RunConfig:
    """The case's configuration."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=VOCAB,
            hidden=512,
            layers=4,
            heads=4,
            moe=MoEConfig(experts=64, top_k=8, expert_width=256),
            router=RouterConfig(balance="hf", z_coef=0.0),
        ),
        train=TrainConfig(steps=1000, global_batch=BATCH, micro_batch=BATCH, dtype="fp32"),
        data=DataConfig(context=CONTEXT),
        optim=OptimConfig(warmup_steps=0),
        parallel=ParallelConfig(dp=1),
    )


def _engine() -> Engine:
    topology = Topology()
    return Engine(config(), topology, 0, Groups(topology, 0, None), "cpu")


def _our_step(engine: Engine, tokens: torch.Tensor) -> Callable[[], float]:
    batch, done = MicroBatch(tokens, torch.ones(BATCH)), [0]

    def step() -> float:
        done[0] += 1
        return engine.step(done[0], [batch]).loss

    return step


def _their_step(engine: Engine, tokens: torch.Tensor) -> Callable[[], float] | None:
    try:
        from transformers import OlmoeConfig, OlmoeForCausalLM
    except ImportError:
        return None
    model, optim = engine.config.model, engine.config.optim
    assert model.moe is not None
    theirs = OlmoeForCausalLM(
        OlmoeConfig(
            vocab_size=VOCAB, hidden_size=model.hidden, intermediate_size=model.moe.expert_width,
            num_hidden_layers=model.layers, num_attention_heads=model.heads, num_experts=model.moe.experts,
            num_experts_per_tok=model.moe.top_k, router_aux_loss_coef=model.router.balance_coef,
            output_router_logits=True, attn_implementation="sdpa", experts_implementation="grouped_mm",
            tie_word_embeddings=False, pad_token_id=None, eos_token_id=None, use_cache=False,
        )
    )  # fmt: skip
    state = {name: param for stage in engine.stages for name, param in stage.named_parameters()}
    theirs.load_state_dict(state)
    adamw = torch.optim.AdamW(
        theirs.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
        weight_decay=optim.weight_decay, fused=True,
    )  # fmt: skip
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        adamw.zero_grad(set_to_none=False)  # gradient buffers persist, as ours do
        out = theirs(input_ids=inputs)
        loss = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
        (loss + model.router.balance_coef * out.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), optim.clip)
        adamw.step()
        return loss.item()

    return step
