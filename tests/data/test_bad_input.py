"""Malformed input: each kind has one documented handling, is counted and reported; nothing is lost silently."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import documents, make_tokenizer, prepare, texts, write_jsonl, write_parquet

from mula_ray.config.errors import UserError
from mula_ray.data.manifest import DataManifest
from mula_ray.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tokenizer.json."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def make(tmp_path: Path, tokenizer: Path, source: Path, **more: Any) -> DataManifest:
    """Prepare one source, holding nothing out."""
    rules = {"held_out": 0.0} | more.pop("rules", {})
    return prepare(tmp_path / "out", source, tokenizer=str(tokenizer), rules=rules, **more)


def decoded(tmp_path: Path, tokenizer: Path) -> set[str]:
    """The texts of all documents."""
    loaded = load_tokenizer(tokenizer)
    return {loaded.decode(ids) for ids in documents(tmp_path / "out")}


def test_broken_utf8_is_replaced_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    good = json.dumps({"text": "fine"}).encode()
    surrogate = b'{"text": "lone \\ud800 here"}'
    (tmp_path / "in.jsonl").write_bytes(good + b"\n" + b'{"text": "bad \xff\xfe bytes"}\n' + surrogate + b"\n")
    report = make(tmp_path, tokenizer, tmp_path / "in.jsonl").report
    assert report["counts"]["broken_utf8"] == 2
    assert any("in.jsonl at byte" in example for example in report["examples"])
    assert decoded(tmp_path, tokenizer) == {"fine", "bad \ufffd\ufffd bytes", "lone \ufffd here"}


def test_broken_utf8_in_a_text_file(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfalpha \xc3 beta\n")
    assert make(tmp_path, tokenizer, tmp_path / "in.txt").report["counts"] == {"broken_utf8": 1}
    assert decoded(tmp_path, tokenizer) == {"alpha \ufffd beta\n"}


def test_odd_rows_are_counted_one_by_one(tmp_path: Path, tokenizer: Path) -> None:
    rows = [b'{"text": "kept"}', b"", b"   ", b'{"text": ""}', b'{"text": " \\n "}', b'{"text": null}']
    rows += [b'{"other": "x"}', b'["text"]', b"17", b'{"text": "cut off', b"not json"]
    rows += [b'{"text": ["a"]}', b'{"text": "also kept"}']
    (tmp_path / "in.jsonl").write_bytes(b"\r\n".join(rows))
    counts = make(tmp_path, tokenizer, tmp_path / "in.jsonl").report["counts"]
    assert counts == {"blank_lines": 2, "empty_documents": 2, "rows_without_text": 5, "broken_json": 2}
    assert decoded(tmp_path, tokenizer) == {"kept", "also kept"}


def test_nothing_but_empty_documents(tmp_path: Path, tokenizer: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"text": ""}] * 3)
    with pytest.raises(UserError, match="no training documents"):
        make(tmp_path, tokenizer, tmp_path / "in.jsonl")
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(UserError, match="no input files"):
        make(tmp_path, tokenizer, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no input files"):
        make(tmp_path, tokenizer, tmp_path / "empty")


def test_a_truncated_gzip_stops_or_is_kept_as_far_as_it_goes(tmp_path: Path, tokenizer: Path) -> None:
    members = texts(1, 400)
    whole = write_jsonl(tmp_path / "in.jsonl.gz", [{"text": text} for text in members]).read_bytes()
    (tmp_path / "in.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"in\.jsonl\.gz.*--on-broken skip"):
        make(tmp_path, tokenizer, tmp_path / "in.jsonl.gz")
    assert not (tmp_path / "out" / "manifest.json").exists()
    report = make(tmp_path, tokenizer, tmp_path / "in.jsonl.gz", on_broken="skip").report
    assert report["counts"]["broken_files"] == 1
    kept = decoded(tmp_path, tokenizer)
    assert 20 < len(kept) < len(members)
    assert kept <= set(members)


@pytest.mark.parametrize("damage", ["zst", "parquet", "npy", "not-gzip"])
def test_other_broken_files(tmp_path: Path, tokenizer: Path, damage: str) -> None:
    if damage == "zst":
        path = write_jsonl(tmp_path / "in.jsonl.zst", [{"text": text} for text in texts(1, 400)])
    elif damage == "parquet":
        path = write_parquet(tmp_path / "in.parquet", {"text": texts(1, 50)})
    elif damage == "npy":
        path = tmp_path / "in.npy"
        np.save(path, np.arange(100) % 300)
    else:
        path = tmp_path / "in.jsonl.gz"
        path.write_bytes(b"plain text " * 50)
    path.write_bytes(path.read_bytes()[:-60])
    write_jsonl(tmp_path / "good.jsonl", [{"text": "good"}])
    with pytest.raises(UserError, match="cannot be read") as caught:
        prepare(
            tmp_path / "out",
            path,
            tmp_path / "good.jsonl",
            tokenizer=str(tokenizer),
            tokens_tokenizer=str(tokenizer),
            rules={"held_out": 0.0},
        )
    assert path.name in str(caught.value)


def test_parquet_with_nulls_and_several_schemas(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["one", None, "two", "", "three"], "id": [1, 2, 3, 4, 5]})
    write_parquet(tmp_path / "in" / "b.parquet", {"extra": ["x"], "text": ["four"]})
    assert make(tmp_path, tokenizer, tmp_path / "in").report["counts"] == {"null_rows": 1, "empty_documents": 1}
    assert decoded(tmp_path, tokenizer) == {"one", "two", "three", "four"}


def test_parquet_without_the_column(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", {"text": ["one"]})
    write_parquet(tmp_path / "in" / "b.parquet", {"content": ["two"]})
    write_parquet(tmp_path / "in" / "c.parquet", {"text": [3]})
    with pytest.raises(UserError, match=r"2 input file.*columns content"):
        make(tmp_path, tokenizer, tmp_path / "in")
    report = make(tmp_path, tokenizer, tmp_path / "in", on_broken="skip").report
    assert report["counts"]["broken_files"] == 2
    assert decoded(tmp_path, tokenizer) == {"one"}


def test_duplicate_files_are_taken_once(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, text in (("a", "same text"), ("b", "same text"), ("c", "some text"), ("d.md", "ignored")):
        (tmp_path / "in" / (name if "." in name else f"{name}.txt")).write_text(text)
    report = make(tmp_path, tokenizer, tmp_path / "in").report
    assert report["counts"] == {"duplicate_files": 1, "ignored_files": 1}
    assert any("same bytes as" in example for example in report["examples"])
    assert len(documents(tmp_path / "out")) == 2
    prepare(tmp_path / "kept", tmp_path / "in", tokenizer=str(tokenizer), rules={"held_out": 0.0, "duplicates": "keep"})
    assert len(documents(tmp_path / "kept")) == 3


def test_ids_outside_the_vocabulary(tmp_path: Path, tokenizer: Path) -> None:
    path = write_parquet(tmp_path / "in.parquet", {"tokens": [[1, 2, 3], [5, 300], [4, -1], [7]]})
    with pytest.raises(UserError, match="outside the vocabulary of 300"):
        make(tmp_path, tokenizer, path)
    report = make(tmp_path, tokenizer, path, on_broken="skip").report
    assert report["counts"]["documents_of_foreign_ids"] == 2
    assert sorted(documents(tmp_path / "out")) == [[1, 2, 3, 0], [7, 0]]


def test_a_line_of_many_megabytes(tmp_path: Path, tokenizer: Path) -> None:
    """Held in one piece by nobody: cut into parts of 4 MB, each a document of its own."""
    line = "word " * 1_000_000
    with gzip.open(tmp_path / "in.jsonl.gz", "wt", compresslevel=1) as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ("before", line, "after"))
    report = make(tmp_path, tokenizer, tmp_path / "in.jsonl.gz").report
    assert report["counts"] == {"parts_of_long_documents": 1}
    loaded = load_tokenizer(tokenizer)
    parts = [loaded.decode(ids) for ids in documents(tmp_path / "out")]
    assert sum(map(len, parts)) == len(line) + len("before") + len("after")


def test_a_line_beyond_the_bound_is_left_out(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mula_ray.data.readers.MAX_LINE_BYTES", 1000)
    write_jsonl(tmp_path / "in.jsonl", [{"text": "before"}, {"text": "x" * 5000}, {"text": "after"}])
    assert make(tmp_path, tokenizer, tmp_path / "in.jsonl").report["counts"] == {"too_long_lines": 1}
    assert decoded(tmp_path, tokenizer) == {"before", "after"}


def test_a_full_disk_is_said(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mula_ray.config.errors import CannotContinue

    write_jsonl(tmp_path / "in.jsonl", [{"text": "some"}])

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("mula_ray.data.prepare.write_block", full)
    with pytest.raises(CannotContinue, match="no space left"):
        make(tmp_path, tokenizer, tmp_path / "in.jsonl")


def test_input_of_nothing_but_unreadable_files_says_what_each_lacks(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", {"body": ["a", "b"]})
    with pytest.raises(UserError, match=r"in\.parquet: has the columns body, but neither text"):
        prepare(tmp_path / "out", tmp_path / "in.parquet")


def test_input_without_text_trains_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(" \n")
    with pytest.raises(UserError, match="too little text, or none"):
        prepare(tmp_path / "out", tmp_path / "in.txt", train_vocab=300)
