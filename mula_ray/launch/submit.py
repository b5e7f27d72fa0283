"""Job scripts for PBS and Slurm, from the templates in `cluster/`, and handing them in. Rendering is pure.

A chain is a row of jobs, each waiting for the end of the one before (afterany). A later job goes on only if its
predecessor ended with exit 10 (stopped early on purpose, resumable), and always resumes: it never starts fresh and
never repeats a run that cannot go on.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mula_ray.config.environment import ray_block
from mula_ray.config.errors import UserError
from mula_ray.config.shipped import shipped_folder
from mula_ray.config.site import SiteConfig

TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")  # `launch` sets them, with the token file it makes
BRING_UP_S = 60.0


@dataclass(frozen=True)
class Job:
    """What is asked of the batch system. Times in seconds; `margin_s` is kept free before the end of the walltime."""

    config: str
    name: str
    run_dir: Path
    project: Path
    account: str
    nodes: int
    spares: int
    walltime_s: int
    margin_s: int
    queue: str
    sets: tuple[str, ...] = ()
    venv: Path | None = None
    chain: int = 1
    workarounds: bool = False


def default_spares(site: SiteConfig, nodes: int) -> int:
    """Spare nodes of an allocation: max(a few, a percentage), from the site file."""
    scheduler = site.scheduler
    return max(scheduler.spares_min, math.ceil(nodes * scheduler.spares_percent / 100))


def allocation(site: SiteConfig, nodes: int, spares: int) -> int:
    """Nodes to ask for: working, spare, and the head's own where it has no ranks."""
    return nodes + spares + (1 if site.launch.head == "dedicated" else 0)


def choose_queue(site: SiteConfig, nodes: int, walltime_s: int, wanted: str | None) -> str:
    """The queue `wanted`, checked, or the first that takes this many nodes for this long.

    Raises:
        UserError: none fits; names each queue's bounds.
    """
    queues = site.scheduler.queues
    if not queues and wanted is None:
        raise UserError(f"site {site.name} has no batch system; use mula-ray launch or mula-ray train there")
    hours = walltime_s / 3600
    bounds = "; ".join(f"{q.name}: {q.min_nodes}-{q.max_nodes} nodes, at most {q.max_hours:g} h" for q in queues)
    if wanted is not None and wanted not in [q.name for q in queues]:
        return wanted  # a queue that the site file does not know, such as a reservation
    for queue in queues:
        if wanted in (None, queue.name) and queue.min_nodes <= nodes <= queue.max_nodes and hours <= queue.max_hours:
            return queue.name
    which = f"queue {wanted}" if wanted else "no queue of this site"
    raise UserError(
        f"{which} takes {nodes} nodes (spares included) for {hours:g} h; {bounds}; change --nodes, --spares or "
        "--walltime, or split the work with --chain"
    )


def margin(checkpoint_s: float, site: SiteConfig) -> int:
    """Seconds kept free before the walltime ends: two checkpoints, the shutdown, a minute."""
    return math.ceil(2 * checkpoint_s + site.launch.shutdown_s + 60)


def scripts(job: Job, site: SiteConfig) -> list[str]:
    """The text of each job of the chain.

    Raises:
        UserError: the site has no batch system, or the walltime leaves no time to train.
    """
    kind = site.scheduler.kind
    if kind == "none":
        raise UserError(f"site {site.name} has no batch system; use mula-ray launch or mula-ray train there")
    useful = job.walltime_s - job.margin_s - BRING_UP_S
    if useful <= 0:
        raise UserError(
            f"--walltime {job.walltime_s} s leaves no time to train: {job.margin_s} s are kept for two checkpoints and "
            f"the shutdown, about {BRING_UP_S:.0f} s go by before the first step; ask for at least "
            f"{job.margin_s + BRING_UP_S + 600:.0f} s"
        )
    template = (shipped_folder("cluster") / f"{kind}.sh").read_text(encoding="utf-8")
    return [_render(template, job, site, index) for index in range(1, job.chain + 1)]


