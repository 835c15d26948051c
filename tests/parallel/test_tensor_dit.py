"""Tensor-parallel ranks of a text-to-video model against one process: loss, predictions and every gradient."""

import dataclasses
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.config.topology import JobLayout
from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.bitfield import prompt_bits
from mmtrain.models.attention.context import attention_context
from mmtrain.parallel import tensor
from mmtrain.parallel.activation_memory import ActivationMemory
from mmtrain.parallel.fsdp import apply_fsdp
from mmtrain.parallel.grads import squared_norm
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.offload import Offloader
from mmtrain.parallel.tensor import apply_tensor_parallel, finish_gradients
from mmtrain.parallel.torch_private import keep_grads_local
from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.spec.builders import model_spec
from mmtrain.spec.layer import Division
from mmtrain.spec.rows import padded
from tests.models.dits import Clips, chunk, t2v
from tests.parallel.tensor_cases import gradients, largest_error, whole_gradients_agree
from tests.ranks import run_ranks
from tests.reference import TRAINING
from tests.spec.test_builders import dit_inputs, kept_bytes

TOLERANCE = 1e-5
"""Of gradients, see `largest_error`; measured: at most 3.5e-6."""
OUTPUT_TOLERANCE = 2e-6
"""Of loss and predictions; measured: at most 3.3e-7."""
BFLOAT16_TOLERANCE = 0.03
"""L2 norm of the difference of all gradients, relative to the float32 gradients'; measured: 0.019."""

WHOLE = {"language": [(0, 5)], "dit": [(0, 5)]}
HALVES = {"language": [(0, 2), (2, 5)], "dit": [(0, 3), (3, 5)]}
LAYERS = {"language": [(i, i + 1) for i in range(5)], "dit": [(i, i + 1) for i in range(5)]}
FOUR_HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "text": {"num_key_value_heads": 4}}
GRIDS = ((2, 2, 3), (1, 2, 2), (2, 2, 3))
UNEVEN = ((3, 1, 3), (1, 1, 1), (2, 2, 3))
"""Patches of clips; of the second one all ranks but the first have no row."""
CASES = {
    "whole": (WHOLE, {}, None),
    "rows that the ranks do not divide": (HALVES, {}, None, UNEVEN),
    "halves": (HALVES, {}, None),
    "layers, frozen text encoder": (LAYERS, {"frozen": ("language",)}, None),
    "halves, frozen DiT": (HALVES, {"frozen": ("dit",)}, None),
    "no norm before cross-attention": (HALVES, {"cross_attn_norm": False, "patch_size": [2, 1, 2]}, None),
    "recomputed": (HALVES, {}, "full"),
    "recomputed in part": (WHOLE, {}, "selective"),
}


def tp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def build(model, module, layers, mesh=None, dtype=torch.float32):
    """A chunk whose weights are so large and so different that no error hides, divided over a mesh if there is one."""
    made = chunk(model, module, layers)
    with torch.no_grad():
        for name, param in made.named_parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(sum(name.encode()))))
    made = made.to(dtype)
    if mesh is not None:
        apply_tensor_parallel(made, mesh)
    return made


def build_all(model, cuts, mesh=None):
    return {module: [build(model, module, layers, mesh) for layers in of] for module, of in cuts.items()}


def encode(chunks, clips, tp=1):
    """This rank's rows of the text states."""
    count = sum(clips.text_lengths)
    missing = padded(count, tp) - count
    rows = np.concatenate([np.arange(count), np.full(missing, -1)])
    x = torch.cat([clips.ids, clips.ids.new_zeros(missing)])
    for made in chunks:
        x = made(
            x,
            attention=attention_context(prompt_bits(clips.text_lengths), rows=rows),
            position_ids=torch.cat([torch.arange(n) for n in (*clips.text_lengths, missing)]),
        )
    return x


def denoise(chunks, clips, states):
    """The output of the last chunk; the second clip has no loss."""
    x = clips.latents
    for made in chunks:
        more = {"features": states, "timesteps": clips.timesteps} if made is chunks[0] else {}
        targets = (clips.targets[0], None, *clips.targets[2:])
        x = made(x, **clips.common, **more, **({"targets": targets, "want_predictions": True} if made.is_last else {}))
    return x


def together(chunks):
    return [made for of in chunks.values() for made in of]


def case(mesh, cuts, options, recompute, grids=GRIDS):
    model = t2v(**options)
    clips, reference = Clips.draw(model, grids), build_all(model, WHOLE)
    expected = denoise(reference["dit"], clips, encode(reference["language"], clips))
    expected.loss_sum.backward()

    chunks = build_all(model, cuts, mesh)
    if recompute:
        for made in chunks["dit"]:
            ActivationMemory(made.blocks(), ActivationCheckpointConfig(mode=recompute), Offloader(torch.device("cpu")))
    output = denoise(chunks["dit"], clips, encode(chunks["language"], clips, mesh.size()))
    output.loss_sum.backward()
    finish_gradients(p for made in together(chunks) for p in made.parameters())

    pairs = zip(output.predictions, expected.predictions, strict=True)
    different = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    loss = float((output.loss_sum / expected.loss_sum - 1).detach().abs())
    ours, theirs = gradients(together(chunks)), gradients(together(reference))
    trained = {module for module in WHOLE if any(name.startswith(module) for name in theirs)}
    return max(different, loss), largest_error(ours, theirs), whole_gradients_agree(together(chunks)), trained


