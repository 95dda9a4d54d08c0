"""Devices and shapes: what the cost model is reckoned from where nothing was measured.

A `Device` states every constant with its source; a `Shape` is what of a model decides its cost.
`cost_fields` turns both into the coefficients of `dcp.CostModel`. Nothing here was fitted to a
speed-up: rates are what the hardware's makers state or what was measured on it, taken down to what
whole models reach.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dcp import _dcp
from dcp._dcp import ArgumentError, DTypeError

if TYPE_CHECKING:
    from dcp.models import Transformer1D
    from dcp.optim_base import Optimizer

__all__ = ["DEVICES", "Device", "Shape", "config_named", "device_named"]

_RUNTIME_BYTES = 5 * 2**20  # four arenas of 1 MiB for collectives, and tables
_PADDED = 1.002  # of a buffer over its tensors, measured 1.0005 and less
FLOP_RATES = ("matmul_flops_per_s", "attention_flops_per_s", "attention_backward_flops_per_s")
_PAIRS = ("collective_s", "hop_s", "exchange_bytes_per_s", "ring_bytes_per_s")
_COUNTS = ("forward_kernels", "node_ranks", "element_bytes", "logit_chunk_tokens")
_ZERO_ALLOWED = (*_PAIRS[:2], "forward_kernels", "launch_s", "micro_batch_s", "node_ranks")


@dataclass(frozen=True)
class Device:
    """What the cost model knows of a device. Pairs: inside a node, across nodes.

    Attributes
    ----------
    name : str
    matmul_flops_per_s : float
        Reached in the matrix products of a whole model.
    attention_flops_per_s, attention_backward_flops_per_s : float
        Reached in attention; a causal mask counts half of the square.
    bytes_per_s : float
        Memory, reached by kernels that compute little: norms, activations, adding gradients.
    forward_kernels : int
        Kernels of one layer's forward pass; a backward pass has twice as many.
    launch_s : float
        What each kernel costs whatever its size.
    micro_batch_s : float
        What a micro-batch costs beside kernels: fetching it, synchronising, the loss.
    collective_s, hop_s : tuple of two floats
        Latency of one collective, and of each further rank in it.
    exchange_bytes_per_s, ring_bytes_per_s : tuple of two floats
        Of each rank in all-to-alls (Ulysses), and in passing keys and values on (ring).
    gather_bytes_per_s : float
        At which a rank receives parameters of all ranks, where they are gathered layer by layer.
    gather_exposed : float
        Share of that which does not hide behind compute.
    memory_bytes : float
        Of one device.
    reserve_bytes : float
        Of these, what the runtime, the communication library and the allocator's slack take.
    element_bytes : int
        Of an activation and of a compute weight.
    node_ranks : int
        Ranks of a node; 0: all share one.
    logit_chunk_tokens : int
        Rows of logits that exist at once.
    host : bool
        Ranks are processes of one machine in dcp's own runtime: weights and moments lie in shared
        windows, and the core reckons the bytes of activations.
    bf16_times : float
        Rates of products and attention with bf16 factors, as multiples of those above: for models
        whose `compute_dtype` asks for them. 1 where the rates above are those of bf16.

    Examples
    --------
    >>> from dcp.analytic import DEVICES
    >>> DEVICES["h200"].node_ranks, DEVICES["h100"].memory_bytes
    (8, 80000000000.0)
    """

    name: str
    matmul_flops_per_s: float
    attention_flops_per_s: float
    attention_backward_flops_per_s: float
    bytes_per_s: float
    forward_kernels: int
    launch_s: float
    micro_batch_s: float
    collective_s: tuple[float, float]
    hop_s: tuple[float, float]
    exchange_bytes_per_s: tuple[float, float]
    ring_bytes_per_s: tuple[float, float]
    gather_bytes_per_s: float
    gather_exposed: float
    memory_bytes: float
    reserve_bytes: float
    element_bytes: int
    node_ranks: int
    logit_chunk_tokens: int
    host: bool = False
    bf16_times: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name in ("name", "host"):
                continue
            value = getattr(self, field.name)
            parts = value if field.name in _PAIRS else (value,)
            if not isinstance(parts, tuple | list) or (field.name in _PAIRS and len(parts) != 2):
                raise DTypeError(f"device.{field.name} = {value!r} must be two numbers")
            for part in parts:
                if not isinstance(part, int | float | np.number) or isinstance(part, bool):
                    raise DTypeError(f"device.{field.name} = {value!r} must be a number")
                zero = field.name in _ZERO_ALLOWED or field.name in (
                    "reserve_bytes",
                    "gather_exposed",
                )
                if not math.isfinite(part) or part < 0 or (part == 0 and not zero):
                    rule = ">= 0" if zero else "> 0"
                    raise ArgumentError(
                        f"device.{field.name} = {value!r} must be finite and {rule}"
                    )
            if field.name in _COUNTS and value != int(value):
                raise ArgumentError(f"device.{field.name} = {value!r} must be whole")
            if field.name in _PAIRS:
                object.__setattr__(self, field.name, tuple(float(v) for v in parts))
        if self.gather_exposed > 1:
            raise ArgumentError(f"device.gather_exposed = {self.gather_exposed} must be <= 1")

    def computing(self, dtype: str) -> Device:
        """This device at the rates of products in "float32" or "bfloat16".

        Examples
        --------
        >>> from dcp.analytic import DEVICES
        >>> cpu = DEVICES["cpu"]
        >>> fast = cpu.computing("bfloat16")
        >>> fast.matmul_flops_per_s == cpu.matmul_flops_per_s * cpu.bf16_times
        True
        """
        if dtype != "bfloat16":
            return self
        rates = {name: getattr(self, name) * self.bf16_times for name in FLOP_RATES}
        return dataclasses.replace(self, **rates, bf16_times=1.0)


_H200 = Device(
    name="h200",
    # 769-798 TFLOP/s measured with bf16 products of 8192^3 on one H200 (peak about 990, dense); the
    # products of a model's layers, smaller and under the power limit, reach some 3/4 of that
    matmul_flops_per_s=600e12,
    # FlashAttention 3 forward on H100, head 128: 560 (1k) to 700 (32k) TFLOP/s unmasked; causal and
    # packed with short sequences less. Backward: its published ratio to forward, about 3/4
    attention_flops_per_s=450e12,
    attention_backward_flops_per_s=350e12,
    bytes_per_s=4.3e12,  # copy, measured on one H200 (4.8 TB/s stated)
    # two norms, three products (q k v together, gate and up together) and o, rotary, attention,
    # SwiGLU, two residual sums
    forward_kernels=10,
    launch_s=3e-6,  # gap between kernels that a CUDA stream is fed with
    micro_batch_s=1e-3,
    collective_s=(10e-6, 30e-6),  # small NCCL collectives
    hop_s=(1e-6, 2e-6),
    # NVLink 450 GB/s a direction: all-to-alls of tens of MB reach under half, neighbours 2/3.
    # Across nodes one 400 Gb/s adapter a GPU: 50 GB/s, 80 % reached
    exchange_bytes_per_s=(200e9, 40e9),
    ring_bytes_per_s=(300e9, 40e9),
    # 8 adapters of a node together, 3/4 reached: each node receives each parameter once
    gather_bytes_per_s=300e9,
    gather_exposed=0.2,
    memory_bytes=141e9,
    reserve_bytes=6e9,
    element_bytes=2,
    node_ranks=8,
    logit_chunk_tokens=2048,
)

DEVICES: dict[str, Device] = {
    "h200": _H200,
    # same compute and links; 80 GB at 3.35 TB/s, of which copies reach 90 % as on the H200
    "h100": dataclasses.replace(
        _H200, name="h100", memory_bytes=80e9, bytes_per_s=3.0e12, reserve_bytes=5e9
    ),
    # one core of an AMD EPYC, Zen 5, AVX-512, fp32; ranks of one machine, dcp's own kernels
    "cpu": Device(
        name="cpu",
        # FMA peak 280 GFLOP/s a core; whole training steps of dcp reach 70 % of it
        # (benchmarks/bench_train.py), its attention in long sequences about the same or more
        matmul_flops_per_s=200e9,
        attention_flops_per_s=200e9,
        attention_backward_flops_per_s=200e9,
        # NumPy's sum over what does not fit the caches; what layers pass on mostly does
        bytes_per_s=40e9,
        forward_kernels=12,
        # a call; a pool of one thread is not woken. With it and micro_batch_s, a micro-batch of two
        # tokens of "tiny" is reckoned at 0.3 ms and took 0.17
        launch_s=0.5e-6,
        micro_batch_s=30e-6,
        # ranks with a core each spin until the others come: the 32 meetings of a micro-batch of
        # "tiny" on two ranks took 0.23 ms
        collective_s=(6e-6, 6e-6),
        hop_s=(1e-6, 1e-6),
        # rows are copied once into a window of shared memory and read there in place: half of
        # bytes_per_s, as a copy reads and writes
        exchange_bytes_per_s=(20e9, 20e9),
        ring_bytes_per_s=(20e9, 20e9),
        gather_bytes_per_s=5e9,
        gather_exposed=1.0,
        memory_bytes=4e9,
        reserve_bytes=0.0,
        element_bytes=4,
        node_ranks=0,
        logit_chunk_tokens=1024,
        host=True,
        # whole training steps of dcp with AVX512_BF16 take 1/1.79 of the CPU time of fp32 (3M
        # parameters, benchmarks/bench_train.py), what is no product included. A CPU that must widen
        # gains nothing; plans, which depend on ratios, stay the same
        bf16_times=1.85,
    ),
}


def _nearest(name: str, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}"
    return f"unknown {what} {name!r}: {hint}"


def device_named(device: str | Device, **overrides: Any) -> Device:
    """A device by name, some constants replaced.

    Raises
    ------
    dcp.ArgumentError
        No such device or constant: the message suggests the nearest.

    Examples
    --------
    >>> from dcp.analytic import device_named
    >>> device_named("h200", bytes_per_s=4.8e12).bytes_per_s
    4800000000000.0
    """
    if not isinstance(device, Device):
        if not isinstance(device, str):
            raise DTypeError(f"device = {device!r} must be a name or a Device")
        if device not in DEVICES:
            raise ArgumentError(_nearest(device, list(DEVICES), "device"))
        device = DEVICES[device]
    known = [f.name for f in dataclasses.fields(Device)]
    for name in overrides:
        if name not in known:
            raise ArgumentError(_nearest(name, known, "constant of a device"))
    return dataclasses.replace(device, **overrides) if overrides else device


@dataclass(frozen=True)
class Shape:
    """What of a transformer decides its cost.

    Examples
    --------
    >>> import dcp
    >>> from dcp.analytic import Shape
    >>> Shape.of(dcp.Transformer1D.preset("tiny")).layers
    4
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    mlp_products: int  # 3: gate, up and down; 2: in and out
    vocab: int
    parameter_count: int
    compute_dtype: str = "float32"

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.key_heads * self.head_dim

    @property
    def inner_width(self) -> int:
        """Elements of a token inside the MLP: gate, up and their product; or before and after."""
        return self.mlp_products * self.intermediate

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        attention = self.hidden * (2 * self.query_width + 2 * self.key_width)
        return attention + self.mlp_products * self.hidden * self.intermediate

    @property
    def matmul_weights(self) -> int:
        return self.layers * self.layer_weights + self.vocab * self.hidden

    @property
    def fingerprint(self) -> str:
        """Of everything that decides cost: 16 hexadecimal digits."""
        fields = dataclasses.asdict(self)
        if self.compute_dtype == "float32":
            del fields["compute_dtype"]  # as in files from before there was a choice
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def of(cls, config: Transformer1D) -> Shape:
        """The shape of a configuration.

        Examples
        --------
        >>> import dcp
        >>> from dcp.analytic import Shape
        >>> Shape.of(dcp.Transformer1D.preset("tiny")).layers
        4
        """
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            mlp_products=3,
            vocab=config.vocab_size,
            parameter_count=config.parameter_count(),
            compute_dtype=config.compute_dtype,
        )


