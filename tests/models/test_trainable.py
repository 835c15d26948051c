"""What trains, adapters of `peft` in chunks, and what they cost."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.config.model import LanguageConfig, ModelConfig
from mmtrain.modality.bitfield import segment_bits
from mmtrain.models.adapter_layers import DropoutKeys
from mmtrain.models.attention.context import attention_context
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.trainable import is_adapter, plain_name
from mmtrain.spec.builders import model_spec
from mmtrain.spec.linears import adapted_linears
from mmtrain.spec.work_size import WorkSize
from tests.lora import ALPHA, RANK, fill_adapters, with_lora

FAMILIES = [
    ("vision", {"encoder": "qwen2_vl"}),
    ("vision", {"encoder": "qwen2_5_vl"}),
    ("vision", {"encoder": "whisper"}),
    ("vision", {"encoder": "siglip"}),
    ("vision", {"encoder": "siglip2"}),
    ("vision", {"encoder": "clip"}),
    ("vision", {"encoder": "vit"}),
    ("language", {"language": "qwen2"}),
    ("language", {"language": "llama"}),
]
TARGETS = {
    "qwen2_vl": ["proj", "fc2"],
    "qwen2_5_vl": ["gate_proj", "down_proj"],
    "whisper": ["q_proj", "k_proj", "v_proj", "fc1"],
    "siglip": ["out_proj", "fc1"],
    "siglip2": ["out_proj", "fc2"],
    "clip": ["out_proj", "fc2"],
    "vit": ["fc2"],
    "qwen2": ["up_proj"],
    "llama": ["o_proj", "down_proj"],
}


def build(model, module, layers=None, seed=0):
    spec = model_spec(model)
    chunk = build_chunk(model, spec, module, layers or (0, len(spec.module(module).layers)), device="cpu")
    init_weights(chunk, seed)
    return chunk


@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_a_layer_with_an_adapter_starts_as_it_does_without(tiny, module, choice):
    plain = dict(build(tiny.model(**choice), module).named_parameters())
    adapted = dict(build(with_lora(tiny.model(**choice)), module).named_parameters())
    base = {plain_name(name): parameter for name, parameter in adapted.items() if not is_adapter(name)}
    assert base.keys() == plain.keys()
    assert all(torch.equal(base[name], plain[name]) for name in plain)
    adapters = {name: parameter for name, parameter in adapted.items() if is_adapter(name)}
    assert adapters
    for name, parameter in adapters.items():
        assert parameter.requires_grad
        if ".lora_B." in name:
            assert not parameter.any()
        else:  # uniform within 1 / sqrt(inputs), as nn.Linear
            bound = parameter.shape[1] ** -0.5
            assert parameter.abs().max() <= bound
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.25)
    firsts = [value for name, value in adapters.items() if ".lora_A." in name]
    pairs = [(a, b) for a, b in itertools.combinations(firsts, 2) if a.shape == b.shape]
    assert pairs
    assert not any(torch.equal(a, b) for a, b in pairs), "a stream for each"
    frozen = [name for name, value in adapted.items() if not value.requires_grad]
    assert sorted(frozen) == sorted(n for n in adapted if not is_adapter(n) and not n.startswith("projector"))


@pytest.mark.parametrize(
    ("module", "choice"),
    [
        *FAMILIES,
        ("language", {"language_config": {"tie_word_embeddings": True}}),
        ("vision", {"encoder": "qwen2_vl", "projector": {"kind": "native"}}),
    ],
)
def test_names_and_values_do_not_depend_on_the_cut(tiny, module, choice):
    model = with_lora(tiny.model(**choice))
    end = len(model_spec(model).module(module).layers)
    one = dict(build(model, module).named_parameters(remove_duplicate=False))
    cut = {}
    for layers in itertools.pairwise((0, 1, 3, end)):
        cut |= dict(build(model, module, layers).named_parameters())
    assert cut.keys() == one.keys()
    assert all(torch.equal(cut[name], one[name]) for name in one)
    assert all(cut[name].requires_grad == one[name].requires_grad for name in one)
    if module == "language":
        assert "language.model.layers.1.mlp.up_proj.base_layer.weight" in one
        assert one["language.model.layers.1.mlp.up_proj.lora_A.default.weight"].shape == (RANK, 24)
        assert one["language.model.layers.1.mlp.up_proj.lora_B.default.weight"].shape == (40, RANK)


def test_only_named_layers_are_adapted(tiny):
    model = with_lora(tiny.model("qwen2_vl", projector={"kind": "native"}), targets=["proj", "v_proj"])
    vision = {name.split(".lora")[0] for name, _ in build(model, "vision").named_parameters() if is_adapter(name)}
    assert vision == {f"vision.blocks.{i}.attn.proj" for i in range(3)}, "not the convolution patch_embed.proj"
    language = {name.split(".lora")[0] for name, _ in build(model, "language").named_parameters() if is_adapter(name)}
    assert language == {f"language.model.layers.{i}.self_attn.v_proj" for i in range(3)}


@pytest.mark.parametrize("setting", [True, False])
def test_all_or_nothing(tiny, setting):
    chunk = build(tiny.model("siglip", frozen=() if setting else ("encoder",)), "vision")
    assert {parameter.requires_grad for parameter in chunk.vision.parameters()} == {setting}
    assert all(parameter.requires_grad for parameter in chunk.projector.parameters())


def test_the_adapted_layer_computes_what_lora_says(tiny):
    chunk = build(with_lora(tiny.model(None)), "language")
    fill_adapters(chunk)
    layer = chunk.language.model.layers["1"].mlp.up_proj
    x = torch.randn(5, 24)
    base = x @ layer.base_layer.weight.T
    expected = base + ALPHA / RANK * (x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T)
    torch.testing.assert_close(layer(x), expected)
    assert not torch.allclose(layer(x), base, atol=1e-2)


def test_files_fill_the_base_layers(tiny, tmp_path):
    plain = build(tiny.model(None), "language", seed=9)
    tensors = {name.removeprefix("language."): value.detach() for name, value in plain.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    plain.language.config.save_pretrained(tmp_path)
    model = with_lora(ModelConfig(language=LanguageConfig(pretrained=str(tmp_path))))
    chunk = build(model, "language", (0, 3))
    before = {name: value.detach().clone() for name, value in chunk.named_parameters()}
    assert load_pretrained(chunk, model) == len([name for name in before if not is_adapter(name)])
    for name, parameter in chunk.named_parameters():
        expected = before[name] if is_adapter(name) else plain.get_parameter(plain_name(name))
        assert torch.equal(parameter, expected), name


# --------------------------------------------------------------------------------------------- costs


def call_block(chunk, module, x):
    """A chunk of one block on rows x."""
    if module == "vision":
        grid = chunk.shape.fixed_grid or (1, 4, 4)
        return chunk(x, grids=(grid,) * (len(x) // chunk.adapter.rows(grid)))
    context = attention_context(segment_bits([len(x)]))
    return chunk(x, attention=context, position_ids=torch.arange(len(x)))


def input_of_block(model, module, leaving):
    width = 24 if module == "language" else 32
    rows = 2 * {"clip_vision_model": 17, "vit": 17, "whisper": 12}.get(model.encoder.config["model_type"], 16)
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0), requires_grad=leaving)


def flops(chunk, module, x):
    """(forward, backward) that torch counts."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused CPU kernel is not in torch's table of FLOPs
        with FlopCounterMode(display=False) as forward:
            out = call_block(chunk, module, x)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("leaving", [True, False], ids=["grad leaves", "first trainable"])
