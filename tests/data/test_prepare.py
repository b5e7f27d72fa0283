"""Preparation: every input kind, the global shuffle, the same bytes for any cut of the work and after any kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import documents, make_tokenizer, prepare, shard_bytes, texts, write_jsonl, write_parquet

from mula_ray.config.errors import UserError
from mula_ray.data.inputs import InputRules, Source
from mula_ray.data.inspect import verify_folder
from mula_ray.data.job import Job, PrepareSettings, already_done, plan_job
from mula_ray.data.manifest import read_manifest
from mula_ray.data.prepare import run_here, run_job, work
from mula_ray.data.tokenizer import load_tokenizer, pieces, train_bpe


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer.json."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def encoded(tokenizer: Path, texts: Sequence[str]) -> list[list[int]]:
    """What the tokenizers library itself makes of whole texts, with the end-of-text id."""
    loaded = load_tokenizer(tokenizer)
    return [[*loaded.encode(text, add_special_tokens=False).ids, 0] for text in texts]


def write_kind(folder: Path, kind: str, members: list[str], ids: list[list[int]]) -> Path:
    """The same documents in one of the input kinds."""
    path = folder / f"in.{kind}"
    if kind == "txt-folder":
        path.mkdir()
        for number, text in enumerate(members):
            (path / f"{number:03d}.txt").write_text(text)
    elif kind.startswith("jsonl"):
        write_jsonl(path, [{"text": text, "other": 1} for text in members])
    elif kind == "parquet":
        write_parquet(path, {"text": members, "n": list(range(len(members)))})
    elif kind == "tokens.parquet":
        write_parquet(path, {"tokens": ids})
    elif kind == "npy":
        np.save(path, np.concatenate([np.array(part) for part in ids]))
    return path


@pytest.mark.parametrize("kind", ["txt-folder", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "tokens.parquet", "npy"])
def test_every_kind_of_input_gives_the_documents(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    members = texts(1, 40)
    expected = encoded(tokenizer, members)
    source = write_kind(tmp_path, kind, members, expected)
    rules = {"held_out": 0.1, "held_out_by": "document" if kind != "txt-folder" else "auto"}
    manifest = prepare(tmp_path / "out", source, tokenizer=str(tokenizer), rules=rules)
    train, held = documents(tmp_path / "out"), documents(tmp_path / "out", "held_out")
    assert sorted(train + held) == sorted(expected)
    assert held
    assert train != [part for part in expected if part in train], "the order is the input's"
    assert manifest.vocab_size == 300
    assert manifest.eos_id == 0
    assert not any(checked.problem for checked in verify_folder(tmp_path / "out"))
    assert not (tmp_path / "out" / ".prepare").exists()


def settings_of(folder: Path, tokenizer: Path, **more: Any) -> PrepareSettings:
    """Two sources, text and JSON lines, with everything that could depend on how the work is cut."""
    rng = random.Random(5)
    (folder / "a").mkdir()
    for number in range(3):
        (folder / "a" / f"{number}.txt").write_text("\n".join(texts(number, 30)))
    rows: list[Any] = [{"text": text} for text in texts(9, 80)]
    rows[7], rows[20] = {"no": 1}, {"text": ""}
    write_jsonl(folder / "b.jsonl", rows)
    write_jsonl(folder / "c.jsonl.gz", [{"text": text} for text in texts(10, 40)])
    np.save(folder / "d.npy", np.array([rng.randint(1, 299) if n % 50 else 0 for n in range(3000)]))
    sources = tuple(Source(str(folder / name)) for name in ("a", "b.jsonl", "c.jsonl.gz", "d.npy"))
    base = PrepareSettings(
        sources=sources,
        tokenizer=str(tokenizer),
        tokens_tokenizer=str(tokenizer),
        shard_tokens=1500,
        rules=InputRules(held_out=0.1, held_out_by="document"),
    )
    return replace(base, **more)


def run(out: Path, settings: PrepareSettings, **changes: Any) -> None:
    """Prepare with the job changed in ways that must not matter."""
    with plan_job(out, settings) as job:
        run_job(replace(job, **changes), run_here)


@pytest.fixture(scope="module")
def small_parts() -> Iterator[None]:
    """Parts of long documents of 1 KB rather than 4 MB, so that small files have many."""
    patch = pytest.MonkeyPatch()
    for name in ("inputs", "readers"):
        patch.setattr(f"mula_ray.data.{name}.PART_BYTES", 1024)
        patch.setattr(f"mula_ray.data.{name}.PART_TOKENS", 64)
    yield
    patch.undo()


@pytest.mark.usefixtures("small_parts")
def test_the_cut_of_the_work_changes_nothing(tmp_path: Path, tokenizer: Path) -> None:
    settings = settings_of(tmp_path, tokenizer)
    run(tmp_path / "one", settings)
    want = shard_bytes(tmp_path / "one")
    assert len([name for name in want if name.startswith("train")]) > 3
    assert read_manifest(tmp_path / "one").report["counts"]["parts_of_long_documents"] > 5
    for number, (item_bytes, block_bytes) in enumerate([(1024, 300), (2048, 5000), (9000, 700)]):
        out = tmp_path / f"cut{number}"
        run(out, replace(settings, item_bytes=item_bytes), block_bytes=block_bytes)
        assert shard_bytes(out) == want


@pytest.mark.usefixtures("small_parts")
def test_long_texts_lose_nothing(tmp_path: Path, tokenizer: Path) -> None:
    """Parts of a long document, put in order again, are its text; lines without end and UTF-8 at the cuts included."""
    rng = random.Random(3)
    long = "".join(rng.choice(["é", "日本", "x", "word ", "\n" if rng.random() < 0.02 else "-"]) for _ in range(9000))
    (tmp_path / "long.txt").write_text(long)
    write_jsonl(tmp_path / "long.jsonl", [{"text": long}])
    for name in ("long.txt", "long.jsonl"):
        out = tmp_path / f"out-{name}"
        prepare(out, tmp_path / name, tokenizer=str(tokenizer), rules={"held_out": 0.0})
        loaded = load_tokenizer(tokenizer)
        parts = [loaded.decode(ids, skip_special_tokens=True) for ids in documents(out)]
        assert len(parts) > 5
        assert sum(map(len, parts)) == len(long)
        assert all(part in long for part in parts)
        assert sum(ids[-1] == 0 for ids in documents(out)) == 1, "one end of text"


def test_a_piece_ends_where_no_token_does(tokenizer: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    text = "\n".join(texts(2, 50))
    whole = loaded.encode(text).ids
    cut = [token for piece in pieces(text, 200) for token in loaded.encode(piece).ids]
    assert cut == whole


def test_killed_and_started_again(tmp_path: Path, tokenizer: Path) -> None:
    """SIGKILL at random moments; what was done is kept and the result is that of an unbroken run, byte for byte."""
    write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts(4, 2000, 300)])
    script = f"""
