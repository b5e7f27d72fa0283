"""What `parallel.recompute` asks for: which parts of which layers are recomputed in the backward pass. Pure."""

from __future__ import annotations

import difflib
from typing import Literal, get_args

from mula_ray.config.errors import UserError

Part = Literal["norms", "attention", "moe"]
PARTS: tuple[Part, ...] = get_args(Part)


def parse_recompute(text: str, layers: int) -> dict[Part, range]:
    """Layers whose `norms`, `attention` or `moe` part is recomputed; `norms+moe@0:4` limits moe to layers 0..3.

    Raises:
        UserError: an unknown part, a bad range, or a part named twice.
    """
    result: dict[Part, range] = {}
    if text.strip() == "none":
        return result
    for item in text.split("+"):
        name, at, limits = item.strip().partition("@")
        part = next((known for known in PARTS if known == name), None)
        if part is None:
            near = difflib.get_close_matches(name, PARTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"parallel.recompute is {text!r}: {name!r} is not a part; "
                f"use none, or parts joined by +: {', '.join(PARTS)}{hint}"
            )
        if part in result:
            raise UserError(f"parallel.recompute is {text!r}: {part} is named twice; keep one of them")
        result[part] = _layer_range(text, limits, layers) if at else range(layers)
    return result


def _layer_range(text: str, limits: str, layers: int) -> range:
    first, colon, stop = limits.partition(":")
    if not colon or not first.isdigit() or not stop.isdigit() or not 0 <= int(first) < int(stop) <= layers:
        raise UserError(
            f"parallel.recompute is {text!r}: the range {limits!r} must be FIRST:STOP with "
            f"0 <= FIRST < STOP <= {layers} (model.layers)"
        )
    return range(int(first), int(stop))