@pytest.mark.parametrize("all_layers", [True, False], ids=["all", "some"])
@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_flops_and_parameters_are_those_that_torch_counts(tiny, module, choice, all_layers, leaving):
    plain = tiny.model(**choice)
    section = ["encoder" if module == "vision" else "language"]
    (name,) = choice.values()
    model = with_lora(plain, section, [] if all_layers else TARGETS[name])
    block = 2 if name == "qwen2_5_vl" else 1  # whose attention does not stay inside of windows
    layer = model_spec(model).module(module).layers[block]
    chunk = build(model, module, (block, block + 1))
    parameters = list(chunk.parameters())
    assert sum(p.numel() for p in parameters) == layer.num_params
    assert sum(p.numel() for p in parameters if p.requires_grad) == layer.num_trainable_params

    x = input_of_block(model, module, leaving)
    # The counter also counts the pairs that a causal mask leaves out.
    pairs = len(x) ** 2 // (2 if module == "vision" else 1)
    expected = layer.flops(WorkSize(rows=len(x), pairs=pairs, outputs=0), input_grad=leaving)
    forward, backward = flops(chunk, module, x)
    assert backward == expected.backward_input + expected.backward_weight
    # Rotary positions may be a product too; it has no backward.
    without = flops(build(plain, module, (block, block + 1)), module, x)[0]
    assert forward - without == layer.adapters.flops(WorkSize(rows=len(x), pairs=0, outputs=0))
    assert forward == pytest.approx(expected.forward, rel=1e-3)


