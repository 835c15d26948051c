"""DeepStack on real ranks: activations that travel with others over a pipeline's edges, on every kind of layout.

A layout is compared with the model in one process, which `tests/models/test_whole_models.py` compares with
transformers' whole class.
"""

import dataclasses

import numpy as np
import pytest
import torch

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.positions import token_positions
from mmtrain.modality.submesh import Submesh
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import IGNORE_INDEX, head_arguments
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import Partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import ModelSpec
from tests.lora import with_lora
from tests.parallel.parity import Case, check, cut, layouts, run_layout
from tests.parallel.test_parity import TOLERANCE
from tests.parallel.test_split_backward import fill_adapters_by_name
from tests.ranks import run_ranks
from tests.reference import PLANNER, VOCAB, make_batch
from tests.spec.test_builders import kept_bytes

IMAGES = [[[1, 0, 2], [0, 0], [1, 1], [2]], [[0], [1, 1, 0], [1], [0, 3]]]
"""Images of each document, for two replicas: one of each has text-only microbatches."""
VIDEOS = [[["v", "i", "vi"], [0, "v"], ["iv", 1], ["v"]], [["iv"], ["v", 1, 0], [1], [0, "vi"]]]
"""The same with videos, i an image and v a video, whose patches in time have text between them."""
MAPS = [[["im", "m"], ["m"], [0, 1], ["mi", 0]], [["m"], ["mi"], [0], ["m", "i"]]]
"""Microbatches with items of both encoders, of one, and of none; m an item of the second one."""
TAPS = {4: [0, 1, 3], 6: [0, 2, 5]}
"""Number of blocks -> those whose outputs travel; the last one is among them."""


def deepstack(
    blocks: int = 6, *, frozen: tuple[str, ...] = (), segments: tuple[int, int] = (1, 1), tied: bool = False
) -> ModelConfig:
    """A tiny Qwen3-VL. Args: frozen: of encoder, projector, language. segments: K of vision and language."""
    vision = {
        "model_type": "qwen3_vl_vision", "depth": blocks, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4,
        "out_hidden_size": 48, "patch_size": 4, "temporal_patch_size": 1, "num_position_embeddings": 9,
        "deepstack_visual_indexes": TAPS[blocks],
    }  # fmt: skip
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": blocks,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
        "max_position_embeddings": 256, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    return ModelConfig(
        encoder=EncoderConfig(config=vision, trainable="encoder" not in frozen, num_segments=segments[0]),
        projector=ProjectorConfig(kind="native", trainable="projector" not in frozen),
        language=LanguageConfig(config=text, trainable="language" not in frozen, num_segments=segments[1]),
    )


def with_maps(model: ModelConfig) -> ModelConfig:
    """The model with a second encoder whose inner features travel: of fewer blocks than those of the first."""
    config = model.encoder.config | {"deepstack_visual_indexes": [1]}
    maps = EncoderConfig(kind="images", config=config, projector=ProjectorConfig(kind="native"))
    return dataclasses.replace(model, modules={"maps": maps})


def case(model: ModelConfig | None = None, images=IMAGES, **more) -> Case:
    return Case(model=model or deepstack(), images=images, **more)


CASES = {
    "all": case(runs=(("interleave", 1), ("1F1B", 0))),
    "two segments": case(deepstack(segments=(2, 2))),
    "tied": case(deepstack(tied=True)),
    "frozen tower": case(deepstack(frozen=("encoder",))),
    "frozen tower and mergers": case(deepstack(frozen=("encoder", "projector"))),
    "frozen language": case(deepstack(frozen=("language",))),
    "adapters": case(with_lora(deepstack()), prepare=fill_adapters_by_name),
    "patches over cp": case(share_patches=True),
    "whole encoder": case(data_encoder=True),
    "split backwards": case(runs=(("interleave", 1, 2),)),
    "memory": case(memories=3),
    "two encoders": case(with_maps(deepstack()), MAPS, runs=(("interleave", 1), ("1F1B", 0))),
    "videos": case(images=VIDEOS, runs=(("interleave", 1), ("1F1B", 0))),
    "videos, patches over cp": case(images=VIDEOS, share_patches=True),
}
LAYOUTS = [
    JobLayout.grid(pp=2),
    JobLayout.grid(pp=4),
    JobLayout.grid(pp=2, tp=2),
    JobLayout.grid(pp=2, cp=2),
    JobLayout.grid(pp=2, dp_shard=2),
    JobLayout.grid(pp=2, cp=2, tp=2),
]
DAILY = {
    JobLayout.grid(pp=2): {
        "all": case(deepstack(4)),
        "memory": case(deepstack(4), memories=2),
        "two encoders": case(with_maps(deepstack(4)), MAPS),
        "videos": case(deepstack(4), VIDEOS),
    }
}