def hand_in(job: Job, site: SiteConfig) -> list[str]:
    """Write the scripts into the run folder and submit them as a chain; returns the job ids.

    Raises:
        UserError: the batch system's command is missing or refuses a job.
    """
    command = {"pbs": "qsub", "slurm": "sbatch"}[site.scheduler.kind]
    texts = scripts(job, site)
    if shutil.which(command) is None:
        raise UserError(f"{command} is not on the PATH; run this on a login node, or add --dry-run to see the script")
    folder = job.run_dir / "submit"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ids: list[str] = []
    for index, text in enumerate(texts, start=1):
        script = folder / f"job-{index}.sh"
        script.write_text(text, encoding="utf-8")
        script.chmod(0o700)
        after = _after(site.scheduler.kind, ids[-1]) if ids else []
        done = subprocess.run([command, *after, str(script)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            earlier = f"; jobs {', '.join(ids)} of this chain are already in" if ids else ""
            raise UserError(f"{command} refused {script}: {done.stderr.strip() or done.stdout.strip()}{earlier}")
        ids.append(done.stdout.strip().split(";")[0])
    return ids


def _after(kind: str, job_id: str) -> list[str]:
    return ["-W", f"depend=afterany:{job_id}"] if kind == "pbs" else ["--parsable", f"--dependency=afterany:{job_id}"]


def _render(template: str, job: Job, site: SiteConfig, index: int) -> str:
    prefix = {"pbs": "#PBS", "slurm": "#SBATCH"}[site.scheduler.kind]
    extra = [f"{prefix} {line}" for line in site.scheduler.extra]
    if site.scheduler.filesystems:
        extra.insert(0, f"{prefix} -l filesystems={site.scheduler.filesystems}")
    hours, rest = divmod(job.walltime_s, 3600)
    values = {
        "JOB": job.name[:15],
        "ACCOUNT": job.account,
        "QUEUE": job.queue,
        "SELECT": str(allocation(site, job.nodes, job.spares)),
        "WALLTIME": f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}",
        "EXTRA": "\n".join(extra),
        "CONFIG": job.config,
        "NODES": str(job.nodes),
        "SPARES": str(job.spares),
        "SITE": site.name,
        "INDEX": str(index),
        "CHAIN": str(job.chain),
        "PROJECT": shlex.quote(str(job.project)),
        "MODULES": "\n".join(f"module load {shlex.quote(name)}" for name in site.environment.modules),
        "ACTIVATE": f". {shlex.quote(str(job.venv / 'bin' / 'activate'))}" if job.venv else "",
        "BODY": "\n".join(_body(job, site, index)),
    }
    for name, value in values.items():
        template = template.replace(f"@@{name}@@", value)
    kept: list[str] = []
    for line in template.splitlines():  # an empty value leaves no gap
        if line or (kept and kept[-1]):
            kept.append(line)
    return "\n".join(kept) + "\n"


def _body(job: Job, site: SiteConfig, index: int) -> Iterator[str]:
    job_id = {"pbs": "${PBS_JOBID%%.*}", "slurm": "$SLURM_JOB_ID"}[site.scheduler.kind]
    yield from _environment(site, job, job_id)
    yield ""
    yield f"run_dir={shlex.quote(str(job.run_dir))}"
    if index > 1:
        yield from _guard()
    yield ""
    yield "# The batch system gives no warning to rely on: stop by ourselves, in time for the last checkpoint."
    yield f"deadline=$((started + {job.walltime_s} - {job.margin_s}))"
    yield ""
    yield f"python -m mula_ray launch {shlex.quote(job.config)} \\"
    yield f"  --site {shlex.quote(site.name)} --job {_quoted(job_id)} \\"
    for item in (f"cluster.nodes={job.nodes}", f"cluster.spares={job.spares}", *job.sets):
        yield f"  --set {shlex.quote(item)} \\"
    if job.workarounds:
        yield "  --hang-workarounds \\"
    yield f'  --run-dir "$run_dir" --resume {"auto" if index == 1 else "must"} --deadline "$deadline" &'
    yield from _wait()


def _environment(site: SiteConfig, job: Job, job_id: str) -> Iterator[str]:
    nodes = allocation(site, job.nodes, job.spares)
    block = ray_block(site, nodes, temp_dir="", token_file=None)
    yield "ulimit -n 65535 || echo 'mula-ray: ulimit -n stays below 65535' >&2"
    yield "ulimit -s 8192 || echo 'mula-ray: ulimit -s stays below 8192' >&2"
    yield ""
    yield "# From the site file; `launch` applies the same block on every node."
    yield f"unset {' '.join(block.unset)}"
    for name, value in sorted(block.set.items()):
        if name not in (*TOKEN_VARIABLES, "TMPDIR"):
            yield f"export {name}={shlex.quote(value)}"
    yield "# short and of this job alone: socket paths over 107 bytes fail, and the batch system's TMPDIR is long"
    yield f'TMPDIR="{site.launch.temp_root}/mr-$(id -u)-{job_id}"'
    yield "export TMPDIR"
    yield '[ -O "$TMPDIR" ] || mkdir -m 700 "$TMPDIR"'
    yield "trap 'rm -rf \"$TMPDIR\"' EXIT"


def _quoted(job_id: str) -> str:
    return f'"{job_id}"'


def _guard() -> Iterator[str]:
    yield ""
    yield "# A chain goes on only after exit 10 (stopped early on purpose, resumable)."
    yield "read_code='import json, sys; print(json.load(open(sys.argv[1]))[\"code\"])'"
    yield 'previous=$(python -c "$read_code" "$run_dir/exit.json" || echo none)'
    yield 'if [ "$previous" != 10 ]; then'
    yield '  echo "mula-ray: the job before ended with $previous, not 10: this chain ends here" >&2'
    yield '  case "$previous" in none) exit 30 ;; *) exit "$previous" ;; esac'
    yield "fi"


def _wait() -> Iterator[str]:
    yield "child=$!"
    yield ""
    yield "# SIGTERM goes on to `launch` (one agreed save), and its real exit code is this job's."
    yield "signalled=0"
    yield "trap 'signalled=1; kill -TERM \"$child\" 2>/dev/null || true' TERM INT"
    yield "while :; do"
    yield "  code=0"
    yield '  wait "$child" || code=$?'
    yield '  if [ "$signalled" -eq 0 ]; then break; fi'
    yield "  signalled=0"
    yield "done"
    yield 'exit "$code"'