def test_attention_behind_an_adapter_of_the_values_alone_counts_in_full(tiny):
    """Only the gradient of the values is needed: one product of the four that are counted."""
    model = with_lora(tiny.model(None), ["language"], ["v_proj"])
    layer = model_spec(model).module("language").layers[1]
    x = torch.randn(16, 24)
    _, backward = flops(build(model, "language", (1, 2)), "language", x)
    attention = layer.attention_flops.pair * 16 * 16
    counted = layer.flops(WorkSize(rows=16, pairs=16 * 16, outputs=0), input_grad=False)
    assert counted.backward_input + counted.backward_weight == backward + 3 / 4 * 2 * attention


def kept_bytes(chunk, module, x) -> int:
    """Bytes of the distinct storages that autograd keeps, without those of parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*chunk.parameters(), *chunk.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call_block(chunk, module, x)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_kept_bytes_are_not_more_than_the_spec_says(tiny, module, choice):
    """Adapters of all layers keep their inputs, as the layers would, and the rows between; frozen norms keep less."""
    plain = tiny.model(**choice)
    model = with_lora(plain)
    x = input_of_block(model, module, True)
    block = model_spec(model).module(module).layers[1]
    without = model_spec(plain).module(module).layers[1]
    size = WorkSize(rows=len(x), pairs=0, outputs=0)
    added = block.activation_bytes(size) - without.activation_bytes(size)
    assert added == 4 * RANK * len(x) * len(adapted_linears(model, module))
    trained = kept_bytes(build(plain, module, (1, 2)), module, x)
    adapted = kept_bytes(build(model, module, (1, 2)), module, x)
    # The normed rows of an RMSNorm serve its weight and, as a copy of the same rows, the layers after it.
    rms_norm = module == "language" or "qwen2_5_vl" in choice.values()
    frozen_norms = 2 * 4 * x.shape[1] * len(x) if rms_norm else 0
    assert adapted == trained + added - frozen_norms


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"dropout": 0.1}, {"use_dora": True, "dropout": 0.1}], ids=str
)
@pytest.mark.parametrize(("module", "choice"), [FAMILIES[0], FAMILIES[1], FAMILIES[3], *FAMILIES[-2:]])
def test_lengths_and_dropped_inputs_are_kept_in_addition(tiny, module, choice, settings):
    plain = with_lora(tiny.model(**choice))
    model = with_lora(tiny.model(**choice), **settings)
    x = input_of_block(model, module, True)
    chunks = [build(m, module, (1, 2)) for m in (plain, model)]
    for chunk in chunks:
        DropoutKeys(chunk).now = 3
    blocks = [model_spec(m).module(module).layers[1] for m in (plain, model)]
    assert sum(p.numel() for p in chunks[1].parameters()) == blocks[1].num_params
    assert sum(p.numel() for p in chunks[1].parameters() if p.requires_grad) == blocks[1].num_trainable_params
    size = WorkSize(rows=len(x), pairs=0, outputs=0)
    added = blocks[1].activation_bytes(size) - blocks[0].activation_bytes(size)
    kept = [kept_bytes(chunk, module, x) for chunk in chunks]
    # Two rows of lengths for each layer may be one; the normed rows of frozen norms are not kept.
    assert 0.85 * added - 2 * 4 * x.shape[1] * len(x) < kept[1] - kept[0] <= added


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_chosen_blocks_train_alone(tiny, module, choice, lora):
    model = with_lora(tiny.model(**choice)) if lora else tiny.model(**choice)
    name = "encoder" if module == "vision" else "language"
    section = dataclasses.replace(getattr(model, name), trainable_layers="1..1")
    model = dataclasses.replace(model, **{name: section})
    spec, chunk = model_spec(model).module(module), build(model, module)
    blocks = [layer for layer in spec.layers if layer.is_block]
    assert [layer.trainable for layer in blocks] == [index == 1 for index in range(len(blocks))]
    trained = {n: p for n, p in chunk.named_parameters() if p.requires_grad and not n.startswith("projector")}
    assert trained
    assert all(".1." in name and (is_adapter(name) or not lora) for name in trained)
    assert sum(p.numel() for p in trained.values()) == sum(layer.num_trainable_params for layer in blocks)
    assert sum(p.numel() for p in chunk.parameters()) == spec.num_params - sum(x.num_shared_params for x in spec.layers)
    for layers in ((0, 2), (2, 3)):  # a chunk without a chosen block, and with one
        part = build(model, module, layers)
        assert any(p.requires_grad for p in part.parameters()) == (layers == (2, 3))


def test_peft_is_loaded_only_for_adapters():
    code = (
        "import sys, mmtrain.models.chunk, mmtrain.models.pretrained, mmtrain.models.initialise\n"
        "assert 'peft' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