def _gpt2(hidden: int, layers: int, heads: int) -> Shape:
    """GPT-2 as published: tied head, learned positions (1024), biases, LayerNorm, MLP of 4 h."""
    layer = 12 * hidden * hidden + 13 * hidden
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_heads=heads,
        head_dim=hidden // heads,
        intermediate=4 * hidden,
        mlp_products=2,
        vocab=50257,
        parameter_count=(50257 + 1024) * hidden + layers * layer + 2 * hidden,
    )


# Models that dcp reckons with but does not train.
_SHAPES: dict[str, Shape] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
}


def config_named(name: str) -> Transformer1D | Shape:
    """A model by name: every preset as a configuration, GPT-2 as a shape.

    Raises
    ------
    dcp.ArgumentError
        No such model: the message suggests the nearest.

    Examples
    --------
    >>> from dcp.analytic import config_named
    >>> config_named("gpt2-large").parameter_count
    774030080
    """
    from dcp.models import Transformer1D, preset_names

    if name in _SHAPES:
        return _SHAPES[name]
    known = preset_names()
    if name not in known:
        raise ArgumentError(_nearest(name, [*known, *_SHAPES], "model"))
    return Transformer1D.preset(name)


def time_fields(shape: Shape, device: Device) -> dict[str, Any]:
    """The coefficients of time that groups have no part in.

    Per token: 2 flops a weight forward and 4 backward, and what kernels between the products read
    and write. Attention: Q K^T and P V forward, five such products backward, half of each under
    the causal mask. Whatever its tokens, a micro-batch launches its kernels and adds to gradients:
    a new one is read, the sum is read and written. Reading weights hides behind the products from
    some 300 tokens on (H200) and is left out. Computing a layer again ends, in dcp's own runtime,
    before the MLP's last product: no gradient needs the layer's output.
    """
    layers, item = shape.layers, device.element_bytes
    # forward, elements of a token and layer, read and written: two norms (2 h each), two residual
    # sums (3 h each), rotary (2 q + 2 k), SwiGLU or GELU (inner width)
    between = (
        10 * shape.hidden + 2 * (shape.query_width + shape.key_width) + shape.inner_width
    ) * item
    # logits written and read twice; both fp32 in the middle of cross entropy
    logits = shape.vocab * (3 * item + 8)
    gradient_item = item + 8 if item < 4 else 8
    forward = 2 * shape.layer_weights / device.matmul_flops_per_s + between / device.bytes_per_s
    square = 2 * shape.query_width / device.attention_flops_per_s
    square_back = 5 * shape.query_width / device.attention_backward_flops_per_s
    up = shape.mlp_products - 1  # products of an MLP computed again: all but the last
    again = forward
    if device.host:
        again -= 2 * shape.hidden * shape.intermediate / device.matmul_flops_per_s
        again -= 3 * shape.hidden * item / device.bytes_per_s  # the sum after it
    return {
        "latency_s": device.micro_batch_s
        + 3 * device.forward_kernels * layers * device.launch_s
        + gradient_item * shape.parameter_count / device.bytes_per_s,
        "token_s": 6 * shape.matmul_weights / device.matmul_flops_per_s
        + (3 * layers * between + logits) / device.bytes_per_s,
        "square_s": layers * (square + square_back),
        "layer_token_s": again,
        "layer_square_s": square,
        "mlp_token_s": 2 * up * shape.hidden * shape.intermediate / device.matmul_flops_per_s
        + (2 * shape.hidden + shape.inner_width) * item / device.bytes_per_s,
        "layer_count": layers,
        "node_ranks": device.node_ranks,
    }