def carried(model: ModelConfig, shape: JobLayout) -> dict[str, list[int]]:
    """Module -> activations that travel over each edge between its stages."""
    spec, parts = model_spec(model), cut(case(model), shape)
    return {
        module.name: [module.num_carried(stage.layers[1] - 1) for stage in parts.of_module(module.name)[:-1]]
        for module in spec.modules
    }


@pytest.mark.ranks
@layouts(DAILY)
def test_loss_and_gradients(shape, cases):
    assert carried(cases["all"].model, shape) == {"vision": [2], "language": [1]}
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(dict.fromkeys(LAYOUTS, CASES))
def test_loss_and_gradients_of_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)


def planner_of(spec: ModelSpec, parts: Partition, images_of_a_work: int) -> IterationPlanner:
    return IterationPlanner(Job(
        spec=spec, partition=parts, section=PLANNER, costs=FlopsCosts.of(PLANNER), schedule=CATALOGUE["interleave"],
        sub_microbatch_size=images_of_a_work, submesh=Submesh(), sharded=False,
    ))  # fmt: skip


def test_an_edge_costs_what_is_sent_over_it():
    """The bytes of messages in plans are those of the tensors that the runtime makes for them."""
    model, shape = deepstack(segments=(2, 2)), JobLayout.grid(pp=2)
    spec, parts = model_spec(model), cut(case(model), shape)
    assert carried(model, shape) == {"vision": [1, 2, 3], "language": [2, 0, 0]}
    planner = planner_of(spec, parts, images_of_a_work=1)
    _, meta = make_batch(model, IMAGES[0], seed=1)
    plan = planner.plan(meta)
    problem = plan.problem
    compared = 0
    for work, row in enumerate(problem.output_bytes):
        module = plan.layout.batching.module_of(work)
        for stage, num_bytes in zip(parts.of_module(module), row, strict=True):
            shape_sent = planner.job.output_shape(plan.layout, stage.index, work)
            assert num_bytes == 4 * np.prod(shape_sent) * bool(shape_sent), (stage, work)
            compared += bool(shape_sent)
    assert compared > 20


@pytest.mark.parametrize("frozen", [(), ("encoder",)], ids=["trainable", "frozen tower"])
def test_a_stage_holds_the_bytes_that_are_planned(frozen):
    """Of the second chunk of each module; also the input, which waits for its gradient, with all that it carries."""
    model, shape = deepstack(4, frozen=frozen), JobLayout.grid(pp=2)
    spec, parts = model_spec(model), cut(case(model), shape)
    planner = planner_of(spec, parts, images_of_a_work=0)
    _, meta = make_batch(model, [[2, 1]], seed=1)
    plan = planner.plan(meta)
    (counts,) = meta.microbatches
    labels = torch.full((counts.num_tokens,), IGNORE_INDEX)
    labels[: counts.num_targets] = 1
    arguments = {
        "vision": {"grids": tuple(image.grid for image in counts.images)},
        "language": {
            "attention": attention_context(language_bits(counts)), **head_arguments(labels),
            "position_ids": torch.from_numpy(token_positions(counts.documents, 3)),
        },
    }  # fmt: skip
    for work, module in enumerate(("vision", "language")):
        first, second = parts.of_module(module)
        chunk = build_chunk(model, spec, module, second.layers, device="cpu")
        init_weights(chunk, 0)
        grad = module == "language" or not frozen
        x = torch.randn(planner.job.output_shape(plan.layout, first.index, work), requires_grad=grad)
        kept = kept_bytes(chunk, x, arguments[module])
        (option,) = plan.problem.options(second.index, work)
        # Rotary tables and a scalar of the loss are not counted; frozen blocks keep no tables.
        tables = 2 * 4 * plan.layout.batching.sizes[work].rows * {"vision": 8, "language": 16}[module]
        assert 0 <= kept - option.activation_bytes <= tables + 4, module