import sys, time
from pathlib import Path
from mula_ray.data import prepare as p
from mula_ray.data.inputs import *
from mula_ray.data.job import *
from dataclasses import replace
import mula_ray.data.inputs as i, mula_ray.data.readers as r
i.PART_BYTES = r.PART_BYTES = 1 << 14
s = PrepareSettings(sources=(Source({str(tmp_path / "in.jsonl")!r}),), tokenizer={str(tokenizer)!r},
                    shard_tokens=40_000, item_bytes=1 << 16, rules=InputRules(held_out=0.05))
with plan_job(Path(sys.argv[1]), s) as job:
    p.run_job(replace(job, block_bytes=1 << 14), p.run_here, lambda g: print(g.stage, g.done, flush=True))
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "whole")], check=True, capture_output=True)
    rng, out, kills = random.Random(8), tmp_path / "broken", 0
    began: list[int] = []
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", script, str(out)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        began.append(int(child.stdout.readline().split()[1]))
        time.sleep(rng.uniform(0.0, 0.15))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        kills += not (out / "manifest.json").exists()
    subprocess.run([sys.executable, "-c", script, str(out)], check=True, capture_output=True)
    assert kills > 1
    assert began == sorted(began), "later starts begin further on"
    assert shard_bytes(out) == shard_bytes(tmp_path / "whole")