def group_fields(shape: Shape, device: Device) -> dict[str, Any]:
    """The coefficients of a group's communication: Ulysses or ring, the cheaper one.

    Judged at the widest group that a tier is for: a node, and two nodes. Ulysses: four all-to-alls
    (q, k, v, output) of a token's rows forward and as many backward; where a group has more ranks
    than the model key heads, keys and values go to all that need them, which is a gather. Ring:
    keys and values pass every rank forward and backward, and their fp32 gradients once more; it is
    taken, too, where a tier has more ranks than the model heads. The forward part, which a dropped
    layer repeats, is 1/2 (Ulysses) or 1/(2 + 4 / element bytes) (ring) of all.
    """
    item, layers = device.element_bytes, shape.layers
    tiers: dict[str, list[float]] = {"gather_s": [], "exchange_s": [], "group_s": [], "hop_s": []}
    shares = []
    node = device.node_ranks or 2
    for tier, ranks in enumerate((node, 2 * node)):
        replicated = ranks > shape.key_heads
        rows = 2 * shape.query_width + (0 if replicated else 2 * shape.key_width)
        by_heads = 2 * layers * rows * item / device.exchange_bytes_per_s[tier]
        spread = 2 * shape.head_dim if replicated else 0  # of keys and values, to each rank
        by_gather = 2 * layers * spread * item / device.exchange_bytes_per_s[tier]
        passes = 2 * item + 4  # keys and values, twice; their gradients
        ring = 2 * layers * shape.key_width * passes / device.ring_bytes_per_s[tier]
        ulysses = ranks <= shape.heads and by_gather + by_heads / ranks <= ring
        tiers["gather_s"].append(by_gather if ulysses else ring)
        tiers["exchange_s"].append(by_heads if ulysses else 0.0)
        # eight all-to-alls a layer; the ring passes on forward, backward and with the gradients
        latency, step = device.collective_s[tier], device.hop_s[tier]
        tiers["group_s"].append(layers * 8 * latency if ulysses else 0.0)
        tiers["hop_s"].append(layers * (8 * step if ulysses else 3 * latency))
        shares.append(0.5 if ulysses else item / passes)
    # the core takes nothing that is cheaper across nodes, should the two choices differ
    pairs = {name: (pair[0], max(pair)) for name, pair in tiers.items()}
    return {**pairs, "layer_comm_share": max(shares) / layers}


