"""What can go wrong with storage, as values that the runtime can put in an event and decide upon."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any, Literal

from mula_ray.config.errors import CannotContinue, NoCheckpoint, UserError

FailureKind = Literal[
    "no-space", "quota", "read-only", "gone", "slow", "io", "lease", "busy", "committed", "coverage", "snapshot"
]
DamageKind = Literal["manifest", "missing", "size", "header", "checksum", "coverage", "unreadable"]

_ERRNO: dict[int, FailureKind] = {
    errno.ENOSPC: "no-space",
    errno.EDQUOT: "quota",
    errno.EROFS: "read-only",
    errno.EACCES: "read-only",
    errno.EPERM: "read-only",
    errno.ENOENT: "gone",
    errno.ENOTDIR: "gone",
    errno.ESTALE: "gone",
    errno.ETIMEDOUT: "slow",
}

_FIX: dict[FailureKind, str] = {
    "no-space": "free space on this file system or lower checkpoint.keep",
    "quota": "raise the quota or remove files",
    "read-only": "make the folder writable",
    "gone": "the folder was removed or unmounted under the run; bring it back",
    "slow": "look at the file system's health",
    "io": "look at the file system's health",
    "lease": "stop the other job, or choose another run folder",
    "busy": "wait until it has settled, or lengthen checkpoint.every",
    "committed": "choose another run folder, or remove that checkpoint",
    "coverage": "this is a fault of the program that planned the save",
    "snapshot": "the next save takes a new snapshot",
}


class StoreFailure(Exception):
    """A save that failed: kind, path, who. The previous checkpoints are untouched."""

    def __init__(self, kind: FailureKind, path: object, detail: str, who: str = "") -> None:
        super().__init__(kind, str(path), detail, who)
        self.kind: FailureKind = kind
        self.path = str(path)
        self.detail = detail
        self.who = who

    def __str__(self) -> str:
        who = f"{self.who}: " if self.who else ""
        return f"{who}checkpoint write failed ({self.kind}) at {self.path}: {self.detail}; {_FIX[self.kind]}"

    def event(self) -> dict[str, Any]:
        """The fields for events.jsonl (and for a message between processes)."""
        return {"failure": self.kind, "path": self.path, "detail": self.detail, "who": self.who}

    @staticmethod
    def from_event(event: dict[str, Any]) -> StoreFailure:
        """Inverse of `event`."""
        return StoreFailure(event["failure"], event["path"], event["detail"], event["who"])

    @staticmethod
    def of(error: OSError, path: object, who: str = "") -> StoreFailure:
        """Classify an error of the operating system."""
        kind = _ERRNO.get(error.errno or 0, "io")
        return StoreFailure(kind, error.filename or path, error.strerror or repr(error), who)

    def as_stop(self, at_start: bool = False) -> CannotContinue | UserError:
        """The error that ends the run: exit 20 at the start, 30 in mid-run."""
        return UserError(str(self)) if at_start else CannotContinue(str(self))


@dataclass(frozen=True)
class Damage:
    """One thing found wrong with a checkpoint: which file, which tensor, what kind."""

    kind: DamageKind
    file: str
    tensor: str
    detail: str

    def __str__(self) -> str:
        tensor = f", tensor {self.tensor}" if self.tensor else ""
        return f"{self.file}{tensor}: {self.kind}: {self.detail}"

    def event(self) -> dict[str, Any]:
        """The fields for events.jsonl."""
        return {"damage": self.kind, "file": self.file, "tensor": self.tensor, "detail": self.detail}


class DamagedCheckpoint(NoCheckpoint):
    """A checkpoint that must not be loaded, with everything found wrong (exit 40 when nothing else is there)."""

    def __init__(self, path: object, damages: list[Damage]) -> None:
        super().__init__(str(path), damages)
        self.path = str(path)
        self.damages = damages

    def __str__(self) -> str:
        shown = "; ".join(str(damage) for damage in self.damages[:5])
        more = f"; and {len(self.damages) - 5} more" if len(self.damages) > 5 else ""
        return f"checkpoint {self.path} is damaged: {shown}{more}; use another checkpoint (mula-ray ckpt ls)"
