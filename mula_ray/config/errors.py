"""Errors that end a run, each with the exit code of the outer contract.

A message names what is wrong, the value, the constraint and the fix. The command line prints
it without a traceback; everything that is not a `MulaError` is an internal error (exit 1).
"""

from __future__ import annotations

from typing import ClassVar


class MulaError(Exception):
    """Base of the errors that the command line turns into one message and an exit code."""

    exit_code: ClassVar[int] = 1


class StoppedEarly(MulaError):
    """Stopped on purpose (deadline, signal, Ctrl-C) after an agreed save: resumable."""

    exit_code: ClassVar[int] = 10


class UserError(MulaError, ValueError):
    """The user's input is wrong: configuration, data, arguments, no space at the start."""

    exit_code: ClassVar[int] = 20


class CannotContinue(MulaError):
    """The run cannot go on: systemic failure, too few nodes, no space in mid-run."""

    exit_code: ClassVar[int] = 30


class NoCheckpoint(MulaError):
    """No valid checkpoint where one is required."""

    exit_code: ClassVar[int] = 40
