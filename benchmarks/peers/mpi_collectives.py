"""Collectives of fp32 through mpi4py: prints seconds as JSON.

mpirun python mpi_collectives.py ELEMENTS REPEATS
"""

import json
import sys
import time

import numpy as np
from mpi4py import MPI

count, repeats = int(sys.argv[1]), int(sys.argv[2])
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
# ragged, as ours: the i-th rank gets 3 + 2 i shares
shares = np.array([3 + 2 * i for i in range(size)])
counts = count * shares // shares.sum()
counts[-1] += count - counts.sum()
x = np.arange(count, dtype=np.float32) * (rank + 1)
slice_ = np.empty(counts[rank], np.float32)
whole = np.empty(count, np.float32)
tiny, tiny_sum = np.ones(4, np.float32), np.empty(4, np.float32)
factor = size * (size + 1) // 2


def best(call, inner=1):
    seconds = []
    for _ in range(repeats):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(inner):
            call()
        comm.Barrier()
        seconds.append((time.perf_counter() - start) / inner)
    return min(seconds)


def reduce_scatter():
    comm.Reduce_scatter(x, slice_, counts)


def allgather():
    comm.Allgatherv(slice_, [whole, counts])


reduce_scatter()
allgather()
np.testing.assert_allclose(whole, np.arange(count, dtype=np.float32) * factor, rtol=1e-6)
result = {
    "reduce_scatter": best(reduce_scatter),
    "allgather": best(allgather),
    "allreduce": best(lambda: comm.Allreduce(x, whole)),
    "tiny_allreduce": best(lambda: comm.Allreduce(tiny, tiny_sum), 50),
}
if rank == 0:
    print(json.dumps(result), flush=True)
