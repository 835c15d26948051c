"""Which heads make their logits in pieces, and of how many positions."""

import pytest

from mmtrain.config.config import load
from mmtrain.errors import ConfigError
from mmtrain.simulator.make_job import job_spec
from mmtrain.spec.vocabulary import LOSS_CHUNK_BYTES


def heads(*overrides, job="debug_text.toml"):
    """Positions of a piece of each head."""
    spec = job_spec(load(job, [f"--{override}" for override in overrides]))
    return [layer.loss_chunk_tokens for m in spec.modules for layer in m.layers if layer.name == "head"]


LARGE = ("training.seq_len=4096", "model.language.config.vocab_size=151936")


def test_a_head_of_small_logits_is_whole_and_of_large_ones_in_pieces_that_fit():
    assert heads() == [0]
    (chunk,) = heads(*LARGE)
    assert 4 * chunk * 151936 <= LOSS_CHUNK_BYTES < 4 * (chunk + 1) * 151936
    assert heads(*LARGE, f"training.seq_len={chunk}") == [0]  # one piece
    assert heads(*LARGE, f"training.seq_len={chunk + 1}") == [chunk]


def test_ranks_that_divide_the_tokens_have_larger_pieces():
    (one,) = heads(*LARGE)
    (of_two,) = heads(*LARGE, "parallelism.tensor_parallel_degree=2")
    parts = heads(*LARGE, "parallelism.pipeline_parallel_degree=4", 'parallelism.vocabulary_parallel="pipeline"')
    assert of_two in (2 * one, 2 * one + 1)
    assert len(parts) == 4 and all(part in range(4 * one, 4 * one + 4) for part in parts)


def test_the_config_may_say_how_many():
    assert heads("training.loss_chunk_tokens=7") == [7]
    assert heads(*LARGE, "training.loss_chunk_tokens=0") == [0]
    assert heads("training.loss_chunk_tokens=256", "training.seq_len=256") == [0]


@pytest.mark.parametrize("job", ["debug_t2v.toml", "debug_clip.toml"])
def test_models_without_tokens_to_predict_have_none(job):
    assert not any(heads("training.loss_chunk_tokens=1", job=job))


@pytest.mark.parametrize(("value", "message"), [("-2", "must be at least -1"), ("3000000000", "must be at most")])
def test_other_numbers_are_refused(value, message):
    with pytest.raises(ConfigError, match=rf"training.loss_chunk_tokens = {value}; it {message}"):
        heads(f"training.loss_chunk_tokens={value}")
    with pytest.raises(ConfigError, match=r"training.loss_chunk_tokens.*integer"):
        heads('training.loss_chunk_tokens="all"')
