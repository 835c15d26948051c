"""Tensor-parallel ranks against one process: outputs, loss, predictions and every gradient, of every family."""

import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from mmtrain.errors import ConfigError
from mmtrain.modality.bitfield import segment_bits
from mmtrain.models.attention.context import attention_context
from mmtrain.parallel import tensor
from mmtrain.parallel.tensor import finish_gradients
from mmtrain.spec.rows import padded
from tests.parallel.tensor_cases import (
    EMBEDDING,
    HEAD,
    build,
    gradients,
    language_inputs,
    largest_error,
    model_config,
    run_language,
    run_vision,
    vision_inputs,
    whole_gradients_agree,
)
from tests.ranks import run_ranks

TOLERANCE = 1e-5
"""Of gradients, see `largest_error`; measured: at most 1.6e-6, but for keys' biases in SigLIP and ViT."""
ZERO_TOLERANCE = 1e-4
"""For keys' biases, whose true gradient is zero, since softmax ignores them; measured: at most 3.9e-5."""
OUTPUT_TOLERANCE = 2e-6
"""Of loss and features; measured: at most 5e-7."""

LANGUAGE = {
    "qwen2": ("qwen2", (), {}),
    "llama in three chunks": ("llama", (1, 3), {}),
    "norms of heads": ("qwen3", (1,), {}),
    "tied in one chunk": ("qwen2", (), {"tie_word_embeddings": True}),
    "tied in two chunks": ("qwen2", (2,), {"tie_word_embeddings": True}),
    "frozen": ("qwen2", (1,), {"trainable": False}),
    "adapters": ("qwen2", (1,), {"trainable": "lora"}),
    "adapters beside biases": ("llama", (), {"trainable": "lora"}),
}
VISION = {
    "qwen2_vl": ("qwen2_vl", (), {}),
    "qwen2_vl, own merger": ("qwen2_vl", (2,), {"projector": "native"}),
    "qwen2_5_vl": ("qwen2_5_vl", (1, 3), {}),
    "qwen2_5_vl, own merger": ("qwen2_5_vl", (), {"projector": "native"}),
    "qwen3_vl, own mergers": ("qwen3_vl", (2,), {"projector": "native"}),
    "siglip, norm in a chunk of its own": ("siglip", (1, 3, 4), {}),
    "siglip2": ("siglip2", (1,), {}),
    "clip": ("clip", (1,), {}),
    "clip, llava projector": ("clip", (3,), {"projector": "llava"}),
    "vit": ("vit", (1, 4), {}),
    "whisper": ("whisper", (), {}),
    "frozen": ("siglip", (1,), {"trainable": False}),
    "adapters": ("siglip", (1,), {"trainable": "lora"}),
    "adapters on joint keys": ("qwen2_vl", (), {"trainable": "lora"}),
    "adapters on gated MLPs": ("qwen2_5_vl", (), {"trainable": "lora"}),
}


def tp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def errors(ours, theirs):
    """(largest error of the gradients, that of the keys' biases)."""
    biases = {name for name in theirs if name.endswith("k_proj.bias")}
    others = set(theirs) - biases
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    found = largest_error({n: ours[n] for n in others}, {n: theirs[n] for n in others})
    return found, largest_error(ours, theirs) if biases else 0.0


def language_case(rank, name, cuts, options):
    mesh = tp_mesh()
    model, inputs = model_config(None, name, **options), language_inputs()
    (reference,) = build(model, "language")
    leaf = inputs[1].clone().requires_grad_()
    expected = run_language([reference], inputs, leaf)
    expected.loss_sum.backward()

    chunks = build(model, "language", cuts, mesh)
    features = inputs[1].clone().requires_grad_()
    output = run_language(chunks, inputs, features, tp=mesh.size(), tp_rank=rank)
    output.loss_sum.backward()
    finish_gradients(p for chunk in chunks for p in chunk.parameters())
    dist.all_reduce(features.grad)  # each rank has the gradients of its own slots

    ours, theirs = gradients(chunks), gradients([reference])
    if options.get("tie_word_embeddings"):
        if cuts:
            ours[EMBEDDING] = ours[EMBEDDING] + ours.pop(HEAD)
        else:
            assert chunks[0].language.lm_head.weight is chunks[0].language.model.embed_tokens.weight
    ours["features"], theirs["features"] = features.grad, leaf.grad
    loss = float((output.loss_sum / expected.loss_sum - 1).detach().abs())
    agree = torch.equal(output.predictions, expected.predictions)
    return loss, agree, *errors(ours, theirs), options.get("trainable") is False or whole_gradients_agree(chunks)


def vision_case(rank, name, cuts, options):
    mesh = tp_mesh()
    tp = mesh.size()
    model, inputs = model_config(name, **options), vision_inputs(name)
    reference = build(model, "vision")
    expected = run_vision(reference, inputs)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (expected * weight).sum().backward()

    chunks = build(model, "vision", cuts, mesh)
    output = run_vision(chunks, inputs)

    def mine(x):
        missing = padded(len(x), tp) - len(x)
        return torch.cat([x, x.new_zeros(missing, x.shape[1])]).chunk(tp)[rank]

    real = mine(torch.ones_like(weight))  # rows of padding may hold anything
    difference = ((output.detach() - mine(expected.detach())) * real).abs().max() / expected.abs().max()
    (output * mine(weight)).sum().backward()
    finish_gradients(p for chunk in chunks for p in chunk.parameters())
    return (
        float(difference.detach()),
        True,
        *errors(gradients(chunks), gradients(reference)),
        whole_gradients_agree(chunks),
    )


