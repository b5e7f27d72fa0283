"""Token shards: windows and document starts against a plain array, content hash, and every kind of damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from data_files import make_set
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.config.errors import UserError
from mula_ray.data.inspect import verify_folder
from mula_ray.data.shards import TokenSet, token_dtype


def stream(tokens: TokenSet) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, and the position at which each token's document starts."""
    values = np.concatenate([shard.values for _, shard in tokens.shards()]).astype(np.int64)
    lengths = np.concatenate([shard.lengths for _, shard in tokens.shards()])
    starts = np.cumsum(np.concatenate([[0], lengths[:-1]]))
    return values, np.repeat(starts, lengths)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=8), min_size=1, max_size=5), st.integers(1, 50))
def test_windows_are_slices_of_the_stream(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], context: int
) -> None:
    tokens = TokenSet.open(make_set(tmp_path_factory.mktemp("set"), lengths))
    values, starts = stream(tokens)
    assert tokens.tokens == values.size == sum(map(sum, lengths))
    count = tokens.count(context)
    assert count == max(0, (values.size - 1) // context)
    if not count:
        return
    order = np.random.default_rng(0).permutation(count)
    got, begun = tokens.windows(order, context), tokens.doc_starts(order, context)
    for row, index in enumerate(order):
        at = index * context
        assert np.array_equal(got[row], values[at : at + context + 1])
        assert np.array_equal(begun[row], np.maximum(starts[at : at + context] - at, 0))


def test_content_hash_knows_content_and_not_place(tmp_path: Path) -> None:
    first = make_set(tmp_path / "a", [[30, 50], [20]])
    shutil.copytree(first, tmp_path / "elsewhere")
    assert TokenSet.open(tmp_path / "elsewhere").content_hash == TokenSet.open(first).content_hash
    other = make_set(tmp_path / "b", [[30, 51], [20]])
    boundary = make_set(tmp_path / "c", [[31, 49], [20]])
    assert len({TokenSet.open(path).content_hash for path in (first, other, boundary)}) == 3


def test_offsets_are_64_bit(tmp_path: Path) -> None:
    folder = make_set(tmp_path, [[10, 20]])
    schema = pa.ipc.open_file(pa.memory_map(str(folder / "train-00000.arrow"))).schema
    assert schema.field("tokens").type == pa.large_list(pa.uint16())
    assert token_dtype(1 << 16) == np.uint16
    assert token_dtype((1 << 16) + 1) == np.uint32


def damage(folder: Path, kind: str) -> None:
    """Break a data folder in one way."""
    shard = folder / "train-00001.arrow"
    if kind == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif kind == "missing":
        shard.unlink()
    elif kind == "empty":
        shard.write_bytes(b"")
    elif kind == "garbage":
        shard.write_bytes(b"x" * shard.stat().st_size)
    elif kind == "no-manifest":
        (folder / "manifest.json").unlink()
    elif kind == "edited-manifest":
        path = folder / "manifest.json"
        raw = json.loads(path.read_text())
        raw["splits"]["train"][0]["sha256"] = "0" * 64
        path.write_text(json.dumps(raw))
    elif kind == "half-manifest":
        path = folder / "manifest.json"
        path.write_text(path.read_text()[:200])
    elif kind == "no-folder":
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "kind", ["truncated", "missing", "empty", "garbage", "no-manifest", "edited-manifest", "half-manifest", "no-folder"]
)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    folder = make_set(tmp_path / "set", [[100, 200], [300]])
    damage(folder, kind)
    with pytest.raises(UserError) as caught:
        TokenSet.open(folder).check()
    assert str(folder) in str(caught.value)
    assert "prepare" in str(caught.value)


def flip(folder: Path, values: np.ndarray) -> None:
    """Write other token ids straight into a shard's file, framing and size unchanged."""
    path = folder / "train-00000.arrow"
    raw = bytearray(path.read_bytes())
    stored = TokenSet.open(folder)
    old = next(stored.shards())[1].values.tobytes()
    at = bytes(raw).index(old)
    raw[at : at + len(old)] = values.astype(np.uint16).tobytes()
    path.write_bytes(bytes(raw))


def test_an_id_outside_the_vocabulary_is_refused_where_it_is_read(tmp_path: Path) -> None:
    folder = make_set(tmp_path, [[100]], vocab=50)
    values = np.zeros(100)
    values[77] = 50
    flip(folder, values)
    tokens = TokenSet.open(folder)
    tokens.check()  # the manifest knows nothing of it
    tokens.windows(np.array([0, 1]), 10)
    with pytest.raises(UserError, match="token id 50"):
        tokens.windows(np.array([0, 7]), 10)
    problems = [checked.problem for checked in verify_folder(folder) if checked.problem]
    assert len(problems) == 1
    assert "token id 50" in problems[0]


def test_verify_finds_one_changed_id(tmp_path: Path) -> None:
    folder = make_set(tmp_path, [[100], [50]])
    assert not any(checked.problem for checked in verify_folder(folder))
    values = next(TokenSet.open(folder).shards())[1].values.copy()
    values[3] ^= 1
    flip(folder, values)
    problems = [checked for checked in verify_folder(folder) if checked.problem]
    assert [checked.what for checked in problems] == ["train-00000.arrow"]
    assert "checksum" in problems[0].problem
