"""Stands in for Ray's two helper processes of a local node, which cost 2.4 s of processor time a node to start.

    python -I -S standin.py FOLDER FILE=PORT ...
    python -I -S standin.py FOLDER FILE=? HOST COMMAND ...

Ray's raylet starts both, waits for the files in which they write their ports, and ends when one of them ends.

The first form is the dashboard agent's: there is no dashboard and nothing is collected here, so -1 (Ray's word for
"not in use") is all there is to say. The second is the runtime environment agent's: it listens, and becomes the real
one (COMMAND, with `--runtime-env-agent-port` appended) at the first connection; the raylet asks again by itself. Both
end with the raylet, which holds the other end of their standard input. No imports but the standard library's smallest.
"""

import os
import select
import socket
import sys


def announce(folder: str, name: str, port: int) -> None:
    """Write `port` where the raylet looks for it, whole or not at all."""
    path = os.path.join(folder, name)
    with open(f"{path}.new", "w") as file:
        file.write(str(port))
    os.rename(f"{path}.new", path)


def wait_for_end(also: int | None = None) -> None:
    """Until the raylet is gone (ends this process), or somebody connects to the socket `also` (returns)."""
    watched = [0] if also is None else [0, also]
    while True:
        ready = select.select(watched, [], [])[0]
        if 0 in ready and not os.read(0, 1024):
            os._exit(0)
        if also in ready:
            return


def main() -> None:
    """See the module's text."""
    folder, first, *rest = sys.argv[1:]
    if not first.endswith("=?"):
        for pair in (first, *rest):
            if not pair.startswith("--"):  # the raylet appends arguments of its own
                name, _, unused = pair.partition("=")
                announce(folder, name, int(unused))
        wait_for_end()
    host, *command = rest
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen()
        port = int(listener.getsockname()[1])
        announce(folder, first[:-2], port)
        wait_for_end(listener.fileno())
    os.execv(command[0], [*command, f"--runtime-env-agent-port={port}"])


if __name__ == "__main__":
    main()
