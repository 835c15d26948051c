"""How long a job is, how often it does something, and by which figure its validations are compared."""

from fractions import Fraction

import pytest

from mmtrain.config import config
from mmtrain.config.figures import Figure
from mmtrain.config.intervals import Interval
from mmtrain.errors import ConfigError

EPOCHS = ["training.steps=0", "training.epochs=3"]
VALIDATES = ["validation.enable=true"]
ASKS = [*VALIDATES, "validation.generate=4"]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("debug_vlm", ["training.epochs=3"], r"training\.steps = 500 and training\.epochs = 3 are both set; keep one"),
        ("debug_vlm", ["lr_scheduler.warmup_ratio=0.1"], r"warmup_steps = 20 and .*warmup_ratio = 0\.1 are both set"),
        ("debug_vlm", [*EPOCHS, "data.streaming=true", "data.shuffle=false"],
         r"training\.epochs = 3 with data\.streaming = true: the number of samples of a stream is not known"),
        ("debug_vlm", ["checkpoint.interval=1 epoch", "data.streaming=true", "data.shuffle=false"],
         r'checkpoint\.interval = "1 epoch" with data\.streaming = true'),
        ("debug_vlm", [*EPOCHS, "data.source=", "data.sources=[{source='a', weight=1}, {source='b', weight=2}]"],
         r"training\.epochs = 3 with data\.sources: .* no epoch together; count in steps"),
        ("debug_vlm", ["validation.freq=0.5 epochs", "data.source=", "data.sources=[{source='a', weight=1}]"],
         r'validation\.freq = "0\.5 epochs" with data\.sources'),
        ("debug_vlm", [*EPOCHS, "elastic.enable=true", "parallelism.pipeline_parallel_degree=1"],
         r"training\.epochs = 3 with elastic\.enable = true: nodes that wait"),
        ("debug_vlm", ["validation.patience=2", "elastic.enable=true", "parallelism.pipeline_parallel_degree=1"],
         r"validation\.patience = 2 with elastic\.enable = true"),
        ("debug_text", ["validation.patience=2"], r"validation\.patience = 2, but validation\.enable = false"),
        ("debug_text", ["checkpoint.keep_best=loss"], r'keep_best = "loss" with validation\.enable = false: no valid'),
        ("debug_vlm", ["checkpoint.enable=false", "checkpoint.keep_best=loss"], "so nothing is saved"),
        ("debug_vlm", ["checkpoint.keep_best=exact_match"], r'"exact_match" with validation\.generate = 0'),
        ("debug_vlm", ["checkpoint.keep_best=lowest cer"], r'"lowest cer" with validation\.metric = ""'),
        ("debug_t2v", ["validation.enable=true", "checkpoint.keep_best=accuracy"], r'"accuracy" with \[model\.dit\]'),
        ("debug_vlm", ["validation.metric=a.py:f"], r'"a\.py:f" with validation\.generate = 0: there are no answers'),
        ("debug_vlm", [*ASKS, "validation.metric=a.py"], r'"a\.py"; write PATH:FUNCTION, a Python file'),
        ("debug_vlm", [*ASKS, "validation.metric=http://a/b.py:f"], "an address; a metric is a program"),
        ("debug_vlm", [*ASKS, "validation.metric=a.py:exact_match"], "exact_match is a figure of every validation"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        config.load(f"{name}.toml", overrides)


def test_a_config_of_epochs_reads_back_equal(tmp_path):
    job = config.load("debug_vlm.toml", [*EPOCHS, "validation.freq=0.5 epochs", "checkpoint.interval=2 epochs"])
    (tmp_path / "resolved.toml").write_text(config.dump(job))
    again = config.load(tmp_path / "resolved.toml")
    assert again == job
    assert again.training.passes == 3 and config.load("debug_vlm.toml").training.passes is None
    assert again.validation.every == Interval(epochs=Fraction(1, 2))
    assert again.checkpoint.every == Interval(epochs=Fraction(2))


def test_an_interval_counts_steps_or_epochs_exactly():
    assert Interval.parse("k", 50) == Interval.parse("k", "50 steps") == Interval(steps=50)
    assert [Interval(steps=3).count(step, Fraction(0)) for step in (0, 2, 3, 8, 9)] == [0, 0, 1, 2, 3]
    tenth = Interval.parse("k", "0.1 epochs")  # a tenth as a float is a little more than a tenth
    assert [tenth.count(0, Fraction(samples, 30)) for samples in (2, 3, 29, 30)] == [0, 1, 9, 10]


@pytest.mark.parametrize(
    ("text", "worse", "better"),
    [("loss", 2.0, 1.0), ("accuracy", 1.0, 2.0), ("exact_match", 0.0, 0.5), ("bleu", 1.0, 2.0), ("lowest cer", 2, 1)],
)
def test_a_figure_says_which_value_is_better(text, worse, better):
    figure = Figure.parse("k", text)
    assert figure.better(better, worse) and not figure.better(worse, better) and not figure.better(worse, worse)
    assert figure.better(worse, None) and not figure.better(float("nan"), None)
    assert Figure.parse("k", figure.text) == figure
