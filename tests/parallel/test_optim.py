import math
import re
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from mmtrain.config.optimizer import LRSchedulerConfig, OptimizerConfig, OptimizerGroup
from mmtrain.errors import ConfigError
from mmtrain.parallel.optim import LocalOptimizers, build_optimizers, check_groups, ema_part, lr_factor, set_lr
from mmtrain.parallel.titan import FrozenAwareOptimizers
from tests.ranks import run_ranks


def test_warm_up_peak_and_decay():
    section = LRSchedulerConfig(warmup_steps=4, decay_type="linear", decay_ratio=0.5, min_lr_factor=0.1)
    factors = [lr_factor(section, step, 14) for step in range(1, 15)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:9] == [1.0] * 5
    assert factors[9:] == pytest.approx([1 - 0.9 * k / 5 for k in range(1, 6)])


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.5), ("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_shapes_of_the_decay(kind, middle):
    section = LRSchedulerConfig(decay_type=kind)
    assert lr_factor(section, 5, 10) == pytest.approx(middle)
    assert lr_factor(section, 10, 10) == pytest.approx(0.0)


def test_no_decay_stays_at_the_peak():
    assert lr_factor(LRSchedulerConfig(decay_ratio=0.0), 10, 10) == 1.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.norm = nn.LayerNorm(4)


def decays(optimizers):
    names = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            names |= dict.fromkeys(group["param_names"], group["weight_decay"])
    return names


def test_matrices_decay_and_vectors_embeddings_and_tied_heads_do_not():
    model = Model()
    found = decays(build_optimizers(OptimizerConfig(weight_decay=0.5), [model], [model.head.weight]))
    assert {n for n, d in found.items() if d == 0.5} == {"linear.weight"}
    found = decays(build_optimizers(OptimizerConfig(weight_decay=0.5), [model], []))
    assert {n for n, d in found.items() if d == 0.5} == {"linear.weight", "head.weight"}
    assert len(found) == 6


def test_frozen_parts_and_ranks_without_trainable_parameters():
    model, frozen = Model(), Model()
    frozen.requires_grad_(False)
    model.embed.requires_grad_(False)
    optimizers = build_optimizers(OptimizerConfig(lr=0.5), [frozen, model], [])
    assert "embed.weight" not in decays(optimizers)
    set_lr(optimizers, 0.5)
    assert {g["lr"] for o in optimizers for g in o.param_groups} == {0.25}
    empty = build_optimizers(OptimizerConfig(), [frozen], [])
    assert list(empty) == []
    empty.step()
    empty.zero_grad()
    assert empty.state_dict() == {}


def test_one_step_is_torchs_adamw():
    torch.manual_seed(0)
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    optimizers = build_optimizers(OptimizerConfig(lr=0.1, weight_decay=0.3), [ours], [])
    plain = [p for n, p in theirs.named_parameters() if n not in ("linear.weight", "head.weight")]
    matrices = [theirs.linear.weight, theirs.head.weight]
    reference = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.3}],
        lr=0.1, betas=(0.9, 0.95),
    )  # fmt: skip
    for model in (ours, theirs):
        model.head(model.norm(model.linear(model.embed(torch.arange(5))))).square().sum().backward()
    optimizers.step()
    reference.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-7), name


