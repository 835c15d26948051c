"""[model.contrast]: what does not go with two towers, or is not built for them, is refused by its key."""

import json

import pytest

from mmtrain.config import config
from mmtrain.config.model import ContrastConfig
from mmtrain.errors import ConfigError
from mmtrain.spec.builders import model_spec
from mmtrain.spec.module_sizes import shape_of
from tests.models.towers import CAPTIONS, IMAGES

JOB = """
[model.encoder]
config = {images}
[model.language]
config = {captions}
[model.contrast]
loss = "clip"
[data]
source = "somewhere"
[training]
steps = 10
seq_len = 16
global_batch_size = 4
"""


def toml(values: dict[str, object]) -> str:
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + "}"


@pytest.fixture
def load(tmp_path):
    def build(*overrides, images=IMAGES["clip"], captions=CAPTIONS["clip"], without=""):
        path = tmp_path / "job.toml"
        text = JOB.format(images=toml(images), captions=toml(captions))
        path.write_text(text.replace(without, ""))
        return config.load(path, overrides)

    return build


def test_two_towers(load):
    loaded = load("model.contrast.microbatches=2")
    assert loaded.model.contrast == ContrastConfig(loss="clip", microbatches=2)
    assert [module.name for module in model_spec(loaded.model).modules] == ["vision", "language", "contrast"]


@pytest.mark.parametrize(("overrides", "message"), [
    (["planner.enable=true", "planner.search.regroup=true"], r"regroup = true with \[model\.contrast\]: the loss"),
    (["model.contrast.microbatches=-1"], r"model\.contrast\.microbatches = -1"),
    (["model.contrast.microbatches=5"], r"microbatches = 5, but a replica has 4 microbatches a step \(.*= 4 over 1"),
    (
        ["model.contrast.microbatches=3", "parallelism.data_parallel_replicate_degree=2"],
        r"microbatches = 3, but a replica has 2 microbatches",
    ),
    (['model.contrast.loss="triplet"'], r'model\.contrast\.loss = "triplet"'),
    (["parallelism.tensor_parallel_degree=2"], r"tensor_parallel_degree = 2 with \[model\.contrast\]: .*set it to 1"),
    (["parallelism.context_parallel_degree=2"], r"context_parallel_degree = 2 with \[model\.contrast\]"),
    (['parallelism.vocabulary_parallel="pipeline"'], r'vocabulary_parallel = "pipeline" with \[model\.contrast\]'),
    (['assignment.policy="balanced"'], r'assignment\.policy = "balanced" with \[model\.contrast\]: the loss depends'),
    (['model.language.attention_mask="prefix"'], r'attention_mask = "prefix" with .*: the class of a tower decides'),
    (['model.projector.kind="linear"'], r"\[model\.projector\] has no effect with \[model\.contrast\]"),
    (
        ["validation.enable=true", "validation.generate=4"],
        r"validation\.generate = 4 with \[model\.contrast\]: two towers answer no questions",
    ),
    (['tokenizer.chat_template="x.jinja"'], r"tokenizer\.chat_template = .*captions are no conversations"),
])  # fmt: skip
def test_other_combinations_are_refused(load, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(*overrides)


def test_towers_need_each_other(load):
    with pytest.raises(ConfigError, match=r"there is no \[model\.encoder\], the tower that reads the images; add one"):
        load(without=f"[model.encoder]\nconfig = {toml(IMAGES['clip'])}\n")
    no_contrast = '[model.contrast]\nloss = "clip"\n'
    with pytest.raises(ConfigError, match=r"data\.max_pairs = 8 has no effect: a job without \[model\.contrast\]"):
        load("data.max_pairs=8", without=no_contrast)
    with pytest.raises(ConfigError, match=r"sub_microbatch_size = 2 has no effect without \[model\.contrast\]"):
        load("model.language.sub_microbatch_size=2", without=no_contrast)
    with pytest.raises(ConfigError, match=r"clip_text_model is a tower that makes an embedding of a text; add \[model"):
        shape_of(load(without=no_contrast).model, "language")


@pytest.mark.parametrize(("images", "captions", "message"), [
    ({}, {"model_type": "llama", "hidden_size": 32}, r"\(llama\) makes no embedding of a text; towers are siglip_"),
    (
        {"model_type": "vit", "hidden_size": 32, "num_attention_heads": 4, "image_size": 16, "patch_size": 4},
        {},
        r"\(vit\) makes no embedding of an image; towers are siglip_vision_model, clip_vision_model",
    ),
    (
        {"model_type": "siglip2_vision_model", "hidden_size": 32, "num_attention_heads": 4},
        {},
        r"\(siglip2_vision_model\) makes no embedding of an image",
    ),
    (IMAGES["siglip"] | {"vision_use_head": False}, {}, r"vision_use_head = false, but .* set it to true"),
    ({"projection_dim": 16}, {}, r"projection_dim = 16, but .* makes embeddings of 24 columns \(projection_dim\)"),
])  # fmt: skip
def test_towers_that_make_no_pair_are_refused(load, images, captions, message):
    def changed(base, changes):
        return changes if "model_type" in changes else base | changes

    model = load(images=changed(IMAGES["clip"], images), captions=changed(CAPTIONS["clip"], captions)).model
    with pytest.raises(ConfigError, match=message):
        model_spec(model)


def test_an_image_tower_needs_the_width_of_its_embedding(load):
    images = {key: value for key, value in IMAGES["clip"].items() if key != "projection_dim"}
    with pytest.raises(ConfigError, match=r"projection_dim, the width of an embedding, is missing; set it"):
        model_spec(load(images=images).model)
