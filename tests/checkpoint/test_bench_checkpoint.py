"""`bench checkpoint` gives the rows of the outer contract (small state: the figures mean nothing here)."""

from __future__ import annotations

from pathlib import Path

from mula_ray.bench import checkpoint


def test_rows(tmp_path: Path) -> None:
    result = checkpoint.run(folder=tmp_path, nbytes=3 << 20, repeats=2)
    assert result["bench"] == "checkpoint"
    pairs = {(row["case"], row["against"]) for row in result["rows"]}
    assert {("stall", "sync"), ("stall", "dcp-async"), ("write", "raw-write"), ("load-cold", "raw-read")} <= pairs
    for row in result["rows"]:
        assert set(row) == {"case", "metric", "value", "unit", "against", "speedup"}
        assert row["value"] > 0
    assert list(tmp_path.iterdir()) == []
