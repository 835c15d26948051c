"""Whole jobs in the order of a recipe: losses, validation, the file in the run's folder, and ranks that disagree."""

import hashlib
import json

import pytest
import torch

from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.parallel.stage import ModalityStage
from mmtrain.simulator.make_job import make_job
from tests.jobs import SHALLOW, finished, layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks
from tests.test_trainer import CURVE_TOLERANCE

HEAD = "from mmtrain.schedule.recipe import Placement, Recipe, Rule, Traversal\n"
RECIPES = {
    "split": "Recipe(in_flight=4 * P, until='W', split_backward=True, overrides={'vision': Rule(in_flight=3)})",
    "v": "Recipe(placement='v', first='alternate', forward='depth', backward='oldest', separate_gradients=True)",
    "functions": "Recipe(in_flight=lambda r: 2 * r.num_chunks, step=lambda moment: moment.ready[-1])",
}
VALIDATED = ["validation.enable=true", "validation.freq=4", "validation.steps=2"]
FOUR_STEPS = [*SHALLOW, "training.steps=4"]


def write_recipe(folder, name):
    path = folder / f"{name}.py"
    path.write_text(f"{HEAD}\ndef schedule(P):\n    return {RECIPES[name]}\n")
    return path


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", ["split", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("v", "functions"))]
)
def test_losses_are_those_of_one_process_and_the_run_keeps_the_recipe(tmp_path, charts, name):
    path, recipe = write_config(tmp_path, charts), write_recipe(tmp_path, name)
    degrees = layout(pp=2)
    segments = ["model.encoder.num_segments=0", "model.language.num_segments=0"]
    keys = [f"parallelism.pipeline_parallel_schedule={recipe}", *degrees, *segments, *FOUR_STEPS, *VALIDATED]
    run_ranks(train, world_size(degrees), path, keys)
    curve, reference = metrics(tmp_path), metrics(finished(charts, 1, FOUR_STEPS))
    assert sorted(curve) == [1, 2, 3, 4]
    assert max(abs(curve[s] - reference[s]) / reference[s] for s in reference) < CURVE_TOLERANCE
    assert (tmp_path / "run" / "schedule.py").read_text() == recipe.read_text()
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()
    assert (tmp_path / "run" / "schedule.sha256").read_text() == f"{digest}  schedule.py\n"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("validation_loss" in step for step in steps)


def test_what_a_job_refuses_of_a_recipe(tmp_path):
    path = tmp_path / "recipe.py"

    def refused(returned, *keys):
        path.write_text(f"{HEAD}\ndef schedule(P):\n    return {returned}\n")
        job = config.load(
            "vlm_s.toml", [f"parallelism.pipeline_parallel_schedule={path}", "planner.enable=false", *keys]
        )
        with pytest.raises(ConfigError) as caught:
            make_job(job)
        return str(caught.value)

    free = 'planner.memory_limit=""'
    assert "names ranks (Placement.ranks), but a job has each" in refused(
        "Recipe(placement=Placement(ranks=[0]))", free
    )
    assert "is honoured by parallelism" in refused("Recipe()", free, "planner.search.activation_memory_gib=10")
    assert "is kept by parallelism" in refused("Recipe()")
    assert "recipe.py:4: NameError" in refused("Recip()", free)


def test_what_a_job_refuses_of_instructions(tmp_path):
    def refused(*instructions):
        path = tmp_path / "recipe.py"
        listed = ", ".join(f"Instruction({one})" for one in instructions)
        path.write_text(
            "from mmtrain.schedule.recipe import Instruction, Recipe\n\ndef schedule(P):\n"
            f"    return Recipe(memory=True, instructions=[{listed}])\n"
        )
        job = config.load("vlm_s.toml", [f"parallelism.pipeline_parallel_schedule={path}", "planner.enable=false"])
        with pytest.raises(ConfigError) as caught:
            make_job(job)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "recipe.py: Instruction('SEE') names a module 'vison'; this model has vision, language" in refused(
        "'SEE', 'vison', 0, print"
    )
    assert ").chunk = 99, but module 'language' is cut into" in refused("'SEE', 'language', 99, print")
    assert "recipe.py:4: Instruction('F'): F is a kind of action of every plan" in refused("'F', 'language', 0, print")
    circle = refused("'A', 'language', 0, print, after='B'", "'C', 'language', 0, print, after='F', before='F'")
    assert "recipe.py:4: Recipe.instructions: F, C of chunk 0 of 'language' wait for each other in a circle" in circle
    assert "recipe.py:4: kind 'see': the name of an instruction is a word of capital letters" in refused(
        "'see', 'language', 0, print"
    )
    assert "SEE is twice on a chunk of 'language'" in refused(
        "'SEE', 'language', 0, print", "'SEE', 'language', -4, print"
    )


