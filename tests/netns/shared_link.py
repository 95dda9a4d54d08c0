"""Real TCP flows between hosts in network namespaces, beside the network simulator's shares.

    sudo python tests/netns/shared_link.py [--rate 20] [--seconds 4]

Makes a switch (a bridge) and hosts (network namespaces joined to it by veth pairs), shapes every
link with `tc` in both directions, runs flows between the hosts and prints bytes a second of each
beside `dcp.simulate.network`'s. Everything it made is taken away again, also after a failure.

Training over such hosts needs a transport between machines. With the MPI transport it will be
`mpirun -n 2 --host h0,h1 dcp train ...` inside these namespaces; until then only flows run here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np

from dcp import _dcp

# Flows that begin together: (from, to). Host 0 sends to two, host 2 hears of two.
FLOWS = ((0, 1), (0, 2), (3, 2), (1, 3))
HOSTS = 4
PREFIX = f"dcp{os.getpid() % 10000}"

_RECEIVE = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("ready", flush=True)
link, _ = server.accept()
first, count, begun = time.monotonic(), 0, time.monotonic()
while data := link.recv(1 << 16):
    now = time.monotonic()
    if now - begun > float(sys.argv[2]):
        if count == 0:
            first = now
        count += len(data)
        last = now
print(count / (last - first))
"""
_SEND = """
import socket, sys, time
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10)
end, block = time.monotonic() + float(sys.argv[3]), bytes(1 << 15)
while time.monotonic() < end:
    link.sendall(block)
"""


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def network(rate_mbit: float) -> Iterator[list[str]]:
    """Names of the hosts' namespaces; host i has address 10.77.0.(i + 1)."""
    switch, hosts = f"{PREFIX}sw", [f"{PREFIX}h{i}" for i in range(HOSTS)]
    made: list[str] = []
    shape = ["root", "tbf", "rate", f"{rate_mbit}mbit", "burst", "16kb", "latency", "60ms"]
    try:
        for name in (switch, *hosts):
            sh("ip", "netns", "add", name)
            made.append(name)
        sh("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(hosts):
            pair = ["link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", host]
            sh("ip", "-n", switch, *pair)
            sh("ip", "-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            sh("ip", "-n", host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            sh("ip", "-n", host, "link", "set", "eth0", "up")
            sh("tc", "-n", switch, "qdisc", "add", "dev", f"p{i}", *shape)
            sh("tc", "-n", host, "qdisc", "add", "dev", "eth0", *shape)
        yield hosts
    finally:
        for name in reversed(made):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def measure(rate_mbit: float, seconds: float) -> list[float]:
    """Bytes a second of every flow, all of them together, after they have settled."""
    with network(rate_mbit) as hosts:
        receivers, senders = [], []
        try:
            for number, (_, to) in enumerate(FLOWS):
                command = ["ip", "netns", "exec", hosts[to], sys.executable, "-c", _RECEIVE]
                receivers.append(
                    subprocess.Popen(
                        [*command, str(7000 + number), str(seconds / 4)],
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                assert receivers[-1].stdout is not None
                receivers[-1].stdout.readline()
            for number, (source, to) in enumerate(FLOWS):
                command = ["ip", "netns", "exec", hosts[source], sys.executable, "-c", _SEND]
                where = [f"10.77.0.{to + 1}", str(7000 + number), str(seconds)]
                senders.append(subprocess.Popen([*command, *where]))
            return [float(r.communicate(timeout=seconds + 30)[0]) for r in receivers]
        finally:
            for process in (*receivers, *senders):
                process.kill()
                process.wait()


def simulated(rate_mbit: float) -> list[float]:
    """Max-min shares: links 2 h (up) and 2 h + 1 (down) of host h."""
    links = [link for source, to in FLOWS for link in (2 * source, 2 * to + 1)]
    capacity = np.full(2 * HOSTS, rate_mbit * 1e6 / 8)
    return [
        float(rate) for rate in _dcp.max_min_rates(range(0, 2 * len(FLOWS) + 1, 2), links, capacity)
    ]


def main() -> None:
    """Print both as a table, and as JSON on the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, default=20.0, help="Mbit/s of every link")
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    start = time.monotonic()
    real, model = measure(options.rate, options.seconds), simulated(options.rate)
    for (source, to), here, there in zip(FLOWS, real, model, strict=True):
        print(f"{source} -> {to}: {here / 1e6:6.3f} MB/s real, {there / 1e6:6.3f} simulated")
    print(f"{time.monotonic() - start:.1f} s", file=sys.stderr)
    print(json.dumps({"real": real, "simulated": model}))


if __name__ == "__main__":
    main()
