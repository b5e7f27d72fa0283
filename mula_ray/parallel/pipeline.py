"""Pipeline parallelism: run a schedule table (`plan/schedule.py`) with transfers between neighbouring ranks.

Why not torch.distributed.pipelining: see docs/architecture.md. In short, here one table drives execution, the count
of collectives and the bubble in `plan`; the first step is like every other (no extra forward and backward to learn
shapes); auxiliary losses live in the stage that computes them; and no private name of torch is needed.

Transfers are broadcasts in two-rank groups, one a direction: every backend has them, oneCCL's send and receive crash
on the CPU, and one direction can never wait for the other. The receiver takes messages in the order in which the
sender makes them, so channels may be first-in first-out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mula_ray.config.run import RunConfig
from mula_ray.model.aux import AuxSink
from mula_ray.model.transformer import Transformer
from mula_ray.ops.sink import WeightGradSink
from mula_ray.parallel.apply import DTYPES
from mula_ray.parallel.collectives import Pending, broadcast_async
from mula_ray.parallel.defer import DeferringSink, set_sink
from mula_ray.parallel.executor import Divisors, MicroBatch, Sums
from mula_ray.parallel.groups import Group, Groups
from mula_ray.plan.schedule import (
    Action,
    Message,
    Schedule,
    build_schedule,
    forward_only,
    full_groups,
    messages,
    splits_backward,
)
from mula_ray.plan.stages import rank_stages
from mula_ray.plan.topology import Topology


class StageForward(Protocol):
    """Runs one stage on one micro-batch."""

    def __call__(self, stage: int, micro_batch: int, received: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns (what the next stage takes, this stage's share of the loss).

        `received` is None in the first stage. The first element is not used in the last stage; the share is None when
        the stage has no loss of its own.
        """
        ...


class PutOff(Protocol):
    """Takes the weight-gradient work of I actions and runs it in W actions: a `DeferringSink`."""

    def keep(self, key: tuple[int, int] | None) -> None:
        """From now on keep the work under (stage, micro-batch); None runs it at once again."""
        ...

    def drain(self, key: tuple[int, int]) -> None:
        """Run what was kept."""
        ...


@dataclass
class _Chunk:
    """What the backward of a chunk needs."""

    received: Tensor | None
    out: Tensor
    share: Tensor | None


class Mailbox:
    """This rank's ends of the channels: sends at once, receives in the sender's order."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        channels: dict[tuple[int, int], Group],
        shape: tuple[int, ...],
        like: Tensor,
    ) -> None:
        """`channels[a, b]` carries from pipeline rank a to b; all messages have `shape`, dtype and device of `like`."""
        self._rank, self._owner, self._channels, self._shape, self._like = rank, schedule.owner, channels, shape, like
        self._coming = {ends[0]: deque(queue) for ends, queue in messages(schedule).items() if ends[1] == rank}
        self._arrived: dict[Message, tuple[Pending | None, Tensor]] = {}
        self._sent: list[Pending] = []
        for source in self._coming:
            self._post(source)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Pass `tensor` to the rank that holds `message.stage`, or keep it when that is this rank."""
        target = self._owner(message.stage)
        if target == self._rank:
            self._arrived[message] = (None, tensor)
            return
        self._sent.append(broadcast_async(tensor.contiguous(), 0, self._channels[self._rank, target]))

    def receive(self, message: Message, sender_stage: int) -> Tensor:
        """The tensor of `message`, which comes from the rank that holds `sender_stage`."""
        source = self._owner(sender_stage)
        if source != self._rank:
            while message not in self._arrived:
                self._post(source)
            self._post(source)  # one ahead, so that it travels while this rank computes
        pending, tensor = self._arrived.pop(message)
        if pending is not None:
            pending.wait()
        return tensor

    def _post(self, source: int) -> None:
        if self._coming[source]:
            buffer = self._like.new_empty(self._shape)
            pending = broadcast_async(buffer, 0, self._channels[source, self._rank])
            self._arrived[self._coming[source].popleft()] = (pending, buffer)

    def finish(self) -> None:
        """Wait for the sends; nothing may be left over."""
        for pending in self._sent:
            pending.wait()
        assert not self._arrived, f"messages nobody took: {list(self._arrived)}"
        assert not any(self._coming.values()), f"messages that never came: {self._coming}"


