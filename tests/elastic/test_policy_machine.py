"""The policy as a state machine: any order of failures, answers and joins keeps the invariants of issue 7."""

from __future__ import annotations

from elastic_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mula_ray.elastic import events as ev
from mula_ray.elastic.placement import Shape
from mula_ray.elastic.state import Phase, PolicyConfig

SHAPES = (Shape(2, 1, 1, 2), Shape(2, 1, 1, 4), Shape(2, 1, 3, 4), Shape(1, 2, 2, 2), Shape(1, 1, 1, 3))


class Machine(RuleBasedStateMachine):
    """Random failures against the world model, which checks every command (see elastic_world.py)."""

    @initialize(
        shape=st.sampled_from(SHAPES),
        dp=st.integers(1, 4),
        spares=st.integers(0, 3),
        policy=st.sampled_from(["shrink", "wait", "stop"]),
        skip=st.booleans(),
    )
    def boot(self, shape: Shape, dp: int, spares: int, policy: str, skip: bool) -> None:
        self.rules = PolicyConfig(shape, dp, policy, skip_bad_data=skip, max_recoveries=6)  # type: ignore[arg-type]
        self.world = World(self.rules)
        self.count = shape.seats(dp) + spares
        self.world.boot(self.count)

    def over(self) -> bool:
        return not hasattr(self, "world") or self.world.finish is not None

    def nodes(self) -> list[str]:
        return sorted(self.world.nodes)

    # -- the driver's answers

    @precondition(lambda self: not self.over() and self.world.fence is not None)
    @rule()
    def fenced(self) -> None:
        self.world.answer_fence()

    @precondition(lambda self: not self.over() and self.world.alive is not None and not self.world.ready)
    @rule()
    def ready(self) -> None:
        self.world.get_ready()

    @precondition(lambda self: not self.over() and self.world.running)
    @rule(steps=st.integers(1, 3), snapshot=st.booleans())
    def steps(self, steps: int, snapshot: bool) -> None:
        self.world.run(steps, snapshot)

    @precondition(lambda self: not self.over() and self.world.running and self.world.asked is None)
    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @precondition(lambda self: not self.over() and self.world.asked is not None)
    @rule()
    def stops_as_asked(self) -> None:
        self.world.end_asked()

    @precondition(lambda self: not self.over() and self.world.fence is None)
    @rule()
    def time_passes(self) -> None:
        self.world.tick()

    @precondition(lambda self: self.over())
    @rule()
    def after_the_end(self) -> None:
        for event in (ev.Tick(), ev.NodeJoined("late", 12), ev.Fenced(self.world.state.generation)):
            _, commands, reason = self.world.send(event)
            assert not commands
            assert reason

    # -- faults

    @precondition(lambda self: not self.over())
    @rule()
    def driver_dies(self) -> None:
        self.world.restart()

    @precondition(lambda self: not self.over() and self.world.state.stop is None)
    @rule(seconds=st.sampled_from([0.0, 5.0, 1000.0, float("inf")]), chance=st.integers(0, 5))
    def asked_to_stop(self, seconds: float, chance: int) -> None:
        if chance == 0:  # it ends most runs: not often
            end = self.world.now + seconds
            self.world.send(ev.StopRequested("SIGTERM") if end == float("inf") else ev.DeadlineNear(end))

    @precondition(lambda self: not self.over())
    @rule(data=st.data())
    def lose_node(self, data: st.DataObject) -> None:
        self.world.lose(data.draw(st.sampled_from([*self.nodes(), "unknown"])))

    @precondition(lambda self: not self.over())
    @rule(data=st.data())
    def lose_agent_and_return(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from([*self.nodes(), "unknown"]))
        if node in self.world.nodes:
            self.world.nodes[node] = []
            self.world.send(ev.AgentLost(node))
            self.world.join(node)

    @precondition(lambda self: not self.over())
    @rule(domain=st.sampled_from(["", "rack0", "rack9"]))
    def new_node(self, domain: str) -> None:
        self.count += 1
        self.world.join(f"n{self.count}", domain)

    @precondition(lambda self: not self.over())
    @rule(
        kind=st.sampled_from(
            ["signal", "error", "peer", "hung", "silent", "loss", "grad", "damaged", "worker", "slow", "overdue"]
        ),
        rank=st.integers(0, 11),
        stale=st.booleans(),
    )
    def fail(self, kind: str, rank: int, stale: bool) -> None:
        state = self.world.state
        generation = state.generation - (1 if stale and rank % 3 == 0 else 0)
        step = self.world.step + 1
        event: ev.Event
        match kind:
            case "hung":
                event = ev.RankHung(generation, step, (rank,))
            case "silent":
                event = ev.RankHung(generation, step)
            case "loss":
                event = ev.NonFinite(generation, step, (rank,))
            case "grad":
                event = ev.NonFinite(generation, step, (), "gradient")
            case "damaged":
                event = ev.StateDamaged(generation, step, (rank,))
            case "worker":
                event = ev.WorkerLost((self.nodes() or ["n0"])[0], 0, generation)
            case "slow" if state.placement is not None and rank < state.placement.world:
                event = ev.Straggler(generation, rank, 2.0)
            case "error" | "peer" | "signal":
                event = ev.RankDied(generation, rank, ev.Cause[kind.upper()], "x")
            case _:
                event = ev.StorageFailed(step, "quota")
        self.world.send(event)

    @precondition(lambda self: not self.over() and self.world.alive is not None and not self.world.ready)
    @rule(seat=st.integers(0, 5))
    def restore_fails(self, seat: int) -> None:
        assert self.world.alive is not None
        restore = self.world.alive.restore
        node = restore.holders[seat % len(restore.holders)] if restore.holders else ""
        self.world.send(ev.RestoreFailed(self.world.state.generation, restore.step, restore.tier, "checksum", node))

    # -- what must hold

    @invariant()
    def one_alive_at_most(self) -> None:
        if self.over():
            return
        state = self.world.state
        if state.phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING):
            assert self.world.alive is not None
            assert self.world.fence is None
        else:
            assert self.world.alive is None

    @invariant()
    def something_is_awaited(self) -> None:
        """No phase but RUNNING may be without a bound."""
        if not self.over() and self.world.state.phase is not Phase.RUNNING:
            assert self.world.state.wake_at is not None

    @invariant()
    def cordoned_nodes_are_out(self) -> None:
        if hasattr(self, "world"):
            assert not self.world.cordoned & self.world.state.nodes.keys()
            assert self.world.state.nodes.keys() <= self.world.nodes.keys()

    @invariant()
    def ends_are_explained(self) -> None:
        if hasattr(self, "world") and self.world.finish is not None:
            assert self.world.finish.exit_code in (10, 30, 40)
            assert len(self.world.finish.reason) > 10

    def teardown(self) -> None:
        """Left alone with enough nodes, every run that has not ended makes progress."""
        if self.over():
            return
        world = self.world
        if world.state.stop is not None:
            return
        for i in range(self.rules.shape.seats(self.rules.dp)):
            if world.finish is None:
                world.join(f"fresh{i}")
        for _ in range(6):
            world.settle()
            if world.finish is not None:
                return
            world.run(4)
            if world.running and world.state.placement is not None and world.state.placement.dp == self.rules.dp:
                break
            world.tick()
        assert world.running, world.reasons[-8:]
        assert world.state.placement is not None
        assert world.state.placement.dp == self.rules.dp


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
