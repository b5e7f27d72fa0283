"""Fixtures that every room's tests may use."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Triton decides at its first import whether kernels run in its interpreter; other libraries may import it first.
os.environ.setdefault("TRITON_INTERPRET", "1")


@dataclass(frozen=True)
class CliResult:
    """What a person would see of one command line."""

    code: int
    out: str
    err: str


Cli = Callable[..., CliResult]


@pytest.fixture
def cli() -> Cli:
    """Run `mula-ray ARGS…` through the real command line in this process (messages and exit codes included)."""

    def call(*args: object) -> CliResult:
        from mula_ray.cli.main import main

        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(arg) for arg in args])
        return CliResult(code, out.getvalue(), err.getvalue())

    return call


@pytest.fixture
def repository() -> Path:
    """Root of the source tree."""
    return Path(__file__).resolve().parent.parent
