"""Keys of other trainers: each is answered with keys of ours that exist."""

import dataclasses
import typing

import pytest

from mmtrain.config import config
from mmtrain.config.foreign_keys import FOREIGN, ours
from mmtrain.errors import ConfigError


def keys_of(section, path=""):
    """The dotted keys of all sections."""
    for name, hint in typing.get_type_hints(section).items():
        inner = [hint, *typing.get_args(hint)]
        found = next((kind for kind in inner if dataclasses.is_dataclass(kind)), None)
        yield path + name
        yield from keys_of(found, f"{path}{name}.") if found else ()


KEYS = set(keys_of(config.Config))


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_named_exists(name):
    known = FOREIGN[name]
    assert set(known.keys) <= KEYS and known.of and (known.keys or known.how)
    for trainer in known.of:
        assert trainer in ours(name)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "--num_train_epochs=3",
            r'"num_train_epochs" names no section; num_train_epochs of Hugging Face Trainer, LLaMA',
        ),
        (
            "--lora_rank",
            r"not of the form --section.key=value; lora_rank of LLaMA-Factory, ms-swift is model\.lora\.rank ",
        ),
        (
            "--training.gradient_accumulation_steps=8",
            r"unknown key training\.gradient_accum.* is training\.global_batch",
        ),
        ("--model.lora.lora_dropout=0.1", r"lora_dropout of LLaMA-Factory, ms-swift is model\.lora\.dropout here"),
        ("--training.packing=true", r"packing of .* has no key here: samples are always packed"),
        ("--parallelism.deepspeed='z3.json'", r"is parallelism\.data_parallel_shard_degree here: FSDP2"),
        (
            "--checkpoint.load_best_model_at_end=true",
            r"load_best_model_at_end of .* is checkpoint\.keep_best here: `mmtrain export` and `generate` take it by ",
        ),
        ("--metric_for_best_model=eval_loss", r"is checkpoint\.keep_best here: \"loss\", \"accuracy\""),
        ("--checkpoint.greater_is_better=false", r'is checkpoint\.keep_best here: "highest NAME" or "lowest NAME"'),
        ("--validation.early_stopping_patience=3", r"is validation\.patience here: of checkpoint\.keep_best"),
        ("--step_scheduler.num_epochs=3", r"step_scheduler of NeMo Automodel is training\.epochs and training\.global"),
        ("--model.num_train_epoch=3", r"unknown key model\.num_train_epoch; model has pretrained"),
    ],
)
def test_a_file_or_an_override_with_one_is_refused_with_ours(override, message):
    with pytest.raises(ConfigError, match=message):
        config.load("configs/debug_vlm.toml", [override])


def test_all_that_people_write_first():
    assert len(FOREIGN) >= 190
    first = (
        "num_train_epochs gradient_accumulation_steps per_device_train_batch_size save_total_limit lora_rank deepspeed"
    )
    assert all(map(ours, (*first.split(), "packing"))) and not ours("training.steps")
