"""How fast each pair of ranks of a job exchanges bytes, and all ranks together: a short test before a job."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from mmtrain.parallel.alike import describe_ranks

PAIR_BYTES = 2**23
"""The bytes of a message between two ranks."""
SUM_BYTES = 2**25
"""The bytes of the tensor that all ranks sum."""
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpeeds:
    """What the ranks of a job measured."""

    pair_s: dict[tuple[int, int], float]
    """The seconds in which each rank of a pair (lower, higher) got a message of the other; the shortest of some."""
    sum_s: float
    """Seconds of a sum over all ranks, of the slowest rank; the shortest of some."""
    hosts: tuple[str, ...]
    """The host of each rank."""

    def lines(self) -> list[str]:
        """What to tell the user."""
        pairs = sorted(self.pair_s, key=lambda pair: self.pair_s[pair])
        median, slowest = pairs[len(pairs) // 2], pairs[-1]
        lines = [
            f"{len(pairs)} pairs of {len(self.hosts)} ranks, {PAIR_BYTES / 2**20:.0f} MiB each way: median "
            f"{_rate(PAIR_BYTES, self.pair_s[median])}, slowest {_rate(PAIR_BYTES, self.pair_s[slowest])} between "
            f"{' and '.join(describe_ranks([rank], self.hosts) for rank in slowest)}"
        ]
        lines.append(f"sum of {SUM_BYTES / 2**20:.0f} MiB over all ranks: {1e3 * self.sum_s:.1f} ms")
        return lines


def measure_pairs(device: torch.device) -> PairSpeeds:
    """Measures all pairs of ranks, each rank in one pair at a time, and a sum. Collective over the job.

    A rank that does not answer ends it as any collective, after comm.timeout_seconds.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    out, into = (torch.zeros(PAIR_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    own: dict[tuple[int, int], float] = {}
    for pairs in tournament(size):
        dist.barrier()
        for pair in (pair for pair in pairs if rank in pair):
            other = pair[pair[0] == rank]
            own[pair] = min(_seconds(partial(_exchange, out, into, other), device) for _ in range(_REPEATS))
    total = torch.zeros(SUM_BYTES // 4, device=device)
    sums = []
    for _ in range(_REPEATS):
        dist.barrier()
        sums.append(_seconds(lambda: dist.all_reduce(total), device))
    gathered: list[tuple[str, dict[tuple[int, int], float], float]] = [("", {}, 0.0)] * size
    dist.all_gather_object(gathered, (socket.gethostname(), own, min(sums)))
    measured: dict[tuple[int, int], float] = {}
    for _, of_rank, _ in gathered:
        for pair, seconds in of_rank.items():
            measured[pair] = max(seconds, measured.get(pair, 0.0))
    return PairSpeeds(
        pair_s=measured,
        sum_s=max(seconds for *_, seconds in gathered),
        hosts=tuple(host for host, *_ in gathered),
    )


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs (lower rank, higher rank) in which each pair occurs once, and no rank twice in a round."""
    count = size + size % 2  # the last one is nobody where the size is odd
    seats = list(range(count))
    rounds = []
    for _ in range(count - 1):
        pairs = (sorted((seats[i], seats[-1 - i])) for i in range(count // 2))
        rounds.append([(low, high) for low, high in pairs if high < size])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _exchange(out: torch.Tensor, into: torch.Tensor, other: int) -> None:
    operations = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, into, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f} GB/s"
