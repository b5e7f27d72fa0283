"""The format: manifest round trip and self-check, CRC combination, overlap of pieces, and the printed document."""

from __future__ import annotations

import dataclasses
import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mula_ray.plan import crc
from mula_ray.plan.format import (
    BLOCK_BYTES,
    Facts,
    FileEntry,
    FormatError,
    Manifest,
    StoredPiece,
    render_doc,
    safetensors_header,
)
from mula_ray.plan.overlap import boxes, common_pieces, copy_overlap, coverage_problems, overlaps
from mula_ray.plan.pieces import Piece
from mula_ray.plan.scatter import merge, scatter, split


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_crc_of_a_concatenation(parts: list[bytes]) -> None:
    assert crc.combine_all((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(b"".join(parts))


@st.composite
def piece_pairs(draw: st.DrawFn) -> tuple[Piece, Piece]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))

    def piece() -> Piece:
        offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
        box = tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offset, strict=True))
        numel = int(np.prod(box))
        start = draw(st.integers(0, numel))
        return Piece("w", "master", "fp32", shape, offset, box, start, draw(st.integers(start, numel)))

    return piece(), piece()


def indices(piece: Piece) -> np.ndarray:
    whole = np.arange(np.prod(piece.global_shape)).reshape(piece.global_shape)
    box = whole[tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))]
    return box.reshape(-1)[piece.start : piece.stop]


@settings(max_examples=300, deadline=None)
@given(piece_pairs())
def test_overlaps_against_index_sets(pair: tuple[Piece, Piece]) -> None:
    src, dst = pair
    assert len(boxes(src)) <= 2 * len(src.shape)
    out = np.full(dst.numel, -1)
    for overlap in overlaps(src, dst):
        copy_overlap(overlap, indices(src), out)
        run = overlap.run()
        if run is not None:
            assert np.array_equal(indices(src)[run[0] :][: overlap.numel], indices(dst)[run[1] :][: overlap.numel])
        first, stop = overlap.src_range()
        assert 0 <= first < stop <= src.numel
    wanted = np.where(np.isin(indices(dst), indices(src)), indices(dst), -1)
    np.testing.assert_array_equal(out, wanted)
    fetched = np.concatenate([indices(p) for p in common_pieces(src, dst)] or [np.empty(0, int)])
    assert sorted(fetched) == sorted(wanted[wanted >= 0])


def test_an_empty_piece_overlaps_nothing() -> None:
    whole = Piece("w", "master", "fp32", (2,), (0,), (2,), 0, 2)
    assert not coverage_problems("w", (2,), [whole, dataclasses.replace(whole, start=1, stop=1)])


@settings(max_examples=200, deadline=None)
@given(piece_pairs())
def test_coverage_names_what_is_wrong(pair: tuple[Piece, Piece]) -> None:
    a, b = pair
    common = np.intersect1d(indices(a), indices(b)).size
    problems = coverage_problems("w", a.global_shape, [a, b])
    assert any("overlap" in p for p in problems) == (common > 0)
    if not common:
        lacking = np.prod(a.global_shape) - a.numel - b.numel
        assert any(f"{lacking} of" in p for p in problems) == (lacking > 0)
    outside = dataclasses.replace(a, offset=tuple(o + 9 for o in a.offset))
    assert "outside" in coverage_problems("w", a.global_shape, [outside])[0]


def manifest() -> Manifest:
    piece = Piece("w", "master", "fp32", (4, 3), (0, 0), (4, 3), 0, 12)
    data = np.arange(12, dtype=np.float32).tobytes()
    header = safetensors_header([piece])
    stored = StoredPiece(piece, len(header), zlib.crc32(data), (zlib.crc32(data),))
    entry = FileEntry(
        "f.safetensors", len(header) + 48, len(header), zlib.crc32(header), zlib.crc32(header + data), (stored,)
    )
    facts = Facts(3, 24, 2400, 1, "run", config={"lr": 1e-5, "näme": [1, None]}, rng={"seed": 2**63})
    return Manifest("full", facts, (entry,), "2026-01-01T00:00:00+00:00")


