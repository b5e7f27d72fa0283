"""A process that writes checkpoint files out of snapshots in shared memory, so that no rank waits for a disk.

The node agent (or the single process of an in-process run) starts one `WriterProcess` and keeps it: it imports neither
torch nor ray. Jobs and answers are JSON lines over its pipes; it ends with its parent. A job that takes longer than its
bound is ended by SIGKILL and reported as a slow disk, with the path and who waited.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from mula_ray.checkpoint.failures import Damage, DamagedCheckpoint, StoreFailure
from mula_ray.checkpoint.reader import verify_file
from mula_ray.checkpoint.snapshot import SlotInfo, SnapshotBuffer
from mula_ray.checkpoint.store import write_part
from mula_ray.plan.format import FileEntry

_NICE = 5


@dataclass(frozen=True)
class Source:
    """One snapshot to be written: the paths of its memory, and which of its states (SlotInfo) is meant."""

    paths: tuple[str, ...]
    info: SlotInfo

    def to_json(self) -> dict[str, Any]:
        """For the pipe."""
        return {"paths": self.paths, "info": vars(self.info)}


def write_from_snapshots(folder: Path, name: str, sources: Sequence[Source], who: str = "") -> FileEntry:
    """Write the pieces of several snapshots (the ranks of a node) to one file, seal the snapshots, unpin them.

    Raises:
        StoreFailure: kind `snapshot` when one is damaged or was overwritten meanwhile; else see `write_part`.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for source in sources:
            try:
                buffer = SnapshotBuffer(source.paths)
            except OSError as error:
                raise StoreFailure("snapshot", source.paths, f"its owner is gone ({error})", who) from error
            stack.callback(buffer.close)
            stack.callback(_unpin, buffer, source.info)
            opened.append((buffer, source.info))
        try:
            items = [(p.piece, p.data) for buffer, info in opened for p in buffer.pieces(info)]
            entry = write_part(folder, name, items, who=who)
        except DamagedCheckpoint as error:
            raise StoreFailure("snapshot", error.path, str(error.damages[0]), who) from error
        for buffer, info in opened:
            if not buffer.unchanged(info):
                (folder / name).unlink(missing_ok=True)
                raise StoreFailure("snapshot", buffer.paths[info.slot], "overwritten while it was being written", who)
            _check_or_seal(buffer, info, entry, folder / name, who)
    return entry


def _unpin(buffer: SnapshotBuffer, info: SlotInfo) -> None:
    buffer.unpin(info)


def _check_or_seal(buffer: SnapshotBuffer, info: SlotInfo, entry: FileEntry, path: Path, who: str) -> None:
    """What went to disk is what was sealed; an unsealed snapshot is sealed with what went to disk."""
    now = buffer.info(info.slot)
    written = {stored.piece: list(stored.blocks) for stored in entry.pieces}
    for source in buffer.pieces(now):
        if source.sums is not None and source.sums != written[source.piece]:
            path.unlink(missing_ok=True)
            detail = f"{source.piece.kind} of {source.piece.name} changed in memory after it was sealed"
            raise StoreFailure("snapshot", source.where, detail, who)
    buffer.seal_as_written(now, entry)


class WriterProcess:
    """Starts and talks to the process; jobs run one after another. Use from one thread at a time."""

    def __init__(self, who: str = "") -> None:
        self.who = who
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it ahead of the first job (0.3 s)."""
        if self._process is not None and self._process.poll() is None:
            return
        code = f"import sys; sys.path[:] = {sys.path!r}; from mula_ray.checkpoint.writer import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answers = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(target=_pump, args=(self._process.stdout, self._answers), daemon=True).start()

    def write(self, folder: Path, name: str, sources: Sequence[Source], timeout_s: float) -> FileEntry:
        """`write_from_snapshots` in the process, bounded.

        Raises:
            StoreFailure: as there, or kind `slow` after `timeout_s` seconds (the process is then gone).
        """
        job = {"op": "write", "folder": str(folder), "name": name, "sources": [s.to_json() for s in sources]}
        return FileEntry.from_json(self._ask(job, folder / name, timeout_s)["entry"])

    def verify(self, folder: Path, entry: FileEntry, timeout_s: float) -> list[Damage]:
        """Re-read a file from the device in the process, bounded; see `verify_file` and `write`."""
        job = {"op": "verify", "folder": str(folder), "entry": entry.to_json()}
        return [Damage(**damage) for damage in self._ask(job, folder / entry.name, timeout_s)["damages"]]

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _ask(self, job: dict[str, Any], path: Path, timeout_s: float) -> dict[str, Any]:
        self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**job, "who": self.who}) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise StoreFailure("slow", path, f"not done after {timeout_s:g} s", self.who) from None
        except OSError:
            line = ""
        if not line:
            self.close()
            raise StoreFailure("io", path, "the writer process ended", self.who)
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise StoreFailure.from_event(answer["failure"])
        return answer


def _pump(lines: IO[str], answers: queue.Queue[str]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in lines:
            answers.put(line)
    answers.put("")


def main() -> None:
    """The process: one answer a line for one job a line; ends at once when its parent does."""
    os.nice(_NICE)
    jobs: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)  # the parent is gone, or wants us gone: whatever is being written is no checkpoint yet

    threading.Thread(target=listen, daemon=True).start()
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    while True:
        job = json.loads(jobs.get())
        try:
            answer = _run(job)
        except StoreFailure as failure:
            answer = {"failure": failure.event()}
        except Exception as error:  # answered, not lost: the driver decides
            answer = {"failure": StoreFailure("io", job["folder"], repr(error), job["who"]).event()}
        out.write(json.dumps(answer) + "\n")


def _run(job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    if job["op"] == "verify":
        return {"damages": [vars(d) for d in verify_file(folder, FileEntry.from_json(job["entry"]), cold=True)]}
    sources = [Source(tuple(s["paths"]), SlotInfo(**s["info"])) for s in job["sources"]]
    return {"entry": write_from_snapshots(folder, job["name"], sources, job["who"]).to_json()}
