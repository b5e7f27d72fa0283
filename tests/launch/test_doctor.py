"""Doctor: each check has a test that provokes its finding; a well machine has none."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mula_ray.config.load import load
from mula_ray.config.site import SiteConfig, load_site
from mula_ray.launch.doctor import measure
from mula_ray.launch.doctor.checks import Finding, Needs, judge, judge_cluster
from mula_ray.launch.doctor.facts import Facts, Storage, gather, measure_storage
from mula_ray.launch.doctor.run import quick
from tests.conftest import Cli

WELL = Facts(
    host="n1",
    address="10.0.0.1",
    machine="m1",
    time=1000.0,
    python="3.12.1",
    versions={"torch": "2.13.0+cpu", "ray": "2.60.0", "pydantic": "2.14.4", "numpy": "2.1"},
    variables={},
    device="xpu",
    devices=12,
    nofile=1048576,
    stack=-1,
    memory=900 << 30,
    tmp_free=100 << 30,
    shm_free=100 << 30,
    socket_length=90,
    interfaces=("lo", "hsn0"),
    fast_name="n1.hsn.cm.aurora.alcf.anl.gov",
    fast_address="10.0.0.1",
    storage=Storage("/run", 1 << 40, 900.0, 1.0),
    gemm_tflops={"0": 200.0, "1": 201.0},
    collectives={"all_reduce": 0.1},
)


@pytest.fixture
def aurora() -> SiteConfig:
    return load_site("aurora")


def found(site: SiteConfig, needs: Needs | None = None, **changes: Any) -> list[Finding]:
    return judge(replace(WELL, **changes), site, needs or Needs(distributed=True))


def test_retired_packages_of_another_torch_are_named(aurora: SiteConfig) -> None:
    (finding,) = found(aurora, versions={**WELL.versions, "intel-extension-for-pytorch": "2.8.0"})
    assert finding.level == "warning"
    assert "intel-extension-for-pytorch 2.8.0 does not belong to torch 2.13.0+cpu" in finding.line()
    assert found(aurora, versions={**WELL.versions, "intel-extension-for-pytorch": "2.13.0"}) == []


def test_a_well_machine_has_no_findings(aurora: SiteConfig) -> None:
    assert found(aurora) == []
    assert judge_cluster([WELL, replace(WELL, host="n2", address="10.0.0.2", machine="m2")], {"n2": 0.01}, []) == []


PROVOKED: list[tuple[str, str, dict[str, Any], str]] = [
    ("python", "error", {"python": "3.10.4"}, "python3.11"),
    ("versions", "error", {"versions": {"torch": "2.5.1"}}, 'pip install "torch>=2.8,<2.14"'),
    ("versions", "error", {"versions": {"ray": "2.40.0"}}, 'pip install "ray>=2.52,<3.0"'),
    ("versions", "error", {"versions": {"tokenizers": None}}, "pip install tokenizers"),
    ("devices", "error", {"devices": 6}, "ZE_FLAT_DEVICE_HIERARCHY=FLAT"),
    ("devices", "error", {"devices": 0}, "driver and module"),
    (
        "hierarchy",
        "warning",
        {"variables": {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}},
        "export ZE_FLAT_DEVICE_HIERARCHY=FLAT",
    ),
    ("selector", "warning", {"variables": {"ONEAPI_DEVICE_SELECTOR": "opencl:gpu"}}, "unset ONEAPI_DEVICE_SELECTOR"),
    ("selector", "warning", {"variables": {"ZE_AFFINITY_MASK": "0"}}, "unset ZE_AFFINITY_MASK"),
    ("sockets", "error", {"socket_length": 120}, "launch.temp_root"),
    ("files", "warning", {"nofile": 1024}, "ulimit -n 65535"),
    ("stack", "warning", {"stack": 1 << 20}, "ulimit -s 8192"),
    ("interface", "error", {"interfaces": ("lo", "eth0")}, "network.interface"),
    ("hsn", "error", {"fast_address": None}, "network.host_suffix"),
    ("proxies", "warning", {"variables": {"https_proxy": "http://p:3128"}}, "no_proxy"),
    ("ports", "error", {"busy_ports": (20000, 20001)}, "--job"),
    ("memory", "warning", {"memory": 1 << 30}, "fewer tiles"),
    ("tmp", "warning", {"tmp_free": 1 << 20}, "clean /tmp"),
    ("shm", "warning", {"shm_free": 1 << 20}, "/dev/shm"),
    ("storage", "error", {"storage": Storage("/run", 1 << 40, error="Read-only file system")}, "--run-dir"),
    ("space", "error", {"storage": Storage("/run", 1 << 20)}, "--run-dir"),
    ("write speed", "warning", {"storage": Storage("/run", 1 << 40, 3.0, 1.0)}, "faster file system"),
    ("fsync", "warning", {"storage": Storage("/run", 1 << 40, 900.0, 2000.0)}, "save less often"),
    ("collectives", "error", {"collectives": {"all_to_all": "no end within 60 s"}}, "network.interface"),
    ("gemm", "error", {"gemm_error": "tile 3: device lost"}, "driver"),
    ("token", "error", {"token_modes": {"/run/token": 0o644}}, "chmod 600"),
    ("auth mode", "warning", {"user_token": True}, "export RAY_AUTH_MODE"),
]


@pytest.mark.parametrize(("check", "level", "changes", "fix"), PROVOKED, ids=lambda value: str(value)[:40])
def test_each_check_is_provoked(aurora: SiteConfig, check: str, level: str, changes: dict[str, Any], fix: str) -> None:
    findings = found(aurora, Needs(memory=8 << 30, storage=1 << 30, distributed=True), **changes)
    (finding,) = findings
    assert (finding.check, finding.level, finding.host) == (check, level, "n1")
    assert fix in finding.fix
    assert finding.message in finding.line()


def test_proxies_are_fine_when_the_fast_network_goes_around_them(aurora: SiteConfig) -> None:
    variables = {"https_proxy": "p", "no_proxy": f"localhost,{aurora.network.host_suffix}"}
    assert found(aurora, variables=variables) == []


def test_network_does_not_matter_on_one_machine(aurora: SiteConfig) -> None:
    assert found(aurora, Needs(), variables={"https_proxy": "p"}, nofile=1024, busy_ports=(1,)) == []


OLDER = {"torch": "2.12.0", "ray": "2.60.0"}


def other(**changes: Any) -> Facts:
    return replace(WELL, **({"host": "n2", "address": "10.0.0.2", "machine": "m2"} | changes))


@pytest.mark.parametrize(
    ("check", "nodes", "skews", "missing"),
    [
        ("reachable", [WELL], {}, ["10.0.0.9"]),
        ("distinct", [WELL, other(machine="m1")], {}, []),
        ("clock", [WELL, other()], {"n2": -7.0}, []),
        ("uneven", [WELL, other(), other(host="n3", machine="m3", address="10.0.0.3", versions=OLDER)], {}, []),
        ("slow tile", [WELL, other(gemm_tflops={"0": 199.0, "7": 120.0})], {}, []),
    ],
)  # fmt: skip
def test_what_shows_only_between_machines(
    check: str, nodes: list[Facts], skews: dict[str, float], missing: list[str]
) -> None:
    (finding,) = judge_cluster(nodes, skews, missing)
    assert finding.check == check
    assert finding.fix


def test_the_slow_tile_is_named() -> None:
    (finding,) = judge_cluster([WELL, other(gemm_tflops={"0": 199.0, "7": 120.0})], {}, [])
    assert finding.host == "n2"
    assert "tile 7" in finding.message


# --- the looks themselves ---


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "opencl:gpu")
    token = tmp_path / "token"
    token.write_text("x")
    token.chmod(0o640)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        facts = gather(load_site("local"), folder=tmp_path / "new" / "run", ports=[port], tokens=[token])
    assert facts.busy_ports == (port,)
    assert facts.token_modes == {str(token): 0o640}
    assert facts.variables["ONEAPI_DEVICE_SELECTOR"] == "opencl:gpu"
    assert facts.versions["torch"]
    assert facts.memory > 1 << 20
    assert facts.storage is not None
    assert facts.storage.write_mb_s
    assert list(tmp_path.iterdir()) == [token]
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    store = measure_storage(file / "run", write=True)
    assert store.error == "Not a directory"


def test_bare_collectives_and_their_bound() -> None:
    answer = measure.local_collectives(2)
    assert set(answer) == {"connect", *measure.COLLECTIVES}
    assert all(isinstance(value, float) for value in answer.values()), answer


def test_a_rank_that_never_comes_is_found_within_the_bound() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lonely = measure.start_rank("127.0.0.1", port, 0, 2, 60.0)  # nobody else is started
    answer = measure.finish_rank(lonely, 2.0)
    assert answer == {"connect": "no end within 2 s"}
    assert lonely.poll() is not None


def test_merge_keeps_failures_and_the_slowest() -> None:
    assert measure.merge([{"a": 1.0, "b": 2.0}, {"a": 3.0, "b": "broken"}]) == {"a": 3.0, "b": "broken"}


def test_matrix_products_of_tiles() -> None:
    speeds, error = measure.gemm_of_tiles("cpu", 1, "")
    assert error == ""
    assert speeds["0"] > 0
    assert "tile 0" in measure.gemm_of_tiles("nonsense", 1, "")[1]


# --- the verb, and the quick part of `train` ---


def test_doctor_prints_findings_and_exits_20(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "local_collectives", lambda: {"all_reduce": "no end within 60 s"})
    monkeypatch.setattr(measure, "gemm_of_tiles", lambda *_: ({"0": 1.0}, ""))
    result = cli("doctor", "--run-dir", tmp_path)
    assert result.code == 20
    assert "all_reduce failed" in result.out
    data = json.loads(cli("doctor", "--run-dir", tmp_path, "--json").out)
    assert data["ok"] is False
    assert data["findings"][0]["fix"]
    assert data["nodes"][0]["versions"]["torch"]


def test_doctor_without_findings(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "local_collectives", lambda: {"all_reduce": 0.1})
    monkeypatch.setattr(measure, "gemm_of_tiles", lambda *_: ({"0": 1.0}, ""))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    result = cli("doctor", "--run-dir", tmp_path, "--json")
    assert result.code == 0, result.out


def test_train_checks_for_space_first(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 1 << 20))
    result = cli("train", "mula-tiny", "--in-process", "--run-dir", tmp_path / "run")
    assert result.code == 20
    assert "the checkpoints need" in result.err
    assert not (tmp_path / "run").exists()


def test_quick_part_loads_no_torch(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from mula_ray.config.load import load;"
        "from mula_ray.config.site import load_site; from mula_ray.launch.doctor.run import quick;"
        "quick(load('mula-tiny').config, load_site('local'), Path(sys.argv[1]));"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=os.environ, timeout=60)


def test_quick_part_knows_what_a_model_needs(tmp_path: Path) -> None:
    config = load("mula-220b-a10b", ["cluster.kind=local"]).config
    checks = {finding.check for finding in quick(config, load_site("local"), tmp_path)}
    assert {"memory", "space"} <= checks
