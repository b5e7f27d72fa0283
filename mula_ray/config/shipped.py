"""Find the configurations and site files that ship with the project, from a wheel as well as from the repository."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Literal

from mula_ray.config.errors import UserError

Kind = Literal["configs", "cluster"]


def shipped_folder(kind: Kind) -> Path:
    """Folder of the shipped files of `kind`: in the installed package, else in the repository the package lies in."""
    package = Path(str(resources.files("mula_ray")))
    installed = package / "shipped" / kind
    if installed.is_dir():
        return installed
    repository = package.parent
    if (repository / "pyproject.toml").is_file() and (repository / kind).is_dir():
        return repository / kind
    raise UserError(f"the shipped {kind} are missing from {package}; install mula-ray again")


def shipped_names(kind: Kind) -> list[str]:
    """Names of the shipped YAML files of `kind`, without suffix."""
    return sorted(path.stem for path in shipped_folder(kind).glob("*.yaml"))


def find_file(path_or_name: str | Path, kind: Kind) -> Path:
    """The file at a path, or the shipped one of that name (`mula-tiny`, `mula-tiny.yaml` or `configs/mula-tiny.yaml`).

    Raises:
        UserError: neither exists; names the nearest shipped ones.
    """
    path = Path(path_or_name)
    if path.is_file():
        return path
    named = path.with_suffix("") if path.suffix == ".yaml" else path
    if str(named.parent) in (".", kind) and not path.is_absolute():
        candidate = shipped_folder(kind) / f"{named.name}.yaml"
        if candidate.is_file():
            return candidate
    what = "configuration" if kind == "configs" else "site file"
    names = shipped_names(kind)
    near = difflib.get_close_matches(named.name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"{what} {str(path_or_name)!r} does not exist: give the path of a YAML file or the name of a shipped one; "
        f"{hint}shipped: {', '.join(names)}"
    )
