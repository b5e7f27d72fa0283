"""`mula-ray submit`: print or hand in the job script of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mula_ray.cli.options import Config, Sets, parse_duration
from mula_ray.config.errors import UserError
from mula_ray.config.load import load
from mula_ray.config.request import default_run_dir
from mula_ray.config.site import SiteConfig, load_site


def submit(
    config: Config,
    site: Annotated[str, typer.Option(help="site file: aurora, generic-pbs, slurm, or a path")],
    account: Annotated[str, typer.Option(help="project that pays")],
    walltime: Annotated[str, typer.Option(help="6:00:00, 90m or 6h")],
    nodes: Annotated[int | None, typer.Option(help="working nodes; default cluster.nodes")] = None,
    spares: Annotated[str, typer.Option(help="auto, or whole nodes on top of the working ones")] = "auto",
    queue: Annotated[str | None, typer.Option(help="default: the first that fits")] = None,
    chain: Annotated[int, typer.Option(min=1, help="jobs in a row; each continues only after exit 10")] = 1,
    run_dir: Annotated[Path | None, typer.Option(help="folder of the run, on the shared file system")] = None,
    project: Annotated[Path | None, typer.Option(help="folder to start in; default here")] = None,
    venv: Annotated[Path | None, typer.Option(help="virtual environment to activate after the modules")] = None,
    sets: Sets = None,
    hang_workarounds: Annotated[
        bool, typer.Option("--hang-workarounds", help="the site's block against hangs")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the script, hand nothing in")] = False,
) -> int:
    """Write the batch script of CONFIG for a site, and hand it in."""
    from mula_ray.launch import submit as jobs
    from mula_ray.plan.estimate import checkpoint_seconds
    from mula_ray.plan.legal import legal_topology

    machine = load_site(site)
    seconds = parse_duration(walltime)
    if seconds is None or seconds <= 0:
        raise UserError(f"--walltime {walltime!r} is not a duration; give 6:00:00, 90m or 6h")
    wanted = nodes if nodes is not None else load(config, sets or ()).config.cluster.nodes
    extra = _spares(spares, machine, wanted)
    loaded = load(config, [*(sets or ()), f"cluster.nodes={wanted}", f"cluster.spares={extra}"])
    legal_topology(loaded.config)
    total = jobs.allocation(machine, wanted, extra)
    folder = (run_dir or default_run_dir(loaded.name)).absolute()
    job = jobs.Job(
        config=str(Path(config).absolute()) if Path(config).is_file() else config,
        name=loaded.name,
        run_dir=folder,
        project=(project or Path.cwd()).absolute(),
        account=account,
        nodes=wanted,
        spares=extra,
        walltime_s=round(seconds),
        margin_s=jobs.margin(checkpoint_seconds(loaded.config, machine), machine),
        queue=jobs.choose_queue(machine, total, round(seconds), queue),
        sets=tuple(sets or ()),
        venv=venv.absolute() if venv else None,
        chain=chain,
        workarounds=hang_workarounds,
    )
    if dry_run:
        typer.echo("\n".join(jobs.scripts(job, machine)), nl=False)
        return 0
    for index, job_id in enumerate(jobs.hand_in(job, machine), start=1):
        typer.echo(f"job {index} of {chain}: {job_id}")
    typer.echo(f"run folder: {folder}")
    return 0


def _spares(text: str, site: SiteConfig, nodes: int) -> int:
    from mula_ray.launch.submit import default_spares

    if text == "auto":
        return default_spares(site, nodes)
    if not text.isdigit():
        raise UserError(f"--spares {text!r} must be auto or a number of whole nodes")
    return int(text)
