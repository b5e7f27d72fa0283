"""What one invocation of `mula-ray train` asks for: the configuration plus everything that is not configuration."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from mula_ray.config.load import Loaded

Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True)
class TrainRequest:
    """One start of a run.

    `deadline` is in seconds since the epoch: training stops with an agreed save before it (exit 10). `address` is that
    of a running Ray cluster, None starts a local one. `inject` holds the texts of `--inject`, `profile` the first step
    and the one after the last to profile.
    """

    loaded: Loaded
    run_dir: Path
    resume: Resume = "auto"
    address: str | None = None
    deadline: float | None = None
    inject: tuple[str, ...] = field(default=())
    i_mean_it: bool = False
    profile: tuple[int, int] | None = None
    in_process: bool = False


def default_run_dir(name: str) -> Path:
    """`runs/<config>-<UTC time>-<4 hex>`: never shared by two runs."""
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
