"""The one order in which a rank's part of the model is put together.

1. build each stage on the meta device (nothing allocated);
2. narrow its parameters to this rank's boxes, from the one table (`plan/layout.py`);
3. zero-bubble schedules hide the linear weights from autograd, tensor parallelism replaces the modules that talk
   inside a layer;
4. expert parallelism sets the dispatchers; TP ranks each take their share of the tokens into them;
5. selective activation checkpointing sets the regions;
6. the optimizer lays the parameters into flat buffers (`optim/epso.py`) and fills them, or `materialise` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mula_ray.config.run import RunConfig
from mula_ray.model.init import init_param
from mula_ray.model.moe import MoE
from mula_ray.model.transformer import DecoderLayer, Transformer
from mula_ray.parallel.defer import hide_linear_weights
from mula_ray.parallel.dispatch import AllGatherDispatcher, AllToAllDispatcher
from mula_ray.parallel.groups import Groups
from mula_ray.parallel.recompute import apply_recompute
from mula_ray.parallel.tensor import apply_tensor, split_tokens
from mula_ray.plan.layout import LocalParam
from mula_ray.plan.partition import local_params
from mula_ray.plan.schedule import splits_backward
from mula_ray.plan.stages import Stage, rank_stages, split_stages
from mula_ray.plan.topology import Topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _NoInit(TorchFunctionMode):
    """Modules are built without torch's own initial values: on the meta device they mean nothing, and drawing them
    imports torch's compiler, 2.5 s of every rank's start."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func.__name__ in ("normal_", "uniform_"):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def stages_of(config: RunConfig, topology: Topology, rank: int) -> list[Stage]:
    """The pipeline stages that `rank` holds, in their order; one stage with everything without a pipeline."""
    parallel = config.parallel
    virtual = parallel.virtual_stages if topology.pp > 1 else 1
    stages = split_stages(config.model.layers, topology.pp * virtual)
    return [stages[index] for index in rank_stages(topology.pp, virtual, parallel.schedule, topology.coords(rank).pp)]


def layout_of(config: RunConfig, topology: Topology, rank: int) -> list[list[LocalParam]]:
    """What `rank` holds of every parameter, a list a stage."""
    at = topology.coords(rank)
    return [local_params(config.model, topology, at, stage) for stage in stages_of(config, topology, rank)]


def build_stages(
    config: RunConfig, topology: Topology, rank: int, groups: Groups, device: torch.device, *, init: bool = True
) -> list[Transformer]:
    """This rank's stages, narrowed and with their parallelism applied (steps 1 to 5).

    With `init`, weights are made on `device`; else they stay on the meta device, for the optimizer to lay out.
    """
    dtype = DTYPES[config.train.dtype]
    at, stages = topology.coords(rank), []
    for stage in stages_of(config, topology, rank):
        with _NoInit():
            module = Transformer(
                config.model,
                stage.first_layer,
                stage.stop_layer,
                has_embed=stage.first,
                has_head=stage.last,
                device=torch.device("meta"),
                dtype=dtype,
                rank=rank,
            )
        local = local_params(config.model, topology, at, stage)
        for param in local:
            set_parameter(module, param.spec.name, nn.Parameter(torch.empty(param.shape, dtype=dtype, device="meta")))
        if topology.pp > 1 and splits_backward(config.parallel.schedule):
            hide_linear_weights(module)
        if groups.tp is not None:
            apply_tensor(module, groups.tp)
        _keep_together(module)
        _apply_experts(module, config, topology, groups)
        if groups.tp is not None:
            split_tokens(module, groups.tp)
        apply_recompute(module, config.parallel.recompute, config.model.layers)
        if init:
            materialise(module, local, config, device)
        stages.append(module)
    return stages


def materialise(module: nn.Module, local: list[LocalParam], config: RunConfig, device: torch.device) -> None:
    """Give every parameter of `module` its initial value, on `device` and in the dtype it has."""
    for param in local:
        old = module.get_parameter(param.spec.name)
        value = initial_value(param, config).to(device=device, dtype=old.dtype)
        set_parameter(module, param.spec.name, nn.Parameter(value))


def initial_value(param: LocalParam, config: RunConfig) -> torch.Tensor:
    """(local shape) fp32 on the CPU: a function of seed, name and global index alone."""
    return init_param(
        param.spec.name,
        config.train.seed,
        param.spec.shape,
        param.offset,
        param.shape,
        param.spec.init,
        config.model.init_std,
    )


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Replace the parameter at the dotted `name`."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    assert leaf in owner._parameters, f"{name} is not a parameter of the model"
    setattr(owner, leaf, param)


def _keep_together(module: Transformer) -> None:
    """No rank may raise in mid-step: the others would wait in a collective. The agreement finds what is not finite."""
    for layer in module.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        if isinstance(layer.mlp, MoE):
            layer.mlp.gate.raises = False


def _apply_experts(module: Transformer, config: RunConfig, topology: Topology, groups: Groups) -> None:
    if config.model.moe is None or groups.ep is None:
        return
    parallel, experts = config.parallel, config.model.moe.experts
    far = topology.ep > config.cluster.tiles_per_node
    all_to_all = parallel.dispatcher == "alltoall" or (parallel.dispatcher == "auto" and far)
    for layer in module.model.layers.values():
        assert isinstance(layer, DecoderLayer)
        assert isinstance(layer.mlp, MoE)
        layer.mlp.dispatcher = (
            AllToAllDispatcher(groups.ep, experts)
            if all_to_all
            else AllGatherDispatcher(groups.ep, experts, DTYPES[parallel.combine_dtype])
        )
