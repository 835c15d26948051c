import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mmtrain.errors import PlanError
from mmtrain.schedule.problem import Option, PlanningProblem
from tests.examples import examples
from tests.schedule.problems import problems, two_modules

TABLE: dict[str, Any] = {
    "version": 1,
    "num_ranks": 2,
    "memory_limit_bytes": [6.0e10, None],
    "p2p": {"latency_s": 1e-5, "bytes_per_s": 2.5e10},
    "modules": [{"name": "vision", "stages": [0, 1]}, {"name": "language", "stages": [2, 3]}],
    "stage_rank": [0, 1, 0, 1],
    "costs": [
        [
            {
                "name": "keep",
                "forward_s": 0.01,
                "backward_input_s": 0.011,
                "backward_weight_s": 0.009,
                "activation_bytes": 8e8,
                "weight_bytes": 3e8,
            },
            {
                "name": "recompute",
                "forward_s": 0.01,
                "backward_input_s": 0.021,
                "backward_weight_s": 0.009,
                "activation_bytes": 1e8,
            },
        ]
    ],
    "works": [
        {"module": "vision", "microbatch": 0, "sub_microbatch": 0, "after": [], "costs": [0, 0],
         "output_bytes": [2e7, 2e7]},
        {"module": "language", "microbatch": 0, "sub_microbatch": 0, "after": [0], "costs": [0, 0],
         "output_bytes": [6e7, 0]},
    ],
}  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    """The table with one entry replaced (or removed, if the value is ...)."""
    table = copy.deepcopy(TABLE)
    node: Any = table
    *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    for key in parents:
        node = node[key]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return table


def test_json_is_read_and_written_back_unchanged() -> None:
    problem = PlanningProblem.from_json(json.dumps(TABLE))
    assert json.loads(problem.to_json()) == TABLE
    assert PlanningProblem.from_json(problem.to_json()) == problem
    assert problem.graph.backward == ((True, True), (True, True))
    assert [o.held_for_weight_bytes for o in problem.options(0, 0)] == [3e8, 1e8]
    assert problem.transfer_s(problem.graph.inputs(3, 1)[0]) == pytest.approx(1e-5 + 6e7 / 2.5e10)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(limits=True))
