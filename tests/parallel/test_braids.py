"""Braided blocks on gloo: loss and gradients are those of one process, and to the bit those without braids."""

import dataclasses
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from mmtrain.config.topology import JobLayout
from mmtrain.modality.bitfield import segment_bits
from mmtrain.models.attention.context import attention_context
from mmtrain.parallel import passes
from mmtrain.parallel.weight_grads import WeightGrads
from tests.lora import with_lora
from tests.models.dits import t2v
from tests.parallel import tensor_cases, test_deepstack, test_memory_plans, test_parity, test_whole_models
from tests.parallel.parity import MIXED, Case, check, layouts, run_layout, small
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import model_config


def braided(case: Case, **options) -> Case:
    """The case with braids, some of them of split backwards, and with memory options at the same time."""
    schedule, size = case.runs[0][:2]
    runs = ((schedule, size), (schedule, size, 2))
    return dataclasses.replace(case, **({"runs": runs, "braids": 1, "memories": 1} | options))


V = Case(
    model=model_config(None, segments=(0, 2), tied=True),
    runs=(("STP", 1), ("STP-lean", 1), ("DualPipeV", 1)),
    placement="v",
    images=[[[0]] * 6, [[0]] * 7],
)
ONE_V = Case(
    model=model_config("qwen2_5_vl_vision", segments=(0, 0), tied=True),
    runs=(("STP", 1),),
    partition="mixed-latency",
    images=[[*MIXED[0], [0], [2, 1]], [*MIXED[1], [1], [0, 3]]],
)
"""Vision and language as one V: text-only microbatches, several vision works, a chunk with stages of both modules."""
FROZEN_V = dataclasses.replace(ONE_V, model=model_config(segments=(0, 0), frozen=("encoder",)))
LORA = Case(model=with_lora(model_config()), prepare=fill_adapters_by_name)
DAILY = {
    JobLayout.grid(pp=2, tp=2): {
        "text, V": dataclasses.replace(V, runs=V.runs[:2]),
        "V": ONE_V,
        "text, V, offloaded": dataclasses.replace(V, runs=V.runs[:1], limits=(0.85,)),
        "adapters": small(braided(LORA), 2),
    },
    JobLayout.grid(pp=2, dp_shard=2, tp=2): {"text, V": dataclasses.replace(V, runs=V.runs[:1])},
}
FAMILIES = test_whole_models.CASES | test_deepstack.CASES | test_memory_plans.PLANE
OTHERS = {
    "frozen encoder": Case(model=model_config("qwen2_5_vl_vision", frozen=("encoder",))),
    "text to video": Case(model=t2v(out_channels=4)),
}
NIGHTLY = {
    **{shape: test_parity.PLANES[shape] for shape in test_parity.COVERING if shape.tp > 1 and shape.pp > 1},
    # A matrix that is tied inside one chunk gets its summands in another order if backwards are split.
    JobLayout.grid(tp=2): {name: case for name, case in FAMILIES.items() if "tied" not in name},
    JobLayout.grid(pp=2, tp=2): FAMILIES | OTHERS | test_parity.PLANES[JobLayout.grid(pp=2, tp=2)],
}


def check_equal(ranks):
    check(ranks, TOLERANCE)
    for rank, found in enumerate(ranks):
        for case, errors in found.items():
            assert errors.unequal == (), (case, rank)


@pytest.mark.ranks
@layouts(DAILY)
def test_gradients_are_those_without_braids_and_of_one_process(shape, cases):
    check_equal(run_ranks(run_layout, shape.world_size, shape, cases))


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(NIGHTLY)
def test_every_family_on_every_layout(shape, cases):
    wanted = {name: braided(case) for name, case in cases.items()}
    wanted |= {"V": ONE_V, "frozen encoder, V": FROZEN_V}
    wanted |= {"text, V": dataclasses.replace(V, limits=(0.9,) if (shape.pp, shape.dp) == (2, 1) else ())}
    check_equal(run_ranks(run_layout, shape.world_size, shape, wanted, timeout=1800))


def units_and_blocks(rank: int, families: tuple[str, ...]) -> dict[str, list[bool]]:
    """Family -> whether outputs, and gradients of inputs and weights, of a forward and a backward that take turns are
    those of the Hugging Face blocks, to the bit."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    found = {}
    for family in families:
        model = tensor_cases.model_config(language=family, **({"mlp_bias": False} if family == "llama" else {}))
        (_, whole, _), (_, divided, _) = (tensor_cases.build(model, "language", (1, 3), at) for at in (None, mesh))
        assert [type(block) for block in whole.blocks()] == [type(block) for block in divided.blocks()]
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(12, tensor_cases.WIDTH, generator=generator) for _ in range(2)]
        results = []
        for chunk, together in ((whole, False), (divided, True)):
            weight_grads = WeightGrads(chunk)
            x, y = (values.clone().requires_grad_() for values in inputs)
            context = attention_context(segment_bits([7, 5]), rows=np.arange(12))
            call = partial(chunk, attention=context, position_ids=torch.arange(12))
            with weight_grads.deferred(0) if together else nullcontext():
                first = call(x)
            outputs: list[torch.Tensor] = []

            def forward(call=call, y=y, outputs=outputs) -> None:
                outputs.append(call(y))

            def backward(first=first, x=x, weight_grads=weight_grads, together=together) -> None:
                fill = (lambda _: weight_grads.run_some(0, 2)) if together else (lambda _: None)
                with passes.filled(fill), weight_grads.deferred(0) if together else nullcontext():
                    torch.autograd.backward(first, torch.cos(first.detach()))
                if together:
                    weight_grads.run(0)

            if together:
                shared = SimpleNamespace(pass_state=None)
                passes.Block(torch.device("cpu")).run(forward, backward, [shared])
            else:
                forward()
                backward()
            grads = tensor_cases.gradients([chunk])
            results.append([first, outputs[0], x.grad, *(grads[name] for name in sorted(grads))])
        found[family] = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return found


@pytest.mark.ranks
def test_units_are_the_blocks_of_the_hugging_face_class():
    """On one rank, whose exchanges are those of a group of one."""
    families = ("qwen2", "qwen3", "llama")
    (found,) = run_ranks(units_and_blocks, 1, families)
    assert {*found} == {*families}
    for family, equal in found.items():
        assert len(equal) > 10 and all(equal), (family, equal)
