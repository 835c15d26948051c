"""An edge between inner stages, executed by real ranks: losses and gradients are those of one process."""

import pytest
import torch
from torch import nn

from mmtrain.config.topology import JobLayout
from mmtrain.models.loss import LossOutput
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.stage import ModalityStage
from mmtrain.schedule.graph import Link, ModuleStages, Work
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import P2P, Option, PlanningProblem
from mmtrain.schedule.transport import check_transport
from tests.ranks import run_ranks

ROWS, WIDTH, MICROBATCHES = 3, 4, 3


class Layer(nn.Module):
    """One stage: a linear layer over its own input and, if any, features of another module; the last gives a loss."""

    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(stage)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last = stage == 3

    def forward(self, x, features=None):
        y = torch.tanh(self.linear(x if features is None else x + features))
        return LossOutput(y.square().sum()) if self.last else y


def inputs(stage, work):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * stage + work // 2))


def inner_edges() -> PlanningProblem:
    """An encoder of two stages whose last stage feeds the first of a language model, and whose first feeds the last."""
    works = []
    for m in range(MICROBATCHES):
        works.append(Work(module=0, microbatch=m, sub_microbatch=0))
        link = Link(work=2 * m, source=0, target=1, size_bytes=8.0)
        works.append(Work(module=1, microbatch=m, sub_microbatch=0, after=(2 * m,), links=(link,)))
    cost = Option(name="keep", forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, activation_bytes=1.0)
    return PlanningProblem.build(
        num_ranks=2,
        modules=[ModuleStages(name="encoder", stages=(0, 1)), ModuleStages(name="language", stages=(2, 3))],
        stage_rank=[0, 1, 0, 1],
        works=works,
        costs=[[cost]],
        cost_index=[[0, 0]] * len(works),
        output_bytes=[[4.0, 4.0]] * len(works),
        p2p=P2P(latency_s=0.0, bytes_per_s=1e9),
    )


def train(rank):
    problem, found = inner_edges(), {}
    mesh = build_mesh(JobLayout.grid(pp=2), torch.device("cpu"))
    for name in ("1F1B", "ZB-H1", "interleave"):
        plan = CATALOGUE[name].make(problem)
        check(plan, problem)
        program = lower(plan, problem, sharded=False)
        check_transport(program)
        stages = [
            ModalityStage(Layer(s), s, 4, mesh.device, mesh.pp_group, mesh.channels, torch.float32)
            for s in (rank, rank + 2)
        ]
        runtime = PipelineScheduleRuntime(stages)
        runtime.load(program, lambda stage, work: (ROWS, WIDTH))
        outcome = runtime.step(lambda stage, work: ((inputs(stage, work),) if stage in (0, 2) else (), {}))
        grads = {s.stage_index: s.submod.linear.weight.grad.tolist() for s in stages}
        found[name] = {w: float(loss) for w, loss in outcome.losses.items()}, grads
    return found


@pytest.mark.ranks
def test_an_edge_between_inner_stages_brings_features_and_gradients():
    layers = [Layer(stage) for stage in range(4)]
    losses = {}
    for work in range(1, 2 * MICROBATCHES, 2):
        inner = layers[0](inputs(0, work - 1))
        output = layers[3](layers[2](inputs(2, work), layers[1](inner)), inner)
        output.loss_sum.backward()
        losses[work] = output.loss_sum.item()
    first, last = run_ranks(train, 2)
    for name in first:
        assert first[name][0] == {} and last[name][0] == pytest.approx(losses, rel=1e-6)
        grads = {**first[name][1], **last[name][1]}
        for stage, layer in enumerate(layers):
            torch.testing.assert_close(torch.tensor(grads[stage]), layer.linear.weight.grad)
