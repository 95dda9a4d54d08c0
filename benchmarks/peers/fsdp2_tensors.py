"""The peer of bench_fsdp.py: gather, reduce and AdamW of a model's tensors by PyTorch FSDP2 + Gloo.

A layer here holds the tensors of one group and computes next to nothing (one element of each), so
that a step is what FSDP2 does around computing: all-gathers forward and backward, gradients of full
size, reduce-scatters, clipping, AdamW. Run by torchrun; prints one JSON line on rank 0: seconds of
each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Group(nn.Module):
    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tensor in self.tensors:
            x = x + tensor.flatten()[0].to(x.dtype)
        return x


class Model(nn.Module):
    def __init__(self, groups: list[list[list[int]]]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(Group(shapes) for shapes in groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = group(x)
        return x


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    model = Model(settings["groups"])
    policy = MixedPrecisionPolicy()
    if settings["dtype"] == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for group in model.groups:
        fully_shard(group, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    seconds = []
    for _ in range(settings["steps"]):
        dist.barrier()
        start = time.perf_counter()
        model(torch.zeros(1, requires_grad=True)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    first = [group.tensors[0].full_tensor().flatten()[0].item() for group in model.groups]
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "first": first}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
