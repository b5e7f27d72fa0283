"""The default corpus: the source files of the running Python's own standard library. Nothing to download.

Prepared on first use into a per-user cache folder, in seconds. Held-out data are whole *files*. The folder's name holds
the Python version and a digest of what is read, so a new Python gets a new corpus and an old one is never half right.
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

import numpy as np

from mula_ray.config.errors import UserError
from mula_ray.data.manifest import MANIFEST, TOKENIZER, DataManifest, ShardEntry, Split, write_manifest
from mula_ray.data.shards import token_dtype, write_shard
from mula_ray.data.tokenizer import EOS, Encoder, tokenizer_digest, tokenizer_text, train_bpe

STDLIB = "stdlib"
VOCAB_SIZE = 4096
_LAYOUT = 1
_SAMPLE_BYTES = 3_000_000
_HELD_OUT_ONE_IN = 20
_LEAVE_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3"})


def default_cache() -> Path:
    """Per-user folder of prepared corpora."""
    return Path.home() / ".cache" / "mula_ray" / "data"


def source_files(root: Path | None = None) -> list[Path]:
    """Source files of the standard library, sorted; tests, installed packages and generated caches left out."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
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
    files = source_files()
    if not files:
        raise UserError(
            f"data.path {STDLIB}: no source files below {sysconfig.get_paths()['stdlib']}; "
            "prepare text of your own with `mula-ray data prepare` and set data.path to it"
        )
    facts = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
    key = hashlib.sha256(f"{_LAYOUT} {VOCAB_SIZE} {facts}".encode()).hexdigest()[:12]
    final = cache / f"{STDLIB}-{platform.python_version()}-{key}"
    if (final / MANIFEST).exists():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{final.name}.lock"):
            if not (final / MANIFEST).exists():
                _build(files, cache, final)
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


def _build(files: Sequence[Path], cache: Path, final: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=cache))
    try:
        prepare_texts([path.read_text(encoding="utf-8", errors="replace") for path in files], folder)
        folder.chmod(0o755)
        os.rename(folder, final)
    except OSError:
        if not (final / MANIFEST).exists():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare_texts(texts: Sequence[str], folder: Path, vocab_size: int = VOCAB_SIZE) -> DataManifest:
    """Tokenize whole documents into a data folder, in an order fixed by their content; one in twenty is held out.

    The tokenizer is trained on a sample of the documents that are not held out.
    """
    digests = ((hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(), text) for text in texts if text.strip())
    keyed = sorted(dict(digests).items())
    held = max(1, len(keyed) // _HELD_OUT_ONE_IN)
    documents: dict[Split, list[str]] = {
        "held_out": [text for _, text in keyed[:held]],
        "train": [text for _, text in keyed[held:]],
    }
    tokenizer = train_bpe(_sample(documents["train"]), vocab_size)
    (folder / TOKENIZER).write_text(tokenizer_text(tokenizer), encoding="utf-8")
    dtype = token_dtype(vocab_size)
    eos = np.array([tokenizer.token_to_id(EOS)], dtype=dtype)
    encoder = Encoder(tokenizer, dtype)
    splits: dict[Split, tuple[ShardEntry, ...]] = {}
    for split, members in documents.items():
        ids = [np.concatenate([part, eos]) for part in encoder.encode(members)]
        lengths = np.array([part.size for part in ids], dtype=np.int64)
        splits[split] = (write_shard(folder / f"{split}-00000.arrow", np.concatenate(ids), lengths),)
    manifest = DataManifest(
        vocab_size=vocab_size,
        eos_id=int(eos[0]),
        dtype="uint16",
        tokenizer_sha256=tokenizer_digest(tokenizer),
        splits=splits,
        report={"source": f"Python {platform.python_version()} standard library", "held_out_by": "file"},
    )
    write_manifest(folder, manifest)
    return manifest


def _sample(texts: Sequence[str]) -> Iterator[str]:
    """Enough text for the merges: training on everything would take most of the ten seconds."""
    size = 0
    for text in texts:
        if size > _SAMPLE_BYTES:
            return
        size += len(text)
        yield text
