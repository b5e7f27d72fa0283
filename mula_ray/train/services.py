"""Metric sinks on request: TensorBoard, Weights & Biases. Each needs its extra installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mula_ray.config.errors import UserError
from mula_ray.train.sinks import JsonlSink, MetricSink, Record, Sinks


def _scalars(record: Record) -> dict[str, float]:
    skipped = ("step", "generation", "finite")
    return {
        name: float(value)
        for name, value in record.to_json().items()
        if isinstance(value, int | float) and name not in skipped
    }


class TensorBoardSink:
    """Scalars for TensorBoard (`pip install 'mula-ray[tensorboard]'`)."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """One point a scalar."""
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


class WandbSink:
    """Scalars for Weights & Biases (`pip install 'mula-ray[wandb]'`); a resumed run continues under the same id."""

    def __init__(self, folder: Path, run_id: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        self._run: Any = wandb.init(
            project="mula-ray", id=run_id, name=run_id, dir=str(folder), config=dict(config), resume="allow"
        )

    def write(self, record: Record) -> None:
        """One point a scalar; `step` is a metric of its own, since a replay goes back and W&B's counter cannot."""
        self._run.log({**_scalars(record), "step": record.step})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()


def _missing(extra: str) -> UserError:
    return UserError(
        f"metrics.{extra} is true, but the package {extra} is not installed; "
        f"pip install 'mula-ray[{extra}]', or set metrics.{extra}: false"
    )


def open_sinks(
    run_dir: Path, run_id: str, config: Mapping[str, Any], *, tensorboard: bool = False, wandb: bool = False
) -> Sinks:
    """The sinks of a run folder: always `metrics.jsonl`, the others on request.

    Raises:
        UserError: a sink was asked for whose package is missing.
    """
    sinks: list[MetricSink] = [JsonlSink(run_dir / "metrics.jsonl")]
    if tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard"))
    if wandb:
        sinks.append(WandbSink(run_dir, run_id, config))
    return Sinks(sinks)
