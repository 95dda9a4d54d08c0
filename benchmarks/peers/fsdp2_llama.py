"""The peer of bench_train.py: a Llama in PyTorch, FSDP2 over Gloo, SDPA, run by torchrun.

It reads what bench_train.py wrote (documents of each step, settings, initial weights), so that both
sides train the same model on the same documents. Two ways to batch documents of different lengths:

pad    sorted by length inside a step, padded to the longest of a micro-batch; documents do not see
       each other
chunk  laid end to end and cut into rows of the maximum length; a row may hold several documents,
       which then see each other (another model of the data, nothing wasted)

With --dtype bfloat16 it trains in FSDP2's mixed precision: parameters are gathered, and the layers
compute, in bf16; main weights, gradients' reduction and the loss are fp32.

Prints one JSON line on rank 0: seconds and trainable tokens of each step, losses.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

IGNORE = -100
FILLER = [np.zeros(2, np.uint8)]  # a micro-batch that counts for nothing: FSDP needs equal numbers


class Attention(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = c["head_dim"]
        h = c["hidden_size"]
        self.q_proj = nn.Linear(h, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, h, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, length, -1, self.dim).transpose(1, 2)

        def rotate(y: torch.Tensor) -> torch.Tensor:
            half = self.dim // 2
            return y * cos + torch.cat((-y[..., half:], y[..., :half]), -1) * sin

        q, k, v = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        y = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        h, f = c["hidden_size"], c["intermediate_size"]
        self.gate_proj = nn.Linear(h, f, bias=False)
        self.up_proj = nn.Linear(h, f, bias=False)
        self.down_proj = nn.Linear(f, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.self_attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])


class Llama(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.c = c
        self.model = Body(c)
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        dim = self.c["head_dim"]
        rates = self.c["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.outer(torch.arange(ids.shape[1]).double(), rates)
        angles = torch.cat((angles, angles), -1)
        x = self.model.embed_tokens(ids)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))


def rows_of(documents: list[np.ndarray], mode: str, longest: int) -> list[np.ndarray]:
    if mode == "pad":
        return sorted(documents, key=len)
    flat = np.concatenate(documents)
    return [flat[i : i + longest] for i in range(0, len(flat) - 1, longest)]


def micro_batches(rows: list[np.ndarray], area: int, world: int) -> list[list[np.ndarray]]:
    """Rows in order, padded area of each at most `area`; their number a multiple of the world."""
    batches: list[list[np.ndarray]] = []
    current: list[np.ndarray] = []
    for row in rows:
        widest = max([len(row), *map(len, current)])
        if current and widest * (len(current) + 1) > area:
            batches.append(current)
            current = []
        current.append(row)
    batches.append(current)
    while len(batches) % world:
        batches.append(FILLER)
    return sorted(batches, key=lambda b: -sum(len(r) ** 2 for r in b))


def mine(batches: list[list[np.ndarray]], rank: int, world: int) -> list[list[np.ndarray]]:
    """Dealt there and back, so that loads even out."""
    turn = 2 * world
    owner = [k % turn if k % turn < world else turn - 1 - k % turn for k in range(len(batches))]
    return [b for b, o in zip(batches, owner, strict=True) if o == rank]


def tensors_of(batch: list[np.ndarray], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, batch))
    ids = torch.full((len(batch), length), pad)
    labels = torch.full((len(batch), length - 1), IGNORE)
    for i, row in enumerate(batch):
        ids[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
        if batch is not FILLER:
            labels[i, : len(row) - 1] = ids[i, 1 : len(row)]
    return ids, labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=("pad", "chunk"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    settings = json.loads((args.folder / "settings.json").read_text())
    config = settings["model"]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    model = Llama(config)
    model.load_state_dict(load_file(args.folder / "model.safetensors"))
    policy = MixedPrecisionPolicy()
    if args.dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.1
    )
    data = np.load(args.folder / "documents.npz")
    seconds, tokens, losses = [], [], []
    for step in range(settings["steps"]):
        flat, offsets = data[f"tokens_{step}"], data[f"offsets_{step}"]
        documents = [flat[a:b] for a, b in itertools.pairwise(offsets) if b - a > 1]
        dist.barrier()
        start = time.perf_counter()
        rows = rows_of(documents, args.mode, settings["max_length"])
        area = max(settings["max_length"], settings["tokens_per_step"] // world // 2)
        batches = micro_batches(rows, area, world)
        count = sum(len(row) - 1 for row in rows)
        share = mine(batches, rank, world)
        total = torch.zeros(())
        for i, batch in enumerate(share):
            ids, labels = tensors_of(batch, config["vocab_size"] - 1)
            model.set_requires_gradient_sync(i == len(share) - 1)
            logits = model(ids)[:, :-1].reshape(-1, config["vocab_size"]).float()
            loss = F.cross_entropy(logits, labels.reshape(-1), ignore_index=IGNORE, reduction="sum")
            (loss * world / count).backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        dist.all_reduce(total)
        tokens.append(count)
        losses.append(total.item() / count)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "tokens": tokens, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
