"""The whole configuration of a run: one frozen tree, one section a concern."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from mula_ray.config.base import Section
from mula_ray.config.model import ModelConfig

Dtype = Literal["fp32", "bf16"]


class DataConfig(Section):
    """Where the tokens come from. `path: stdlib` is the default corpus, prepared on first use."""

    path: str = "stdlib"
    context: PositiveInt = Field(2048, description="tokens of a training sequence")
    document_mask: bool = Field(False, description="attention and positions restart at document boundaries")
    prefetch_steps: PositiveInt = Field(4, description="steps the shared-memory ring runs ahead")


class ParallelConfig(Section):
    """World size = dp x ep x tp x pp. Words and groups: docs/architecture.md."""

    dp: PositiveInt | Literal["auto"] = "auto"
    ep: PositiveInt = 1
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    schedule: Literal["1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    virtual_stages: PositiveInt = Field(1, description="stages a pipeline rank holds")
    recompute: str = Field(
        "none", description="none, or parts joined by +: norms, attention, moe; part@a:b limits it to layers a..b-1"
    )
    dispatcher: Literal["auto", "allgather", "alltoall"] = "auto"
    combine_dtype: Dtype = Field("fp32", description="dtype of the EP reduce-scatter")
    backend: Literal["auto", "gloo", "ccl", "xccl", "nccl"] = "auto"
    strict: bool = Field(False, description="refuse collectives that oneCCL lacks, on any backend")


class OptimConfig(Section):
    """AdamW with fp32 masters, sharded. Defaults are the recipe of the Mula models."""

    kind: Literal["epso", "zero1"] = "epso"
    lr: PositiveFloat = 4e-4
    min_lr: PositiveFloat = 4e-5
    warmup_steps: NonNegativeInt = 2500
    decay_steps: NonNegativeInt = Field(0, description="step at which min_lr is reached; 0 means train.steps")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    decay_norms: bool = Field(False, description="apply weight decay to norm weights")
    clip: PositiveFloat = Field(1.0, description="global gradient norm bound")
    reduce_dtype: Dtype = "fp32"
    bucket_mb: PositiveFloat = Field(16.0, description="size of a gradient reduction bucket, MiB")


class TrainConfig(Section):
    """Length, batch and precision of the run."""

    steps: PositiveInt
    global_batch: PositiveInt = Field(description="sequences a step, over all ranks")
    micro_batch: PositiveInt = Field(1, description="sequences a forward pass")
    seed: NonNegativeInt = 0
    dtype: Dtype = "bf16"
    eval_every: NonNegativeInt = Field(0, description="steps between evaluations; 0 only at the end")
    eval_samples: NonNegativeInt = Field(64, description="held-out sequences an evaluation; 0 switches it off")


class CheckpointConfig(Section):
    """Alternating full slots and kept model-only checkpoints."""

    every: NonNegativeInt = Field(1000, description="steps between full checkpoints; 0 only at the end")
    persist_every: NonNegativeInt = Field(0, description="steps between model-only checkpoints; 0 never")
    keep: NonNegativeInt = Field(0, description="model-only checkpoints kept; 0 keeps all")
    mode: Literal["async", "sync"] = "async"
    on_error: Literal["continue", "stop"] = Field(
        "continue", description="when a save fails: train on, or stop with exit 30"
    )


class ElasticConfig(Section):
    """What happens when something fails."""

    policy: Literal["shrink", "wait", "stop"] = Field(
        "shrink", description="when spares are out: shrink dp, wait for nodes, or stop"
    )
    min_dp: PositiveInt = 1
    wait_s: PositiveFloat = Field(600.0, description="longest wait for nodes before the run stops, seconds")
    snapshot_every: NonNegativeInt | Literal["auto"] = Field(
        "auto", description="steps between snapshots in memory; auto: every step if that costs 5 % or less; 0 none"
    )
    orphan_s: PositiveFloat = Field(30.0, description="how long anything outlives the driver, seconds")
    max_recoveries: PositiveInt = Field(5, description="recoveries without a new committed step that count as systemic")
    skip_bad_data: bool = Field(False, description="skip a window that fails numerically on two sets of hardware")
    check_state_every: NonNegativeInt = Field(
        1, description="steps between checks of the optimizer shards' digest; 0 never"
    )


class ClusterConfig(Section):
    """`local` starts a many-node Ray cluster here, `ray` uses a running one; otherwise the name of a site file."""

    kind: str = "local"
    nodes: PositiveInt = Field(1, description="working nodes")
    tiles_per_node: PositiveInt = 1
    spares: NonNegativeInt = Field(0, description="whole nodes on top of the working ones")
    rank_start: Literal["forkserver", "spawn"] = "forkserver"
    threads_per_rank: PositiveInt = 1
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    hang_workarounds: bool = Field(False, description="add the site's block against hanging collectives to the ranks")


class MetricsConfig(Section):
    """What is written, and how often."""

    every: PositiveInt = Field(1, description="steps between lines of metrics.jsonl")
    experts: bool = Field(True, description="expert-load statistics and router entropy")
    peak_tflops: float = Field(0.0, ge=0, description="peak of a tile for MFU; 0 measures it")
    tensorboard: bool = False
    wandb: bool = False


class RunConfig(Section):
    """The configuration of a run."""

    model: ModelConfig
    train: TrainConfig
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    elastic: ElasticConfig = ElasticConfig()
    cluster: ClusterConfig = ClusterConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.optim.min_lr > self.optim.lr:
            raise ValueError(f"optim.min_lr {self.optim.min_lr} exceeds optim.lr {self.optim.lr}; lower min_lr")
        return self
