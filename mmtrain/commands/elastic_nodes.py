"""Starts elastic jobs: all nodes of one on this machine, or this process' part of a node that torchrun has started."""

import json
import os
from dataclasses import dataclass

from mmtrain import __version__
from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.launch.launched import Launched, meeting_point
from mmtrain.launch.member import Member
from mmtrain.launch.membership import make_digest
from mmtrain.local.nodes import NodeJob, run_on_nodes

MOST_NODES = 64
"""The most nodes of one machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCounts:
    """The nodes of an elastic job on this machine."""

    nodes: int
    ranks: int
    """The ranks of a node."""
    max_restarts: int


def node_counts(job: Config, nodes: int | None, ranks: int | None, max_restarts: int | None) -> NodeCounts | None:
    """The nodes that a command asks for; None: the job is none of nodes.

    Args: nodes: --nodes; ranks: --nproc-per-node; max_restarts: --max-restarts.
    Raises: ConfigError: they do not fit the job, or are too few for it.
    """
    if not job.elastic.enable:
        for name, value in {"nodes": nodes, "nproc-per-node": ranks, "max-restarts": max_restarts}.items():
            if value is not None:
                raise ConfigError(
                    f"train: --{name} {value} is of elastic jobs, but elastic.enable = false; leave it out, or set "
                    "elastic.enable = true"
                )
        return None
    if nodes is None:
        raise ConfigError(
            "train: elastic.enable = true, but the number of nodes is not known; give --nodes N to have them on this "
            'machine, or start "torchrun --nnodes 1 --nproc-per-node M train.py" on each node with elastic.lighthouse'
        )
    stage = job.parallelism.layout.stage_size
    counts = NodeCounts(nodes=nodes, ranks=stage if ranks is None else ranks, max_restarts=max_restarts or 0)
    for name, value, least, most in (
        ("nodes", counts.nodes, 1, MOST_NODES),
        ("nproc-per-node", counts.ranks, 1, MOST_NODES),
        ("max-restarts", counts.max_restarts, 0, 1000),
    ):
        if not least <= value <= most:
            raise ConfigError(f"train: --{name} {value}; it is at least {least} and at most {most}")
    from mmtrain.simulator.allocation.node_layouts import ElasticLayouts, TooFewNodes

    found = ElasticLayouts(config=job, ranks_per_node=counts.ranks).layout(nodes)
    if isinstance(found, TooFewNodes):
        raise ConfigError(f"train: --nodes {nodes}: {found.reason}")
    return counts


def train_on_nodes(job: Config, counts: NodeCounts) -> None:
    """Runs an elastic job to its end on nodes of this machine. Raises: as `run_on_nodes`."""
    run_on_nodes(
        NodeJob(
            fn=_train,
            args=(job,),
            nodes=counts.nodes,
            ranks=counts.ranks,
            digest=make_digest({"version": __version__}),
            silent_s=job.elastic.silent_s,
            max_restarts=counts.max_restarts,
        )
    )


def train_node(job: Config) -> None:
    """Runs this process of a node that torchrun has started.

    Raises: ConfigError: it is not one node of an elastic job, or has no membership service.
    """
    import torch.distributed as dist

    from mmtrain.launch import lighthouse
    from mmtrain.parallel.job_inputs import alike_config
    from mmtrain.parallel.meeting import meet

    if "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "elastic.enable = true, but no launcher has started this process; start torchrun --nnodes 1 "
            "--nproc-per-node M train.py on each node, or mmtrain train --nodes N on this machine"
        )
    launched = Launched.from_environment()
    meeting_point()  # at once, not when the model is planned
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"elastic.enable = true, but one torchrun has {os.environ['GROUP_WORLD_SIZE']} nodes, all of which it "
            'would restart when one is lost; start "torchrun --nnodes 1" on each node'
        )
    if not job.elastic.lighthouse:
        raise ConfigError(
            'elastic.lighthouse = "", but the nodes of a job under torchrun find each other there; start '
            "torchft_lighthouse on one machine and give its address, or use mmtrain train --nodes on this machine"
        )
    digest = make_digest({"version": __version__, "config": json.dumps(alike_config(job), sort_keys=True)})
    own = dist.HashStore() if launched.world_size == 1 else None  # `meet` would hide the sockets of a process alone
    member = lighthouse.member(job.elastic, launched, digest=digest, board=meet(job.comm, own))
    _train(member, job)


def _train(member: Member, job: Config) -> None:
    from mmtrain.training.elastic_job import ElasticJob

    ElasticJob(job, member).run()
