"""What nodes lack of a new layout: by the tensors of a checkpoint and the partitions, not by what a job says of itself.

For jobs of `debug_vlm.toml` on nodes of one rank.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mmtrain.config.config import Config, each_pipeline, with_depths
from mmtrain.planner.job import Job
from mmtrain.simulator.make_job import make_job


def tensor_bytes(checkpoint: Path) -> dict[str, int]:
    """Parameter -> bytes of its value, its two moments and its number of steps, in float32."""
    import torch.distributed.checkpoint as dcp

    found: Counter[str] = Counter()
    for name, entry in dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        if match := re.fullmatch(r"model\.(.*)|optimizer\.state\.(.*)\.(?:step|exp_avg|exp_avg_sq)", name):
            assert entry.properties.dtype.itemsize == 4, name
            found[match[1] or match[2]] += 4 * entry.size.numel()
    return dict(found)


def wanted(job: Config, pipelines: Sequence[int]) -> list[Callable[[str], bool]]:
    """[rank] -> whether it has a parameter, by its name."""
    jobs: Sequence[Job] = each_pipeline(with_depths(job, pipelines), make_job)
    return [_has_some_of(one, rank) for one, depth in zip(jobs, pipelines, strict=True) for rank in range(depth)]


def _has_some_of(job: Job, rank: int) -> Callable[[str], bool]:
    layers = {(stage.module, layer) for stage in job.partition.of_rank(rank) for layer in range(*stage.layers)}
    last = {module.name: len(module.layers) - 1 for module in job.spec.modules}

    def has(name: str) -> bool:
        module = "language" if name.startswith("language.") else "vision"
        if match := re.search(r"\.(?:blocks|layers)\.(\d+)\.", name):
            return (module, int(match[1]) + 1) in layers
        if re.search(r"patch_embed|embed_tokens", name):  # the language model's head is its embedding
            return (module, 0) in layers or (module == "language" and (module, last[module]) in layers)
        assert re.search(r"^projector|\.norm\.", name), name
        return (module, last[module]) in layers

    return has


def least_missing(
    held: Sequence[Callable[[str], bool]], needed: Sequence[Callable[[str], bool]], sizes: Mapping[str, int]
) -> int:
    """Bytes that nodes lack, when they take the positions for which these are the fewest.

    Args: held: [node]. needed: [position]. sizes: parameter -> bytes of its state.
    """
    lacks = [[sum(n for name, n in sizes.items() if two(name) and not one(name)) for two in needed] for one in held]
    return min(
        sum(lacks[node][position] for position, node in enumerate(order))
        for order in itertools.permutations(range(len(held)), len(needed))
    )