def run_cases(rank, language, vision):
    found = {f"language: {name}": language_case(rank, *LANGUAGE[name]) for name in language}
    return found | {f"vision: {name}": vision_case(rank, *VISION[name]) for name in vision}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("tp", "language", "vision"),
    [(2, tuple(LANGUAGE), tuple(VISION)), (4, ("llama in three chunks",), ("qwen2_5_vl",))],
    ids=["two ranks", "four ranks"],
)
def test_every_family_equals_one_process(tp, language, vision):
    for found in run_ranks(run_cases, tp, language, vision):
        assert len(found) == len(language) + len(vision)
        for case, (output, predictions, gradient, zero_gradient, equal_on_all_ranks) in found.items():
            assert output < OUTPUT_TOLERANCE, (case, output)
            assert predictions, case
            assert gradient < TOLERANCE, (case, gradient)
            assert zero_gradient < ZERO_TOLERANCE, (case, zero_gradient)
            assert equal_on_all_ranks, case


def no_labels(rank):
    mesh = tp_mesh()
    ids, features, labels = language_inputs()
    chunks = build(model_config(), "language", (1,), mesh)
    output = run_language(chunks, (ids, features, torch.full_like(labels, -100)), features, tp=2, tp_rank=rank)
    output.loss_sum.backward()
    finish_gradients(p for chunk in chunks for p in chunk.parameters())
    return (
        output.loss_sum.item(),
        output.predictions.tolist(),
        [g.abs().max().item() for g in gradients(chunks).values()],
    )


@pytest.mark.ranks
def test_a_microbatch_without_labels_has_no_loss_and_no_gradient():
    for loss, predictions, largest in run_ranks(no_labels, 2):
        assert loss == 0
        assert predictions == []
        assert largest
        assert set(largest) == {0.0}


def two_backwards(rank):
    mesh = tp_mesh()
    inputs, model = language_inputs(), model_config()
    chunks, reference = build(model, "language", (), mesh), build(model, "language")
    for _ in range(2):
        run_language(chunks, inputs, inputs[1], tp=2, tp_rank=rank).loss_sum.backward()
        run_language(reference, inputs, inputs[1]).loss_sum.backward()
    parameters = dict(chunks[0].named_parameters())
    unfinished = {n for n, p in parameters.items() if isinstance(p, DTensor) and p.grad.placements != p.placements}
    finish_gradients(parameters.values())
    assert all(p.grad.placements == p.placements for p in parameters.values() if isinstance(p, DTensor))
    before = gradients(chunks)
    finish_gradients(parameters.values())  # a second call changes nothing
    assert all(torch.equal(before[n], g) for n, g in gradients(chunks).items())
    return unfinished, largest_error(before, gradients(reference))


@pytest.mark.ranks
def test_accumulated_gradients_of_norms_are_summed_once():
    for unfinished, error in run_ranks(two_backwards, 2):
        assert len(unfinished) == 4
        assert all("layernorm" in name for name in unfinished)
        assert error < TOLERANCE


def collectives_of_a_block(rank):
    mesh = tp_mesh()
    (_, block, _) = build(model_config(), "language", (1, 2), mesh)
    x = torch.randn(8, 32, requires_grad=True)
    attention = attention_context(segment_bits([16]))
    counts = []
    with CommDebugMode() as seen:
        y = block(x, attention=attention, position_ids=torch.arange(16))
    counts.append(seen.get_comm_counts())
    with warnings.catch_warnings(), CommDebugMode() as seen:
        warnings.simplefilter("ignore")  # of its hooks on a tensor that is no module's input
        y.sum().backward()
    counts.append(seen.get_comm_counts())
    parts = {n: (tuple(p.shape), tuple(p.to_local().shape)) for n, p in block.named_parameters()}
    return [{str(op).rpartition(".")[2]: n for op, n in count.items()} for count in counts], parts


@pytest.mark.ranks
def test_a_decoder_block_costs_two_all_gathers_and_two_reduce_scatters_each_way():
    for counts, parts in run_ranks(collectives_of_a_block, 2):
        for count in counts:
            gathers = sum(n for op, n in count.items() if "allgather" in op or "all_gather" in op)
            scatters = sum(n for op, n in count.items() if "reduce_scatter" in op)
            assert (gathers, scatters, sum(count.values())) == (2, 2, 4), count
        halved = [name for name, (whole, mine) in parts.items() if whole != mine]
        assert len(halved) == 7 + 3  # weights of the linear layers, and biases of query, key and value


def broken_tables(rank):
    mesh = tp_mesh()
    tables, found = tensor.TABLES, []
    plan = tables["siglip_vision_model"]

    def without(name):
        return {key: style for key, style in plan.block.items() if key != name}

    renamed = without("mlp.fc1") | {"mlp.up": "columns"}
    broken = {
        "forgotten": dataclasses.replace(plan, block=without("mlp.fc1")),
        "renamed": dataclasses.replace(plan, block=renamed),
        "no embedding": dataclasses.replace(plan, embed={}),
    }
    for table in (*broken.values(), None):
        tensor.TABLES = {} if table is None else {"siglip_vision_model": table}
        try:
            build(model_config("siglip"), "vision", (), mesh)
        except ConfigError as error:
            found.append(str(error))
    tensor.TABLES = tables
    return found


@pytest.mark.ranks
def test_a_table_that_does_not_fit_is_refused():
    ((forgotten, renamed, embedding, unknown),) = run_ranks(broken_tables, 1)
    assert "siglip_vision_model: parameter vision.encoder.layers.0.mlp.fc1.weight is in no entry" in forgotten
    assert "names vision.encoder.layers.0.mlp.up, which" in renamed
    assert "parameter vision.embeddings." in embedding
    assert "'siglip_vision_model' has no table" in unknown
