"""Heads that make their logits in pieces, on ranks: loss and every gradient equal the one-process model's, which makes
all logits at one time."""

from dataclasses import replace

import pytest

from mmtrain.config.topology import JobLayout
from tests.lora import with_lora
from tests.parallel.parity import NO_IMAGE, TEXT_ON_ONE, Case, check, layouts, run_layout, selection, small
from tests.parallel.test_divided_vocabulary import UNLABELLED, check_split, outputs
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import TRAINING, model_config

TOLERANCE = 3e-5
"""As of whole logits. Measured: at most 4e-6."""

RUNS = (("1F1B", 0), ("ZB-H1", 1), ("interleave", 1))
CASES = {
    "qwen vision, qwen2, tied": Case(model=model_config(tied=True), runs=RUNS),
    "qwen vision, llama": Case(model=model_config("qwen2_vl_vision", "llama"), images=TEXT_ON_ONE, runs=RUNS),
    "frozen language": Case(model=model_config(frozen=("language",)), runs=RUNS[1:3]),
    "text, tied": Case(model=model_config(None, "llama", tied=True), images=NO_IMAGE, runs=RUNS[:2]),
    "adapters": Case(
        model=with_lora(model_config("qwen2_vl_vision", "llama")), prepare=fill_adapters_by_name, runs=RUNS[2:]
    ),
    "microbatches without labels": Case(model=model_config(tied=True), images=UNLABELLED, runs=RUNS[1:3]),
}
CASES = {
    name: replace(case, training=replace(TRAINING, loss_chunk_tokens=tokens))
    for tokens, (name, case) in zip((1, 2, 3, 2, 1, 2), CASES.items(), strict=True)
}
DIVIDED = ("qwen vision, qwen2, tied", "qwen vision, llama", "adapters", "frozen language")
CASES |= {f"{name}, divided": replace(CASES[name], vocabulary=True) for name in DIVIDED}
SPLIT = {
    name: replace(CASES[name], runs=(("interleave", 1, 2), ("1F1B", 0, 3), ("1F1B", 1, 0, 2)))
    for name in ("qwen vision, qwen2, tied", "qwen vision, llama, divided", "frozen language")
}
SHAPES = [
    JobLayout.grid(pp=2),
    JobLayout.grid(pp=2, tp=2),
    JobLayout.grid(pp=2, cp=2),
    JobLayout.grid(pp=2, dp_shard=2),
    JobLayout.grid(pp=2, dp_replicate=2),
]
LARGE = [
    JobLayout.grid(),
    JobLayout.grid(pp=3),
    JobLayout.grid(pp=2, tp=2, cp=2),
    JobLayout.grid(pp=2, tp=2, dp_shard=2),
    *SHAPES,
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_heads_of_the_cases_are_in_pieces(name, tp):
    case = CASES[name]
    heads = [layer for module in case.spec(2, tp).modules for layer in module.layers if layer.name == "head"]
    assert len(heads) == 1 + case.vocabulary
    assert {head.loss_chunk_tokens for head in heads} == {case.training.loss_chunk_tokens}


@pytest.mark.ranks
@layouts(selection(dict.fromkeys(SHAPES[1:2], CASES), small))
def test_loss_and_gradients(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(dict.fromkeys(LARGE, CASES))
def test_loss_and_gradients_of_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(dict.fromkeys((SHAPES[0], SHAPES[1], SHAPES[3]), SPLIT))
def test_split_backwards_make_the_same_gradients(shape, cases):
    check_split(shape, cases)


@pytest.mark.ranks
@pytest.mark.nightly
def test_the_weight_of_a_head_may_be_gathered_at_each_use():
    shape = JobLayout.grid(pp=2, cp=2)
    names = frozenset({"vision", "language"})
    cases = {name: replace(CASES[name], regathered=names, share_patches=True) for name in (*DIVIDED, "text, tied")}
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(
    "shape",
    [JobLayout.grid(pp=2, tp=2), pytest.param(JobLayout.grid(pp=2, cp=2, tp=2), marks=pytest.mark.nightly)],
    ids=str,
)
def test_predictions_and_losses_of_positions_are_those_of_one_process(shape, divided):
    case = replace(CASES["qwen vision, llama"], vocabulary=divided)
    found = run_ranks(outputs, shape.world_size, shape, case)
    last = [of_rank for rank, of_rank in enumerate(found) if shape.coordinates(rank).pp == shape.pp - 1]
    assert all(of_rank for of_rank in last) and sum(map(bool, found)) == len(last)
    for of_rank in last:
        assert all(predictions == wanted for predictions, wanted, _ in of_rank)
        assert len({token for _, wanted, _ in of_rank for token in wanted}) > 5
        assert max(error for *_, error in of_rank) < 1e-6  # measured: 2e-7
