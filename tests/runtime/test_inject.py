"""The grammar of `--inject`."""

import pytest

from mula_ray.config.errors import UserError
from mula_ray.runtime.inject import KINDS, Fault, parse


def test_every_kind_is_understood_at_a_step_and_in_recovery() -> None:
    texts = [f"{kind}:1@step=7" for kind in KINDS] + ["kill-rank@recovery=2", "slow-rank:3,factor=2.5@step=4"]
    faults, storms = parse(texts)
    assert [fault.kind for fault in faults[: len(KINDS)]] == list(KINDS)
    assert faults[-2] == Fault("kill-rank", 0, "recovery", 2, serial=len(KINDS))
    assert (faults[-1].index, faults[-1].factor, faults[-1].number) == (3, 2.5, 4)
    assert storms == ()


def test_a_storm_is_a_function_of_its_seed() -> None:
    _, (storm,) = parse(["random@every=10,seed=3,kinds=kill-rank+kill-node"])
    first = [next(faults) for faults in [storm.faults(4, 2)] for _ in range(20)]
    again = [next(faults) for faults in [storm.faults(4, 2)] for _ in range(20)]
    assert first == again
    assert {fault.kind for _, fault in first} == {"kill-rank", "kill-node"}
    assert all(fault.index < (2 if fault.kind == "kill-node" else 4) for _, fault in first)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill-rank", "@step=N"),
        ("kill-rnak@step=3", "kill-rank"),
        ("kill-rank:x@step=3", "not an index"),
        ("kill-rank@step=0", "N >= 1"),
        ("kill-rank,factor=2@step=1", "unknown option"),
        ("slow-rank,factor=1@step=1", "above 1"),
        ("random@every=10", "seed"),
    ],
)
def test_refusals_name_the_fix(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse([text])
