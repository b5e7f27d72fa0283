"""The figures of docs/verified.d/data.md. Run alone on a quiet machine; nothing is asserted.

python tests/data/measure_data.py windows
python tests/data/measure_data.py throughput --mb 150 --tokenizer tokenizer.json [--engine ray]
python tests/data/measure_data.py memory --mb 5000 [--tokenizer tokenizer.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from mula_ray.data.corpus import ensure_stdlib, source_files
from mula_ray.data.inputs import InputRules, Source
from mula_ray.data.job import PrepareSettings, plan_job
from mula_ray.data.prepare import run_here, run_job
from mula_ray.data.shards import TokenSet
from mula_ray.data.tokenizer import load_tokenizer

ROUNDS = 3


def make_jsonl(path: Path, megabytes: int) -> None:
    """Documents of about 2 KB cut from the standard library's sources at random; beyond 50 MB the same ones again."""
    import sysconfig

    text = "".join(f.read_text(errors="replace") for f in source_files(Path(sysconfig.get_paths()["stdlib"])))
    rng, lines, size = random.Random(0), [], 0
    while size < min(50, megabytes) * 1_000_000:
        begin = rng.randrange(len(text) - 4000)
        lines.append(json.dumps({"text": text[begin : begin + rng.randint(200, 4000)]}) + "\n")
        size += len(lines[-1])
    whole = "".join(lines)
    with path.open("w") as file:
        for _ in range(max(1, megabytes // 50)):
            file.write(whole)


def make_words(path: Path) -> Path:
    """A tokenizer of a few words, three times as fast as BPE: for measuring memory on gigabytes."""
    words = ["<|endoftext|>", "[UNK]", "self", "def", "return", "if", "import", "the", "a", "in", "is", "not", "="]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path.write_text(tokenizer.to_str())
    return path


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def windows() -> None:
    """Random windows from shards against numpy memmap of the same tokens in one flat file."""
    tokens = TokenSet.open(ensure_stdlib())
    with tempfile.TemporaryDirectory() as folder:
        flat = Path(folder) / "flat.bin"
        np.concatenate([shard.values for _, shard in tokens.shards()]).tofile(flat)
        plain = np.memmap(flat, dtype=np.uint16, mode="r")
        bare = np.asarray(plain)
        for context in (128, 512, 2048):
            rng = np.random.default_rng(0)
            orders = [rng.integers(0, tokens.count(context), 64) for _ in range(200)]

            def ours(orders: list[np.ndarray] = orders, context: int = context) -> None:
                for order in orders:
                    tokens.windows(order, context)

            def memmap(orders: list[np.ndarray] = orders, context: int = context) -> None:
                for order in orders:
                    np.stack([plain[i * context : i * context + context + 1].astype(np.int32) for i in order])

            def view(orders: list[np.ndarray] = orders, context: int = context) -> None:
                for order in orders:
                    out = np.empty((len(order), context + 1), dtype=np.int32)
                    for row, i in enumerate(order.tolist()):
                        out[row] = bare[i * context : i * context + context + 1]

            rounds = [(timed(memmap), timed(view), timed(ours)) for _ in range(9)]
            first = sorted(theirs / mine for theirs, _, mine in rounds)[4]
            second = sorted(theirs / mine for _, theirs, mine in rounds)[4]
            rate = len(orders) * 64 / sorted(mine for _, _, mine in rounds)[4]
            print(f"context {context}: {rate:,.0f} windows/s, {first:.2f} x memmap, {second:.2f} x its bare array")


def throughput(megabytes: int, tokenizer: Path, engine: str) -> None:
    """`data prepare` of one JSONL file against the bare tokenizers library on the same file, all cores.

    The library is timed before and after each run, and the mean taken: a machine's speed drifts within minutes.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_jsonl(folder / "in.jsonl", megabytes)
        loaded = load_tokenizer(tokenizer)

        def bare() -> None:
            with (folder / "in.jsonl").open() as file:
                batch: list[str] = []
                for line in file:
                    batch.append(json.loads(line)["text"])
                    if len(batch) == 1000:
                        loaded.encode_batch_fast(batch)
                        batch.clear()
                loaded.encode_batch_fast(batch)

        def ours() -> None:  # a process of its own: Ray keeps the first cluster's token
            process = get_context("spawn").Process(
                target=prepare, args=(folder / "in.jsonl", folder / "out", tokenizer, engine)
            )
            process.start()
            process.join()
            assert process.exitcode == 0

        library, mine, ratios = [timed(bare)], [], []
        for _ in range(ROUNDS):
            mine.append(timed(ours))
            library.append(timed(bare))
            ratios.append((library[-2] + library[-1]) / 2 / mine[-1])
        for name, times in (("bare", library), (f"prepare ({engine})", mine)):
            print(f"{name}: {', '.join(f'{megabytes / seconds:.2f}' for seconds in times)} MB/s")
        listed = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{listed}: median {sorted(ratios)[ROUNDS // 2]:.3f} x", flush=True)


def prepare(source: Path, out: Path, tokenizer: Path, engine: str, ready: Callable[[], None] = lambda: None) -> None:
    """One preparation from nothing; `ready()` when the workers are there and nothing has been read yet."""
    shutil.rmtree(out, ignore_errors=True)
    settings = PrepareSettings(
        sources=(Source(str(source)),), tokenizer=str(tokenizer), rules=InputRules(held_out=0.01)
    )
    with plan_job(out, settings) as job:
        if engine == "local":
            ready()
            run_job(job, run_here)
            return
        from mula_ray.runtime.prepare import RayWorkers

        with RayWorkers.local(os.cpu_count() or 1) as spread:
            ready()
            begin = time.perf_counter()
            run_job(job, spread)
            print(f"  (without starting and ending Ray: {time.perf_counter() - begin:.1f} s)")


def resident() -> int:
    """Proportional anonymous and shared memory of all processes of this machine (mapped files are the page cache's)."""
    total = 0
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{int(entry)}/smaps_rollup") as file:
                parts = [line.split() for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
                total += sum(int(part[1]) << 10 for part in parts)
        except (OSError, ValueError):
            continue
    return total


def memory(megabytes: int, tokenizer: Path | None, engine: str) -> None:
    """Largest memory while a file is prepared, above what everything (Ray included) held before the first byte."""
    folder = Path(tempfile.mkdtemp(dir="."))
    try:
        make_jsonl(folder / "in.jsonl", megabytes)
        tokenizer = tokenizer or make_words(folder / "words.json")
        base, peak, done = [0], [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                peak[0] = max(peak[0], resident())

        def ready() -> None:
            base[0] = resident()
            thread.start()

        thread = threading.Thread(target=watch)
        seconds = timed(lambda: prepare(folder / "in.jsonl", folder / "out", tokenizer, engine, ready))
        done.set()
        thread.join()
        above = (peak[0] - base[0]) / 1e6
        print(f"{megabytes} MB ({engine}) in {seconds:.0f} s: {above:.0f} MB above the start's {base[0] / 1e6:.0f} MB")
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["windows", "throughput", "memory"])
    parser.add_argument("--mb", type=int, default=150)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--engine", default="local")
    options = parser.parse_args()
    if options.what == "windows":
        windows()
        return
    if options.what == "throughput":
        throughput(options.mb, options.tokenizer or ensure_stdlib() / "tokenizer.json", options.engine)
    else:
        memory(options.mb, options.tokenizer, options.engine)


if __name__ == "__main__":
    sys.exit(main())