class Pipeline:
    """Runs one step's table on this rank."""

    def __init__(self, schedule: Schedule, rank: int, sink: PutOff | None = None) -> None:
        """`rank` in the pipeline; `sink` takes the weight gradients put off by I actions (zero-bubble tables)."""
        self._schedule, self._rank, self._sink = schedule, rank, sink
        self._chunks: dict[tuple[int, int], _Chunk] = {}

    def run(self, mailbox: Mailbox, forward: StageForward) -> None:
        """Carry out all actions of this rank, in order."""
        for action in self._schedule.orders[self._rank]:
            if action.kind == "F":
                self._forward(action, mailbox, forward)
            elif action.kind == "W":
                assert self._sink is not None
                self._sink.drain((action.stage, action.micro_batch))
            else:
                self._backward(action, mailbox)
        mailbox.finish()
        assert not self._chunks, f"activations left over: {list(self._chunks)}"

    def _forward(self, action: Action, mailbox: Mailbox, forward: StageForward) -> None:
        _, stage, m = action
        received = None
        if stage > 0:
            received = mailbox.receive(Message("F", stage, m), stage - 1)
            received = received.detach().requires_grad_(torch.is_grad_enabled())
        out, share = forward(stage, m, received)
        if stage + 1 < self._schedule.stages:
            mailbox.send(Message("F", stage + 1, m), out.detach())
        if torch.is_grad_enabled():
            self._chunks[stage, m] = _Chunk(received, out, share)

    def _backward(self, action: Action, mailbox: Mailbox) -> None:
        kind, stage, m = action
        chunk = self._chunks.pop((stage, m))
        roots: list[Tensor] = []
        grads: list[Tensor | None] = []
        if stage + 1 < self._schedule.stages:
            roots.append(chunk.out)
            grads.append(mailbox.receive(Message("B", stage, m), stage + 1))
        if chunk.share is not None and chunk.share.requires_grad:
            roots.append(chunk.share)
            grads.append(None)
        if kind == "I":
            assert self._sink is not None
            self._sink.keep((stage, m))
        torch.autograd.backward(roots, grads)
        if kind == "I":
            assert self._sink is not None
            self._sink.keep(None)
        if chunk.received is not None:
            assert chunk.received.grad is not None
            mailbox.send(Message("B", stage - 1, m), chunk.received.grad)


class PipelineExecutor:
    """The `Executor` of a pipeline rank. `stages` maps the global number of each stage held here to its module."""

    def __init__(
        self,
        stages: dict[int, Transformer],
        config: RunConfig,
        pp_rank: int,
        channels: dict[tuple[int, int], Group],
        sink: DeferringSink | None,
    ) -> None:
        self._stages, self._config, self._rank, self._channels, self._sink = stages, config, pp_rank, channels, sink
        self._tables: dict[tuple[int, bool], Schedule] = {}
        self._like = torch.empty(0, dtype=DTYPES[config.train.dtype], device=next(_parameters(stages)).device)

    def complete(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Full groups of micro-batches for the interleaved schedule: a run that lost nodes may have others."""
        parallel = self._config.parallel
        missing = full_groups(parallel.schedule, parallel.pp, len(batches)) - len(batches)
        return [*batches, *(batches[0].empty() for _ in range(missing))]

    def table(self, batches: int, *, train: bool = True) -> Schedule:
        """The table of a step (or an evaluation) of `batches` micro-batches, made once."""
        if (batches, train) not in self._tables:
            parallel = self._config.parallel
            make = build_schedule if train else forward_only
            self._tables[batches, train] = make(parallel.schedule, parallel.pp, len(self._stages), batches)
        return self._tables[batches, train]

    def run(self, batches: Sequence[MicroBatch], divisors: Divisors | None, sums: Sums) -> None:
        """See `Executor`."""
        schedule = self.table(len(batches), train=divisors is not None)
        sequences, length = batches[0].tokens.shape
        shape = (sequences, length - 1, self._config.model.hidden)
        mailbox = Mailbox(schedule, self._rank, self._channels, shape, self._like)

        def forward(stage: int, micro_batch: int, received: Tensor | None) -> tuple[Tensor, Tensor | None]:
            return self._forward(self._stages[stage], batches[micro_batch], received, divisors, sums)

        with torch.set_grad_enabled(divisors is not None):
            Pipeline(schedule, self._rank, self._sink).run(mailbox, forward)

    def _forward(
        self, stage: Transformer, batch: MicroBatch, received: Tensor | None, divisors: Divisors | None, sums: Sums
    ) -> tuple[Tensor, Tensor | None]:
        aux = AuxSink(self._config.model)
        inputs = batch.tokens[:, :-1] if received is None else received
        out = stage(inputs, aux, weight=batch.weight, doc_starts=batch.doc_starts)
        sums.add_aux(aux)
        shares = []
        if stage.lm_head is not None:
            loss = stage.loss(out, batch.tokens[:, 1:], batch.weight)
            sums.add_loss(loss, batch.weight, batch.tokens.shape[1] - 1)
            shares += [loss / divisors.tokens] if divisors else []
        if aux.layers and divisors:
            shares.append(aux.loss(divisors.sequences, divisors.tokens))
        return out, torch.stack(shares).sum() if shares else None


def make_executor(
    stages: Sequence[Transformer],
    config: RunConfig,
    topology: Topology,
    rank: int,
    groups: Groups,
    inner_sink: WeightGradSink,
) -> PipelineExecutor:
    """The executor of `rank`; weight gradients that are put off reach `inner_sink` in the end."""
    parallel, pp_rank = config.parallel, topology.coords(rank).pp
    numbers = rank_stages(topology.pp, parallel.virtual_stages, parallel.schedule, pp_rank)
    sink = None
    if splits_backward(parallel.schedule):
        sink = DeferringSink(inner_sink)
        set_sink(stages, sink)
    return PipelineExecutor(dict(zip(numbers, stages, strict=True)), config, pp_rank, groups.channels, sink)


def _parameters(stages: dict[int, Transformer]) -> Iterator[nn.Parameter]:
    for stage in stages.values():
        yield from stage.parameters()
