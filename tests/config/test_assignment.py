"""[assignment]: keys that have no effect, and steps that cannot be, are refused in one line."""

import pytest

from mmtrain.config import config
from mmtrain.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("vlm", ["policy=entrian"], r'assignment\.policy = "entrian"; choose one of .*; did you mean "entrain"\?$'),
        ("vlm", ["policy=balanced", "levels=8"], r'levels = 8 has no effect with policy = "balanced"; .* "entrain"$'),
        ("vlm", ["policy=balanced", "defer=true"], r"assignment\.defer = true has no effect with policy"),
        ("vlm", ["fewer_microbatches=true"], r'fewer_microbatches = true has no effect with policy = "none"'),
        ("vlm", ["policy=entrain", "evaluations=8"], r'evaluations = 8 has no effect .* set policy = "balanced"$'),
        (
            "vlm",
            ["policy=balanced", "fewer_microbatches=true", "evaluations=0"],
            r"evaluations = 0, as simulated iterati",
        ),
        ("vlm", ["samples_per_step=3"], r"= 3 is below training\.global_batch_size = 4 microbatches, .* lower the"),
        ("vlm", ["samples_per_step=999"], r"samples_per_step = 999, but 4 microbatches .* hold at most 512 samples"),
        ("vlm", ["stable_samples=-1"], r"assignment\.stable_samples = -1; it must be at least 0"),
        ("text", ["policy=entrain", "defer=true"], r"defer = true, but the model has no encoder"),
        ("t2v", ["policy=balanced"], r'policy = "balanced", .* with \[model\.dit\]: clips .*; remove both keys$'),
        ("t2v", ["samples_per_step=64"], r"samples_per_step = 64 with \[model\.dit\]: clips .*; remove both keys$"),
    ],
)
def test_what_no_step_can_have_is_refused(name, keys, message):
    with pytest.raises(ConfigError, match=message) as refused:
        config.load(f"debug_{name}.toml", [f"assignment.{key}" for key in keys])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["vlm", "t2v"])
def test_a_number_of_stable_samples_alone_assigns_nothing(name):
    """`mmtrain allocate` prints it for every model, also of clips."""
    section = config.load(f"debug_{name}.toml", ["assignment.stable_samples=100"]).assignment
    assert section.stable_samples == 100 and not section.assigns
