"""Tensor lists of published models, from the numbers of their configurations alone.

Names and shapes are those of the models' Hugging Face checkpoints, in the order in which a pass
uses them. Scales of quantised checkpoints, rotary tables and DeepSeek-V3's module for a second
token are not parameters of the model and are left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from dcp._dcp import ArgumentError

__all__ = ["model_names", "model_tensors"]

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def _llama(
    hidden: int,
    layers: int,
    heads: int,
    key_heads: int,
    inner: int,
    vocab: int,
    *,
    head_dim: int | None = None,
    tied: bool = False,
    norms_of_heads: bool = False,
    experts: int = 0,
    router: str = "mlp.gate",
    expert: str = "mlp.experts.{}.{}",
    products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Tensors:
    """Llama, and with more: Qwen3 (norms of heads, experts of width `inner`) and Mixtral."""
    width = head_dim or hidden // heads
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (heads * width, hidden)
        yield at + "self_attn.k_proj.weight", (key_heads * width, hidden)
        yield at + "self_attn.v_proj.weight", (key_heads * width, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, heads * width)
        if norms_of_heads:
            yield at + "self_attn.q_norm.weight", (width,)
            yield at + "self_attn.k_norm.weight", (width,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        if experts:
            yield at + router + ".weight", (experts, hidden)
        for number in range(experts or 1):
            for product, shape in zip(
                products, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True
            ):
                name = expert.format(number, product) if experts else f"mlp.{product}"
                yield f"{at}{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (vocab, hidden)


def _mixtral(
    hidden: int, layers: int, heads: int, key_heads: int, inner: int, vocab: int, *, experts: int
) -> Tensors:
    return _llama(
        hidden,
        layers,
        heads,
        key_heads,
        inner,
        vocab,
        experts=experts,
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}.{}",
        products=("w1", "w3", "w2"),
    )


def _gpt_oss(*, layers: int, experts: int) -> Tensors:
    """Experts fused into one tensor each of gate and up, and of down; all with biases."""
    hidden, heads, key_heads, width, inner, vocab = 2880, 64, 8, 64, 2880, 201088
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        for name, rows in (("q", heads), ("k", key_heads), ("v", key_heads)):
            yield f"{at}self_attn.{name}_proj.weight", (rows * width, hidden)
            yield f"{at}self_attn.{name}_proj.bias", (rows * width,)
        yield at + "self_attn.o_proj.weight", (hidden, heads * width)
        yield at + "self_attn.o_proj.bias", (hidden,)
        yield at + "self_attn.sinks", (heads,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.router.weight", (experts, hidden)
        yield at + "mlp.router.bias", (experts,)
        yield at + "mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
        yield at + "mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
        yield at + "mlp.experts.down_proj", (experts, inner, hidden)
        yield at + "mlp.experts.down_proj_bias", (experts, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _deepseek_v3() -> Tensors:
    """Latent attention; three dense layers, then 256 experts and a shared one in each."""
    hidden, layers, dense_layers, heads, vocab = 7168, 61, 3, 128, 129280
    q_rank, kv_rank, nope, rope, v_width = 1536, 512, 128, 64, 128
    inner, expert_inner, experts = 18432, 2048, 256

    def mlp(at: str, width: int) -> Tensors:
        yield at + "gate_proj.weight", (width, hidden)
        yield at + "up_proj.weight", (width, hidden)
        yield at + "down_proj.weight", (hidden, width)

    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "self_attn.q_a_proj.weight", (q_rank, hidden)
        yield at + "self_attn.q_a_layernorm.weight", (q_rank,)
        yield at + "self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank)
        yield at + "self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
        yield at + "self_attn.kv_a_layernorm.weight", (kv_rank,)
        yield at + "self_attn.kv_b_proj.weight", (heads * (nope + v_width), kv_rank)
        yield at + "self_attn.o_proj.weight", (hidden, heads * v_width)
        yield at + "post_attention_layernorm.weight", (hidden,)
        if layer < dense_layers:
            yield from mlp(at + "mlp.", inner)
            continue
        yield at + "mlp.gate.weight", (experts, hidden)
        yield at + "mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from mlp(f"{at}mlp.experts.{expert}.", expert_inner)
        yield from mlp(at + "mlp.shared_experts.", expert_inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def _gpt2(hidden: int, layers: int) -> Tensors:
    """Weights as (in, out), learned positions, tied head."""
    yield "transformer.wte.weight", (50257, hidden)
    yield "transformer.wpe.weight", (1024, hidden)
    for layer in range(layers):
        at = f"transformer.h.{layer}."
        for name, shape in (
            ("ln_1", (hidden,)),
            ("attn.c_attn", (hidden, 3 * hidden)),
            ("attn.c_proj", (hidden, hidden)),
            ("ln_2", (hidden,)),
            ("mlp.c_fc", (hidden, 4 * hidden)),
            ("mlp.c_proj", (4 * hidden, hidden)),
        ):
            yield f"{at}{name}.weight", shape
            yield f"{at}{name}.bias", shape[-1:]
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)


def _qwen3(
    hidden: int, layers: int, heads: int, inner: int, *, key_heads: int = 8, **more: Any
) -> Tensors:
    return _llama(
        hidden,
        layers,
        heads,
        key_heads,
        inner,
        151936,
        head_dim=128,
        norms_of_heads=True,
        **more,
    )


# What the models' config.json say.
_MODELS: dict[str, Callable[[], Tensors]] = {
    "gpt-oss-20b": lambda: _gpt_oss(layers=24, experts=32),
    "gpt-oss-120b": lambda: _gpt_oss(layers=36, experts=128),
    "deepseek-v3": _deepseek_v3,
    "llama-3.1-405b": lambda: _llama(16384, 126, 128, 8, 53248, 128256),
    "qwen3-0.6b": lambda: _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": lambda: _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": lambda: _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": lambda: _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": lambda: _qwen3(5120, 64, 64, 25600),
    "qwen3-30b-a3b": lambda: _qwen3(2048, 48, 32, 768, key_heads=4, experts=128),
    "qwen3-235b-a22b": lambda: _qwen3(4096, 94, 64, 1536, key_heads=4, experts=128),
    "mixtral-8x7b": lambda: _mixtral(4096, 32, 32, 8, 14336, 32000, experts=8),
    "mixtral-8x22b": lambda: _mixtral(6144, 56, 48, 8, 16384, 32768, experts=8),
    "gpt2": lambda: _gpt2(768, 12),
    "gpt2-medium": lambda: _gpt2(1024, 24),
    "gpt2-large": lambda: _gpt2(1280, 36),
    "gpt2-xl": lambda: _gpt2(1600, 48),
}


def model_names() -> list[str]:
    """Names of all models: those here, and the presets that dcp trains.

    Examples
    --------
    >>> "deepseek-v3" in model_names() and "llama-3-70b" in model_names()
    True
    """
    from dcp.models import preset_names

    return [*_MODELS, *preset_names()]


def model_tensors(name: str) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a model, in the order of a pass.

    Parameters
    ----------
    name : str
        One of `model_names`.

    Raises
    ------
    dcp.ArgumentError
        No such model: the message suggests the nearest.

    Examples
    --------
    >>> import math
    >>> tensors = model_tensors("gpt2-large")
    >>> tensors[0], sum(math.prod(shape) for _, shape in tensors)
    (('transformer.wte.weight', (50257, 1280)), 774030080)
    """
    from dcp.models import Transformer1D, preset_names

    if name in _MODELS:
        return list(_MODELS[name]())
    if name in preset_names():
        return Transformer1D.preset(name).tensors()
    near = difflib.get_close_matches(name.lower(), model_names(), 1)
    hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(model_names())}"
    raise ArgumentError(f"unknown model {name!r}: {hint}")
