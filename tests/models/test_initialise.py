import itertools

import pytest
import torch

from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec

CHOICES = [
    ("vision", {"encoder": "qwen2_vl", "projector": {"kind": "native"}}),
    ("vision", {"encoder": "siglip"}),
    ("vision", {"encoder": "siglip2"}),
    ("vision", {"encoder": "clip"}),
    ("vision", {"encoder": "vit"}),
    ("language", {"language": "qwen2"}),
    ("language", {"language": "qwen2", "language_config": {"tie_word_embeddings": True, "pad_token_id": 5}}),
    ("language", {"language": "llama"}),
    ("language", {"language": "qwen3"}),
    ("language", {"language": "mistral"}),
    ("language", {"language": "qwen2_vl_text"}),
]


def weights(model, module, borders, seed=0) -> dict[str, torch.Tensor]:
    spec = model_spec(model)
    found = {}
    for lo, hi in itertools.pairwise(borders):
        chunk = build_chunk(model, spec, module, (lo, hi), device="cpu")
        init_weights(chunk, seed)
        found |= {n: p.detach() for n, p in chunk.named_parameters(remove_duplicate=False)}
    return found


@pytest.mark.parametrize(("module", "choice"), CHOICES)
def test_values_do_not_depend_on_the_cut_but_on_the_seed(tiny, module, choice):
    model = tiny.model(**choice)
    end = len(model_spec(model).module(module).layers)
    one = weights(model, module, (0, end))
    four = weights(model, module, (0, 1, 2, 4, end))
    assert set(one) == set(four)
    assert all(torch.equal(one[name], four[name]) for name in one)
    other = weights(model, module, (0, end), seed=1)
    random = [name for name, value in one.items() if value.std() > 0]
    assert random
    assert all(not torch.equal(one[name], other[name]) for name in random)


def test_every_weight_has_a_stream_of_its_own(tiny):
    one = weights(tiny.model(), "language", (0, 5))
    layers = [one[f"language.model.layers.{i}.mlp.up_proj.weight"] for i in range(3)]
    assert not torch.equal(layers[0], layers[1])
    assert not torch.equal(layers[1], layers[2])
    assert not torch.equal(layers[0], one["language.model.layers.0.mlp.gate_proj.weight"])


def test_distributions_are_those_of_hugging_face(tiny):
    language = weights(tiny.model(language_config={"initializer_range": 0.3}), "language", (0, 5))
    assert language["language.lm_head.weight"].std() == pytest.approx(0.3, rel=0.1)
    assert not language["language.model.layers.0.self_attn.q_proj.bias"].any()
    assert (language["language.model.norm.weight"] == 1).all()
    siglip = weights(tiny.model("siglip"), "vision", (0, 6))
    # SigLIP's attention overrides the rule of its linear layers: Xavier uniform, bound sqrt(6 / (32 + 32)).
    query = siglip["vision.encoder.layers.1.self_attn.q_proj.weight"]
    assert query.abs().max() <= (6 / 64) ** 0.5
    assert query.std() == pytest.approx((2 / 64) ** 0.5, rel=0.1)
    assert siglip["vision.embeddings.position_embedding.weight"].std() == pytest.approx(32**-0.5, rel=0.2)
    vit = weights(tiny.model("vit"), "vision", (0, 6))
    assert vit["vision.embeddings.cls_token"].std() == pytest.approx(0.02, rel=0.5)
    assert vit["projector.fc1.weight"].abs().max() <= 128**-0.5


def test_a_tied_head_starts_as_the_embedding_in_another_chunk(tiny):
    model = tiny.model(language_config={"tie_word_embeddings": True, "pad_token_id": 5})
    values = weights(model, "language", (0, 2, 5))
    embedding, head = values["language.model.embed_tokens.weight"], values["language.lm_head.weight"]
    assert embedding.data_ptr() != head.data_ptr()
    assert torch.equal(embedding, head)
    assert not head[5].any()
    assert head[4].any()


def test_the_global_random_state_is_left_alone(tiny):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    weights(tiny.model(), "language", (0, 5))
    assert torch.equal(torch.rand(3), expected)
