"""Each of two towers in pieces against the classes of transformers: embeddings, gradients, initial values."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.submesh import language_mask
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import labelled_tokens
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec
from tests.models.towers import CAPTIONS, IMAGES, PATCHES, WHOLE, inputs_of, make_pairs, two_towers, whole_name

KINDS = ("clip", "siglip")
TOWERS = list(itertools.product(KINDS, ("vision", "language")))
CUTS = [(0, None), (0, 3, None), (0, 1, -1, None)]
"""Borders of the chunks, among them one behind the embedding and one before the last layer."""
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-14}
"""Of embeddings and gradients, relative to the largest of each and a hundredth of the largest of all. Measured: at most
3.2e-6 and 2.8e-15, of a bias of keys, whose exact gradient is 0."""


def started(model, module: str, cut: tuple[int | None, ...], dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """The chunks of a tower with initial values."""
    spec = model_spec(model)
    layers = range(len(spec.module(module).layers) + 1)
    borders = [layers[-1 if border is None else border - 1 if border < 0 else border] for border in cut]
    chunks: list[nn.Module] = []
    for own in itertools.pairwise(borders):
        chunks.append(build_chunk(model, spec, module, own, device="cpu", dtype=dtype))
        init_weights(chunks[-1], 3)
    return chunks


def values_of(chunks: list[nn.Module]) -> dict[str, Tensor]:
    return {name: p for chunk in chunks for name, p in chunk.named_parameters()}


def embed(model, module: str, chunks: list[nn.Module], tensors, counts) -> Tensor:
    """[N, columns] of a microbatch."""
    if module == "vision":
        x = torch.cat(tensors.pixel_values).to(next(chunks[0].parameters()).dtype)
        for chunk in chunks:
            x = chunk(x, grids=(PATCHES,) * len(counts.documents))
        return x
    attention = attention_context(language_bits(counts, language_mask(model)))
    positions = torch.cat([torch.arange(document.num_tokens) for document in counts.documents])
    labelled = torch.from_numpy(labelled_tokens([tensors.labels])[0])
    x = tensors.input_ids
    for chunk in chunks:
        x = chunk(x, attention=attention, position_ids=positions, labelled=labelled if chunk.is_last else None)
    return x


def whole_of(kind: str, **changes) -> nn.Module:
    """A new whole model of transformers. Args: changes: of both configs."""
    make_config, make = WHOLE[kind]
    text, vision = ({k: v for k, v in of[kind].items() if k != "model_type"} | changes for of in (CAPTIONS, IMAGES))
    torch.manual_seed(0)
    whole: nn.Module = make(make_config(text_config=text, vision_config=vision, projection_dim=24, **changes))
    return whole.train()


def theirs_of(kind: str, module: str, chunks: list[nn.Module], dtype: torch.dtype) -> tuple[nn.Module, dict]:
    """A whole model with the values of a tower, and its parameters that are those of the tower by our names."""
    whole = whole_of(kind).to(dtype)
    theirs = dict(whole.named_parameters())
    values = values_of(chunks)
    own = {name for name in theirs if name.startswith({"vision": ("vision", "visual"), "language": "text"}[module])}
    assert {whole_name(name) for name in values} == own
    with torch.no_grad():
        for name, value in values.items():
            theirs[whole_name(name)].copy_(value)
    return whole, {name: theirs[whole_name(name)] for name in values}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{len(cut) - 1} pieces")
@pytest.mark.parametrize(("kind", "module"), TOWERS)
def test_embeddings_and_gradients_are_those_of_transformers(kind, module, cut, dtype):
    """Captions of CLIP have several lengths, and are packed here and padded there; all of SigLIP's have one."""
    model = two_towers(kind)
    batch, meta = make_pairs(model, [5], seed=2)
    (tensors,), (counts,) = batch.microbatches, meta.microbatches
    assert len({document.num_tokens for document in counts.documents}) > 1 or kind == "siglip"
    chunks, generator = started(model, module, cut, dtype), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in values_of(chunks).values():  # such that no error is hidden by small or equal weights
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    whole, theirs = theirs_of(kind, module, chunks, dtype)
    inputs = inputs_of([(tensors, counts)])
    if module == "vision":
        wanted = whole.get_image_features(inputs["pixel_values"].to(dtype)).pooler_output
    else:
        wanted = whole.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
    found = embed(model, module, chunks, tensors, counts)
    direction = torch.randn(found.shape, generator=generator, dtype=dtype)
    (found * direction).sum().backward()
    (wanted * direction).sum().backward()
    compared = {"embeddings": (found.detach(), wanted.detach())}
    compared |= {name: (p.grad, theirs[name].grad) for name, p in values_of(chunks).items()}
    largest = max(float(their.abs().max()) for _, their in compared.values())
    for name, (our, their) in compared.items():
        error = float((our - their).abs().max() / (their.abs().max() + 1e-2 * largest))
        assert error < TOLERANCES[dtype], (name, error)


@pytest.mark.parametrize(("kind", "module"), TOWERS)
def test_initial_values_do_not_depend_on_the_cut(kind, module):
    one, *others = (values_of(started(two_towers(kind), module, cut)) for cut in CUTS)
    for other in others:
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(("kind", "module", "factor"), [
    *((kind, module, 1.0) for kind, module in TOWERS),
    ("clip", "vision", 0.25),
    ("clip", "language", 0.25),
])  # fmt: skip
def test_initial_values_have_the_distributions_of_transformers(kind, module, factor):
    changes = {"initializer_factor": factor} if factor != 1 else {}
    model = two_towers(kind)
    parts = {
        name: replace(part, config=part.config | changes)
        for name, part in (("encoder", model.encoder), ("language", model.language))
    }
    model = replace(model, **parts)
    ours, theirs = values_of(started(model, module, CUTS[0])), dict(whole_of(kind, **changes).named_parameters())
    for name, value in ours.items():
        value = value.detach()
        other = theirs[whole_name(name)].detach()
        if other.unique().numel() == 1:
            assert torch.equal(value, other), name
            continue
        # A standard deviation of n numbers is off by 1 / sqrt(2 n) of it.
        assert value.std() == pytest.approx(float(other.std()), rel=5 / value.numel() ** 0.5), name
        assert abs(value.mean()) < 5 * other.std() / value.numel() ** 0.5, name
