"""Whole vision-language models on real ranks: loss and every gradient are those of transformers' whole class.

A layout is compared with the model in one process, and that, on the same batches, with the whole class.
"""

import dataclasses

import pytest

from mmtrain.config.model import LanguageConfig
from mmtrain.config.topology import JobLayout
from mmtrain.models.reference import ReferenceModel
from mmtrain.spec.builders import model_spec
from tests.lora import with_lora
from tests.models.test_chunk import assert_equal_gradients
from tests.parallel.parity import Case, check, layouts, run_layout, shallow
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import LANGUAGES, make_batch, model_config, reference_gradients
from tests.whole_models import config_classes, fill, their_gradients, truth

IMAGES = [[[1, 0, 1], [0, 0], [1, 1], [1]], [[0], [1, 1, 0], [1], [0, 1]]]
"""One image a document at most: the whole class cannot tell two without text between them apart."""
VIDEOS = [[["v", "i", "vi"], [0, "v"], ["iv", 1], ["v"]], [["iv"], ["v", 1, 0], [1], [0, "vi"]]]
"""The same with videos, i an image and v a video."""
TEXT = LANGUAGES["qwen2"] | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3]},
}
SEED = 5
"""Of the weights, as in `parity`."""


def whole(
    family: str, *, tied: bool = False, frozen: tuple[str, ...] = (), blocks: int = 6, images=IMAGES, **more
) -> Case:
    base = model_config(f"{family}_vision", projector="native", frozen=frozen)
    text = TEXT | {"model_type": f"{family}_text", "tie_word_embeddings": tied}
    language = LanguageConfig(config=text, trainable="language" not in frozen, num_segments=1)
    return shallow(Case(model=dataclasses.replace(base, language=language), images=images, **more), blocks)


def batches_of(case: Case, count: int):
    return [make_batch(case.model, case.images[replica % 2], seed=replica + 1) for replica in range(count)]


@pytest.mark.parametrize(
    ("tied", "images"), [(False, IMAGES), (True, IMAGES), (False, VIDEOS)], ids=["untied", "tied", "videos"]
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_the_model_in_one_process_is_the_whole_class(family, tied, images):
    case = whole(family, tied=tied, blocks=3, images=images)
    spec, batches = model_spec(case.model), batches_of(case, 2)
    loss, wanted = reference_gradients(case.model, spec, batches, seed=SEED)

    config_class, model_class = config_classes(family)
    vision = {k: v for k, v in case.model.encoder.config.items() if k != "model_type"}
    text = {k: v for k, v in case.model.language.config.items() if k != "model_type"}
    theirs = model_class(config_class(vision_config=vision, text_config=text, tie_word_embeddings=tied)).train()
    fill(theirs, ReferenceModel(case.model, spec, seed=SEED).weights())
    expected = truth(theirs, batches)[0] / sum(meta.num_targets for _, meta in batches)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=2e-6)
    assert_equal_gradients(wanted, their_gradients(theirs))


CASES = {
    "siglip, qwen3": Case(model=model_config("siglip_vision_model", "qwen3"), images=IMAGES),
    "qwen2_vl": whole("qwen2_vl", runs=(("interleave", 1), ("1F1B", 0))),
    "qwen2_vl, tied": whole("qwen2_vl", tied=True),
    "qwen2_vl, frozen tower": whole("qwen2_vl", frozen=("encoder", "projector")),
    "qwen2_vl, adapters": (lambda case: dataclasses.replace(case, model=with_lora(case.model)))(
        whole("qwen2_vl", prepare=fill_adapters_by_name)
    ),
    "qwen2_5_vl": whole("qwen2_5_vl", runs=(("interleave", 1), ("1F1B", 0))),
    "qwen2_5_vl, patches over cp": whole("qwen2_5_vl", share_patches=True),
    "qwen2_vl, videos": whole("qwen2_vl", images=VIDEOS, runs=(("interleave", 1), ("1F1B", 0))),
    "qwen2_5_vl, videos": whole("qwen2_5_vl", images=VIDEOS, runs=(("interleave", 1), ("1F1B", 0))),
    "qwen2_5_vl, videos, patches over cp": whole("qwen2_5_vl", images=VIDEOS, share_patches=True),
}
LAYOUTS = [
    JobLayout.grid(pp=2),
    JobLayout.grid(pp=2, tp=2),
    JobLayout.grid(pp=2, cp=2),
    JobLayout.grid(pp=2, dp_shard=2),
    JobLayout.grid(pp=2, cp=2, tp=2),
]
DAILY = {
    JobLayout.grid(pp=2, cp=2): {
        "qwen2_vl": whole("qwen2_vl", blocks=2),
        "qwen2_5_vl, videos, patches": whole("qwen2_5_vl", blocks=2, images=VIDEOS, share_patches=True),
    },
    JobLayout.grid(pp=2, tp=2): {
        "qwen2_5_vl": whole("qwen2_5_vl", blocks=2),
        "qwen2_5_vl, videos": whole("qwen2_5_vl", blocks=2, images=VIDEOS, runs=(("interleave", 1),)),
    },
}


@pytest.mark.ranks
@layouts(DAILY)
def test_loss_and_gradients_of_two_layouts(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(dict.fromkeys(LAYOUTS, CASES))
def test_loss_and_gradients_of_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