def gpu_memory_fields(shape: Shape, device: Device) -> dict[str, Any]:
    """Bytes of mixed-precision training on a device of its own.

    Compute weights (2 bytes a parameter) and a whole fp32 gradient buffer (4) lie on every rank,
    since gradients are reduced once a step; fp32 weights and AdamW's moments (12) are cut over the
    ranks. Where the first two would take more than half of the memory, both are cut as well, each
    layer is gathered when it is used (two at a time) and reduced in each micro-batch: traffic whose
    exposed share `latency_s` then carries.

    Kept of a token and layer: input, both norms' outputs, the sum between (4 h), q and attention's
    output (2 q), keys and values (2 k), the MLP's inside, log-sum-exp in fp32. A dropped layer
    keeps its input. The final norm's input and output (2 h), one layer's gradients (3 h and the
    MLP's inside) and send buffers of a group (q, k, v, output) exist once.
    """
    item, layers, count = device.element_bytes, shape.layers, shape.parameter_count
    inner = shape.inner_width * item
    rows = 2 * shape.query_width + 2 * shape.key_width
    layer = (4 * shape.hidden + rows) * item + inner + 4 * shape.heads
    once = (5 * shape.hidden + rows) * item + inner
    fields: dict[str, Any] = {
        "token_bytes": layers * layer + once,
        "layer_token_bytes": layer - shape.hidden * item,
        "mlp_token_bytes": inner,
        "logit_bytes": shape.vocab * (item + 4),
        "logit_chunk_tokens": device.logit_chunk_tokens,
    }
    resident = (item + 4) * count
    if 2 * resident <= device.memory_bytes:
        return fields | {
            "fixed_bytes": device.reserve_bytes + resident,
            "sharded_bytes": 12 * count,
        }
    gathered = 2 * max(shape.layer_weights, shape.vocab * shape.hidden) * (item + 4)
    return fields | {
        "fixed_bytes": device.reserve_bytes + gathered,
        "sharded_bytes": (item + 4 + 12) * count,
        # forward, backward, and the gradients' way back
        "latency_s": device.gather_exposed * (2 * item + 4) * count / device.gather_bytes_per_s,
    }


