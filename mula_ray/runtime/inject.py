"""`--inject`: the grammar of rehearsed faults. Pure.

    KIND[:INDEX[,key=value]]@step=N        at step N (from 1)
    KIND[:INDEX[,key=value]]@recovery=N    during the N-th recovery (from 1)
    random@every=SECONDS,seed=N[,kinds=a+b]    a storm

INDEX is a rank for faults of ranks, a node's seat for `kill-agent kill-node cut-node`; 0 by default.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mula_ray.config.errors import UserError

Kind = Literal[
    "kill-rank", "kill-actor", "kill-agent", "kill-node", "kill-driver", "cut-node", "freeze-rank", "spin-rank",
    "slow-rank", "hang-collective", "nan-loss", "nan-grad", "flip-state", "disk-full", "torn-checkpoint",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
OF_NODES = ("kill-agent", "kill-node", "cut-node")
BY_RANK = ("spin-rank", "slow-rank", "hang-collective", "nan-loss", "nan-grad", "flip-state")
"""What only the rank itself can play, in a step of its own; the rest comes from outside when its time is now."""
STORM: tuple[Kind, ...] = ("kill-rank", "freeze-rank", "hang-collective", "nan-loss", "kill-actor", "kill-node")


@dataclass(frozen=True)
class Fault:
    """One rehearsed fault. `serial` tells equal ones apart."""

    kind: Kind
    index: int = 0
    at: Literal["step", "recovery", "now"] = "step"
    number: int = 0
    factor: float = 3.0
    serial: int = 0


@dataclass(frozen=True)
class Storm:
    """Random faults: exponential gaps of mean `every_s` from a seeded generator."""

    every_s: float
    seed: int
    kinds: tuple[Kind, ...] = STORM

    def faults(self, world: int, seats: int) -> Iterator[tuple[float, Fault]]:
        """(seconds since the one before, fault), without end."""
        draw = random.Random(self.seed)
        serial = 1_000_000
        while True:
            kind = draw.choice(self.kinds)
            index = draw.randrange(seats if kind in OF_NODES else world)
            serial += 1
            yield draw.expovariate(1 / self.every_s), Fault(kind, index, "now", 0, serial=serial)


def parse(texts: Sequence[str]) -> tuple[tuple[Fault, ...], tuple[Storm, ...]]:
    """All `--inject` texts.

    Raises:
        UserError: what is wrong with one of them, with the nearest right form.
    """
    faults, storms = [], []
    for serial, text in enumerate(texts):
        what, at, when = text.partition("@")
        if not at:
            raise UserError(f"--inject {text!r} does not say when; add @step=N or @recovery=N")
        if what == "random":
            storms.append(_storm(text, when))
        else:
            faults.append(replace(_fault(text, what, when), serial=serial))
    return tuple(faults), tuple(storms)


def _fault(text: str, what: str, when: str) -> Fault:
    head, *options = what.split(",")
    name, colon, index = head.partition(":")
    kind = _kind(text, name)
    word, _, number = when.partition("=")
    if word not in ("step", "recovery") or not number.isdigit() or int(number) < 1:
        raise UserError(f"--inject {text!r}: {when!r} is not a time; use @step=N or @recovery=N with N >= 1")
    if colon and not index.isdigit():
        raise UserError(f"--inject {text!r}: {index!r} is not an index; use {name}:0@{when}")
    fault = Fault(kind, int(index or 0), "step" if word == "step" else "recovery", int(number))
    for option in options:
        key, _, value = option.partition("=")
        if key != "factor" or kind != "slow-rank":
            raise UserError(f"--inject {text!r}: unknown option {option!r}; slow-rank takes factor=F, others none")
        fault = replace(fault, factor=_number(text, value, 1.0))
    return fault


def _storm(text: str, when: str) -> Storm:
    values = dict(part.partition("=")[::2] for part in when.split(","))
    unknown = set(values) - {"every", "seed", "kinds"}
    if unknown or "every" not in values or "seed" not in values:
        raise UserError(f"--inject {text!r}: a storm is random@every=SECONDS,seed=N[,kinds=a+b]")
    if not values["seed"].isdigit():
        raise UserError(f"--inject {text!r}: seed {values['seed']!r} must be a whole number")
    kinds = tuple(_kind(text, name) for name in values["kinds"].split("+")) if "kinds" in values else STORM
    return Storm(_number(text, values["every"], 0.0), int(values["seed"]), kinds)


def _kind(text: str, name: str) -> Kind:
    for kind in KINDS:
        if kind == name:
            return kind
    import difflib

    near = difflib.get_close_matches(name, KINDS, 1)
    raise UserError(
        f"--inject {text!r}: unknown fault {name!r}"
        + (f"; did you mean {near[0]}?" if near else f"; one of {', '.join(KINDS)}")
    )


def _number(text: str, value: str, least: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if number <= least:
        raise UserError(f"--inject {text!r}: {value!r} must be a number above {least:g}")
    return number
