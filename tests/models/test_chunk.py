"""Chunks against the whole Hugging Face models: loss, activations and every gradient."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from mmtrain.config.model import EncoderConfig, ProjectorConfig
from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.models.adapters import decoder, vision_adapter
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import head_arguments
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import FeatureRows
from mmtrain.models.fused_qkv import from_head_major, is_fused
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import documents_work, images_work
from mmtrain.spec.vision_shapes import vision_shape
from tests.reference import in_chunks

TOLERANCE = 2e-6
"""Float32, relative to the largest number of a tensor plus a thousandth of the largest of all gradients."""

LENGTHS = (7, 1, 9)
NATIVE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def build(model, module, cuts=(), *, seed=3, dtype=torch.float32, chunk_tokens=0):
    """The chunks of one module, cut before the given layers. Args: chunk_tokens: of the loss."""
    spec = in_chunks(model_spec(model), model, chunk_tokens)
    borders = [0, *cuts, len(spec.module(module).layers)]
    chunks = []
    for lo, hi in itertools.pairwise(borders):
        chunk = build_chunk(model, spec, module, (lo, hi), device="cpu", dtype=dtype)
        init_weights(chunk, seed)
        with torch.no_grad():  # no weight is so small or so uniform that an error could hide behind it
            for name, param in chunk.named_parameters():
                param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name))))
        chunks.append(chunk)
    return chunks


def whole(chunk, prefix, adapter, values, attention="sdpa"):
    """The complete Hugging Face module with the weights of a chunk that holds all layers."""
    config_class, make = adapter.classes
    config = config_class(**{k: v for k, v in values.items() if k != "model_type"})
    config._attn_implementation = attention
    theirs = make(config)
    own = hugging_face_order(chunk, dict(chunk.state_dict()))
    own = {k.removeprefix(prefix): v for k, v in own.items() if k.startswith(prefix)}
    result = theirs.load_state_dict(own, strict=False)
    assert not result.unexpected_keys
    assert all(key.startswith(("merger", "deepstack_merger_list", "post_layernorm")) for key in result.missing_keys)
    return theirs.train()


def hugging_face_order(chunk, tensors):
    """Parameters or gradients of a chunk with the rows of fused layers put back."""
    if not hasattr(chunk, "vision"):
        return tensors
    heads, fused = chunk.shape.num_heads, chunk.adapter.fused_qkv
    return {n: from_head_major(x, heads) if is_fused(n, fused) else x for n, x in tensors.items()}


def vision_inputs(model):
    torch.manual_seed(0)
    if model.encoder.config["model_type"] in NATIVE:
        grids = ((1, 4, 4), (2, 2, 6), (1, 6, 10))
        return torch.randn(sum(t * h * w for t, h, w in grids), 96), grids
    if model.encoder.config["model_type"] == "whisper":
        return torch.randn(3, 10, 24), ((1, 1, 12),) * 3
    return torch.randn(3, 3, 32, 32), ((1, 4, 4),) * 3


def grads(*modules) -> dict[str, torch.Tensor]:
    return {n: p.grad for m in modules for n, p in m.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours: dict, theirs: dict, tolerance: float = TOLERANCE) -> None:
    assert ours
    assert set(ours) == set(theirs)
    floor = 1e-3 * max(g.abs().max() for g in theirs.values())
    assert floor > 0
    for name, expected in theirs.items():
        error = (ours[name] - expected).abs().max() / (expected.abs().max() + floor)
        assert error < tolerance, f"{name}: {error:.1e}"


VISION = [
    ("qwen2_vl", {"kind": "native"}),
    ("qwen2_vl", {}),
    ("qwen2_vl", {"spatial_merge": 1, "hidden_size": 20}),
    ("qwen2_5_vl", {"kind": "native"}),
    ("qwen2_5_vl", {}),
    ("qwen2_5_vl", {"spatial_merge": 1, "hidden_size": 20}),
    ("qwen3_vl", {"kind": "native"}),
    ("qwen3_vl", {}),
    ("siglip", {}),
    ("clip", {}),
    ("clip", {"kind": "llava"}),
    ("vit", {"spatial_merge": 4}),
    ("whisper", {"spatial_merge": 3}),
]


@pytest.mark.parametrize("cuts", [(), (1, 3), (2, 4)], ids=str)
@pytest.mark.parametrize(("encoder", "projector"), VISION)
def test_vision_equals_hugging_face(tiny, encoder, projector, cuts):
    model = tiny.model(encoder, projector=projector)
    if projector.get("spatial_merge") == 1 and cuts == (2, 4):
        cuts = (4,)
    (reference,) = build(model, "vision")
    pixels, grids = vision_inputs(model)

    values = dict(tiny.encoders[encoder])
    if encoder in NATIVE:  # the order of the patches is that of the merge in use
        values["spatial_merge_size"] = model.projector.merge
    theirs = whole(reference, "vision.", reference.adapter, values, "sdpa")
    if encoder in NATIVE:
        out = theirs(pixels, torch.tensor(grids))
        expected = out.pooler_output if reference.projector is None else out.last_hidden_state
        if reference.shape.taps:
            expected = torch.cat([expected, *out.deepstack_features], dim=1)
        if reference.projector is not None and encoder == "qwen2_5_vl":  # theirs is still window by window
            order = reference.shape.row_order(grids)
            expected = expected[torch.from_numpy(order).argsort()]
    else:
        class_tokens = int(reference.shape.class_token)
        expected = theirs(pixels).last_hidden_state[:, class_tokens:].flatten(0, 1)
    if reference.projector is not None:
        of_llava = projector.get("kind") == "llava"
        expected = reference.projector(expected) if of_llava else reference.projector(expected, grids)

    chunks = build(model, "vision", cuts)
    x = pixels
    for chunk in chunks:
        x = chunk(x, grids=grids)
        assert x.shape == chunk.output_shape(images_work(chunk.module_spec, grids))
    torch.testing.assert_close(x, expected, rtol=0, atol=TOLERANCE * expected.abs().max().item())

    weight = torch.randn_like(expected)
    (x * weight).sum().backward()
    (expected * weight).sum().backward()
    expected_grads = {f"vision.{n}": g for n, g in grads(theirs).items()}
    if reference.projector is not None:
        expected_grads |= {f"projector.{n}": g for n, g in grads(reference.projector).items()}
    assert_equal_gradients(hugging_face_order(reference, grads(*chunks)), expected_grads)


def packed(lengths):
    documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(lengths)]
    return attention_context(language_bits(MicrobatchMeta(documents=tuple(documents))))


def language_inputs(num_features=4):
    torch.manual_seed(1)
    num_tokens = sum(LENGTHS)
    labels = torch.randint(0, 96, (num_tokens,))
    labels[torch.rand(num_tokens) < 0.4] = -100
    slots = torch.tensor([1, 2, 10, 12])[:num_features]
    return {
        "ids": torch.randint(0, 96, (num_tokens,)),
        "features": torch.randn(num_features, 24),
        "slots": slots,
        "labels": labels,
        "positions": torch.cat([torch.arange(n) for n in LENGTHS]),
    }


def run(chunks, given, features, **more):
    x = given["ids"]
    for chunk in chunks:
        x = chunk(
            x,
            attention=packed(LENGTHS),
            position_ids=given["positions"],
            features=features if chunk.has_embed else None,
            fills={"vision": FeatureRows(given["slots"])},
            **(head_arguments(given["labels"]) if chunk.is_last else {}),
            **more,
        )
        if not chunk.is_last:
            assert x.shape == chunk.output_shape(documents_work(LENGTHS, 0))
    return x


@pytest.mark.parametrize("num_features", [4, 0, None], ids=["images", "no feature", "text"])
@pytest.mark.parametrize(("cuts", "chunk_tokens"), [((), 0), ((2,), 0), ((1, 3, 4), 0), ((), 2), ((2,), 3)], ids=str)
@pytest.mark.parametrize("language", ["qwen2", "llama", "qwen3", "mistral"])
def test_language_equals_hugging_face_on_each_document(tiny, language, cuts, chunk_tokens, num_features):
    model = tiny.model(language=language)
    given = language_inputs(num_features or 0)
    chunks = build(model, "language", cuts, chunk_tokens=chunk_tokens)
    features = given["features"].clone().requires_grad_() if num_features is not None else None
    ours = run(chunks, given, features, want_predictions=True)

    (reference,) = build(model, "language")
    theirs = whole(reference, "language.", reference.adapter, tiny.languages[language])
    leaf = given["features"].clone().requires_grad_()
    embedded = theirs.model.embed_tokens(given["ids"])
    embedded = torch.cat([embedded, leaf])[
        torch.arange(sum(LENGTHS)).index_copy(0, given["slots"], sum(LENGTHS) + torch.arange(len(leaf)))
    ]
    expected, predictions = torch.zeros(()), []
    for part, labels in zip(embedded.split(LENGTHS), given["labels"].split(LENGTHS), strict=True):
        logits = theirs(inputs_embeds=part[None]).logits[0]
        expected = expected + nn.functional.cross_entropy(logits, labels, reduction="sum")
        predictions.append(logits.argmax(-1)[labels != -100])
    ours.loss_sum.backward()  # in pieces it sets the loss and the predictions
    torch.testing.assert_close(ours.loss_sum, expected, rtol=TOLERANCE, atol=0)
    predictions = torch.cat(predictions)
    assert ours.predictions.tolist() == predictions.tolist()
    expected.backward()
    expected_grads = {f"language.{n}": g for n, g in grads(theirs).items()}
    got = grads(*chunks)
    if num_features:
        expected_grads["features"], got["features"] = leaf.grad, features.grad
    assert_equal_gradients(got, expected_grads)


SLOTS = {"vision": [1, 2, 10, 12], "maps": [4, 5, 9]}
TAPS = {"vision": 2, "maps": 1}


@pytest.mark.parametrize("present", [("vision", "maps"), ("vision",), ("maps",), ()], ids="+".join)
@pytest.mark.parametrize("cuts", [(), (1, 2, 4)], ids=str)
def test_inner_features_of_two_encoders_are_added_where_deepstack_adds_them(tiny, cuts, present):
    maps = EncoderConfig(
        kind="images", projector=ProjectorConfig(kind="native"),
        config=tiny.encoders["qwen3_vl"] | {"deepstack_visual_indexes": [1]},
    )  # fmt: skip
    model = tiny.model("qwen3_vl", "qwen3_vl_text", projector={"kind": "native"})
    model = dataclasses.replace(model, modules={"maps": maps})
    assert {name: len(vision_shape(model, name).taps) for name in model.encoders} == TAPS
    torch.manual_seed(1)
    count, width = 17, 24
    ids, labels = torch.randint(0, 96, (2, count))
    positions = torch.arange(count).expand(3, count)
    given = {name: torch.randn(len(SLOTS[name]), (1 + TAPS[name]) * width) for name in present}

    features = {name: values.clone().requires_grad_() for name, values in given.items()}
    fills = {name: FeatureRows(torch.tensor(SLOTS[name])) for name in present}
    chunks = build(model, "language", cuts)
    x = ids
    for chunk in chunks:
        more = {"features": features, "fills": fills} if chunk.has_embed else {}
        x = chunk(x, attention=packed((count,)), position_ids=positions, **head_arguments(labels), **more)
        if not chunk.is_last:
            assert x.shape == chunk.output_shape(documents_work((count,), 0))

    (reference,) = build(model, "language")
    theirs = whole(reference, "language.", reference.adapter, tiny.languages["qwen3_vl_text"])
    leaves = {name: values.clone().requires_grad_() for name, values in given.items()}
    embeds, added = theirs.model.embed_tokens(ids), [torch.zeros(count, width) for _ in range(2)]
    for name, leaf in leaves.items():
        first, *inner = leaf.split(width, dim=1)
        embeds = embeds.index_copy(0, fills[name].slots, first)
        for depth, values in enumerate(inner):
            added[depth] = added[depth].index_copy(0, fills[name].slots, values)
    hidden = theirs.model(
        inputs_embeds=embeds[None], position_ids=positions[:, None], deepstack_visual_embeds=added,
        visual_pos_masks=torch.ones(1, count, dtype=torch.bool),
    ).last_hidden_state  # fmt: skip
    expected = nn.functional.cross_entropy(theirs.lm_head(hidden[0]), labels, reduction="sum")
    torch.testing.assert_close(x.loss_sum, expected, rtol=TOLERANCE, atol=0)

    x.loss_sum.backward()
    expected.backward()
    expected_grads = {f"language.{n}": g for n, g in grads(theirs).items()} | {n: x.grad for n, x in leaves.items()}
    assert_equal_gradients(grads(*chunks) | {n: x.grad for n, x in features.items()}, expected_grads)


@pytest.mark.parametrize("chunk_tokens", [0, 2])
@pytest.mark.parametrize("cuts", [(), (2,)], ids=["one chunk", "two chunks"])
def test_tied_embeddings(tiny, cuts, chunk_tokens):
    model = tiny.model(None, language_config={"tie_word_embeddings": True})
    chunks = build(model, "language", cuts, chunk_tokens=chunk_tokens)
    given = language_inputs(0)
    (reference,) = build(model, "language")
    assert reference.tied_weight() is None
    assert reference.language.lm_head.weight is reference.language.model.embed_tokens.weight
    theirs = whole(reference, "language.", reference.adapter, {**tiny.languages["qwen2"], "tie_word_embeddings": True})
    expected = sum(
        nn.functional.cross_entropy(theirs(ids[None]).logits[0], labels, reduction="sum")
        for ids, labels in zip(given["ids"].split(LENGTHS), given["labels"].split(LENGTHS), strict=True)
    )
    if cuts:
        copies = [chunk.tied_weight() for chunk in chunks]
        with torch.no_grad():
            copies[1].copy_(copies[0])
    loss = run(chunks, given, None).loss_sum
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    expected.backward()
    got = grads(*chunks)
    if cuts:
        total = copies[0].grad + copies[1].grad
        assert copies[0].grad.any()
        assert copies[1].grad.any()
        got.pop("language.lm_head.weight")
        got["language.model.embed_tokens.weight"] = total
    assert_equal_gradients(got, {f"language.{n}": g for n, g in grads(theirs).items()})


@pytest.mark.parametrize("chunk_tokens", [0, 2])
def test_a_microbatch_without_targets_has_a_loss_of_zero_and_zero_gradients(tiny, chunk_tokens):
    (chunk,) = build(tiny.model(), "language", chunk_tokens=chunk_tokens)
    given = language_inputs()
    given["labels"] = torch.full_like(given["labels"], -100)
    out = run([chunk], given, given["features"], want_predictions=True)
    out.loss_sum.backward()
    assert out.loss_sum == 0
    assert out.predictions.shape == (0,)
    found = grads(chunk)
    assert set(found) == {n for n, _ in chunk.named_parameters()}
    assert not any(g.any() for g in found.values())


@pytest.mark.parametrize(
    ("frozen", "kind", "trainable"),
    [
        ((), "native", {"encoder", "merger"}),
        (("encoder",), "native", {"merger"}),
        (("projector",), "native", {"encoder"}),
        (("encoder",), "mlp", {"projector"}),
        (("encoder", "projector"), "mlp", set()),
    ],
)
def test_frozen_parts_of_the_vision_module(tiny, frozen, kind, trainable):
    model = tiny.model(frozen=frozen, projector={"kind": kind})
    for chunk in build(model, "vision", (2,)):
        for name, param in chunk.named_parameters():
            part = name.split(".")[1] if name.startswith("vision.merger") else name.split(".")[0]
            assert param.requires_grad == ({"vision": "encoder"}.get(part, part) in trainable), name
        spec = chunk.module_spec.layers[chunk.lo : chunk.hi]
        assert any(p.requires_grad for p in chunk.parameters()) == any(layer.trainable for layer in spec)


def test_a_frozen_language_model_passes_gradients_to_the_images(tiny):
    chunks = build(tiny.model(frozen=("language",)), "language", (2,))
    given = language_inputs()
    features = given["features"].requires_grad_()
    run(chunks, given, features).loss_sum.backward()
    assert features.grad.any(dim=1).all()
    assert not grads(*chunks)


def test_names_do_not_depend_on_the_cut(tiny):
    for module in ("vision", "language"):
        for encoder in tiny.encoders:
            model = tiny.model(encoder, projector={"kind": "linear"} if encoder == "qwen2_audio" else None)
            (one,) = build(model, module)
            many = build(model, module, range(1, len(one.module_spec.layers)))
            names = [name for chunk in many for name, _ in chunk.named_parameters()]
            assert sorted(names) == sorted(name for name, _ in one.named_parameters())
            assert [len(chunk.blocks()) for chunk in many].count(1) == 3


def test_rotary_frequencies_are_real_and_stay_float32(tiny):
    model = tiny.model()
    for module, adapter, values in (
        ("vision", vision_adapter("qwen2_vl_vision"), tiny.encoders["qwen2_vl"]),
        ("language", decoder("qwen2"), tiny.languages["qwen2"]),
    ):
        config_class, make = adapter.classes
        theirs = make(config_class(**{k: v for k, v in values.items() if k != "model_type"}))
        for chunk in build(model, module, (2,), dtype=torch.bfloat16):
            ours = {n.removeprefix(f"{module}."): b for n, b in chunk.named_buffers()}
            assert ours
            assert all(b.dtype == torch.float32 for b in ours.values())
            assert all(torch.equal(b, theirs.get_buffer(n)) for n, b in ours.items())
            assert all(p.dtype == torch.bfloat16 for p in chunk.parameters())


def test_bfloat16_runs_and_the_loss_is_float32(tiny):
    given = language_inputs()
    out = run(build(tiny.model(), "language", (2,), dtype=torch.bfloat16), given, given["features"])
    exact = run(build(tiny.model(), "language", (2,)), given, given["features"])
    assert out.loss_sum.dtype == torch.float32
    assert out.loss_sum.item() == pytest.approx(exact.loss_sum.item(), rel=2e-2)


def test_layers_that_do_not_exist(tiny):
    model = tiny.model()
    spec = model_spec(model)
    for layers in ((0, 6), (-1, 2), (2, 2)):
        with pytest.raises(ConfigError, match=r"vision: layers .* were asked for, but it has 0\.\.4"):
            build_chunk(model, spec, "vision", layers)


def test_configs_that_hugging_face_refuses(tiny):
    model = tiny.model(language_config={"rope_parameters": {"rope_type": "linear"}})
    with pytest.raises(ConfigError, match=r"model.language: Qwen2Config cannot be built .* KeyError: .*factor"):
        build_chunk(model, model_spec(model), "language", (0, 1))


def test_images_that_do_not_fit(tiny):
    (packed,) = build(tiny.model(), "vision")
    with pytest.raises(DataError, match="15 rows arrived, but 1 images have 16"):
        packed(torch.zeros(15, 96), grids=((1, 4, 4),))
    with pytest.raises(DataError, match=r"patches \(1, 4, 3\); height and width must be multiples"):
        packed(torch.zeros(12, 96), grids=((1, 4, 3),))
    (fixed,) = build(tiny.model("vit"), "vision")
    with pytest.raises(DataError, match=r"patches \(1, 2, 2\), but vit takes \(1, 4, 4\) alone"):
        fixed(torch.zeros(1, 3, 16, 16), grids=((1, 2, 2),))


def test_tokens_that_do_not_fit(tiny):
    (chunk,) = build(tiny.model(), "language")
    positions = torch.arange(4)
    with pytest.raises(DataError, match="4 rows arrived, there are 4 positions and 3 rows of attention"):
        chunk(positions, attention=packed((3,)), position_ids=positions, **head_arguments(positions))
    with pytest.raises(DataError, match="got no targets for no labelled tokens"):
        chunk(positions, attention=packed((4,)), position_ids=positions)
    with pytest.raises(DataError, match="got 4 targets for 3 labelled tokens"):
        given = {"labelled": positions[:3], "targets": positions}
        chunk(positions, attention=packed((4,)), position_ids=positions, **given)
    with pytest.raises(DataError, match="2 image features arrived without the slots"):
        chunk(positions, attention=packed((4,)), position_ids=positions, features=torch.zeros(2, 24))


@pytest.mark.parametrize("encoder", ["qwen2_vl", "qwen2_5_vl", "siglip", "clip", "vit", "whisper"])
def test_no_chunk_returns_a_view(tiny, encoder):
    """FSDP hooks the output of a chunk, and warns that a hook on a view may be lost."""
    model = tiny.model(encoder)
    x, grids = vision_inputs(model)
    for chunk in build(model, "vision", (1, 2, 4)):
        x = chunk(x, grids=grids)
        assert not x._is_view()
    given = language_inputs()
    x = given["ids"]
    for chunk in build(model, "language", (1, 2, 4))[:-1]:
        features = given["features"] if chunk.has_embed else None
        x = chunk(
            x,
            attention=packed(LENGTHS),
            position_ids=given["positions"],
            features=features,
            fills={"vision": FeatureRows(given["slots"])},
        )
        assert not x._is_view()
