"""`mula-ray train`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from mula_ray.cli.options import Config, Sets, parse_deadline, parse_span
from mula_ray.config.errors import UserError
from mula_ray.config.load import load
from mula_ray.config.request import Resume, TrainRequest, default_run_dir
from mula_ray.config.run import RunConfig


def train(
    ctx: typer.Context,
    config: Config,
    run_dir: Annotated[Path | None, typer.Option(help="folder of this run; default runs/<config>-<time>-<hex>")] = None,
    sets: Sets = None,
    resume: Annotated[str, typer.Option(help="auto: continue if there is a checkpoint; must; never")] = "auto",
    address: Annotated[
        str | None, typer.Option(help="a running Ray cluster (host:port or auto); default: local")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help="save and stop (exit 10) before: +15m, +6:00:00, ISO time, epoch seconds")
    ] = None,
    inject: Annotated[list[str] | None, typer.Option(help="rehearse a fault, e.g. kill-rank:1@step=20")] = None,
    i_mean_it: Annotated[
        bool, typer.Option("--i-mean-it", help="allow --inject on a cluster that is not local")
    ] = False,
    profile: Annotated[str | None, typer.Option(metavar="A:B", help="profile steps A to B-1")] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="one process, no Ray")] = False,
) -> int:
    """Train CONFIG on a local Ray cluster, or on a running one with --address."""
    loaded = load(config, sets or ())
    request = TrainRequest(
        loaded=loaded,
        run_dir=run_dir or default_run_dir(loaded.name),
        resume=_resume(resume),
        address=address,
        deadline=parse_deadline(deadline),
        inject=tuple(inject or ()),
        i_mean_it=i_mean_it,
        profile=parse_span(profile),
        in_process=in_process,
    )
    _check(loaded.config, request)
    _quick_doctor(loaded.config, request)
    ctx.obj.run_dir = request.run_dir
    if in_process:
        from mula_ray.runtime.inprocess import train as train_in_process

        return train_in_process(request)
    from mula_ray.runtime.driver import train as train_on_ray

    return train_on_ray(request)


def _resume(text: str) -> Resume:
    known: tuple[Resume, ...] = get_args(Resume)
    for mode in known:
        if mode == text:
            return mode
    raise UserError(f"--resume {text!r} must be one of {', '.join(known)}")


def _check(config: RunConfig, request: TrainRequest) -> None:
    """Refuse what cannot work before anything is started or written."""
    from mula_ray.plan.legal import legal_topology, single_process_topology, warnings

    topology = single_process_topology(config) if request.in_process else legal_topology(config)
    for line in warnings(config, topology):
        typer.echo(f"mula-ray: note: {line}", err=True)
    if request.in_process and request.address is not None:
        raise UserError("--in-process uses no Ray, so --address has no meaning with it; leave one of them out")
    not_local = request.address is not None or config.cluster.kind != "local"
    if request.inject and not_local and not request.in_process and not request.i_mean_it:
        raise UserError(
            f"--inject {request.inject[0]} would break things on a cluster that is not local; add --i-mean-it if you do"
        )


def _quick_doctor(config: RunConfig, request: TrainRequest) -> None:
    """The part of `mula-ray doctor` that takes milliseconds: errors end the run before it starts, warnings are said."""
    from mula_ray.config.site import load_site
    from mula_ray.launch.doctor.run import quick

    kind = config.cluster.kind
    findings = quick(config, load_site("local" if kind in ("local", "ray") else kind), request.run_dir)
    for finding in findings:
        if finding.level == "warning":
            typer.echo(f"mula-ray: {finding.line()}", err=True)
    errors = [finding.line() for finding in findings if finding.level == "error"]
    if errors:
        raise UserError("\n".join(errors))
