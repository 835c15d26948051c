"""Qwen2-Audio on real ranks: loss and every gradient are those of transformers' whole class.

A layout is compared with the model in one process, and that, on the same batches, with the whole class.
"""

import dataclasses

import pytest

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.config.topology import JobLayout
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.spectrogram import spectrogram_of
from mmtrain.spec.builders import model_spec
from tests.models.test_chunk import assert_equal_gradients
from tests.parallel.parity import Case, check, layouts, run_layout, shallow, short
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import make_batch, model_config, reference_gradients
from tests.sounds import fill, their_gradients, truth

SOUNDS = [[["a", 0, "aa"], [0, 0], ["a", "a"], ["aaa"]], [[0], ["aa", "a", 0], ["a"], [0, "a"]]]
"""Of two replicas: each has a microbatch without sound."""
SEED = 5
"""Of the weights, as in `parity`."""


def whole(*, frozen: tuple[str, ...] = (), blocks: int = 6, images=SOUNDS, **more) -> Case:
    model = model_config(None, others={"audio": "qwen2_audio_encoder"}, frozen=frozen)
    return shallow(Case(model=model, images=images, **more), blocks)


def adapted(case: Case) -> Case:
    """The case with adapters in tower and language model."""
    model = case.model
    tower = dataclasses.replace(model.modules["audio"], trainable="lora")
    language = dataclasses.replace(model.language, trainable="lora")
    lora = dataclasses.replace(model.lora, rank=3, alpha=6.0)
    model = dataclasses.replace(model, modules={"audio": tower}, language=language, lora=lora)
    return dataclasses.replace(case, model=model, prepare=fill_adapters_by_name)


def whisper(**more) -> Case:
    """Whisper on the rows of sounds alone, of whose last ones a projector drops those that it cannot merge."""
    case = shallow(Case(model=model_config(None, others={"audio": "whisper_encoder"}), images=SOUNDS, **more), 2)
    ear = dataclasses.replace(case.model.modules["audio"], sound_rows="sound")
    return dataclasses.replace(case, model=dataclasses.replace(case.model, modules={"audio": ear}))


def test_the_model_in_one_process_is_the_whole_class():
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    case = whole(blocks=3)
    spec = model_spec(case.model)
    batches = [make_batch(case.model, images, seed=i + 1) for i, images in enumerate(SOUNDS)]
    loss, wanted = reference_gradients(case.model, spec, batches, seed=SEED)

    audio, text = case.model.modules["audio"].config, case.model.language.config
    theirs = Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=0)
    ).train()
    fill(theirs, ReferenceModel(case.model, spec, seed=SEED).weights())
    frames, heard = 2 * audio["max_source_positions"], {}
    for batch, meta in batches:
        for tensors, counts in zip(batch.microbatches, meta.microbatches, strict=True):
            for image, patches in zip(counts.images, tensors.pixel_values, strict=True):
                heard[image.key] = spectrogram_of(patches, frames), 2 * image.num_patches
    expected = truth(theirs, batches, heard)[0] / sum(meta.num_targets for _, meta in batches)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=2e-6)
    assert_equal_gradients(wanted, their_gradients(theirs), tolerance=5e-6)  # of weights of keys, as in one document


CASES = {
    "whole": whole(runs=(("interleave", 1), ("1F1B", 0))),
    "frozen tower": whole(frozen=("audio",)),
    "frozen language": whole(frozen=("language",)),
    "adapters": adapted(whole()),
    "rows over cp": whole(share_patches=True, runs=(("interleave", 1), ("1F1B", 0))),
    "sounds over tp": whole(data_encoder=True),
    "recomputed": whole(recompute=ActivationCheckpointConfig(mode="full")),
    "whisper": whisper(),
    "whisper, rows over cp": whisper(share_patches=True),
    "no sound": whole(images=[[[0, 0], [0]], [[0], [0]]]),
    "sound on one": whole(images=[SOUNDS[0], [[0], [0], [0, 0], [0]]]),
}
LAYOUTS = [
    JobLayout.grid(),
    JobLayout.grid(pp=2),
    JobLayout.grid(pp=2, tp=2),
    JobLayout.grid(pp=2, cp=2),
    JobLayout.grid(pp=2, dp_shard=2),
    JobLayout.grid(cp=2, tp=2),
    JobLayout.grid(pp=4),
    JobLayout.grid(pp=2, cp=2, tp=2),
]
DAILY = {
    JobLayout.grid(pp=2, cp=2): {
        "sounds over cp": short(whole(blocks=2), 2),
        "rows over cp": short(whole(blocks=2, share_patches=True), 2),
        "whisper, rows over cp": short(whisper(share_patches=True), 2),
    },
    JobLayout.grid(pp=2, tp=2): {"whole": short(whole(blocks=2), 2), "adapters": short(adapted(whole(blocks=2)), 2)},
    JobLayout.grid(pp=2, dp_shard=2): {"frozen tower": short(whole(blocks=2, frozen=("audio",)), 2)},
}


@pytest.mark.ranks
@layouts(DAILY)
def test_loss_and_gradients_of_few_layouts(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(dict.fromkeys(LAYOUTS, CASES))
def test_loss_and_gradients_of_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
