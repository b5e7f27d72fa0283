"""The default corpus: the source files of the running Python's own standard library. Nothing to download.

Prepared on first use into a per-user cache folder, in seconds, by the code of `mula-ray data prepare`. Held-out data
are whole *files*. The folder's name holds the Python version and a digest of what is read, so a new Python gets a new
corpus and an old one is never half right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mula_ray.config.errors import UserError
from mula_ray.data.inputs import InputRules, Source
from mula_ray.data.job import PrepareSettings, plan_job
from mula_ray.data.manifest import MANIFEST
from mula_ray.data.prepare import run_here, run_job

STDLIB = "stdlib"
VOCAB_SIZE = 4096
_LAYOUT = 3
_SAMPLE_BYTES = 3_000_000
_HELD_OUT = 0.05
_LEAVE_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "encodings", "pydoc_data"}
)


def default_cache() -> Path:
    """Per-user folder of prepared corpora."""
    return Path.home() / ".cache" / "mula_ray" / "data"


def source_files(root: Path) -> list[Path]:
    """Source files of the standard library, sorted; tests, installed packages and generated tables left out."""
    found = (path for path in root.rglob("*.py") if not _LEAVE_OUT.intersection(path.relative_to(root).parts))
    return sorted(path for path in found if path.is_file())


def ensure_stdlib(cache_dir: Path | None = None) -> Path:
    """The prepared default corpus; prepared now if it is not there yet.

    Safe when several processes start at once: the others wait for the first; where the file system has no locks each
    prepares its own and the first to rename wins.

    Raises:
        UserError: the cache folder cannot be written, or this Python has no standard library sources.
    """
    cache = cache_dir or default_cache()
    root = Path(sysconfig.get_paths()["stdlib"])
    files = source_files(root)
    if not files:
        raise UserError(
            f"data.path {STDLIB}: no source files below {root}; "
            "prepare text of your own with `mula-ray data prepare` and set data.path to it"
        )
    facts = "\n".join(f"{path.relative_to(root)} {path.stat().st_size}" for path in files)
    key = hashlib.sha256(f"{_LAYOUT} {VOCAB_SIZE} {facts}".encode()).hexdigest()[:12]
    final = cache / f"{STDLIB}-{platform.python_version()}-{key}"
    if (final / MANIFEST).exists():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{final.name}.lock"):
            if not (final / MANIFEST).exists():
                _build(root, files, cache, final)
    except OSError as error:
        raise UserError(
            f"the default corpus cannot be written to {cache}: {error.strerror or error}; "
            "make room or rights there, or set data.path to a folder made by `mula-ray data prepare`"
        ) from error
    return final


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock (freed by the system when the process dies); without locks, go on unlocked."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(root: Path, files: Sequence[Path], cache: Path, final: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=cache))
    settings = PrepareSettings(
        sources=(Source(STDLIB, files=tuple((str(f), f.relative_to(root).as_posix()) for f in files)),),
        train_vocab=VOCAB_SIZE,
        rules=InputRules(treat_as="txt", held_out=_HELD_OUT, held_out_by="file"),
        sample_bytes=_SAMPLE_BYTES,
    )
    try:
        with plan_job(folder, settings) as job:
            run_job(job, run_here)
        folder.chmod(0o755)
        os.rename(folder, final)
    except OSError:
        if not (final / MANIFEST).exists():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
