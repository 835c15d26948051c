"""Instructions in the runtime of one rank: what their functions see, when outputs are freed, what is refused."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from mmtrain.errors import PlanError, RecipeError
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.recipe import Instruction
from mmtrain.schedule.recipe.instructions import functions_of, planned
from tests.parallel.test_runtime_loop import Job, alone, feed, shape_of  # noqa: F401


def loaded(*instructions):
    """A job of two stages and three works, with instructions."""
    job, problem = Job(), plain_chain(1, 3, CATALOGUE["Interleaved1F1B"])
    problem = replace(problem, graph=replace(problem.graph, instructions=tuple(planned(instructions, problem.graph))))
    job.program = lower(make_plan(problem, "Interleaved1F1B").plan, problem, sharded=False)
    job.runtime.load(job.program, shape_of, functions_of(instructions, problem.graph.modules))
    return job


def test_functions_see_what_each_forward_made_and_outputs_are_freed_then():
    seen, alive = [], []

    def see(stage, work):
        assert not torch.is_grad_enabled() and not work.output.requires_grad
        output = work.output.clone()
        seen.append((stage.index, stage.module, stage.chunk, stage.rank, stage.pp_rank, work.microbatch, output))

    def after_it(stage, work):
        assert work.output is None
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))

    def refer(stage, work):
        references.append(weakref.ref(work.output))

    references = []
    job = loaded(
        Instruction("SEE", "language", 0, see),
        Instruction("REFER", "language", 0, refer, ("F", "SEE")),
        Instruction("LATER", "language", 0, after_it, "B"),
        Instruction("LOSS", "language", -1, see, every=2),
    )
    for _ in range(2):  # a program may run again
        seen.clear()
        outcome = job.runtime.step(feed)
        first, last = job.stages[0].submod, job.stages[1].submod
        for index, module, chunk, rank, pp_rank, microbatch, output in seen:
            assert (module, chunk, rank, pp_rank) == ("language", index, 0, 0)
            made = first(feed(0, microbatch)[0][0])
            assert torch.equal(output, made if index == 0 else last(made).loss_sum)
        assert Counter((index, microbatch) for index, *_, microbatch, _ in seen) == Counter(
            [(0, 0), (0, 1), (0, 2), (1, 1)]
        )
        assert [action for action, _, _ in outcome.rows] == list(job.program.actions[0])
    assert len(alive) == 6 and set(alive) == {0}


def test_gradients_are_the_same_to_the_bit():
    plain, watched = Job(), loaded(Instruction("SEE", "language", 0, lambda stage, work: work.output.sum()))
    for stage, other in zip(plain.stages, watched.stages, strict=True):
        other.submod.load_state_dict(stage.submod.state_dict())
    plain.runtime.step(feed), watched.runtime.step(feed)
    for stage, other in zip(plain.stages, watched.stages, strict=True):
        for ours, theirs in zip(other.submod.parameters(), stage.submod.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)


def test_a_profiler_sees_them_as_ranges():
    job = loaded(Instruction("SEE", "language", 0, lambda stage, work: None))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        job.runtime.step(feed)
    assert {"PP:0SEE0.0", "PP:0SEE1.0", "PP:0SEE2.0"} <= {event.name for event in profiler.events()}


def test_what_the_runtime_refuses():
    job = loaded(Instruction("SEE", "language", 0, lambda stage, work: None))
    with pytest.raises(PlanError, match=r"rank 0, step \d+: no function runs 0SEE0.0; plan without instructions, or"):
        job.runtime.load(job.program, shape_of)
    job = loaded(Instruction("SEE", "language", 0, lambda stage, work: work.output.zero_()))
    with pytest.raises(RecipeError, match=r"rank 0, action 0SEE0.0: the function of SEE changed work.output, which"):
        job.runtime.step(feed)
    job = loaded(Instruction("SEE", "language", 0, lambda stage, work: torch.linalg.cholesky(work.nothing)))
    with pytest.raises(
        RecipeError, match=r"action 0SEE0.0: .* AttributeError \(.*test_bound_instructions.py:\d+\): "
    ) as caught:
        job.runtime.step(feed)
    assert caught.value.__notes__ == ["while this rank was in 0SEE0.0"]


def test_kinds_of_instructions_are_those_of_the_program():
    job = loaded(Instruction("SEE", "language", 0, print, before="B", every=3))
    assert [str(action) for action in job.program.actions[0] if action.kind is Kind("SEE")] == ["0SEE2.0"]
