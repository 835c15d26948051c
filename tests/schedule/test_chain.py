import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.simulate import simulate


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_rank_has_the_same_work_whatever_the_number_of_chunks(name: str) -> None:
    schedule = CATALOGUE[name]
    problem = plain_chain(3, 4, schedule, seconds=(1.0, 2.0, 3.0), activation_bytes=2.0)
    timeline = simulate(problem, schedule.make(problem))
    assert timeline.busy_s == pytest.approx((24.0,) * 3)
    assert problem.graph.stage_rank == {1: (0, 1, 2), 2: (0, 1, 2, 0, 1, 2)}.get(
        len(problem.graph.stage_rank) // 3 if schedule.placement == "loop" else 0, (0, 1, 2, 2, 1, 0)
    )
    assert sum(option.activation_bytes for (option,) in problem.costs) * len(problem.graph.stage_rank) / 3 == 2.0


def test_transfers_take_the_given_time() -> None:
    schedule = CATALOGUE["GPipe"]
    problem = plain_chain(2, 1, schedule, transfer_s=0.5)
    assert simulate(problem, schedule.make(problem)).makespan_s == 2 * 3.0 + 2 * 0.5


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(PlanError, match="a chain of 0 ranks and 2 microbatches; both are at least 1"):
        plain_chain(0, 2, CATALOGUE["1F1B"])