def steps_of_both(rank, implementation):
    """(weights, state) after three steps of our container, and of torchtitan's on the same DTensors."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for step in (LocalOptimizers.step, FrozenAwareOptimizers.step):
        torch.manual_seed(0)
        model = Model()
        for module in model.children():
            for name, parameter in list(module.named_parameters(recurse=False)):
                divided = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(divided))
        optimizers = build_optimizers(OptimizerConfig(implementation=implementation), [model], [])
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = distribute_tensor(torch.randn(parameter.shape), mesh, [Shard(0)])
            step(optimizers)
            optimizers.zero_grad()
        state = optimizers.state_dict()
        kinds = {key: type(value) for key, value in state.items()}
        assert {DTensor} == {kind for key, kind in kinds.items() if "exp_avg" in key}
        values = [*model.parameters(), *(value for value in state.values() if isinstance(value, torch.Tensor))]
        found.append((kinds, [v.full_tensor() if isinstance(v, DTensor) else v for v in values]))
    (our_kinds, ours), (their_kinds, theirs) = found
    return our_kinds == their_kinds and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_steps_on_local_parts_are_those_on_dtensors_to_the_bit(implementation):
    assert run_ranks(steps_of_both, 2, implementation) == [True, True]


# ------------------------------------------------------------------------------------------------ groups


class Whole(nn.Module):
    """Parameters named as those of a job."""

    def __init__(self):
        super().__init__()
        self.vision = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4)]), "merger": nn.Linear(4, 4)})
        self.projector = nn.Linear(4, 4)
        self.language = Model()


GROUPS = [
    OptimizerGroup(module="language", pattern="embed", lr=0.01),
    OptimizerGroup(module="projector", lr=1.0, weight_decay=0.7),
    OptimizerGroup(module="vision", weight_decay=0.0),
]


def test_groups_have_rates_and_decays_of_their_own():
    model = Whole()
    section = OptimizerConfig(lr=0.1, weight_decay=0.5, groups=GROUPS)
    optimizers = build_optimizers(section, [model], [model.language.head.weight], TIED)
    set_lr(optimizers, 0.5)
    values = {
        name: (group["lr"], group["weight_decay"])
        for optimizer in optimizers for group in optimizer.param_groups for name in group["param_names"]
    }  # fmt: skip
    assert len(values) == len(list(model.parameters()))
    assert values["language.embed.weight"] == values["language.head.weight"] == (0.005, 0.0)
    assert values["language.linear.weight"] == (0.05, 0.5)
    assert values["language.linear.bias"] == values["language.norm.weight"] == (0.05, 0.0)
    assert values["projector.weight"] == values["vision.merger.weight"] == (0.5, 0.7), "its own merger is a projector"
    assert values["projector.bias"] == (0.5, 0.0), "vectors do not decay in any group"
    assert values["vision.blocks.0.weight"] == (0.05, 0.0)


def test_a_group_learns_as_a_job_with_its_values():
    torch.manual_seed(0)
    together, alone = Whole(), Whole()
    alone.load_state_dict(together.state_dict())
    groups = [OptimizerGroup(module="projector", lr=0.3, weight_decay=0.7)]
    jobs = [
        (together, build_optimizers(OptimizerConfig(lr=0.1, weight_decay=0.5, groups=groups), [together], [])),
        (alone, build_optimizers(OptimizerConfig(lr=0.3, weight_decay=0.7), [alone], [])),
    ]
    for model, optimizers in jobs:
        for _ in range(3):
            x = torch.ones(2, 4)
            (model.projector(x).pow(2).sum() + model.vision["blocks"][0](x).pow(2).sum()).backward()
            set_lr(optimizers, 0.9)
            optimizers.step()
            optimizers.zero_grad()
    assert torch.equal(together.projector.weight, alone.projector.weight)
    assert not torch.equal(together.vision["blocks"][0].weight, alone.vision["blocks"][0].weight)


TIED = {"language.head.weight": "language.embed.weight"}


def _check(device, groups, aliases):
    chunks = [Whole()] if torch.distributed.get_rank() == 0 else []
    try:
        check_groups(OptimizerConfig(groups=groups), chunks, aliases)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_group_without_parameters_on_any_rank_is_refused_on_all():
    wrong = OptimizerGroup(module="projector", pattern="fc1", lr=0.1)
    head = OptimizerGroup(pattern="head", lr=0.1)
    results = run_ranks(_check_all, 2, [(GROUPS, TIED), ([head], {}), ([*GROUPS, wrong], TIED), ([head], TIED)])
    for right, head_of_its_own, refused, tied_head in results:
        assert right == head_of_its_own == ""
        assert refused.startswith('optimizer.groups: the group with module = "projector" and pattern = "fc1" has no')
        assert tied_head.startswith('optimizer.groups: the group with pattern = "head" has no'), "it is the embedding"


def _check_all(device, cases):
    return [_check(device, *case) for case in cases]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lr": 0.1}, "neither module nor pattern"),
        ({"module": "vision"}, "sets neither lr nor weight_decay"),
        ({"pattern": "(", "lr": 0.1}, "is no regular expression"),
        ({"module": "vision", "lr": -0.1}, "lr = -0.1"),
    ],
)
def test_groups_that_say_nothing_are_refused(values, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        OptimizerGroup(**values)


# ------------------------------------------------------------------------------------------------ averages


def averaged_steps(moments_dtype="float32", divided=None):
    """Weights after each of five steps, and the averages after them."""
    torch.manual_seed(0)
    model = Model()
    if divided is not None:
        for module in model.children():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(
                    name, nn.Parameter(distribute_tensor(parameter.detach(), divided, [Shard(0)]))
                )
    section = OptimizerConfig(lr=0.1, ema_decay=0.3, moments_dtype=moments_dtype)
    optimizers = build_optimizers(section, [model], [])
    weights = []
    for step in range(1, 6):
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape)
            parameter.grad = grad if divided is None else distribute_tensor(grad, divided, [Shard(0)])
        optimizers.step()
        optimizers.average(step)
        optimizers.zero_grad()
        weights.append([whole(p) for p in model.parameters()])
    with optimizers.averaged():
        averages = [whole(p) for p in model.parameters()]
    assert all(torch.equal(whole(p), last) for p, last in zip(model.parameters(), weights[-1], strict=True))
    state = optimizers.state_dict()
    assert all(
        torch.equal(whole(state[f"state.{name}.ema"]), value)
        for (name, _), value in zip(model.named_parameters(), averages, strict=True)
    )
    return weights, averages


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def divided_averages(rank, moments_dtype):
    return averaged_steps(moments_dtype, init_device_mesh("cpu", (2,)))[1]


def test_the_part_that_stays_grows_to_the_decay():
    assert [ema_part(0.9, step) for step in (1, 2, 79)] == [2 / 11, 3 / 12, 80 / 89]
    assert ema_part(0.9, 81) == ema_part(0.9, 10**6) == 0.9


@pytest.mark.ranks
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_averages_are_those_of_a_plain_loop_on_any_shards(moments):
    weights, averages = averaged_steps(moments)
    for (first, *rest), average in zip(zip(*weights, strict=True), averages, strict=True):
        expected = first
        for step, value in enumerate(rest, 2):
            part = min(0.3, (1 + step) / (10 + step))
            expected = part * expected + (1 - part) * value
        assert torch.allclose(average, expected, rtol=0, atol=1e-6)  # measured 6e-8
    for found in run_ranks(divided_averages, 2, moments):
        assert all(torch.equal(a, b) for a, b in zip(found, averages, strict=True))


def test_a_job_without_averages_has_none_and_a_state_without_them_begins_at_the_weights():
    model = Model()
    without = build_optimizers(OptimizerConfig(), [model], [])
    without.average(1)
    with without.averaged():
        pass
    state = without.state_dict()
    assert not any("ema" in key for key in state)
    optimizers = build_optimizers(OptimizerConfig(ema_decay=0.5), [model], [])
    optimizers.load_state_dict(state)
    found = optimizers.state_dict()
    assert all(torch.equal(found[f"state.{name}.ema"], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_a_decay_is_from_0_to_below_1(value):
    with pytest.raises(ConfigError, match=f"optimizer.ema_decay = {value}"):
        OptimizerConfig(ema_decay=value)


# ------------------------------------------------------------------------------------------------ bfloat16 moments


def steps_with(moments_dtype, bucket, divided=None):
    """Parameters after three steps, the last one of a container that loaded the state of the first two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmtrain.parallel.optim._BUCKET", bucket)
        torch.manual_seed(0)
        model = Model()
        if divided is not None:
            for module in model.children():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    shards = distribute_tensor(parameter.detach(), divided, [Shard(0)])
                    module.register_parameter(name, nn.Parameter(shards))
        section = OptimizerConfig(lr=0.01, moments_dtype=moments_dtype)
        optimizers = build_optimizers(section, [model], [])
        for step in range(3):
            if step == 2:
                stored = {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizers.state_dict().items()}
                optimizers = build_optimizers(section, [model], [])
                optimizers.load_state_dict(stored)
            for parameter in model.parameters():
                grad = torch.randn(parameter.shape)
                parameter.grad = grad if divided is None else distribute_tensor(grad, divided, [Shard(0)])
            optimizers.step()
            optimizers.zero_grad()
        state = optimizers.state_dict()
        assert {str(v.dtype) for k, v in state.items() if "exp_avg" in k} == {f"torch.{moments_dtype}"}
        return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def divided_steps(rank, moments_dtype, bucket):
    return steps_with(moments_dtype, bucket, init_device_mesh("cpu", (2,)))