def test_a_broken_run_keeps_its_work(tmp_path: Path, tokenizer: Path) -> None:
    settings = replace(settings_of(tmp_path, tokenizer), item_bytes=1024)
    run(tmp_path / "whole", settings)

    done: list[str] = []

    def stops_at(most: int) -> Any:
        def spread(job: Job, stage: str, tasks: Sequence[Any]) -> Iterator[Any]:
            for task in tasks:
                if len(done) == most:
                    raise ConnectionError("machine lost")
                done.append(stage)
                yield work(job, stage, task)

        return spread

    for most in (1, 3, 5, 7):
        with plan_job(tmp_path / "out", settings) as job, pytest.raises(ConnectionError):
            run_job(job, stops_at(most))
    assert not (tmp_path / "out" / "manifest.json").exists()
    with plan_job(tmp_path / "out", settings) as job:
        run_job(job, stops_at(10**9))
        assert done.count("tokenize") == len(job.items), "no item twice"
    assert shard_bytes(tmp_path / "out") == shard_bytes(tmp_path / "whole")
    assert already_done(tmp_path / "out", settings)


def test_other_input_or_settings_are_not_mixed_in(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts(1, 20)])
    settings = PrepareSettings(sources=(Source(str(source)),), tokenizer=str(tokenizer))
    begun, again = plan_job(tmp_path / "out", settings), plan_job(tmp_path / "out", settings)
    with begun, pytest.raises(UserError, match="another process"), again:
        pass
    with pytest.raises(UserError, match="unfinished preparation of other input"):
        run(tmp_path / "out", replace(settings, shard_tokens=99))
    run(tmp_path / "out", settings)
    with pytest.raises(UserError, match="already holds"):
        already_done(tmp_path / "out", replace(settings, rules=InputRules(seed=1)))
    write_jsonl(source, [{"text": "changed"}])
    with pytest.raises(UserError, match="already holds"):
        already_done(tmp_path / "out", settings)


def test_seed_moves_documents_and_loses_none(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts(1, 60)])
    for seed in (0, 1):
        rules = {"seed": seed, "held_out": 0.0}
        prepare(tmp_path / f"{seed}", source, tokenizer=str(tokenizer), rules=rules)
    first, second = documents(tmp_path / "0"), documents(tmp_path / "1")
    assert first != second
    assert sorted(first) == sorted(second)


def test_held_out_files_are_whole_files(tmp_path: Path, tokenizer: Path) -> None:
    members = texts(6, 40)
    folder = write_kind(tmp_path, "txt-folder", members, [])
    rules = {"held_out": 0.1}
    manifest = prepare(tmp_path / "out", folder, tokenizer=str(tokenizer), rules=rules, txt_documents="line")
    held = {tuple(ids) for ids in documents(tmp_path / "out", "held_out")}
    lines = [{tuple(ids) for ids in encoded(tokenizer, text.splitlines())} for text in members]
    chosen = [of for of in lines if of <= held]
    assert manifest.report["held_out_by"] == "file"
    assert len(chosen) >= 4
    assert set().union(*chosen) == held


def shares(folder: Path) -> dict[str, float]:
    """Part of the training tokens of documents whose first letter is a or b."""
    of = documents(folder)
    total = sum(map(len, of))
    return {letter: sum(len(ids) for ids in of if ids[0] == first) / total for letter, first in firsts(folder).items()}


def firsts(folder: Path) -> dict[str, int]:
    """Ids of the letters a and b."""
    loaded = load_tokenizer(folder / "tokenizer.json")
    return {letter: loaded.token_to_id(letter) for letter in "ab"}


@pytest.mark.parametrize(("weights", "repeat"), [((3.0, 1.0), 1.0), ((1.0, 3.0), 1.0), ((1.0, 4.0), 2.5)])
def test_mixture_meets_its_shares(tmp_path: Path, weights: tuple[float, float], repeat: float) -> None:
    rng = random.Random(1)
    for letter, number in (("a", 400), ("b", 700)):
        members = [letter + "".join(rng.choices("cdefgh ", k=rng.randint(5, 60))) for _ in range(number)]
        write_jsonl(tmp_path / f"{letter}.jsonl", [{"text": text} for text in members])
    (tmp_path / "tokenizer.json").write_text(train_bpe(["c"], 257).to_str())
    sources = [Source(str(tmp_path / f"{letter}.jsonl"), weight) for letter, weight in zip("ab", weights, strict=True)]
    bytewise = str(tmp_path / "tokenizer.json")
    manifest = prepare(tmp_path / "out", *sources, tokenizer=bytewise, max_repeat=repeat, rules={"held_out": 0.0})
    got = shares(tmp_path / "out")
    assert got["a"] == pytest.approx(weights[0] / sum(weights), abs=0.01)
    used = [source["copies"] + source["part_again"] for source in manifest.report["sources"]]
    assert max(used) == pytest.approx(repeat, abs=0.03), "the scarce source is used as often as allowed"
    copies = [tuple(ids) for ids in documents(tmp_path / "out") if ids[0] == firsts(tmp_path / "out")["b"]]
    assert len(copies) >= len(set(copies))


