"""Who wants to know what the conductor does."""

from __future__ import annotations

from typing import Any, Protocol

from mula_ray.elastic import commands as cmd
from mula_ray.elastic import events as ev
from mula_ray.elastic.state import State
from mula_ray.runtime.inject import Fault
from mula_ray.runtime.saves import Saved


class Watcher(Protocol):
    """Who wants to know: `view.View`; fakes in tests."""

    def decided(self, state: State, event: ev.Event, commands: tuple[cmd.Command, ...], reason: str) -> None:
        """The policy decided."""
        ...

    def news(self, kind: str, generation: int, body: dict[str, Any]) -> None:
        """A rank or agent reported something for the person."""
        ...

    def saved(self, saved: Saved) -> None:
        """A save ended."""
        ...

    def generation_begins(self, generation: int) -> None:
        """Before anything of it is started: it must be on record."""
        ...

    def fault(self, fault: Fault) -> None:
        """A rehearsed fault is played; those of the driver itself are played here."""
        ...
