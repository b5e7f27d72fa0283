"""A child started as a fresh interpreter instead of a fork: python -m mula_ray.runtime.spawned FD PARENT_PID."""

from __future__ import annotations

import os
import socket
import sys

from mula_ray.runtime.osproc import die_with_parent, start_normal
from mula_ray.runtime.zygote import run_job

if __name__ == "__main__":
    start_normal()
    die_with_parent(int(sys.argv[2]))
    os._exit(run_job(socket.socket(fileno=int(sys.argv[1]))))
