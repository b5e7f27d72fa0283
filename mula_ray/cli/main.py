"""The command line: one small file a verb, nothing heavy imported before the verb runs.

    mula-ray train mula-tiny
    python -m mula_ray plan mula-220b-a10b --tiles 3072 --site aurora

`main` is the one place that turns exceptions into messages and exit codes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from mula_ray.cli import bench, ckpt, data, doctor, eval, launch, plan, report, status, submit, train
from mula_ray.config.errors import MulaError, UserError

INTERNAL, USAGE, INTERRUPTED = 1, UserError.exit_code, 130

app = typer.Typer(
    name="mula-ray",
    help="Elastic pre-training of Mixture-of-Experts language models on Ray.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train.train)
app.command()(plan.plan)
app.add_typer(data.app, name="data")
app.add_typer(ckpt.app, name="ckpt")
app.command("eval")(eval.evaluate)
app.command()(bench.bench)
app.command()(status.status)
app.command()(report.report)
app.command()(doctor.doctor)
app.command()(submit.submit)
app.command()(launch.launch)


@dataclass
class Session:
    """What a verb tells `main`: where a traceback belongs."""

    run_dir: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (outer contract in docs/architecture.md)."""
    session = Session()
    try:
        result = app(args=argv, standalone_mode=False, obj=session, prog_name="mula-ray")
        return result if isinstance(result, int) else 0
    except MulaError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return _broken_pipe()
    except Exception as error:
        return _other(error, session)


def run() -> None:
    """Entry point of the `mula-ray` script."""
    sys.exit(main())


def _other(error: Exception, session: Session) -> int:
    """Exits and usage errors of the command line parser, else an internal error."""
    show = getattr(error, "format_message", None)
    if callable(show):  # a usage error: unknown option, missing argument, wrong type
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        _say(f"{show()}{hint}")
        return USAGE
    code = getattr(error, "exit_code", None)
    if isinstance(code, int):
        return code
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    path = _keep_traceback(session.run_dir)
    _say(f"internal error: {type(error).__name__}: {error}; the traceback is in {path}")
    return INTERNAL


def _keep_traceback(run_dir: Path | None) -> Path:
    """Write the current traceback into the run folder's `logs/`, or a temporary file when there is none."""
    text = traceback.format_exc()
    if run_dir is not None and run_dir.is_dir():
        with contextlib.suppress(OSError):
            logs = run_dir / "logs"
            logs.mkdir(exist_ok=True)
            path = logs / f"internal-error-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}.txt"
            path.write_text(text, encoding="utf-8")
            return path
    handle, name = tempfile.mkstemp(prefix="mula-ray-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(name)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"mula-ray: {text}", file=sys.stderr, flush=True)


def _broken_pipe() -> int:
    """The reader of our output went away (`| head`): no message, and no second error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