def test_tokenizers_are_not_mixed(tmp_path: Path, tokenizer: Path) -> None:
    other = make_tokenizer(tmp_path / "other.json", vocab=280)
    text = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts(1, 20)])
    tokens = write_parquet(tmp_path / "in.parquet", {"tokens": encoded(tokenizer, texts(2, 10))})
    with pytest.raises(UserError, match="must not be mixed"):
        prepare(tmp_path / "a", text, tokens, tokenizer=str(tokenizer))
    with pytest.raises(UserError, match="must not be mixed"):
        prepare(tmp_path / "b", text, tokens, tokenizer=str(tokenizer), tokens_tokenizer=str(other))
    with pytest.raises(UserError, match="must not be mixed"):
        prepare(tmp_path / "c", text, tokens, tokens_tokenizer=str(tokenizer))
    with pytest.raises(UserError, match="--vocab-size"):
        prepare(tmp_path / "d", tokens)
    prepare(tmp_path / "e", text, tokens, tokenizer=str(tokenizer), tokens_tokenizer=str(tokenizer))
    prepare(tmp_path / "f", text, tokenizer=str(other), rules={"held_out": 0.0})
    with pytest.raises(UserError, match="must not be mixed"):
        prepare(tmp_path / "g", tmp_path / "e", tmp_path / "f")
    again = prepare(tmp_path / "h", tmp_path / "e")
    assert sorted(documents(tmp_path / "h")) == sorted(documents(tmp_path / "e"))
    assert again.tokenizer_sha256 == read_manifest(tmp_path / "e").tokenizer_sha256


def test_the_command_line(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in texts(1, 50)])
    from typer.testing import CliRunner

    from mula_ray.cli.data import app

    def call(*words: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)
        code = result.return_value if isinstance(result.return_value, int) else result.exit_code
        return code, result.output

    out = tmp_path / "out"
    command = ("prepare", tmp_path / "in.jsonl", "--out", out, "--tokenizer", tokenizer, "--engine", "local")
    code, said = call(*command)
    assert code == 0
    assert "ready: data.path" in said
    assert "finished already" in call(*command)[1]
    code, said = call("inspect", out)
    assert code == 0
    assert "length percentiles" in said
    facts = json.loads(call("inspect", out, "--json")[1])
    assert facts["splits"][0]["documents"] + facts["splits"][1]["documents"] == 50
    assert call("verify", out)[0] == 0
    shard = out / "train-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-9])
    code, said = call("verify", out)
    assert code == 20
    assert "truncated" in said


@pytest.mark.ray
def test_ray_gives_the_same_bytes_and_keeps_work_when_killed(tmp_path: Path, tokenizer: Path) -> None:
    """The pipeline with two workers: killed once in the middle, started again, equal to the run without Ray."""
    (tmp_path / "in").mkdir()
    for number in range(4):
        write_jsonl(tmp_path / "in" / f"{number}.jsonl", [{"text": text} for text in texts(number, 800, 300)])
    command = [sys.executable, "-m", "mula_ray", "data", "prepare", str(tmp_path / "in"), "--tokenizer", str(tokenizer)]
    command += ["--shard-tokens", "50000", "--held-out", "0.05"]
    local = subprocess.run([*command, "--out", tmp_path / "local", "--engine", "local"], capture_output=True, text=True)
    assert local.returncode == 0, local.stderr
    spread = [*command, "--out", str(tmp_path / "ray"), "--engine", "ray", "--workers", "2"]
    child = subprocess.Popen(spread, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list((tmp_path / "ray").rglob("block-*.arrow")) and child.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    child.kill()
    child.wait()
    done = subprocess.run(spread, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "ready: data.path" in done.stdout
    assert all(line.startswith(("tokenize: ", "shuffle: ")) for line in done.stderr.splitlines()), done.stderr
    assert shard_bytes(tmp_path / "ray") == shard_bytes(tmp_path / "local")
