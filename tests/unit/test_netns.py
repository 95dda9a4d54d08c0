"""Shares of real TCP flows in network namespaces, where this machine allows them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "netns" / "shared_link.py"


def why_not() -> str | None:
    """What keeps namespaces from being made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is not installed"
    name = f"dcpprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    try:
        bridge = ["ip", "-n", name, "link", "add", "br0", "type", "bridge"]
        shape = ["tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "tbf"]
        shape += ["rate", "10mbit", "burst", "16kb", "latency", "60ms"]
        for command in (bridge, shape):
            done = made.returncode or subprocess.run(command, capture_output=True).returncode
            if done:
                return f"{' '.join(command[:1])} may not do this here: {made.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_tcp_flows_get_about_what_the_simulator_gives_them() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seconds", "3"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    rates = json.loads(done.stdout.splitlines()[-1])
    real, model = rates["real"], rates["simulated"]
    # full links: up from host 0, down to host 2, and 1 -> 3 alone; headers take 5 %
    for flows in ((0, 1), (1, 2), (3,)):
        here, there = sum(real[f] for f in flows), sum(model[f] for f in flows)
        assert 0.7 < here / there < 1.15, rates
    # within a link TCP is fair in the long run only
    assert all(0.3 < a / b < 1.8 for a, b in zip(real, model, strict=True)), rates
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert "dcp" not in left