@pytest.mark.ranks
def test_bfloat16_moments_of_shards_are_those_of_one_process_to_the_bit():
    whole = steps_with("bfloat16", 1 << 24)
    for ours in (steps_with("bfloat16", 8), *run_ranks(divided_steps, 2, "bfloat16", 8)):
        assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True)), "no bucket or shard changes a value"


def test_bfloat16_moments_only_round():
    exact, rounded = steps_with("float32", 1 << 24), steps_with("bfloat16", 1 << 24)
    start = [p.detach() for p in (torch.manual_seed(0), Model())[1].parameters()]
    moved = torch.cat([(a - s).flatten() for a, s in zip(exact, start, strict=True)])
    off = torch.cat([(b - a).flatten() for a, b in zip(exact, rounded, strict=True)])
    assert 0 < off.norm() < 0.002 * moved.norm()  # measured 0.0006


def test_bfloat16_moments_refuse_decays_that_they_cannot_resolve():
    with pytest.raises(ConfigError, match=r"optimizer.beta2 = 0.999, but .* set beta2 to at most 0.99, or"):
        OptimizerConfig(beta2=0.999, moments_dtype="bfloat16")


def test_a_warm_up_may_be_a_part_of_all_steps():
    ratio, steps = LRSchedulerConfig(warmup_ratio=0.25), LRSchedulerConfig(warmup_steps=5)
    assert [lr_factor(ratio, step, 20) for step in range(1, 21)] == [
        lr_factor(steps, step, 20) for step in range(1, 21)
    ]


@pytest.mark.parametrize("section", [LRSchedulerConfig(), LRSchedulerConfig(warmup_ratio=0.25)])
def test_the_rate_of_a_job_of_epochs_follows_its_samples(section):
    """Of 40 samples in steps of different size: as of a job of 40 steps of one sample."""
    done = 0
    for step, size in enumerate((7, 9, 3, 11, 8, 2), 1):
        done += size
        assert lr_factor(section, step, step * 40 / done) == pytest.approx(lr_factor(section, done, 40), abs=1e-12)
    assert lr_factor(section, 6, 6 * 40 / done) == pytest.approx(0, abs=1e-12)


def test_a_warm_up_in_steps_of_a_job_of_epochs_ends_with_the_decay_at_zero():
    section = LRSchedulerConfig(warmup_steps=2)
    factors = [
        lr_factor(section, step, step * 40 / done) for step, done in ((1, 7), (2, 16), (3, 19), (4, 30), (5, 40))
    ]
    assert factors[:2] == [0.5, 1.0] and factors[-1] == pytest.approx(0)
    assert all(a > b for a, b in pairwise(factors[1:]))
