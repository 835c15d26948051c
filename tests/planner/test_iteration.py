import re

import pytest

from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.planner.partition.partition import Partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.simulator.partition_choice import partition_of
from mmtrain.spec.builders import model_spec

TEXT = """
[model.language]
config = { model_type = "llama", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 10, num_attention_heads = 4, num_key_value_heads = 4, vocab_size = 64 }
[data]
source = "somewhere"
[training]
steps = 1
seq_len = 64
global_batch_size = 4
"""  # noqa: E501

VISION = """
[model.encoder]
config = { model_type = "siglip_vision_model", hidden_size = 32, intermediate_size = 64, num_hidden_layers = 10, num_attention_heads = 4, image_size = 28, patch_size = 14 }
"""  # noqa: E501


@pytest.fixture
def cut(tmp_path):
    def build(schedule: str, *overrides: str, text: str = TEXT) -> Partition:
        path = tmp_path / "job.toml"
        path.write_text(text)
        named = f"parallelism.pipeline_parallel_schedule={schedule}"
        job = config.load(path, ["parallelism.pipeline_parallel_degree=2", named, *overrides])
        return partition_of(job, model_spec(job.model, dtype_bytes=4))

    return build


@pytest.mark.parametrize("name", [*CATALOGUE])
def test_language_model_gets_the_chunks_that_its_schedule_needs(cut, name: str) -> None:
    schedule = CATALOGUE[name]
    if schedule.placement == "v":
        assert cut(name).stage_rank == (0, 1, 1, 0)
    else:
        assert cut(name).stage_rank == (0, 1) * schedule.least_passes


@pytest.mark.parametrize("name", [*CATALOGUE])
def test_encoder_and_language_model_are_placed_alike(cut, name: str) -> None:
    found = cut(name, "model.encoder.num_segments=0", "model.language.num_segments=2", text=TEXT + VISION)
    chains = {m.name: [found.stage_rank[stage] for stage in m.stages] for m in found.modules}
    if CATALOGUE[name].placement == "v":
        assert chains == {"vision": [0, 1, 1, 0], "language": [0, 1, 1, 0]}
    else:
        assert chains["language"] == [0, 1, 0, 1]
        assert chains["vision"][:2] == [0, 1]


def test_one_chunk_a_rank_is_not_interleaved(cut) -> None:
    words = r'"Interleaved1F1B" needs at least 2 chunks on each .* model\.language\.num_segments = 1 makes 1; raise it'
    with pytest.raises(ConfigError, match=words):
        cut("Interleaved1F1B", "model.language.num_segments=1")
    assert len(cut("1F1B", "model.language.num_segments=1").stages) == 2


def test_v_refuses_three_chunks_a_rank(cut) -> None:
    with pytest.raises(
        ConfigError, match=r"model\.language\.num_segments = 3: a V-shaped schedule .* set num_segments"
    ):
        cut("ZBV", "model.language.num_segments=3")


def test_layouts_decide_the_chunks_of_each_module(cut) -> None:
    language, vision = "Et*4|t*3|t*2|tL", "Et*8|t*2,N,P"
    keys = (f"model.language.pipeline_layout={language}", f"model.encoder.pipeline_layout={vision}")
    found = cut("Interleaved1F1B", *keys, text=TEXT + VISION)
    assert [stage.layers for stage in found.of_module("language")] == [(0, 5), (5, 8), (8, 10), (10, 12)]
    assert [stage.layers for stage in found.of_module("vision")] == [(0, 9), (9, 13)]
    assert found.stage_rank == (0, 1, 0, 1, 0, 1)
    assert cut("ZBV", keys[0]).stage_rank == (0, 1, 1, 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["Et*9|t|L"], r"pipeline_layout = 'Et\*9\|t\|L' has 3 chunks; .* need a multiple of 2"),
        (["Et*9|tL", "model.language.num_segments=2"], r"has 2 chunks; .*num_segments need 2 x 2"),
        (["Et*9|tL", "parallelism.pipeline_parallel_schedule=ZBV"], r"num_segments = 1: a V-shaped"),
        (["Et*9|tL", "parallelism.pipeline_parallel_schedule=LoopedBFS"], r"but .*pipeline_layout = .* makes 1; raise"),
    ],
)
def test_layouts_must_fit_ranks_segments_and_schedule(cut, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.language\." + message if message[0] == "p" else message):
        cut("1F1B", f"model.language.pipeline_layout={keys[0]}", *keys[1:])


def test_memory_limit_needs_a_schedule_that_keeps_it(cut) -> None:
    with pytest.raises(ConfigError, match=r'activation_memory_gib = 2\.0 is honoured by .*"ZB-H1" bounds'):
        cut("ZB-H1", "planner.search.activation_memory_gib=2.0")
    assert cut("ZB-AutoSchedule", "planner.search.activation_memory_gib=2.0").num_ranks == 2


def test_braids_need_parameters_that_stay_gathered(cut, tmp_path) -> None:
    file = tmp_path / "plan.csv"
    file.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    for schedule in ("STP", str(file)):
        assert cut(schedule).num_ranks == 2
        with pytest.raises(ConfigError, match=rf'"always" with .*{re.escape(schedule)}": two passes of a block'):
            cut(schedule, "parallelism.fsdp_reshard_after_forward=always")
