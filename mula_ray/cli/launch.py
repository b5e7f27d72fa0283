"""`mula-ray launch`: a run inside an allocation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from mula_ray.cli.options import Config, Sets
from mula_ray.config.errors import UserError
from mula_ray.config.load import load
from mula_ray.config.request import default_run_dir
from mula_ray.config.site import load_site


def launch(
    ctx: typer.Context,
    config: Config,
    site: Annotated[str, typer.Option(help="site file: aurora, slurm, local, or a path")],
    run_dir: Annotated[
        Path | None, typer.Option(help="folder of the run, on a file system that all hosts share")
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="a,b or a=IP,b=IP; default: what the batch system says")] = None,
    hostfile: Annotated[Path | None, typer.Option(help="one host a line, the head first")] = None,
    method: Annotated[str | None, typer.Option(help="mpiexec, each or existing; default: the site's")] = None,
    address: Annotated[str | None, typer.Option(help="with --method existing: the running cluster")] = None,
    job: Annotated[str | None, typer.Option(help="job id, for ports and temporary folders")] = None,
    resume: Annotated[str, typer.Option(help="auto, must or never")] = "auto",
    deadline: Annotated[str | None, typer.Option(help="save and stop (exit 10) before this time")] = None,
    inject: Annotated[list[str] | None, typer.Option(help="rehearse a fault; needs --i-mean-it")] = None,
    i_mean_it: Annotated[bool, typer.Option("--i-mean-it")] = False,
    hang_workarounds: Annotated[
        bool, typer.Option("--hang-workarounds", help="the site's block against hangs")
    ] = False,
    job_server: Annotated[
        bool, typer.Option("--job-server", help="also Ray's dashboard, on loopback, for ray job submit")
    ] = False,
    sets: Sets = None,
) -> int:
    """Bring Ray up on all hosts of this allocation, train CONFIG on it, take it down; the exit code is the run's."""
    from mula_ray.launch import run as launcher
    from mula_ray.launch.hosts import find_hosts, job_number
    from mula_ray.plan.legal import legal_topology

    machine = load_site(site)
    loaded = load(config, sets or ())
    legal_topology(loaded.config)
    if inject and not i_mean_it:
        raise UserError(
            f"--inject {inject[0]} would break things on a cluster that is not local; add --i-mean-it if you do"
        )
    folder = (run_dir or default_run_dir(loaded.name)).absolute()
    train = [config, *(part for item in sets or () for part in ("--set", item))]
    for name, value in (("--deadline", deadline), *(("--inject", item) for item in inject or ())):
        train += [name, value] if value is not None else []
    train += ["--i-mean-it"] if i_mean_it else []
    train += ["--set", "cluster.hang_workarounds=true"] if hang_workarounds else []
    chosen = method or machine.launch.method
    if chosen == "existing":
        return launcher.on_existing(address, tuple(train), folder, resume)
    if chosen not in ("mpiexec", "each"):
        raise UserError(f"--method {chosen!r} must be one of mpiexec, each, existing")
    found = find_hosts(machine, hosts, hostfile, os.environ)
    wanted = loaded.config.cluster
    ctx.obj.run_dir = folder
    request = launcher.LaunchRequest(
        site=machine.model_copy(update={"launch": machine.launch.model_copy(update={"method": chosen})}),
        site_name=str(Path(site).absolute()) if Path(site).is_file() else site,
        hosts=tuple(found),
        run_dir=folder,
        resume=resume,
        train=tuple(train),
        nodes=wanted.nodes,
        spares=launcher.plan_hosts(machine, len(found), wanted.nodes, wanted.spares),
        tiles=wanted.tiles_per_node,
        job=job_number(job, os.environ),
        orphan_s=max(60.0, 2 * loaded.config.elastic.orphan_s),
        job_server=job_server,
    )
    return launcher.launch(request)
