"""The operators of every layer against its `LayerSpec`."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmtrain.config.model import ModelConfig, projector_name
from mmtrain.costs.operators.execution import run, simulate
from mmtrain.costs.operators.layer_builder import LinkedDivision
from mmtrain.costs.operators.layers import LayerDescriber
from mmtrain.costs.operators.operator_graph import Graph, OpKind, Phase
from mmtrain.spec.builders import model_spec
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.linears import adapted_linears
from mmtrain.spec.model_shapes import dit_shape, language_shape
from mmtrain.spec.module_sizes import projection_of
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.spec.vocabulary import divided_vocabulary
from mmtrain.spec.work_size import TIME_ROWS, WorkSize
from tests.costs.operators.graphs import LATENCIES
from tests.lora import with_lora
from tests.models.conftest import VISION_MODELS, tiny_model
from tests.models.dits import Clips, chunk, t2v
from tests.models.towers import two_towers
from tests.reference import in_chunks

FAMILIES = [
    *VISION_MODELS,
    ("language", {"language": "qwen2"}),
    ("language", {"language": "llama"}),
    ("language", {"language": "qwen3"}),
    ("language", {"language": "mistral"}),
    ("language", {"language": "qwen2_vl_text"}),
    ("language", {"language": "qwen3_vl_text"}),
    ("language", {"language": "llama", "language_config": {"attention_bias": False, "mlp_bias": False}}),
]
SIZE = WorkSize(rows=48, pairs=700, outputs=12, window_pairs=300, cross_pairs=250, texts=14, clips=3, calls=2)
ALL = ("encoder", "projector", "language")
PRODUCTS = (OpKind.MATMUL, OpKind.ATTENTION, OpKind.CONVOLUTION)


def describer(model: ModelConfig, module: str, division: LinkedDivision | None = None) -> LayerDescriber:
    if model.dit is not None:
        shape = dit_shape(model) if module == "dit" else language_shape(model)
        return LayerDescriber(shape=shape, division=division or LinkedDivision())
    vision = vision_shape(model)
    return LayerDescriber(
        shape=vision if module == "vision" else language_shape(model),
        division=division or LinkedDivision(),
        adapted=adapted_linears(model, module),
        adapted_projector=adapted_linears(model, projector_name(module)) if module == "vision" else (),
        lora=model.lora,
        projection=projection_of(model),
    )


def flops(graph: Graph, phase: Phase) -> float:
    return sum(op.flops(SIZE) for op in graph.operators if op.phase is phase)


def check(model: ModelConfig, module: str) -> None:
    spec = model_spec(model, dtype_bytes=2)
    made = describer(model, module)
    for layer in spec.module(module).layers:
        for input_grad in (False,) if (module, layer.name) == ("vision", "embed") else (True, False):
            tape = made.tape(layer, input_grad=input_grad)
            wanted = layer.flops(SIZE, input_grad=input_grad)
            later = wanted.backward_weight if layer.splits_backward else 0.0
            found = [flops(tape.graph(), phase) for phase in Phase]
            inside = wanted.backward_input + wanted.backward_weight - later
            assert found == pytest.approx([wanted.forward, inside, later]), (layer.name, input_grad)
            assert sum(p.count for p in tape.parameters) == layer.num_params, layer.name
            assert sum(p.count for p in tape.parameters if p.trainable) == layer.num_trainable_params, layer.name


@pytest.mark.parametrize(("module", "choice"), FAMILIES)
@pytest.mark.parametrize("frozen", [(), ("encoder",), ("encoder", "language")])
def test_operators_have_the_flops_and_parameters_of_their_layer(module, choice, frozen) -> None:  # type: ignore[no-untyped-def]
    check(tiny_model(**choice, frozen=frozen), module)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("frozen", "input_grad"), [((), True), ((), False), (("language",), True)], ids=str)
def test_operators_of_a_head_in_pieces(frozen: tuple[str, ...], input_grad: bool, tp: int) -> None:
    """I makes the weight gradient; W has nothing to do. Sizes are of one rank."""
    model = tiny_model(frozen=frozen)
    spec = in_chunks(model_spec(model, dtype_bytes=2), model, 3, tp)
    made, head = describer(model, "language", LinkedDivision(tp=tp)), spec.text.layers[-1]
    assert head.loss_chunk_tokens == 3
    tape, wanted = made.tape(head, input_grad=input_grad), head.flops(SIZE, input_grad=input_grad)
    found = [tp * flops(tape.graph(), phase) for phase in Phase]
    assert found == pytest.approx([wanted.forward, wanted.backward_input + wanted.backward_weight, 0.0])
    plain = made.tape(model_spec(model, dtype_bytes=2).text.layers[-1], input_grad=input_grad)
    assert sum(p.count for p in tape.parameters) == sum(p.count for p in plain.parameters)
    assert {op.device for op in tape.graph().operators} == {op.device for op in plain.graph().operators}


@pytest.mark.parametrize("frozen", [(), ("language",)], ids=str)
def test_operators_of_a_part_of_a_head_in_pieces(frozen: tuple[str, ...]) -> None:
    """I repeats its product, too."""
    model = tiny_model(frozen=frozen)
    spec = in_chunks(divided_vocabulary(model_spec(model, dtype_bytes=2), 2), model, 3)
    head = spec.module("head.1").layers[0]
    shape = dataclasses.replace(language_shape(model), vocab_size=48)
    tape = LayerDescriber(shape=shape, is_part=True).tape(head, input_grad=True)
    wanted = head.flops(SIZE, input_grad=True)
    assert head.loss_chunk_tokens == 3 and head.repeated_flops(SIZE) == wanted.forward
    inside = wanted.backward_input + wanted.backward_weight + wanted.forward
    assert [flops(tape.graph(), phase) for phase in Phase] == pytest.approx([wanted.forward, inside, 0.0])


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("frozen", ["", "vision", "language"])
def test_operators_of_two_towers(kind: str, frozen: str) -> None:
    model = two_towers(kind, frozen=frozen)
    check(model, "vision")
    check(model, "language")


@pytest.mark.parametrize("targets", [[], ["q_proj"], ["v_proj", "up_proj"], ["down_proj"]])
def test_adapters_of_a_language_model(targets: list[str]) -> None:
    base = tiny_model(frozen=("encoder",))
    language = dataclasses.replace(base.language, trainable="lora")
    lora = dataclasses.replace(base.lora, rank=3, target_modules=targets)
    check(dataclasses.replace(base, language=language, lora=lora), "language")


@pytest.mark.parametrize(
    "encoder", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "siglip", "siglip2", "clip", "vit", "whisper"]
)
def test_adapters_of_every_encoder(encoder: str) -> None:
    base = tiny_model(encoder, projector={"spatial_merge": 3} if encoder == "whisper" else None)
    assert base.encoder is not None
    lora = dataclasses.replace(base.lora, rank=3)
    model = dataclasses.replace(base, encoder=dataclasses.replace(base.encoder, trainable="lora"), lora=lora)
    check(model, "vision")


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"dropout": 0.1}, {"use_dora": True, "dropout": 0.1}])
@pytest.mark.parametrize(("encoder", "projector"), [("qwen2_vl", "native"), ("qwen3_vl", "native"), ("clip", "llava")])
def test_adapters_of_projectors_with_lengths_and_dropout(encoder, projector, settings) -> None:  # type: ignore[no-untyped-def]
    check(with_lora(tiny_model(encoder, projector={"kind": projector}), ALL, **settings), "vision")
    check(with_lora(tiny_model(encoder, projector={"kind": projector}), ALL, **settings), "language")


DITS = [{}, {"cross_attn_norm": False}, {"patch_size": [2, 1, 2], "out_channels": 5}]


@pytest.mark.parametrize("change", DITS, ids=str)
@pytest.mark.parametrize("frozen", [(), ("language",), ("dit",)], ids=str)
@pytest.mark.parametrize("module", ["language", "dit"])
def test_layers_of_a_text_to_video_model(module, frozen, change) -> None:  # type: ignore[no-untyped-def]
    check(t2v(frozen=frozen, **change), module)


# ------------------------------------------------------------------------------------------- division


def block(model: ModelConfig, module: str, division: LinkedDivision) -> tuple[Graph, LayerSpec]:
    layer = model_spec(model, dtype_bytes=2).module(module).layers[1]
    return describer(model, module, division).graph(layer, input_grad=True), layer


@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_tensor_parallel_ranks_share_a_block_and_exchange_rows_eight_times(module, choice) -> None:  # type: ignore[no-untyped-def]
    graph, layer = block(tiny_model(**choice), module, LinkedDivision(tp=2))
    wanted = layer.flops(SIZE)
    assert [2 * flops(graph, phase) for phase in Phase] == pytest.approx(
        [wanted.forward, wanted.backward_input, wanted.backward_weight]
    )
    kinds = [op.kind for op in graph.operators if op.kind.is_collective]
    assert sorted(kinds) == [OpKind.ALL_GATHER] * 4 + [OpKind.REDUCE_SCATTER] * 4
    whole = SIZE.rows * layer.output_width * 2
    assert {op.net_bytes(SIZE) for op in graph.operators if op.kind.is_collective} == {whole / 2}


@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_whole_rows_cost_one_all_reduce_a_half_block_and_all_of_each_norm(module, choice) -> None:  # type: ignore[no-untyped-def]
    model = tiny_model(**choice)
    divided, whole = (block(model, module, LinkedDivision(tp=4, whole_rows=rows))[0] for rows in (False, True))
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        sends = [op for op in whole.only(phase).operators if op.kind.is_collective]
        assert [op.kind for op in sends] == [OpKind.ALL_REDUCE] * 2
        before = [op.net_bytes(SIZE) for op in divided.only(phase).operators if op.kind.is_collective]
        assert sum(op.net_bytes(SIZE) for op in sends) == pytest.approx(sum(before))
        assert flops(whole, phase) == flops(divided, phase)

    def norms(graph: Graph) -> float:
        return sum(op.mem_bytes(SIZE) for op in graph.operators if op.name in ("norm1", "norm2"))

    assert norms(whole) == pytest.approx(4 * norms(divided))


def test_context_parallel_ranks_gather_keys_and_values_once() -> None:
    graph, layer = block(tiny_model(language="llama"), "language", LinkedDivision(groups=4, key_groups=4))
    assert 4 * flops(graph, Phase.FORWARD) == pytest.approx(layer.flops(SIZE).forward)
    sends = [op for op in graph.operators if op.kind.is_collective]
    assert [op.kind for op in sends] == [OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER]
    assert sends[0].net_bytes(SIZE) == pytest.approx(0.75 * SIZE.rows * 2 * (2 * 8) * 2)


def test_keys_of_later_groups_of_heads_arrive_under_attention() -> None:
    """Equal FLOPs and bytes; all gathers but the first lie under the attention of the group before."""
    model = tiny_model(language="llama")
    whole, _ = block(model, "language", LinkedDivision(groups=4, key_groups=4))
    grouped, _ = block(model, "language", LinkedDivision(groups=4, key_groups=4, head_groups=2))
    capped, _ = block(model, "language", LinkedDivision(groups=4, key_groups=4, head_groups=64))
    heads = sum(op.kind is OpKind.ALL_GATHER for op in capped.operators)
    assert heads == language_shape(model).num_kv_heads
    for phase in Phase:
        assert flops(grouped, phase) == pytest.approx(flops(whole, phase))
    sent = [sum(op.net_bytes(SIZE) for op in graph.operators) for graph in (whole, grouped)]
    assert sent[0] == pytest.approx(sent[1])

    def seconds(graph: Graph) -> tuple[float, float]:
        """Of exchanges that take as long as attention: makespan with them, and without."""
        times = [float(op.kind.is_collective or op.kind is OpKind.ATTENTION) for op in graph.operators]
        number = sum(op.kind is OpKind.ALL_GATHER for op in graph.operators)
        return max(run(graph, [t / number for t in times])), sum(times) / number

    assert seconds(whole) == (4.0, 4.0)  # gather, attention, its backward, reduce-scatter: one after the other
    assert seconds(grouped) == (3.0, 4.0)


def test_groups_that_share_images_exchange_nothing() -> None:
    graph, _ = block(tiny_model(), "vision", LinkedDivision(groups=4))
    assert not any(op.kind.is_collective for op in graph.operators)


DIVISIONS = [
    LinkedDivision(),
    LinkedDivision(tp=2),
    LinkedDivision(tp=2, whole_rows=True),
    LinkedDivision(tp=2, groups=2, key_groups=2),
]


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize(("module", "choice"), FAMILIES)
def test_every_layer_runs_on_every_division(module, choice, division) -> None:  # type: ignore[no-untyped-def]
    model = tiny_model(**choice)
    for layer in model_spec(model, dtype_bytes=2).module(module).layers:
        found = simulate(describer(model, module, division).graph(layer, input_grad=True), LATENCIES, SIZE)
        assert found.makespan_s > 0
        held = found.peak_bytes()
        assert held >= 2 * layer.num_params / division.tp - 1


@pytest.mark.parametrize(("groups", "whole_rows"), [(1, False), (2, False), (1, True)])
def test_tensor_parallel_ranks_share_a_block_of_a_dit(groups: int, whole_rows: bool) -> None:
    graph, layer = block(t2v(), "dit", LinkedDivision(tp=2, groups=groups, key_groups=groups, whole_rows=whole_rows))
    wanted = layer.flops(SIZE)
    assert [2 * groups * flops(graph, phase) for phase in Phase] == pytest.approx(
        [wanted.forward, wanted.backward_input, wanted.backward_weight]
    )
    found = [op for op in graph.operators if op.kind.is_collective and "key_value" not in op.name]
    sent = {
        (phase, kind): sorted(op.net_bytes(SIZE) * groups for op in found if op.phase is phase and op.kind is kind)
        for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT)
        for kind in {op.kind for op in found}
    }
    # Three sublayers each way, and four norms over all heads; and the gradients of texts and timesteps, unless ranks
    # with all rows compute these alike.
    norms = [SIZE.rows * 4.0] * 3 + [SIZE.texts * 4.0]
    shared = [SIZE.texts * 32 * 2.0, *([] if whole_rows else [SIZE.clips * 6 * 32 * 2.0])]
    for phase, more in ((Phase.FORWARD, []), (Phase.BACKWARD_INPUT, shared)):
        if whole_rows:
            more = [*more, *[SIZE.rows * 32 * 2.0] * 3]
        for kind in () if whole_rows else (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER):
            assert sent.pop((phase, kind)) == [SIZE.rows * 32 * 2.0 / 2] * 3
        assert sent.pop((phase, OpKind.ALL_REDUCE)) == sorted([*norms, *more])
    assert not sent


def test_tensor_parallel_ranks_gather_the_states_and_the_rows_of_the_head_of_a_dit() -> None:
    model, division = t2v(), LinkedDivision(tp=2)
    layers = model_spec(model, dtype_bytes=2).module("dit").layers
    embed, head = (describer(model, "dit", division).graph(layers[i], input_grad=True) for i in (0, -1))
    (states,) = [op for op in embed.operators if op.name == "states.gather"]
    assert states.net_bytes(SIZE) == SIZE.texts * 24 * 2 / 2
    (rows,) = [op for op in head.operators if op.kind.is_collective]
    assert rows.net_bytes(SIZE) == SIZE.rows * 32 * 2 / 2
    assert flops(head, Phase.FORWARD) == layers[-1].flops(SIZE).forward


@pytest.mark.parametrize("division", DIVISIONS)
def test_every_layer_of_a_text_to_video_model_runs_on_every_division(division) -> None:  # type: ignore[no-untyped-def]
    model = t2v()
    for module in model_spec(model, dtype_bytes=2).modules:
        for layer in module.layers:
            graph = describer(model, module.name, division).graph(layer, input_grad=True)
            assert simulate(graph, LATENCIES, SIZE).makespan_s > 0


def test_a_block_of_a_dit_needs_about_what_its_spec_says() -> None:
    """Held from forward to backward, by tensor lifetimes: 164,096 bytes where the spec says 163,320."""
    model = t2v()
    layer = model_spec(model, dtype_bytes=4).module("dit").layers[1]
    made = dataclasses.replace(describer(model, "dit"), dtype_bytes=4).graph(layer, input_grad=True)
    run = simulate(made, LATENCIES, SIZE)
    forward_s = simulate(made.only(Phase.FORWARD), LATENCIES, SIZE).makespan_s
    held = sum(
        tensor.num_bytes(SIZE)
        for tensor, (born, died) in zip(made.tensors, run.lifetimes, strict=True)
        if born < forward_s < died and not tensor.persistent
    )
    assert held / layer.activation_bytes(SIZE) == pytest.approx(1.0048, abs=0.001)


class _Names(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        returns = function._schema.returns
        is_view = returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        self.names[function.name().removeprefix("aten::").split(".")[0]] += not is_view
        return function(*args, **(kwargs or {}))


EQUAL = ((2, 2, 3),) * 4, (5,) * 4
DIFFERENT = ((2, 2, 3), (3, 2, 2), (2, 2, 3), (1, 2, 2)), (5, 5, 4, 5)


@pytest.mark.parametrize(("clips", "calls"), [(EQUAL, 1), (DIFFERENT, 4)], ids=["equal", "different"])
def test_launches_of_a_dit_block_are_those_of_the_operators_that_torch_runs(clips, calls) -> None:  # type: ignore[no-untyped-def]
    """Without the copies at the ends of a chunk, which are not priced. Measured: 1.04 times as many, as a norm's scale
    is made by one more."""
    model = t2v()
    given, made = Clips.draw(model, *clips), chunk(model, "dit", (1, 2))
    size = given.size
    assert size.calls == calls
    with _Names() as ran:
        made(torch.randn(size.rows + size.texts + TIME_ROWS * size.clips, 32), **given.common)
    names = ran.names
    fused_norms = 5 * names["rsqrt"]  # six operators on a CPU are one on a GPU
    copies = sum(names[name] for name in ("cat", "clone", "index_select", "empty", "empty_like", "randn"))
    graph = dataclasses.replace(describer(model, "dit"), dtype_bytes=4).graph(
        model_spec(model, dtype_bytes=4).module("dit").layers[1], input_grad=True
    )
    priced = calls * sum(op.launches for op in graph.operators if op.phase is Phase.FORWARD)
    assert (names.total() - fused_norms - copies) / priced == pytest.approx(1.043, abs=0.001)