# ---------------------------------------------------------------------------------------- inside of a DiT


def collectives_of_a_block(mesh):
    """(kind, numbers) of what a block sends for one clip of 12 latent and 5 text tokens: forward, then backward."""
    model = t2v()
    made = build(model, "dit", (1, 2), mesh)
    x = torch.randn(12 // mesh.size() + 5 + 7, 32, requires_grad=True)
    counts = []
    with CommDebugMode() as seen:
        y = made(x, grids=((2, 2, 3),), text_lengths=(5,))
    counts.append(seen.get_comm_counts())
    loss = y.sum()
    with CommDebugMode() as seen:
        loss.backward()
    counts.append(seen.get_comm_counts())
    found = [Counter({str(op).rpartition(".")[2]: n for op, n in count.items()}) for count in counts]
    attention = made.blocks()[0].attn1
    return found, (attention.heads, attention.norm_q.weight.to_local().shape[0], attention.to_q.weight.to_local().shape)


def held_bytes(mesh, dtype):
    """(what autograd keeps, what the spec says of one rank) of the first layer, a block and the head."""
    model = t2v()
    spec, clips = model_spec(model, dtype_bytes=dtype.itemsize), Clips.draw(model)
    layers = [layer.of_rank(Division(tp=mesh.size())) for layer in spec.module("dit").layers]

    def kept(low, high):
        made = build(model, "dit", (low, high), mesh, dtype)
        x, kwargs = dit_inputs(model, clips, low, high == len(layers), dtype)
        if low == 0:
            rows = padded(clips.size.texts, mesh.size()) // mesh.size()
            kwargs["features"] = kwargs["features"].detach()[:rows].requires_grad_()
        else:
            x = x.detach()[clips.size.rows // mesh.size() :].requires_grad_()
        return kept_bytes(made, x, kwargs)

    return [
        (kept(0, 1), layers[0].activation_bytes(clips.size)),
        (kept(1, 3) - kept(1, 2), layers[2].activation_bytes(clips.size)),
        (kept(3, 5) - kept(3, 4), layers[4].activation_bytes(clips.size)),
    ]


def halves(mesh, layers):
    """(largest error of a gradient, bytes between the halves of a backward, what the spec says of one rank)."""
    model = t2v()
    spec, clips = model_spec(model), Clips.draw(model)
    found, held = [], 0
    rows = padded(clips.size.texts, mesh.size()) // mesh.size()
    for split in (False, True):
        made = build(model, "dit", layers, mesh)
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(rows, 24, generator=generator).requires_grad_()
        count = clips.size.rows // mesh.size() + clips.size.texts + 7 * clips.size.clips
        x = torch.randn(count, 32, generator=generator).requires_grad_()
        first = {"features": states, "timesteps": clips.timesteps} if layers[0] == 0 else {}
        last = {"targets": clips.targets} if made.is_last else {}
        weights = WeightGrads(made)
        with weights.deferred(0) if split else nullcontext():
            out = made(clips.latents if first else x, **clips.common, **first, **last)
            (out.loss_sum if last else out.square().sum()).backward()
        if split:
            held = weights.held_bytes()
            weights.run(0)
        found.append(gradients([made]) | {"input": (states if first else x).grad})
    shared = [layer.of_rank(Division(tp=mesh.size())) for layer in spec.module("dit").layers[slice(*layers)]]
    return largest_error(found[1], found[0]), held, sum(layer.linear_bytes(clips.size) for layer in shared)


def refusals(mesh):
    model = t2v()
    clips, made = Clips.draw(model), build(model, "dit", (0, 1), mesh)
    found = []
    try:
        made(clips.latents, **clips.common, features=torch.randn(15, 24), timesteps=clips.timesteps)
    except DataError as error:
        found.append(str(error))
    tables = tensor.TABLES
    plan = tables["wan"]
    block = {name: style for name, style in plan.block.items() if name != "scale_shift_table"}
    tensor.TABLES = {"wan": dataclasses.replace(plan, block=block)}
    try:
        build(model, "dit", (0, 2), mesh)
    except ConfigError as error:
        found.append(str(error))
    tensor.TABLES = {"wan": dataclasses.replace(plan, block={**plan.block, "table": "whole"})}
    try:
        build(model, "dit", (0, 2), mesh)
    except ConfigError as error:
        found.append(str(error))
    tensor.TABLES = tables
    return found


def on_two_ranks(rank):
    mesh = tp_mesh()
    return {
        "cases": {name: case(mesh, *CASES[name]) for name in CASES},
        "collectives": collectives_of_a_block(mesh),
        "held": {dtype: held_bytes(mesh, getattr(torch, dtype)) for dtype in ("float32", "bfloat16")},
        "halves": {layers: halves(mesh, layers) for layers in ((0, 2), (1, 2), (4, 5), (0, 5))},
        "refusals": refusals(mesh),
    }


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(on_two_ranks, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one_process(two_ranks, name):
    for found in two_ranks:
        output, gradient, equal_on_all_ranks, trained = found["cases"][name]
        assert output < OUTPUT_TOLERANCE
        assert gradient < TOLERANCE
        assert equal_on_all_ranks
        assert trained == {"language", "dit"} - set(CASES[name][1].get("frozen", ()))


@pytest.mark.ranks
def test_a_block_gathers_and_scatters_rows_three_times_each_way(two_ranks):
    for found in two_ranks:
        (forward, backward), (heads, norm, query) = found["collectives"]
        of_rows = {"_allgather_base_": 3, "_reduce_scatter_base_": 3}
        assert forward == {**of_rows, "allreduce_": 4}  # of the squares of queries and keys
        assert backward == {**of_rows, "allreduce_": 4 + 2}  # and of text and timestep
        assert (heads, norm, query) == (1, 16, (16, 32))


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_keep_the_bytes_that_the_spec_says(two_ranks, dtype):
    for found in two_ranks:
        embed, block, head = found["held"][dtype]
        padding = 24 * getattr(torch, dtype).itemsize  # of 15 text states
        assert embed[0] == embed[1] + padding
        assert block[0] == block[1]
        assert head[0] == pytest.approx(head[1], abs=8 * 3)  # a sum of each clip's loss besides


@pytest.mark.ranks
@pytest.mark.parametrize("layers", [(0, 2), (1, 2), (4, 5), (0, 5)], ids=["embed", "block", "head", "whole"])
def test_halves_of_a_backward_give_the_gradients_and_hold_what_the_spec_says(two_ranks, layers):
    for found in two_ranks:
        error, held, planned = found["halves"][layers]
        assert error < TOLERANCE
        assert 0.95 * planned <= held <= planned


@pytest.mark.ranks
def test_states_and_tables_that_do_not_fit_are_refused(two_ranks):
    for found in two_ranks:
        states, forgotten, unknown = found["refusals"]
        assert "15 text states arrived; there are 3 clips with 15 text tokens, divided by 2" in states
        assert "wan: parameter dit.blocks.0.scale_shift_table is in no entry" in forgotten
        assert "names dit.blocks.0.table, which" in unknown
        assert unknown.endswith("another version of diffusers")


# --------------------------------------------------------------------------------------------- with FSDP2


def under_fsdp(mesh, dtype):
    """(largest error, that of all gradients together, that of their norm) against one process in float32."""
    training = dataclasses.replace(TRAINING, mixed_precision_param=dtype)
    model = t2v()
    clips, reference = Clips.draw(model), build_all(model, WHOLE)
    chunks = build_all(model, WHOLE, mesh.tp)
    for (made,) in chunks.values():
        apply_fsdp(made, made.blocks(), mesh.fsdp(), training, reshard=False)
        keep_grads_local(made)
    for last in (False, True):  # two backwards, one reduction
        if last:
            for made in together(chunks):
                made.set_is_last_backward(True)
                made.set_requires_gradient_sync(True)
                made.set_reshard_after_backward(True)
        states = encode(chunks["language"], clips, 2)
        leaf = states.detach().requires_grad_()  # as between two stages
        denoise(chunks["dit"], clips, leaf).loss_sum.backward()
        states.backward(leaf.grad)
        # Both replicas have these clips.
        (2 * denoise(reference["dit"], clips, encode(reference["language"], clips)).loss_sum).backward()
    ours, theirs = gradients(together(chunks)), gradients(together(reference))
    squares = sum(float(g.double().pow(2).sum()) for g in theirs.values())
    difference = sum(float((ours[n] - g).double().pow(2).sum()) for n, g in theirs.items())
    parameters = [p for made in together(chunks) for p in made.parameters()]
    own = squared_norm(parameters, mesh)
    dist.all_reduce(own)
    norm = abs(float(own) ** 0.5 / squares**0.5 - 1)
    return largest_error(ours, theirs), (difference / squares) ** 0.5, norm


def on_four_ranks(rank):
    mesh = build_mesh(JobLayout.grid(dp_shard=2, tp=2), torch.device("cpu"))
    sharded = {dtype: under_fsdp(mesh, dtype) for dtype in ("float32", "bfloat16")}
    return sharded, case(tp_mesh(), HALVES, FOUR_HEADS, None, UNEVEN)


@pytest.mark.nightly
@pytest.mark.ranks
def test_four_ranks_equal_one_process():
    for sharded, (output, gradient, equal_on_all_ranks, _) in run_ranks(on_four_ranks, 4):
        assert sharded["float32"][0] < TOLERANCE
        assert sharded["float32"][2] < 1e-6
        assert 0 < sharded["bfloat16"][1] < BFLOAT16_TOLERANCE
        assert sharded["bfloat16"][2] < BFLOAT16_TOLERANCE
        assert output < OUTPUT_TOLERANCE
        assert gradient < TOLERANCE
        assert equal_on_all_ranks
