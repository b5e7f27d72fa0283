"""Arguments that several verbs share, and parsing of their values."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from mula_ray.config.errors import UserError

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file, or the name of a shipped one (mula-tiny)")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="override one configuration value; repeatable")
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]


def parse_duration(text: str) -> float | None:
    """Seconds of `90s`, `15m`, `6h`, `6:00:00` (H:M:S) or `5:00` (M:S); None when `text` is none of these."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        if unit is not None:
            return float(text[:-1]) * unit
        if ":" in text:
            seconds = 0.0
            for part in text.split(":"):
                seconds = seconds * 60 + int(part)
            return seconds
    except ValueError:
        pass
    return None


def parse_deadline(text: str | None) -> float | None:
    """A point in time as seconds since the epoch: `+90s`, `+15m`, `+6:00:00` from now, an ISO time, or epoch seconds.

    Raises:
        UserError: none of these, or a time that has passed.
    """
    if text is None:
        return None
    now = time.time()
    if text.startswith("+"):
        seconds = parse_duration(text[1:])
        when = None if seconds is None else now + seconds
    elif text.replace(".", "", 1).isdigit():
        when = float(text)
    else:
        when = _iso(text)
    if when is None:
        raise UserError(
            f"--deadline {text!r} is not a time: give +90s, +15m, +6:00:00, an ISO time such as "
            f"{datetime.now(UTC) + timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}, or seconds since the epoch"
        )
    if when <= now:
        raise UserError(f"--deadline {text!r} has passed {now - when:.0f} s ago; give a later time")
    return when


def _iso(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.astimezone()).timestamp()


def parse_span(text: str | None) -> tuple[int, int] | None:
    """Steps A..B-1 of `A:B`.

    Raises:
        UserError: not two increasing non-negative integers.
    """
    if text is None:
        return None
    first, _, stop = text.partition(":")
    if not first.isdigit() or not stop.isdigit() or int(first) >= int(stop):
        raise UserError(f"--profile {text!r} must be A:B with 0 <= A < B (steps A to B-1), for example 10:13")
    return int(first), int(stop)
