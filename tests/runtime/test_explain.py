"""What a rank tells of its end decides what becomes of the run."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mula_ray.config.errors import CannotContinue, UserError
from mula_ray.parallel.groups import NoGroups
from mula_ray.runtime.rank import explain


@pytest.mark.parametrize(
    "error",
    [
        NoGroups("rank 3: no groups after 0.1 s: all ranks came, but could not connect"),  # one was killed on the way
        dist.DistBackendError("timed out"),
        ConnectionResetError("reset"),
        RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:31955"),
    ],
)
def test_a_lost_peer_does_not_end_the_run(error: Exception) -> None:
    told = explain(error)
    assert (told["kind"], told["peer"]) == ("error", True)


def test_an_error_of_its_own_says_where() -> None:
    told = explain(ZeroDivisionError("division by zero"))
    assert (told["kind"], told["peer"]) == ("error", False)
    assert told["detail"] == "ZeroDivisionError: division by zero"
    assert told["where"]


@pytest.mark.parametrize("error", [UserError("wrong"), CannotContinue("no space")])
def test_what_cannot_go_on_ends_it(error: UserError | CannotContinue) -> None:
    assert explain(error) == {"kind": "fatal", "code": type(error).exit_code, "message": str(error)}
