"""`mula-ray launch`: a run inside an allocation, from host list to exit code.

Order: hosts → token → agents → all nodes in Ray (bounded) → driver → logs → the driver's real exit code. When the
head's Ray dies under the driver, everything is brought up again in the same allocation and the run resumes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mula_ray.config.environment import ray_block
from mula_ray.config.errors import UserError
from mula_ray.config.site import SiteConfig
from mula_ray.launch.bring_up import Cluster
from mula_ray.launch.hosts import Host
from mula_ray.launch.spec import AgentSpec, check_temp_root, make_token, ports_of, read_json

MAX_BRING_UPS = 3
RETRIED_CODES = (1, 30)


@dataclass(frozen=True)
class LaunchRequest:
    """One `mula-ray launch`. `train`: arguments of `mula-ray train` without --address, --run-dir, --resume."""

    site: SiteConfig
    site_name: str
    hosts: tuple[Host, ...]
    run_dir: Path
    resume: str
    train: tuple[str, ...]
    nodes: int
    spares: int
    tiles: int
    job: int
    orphan_s: float
    job_server: bool = False
    use_token: bool = True


def plan_hosts(site: SiteConfig, hosts: int, nodes: int, spares: int) -> int:
    """Spare nodes that `hosts` allow, at most what is there; checks that the working ones fit.

    Raises:
        UserError: fewer hosts than working nodes.
    """
    head = 1 if site.launch.head == "dedicated" else 0
    room = hosts - head
    if room < nodes:
        more = " and one for the head" if head else ""
        raise UserError(
            f"{hosts} hosts, but the run needs {nodes} working nodes{more}; ask for {nodes + spares + head} (spares "
            f"included) or set cluster.nodes={max(room, 1)}"
        )
    return room - nodes


def launch(request: LaunchRequest) -> int:
    """Bring up, run, take down; again while the head fails. Returns the run's exit code."""
    folder = request.run_dir / "launch"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    request.run_dir.chmod(0o700)
    stale = request.run_dir / "exit.json"
    stale.unlink(missing_ok=True)  # what a chain reads must be of this job
    check_temp_root(request.site.launch.temp_root, request.job, len(request.hosts))
    token = folder / "token"
    if request.use_token:
        make_token(token)
    try:
        for attempt in range(1, MAX_BRING_UPS + 1):
            code, head_failure = _once(request, folder / f"{int(time.time())}-{attempt}", token)
            if head_failure is None or code not in RETRIED_CODES or attempt == MAX_BRING_UPS:
                return _true_code(request.run_dir, code)
            _say(
                f"the head's Ray ended ({head_failure}); bringing everything up again, {attempt + 1} of {MAX_BRING_UPS}"
            )
    finally:
        token.unlink(missing_ok=True)
    raise AssertionError("unreachable")


def _once(request: LaunchRequest, folder: Path, token: Path) -> tuple[int, str | None]:
    spec = agent_spec(request, folder, token)
    cluster = Cluster(spec, request.site.launch)
    with cluster:
        missing = cluster.wait(request.nodes)
        for host in missing:
            _say(f"note: host {host.name} did not come; going on with one spare less")
        _say(f"Ray is up at {spec.address}: {len(spec.hosts) - len(missing)} hosts")
        resume = request.resume if folder.name.endswith("-1") else "auto"
        code = cluster.run(driver_command(request, spec.address, resume))
        failure = cluster.head_failed()
    return code, failure


def driver_command(request: LaunchRequest, address: str, resume: str) -> list[str]:
    """The `mula-ray train` that this launch runs."""
    return [
        *(sys.executable, "-m", "mula_ray", "train", *request.train),
        *("--address", address, "--run-dir", str(request.run_dir), "--resume", resume),
        *("--set", f"cluster.nodes={request.nodes}", "--set", f"cluster.spares={request.spares}"),
        *("--set", f"cluster.tiles_per_node={request.tiles}", "--set", f"cluster.kind={request.site_name}"),
    ]


def agent_spec(request: LaunchRequest, folder: Path, token: Path) -> AgentSpec:
    """What the agents of this bring-up are told."""
    site, hosts = request.site, request.hosts
    block = ray_block(
        site,
        len(hosts),
        temp_dir=site.launch.temp_root,
        token_file=str(token.absolute()) if request.use_token else None,
        hosts=[host.address for host in hosts],
    )
    # `ray job stop` sends SIGTERM, and SIGKILL three seconds later: too soon for a save
    patience = {"RAY_JOB_STOP_WAIT_TIME_S": str(round(site.launch.shutdown_s))} if request.job_server else {}
    return AgentSpec(
        folder=str(folder.absolute()),
        hosts=hosts,
        ports=ports_of(site.network, request.job),
        set={**block.set, **patience},
        unset=block.unset,
        temp_root=site.launch.temp_root,
        job=request.job,
        tiles=request.tiles,
        head_works=site.launch.head == "works",
        stagger_s=site.launch.stagger_s,
        bring_up_s=site.launch.bring_up_s,
        orphan_s=request.orphan_s,
        logs=str((request.run_dir / "logs" / "nodes").absolute()),
        job_server=request.job_server,
    )


def _true_code(run_dir: Path, code: int) -> int:
    """The code in `exit.json` where the driver left one; wrappers have reported 0 after a crash."""
    data = read_json(run_dir / "exit.json")
    true = data.get("code") if data else None
    return true if isinstance(true, int) and code in (0, 1) else code


def on_existing(address: str | None, train: tuple[str, ...], run_dir: Path, resume: str) -> int:
    """Method `existing`: somebody else's cluster; authentication is what this environment has.

    Raises:
        UserError: no address.
    """
    if address is None:
        raise UserError("--method existing needs --address HOST:PORT of the cluster that is up")
    command = [sys.executable, "-m", "mula_ray", "train", *train]
    command += ["--address", address, "--run-dir", str(run_dir), "--resume", resume]
    return _true_code(run_dir, subprocess.run(command, check=False).returncode)


def _say(text: str) -> None:
    print(f"mula-ray: {text}", file=sys.stderr, flush=True)
