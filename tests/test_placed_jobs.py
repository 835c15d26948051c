"""Jobs whose modules have unequal numbers of pipeline ranks of their own: checkpoints, resume, export, tied weights."""

import pytest
from safetensors.torch import load_file

from mmtrain.commands.cli import main
from tests.jobs import layout, metrics, train, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

OPEN = ["model.encoder.num_segments=0", "model.language.num_segments=0", "lr_scheduler.decay_ratio=0"]
SAVED = ["checkpoint.enable=true", "checkpoint.interval=2"]
PLACED = [
    *layout(pp=3),
    "planner.placement=parallel",
    "parallelism.pipeline_parallel_schedule=ZB-H1",
    "planner.search.eager_forwards=1",
]


def test_a_job_goes_on_where_modules_have_other_numbers_of_ranks(tmp_path, charts, capsys):
    """Two of three ranks for the encoder and then for the language model, which is tied: the losses, and what is
    exported, are those of one process."""
    whole, moved = (write_config(tmp_path / name, charts) for name in ("whole", "moved"))
    run_ranks(train, 1, whole, [*OPEN, *SAVED, "training.steps=4"])
    for steps, ranks in ((2, 2), (4, 1)):
        keys = [*PLACED, *OPEN, *SAVED, f"model.encoder.ranks={ranks}", f"training.steps={steps}"]
        run_ranks(train, 3, moved, keys)
    one, three = metrics(whole.parent), metrics(moved.parent)
    assert sorted(three) == [1, 2, 3, 4]
    for step, loss in one.items():
        assert abs(three[step] - loss) / loss < 1e-5, step
    folders = [tmp_path / name for name in ("one", "three")]
    for path, folder in zip((whole, moved), folders, strict=True):
        assert main(["export", str(path.parent / "run"), str(folder)]) == 0, capsys.readouterr()
    files = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*.safetensors"))
    assert files and files == sorted(path.relative_to(folders[1]) for path in folders[1].rglob("*.safetensors"))
    for file in files:
        ours, theirs = (load_file(folder / file) for folder in folders)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert (theirs[name] - tensor).abs().max() < 1e-4 * max(1.0, float(tensor.abs().max())), name