def gpu_fields(shape: Shape, device: Device) -> dict[str, Any]:
    """All coefficients of a model on a GPU."""
    fields = time_fields(shape, device) | group_fields(shape, device)
    memory = gpu_memory_fields(shape, device)
    fields["latency_s"] += memory.pop("latency_s", 0.0)
    return fields | memory


def host_fixed_fields(
    config: Transformer1D,
    reduce: str,
    windows: bool = True,
    optimizer: Optimizer | None = None,
    prefetch: int = 0,
    gather: str = "layer",
    residual: bool = False,
) -> dict[str, Any]:
    """fp32 weights, gradients and the optimizer's state of dcp's own runtime, in bytes.

    Beside shards a rank holds whole gradients, or whole groups of them, and without windows a whole
    group of weights, or, with `prefetch`, two, in the model's `compute_dtype`; a tied embedding has
    a place of its own, since the head uses it too. Then
    there are a rank's share of the world's staging memory, the tables of buffers and layouts, the
    padding of buffers, so that rank borders cut no block, and the table of rotary angles at its
    largest, since one micro-batch's table can stay beside the activations of another. With `gather`
    "step" all groups of weights stay; with `residual` a rank keeps what quantised gradients left
    out, and the messages they travel in.
    """
    if gather not in ("layer", "step"):
        raise ArgumentError(f"gather = {gather!r} must be 'layer' or 'step'")
    if reduce not in ("step", "layer"):
        raise ArgumentError(f"reduce = {reduce!r} must be 'step' or 'layer'")
    count = config.parameter_count()
    sizes = {name: math.prod(shape) for name, shape in config.tensors()}
    groups = [sum(sizes[name] for name in names) for _, names in config.groups()]
    embedding = groups.pop(0) if config.tie_word_embeddings else 0
    first = len(config.groups()) - len(groups)  # even and odd groups have a place each
    turns = [groups[(first + i) % 2 :: 2] for i in (0, 1)] if prefetch else [groups]
    gathered = 0 if windows else sum(map(max, turns)) + embedding
    if gather == "step" and not windows:
        gathered = count
    item = 2.0 if config.compute_dtype == "bfloat16" else 4.0
    # AdamW's two moments, where nothing is said
    state = (0.0, 8.0 * _PADDED * count)
    if optimizer is not None:
        state = host_state_bytes(config, optimizer, windows)
    once = _RUNTIME_BYTES + host_rotary_bytes(config, config.max_position_embeddings)
    whole = count if reduce == "step" else (2 if windows else 1) * max(groups) + embedding
    if residual:
        whole += 3 * count  # two messages of up to 4 bytes an element
    return {
        "fixed_bytes": _PADDED * (4.0 * whole + item * gathered) + once + state[0],
        "sharded_bytes": (4.0 if reduce == "step" else 8.0) * _PADDED * count + state[1],
    }