def test_manifest_round_trip_and_every_flipped_byte_is_noticed() -> None:
    data = manifest().dump()
    assert Manifest.load(data) == manifest()
    for at in range(0, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises(FormatError):
            Manifest.load(bytes(damaged))
    for cut in range(0, len(data), 7):
        with pytest.raises(FormatError):
            Manifest.load(data[:cut])


def test_a_later_version_is_refused_by_name() -> None:
    body = json.loads(manifest().dump())
    with pytest.raises(FormatError, match="version 2 is unknown"):
        Manifest.load(json.dumps({**body, "version": 2}).encode())
    with pytest.raises(FormatError, match="format is None"):
        Manifest.load(b'{"sha256": ""}')


def test_entry_whose_parts_do_not_add_up_is_refused() -> None:
    entry = manifest().files[0].to_json()
    changes = ({"size": 5}, {"crc32": 1}, {"header": 3}, {"name": "../x"}, {"name": "manifest.json"}, {"size": "5"})
    for change in changes:
        with pytest.raises(FormatError):
            FileEntry.from_json({**entry, **change})
    bad = {**entry, "pieces": [{**entry["pieces"][0], "blocks": [1, 2]}]}
    with pytest.raises(FormatError, match="block checksums"):
        FileEntry.from_json(bad)


def test_document_is_printed_from_the_module() -> None:
    path = Path(__file__).parents[2] / "docs" / "checkpoint_format.md"
    assert path.read_text() == render_doc(), "run: python -m mula_ray.plan.format > docs/checkpoint_format.md"


def box(name: str, start: int, stop: int, total: int) -> Piece:
    return Piece(name, "weight", "fp32", (total,), (0,), (total,), start, stop)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.lists(st.integers(1, 4000), min_size=1, max_size=6), st.randoms())
def test_scatter_gives_every_element_to_one_holder(
    nodes: int, per_node: int, sizes: list[int], rng: random.Random
) -> None:
    world = nodes * per_node
    held: list[list[Piece]] = [[] for _ in range(world)]
    for i, size in enumerate(sizes):
        for rank in rng.sample(range(world), rng.randint(1, world)):
            start = rng.randint(0, size - 1)
            held[rank].append(box(f"w{i}", start, rng.randint(start + 1, size), size))
    node_of = [rank // per_node for rank in range(world)]
    plan = scatter(held, node_of, 1 << 10)
    assert plan == scatter(held, node_of, 1 << 10)
    for i, _size in enumerate(sizes):
        wanted = {e for pieces in held for p in pieces if p.name == f"w{i}" for e in range(p.start, p.stop)}
        given_out = [e for pieces in plan for p in pieces if p.name == f"w{i}" for e in range(p.start, p.stop)]
        assert sorted(given_out) == sorted(wanted)
    for rank, pieces in enumerate(plan):
        for p in pieces:
            assert any(h.name == p.name and h.start <= p.start and p.stop <= h.stop for h in merge(held[rank]))


def test_scatter_spreads_replicas_equally_over_nodes() -> None:
    pieces = [box(f"w{i}", 0, size, size) for i, size in enumerate([100_000, 3_000, 70_001, 12, 12, 50_000])]
    plan = scatter([pieces] * 8, [rank // 2 for rank in range(8)], 16_384)
    node_bytes = [sum(p.nbytes for rank in (2 * n, 2 * n + 1) for p in plan[rank]) for n in range(4)]
    assert max(node_bytes) - min(node_bytes) <= 16_384
    assert sum(node_bytes) == sum(p.nbytes for p in pieces)


def test_split_and_merge_are_inverse() -> None:
    piece = box("w", 10, 5_000_000, 6_000_000)
    parts = split(piece, BLOCK_BYTES)
    assert all(part.nbytes <= BLOCK_BYTES + 4 for part in parts)
    assert merge(parts) == [piece]