def test_the_placement_of_a_recipe_cuts_what_the_config_leaves_open(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(f"{HEAD}\ndef schedule(P):\n    return Recipe(placement=Placement('circular', 3), memory=True)\n")
    keys = [f"parallelism.pipeline_parallel_schedule={path}", "planner.enable=false"]
    open_keys = ["model.encoder.num_segments=0", "model.language.num_segments=0"]
    cut = make_job(config.load("vlm_s.toml", [*keys, *open_keys])).partition
    assert len(cut.of_module("vision")) == len(cut.of_module("language")) == 3 * cut.num_ranks
    cut = make_job(config.load("vlm_s.toml", [*keys, *open_keys[:1], "model.language.num_segments=1"])).partition
    assert len(cut.of_module("language")) == cut.num_ranks


WATCHING = """
import json
from mmtrain.schedule.recipe import Instruction, Recipe

def watch(stage, work):
    with open(f"{folder}/rank{stage.rank}.jsonl", "a") as file:
        seen = work.output.double().sum().item()
        file.write(json.dumps([stage.module, stage.chunk, work.microbatch, work.sub_microbatch, seen]) + chr(10))

def schedule(P, K=2):
    chunks = [("vision", 0, 1), ("language", 0, K), ("language", -1, K)]
    watches = [Instruction("WATCH", module, chunk, watch, every=every) for module, chunk, every in chunks]
    return Recipe(first="alternate", in_flight=P, memory=True, instructions=watches)

def unwatched(P):
    return Recipe(first="alternate", in_flight=P, memory=True)
"""


def watched(rank, path, keys):
    """Runs one rank of a job; what its stages made in training steps, in order, and its gradients of each step."""
    from mmtrain.training.trainer import Trainer

    made, gradients = [], []
    forward, backward = ModalityStage.forward_one_chunk, Trainer.backward

    def forward_one_chunk(self, work, *args, **kwargs):
        output = forward(self, work, *args, **kwargs)
        if self.graph.has_any_backward:
            module, of = self.graph.modules[self.graph.module_of[self.stage_index]], self.graph.works[work]
            tensor = output if isinstance(output, torch.Tensor) else output.loss_sum
            seen = tensor.detach().double().sum().item()
            chunk = module.stages.index(self.stage_index)
            made.append([module.name, chunk, of.microbatch, of.sub_microbatch, seen])
        return output

    def digest(self, *args):
        result = backward(self, *args)
        digest = hashlib.sha256()
        for parameter in self.model.parameters:
            digest.update(b"" if parameter.grad is None else parameter.grad.numpy().tobytes())
        gradients.append(digest.hexdigest())
        return result

    ModalityStage.forward_one_chunk, Trainer.backward = forward_one_chunk, digest
    train(rank, path, keys)
    return made, gradients


@pytest.mark.ranks
def test_instructions_see_activations_and_change_nothing(tmp_path, charts):
    recipe = tmp_path / "watching.py"
    recipe.write_text(WATCHING.replace("{folder}", str(tmp_path)))
    planned = [
        "planner.enable=true",
        "planner.search.budget_evaluations=50",
        "planner.search.threads=1",
        "planner.search.patience_s=50.0",
    ]
    keys = [*layout(pp=2), *SHALLOW, "training.steps=2", *VALIDATED, *planned]
    found = {}
    for name in ("", ":unwatched"):
        path = write_config(tmp_path / f"job{name[1:]}", charts)
        schedule = f"parallelism.pipeline_parallel_schedule={recipe}{name}"
        found[name] = run_ranks(watched, 2, path, [schedule, *keys])
    assert found[""] == found[":unwatched"]
    losses = [metrics(tmp_path / name, key) for key in ("loss", "grad_norm") for name in ("job", "jobunwatched")]
    assert losses[0] == losses[1] and losses[2] == losses[3] and len(losses[0]) == 2
    for rank, (made, gradients) in enumerate(found[""]):
        assert len(gradients) == 2
        every = {("vision", 0): 1, ("language", 0): 2, ("language", 1): 2}
        seen = [json.loads(line) for line in (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()]
        expected = [row for row in made if (*row[:2],) in every and (row[2] + 1) % every[*row[:2]] == 0]
        assert seen == expected and {row[0] for row in seen} == ({"vision", "language"} if rank == 0 else {"language"})


FAILING = """
import torch
from mmtrain.schedule.recipe import Instruction, Recipe

def same(value, other):
    torch.testing.assert_close(value, other)

def watch(stage, work):
    same(work.output, work.output + 1)

def change(stage, work):
    work.output.mul_(2)

def schedule(P, function=watch):
    return Recipe(instructions=[Instruction("WATCH", "language", 0, function, every=2)])

def changing(P):
    return schedule(P, change)
"""


def error_of(rank, path, keys):
    """What a rank of a job says that ends with an error."""
    with pytest.raises(Exception) as caught:
        train(rank, path, keys)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.ranks
def test_a_function_that_raises_is_named_with_rank_action_and_line(tmp_path, charts):
    recipe = tmp_path / "failing.py"
    recipe.write_text(FAILING)
    for name, message in (
        ("", f"the function of WATCH raises AssertionError ({recipe}:6): Tensor-likes are not close!"),
        (":changing", "the function of WATCH changed work.output, which other stages use; let it change a clone"),
    ):
        path = write_config(tmp_path / f"job{name[1:]}", charts)
        keys = [f"parallelism.pipeline_parallel_schedule={recipe}{name}", *layout(pp=2), *FOUR_STEPS]
        first, second = run_ranks(error_of, 2, path, keys, leave_together=False)
        assert first.startswith(f"RecipeError: rank 0, action 2WATCH1.0: {message}") and "\n" not in first
        assert "rank 0" in second
