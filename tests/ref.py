"""Transformer1D in float64 NumPy: logits, loss and the gradient of every tensor.

Slow and plain: it is the judge of the fast one. Sequences are computed one by one, so nothing can
leak from one to another; a forward function returns its result and what its backward function
needs. Legend: T tokens of all sequences, S of one, h hidden, f inner, H query heads, K key-value
heads, D head size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

IGNORED = -100
Masks = Callable[[int, int], np.ndarray]  # (layer, place) -> [T, h] factor of each element


def round_bf16(x):
    """The nearest bf16 numbers (8 bits of mantissa, ties to even), in the dtype of x."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.asarray(x).dtype)


def unchanged(x):
    return x


def norm(x, weight, eps):
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * rstd * weight, (x, weight, rstd)


def norm_backward(dy, kept):
    x, weight, rstd = kept
    dweight = np.sum(dy * x * rstd, axis=0)
    dn = dy * weight
    dx = rstd * (dn - x * rstd**2 * np.mean(dn * x, axis=-1, keepdims=True))
    return dx, dweight


def rotation(length, head_dim, theta, dtype=np.float64):
    """cos and sin [S, 1, D/2]."""
    frequency = theta ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angle = np.arange(length)[:, None, None] * frequency
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


def rotate(x_SHD, turn, inverse=False):
    """Element i turns with element i + D/2."""
    cos, sin = turn
    sin = -sin if inverse else sin
    a, b = np.split(x_SHD, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q_SHD, k_SKD, v_SKD, factor=unchanged):
    """Causal attention of one sequence; `factor` makes a factor of a product."""
    length, heads, head_dim = q_SHD.shape
    share = heads // k_SKD.shape[1]
    q = factor(q_SHD)
    k, v = np.repeat(factor(k_SKD), share, axis=1), np.repeat(factor(v_SKD), share, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) / head_dim**0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", factor(weights), v), (q, k, v, weights, share, factor)