_STATE_WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)


def host_state_bytes(
    config: Transformer1D, optimizer: Optimizer, windows: bool = True
) -> tuple[float, float]:
    """(a, b) such that the optimizer holds at most a + b / W bytes on a rank of W.

    What each rank holds whatever W is (scratch for a matrix, say) is taken from the largest world
    looked at; b is the least that is enough for all of them.
    """
    tensors = config.tensors()
    core = config.core(), [rule.core() for rule in optimizer.rules(tensors)]
    held = {
        ranks: _dcp.optimizer_bytes(*core, ranks=ranks, no_windows=not windows)
        for ranks in _STATE_WORLDS
    }
    fixed = float(min(held.values()))
    return fixed, max(ranks * (bytes_ - fixed) for ranks, bytes_ in held.items())


def host_rotary_bytes(config: Transformer1D, tokens: int) -> int:
    """Bytes of the table of rotary angles for sequences of up to so many tokens."""
    rows = min(-(-tokens // 256) * 256, config.max_position_embeddings)
    return 4 * rows * config.head_dim


def host_group_token_bytes(shape: Shape, windows: bool = True) -> float:
    """Bytes that each rank of a group holds for every token of the group, whoever computes it.

    Its copy of one layer's keys and values, then its partial gradients of them, in fp32; at most 72
    bytes of tables that say which rank holds which rows, and of this rank's part of the batch.
    Without windows also what it sends and receives (csrc/train/sequence_boxes.c), at most: keys and
    values of others, 8 K D bytes; its own for each part of a slot, 4 (K + H) D; partial gradients
    of its rows, 8 (K + 1) D; and columns of its slot's rows, 16 (H / 2 + 1) D + 6 H D, and lse.
    """
    held = 2.0 * shape.key_width * 4 + 72.0
    if windows:
        return held
    heads, kv_heads, dim = shape.heads, shape.key_heads, shape.head_dim
    keys = 8 * kv_heads + 4 * (kv_heads + heads) + 8 * (kv_heads + 1)
    columns = 16 * (heads / 2 + 1) + 6 * heads
    return held + dim * (keys + columns) + 2 * heads + 4
