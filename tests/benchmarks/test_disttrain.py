"""DistTrain's reordering, beside which assignments are measured."""

from benchmarks.disttrain import disttrain
from mmtrain.planner.assignment.filling import AssignmentInput
from tests.planner.assignment.test_assign import even_bins, samples_of


def test_it_starts_with_the_least_and_ends_with_the_next_least():
    samples = samples_of([(n, 5) for n in (7, 3, 9, 1, 5, 6)])
    made = disttrain(AssignmentInput(samples, even_bins(6, 6), [range(6)], ()), [3])
    order = [samples[i].encoder_ns for one in made.replicas[0] for i in one.samples]
    assert order == [1, 6, 7, 9, 5, 3]


def test_where_it_has_no_room_first_fit_stays():
    uneven = samples_of([(1, 9), (1, 8), (1, 3), (1, 2)], sizes=[6, 6, 4, 4])
    made = disttrain(AssignmentInput(uneven, [[0, 2], [1, 3]], [range(2)], (10,)), [1])
    assert [one.samples for one in made.replicas[0]] == [(0, 2), (1, 3)]
    assert made.status == "first-fit" and "microbatch 0 of 2 samples exceeds its capacity" in made.message
