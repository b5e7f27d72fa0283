"""Is this layout legal on these nodes? Every refusal names the nearest legal choices. Pure.

The one place that turns `parallel.dp: auto` into a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from mula_ray.config.errors import UserError
from mula_ray.config.run import RunConfig
from mula_ray.plan.layout import param_specs
from mula_ray.plan.recompute import parse_recompute
from mula_ray.plan.schedule import check_schedule
from mula_ray.plan.topology import Topology


def legal_topology(config: RunConfig, nodes: int | None = None, tiles_per_node: int | None = None) -> Topology:
    """Topology of a run on `nodes` working nodes (default: `cluster.nodes`), every constraint checked.

    Raises:
        UserError: all faults found, one a line.
    """
    as_configured = nodes is None
    nodes = config.cluster.nodes if nodes is None else nodes
    tiles = config.cluster.tiles_per_node if tiles_per_node is None else tiles_per_node
    faults = [*_model_faults(config), *_pipeline_faults(config), *_room_faults(config, nodes, tiles)]
    if faults:
        raise UserError("\n".join(faults))
    parallel = config.parallel
    replica = parallel.ep * parallel.tp * parallel.pp
    dp = nodes * tiles // replica if parallel.dp == "auto" else parallel.dp
    topology = Topology(dp=dp, ep=parallel.ep, tp=parallel.tp, pp=parallel.pp)
    _refuse_pooled_balance(config, topology)
    if topology.pp > 1 and as_configured:  # a run that lost nodes fills the groups with empty micro-batches instead
        check_schedule(parallel.schedule, topology.pp, parallel.virtual_stages, micro_batches(config, topology))
    return topology


def refuse_for_the_model(config: RunConfig) -> None:
    """Whether the layout can split this model at all, on however many tiles.

    Raises:
        UserError: all faults found, one a line.
    """
    faults = list(_model_faults(config))
    if faults:
        raise UserError("\n".join(faults))


def single_process_topology(config: RunConfig) -> Topology:
    """Topology of `--in-process`: one rank, whatever the cluster section says.

    Raises:
        UserError: the configuration fixes a layout that needs more ranks.
    """
    parallel = config.parallel
    sizes = {axis: getattr(parallel, axis) for axis in ("dp", "ep", "tp", "pp")}
    larger = [f"parallel.{axis} {size}" for axis, size in sizes.items() if size not in (1, "auto")]
    if larger:
        fix = " ".join(f"--set {item.split()[0]}=1" for item in larger)
        raise UserError(f"--in-process runs one rank, but the configuration has {', '.join(larger)}; add {fix}")
    return legal_topology(config, nodes=1, tiles_per_node=1)


def warnings(config: RunConfig, topology: Topology) -> list[str]:
    """Legal, but the person should know."""
    result = []
    tiles, parallel = config.cluster.tiles_per_node, config.parallel
    if topology.ep > tiles:
        result.append(
            f"parallel.ep {topology.ep} is more than the {tiles} tiles of a node: expert traffic crosses the network; "
            "the all-to-all dispatcher is used" + ("" if parallel.dispatcher == "auto" else f" ({parallel.dispatcher})")
        )
    if config.train.global_batch < topology.ddp:
        result.append(
            f"train.global_batch {config.train.global_batch} is less than the {topology.ddp} ranks that take samples "
            f"(dp x ep): {topology.ddp - config.train.global_batch} of them have nothing to do in every step"
        )
    if topology.pp > 1:
        batches = micro_batches(config, topology)
        if batches < topology.pp:
            result.append(
                f"{batches} micro-batches a step on {topology.pp} pipeline ranks: most of the pipeline is idle; "
                "raise train.global_batch or lower parallel.pp"
            )
    return result


def micro_batches(config: RunConfig, topology: Topology) -> int:
    """Micro-batches that every rank runs in a step (some may be empty when the batch does not divide)."""
    samples = -(-config.train.global_batch // topology.ddp)
    return -(-samples // config.train.micro_batch)


def _model_faults(config: RunConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    if model.moe is None and parallel.ep > 1:
        yield f"parallel.ep is {parallel.ep}, but the model is dense (model.ffn): no experts to split; set ep=1"
    if model.moe is not None and model.moe.experts % parallel.ep:
        yield (
            f"parallel.ep is {parallel.ep}, which does not divide model.moe.experts {model.moe.experts}; "
            f"nearest legal: {_near(parallel.ep, _divisors(model.moe.experts))}"
        )
    sizes = _cut_by_tp(config)
    for name, size in sizes.items():
        if size % parallel.tp:
            fix = f"nearest legal: {_near(parallel.tp, _divisors(math.gcd(*sizes.values())))}"
            if name == "model.vocab_size":
                padded = -(-size // parallel.tp) * parallel.tp
                fix = f"pad the vocabulary with model.vocab_size={padded}, or change parallel.tp, {fix}"
            yield f"parallel.tp is {parallel.tp}, which does not divide {name} {size}; {fix}"
            return


def _cut_by_tp(config: RunConfig) -> dict[str, int]:
    """What tensor parallelism cuts into equal parts, by the name that a person knows it by."""
    model = config.model
    sizes = {"model.heads": model.heads}
    for spec in param_specs(model):
        if spec.tp_axis is not None:
            name = f"dim {spec.tp_axis} of {spec.name}:"
            if spec.name in ("model.embed_tokens.weight", "lm_head.weight"):
                name = "model.vocab_size"
            sizes[name] = spec.shape[spec.tp_axis]
    if model.moe is not None:
        sizes["the tokens of a micro-batch (train.micro_batch x data.context)"] = (
            config.train.micro_batch * config.data.context
        )
    return sizes


def _pipeline_faults(config: RunConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    virtual, schedule = parallel.virtual_stages, parallel.schedule
    try:
        parse_recompute(parallel.recompute, model.layers)
    except UserError as error:
        yield str(error)
    if parallel.pp == 1:
        if virtual > 1:
            yield f"parallel.virtual_stages is {virtual}, but parallel.pp is 1: no pipeline; set virtual_stages=1"
        return
    if schedule == "interleaved" and virtual == 1:
        yield "parallel.schedule interleaved needs parallel.virtual_stages >= 2; raise it, or use schedule: 1f1b"
    if schedule == "1f1b" and virtual > 1:
        yield f"parallel.schedule 1f1b has one stage a rank, but virtual_stages is {virtual}; use schedule: interleaved"
    if schedule == "zbv" and virtual != 2:
        yield f"parallel.schedule zbv holds two stages a rank, but virtual_stages is {virtual}; set virtual_stages=2"
    stages = parallel.pp * virtual
    if stages > model.layers:
        fewest = 1 if schedule in ("1f1b", "zero_bubble") else 2
        choices = {
            "parallel.pp": _near(parallel.pp, range(1 if virtual == 1 else 2, model.layers // virtual + 1)),
            "parallel.virtual_stages": _near(virtual, range(fewest, model.layers // parallel.pp + 1)),
        }
        legal = "; or ".join(f"nearest legal {name}: {values}" for name, values in choices.items() if values)
        yield (
            f"parallel.pp {parallel.pp} x virtual_stages {virtual} = {stages} stages, but the model has {model.layers} "
            f"layers; {legal or 'set parallel.pp=1 virtual_stages=1, or schedule: 1f1b with virtual_stages=1'}"
        )


def _room_faults(config: RunConfig, nodes: int, tiles: int) -> Iterator[str]:
    parallel = config.parallel
    room, replica = nodes * tiles, parallel.ep * parallel.tp * parallel.pp
    whole = f"{nodes} nodes x {tiles} tiles = {room} tiles (cluster.nodes, cluster.tiles_per_node)"
    product = f"ep {parallel.ep} x tp {parallel.tp} x pp {parallel.pp} = {replica}"
    if parallel.tp > tiles:
        yield (
            f"parallel.tp is {parallel.tp}, but a node has {tiles} tiles (cluster.tiles_per_node), and a TP group must "
            f"fit in a node; set parallel.tp={tiles} or less, or cluster.tiles_per_node={parallel.tp}"
        )
        return
    if replica > room:
        yield f"one replica needs {product} tiles, but there are {whole}; use at least {-(-replica // tiles)} nodes"
        return
    if replica % tiles and tiles % replica:
        legal = (n for n in range(1, room + 1) if n % tiles == 0 or tiles % n == 0)
        yield (
            f"one replica has {product} ranks, which neither fill whole nodes of {tiles} tiles nor divide one; "
            f"nearest legal sizes: {_near(replica, legal)}"
        )
        return
    if room % replica:
        nodes_each = replica // tiles
        yield (
            f"replicas of {product} ranks take {nodes_each} nodes each, which does not divide {whole}; "
            f"nearest legal cluster.nodes: {_near(nodes, range(nodes_each, nodes + nodes_each + 1, nodes_each))}"
        )
        return
    if parallel.dp != "auto" and parallel.dp * replica != room:
        yield (
            f"parallel.dp {parallel.dp} replicas of {product} are {parallel.dp * replica} ranks, not {whole}; "
            f"set parallel.dp={room // replica} or dp: auto"
            + (f", or cluster.nodes={parallel.dp * replica // tiles}" if parallel.dp * replica % tiles == 0 else "")
        )


def _refuse_pooled_balance(config: RunConfig, topology: Topology) -> None:
    if config.model.moe is None or config.model.router.balance != "hf":
        return
    if topology.world > 1 or micro_batches(config, topology) > 1:
        raise UserError(
            f"model.router.balance is hf, which pools over the whole batch: it needs one rank and one micro-batch; "
            f"here are {topology.world} ranks x {micro_batches(config, topology)} micro-batches; use balance: sequence"
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _near(wanted: int, legal: Iterable[int]) -> str:
    """The legal values closest to `wanted`: up to two below and two above it."""
    values = sorted(set(legal))
    below, above = [n for n in values if n <= wanted][-2:], [n for n in values if n > wanted][:2]
    return ", ".join(str(n) for n in below + above)
