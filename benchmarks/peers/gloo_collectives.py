"""Collectives of fp32 through PyTorch and Gloo: prints seconds as JSON.

torchrun gloo_collectives.py ELEMENTS REPEATS
"""

import json
import sys
import time

import torch
import torch.distributed as dist

count, repeats = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(count, dtype=torch.float32) * (rank + 1)
slice_ = torch.empty(count // size)
whole = torch.empty(count)
tiny = torch.ones(4)
factor = size * (size + 1) // 2


def best(call, inner=1):
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        dist.barrier()
        seconds.append((time.perf_counter() - start) / inner)
    return min(seconds)


def reduce_scatter():
    dist.reduce_scatter_tensor(slice_, x)


def allgather():
    dist.all_gather_into_tensor(whole, slice_)


def allreduce():
    whole.copy_(x)
    dist.all_reduce(whole)


reduce_scatter()
allgather()
torch.testing.assert_close(whole, torch.arange(count, dtype=torch.float32) * factor)
result = {
    "reduce_scatter": best(reduce_scatter),
    "allgather": best(allgather),
    "allreduce": best(allreduce),
    "tiny_allreduce": best(lambda: dist.all_reduce(tiny), 50),
}
if rank == 0:
    print(json.dumps(result), flush=True)
dist.destroy_process_group()
