"""A driver and agents in one small object: carries out the policy's commands in a model of the machines.

It answers as the protocol at the head of `elastic/events.py` demands, keeps every node's snapshots, and checks the
invariants of issue 7 at every decision.
"""

from __future__ import annotations

from mula_ray.elastic import commands as cmd
from mula_ray.elastic import events as ev
from mula_ray.elastic.memory import Holding, usable_memory
from mula_ray.elastic.placement import Placement, Shape
from mula_ray.elastic.policy import decide
from mula_ray.elastic.state import Decision, Phase, PolicyConfig, State, initial


class World:
    """Nodes, their memory, the disk, one virtual clock. Faults are injected by the tests through `send`."""

    def __init__(self, rules: PolicyConfig) -> None:
        self.rules = rules
        self.state: State = initial(rules)
        self.now = 0.0
        self.nodes: dict[str, list[Holding]] = {}
        self.cordoned: set[str] = set()
        self.disk: list[ev.DiskCopy] = []
        self.generations: list[int] = []
        self.alive: cmd.StartGeneration | None = None
        self.ready = False
        self.step = 0
        self.asked: cmd.AskStop | None = None
        self.fence: int | None = None
        self.finish: cmd.Finish | None = None
        self.reasons: list[str] = []
        self.starts: list[cmd.StartGeneration] = []

    # -- driver

    def send(self, event: ev.Event) -> Decision:
        """Feed one event, carry out the commands, check what must always hold."""
        before = self.state
        decision = decide(self.state, event, self.now)
        self.state, commands, reason = decision
        assert reason.strip(), f"no reason for {event}"
        self.reasons.append(reason)
        assert self.state.generation >= before.generation
        for command in commands:
            assert self.finish is None, "a command after the end"
            self._carry_out(command)
        return decision

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.Fence(generation):
                assert self.alive is None or generation >= self.alive.generation
                self.fence, self.alive, self.ready, self.asked = generation, None, False, None
            case cmd.StartGeneration():
                self._start(command)
            case cmd.AskStop(generation):
                assert self.alive is not None
                assert generation == self.alive.generation
                self.asked = command
            case cmd.Cordon(node):
                self.cordoned.add(node)
            case cmd.Finish():
                self.finish = command
            case cmd.Wait(_, until):
                assert until <= self.now + self.rules.wait_s + 1e-6, "a wait without bound"

    def _start(self, start: cmd.StartGeneration) -> None:
        assert self.alive is None, "two generations at once"
        assert self.fence is None, "started before the fence was answered"
        assert all(start.generation > g for g in self.generations), "generations only grow"
        self.generations.append(start.generation)
        self.starts.append(start)
        self.check_placement(start.placement)
        self.check_restore(start.restore)
        self.alive, self.ready = start, False

    def check_placement(self, placement: Placement) -> None:
        """A legal world: whole replicas, distinct usable nodes, as many replicas as there is room for."""
        rules, seats = self.rules, placement.seats
        assert rules.min_dp <= placement.dp <= rules.dp
        if rules.policy != "shrink":
            assert placement.dp == rules.dp
        assert len(set(seats)) == len(seats) == rules.shape.seats(placement.dp)
        assert not set(seats) & self.cordoned, "a cordoned node is placed"
        assert set(seats) <= set(self.nodes), "a lost node is placed"
        assert set(seats) <= set(self.state.nodes)
        room = rules.shape.capacity(len(self.state.nodes))
        assert placement.dp == min(rules.dp, room), "spares are used before shrinking"
        assert [r for r, _, _ in placement.assignments()] == list(range(placement.world))
        assert all(tile < rules.shape.tiles_per_node for _, _, tile in placement.assignments())

    def check_restore(self, restore: cmd.Restore) -> None:
        """What is to be read exists."""
        match restore.tier:
            case ev.Tier.OWN | ev.Tier.MEMORY:
                for seat, node in enumerate(restore.holders):
                    held = {(h.generation, h.step, h.dp, h.seat) for h in self.nodes[node]}
                    assert (restore.generation, restore.step, restore.dp, seat) in held
            case ev.Tier.DISK:
                assert any(d.step == restore.step and d.slot == restore.slot for d in self.disk)
            case ev.Tier.FRESH:
                assert restore.step == 0
                assert not self.disk

    # -- agents and ranks

    def boot(self, nodes: int, **facts: object) -> None:
        """Start the driver and report `nodes` nodes n0, n1, … in racks of four."""
        self.send(ev.DriverStarted(**facts))  # type: ignore[arg-type]
        for i in range(nodes):
            self.join(f"n{i}", f"rack{i // 4}")
        self.send(ev.RosterComplete())

    def restart(self) -> None:
        """The driver dies with its ranks; another takes over what the agents hold."""
        committed, self.step = max(self.state.committed, 0), 0
        facts = {"generation": self.state.generation, "committed": committed, "skips": self.state.skips}
        self.state = initial(self.rules)
        self.alive, self.ready, self.fence, self.asked = None, False, None, None
        disk = tuple(self.disk)
        cordoned = tuple(sorted(self.cordoned))
        self.send(ev.DriverStarted(takeover=True, disk=disk, ever_saved=bool(disk), cordoned=cordoned, **facts))
        for node in sorted(self.nodes):
            self.join(node)
        self.send(ev.RosterComplete())

    def join(self, node: str, domain: str = "") -> None:
        self.nodes.setdefault(node, [])
        self.send(ev.NodeJoined(node, self.rules.shape.tiles_per_node, domain))

    def lose(self, node: str) -> None:
        self.nodes.pop(node, None)
        self.send(ev.NodeLost(node))

    def answer_fence(self) -> None:
        assert self.fence is not None
        generation, self.fence = self.fence, None
        self.send(ev.Fenced(generation, usable_memory(self.rules.shape, self.nodes)))

    def get_ready(self) -> None:
        assert self.alive is not None
        self.ready, self.step = True, self.alive.restore.step
        self.send(ev.GenerationReady(self.alive.generation, self.step))

    def settle(self) -> None:
        """Answer fences and starts until something runs, waits or has ended."""
        for _ in range(50):
            if self.finish is not None:
                return
            if self.fence is not None:
                self.answer_fence()
            elif self.alive is not None and not self.ready:
                self.get_ready()
            else:
                return
        raise AssertionError(f"does not settle: {self.reasons[-6:]}")

    def run(self, steps: int, snapshot: bool = True) -> None:
        """Commit `steps` steps, each with a published snapshot."""
        for _ in range(steps):
            if self.alive is None or not self.ready:
                return
            generation = self.alive.generation
            self.step += 1
            self.send(ev.StepCommitted(generation, self.step))
            if snapshot and self.alive is not None:
                self.publish()
            if self.asked is not None:
                self.end_asked()

    def publish(self) -> None:
        assert self.alive is not None
        start, place = self.alive, self.alive.placement
        for node, held in self.nodes.items():
            self.nodes[node] = [h for h in held if h.step >= self.step - 1]
        for seat, (node, buddy) in enumerate(zip(place.seats, start.buddies, strict=True)):
            if node in self.nodes:
                self.nodes[node].append(Holding(start.generation, self.step, place.dp, seat, own=True))
            if buddy is not None and buddy in self.nodes:
                self.nodes[buddy].append(Holding(start.generation, self.step, place.dp, seat, own=False))
        self.send(ev.SnapshotPublished(start.generation, self.step))

    def checkpoint(self) -> None:
        assert self.alive is not None
        slot = "full-a" if not self.disk or self.disk[-1].slot == "full-b" else "full-b"
        self.disk = [d for d in self.disk if d.slot != slot] + [ev.DiskCopy(self.step, slot)]
        self.send(ev.CheckpointCommitted(self.alive.generation, self.step, slot))

    def end_asked(self) -> None:
        assert self.alive is not None
        assert self.asked is not None
        save = self.asked.save
        if save == "memory":
            self.publish()
        else:
            self.checkpoint()
        generation = self.alive.generation
        self.alive, self.ready, self.asked = None, False, None
        self.send(ev.GenerationEnded(generation, self.step, asked=True, save=save))

    def tick(self) -> None:
        """Let the clock run to the next thing that is due."""
        wake = self.state.wake_at
        if wake is not None:
            self.now = max(self.now, wake)
            self.send(ev.Tick())

    @property
    def running(self) -> bool:
        return self.state.phase is Phase.RUNNING


def world(nodes: int, *, dp: int = 2, ep: int = 2, tiles: int = 2, **rules: object) -> World:
    """`dp` replicas of `ep` ranks on nodes of `tiles` tiles; booted and running."""
    made = World(PolicyConfig(Shape(ep=ep, tp=1, pp=1, tiles_per_node=tiles), dp=dp, **rules))  # type: ignore[arg-type]
    made.boot(nodes)
    made.settle()
    return made


def died(w: World, rank: int, cause: ev.Cause = ev.Cause.SIGNAL, detail: str = "signal 9") -> None:
    """`rank` of the present generation dies."""
    w.send(ev.RankDied(w.state.generation, rank, cause, detail))
