"""A damaged checkpoint is passed over at a resume, and the run says so: file, tensor and kind of damage."""

from pathlib import Path

import pytest
from run_helper import Run

from mula_ray.checkpoint.scan import find_latest


@pytest.mark.timeout(200)
def test_a_resume_names_what_it_passed_over(tmp_path: Path) -> None:
    sets = ("checkpoint.every=2", "train.steps=6", "cluster.nodes=1")
    run = Run(tmp_path / "run", None, *sets, more=("--in-process",))
    assert run.wait() == 0, run.out
    assert run.folder.stat().st_mode & 0o77 == 0
    newest = find_latest(run.folder / "checkpoints")
    assert newest is not None
    assert newest.manifest.facts.step == 6
    entry = newest.manifest.files[0]
    data = bytearray((newest.path / entry.name).read_bytes())
    data[-3] ^= 1
    (newest.path / entry.name).write_bytes(data)
    again = Run(
        tmp_path / "run", None, *sets[:1], "train.steps=7", *sets[2:], more=("--in-process", "--resume", "must")
    )
    assert again.wait() == 0, again.out
    assert "resuming from checkpoint of step 4" in again.out
    (event,) = again.events("damaged")
    assert (event["damage"], event["file"]) == ("checksum", entry.name)
    assert event["tensor"] == entry.pieces[-1].piece.name
    assert f"passed over: checkpoint {newest.path} is damaged: {entry.name}, tensor {event['tensor']}" in again.out
