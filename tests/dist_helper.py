"""The one way in which tests start ranks: see `mula_ray.bench.ranks`."""

from mula_ray.bench.ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "run_ranks"]
