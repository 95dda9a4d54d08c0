"""The network simulator against brute force and closed forms."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp import _dcp
from dcp.network import Background, Transfer, network, parse_rate

GBIT = 1e9 / 8


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[list[int]], list[float]]:
    """Flows as lists of distinct links, and capacities."""
    links = draw(st.integers(1, 6))
    flows = draw(
        st.lists(
            st.lists(st.integers(0, links - 1), max_size=4, unique=True), min_size=0, max_size=12
        )
    )
    capacity = draw(st.lists(st.integers(1, 50), min_size=links, max_size=links))
    return flows, [float(c) for c in capacity]


def rates_of(flows: list[list[int]], capacity: list[float]) -> np.ndarray:
    offsets = np.cumsum([0, *map(len, flows)])
    return _dcp.max_min_rates(offsets, [link for f in flows for link in f], np.array(capacity))


def brute_force(flows: list[list[int]], capacity: list[float]) -> list[float]:
    """Max-min by definition, in exact fractions: raise all unfixed flows by the largest amount that
    every subset of links allows, found by trying each link alone, one flow fixed at a time."""
    left = {i: Fraction(c) for i, c in enumerate(capacity)}
    open_flows = {i for i, f in enumerate(flows) if f}
    rates: dict[int, Fraction] = {}
    while open_flows:
        shares = {
            link: left[link] / sum(link in flows[i] for i in open_flows)
            for link in left
            if any(link in flows[i] for i in open_flows)
        }
        link = min(shares, key=lambda at: (shares[at], at))
        flow = min(i for i in open_flows if link in flows[i])
        rates[flow] = shares[link]
        open_flows.remove(flow)
        for at in flows[flow]:
            left[at] -= shares[link]
    return [float(rates[i]) if i in rates else math.inf for i in range(len(flows))]


@given(traffic())
def test_rates_are_the_brute_force_solver_s(case: tuple[list[list[int]], list[float]]) -> None:
    flows, capacity = case
    np.testing.assert_allclose(rates_of(flows, capacity), brute_force(flows, capacity), rtol=1e-9)


@given(traffic())
def test_no_flow_can_have_more_without_a_slower_one_losing(
    case: tuple[list[list[int]], list[float]],
) -> None:
    """The definition: every flow has a full link on which no other flow is faster."""
    flows, capacity = case
    rates = rates_of(flows, capacity)
    used = [
        sum(r for r, f in zip(rates, flows, strict=True) if link in f)
        for link in range(len(capacity))
    ]
    assert all(u <= c * (1 + 1e-9) for u, c in zip(used, capacity, strict=True))
    for rate, flow in zip(rates, flows, strict=True):
        bottlenecks = [
            link
            for link in flow
            if used[link] >= capacity[link] * (1 - 1e-9)
            and all(r <= rate * (1 + 1e-9) for r, f in zip(rates, flows, strict=True) if link in f)
        ]
        assert bottlenecks or not flow


@pytest.mark.parametrize("hosts", [2, 3, 8])
@pytest.mark.parametrize("collective", ["ring", "alltoall"])
def test_a_collective_alone_takes_its_bytes_over_the_link(hosts: int, collective: str) -> None:
    run = network([Transfer(1.0, collective, 1e9)], hosts=hosts, rate="8Gbit", latency_s=0.25)
    assert run.end_s[0] == pytest.approx(1.25 + (hosts - 1) / hosts, rel=1e-9)


def test_flows_on_one_link_share_it_and_the_rest_goes_faster_afterwards() -> None:
    flows = [(0, 1, 1e9), (0, 2, 3e9)]  # 2 s at half the rate, then 2 GB alone
    run = network([Transfer(0.0, flows=flows)], hosts=3, rate="8Gbit", latency_s=0.0)
    assert run.end_s[0] == pytest.approx(4.0, rel=1e-9)


def test_all_to_all_out_of_a_rack_sends_more_than_a_ring() -> None:
    """facts 3.1: n (W - n) / (W - 1) = 2.29 for 8 hosts in racks of 4, where uplinks bind."""
    common = {"hosts": 8, "rack_hosts": 4, "oversubscription": 64.0, "latency_s": 0.0}
    ring, direct = (
        network([Transfer(0.0, kind, 1e9)], rate="8Gbit", **common).end_s[0]
        for kind in ("ring", "alltoall")
    )
    assert direct / ring == pytest.approx(4 * 4 / 7, rel=1e-9)


def test_two_levels_cross_racks_with_as_little_as_one_host_has() -> None:
    common = {"hosts": 8, "rack_hosts": 4, "oversubscription": 4.0, "latency_s": 0.0}
    run = network([Transfer(0.0, "two_level", 8e9)], rate="8Gbit", **common)
    # inside: 3/4 of 8 GB through a host's link; across: 4 hosts x 1 GB through an uplink of one
    assert run.end_s[0] == pytest.approx(6.0 + 4.0, rel=1e-9)


def test_two_levels_need_equal_racks() -> None:
    with pytest.raises(dcp.ArgumentError, match="equally many hosts"):
        network([Transfer(0.0, "two_level", 1.0)], hosts=5, rack_hosts=4)


def test_a_job_that_is_always_there_takes_its_share() -> None:
    """A ring against a job that only communicates: half the rate each, and the job alone after."""
    job = Background(1e12, 1e-9)
    alone, shared = (
        network([Transfer(1.0, "ring", 1e9)], hosts=2, rate="8Gbit", latency_s=0.0, background=b)
        for b in ((), (job,))
    )
    assert shared.end_s[0] - 1.0 == pytest.approx(2 * (alone.end_s[0] - 1.0), rel=1e-6)


def test_jobs_react_to_what_is_sent() -> None:
    """A job that computes a second and alone sends for one: while we send too, it sends for two, so
    that we get 2 GB in 3 s. A job on a fixed timetable would leave us 3 GB in 4 s."""
    job = Background(1e9, 1.0)
    common = {"hosts": 2, "rate": "8Gbit", "latency_s": 0.0, "background": [job]}
    run = network([Transfer(0.0, flows=[(0, 1, 20e9), (1, 0, 20e9)])], **common)
    assert run.end_s[0] == pytest.approx(30.0, rel=1e-6)


def test_presence_is_half_the_time_and_does_not_depend_on_us() -> None:
    def present(send: bool) -> list[int]:
        net = _dcp.Network(hosts=4, host_rate=1e9, seed=3)
        for _ in range(4):
            net.add_background([0, 1, 2, 3], compute_s=0.05, bytes=1e7, dwell_s=2.0)
        if send:
            net.begin(0.0, np.array([[0, 1, 1e13]]))
        seen = []
        for t in range(1, 2001):
            net.run_until(float(t))
            seen.append(net.present)
        return seen

    quiet, busy = present(False), present(True)
    assert quiet == busy
    there = np.mean([bin(p).count("1") for p in quiet])
    assert there == pytest.approx(2.0, abs=0.25)  # 8,000 draws of 1,000 dwells each: 0.1 deviation


@settings(max_examples=25)
@given(st.integers(0, 2**64 - 1), st.lists(st.floats(0, 3), min_size=1, max_size=6))
def test_runs_repeat_bit_for_bit_and_copies_go_on_alike(seed: int, gaps: list[float]) -> None:
    def make() -> _dcp.Network:
        net = _dcp.Network(hosts=4, host_rate=1e8, seed=seed, latency_s=1e-4)
        for _ in range(3):
            net.add_background([0, 1, 2, 3], compute_s=0.2, bytes=3e7, dwell_s=1.5)
        return net

    def run(net: _dcp.Network, gaps: list[float]) -> list[float]:
        ends = []
        for gap in gaps:
            start = net.now + gap
            net.run_until(start)
            ends.append(net.wait(net.begin(start, net.collective(0, [0, 1, 2, 3], 1e7, 0)[0])))
        return ends

    one, two = make(), make()
    assert run(one, gaps) == run(two, gaps)
    copy = one.copy()
    assert run(one, gaps) == run(copy, gaps)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.floats(1e-3, 1e12) | st.just(0.0)),
        min_size=0,
        max_size=20,
    )
)
def test_a_transfer_takes_at_least_its_fullest_link_and_at_most_one_flow_after_the_other(
    flows: list[tuple[int, int, float]],
) -> None:
    run = network([Transfer(0.0, flows=flows)], hosts=5, rate="8Gbit", latency_s=0.0)
    moving = [f for f in flows if f[0] != f[1]]
    out = [sum(b for f, _, b in moving if f == h) for h in range(5)]
    into = [sum(b for _, t, b in moving if t == h) for h in range(5)]
    assert run.end_s[0] >= max(*out, *into) / 1e9 * (1 - 1e-8)
    assert run.end_s[0] <= sum(b for _, _, b in moving) / 1e9 * (1 + 1e-8)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"hosts": 0}, "host_count = 0"),
        ({"rate": 0.0}, "host_rate = 0"),
        ({"rate": math.nan}, "host_rate = nan"),
        ({"rate": math.inf}, "host_rate = inf"),
        ({"oversubscription": 0.5}, "oversubscription = 0.5"),
        ({"latency_s": -1.0}, "latency_s = -1"),
        ({"rack_hosts": -1}, "rack_hosts = -1"),
        ({"background": [Background(-1.0, 1.0)]}, "bytes = -1"),
        ({"background": [Background(0.0, 0.0)]}, "takes no time"),
        ({"background": [Background(1.0, 1.0, hosts=[9])]}, "host 9"),
        ({"background": [Background(1.0, 1.0, hosts=[1, 1])]}, "host 1 twice"),
        ({"background": [Background(1.0, 1.0, collective="star")]}, "'star' must be one of"),
    ],
)
def test_impossible_networks_are_errors(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=message):
        network([Transfer(0.0, "ring", 1.0)], **keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (Transfer(0.0, flows=[(0, 8, 1.0)]), "from 0 to 8"),
        (Transfer(0.0, flows=[(0, 1, -1.0)]), "bytes = -1"),
        (Transfer(0.0, flows=[(0, 1, math.nan)]), "bytes = nan"),
        (Transfer(math.inf, "ring", 1.0), "start_s = inf"),
        (Transfer(0.0, "tree", 1.0), "'tree' must be one of"),
    ],
)
def test_impossible_transfers_are_errors(transfer: Transfer, message: str) -> None:
    with pytest.raises(dcp.ArgumentError, match=message):
        network([transfer])


@pytest.mark.parametrize("text", ["0Gbit", "-1Gbit", "nanGbit", "1Gbyte", "Gbit", "", "1 furlong"])
def test_impossible_rates_are_errors(text: str) -> None:
    with pytest.raises(dcp.ArgumentError, match="rate"):
        parse_rate(text)


def test_rates_as_text() -> None:
    assert parse_rate("100Gbit") == 100 * GBIT
    assert parse_rate(" 2.5 Mbit/s ") == 2.5e6 / 8
    assert parse_rate("12GB") == 12e9