def test_random_problems_round_trip(problem: PlanningProblem) -> None:
    assert PlanningProblem.from_json(problem.to_json()) == problem


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_files_round_trip(tmp_path: Path, ending: str) -> None:
    problem = two_modules(2, [1, 0])
    first, second = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    problem.write(first)
    problem.write(second)
    assert PlanningProblem.read(first) == problem
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("colour", 1, "colour is unknown"),
        ("p2p.colour", 1, r"p2p\.colour is unknown"),
        ("costs.0.0.colour", 1, r"costs\[0\]\[0\]\.colour is unknown"),
        ("works.1.colour", 1, r"works\[1\]\.colour is unknown"),
        ("p2p", ..., "p2p is missing"),
        ("works.1.after", ..., r"works\[1\]\.after is missing"),
        ("version", 2, "version = 2"),
        ("num_ranks", 2.0, "num_ranks = 2.0 must be an integer"),
        ("num_ranks", True, "num_ranks = True must be an integer, not a boolean"),
        ("num_ranks", 0, "num_ranks = 0"),
        ("memory_limit_bytes", [], "memory_limit_bytes has 0 entries"),
        ("memory_limit_bytes", [1.0, -1.0], r"memory_limit_bytes\[1\] = -1"),
        ("memory_limit_bytes", None, "memory_limit_bytes must be an array, not null"),
        ("stage_rank", [], r"modules\[0\]\.stages\[0\] = 0"),
        ("stage_rank", [0, 1, 0, 5], r"stage_rank\[3\] = 5"),
        ("p2p.latency_s", "0", r"p2p\.latency_s = '0' must be a number"),
        ("p2p.latency_s", float("nan"), r"p2p\.latency_s = nan"),
        ("p2p.bytes_per_s", 0, r"p2p\.bytes_per_s = 0"),
        ("p2p.bytes_per_s", 10**400, r"p2p\.bytes_per_s is too large"),
        ("modules.1.name", "vision", "two modules have the same name"),
        ("modules.1.stages", [2, 9], r"modules\[1\]\.stages\[1\] = 9"),
        ("costs.0", [], r"costs\[0\] is empty"),
        ("costs.0.0.forward_s", -0.5, r"costs\[0\]\[0\]\.forward_s = -0.5"),
        ("costs.0.1.activation_bytes", float("inf"), r"costs\[0\]\[1\]\.activation_bytes = inf"),
        ("costs.0.0.weight_bytes", -1, r"costs\[0\]\[0\]\.weight_bytes = -1"),
        ("works.0.module", "audio", r"works\[0\]\.module = 'audio'"),
        ("works.0.module", 0, r"works\[0\]\.module = 0 must be a string"),
        ("works.0.module", "\x1b[2J", r"works\[0\]\.module = '\\x1b\[2J' has control characters; remove them"),
        ("works.0.microbatch", -1, r"works\[0\]\.microbatch = -1"),
        ("works.1.after", [7], r"works\[1\]\.after\[0\] = 7"),
        ("works.1.after", [1], r"works\[1\]\.after: .* cycle"),
        ("works.0.after", [1], r"works\[0\]\.after: .* cycle"),
        ("works.0.costs", [0, 3], r"works\[0\]\.costs\[1\] = 3"),
        ("works.0.costs", [0], r"works\[0\]\.costs has 1 entries"),
        ("works.0.output_bytes", [0, -1], r"works\[0\]\.output_bytes\[1\] = -1"),
        ("works.0.output_bytes", 5, r"works\[0\]\.output_bytes must be an array, not an integer"),
        ("works.1", [], r"works\[1\] must be an object, not an array"),
        ("costs.0.0.forward_s", 9e307, r"costs\[0\]\[0\]\.forward_s = 9e\+307; it must be between 0 and 1e\+09 s"),
        ("costs.0.1.activation_bytes", 2e18, r"activation_bytes = 2e\+18; it must be between 0 and 1e\+18 bytes"),
        ("costs.0", TABLE["costs"][0] * 200, r"costs\[0\] has 400 options; it must be between 1 and 256"),
        ("p2p.latency_s", 1e308, r"p2p\.latency_s = 1e\+308; it must be between 0 and 1e\+09 s"),
        ("p2p.bytes_per_s", 1e-299, r"p2p\.bytes_per_s = 1e-299; it must be between 1 and 1e\+21 bytes/s"),
        ("num_ranks", 10**6, r"num_ranks = 1000000; it must be between 1 and 1,024 ranks"),
        ("modules.0.stages", [0] * 10_001, r"modules: number of stages = 10003; it must be between 0 and 10,000"),
        (
            "works",
            [{**TABLE["works"][0], "microbatch": m} for m in range(50_001)],
            r"pass through = 100002; .* 100,000",
        ),
        ("works.0.microbatch", 10**60, r"works\[0\]\.microbatch = 10+ must be an integer of 64 bits"),
        ("works.0.module", "a" * 10**6, r"works\[0\]\.module = 'a{8,}\.\.\.a+' does not exist"),
    ],
)
def test_faults_are_refused_with_their_path(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanningProblem.from_json(changed(path, value))


def test_a_transfer_that_takes_for_ever_is_refused() -> None:
    table = changed("p2p.bytes_per_s", 1.0)
    table["works"][1]["output_bytes"] = [1e12, 0]
    with pytest.raises(
        PlanError, match=r"works\[1\]\.output_bytes\[0\] = 1e\+12: its transfer at p2p\.bytes_per_s = 1"
    ):
        PlanningProblem.from_json(table)


def test_many_ranks_of_many_works_are_refused() -> None:
    table = changed("num_ranks", 1024)
    table["memory_limit_bytes"] = [None] * 1024
    table["works"] = [{**TABLE["works"][0], "microbatch": m} for m in range(1000)]
    with pytest.raises(PlanError, match=r"works: their number times num_ranks = 1024000; .* 1,000,000$"):
        PlanningProblem.from_json(table)


def test_names_from_a_file_stay_in_one_line() -> None:
    with pytest.raises(PlanError) as caught:
        PlanningProblem.from_json({**TABLE, "a\nb\ud800": 1})
    assert str(caught.value).startswith(r"'a\nb\ud800' is unknown; known are")


def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "problem.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**20) * 129)
    assert path.stat().st_size < 200_000
    with pytest.raises(PlanError, match=r"problem\.json\.gz: its text.* has more than 134217728 bytes"):
        PlanningProblem.read(path)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ('{"a": 1, "a": 2}', "'a' occurs twice")])
def test_text_that_is_no_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PlanningProblem.from_json(text)


def test_options_of_one_list_agree_on_having_a_backward() -> None:
    table = changed("costs.0.1.backward_input_s", 0)
    table["costs"][0][1]["backward_weight_s"] = 0
    with pytest.raises(PlanError, match=r"costs\[0\]\[1\]: option 'recompute' has no backward, unlike"):
        PlanningProblem.from_json(table)


def test_files_are_refused_with_their_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.json: there is no such file"):
        PlanningProblem.read(tmp_path / "absent.json")
    with pytest.raises(PlanError, match=r"must end in \.json or \.json\.gz"):
        PlanningProblem.read(tmp_path / "problem.txt")
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(b"no gzip")
    with pytest.raises(PlanError, match=r"broken\.json\.gz: cannot be read"):
        PlanningProblem.read(broken)


def test_zero_backward_times_mean_no_backward() -> None:
    option = Option(name="a", forward_s=1, backward_input_s=0, backward_weight_s=0, activation_bytes=0)
    assert not option.has_backward