def attention_backward(dout_SHD, kept):
    q, k, v, weights, share, factor = kept
    length, heads, head_dim = q.shape
    dout = factor(dout_SHD)
    dv = np.einsum("hij,ihd->jhd", factor(weights), dout)
    dweights = np.einsum("ihd,jhd->hij", dout, v)
    dscores = weights * (dweights - np.sum(dweights * weights, axis=-1, keepdims=True))
    dscores = factor(dscores) / head_dim**0.5
    dq = np.einsum("hij,jhd->ihd", dscores, k)
    dk = np.einsum("hij,ihd->jhd", dscores, q)

    def group(x):
        return x.reshape(length, heads // share, share, head_dim).sum(axis=2)

    return dq, group(dk), group(dv)


class Reference:
    """A Llama in float64.

    Parameters
    ----------
    config : object with the fields of `dcp.Transformer1D`
    tensors : mapping from Hugging Face's names to arrays
    dtype : np.float32 makes it the textbook version in that precision: what rounding alone costs
    factor : applied to every factor of a product; `round_bf16`: what rounding these costs
    """

    def __init__(
        self,
        config: Any,
        tensors: Mapping[str, np.ndarray],
        dtype: Any = np.float64,
        factor: Callable[[np.ndarray], np.ndarray] = unchanged,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.factor = factor
        self.tensors = {name: np.asarray(x, dtype) for name, x in tensors.items()}

    def _linear(self, x, name):
        bias = self.tensors.get(f"{name}.bias")
        y = self.factor(x) @ self.factor(self.tensors[f"{name}.weight"]).T
        return y if bias is None else y + bias

    def _linear_backward(self, dy, x, name, gradients):
        gradients[f"{name}.weight"] += self.factor(dy).T @ self.factor(x)
        if f"{name}.bias" in gradients:
            gradients[f"{name}.bias"] += dy.sum(axis=0)
        return self.factor(dy) @ self.factor(self.tensors[f"{name}.weight"])

    @property
    def _head(self) -> str:
        return "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"

    def _layer(self, x, i, masks):
        c, name, (length, _) = self.config, f"model.layers.{i}", x.shape
        turn = rotation(length, c.head_dim, c.rope_theta, self.dtype)
        n1, kept1 = norm(x, self.tensors[f"{name}.input_layernorm.weight"], c.rms_norm_eps)
        q, k, v = (
            self._linear(n1, f"{name}.self_attn.{p}_proj").reshape(length, -1, c.head_dim)
            for p in "qkv"
        )
        out, kept_attention = attention(rotate(q, turn), rotate(k, turn), v, self.factor)
        out = out.reshape(length, -1)
        middle = x + masks[0] * self._linear(out, f"{name}.self_attn.o_proj")
        n2, kept2 = norm(
            middle, self.tensors[f"{name}.post_attention_layernorm.weight"], c.rms_norm_eps
        )
        gate = self._linear(n2, f"{name}.mlp.gate_proj")
        up = self._linear(n2, f"{name}.mlp.up_proj")
        sigmoid = 1 / (1 + np.exp(-gate))
        inner = gate * sigmoid * up
        x_next = middle + masks[1] * self._linear(inner, f"{name}.mlp.down_proj")
        return x_next, (
            turn, n1, kept1, kept_attention, out, n2, kept2, gate, up, sigmoid, inner, masks,
        )  # fmt: skip

    def _layer_backward(self, dx, i, kept, gradients):
        turn, n1, kept1, kept_attention, out, n2, kept2, gate, up, sigmoid, inner, masks = kept
        name, length = f"model.layers.{i}", len(dx)
        dinner = self._linear_backward(dx * masks[1], inner, f"{name}.mlp.down_proj", gradients)
        dgate = dinner * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dinner * gate * sigmoid
        dn2 = self._linear_backward(dgate, n2, f"{name}.mlp.gate_proj", gradients)
        dn2 += self._linear_backward(dup, n2, f"{name}.mlp.up_proj", gradients)
        dmiddle, dweight = norm_backward(dn2, kept2)
        gradients[f"{name}.post_attention_layernorm.weight"] += dweight
        dmiddle += dx
        dout = self._linear_backward(dmiddle * masks[0], out, f"{name}.self_attn.o_proj", gradients)
        dq, dk, dv = attention_backward(
            dout.reshape(length, -1, self.config.head_dim), kept_attention
        )
        parts = {"q": rotate(dq, turn, inverse=True), "k": rotate(dk, turn, inverse=True), "v": dv}
        dn1 = np.zeros_like(n1)
        for p, d in parts.items():
            dn1 += self._linear_backward(
                d.reshape(length, -1), n1, f"{name}.self_attn.{p}_proj", gradients
            )
        dx, dweight = norm_backward(dn1, kept1)
        gradients[f"{name}.input_layernorm.weight"] += dweight
        return dx + dmiddle

    def _sequence(self, tokens, masks):
        """Logits of one sequence, and what the backward pass needs."""
        c = self.config
        x = self.tensors["model.embed_tokens.weight"][tokens]
        layers = []
        for i in range(c.num_hidden_layers):
            x, kept = self._layer(x, i, [masks(i, 0), masks(i, 1)])
            layers.append(kept)
        n, kept_norm = norm(x, self.tensors["model.norm.weight"], c.rms_norm_eps)
        return self._linear(n, self._head), (tokens, layers, n, kept_norm)

    def _sequence_backward(self, dlogits, kept, gradients):
        tokens, layers, n, kept_norm = kept
        dn = self._linear_backward(dlogits, n, self._head, gradients)
        dx, dweight = norm_backward(dn, kept_norm)
        gradients["model.norm.weight"] += dweight
        for i in reversed(range(len(layers))):
            dx = self._layer_backward(dx, i, layers[i], gradients)
        np.add.at(gradients["model.embed_tokens.weight"], tokens, dx)

    def logits(self, tokens, offsets) -> np.ndarray:
        """[T, V]."""
        tokens = np.asarray(tokens)
        parts = [
            self._sequence(tokens[a:b], lambda *_: 1.0)[0]
            for a, b in itertools.pairwise(offsets)
            if b > a
        ]
        return np.concatenate([np.zeros((0, self.config.vocab_size)), *parts])

    def loss_and_gradients(
        self,
        tokens,
        offsets,
        labels,
        *,
        weights=None,
        scale: float | None = None,
        masks: Masks | None = None,
    ) -> tuple[float, dict[str, np.ndarray]]:
        """scale * sum over labelled tokens of weight * cross entropy, and its gradients.

        scale None: one over the number of labelled tokens. masks: factors of dropout.
        """
        tokens, labels = np.asarray(tokens), np.asarray(labels)
        factor = np.ones(len(tokens)) if weights is None else np.asarray(weights, np.float64)
        scale = 1 / max(np.count_nonzero(labels != IGNORED), 1) if scale is None else scale
        gradients = {name: np.zeros_like(x) for name, x in self.tensors.items()}
        loss = 0.0
        for a, b in itertools.pairwise(offsets):
            if a == b:
                continue

            def mask(layer, place, a=a, b=b):
                return 1.0 if masks is None else masks(layer, place)[a:b]

            logits, kept = self._sequence(tokens[a:b], mask)
            top = logits.max(axis=-1, keepdims=True)
            lse = top + np.log(np.sum(np.exp(logits - top), axis=-1, keepdims=True))
            rows = np.flatnonzero(labels[a:b] != IGNORED)
            w = np.zeros((b - a, 1), self.dtype)
            w[rows, 0] = scale * factor[a:b][rows]
            picked = logits[rows, labels[a:b][rows]]
            loss += float(np.sum(w[rows, 0] * (lse[rows, 0] - picked)))
            dlogits = np.exp(logits - lse)
            dlogits[rows, labels[a:b][rows]] -= 1
            self._sequence_backward(w * dlogits, kept, gradients)
        return loss, gradients


def newton_schulz(u, iterations=5):
    """What Muon makes of a matrix of norm > 1e-7; [rows, columns]."""
    x = u / np.linalg.norm(u)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon_ref(w, gradients, *, lr, momentum, nesterov, weight_decay, iterations=5):
    """Weights and momentum after one Muon step per gradient; [rows, columns]."""
    m = np.zeros_like(w)
    for g in gradients:
        m = momentum * m + g
        o = newton_schulz(g + momentum * m if nesterov else m, iterations)
        w = w - lr * (0.2 * np.sqrt(max(w.shape)) * o + weight_decay * w)
    return w, m


def inverse_fourth_root(a, ridge=1e-6):
    """(a + ridge * largest eigenvalue)^(-1/4) by eigh; the identity for 0."""
    values, vectors = np.linalg.eigh(a)
    if values[-1] <= 0:
        return np.eye(len(a))
    values = np.maximum(values, 0) + ridge * values[-1]
    return (vectors * values**-0.25) @ vectors.T


def even_cuts(size, block):
    """Slices of as few near equal parts as keep each <= block."""
    parts = np.array_split(np.arange(size), -(-size // block))
    return [slice(part[0], part[-1] + 1) for part in parts]


def shampoo_ref(w, gradients, *, lr, betas, eps, weight_decay, block, roots_at):
    """Weights and states after one Shampoo step per gradient; [rows, columns].

    `roots_at(step)`: are inverse roots made in this step? States are lists over blocks, by rows,
    then columns; m and v whole.
    """
    beta1, beta2 = betas
    m, v = np.zeros_like(w), np.zeros_like(w)
    cells = [(i, j) for i in even_cuts(len(w), block) for j in even_cuts(w.shape[1], block)]
    left = [np.zeros((i.stop - i.start,) * 2) for i, _ in cells]
    right = [np.zeros((j.stop - j.start,) * 2) for _, j in cells]
    roots = [(None, None)] * len(cells)
    for step, g in enumerate(gradients):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        adam = m / (1 - beta1 ** (step + 1)) / (np.sqrt(v / (1 - beta2 ** (step + 1))) + eps)
        update = np.zeros_like(w)
        for k, cell in enumerate(cells):
            left[k] = beta2 * left[k] + (1 - beta2) * g[cell] @ g[cell].T
            right[k] = beta2 * right[k] + (1 - beta2) * g[cell].T @ g[cell]
            if roots_at(step):
                roots[k] = inverse_fourth_root(left[k]), inverse_fourth_root(right[k])
            p = roots[k][0] @ m[cell] @ roots[k][1]
            norm = np.linalg.norm(p)
            update[cell] = p * (np.linalg.norm(adam[cell]) / norm if norm > 0 else 0.0)
        w = w - lr * (update + weight_decay * w)
    return w, {"left": left, "right": right, "m": m, "v": v}


def adamw_ref(w, gradients, *, lr, betas, eps, weight_decay):
    """Weights, m and v after a step a gradient, from zero state."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        step = (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        w = w - lr * (step + weight_decay * w)
    return w, m, v


def dynamic_code(top):
    """Values of the codes 0 .. 2^(top + 1) - 1 of 8-bit AdamW, the largest 1."""
    values = [0.0]
    for decade in range(top + 1):
        count = 2**decade
        inside = 0.1 + 0.9 * (np.arange(count) + 0.5) / count
        values += list(10.0 ** (decade - top) * inside)
    return np.array(values) / values[-1]


CODE_M, CODE_V = dynamic_code(6), dynamic_code(7)


def scales_by_element(scales, width, block=256):
    """Scales [rows, blocks] as one an element [rows, width]."""
    return np.repeat(scales, block, axis=1)[:, :width]


def decode_8bit(m, m_scale, v, v_scale):
    """Codes [rows, width] and scales [rows, blocks] as float64 m and v."""
    sign = np.where(m & 128, -1.0, 1.0)
    width = m.shape[1]
    return (
        sign * CODE_M[m & 127] * scales_by_element(m_scale, width),
        CODE_V[v] * scales_by_element(v_scale, width),
    )


def encode_8bit(m, v, block=256):
    """m and v [rows, width] as (codes, scales) each: the nearest values, v > 0 not 0."""
    rows, width = m.shape
    padded = -(-width // block) * block

    def scales(x):
        whole = np.zeros((rows, padded))
        whole[:, :width] = np.abs(x)
        return whole.reshape(rows, padded // block, block).max(axis=2)

    def nearest(x, scale, table):
        by_element = scales_by_element(scale, width)
        share = np.abs(x) / np.where(by_element > 0, by_element, 1)
        return np.abs(share[..., None] - table).argmin(axis=-1)

    m_scale, v_scale = scales(m), scales(v)
    m_code = nearest(m, m_scale, CODE_M)
    m_code = np.where((m < 0) & (m_code > 0), m_code + 128, m_code)
    v_code = np.where(v > 0, np.maximum(nearest(v, v_scale, CODE_V), 1), 0)
    return m_code.astype(np.uint8), m_scale, v_code.astype(np.uint8), v_scale
