"""The C core: what bind/ adds to the module. tests/lint keeps this file equal to it."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

class Error(Exception): ...
class ArgumentError(Error, ValueError): ...
class DTypeError(Error, TypeError): ...
class OutOfMemoryError(Error, MemoryError): ...
class StateError(Error, RuntimeError): ...
class FileError(Error, OSError): ...
class DeadlineError(Error, TimeoutError): ...
class RankError(Error, ConnectionError): ...
class MismatchError(Error, RuntimeError): ...
class AbortedError(Error, ConnectionAbortedError): ...
class UnsupportedError(Error, NotImplementedError): ...
class NumericError(Error, ArithmeticError): ...
class InfeasibleError(Error, ValueError): ...
class InterruptedCallError(Error, InterruptedError): ...

def set_num_threads(count: int, /) -> None: ...
def set_isa(name: str, /) -> None: ...
def cpu_info() -> dict[str, Any]: ...
def memory() -> dict[str, int]: ...
def set_memory_cap(bytes: int, /) -> None: ...
def account_memory(bytes: int, /) -> None: ...
def gemm(
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    add: NDArray[np.float32] | None = None,
    bias: NDArray[np.float32] | None = None,
    packed: NDArray[np.float32] | None = None,
    compute: str = "float32",
) -> None: ...
def gemm_pack(
    b: NDArray[np.float32] | NDArray[np.uint16],
    *,
    trans_b: bool = False,
    compute: str = "float32",
) -> NDArray[np.float32]: ...
def attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    offsets: Any,
    key_offsets: Any,
    causal: bool,
    scale: float,
    compute: str,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...
def attention_backward(
    dout: NDArray[np.float32],
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
    offsets: Any,
    key_offsets: Any,
    causal: bool,
    scale: float,
    compute: str,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]: ...

class Window:
    def part(self, rank: int, /) -> NDArray[np.uint8]: ...
    def reduce(self, offset: int, out: NDArray[np.float32], /) -> None: ...

class World:
    def __new__(
        cls,
        rank: int = 0,
        size: int = 1,
        run_id: str | None = None,
        timeout_s: float = 0.0,
        join_timeout_s: float = 0.0,
        folder: str | None = None,
    ) -> Self: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def _barrier(self) -> None: ...
    def _allreduce(self, x: NDArray[Any], op: int, out: NDArray[Any] | None, /) -> NDArray[Any]: ...
    def _allgatherv(
        self, x: NDArray[Any], counts: NDArray[np.int64], out: NDArray[Any] | None, /
    ) -> NDArray[Any]: ...
    def _reduce_scatterv(
        self, x: NDArray[Any], counts: NDArray[np.int64], out: NDArray[Any] | None, /
    ) -> NDArray[Any]: ...
    def _alltoallv(
        self,
        x: NDArray[Any],
        counts: NDArray[np.int64],
        recv_counts: NDArray[np.int64],
        out: NDArray[Any] | None,
        /,
    ) -> NDArray[Any]: ...
    def _traffic(self) -> tuple[int, int, float, float]: ...
    def _quantised_reduce(
        self,
        x: NDArray[Any],
        counts: NDArray[np.int64] | None,
        precision: str,
        hadamard: bool,
        nearest: bool,
        residual: NDArray[Any] | None,
        seed: int,
        step: int,
        machine_ranks: int,
        out: NDArray[Any] | None,
        /,
    ) -> tuple[NDArray[Any], dict[str, float]]: ...
    def _broadcast(self, x: NDArray[Any], root: int, /) -> NDArray[Any]: ...
    def _exchange(
        self,
        sends: list[tuple[NDArray[Any], int]],
        receives: list[tuple[NDArray[Any], int]],
        /,
    ) -> None: ...
    def _split(self, color: int, key: int, /) -> Self | None: ...
    def _window(self, bytes: int, /) -> Window: ...
    def _abort(self, text: str, /) -> None: ...
    def _close(self) -> None: ...

def die_with_parent(parent: int, /) -> bool: ...

class Model:
    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Sequence[NDArray[np.float32]],
        *,
        device: str = "cpu",
    ) -> None: ...
    def forward_backward(
        self,
        tokens: npt.ArrayLike,
        offsets: npt.ArrayLike,
        labels: npt.ArrayLike,
        gradients: Sequence[NDArray[np.float32]],
        *,
        weights: NDArray[np.float32] | None = None,
        scale: float = 1.0,
        row_ids: npt.ArrayLike | None = None,
        dropout_seed: int = 0,
        recompute: tuple[int, int] = (0, 0),
    ) -> float: ...
    def loss(
        self,
        tokens: npt.ArrayLike,
        offsets: npt.ArrayLike,
        labels: npt.ArrayLike,
        *,
        weights: NDArray[np.float32] | None = None,
        scale: float = 1.0,
    ) -> float: ...
    def logits(self, tokens: npt.ArrayLike, offsets: npt.ArrayLike) -> NDArray[np.float32]: ...

def transformer1d_check(config: Mapping[str, Any], /) -> None: ...
def transformer1d_tensors(
    config: Mapping[str, Any], /
) -> list[tuple[str, tuple[int, ...], int, str]]: ...
def transformer1d_initial(
    config: Mapping[str, Any], index: int, seed: int, first: int, count: int, /
) -> NDArray[np.float32]: ...
def transformer1d_activation_bytes(
    config: Mapping[str, Any],
    token_count: int,
    thread_count: int,
    recompute: tuple[int, int] = (0, 0),
    /,
) -> int: ...
def plan(request: tuple[Any, ...], /) -> dict[str, Any]: ...
def plan_verify(
    request: tuple[Any, ...], plan: dict[str, Any], makespan_s: float, bound_s: float, /
) -> str: ...
def cost_time(
    cost: tuple[float, ...],
    tokens: int,
    square_sum: float,
    first_rank: int,
    ranks: int,
    recompute: tuple[int, int],
    /,
) -> float: ...
def cost_memory(
    cost: tuple[float, ...], tokens: int, ranks: int, recompute: tuple[int, int], world: int, /
) -> int: ...
def plan_strategies() -> tuple[str, ...]: ...
def sim_run(
    plan: dict[str, Any],
    world: int,
    rounds: bool,
    jitter: float,
    slowdown: NDArray[np.float64] | None,
    seed: int,
    step: int,
    /,
) -> dict[str, Any]: ...
def kernel_run(op: str, fields: dict[str, Any], /) -> None: ...
def layout_plan(
    sizes: Any, blocks: Any, ranks: int, unit: int, order: int
) -> tuple[NDArray[np.int64], int]: ...
def exact_sum(values: NDArray[np.float64]) -> float: ...
def optimizer_bytes(
    config: Mapping[str, Any],
    rules: Sequence[tuple[Any, ...]],
    *,
    ranks: int = 1,
    block_rows: int = 1,
    no_windows: bool = False,
) -> int: ...

class Sharded:
    def __init__(
        self,
        world: World,
        config: Mapping[str, Any],
        *,
        device: str = "cpu",
        block_rows: int = 1,
        seed: int = 0,
        initialise: bool = True,
        forward_only: bool = False,
        frozen: NDArray[np.uint8] | None = None,
        no_windows: bool = False,
        reduce_layer: bool = False,
        sequence_parallel: int = 0,
        prefetch: bool = False,
        gather_step: bool = False,
        machine_ranks: int = 1,
    ) -> None: ...
    def step(
        self,
        micro_batches: Sequence[Any],
        *,
        scale: float = 0.0,
        step: int = 0,
        update_count: int = 0,
        trainable_count: int = 0,
        plan_hash: int = 0,
        clip: float = 0.0,
        lr: float = 0.0,
        skip_nonfinite: bool = False,
        dropout_seed: int = 0,
        groups: Sequence[tuple[int, int]] | None = None,
        precision: str = "fp32",
        hadamard: bool = False,
        nearest: bool = False,
        feedback: bool = False,
        quantise_seed: int = 0,
        statistics: bool = False,
    ) -> dict[str, Any]: ...
    def gradients(
        self,
        micro_batches: Sequence[Any],
        *,
        scale: float = 0.0,
        plan_hash: int = 0,
        dropout_seed: int = 0,
        groups: Sequence[tuple[int, int]] | None = None,
    ) -> float: ...
    def accumulate(
        self,
        micro_batches: Sequence[Any],
        *,
        scale: float = 0.0,
        step: int = 0,
        plan_hash: int = 0,
        dropout_seed: int = 0,
        groups: Sequence[tuple[int, int]] | None = None,
        statistics: bool = False,
    ) -> float: ...
    def set_optimizer(self, rules: Sequence[tuple[Any, ...]], keep: bool) -> None: ...
    def states(self) -> list[tuple[str, str, dict[int, tuple[int, ...]]]]: ...
    def state_runs(self, state: int) -> list[tuple[int, int, NDArray[Any]]]: ...
    def evaluate(
        self,
        micro_batches: Sequence[Any],
        scale: float,
        groups: Sequence[tuple[int, int]] | None,
        /,
    ) -> float: ...
    def publish(self) -> None: ...
    def note_step(self, precision: str, multiple: int, seconds: float, /) -> None: ...
    def residual(self, make: bool, /) -> list[tuple[int, int, NDArray[np.float32]]]: ...
    def tensor_view(self, kind: int, index: int, /) -> NDArray[np.float32]: ...
    def runs(self, kind: int, /) -> list[tuple[int, int, NDArray[np.float32]]]: ...
    def tensors(self) -> list[tuple[str, tuple[int, ...], str, bool]]: ...
    def close(self) -> None: ...

class DBufferLayout:
    def __init__(
        self, tensors: NDArray[np.int64], ranks: int, block_rows: int, order: int, /
    ) -> None: ...
    def runs(self, rank: int, /) -> list[tuple[int, int, int]]: ...
    def shards(self) -> list[int]: ...

class DBuffer:
    def __init__(
        self,
        world: World,
        layout: DBufferLayout,
        kind: int,
        *,
        dtype: int = ...,
        keep_own: bool = ...,
        replicas: World | None = ...,
    ) -> None: ...
    def tensor(self, index: int, count: int, writable: bool, /) -> NDArray[Any]: ...
    def runs(self) -> list[tuple[int, int, NDArray[Any]]]: ...
    def zero(self) -> None: ...
    def fill(self, group: int, value: float, /) -> None: ...
    def scale(self, group: int, factor: float, /) -> None: ...
    def add(self, group: int, factor: float, other: DBuffer, /) -> None: ...
    def copy(self, group: int, other: DBuffer, /) -> None: ...
    def nonfinite(self, group: int, /) -> int: ...
    def norm(
        self,
        mask: NDArray[np.uint8] | None,
        largest: bool,
        extras: Sequence[NDArray[np.float32]],
        /,
    ) -> float: ...
    def reduce(self, group: int, /) -> None: ...
    def acquire(self, group: int, /) -> None: ...
    def release(self, group: int, /) -> None: ...
    def gather(self, group: int, source: DBuffer | None, /) -> None: ...
    def gather_order(self, order: NDArray[np.int32], source: DBuffer | None, /) -> None: ...
    def gather_begin(self, group: int, /) -> None: ...
    def gather_wait(self, group: int, /) -> None: ...
    def gather_restart(self) -> None: ...
    def traffic(self) -> dict[str, int]: ...
    def close(self) -> None: ...

class ShardOptimizer:
    def __init__(
        self,
        world: World,
        layout: DBufferLayout,
        weights: DBuffer,
        gradients: DBuffer,
        shapes: Sequence[tuple[int, ...]],
        rules: Sequence[Sequence[Any]],
        *,
        no_windows: bool = ...,
    ) -> None: ...
    def step(self, update_count: int, lr: float, grad_scale: float, /) -> None: ...
    def set_rules(self, rules: Sequence[Sequence[Any]], /) -> None: ...
    def states(self) -> list[tuple[str, str, dict[int, tuple[int, ...]]]]: ...
    def state_runs(self, state: int, /) -> list[tuple[int, int, NDArray[Any]]]: ...
    def close(self) -> None: ...

def placement_local(
    shape: Any, mesh: Any, placements: Sequence[tuple[int, int, Any]], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...], int, int]: ...
def placement_runs(
    shape: Any, mesh: Any, placements: Sequence[tuple[int, int, Any]], rank: int
) -> NDArray[np.int64]: ...
def placement_overlap(
    shape: Any,
    mesh: Any,
    source: Sequence[tuple[int, int, Any]],
    source_rank: int,
    target: Sequence[tuple[int, int, Any]],
    target_rank: int,
) -> NDArray[np.int64]: ...
def placement_redistribute(
    world: World,
    group: World | None,
    group_axis: int,
    shape: Any,
    mesh: Any,
    source: Sequence[tuple[int, int, Any]],
    target: Sequence[tuple[int, int, Any]],
    local: NDArray[Any],
    out: NDArray[Any] | None,
    window: Window | None,
) -> tuple[NDArray[Any], tuple[int, int, int, int]]: ...
def placement_reduce(
    world: World,
    groups: tuple[World | None, ...],
    shape: Any,
    mesh: Any,
    target: Sequence[tuple[int, int, Any]],
    x: NDArray[np.float32],
    out: NDArray[np.float32] | None,
) -> tuple[NDArray[np.float32], tuple[int, int, int, int]]: ...

class Controller:
    def __init__(
        self,
        *,
        policy: str = ...,
        precisions: Sequence[str] = ...,
        base: str = ...,
        multiples: Sequence[int] = ...,
        tokens_per_step: int = ...,
        rank_count: int = ...,
        lr_rule: str = "fixed",
        hysteresis: float = 0.0,
        bandwidth_mean: float = 0.0,
        jump: float = 0.0,
        jump_count: int = 0,
        noise_mean: float = 0.0,
        noise_steps: int = 0,
        dwell_steps: int = 0,
        error_limit: float = 0.0,
        slope_limit: float = 4.0,
    ) -> None: ...
    def start(self) -> dict[str, Any]: ...
    def decide(
        self,
        observation: Mapping[str, Any],
        *,
        reduce_bytes: Mapping[str, float] = ...,
        codec_s: Mapping[str, float] = ...,
        reduce_calls: Mapping[str, float] | None = None,
        bucket_count: int = 1,
        backward_share: float = 0.0,
    ) -> dict[str, Any]: ...
    def step(
        self, sharded: Sharded, /
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]: ...
    def state(self) -> bytes: ...
    def load_state(self, state: bytes, /) -> None: ...

def precision_bytes(precision: str, count: int, /) -> int: ...
def emulate_link(
    world: World,
    *,
    rate: float,
    latency_s: float,
    machine_ranks: int,
    background: int,
    dwell_s: float,
    duty: float,
    period_s: float,
    seed: int,
) -> None: ...
def time_to_loss(
    setup: dict[str, float],
    control: dict[str, Any],
    errors: dict[str, float],
    *,
    seed: int,
    network_seed: int,
    policy: str | None,
    fixed: Mapping[str, Any] | None,
    trace: bool,
) -> tuple[float, int, float, int, dict[str, list[float]], list[Any] | None]: ...

class Network:
    def __init__(
        self,
        *,
        hosts: int = 0,
        rack_hosts: int = 0,
        host_rate: float = 0.0,
        oversubscription: float = 1.0,
        latency_s: float = 0.0,
        seed: int = 0,
    ) -> None: ...
    @property
    def now(self) -> float: ...
    @property
    def present(self) -> int: ...
    def add_background(
        self,
        hosts: Sequence[int],
        *,
        compute_s: float = 0.0,
        bytes: float = 0.0,
        collective: int = 0,
        dwell_s: float = 0.0,
    ) -> None: ...
    def begin(self, start_s: float, flows: NDArray[np.float64], /) -> int: ...
    def wait(self, transfer: int, /) -> float: ...
    def run_until(self, time_s: float, /) -> None: ...
    def collective(
        self, kind: int, hosts: Sequence[int], bytes: float, phase: int, /
    ) -> tuple[NDArray[np.float64], int]: ...
    def copy(self) -> Network: ...

def max_min_rates(
    offsets: npt.ArrayLike, links: Sequence[int], capacity: NDArray[np.float64], /
) -> NDArray[np.float64]: ...
def quantise(
    x: NDArray[np.float32],
    precision: str,
    seed: int,
    stream: int,
    first: int,
    nearest: bool,
    hadamard: bool,
    residual: NDArray[np.float32] | None,
) -> NDArray[np.uint8]: ...
def dequantise(
    codes: NDArray[np.uint8], count: int, precision: str, seed: int, hadamard: bool
) -> NDArray[np.float32]: ...
def sketch(x: NDArray[np.float32], seed: int, first: int) -> NDArray[np.float64]: ...
