"""Job scripts: every rule of the Aurora notes that applies, one by one; shell-clean; chains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mula_ray.config.site import load_site
from mula_ray.launch.submit import allocation, choose_queue, default_spares
from tests.conftest import Cli

AURORA = ("mula-220b-a10b", "--site", "aurora", "--account", "Proj", "--walltime", "6:00:00")


def dry(cli: Cli, *args: object) -> str:
    result = cli("submit", *AURORA, "--nodes", 256, "--spares", "auto", "--dry-run", *args)
    assert result.code == 0, result.err
    return result.out


@pytest.fixture
def script(cli: Cli) -> str:
    return dry(cli, "--run-dir", "/lus/flare/projects/Proj/run")


RULES = {
    "login shell": r"\A#!/bin/bash --login\n",
    "account": r"^#PBS -A Proj$",
    "working and spare nodes: 256 + max(4, 2 %)": r"^#PBS -l select=262$",
    "scattered": r"^#PBS -l place=scatter$",
    "walltime": r"^#PBS -l walltime=06:00:00$",
    "file systems": r"^#PBS -l filesystems=home:flare$",
    "output kept while it runs": r"^#PBS -k doe$",
    "a queue that takes 262 nodes for 6 h": r"^#PBS -q prod$",
    "module": r"^module load frameworks/2025\.3\.1$",
    "files limit": r"^ulimit -n 65535\b",
    "stack limit": r"^ulimit -s 8192\b",
    "12 devices a node": r"^export ZE_FLAT_DEVICE_HIERARCHY=FLAT$",
    "no device selector for ray start": r"^unset .*\bONEAPI_DEVICE_SELECTOR\b",
    "no tile mask for ray start": r"^unset .*\bZE_AFFINITY_MASK\b",
    "Ray leaves the selector alone": r"^export RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR=1$",
    "Ray leaves the mask alone": r"^export RAY_EXPERIMENTAL_NOSET_ZE_AFFINITY_MASK=1$",
    "no empty selector in actors without GPUs": r"^export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0$",
    "no http proxy": r"^unset .*\bhttp_proxy\b",
    "no HTTPS proxy": r"^unset .*\bHTTPS_PROXY\b",
    "fast network around proxies": r"^export no_proxy=.*\.hsn\.cm\.aurora\.alcf\.anl\.gov",
    "and in capitals": r"^export NO_PROXY=.*\.hsn\.cm\.aurora\.alcf\.anl\.gov",
    "server threads": r"^export RAY_num_server_call_thread=4$",
    "worker server threads": r"^export RAY_core_worker_num_server_call_thread=1$",
    "grpc threads": r"^export RAY_num_grpc_internal_threads=1$",
    "worker grpc threads": r"^export RAY_worker_num_grpc_internal_threads=1$",
    "no task events": r"^export RAY_task_events_report_interval_ms=0$",
    "no metrics": r"^export RAY_enable_metrics_collection=0$",
    "tokenizer threads": r"^export TOKENIZERS_PARALLELISM=false$",
    "rayon threads": r"^export RAYON_NUM_THREADS=1$",
    "head threads at 256 nodes": r"^export RAY_gcs_server_num_threads=8$",
    "head patience at 256 nodes": r"^export RAY_gcs_server_request_timeout_seconds=60$",
    "connect attempts at 256 nodes": r"^export RAY_raylet_client_num_connect_attempts=20$",
    "patient health checks": r"^export RAY_health_check_failure_threshold=6$",
    "short temporary folder of the user and job": r'^TMPDIR="/tmp/mr-\$\(id -u\)-\$\{PBS_JOBID%%\.\*\}"$',
    "for the owner only": r'\|\| mkdir -m 700 "\$TMPDIR"$',
    "deadline from the walltime": r"^deadline=\$\(\(started \+ 21600 - \d+\)\)$",
    "the deadline is passed on": r'--deadline "\$deadline"',
    "the job number picks the ports": r'--job "\$\{PBS_JOBID%%\.\*\}"',
    "explicit run folder": r"^run_dir=/lus/flare/projects/Proj/run$",
    "working nodes": r"--set cluster\.nodes=256",
    "spare nodes": r"--set cluster\.spares=6",
    "signals are passed on": r"^trap 'signalled=1; kill -TERM",
    "real exit code": r'^exit "\$code"\Z',
    "launch, not ray symmetric-run": r"^python -m mula_ray launch ",
}


@pytest.mark.parametrize("rule", RULES)
def test_rule(script: str, rule: str) -> None:
    assert re.search(RULES[rule], script.rstrip("\n"), re.MULTILINE), script


def test_strict_mode_comes_after_modules_and_venv(cli: Cli) -> None:
    script = dry(cli, "--venv", "/venv")
    strict = script.index("set -euo pipefail")
    assert script.index("module load") < script.index(". /venv/bin/activate") < strict


def test_no_token_and_no_mpi_block_in_the_script(script: str) -> None:
    assert "RAY_AUTH" not in script
    assert "CCL_KVS_MODE" not in script


def test_deadline_leaves_two_checkpoints(script: str) -> None:
    from mula_ray.config.load import load
    from mula_ray.plan.estimate import checkpoint_seconds

    kept = int(re.search(r"deadline=\$\(\(started \+ 21600 - (\d+)\)\)", script).group(1))  # type: ignore[union-attr]
    assert kept >= 2 * checkpoint_seconds(load("mula-220b-a10b").config, load_site("aurora")) + 60


@pytest.mark.parametrize(
    ("site", "more"),
    [("aurora", ("--venv", "/a b/venv", "--hang-workarounds")), ("generic-pbs", ()), ("slurm", ("--chain", "2"))],
)
def test_scripts_are_clean(cli: Cli, tmp_path: Path, site: str, more: tuple[str, ...]) -> None:
    nodes = 256 if site == "aurora" else 4
    sets = (
        []
        if site == "aurora"
        else ["--set", "parallel.ep=1", "--set", f"cluster.tiles_per_node={load_site(site).node.tiles}"]
    )
    name = "mula-220b-a10b" if site == "aurora" else "mula-tiny"
    args = [name, "--site", site, "--account", "a", "--walltime", "2h", "--nodes", nodes, "--dry-run", *sets, *more]
    result = cli("submit", *args, "--run-dir", tmp_path / "a run", "--set", "data.path='a b'")
    assert result.code == 0, result.err
    for index, text in enumerate(re.split(r"^(?=#!)", result.out, flags=re.MULTILINE)[1:]):
        file = tmp_path / f"{index}.sh"
        file.write_text(text)
        subprocess.run(["bash", "-n", file], check=True)
        shellcheck = shutil.which("shellcheck")
        assert shellcheck, "the test extra brings shellcheck"
        done = subprocess.run([shellcheck, "-S", "style", "-e", "SC1091", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_slurm_script(cli: Cli) -> None:
    args = ("mula-tiny", "--site", "slurm", "--account", "a", "--walltime", "90m", "--nodes", 2)
    script = cli("submit", *args, "--set", "cluster.tiles_per_node=8", "--dry-run").out
    for line in ("--nodes=3", "--account=a", "--time=01:30:00", "--no-kill", "--partition=batch"):
        assert f"#SBATCH {line}" in script
    assert '--job "$SLURM_JOB_ID"' in script


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--walltime", "6:00:00", "--nodes", 128), "debug-scaling: 2-256 nodes, at most 1 h"),
        (("--walltime", "25:00:00"), "prod: 256-10624 nodes, at most 24 h"),
        (("--walltime", "0:03:00"), "leaves no time to train"),
        (("--walltime", "soon"), "not a duration"),
        (("--spares", "few"), "--spares 'few'"),
        (("--nodes", 257), "nearest legal cluster.nodes"),
        (("--queue", "debug"), "queue debug takes"),
    ],
)
def test_impossible_requests(cli: Cli, args: tuple[object, ...], part: str) -> None:
    base = [
        "mula-220b-a10b",
        "--site",
        "aurora",
        "--account",
        "P",
        "--walltime",
        "6:00:00",
        "--nodes",
        256,
        "--dry-run",
    ]
    result = cli("submit", *base, *args)
    assert result.code in (20,), result.out
    assert part in result.err


def test_local_has_no_batch_system(cli: Cli) -> None:
    result = cli("submit", "mula-tiny", "--site", "local", "--account", "x", "--walltime", "1h", "--dry-run")
    assert result.code == 20
    assert "no batch system" in result.err


def test_spares_and_queues() -> None:
    site = load_site("aurora")
    assert [default_spares(site, n) for n in (2, 200, 256, 1024)] == [4, 4, 6, 21]
    assert allocation(site, 256, 6) == 262
    assert choose_queue(site, 6, 3600, None) == "debug-scaling"
    assert choose_queue(site, 12, 100 * 3600, None) == "capacity"
    assert choose_queue(site, 1030, 6 * 3600, None) == "prod"
    assert choose_queue(site, 1030, 6 * 3600, "R1234") == "R1234"


# --- chains: the scripts run for real, with stand-ins for the batch system and for `launch` ---


def chain(cli: Cli, tmp_path: Path, jobs: int) -> tuple[list[Path], Path]:
    """Hand in a chain with a stand-in `qsub`; the scripts, and its log."""
    tools = tmp_path / "bin"
    tools.mkdir()
    log = tmp_path / "qsub.log"
    (tools / "qsub").write_text(f'#!/bin/bash\necho "$@" >> {log}\necho "$(wc -l < {log}).server"\n')
    # `python -m mula_ray launch …` is replaced, anything else runs
    (tools / "python").write_text(
        "#!/bin/bash\n"
        'if [ "$1" != -m ]; then exec python3 "$@"; fi\n'
        f'echo "$@" >> {tmp_path}/launch.log\n'
        f'code=$(cat {tmp_path}/next)\nprintf \'{{"code": %s}}\' "$code" > {tmp_path}/run/exit.json\nexit "$code"\n'
    )
    (tools / "module").write_text("#!/bin/bash\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    result = cli(
        "submit", *AURORA, "--nodes", 256, "--chain", jobs, "--run-dir", tmp_path / "run", "--project", tmp_path
    )
    assert result.code == 0, result.err
    return [tmp_path / "run" / "submit" / f"job-{i}.sh" for i in range(1, jobs + 1)], log


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])  # put back afterwards
    monkeypatch.setenv("PBS_JOBID", "123.server")


def run_job(script: Path) -> int:
    body = script.read_text().replace("#!/bin/bash --login", "#!/bin/bash")
    done = subprocess.run(["bash", "-c", body], capture_output=True, text=True, timeout=30)
    assert "unbound" not in done.stderr
    return done.returncode


def test_chain_waits_for_its_predecessor_and_continues_only_on_10(cli: Cli, tmp_path: Path) -> None:
    (first, second, third), log = chain(cli, tmp_path, 3)
    submitted = log.read_text().splitlines()
    assert submitted[0] == str(first)
    assert submitted[1] == f"-W depend=afterany:1.server {second}"
    assert submitted[2] == f"-W depend=afterany:2.server {third}"
    (tmp_path / "next").write_text("10")
    assert run_job(first) == 10
    assert run_job(second) == 10
    launched = (tmp_path / "launch.log").read_text().splitlines()
    assert "--resume auto" in launched[0]
    assert "--resume must" in launched[1]
    (tmp_path / "next").write_text("30")
    assert run_job(third) == 30


@pytest.mark.parametrize("code", [0, 1, 20, 30, 40, 130])
def test_chain_ends_after_any_other_code(cli: Cli, tmp_path: Path, code: int) -> None:
    (first, second), _ = chain(cli, tmp_path, 2)
    (tmp_path / "next").write_text(str(code))
    assert run_job(first) == code
    (tmp_path / "next").write_text("0")
    assert run_job(second) == code
    assert len((tmp_path / "launch.log").read_text().splitlines()) == 1


def test_chain_ends_when_the_job_before_was_killed(cli: Cli, tmp_path: Path) -> None:
    (_, second), _ = chain(cli, tmp_path, 2)
    (tmp_path / "next").write_text("0")
    assert run_job(second) == 30
    assert not (tmp_path / "launch.log").exists()


def test_a_refused_job_says_what_is_already_in(cli: Cli, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "qsub").write_text(
        f'#!/bin/bash\nif [ -e {tmp_path}/once ]; then echo "no allocation" >&2; exit 1; fi\n'
        f"touch {tmp_path}/once; echo 7.server\n"
    )
    (tools / "qsub").chmod(0o755)
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    result = cli("submit", *AURORA, "--nodes", 256, "--chain", 2, "--run-dir", tmp_path / "run")
    assert result.code == 20
    assert "no allocation" in result.err
    assert "7.server" in result.err


def test_without_qsub(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    result = cli("submit", *AURORA, "--nodes", 256, "--run-dir", tmp_path / "run")
    assert result.code == 20
    assert "qsub is not on the PATH" in result.err
    assert not (tmp_path / "run").exists()
