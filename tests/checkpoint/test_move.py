"""The state of a job moves between layouts of real ranks: bit for bit, without copies of what a rank has."""

import datetime
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmtrain.checkpoint.copy_plan import Shard
from mmtrain.checkpoint.move import HeldShards, Moved, move
from mmtrain.checkpoint.shard_tables import gather_tables, parse_table
from mmtrain.checkpoint.state import NamedTensors
from mmtrain.checkpoint.tensor_boxes import shard_of
from mmtrain.config import config
from mmtrain.config.config import each_pipeline
from mmtrain.errors import NoHolderError, TrainingError
from mmtrain.parallel.fill import LocalPart, first_rows
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.local_model import LocalModel, build_local_model
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.optim import build_optimizers
from mmtrain.parallel.torch_private import _param_groups, end_groups, fsdp_modules, raw_part
from mmtrain.simulator.make_job import make_job
from tests.jobs import SHALLOW, layout, world_size, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

WORLD = 5
FIXED = [*SHALLOW, "model.encoder.config.depth=1", "training.global_batch_size=5"]
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A change of layout, on the first ranks of the old and of the new one."""

    before: list[str]
    after: list[str]
    options: list[str] = []  # noqa: RUF012  never changed
    lost: tuple[int, ...] = ()
    """Ranks whose state is lost; they are in the new layout as newcomers, or outside of it."""
    steps: int = 2
    order: tuple[int, ...] = tuple(range(WORLD))
    """[rank of the new layout] -> rank of the members."""


def pipelines(*depths: int) -> list[str]:
    return [f"parallelism.pipelines={list(depths)}"]


AVERAGES = "optimizer.ema_decay=0.9"
UNTIED = "model.language.config.tie_word_embeddings=false"
DIVIDED = "parallelism.vocabulary_parallel=pipeline"
CASES = {
    "a pipeline loses a rank": Case(pipelines(2, 3), pipelines(1, 3), lost=(4,)),
    "a newcomer, and another order": Case(
        pipelines(2, 2), pipelines(2, 3), [AVERAGES], lost=(1,), order=(4, 0, 1, 3, 2)
    ),
    "uneven shards": Case(layout(shard=2, replicate=2), layout(shard=3), [UNTIED], lost=(0,)),
    "gathered at each use": Case(
        layout(cp=2), layout(pp=2, cp=2), ["parallelism.fsdp_reshard_after_forward=always"], order=(1, 0, 2, 4, 3)
    ),
    "strided shards": Case(layout(shard=2, tp=2), layout(pp=2, tp=2), ["model.language.trainable=lora", AVERAGES]),
    "whole encoders": Case(
        layout(pp=2, tp=2), layout(shard=2, tp=2), ["parallelism.encoder_tensor_parallel=data", "optimizer.beta2=0.9"]
    ),
    "two copies on one rank": Case(
        layout(pp=2), layout(), ["model.language.num_segments=2", "model.encoder.trainable=false", AVERAGES]
    ),
    "low precision, offloaded": Case(
        layout(pp=1),
        layout(pp=2, shard=2),
        [
            "optimizer.moments_dtype=bfloat16",
            "optimizer.beta2=0.9",
            "training.enable_cpu_offload=true",
            "training.mixed_precision_param=bfloat16",
            AVERAGES,
        ],
    ),
    "rows of 2 ranks become those of 3": Case(
        [*layout(pp=2), DIVIDED], [*layout(pp=3), DIVIDED], order=(1, 2, 0, 3, 4)
    ),
    "rows become whole": Case([*layout(pp=2, shard=2), DIVIDED], layout(pp=2), [UNTIED]),
    "whole ones are divided, by tp too": Case(layout(pp=2, replicate=2), [*layout(pp=2, tp=2), DIVIDED]),
    "rows that tp or FSDP2 divides": Case([*layout(pp=2, tp=2), DIVIDED], [*layout(pp=2, shard=2), DIVIDED], [UNTIED]),
    "a rank with rows is lost": Case([*layout(pp=2, replicate=2), DIVIDED], [*layout(pp=3), DIVIDED], lost=(3,)),
    "from uneven shards, before the first step": Case(layout(shard=5), layout(pp=2, shard=2), steps=0),
}


def new_world(folder: Path, name: str, ranks: list[int], rank: int) -> None:
    """Leaves the default process group; some ranks join another one."""
    if dist.is_initialized():
        end_groups([dist.group.WORLD])
    if rank in ranks:
        store = dist.FileStore(str(folder / name), len(ranks))
        dist.init_process_group("gloo", store=store, rank=ranks.index(rank), world_size=len(ranks))


class Placed:
    """The model and moments of one rank."""

    def __init__(self, job: config.Config, local: LocalPart | None = None) -> None:
        mesh = build_mesh(
            job.parallelism.layout,
            CPU,
            data_encoder=job.data_encoder,
            whole_rows=job.parallelism.tensor_parallel_rows == "whole",
        )
        made = each_pipeline(job, make_job)[mesh.place.pipeline]
        self.model: LocalModel = build_local_model(
            job.model, made.spec, made.partition, mesh, job.training, seed=1, regathered=job.regathered, local=local
        )
        self.optimizers = build_optimizers(job.optimizer, self.model.chunks, self.model.tied, self.model.aliases)
        if local is not None:
            self.optimizers.fill(local, self.model.aliases, first_rows(self.model.chunks))
        self.named = NamedTensors(self.model.chunks, self.optimizers, self.model.aliases)
        self.steps = 0

    def step(self) -> None:
        """An update by gradients that depend only on the box."""
        first = first_rows(self.model.chunks)
        for chunk in self.model.chunks:
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    stored = self.model.aliases.get(name, name)
                    shard = shard_of(stored, parameter, torch.float32, first.get(name, 0))
                    parameter.grad = torch.empty_like(parameter)
                    source = torch.Generator().manual_seed(zlib.crc32(repr(shard).encode()))
                    local_part(parameter.grad).normal_(generator=source)
        self.optimizers.step()
        self.optimizers.average(self.steps + 1)
        self.optimizers.zero_grad()
        self.steps += 1

    def whole(self) -> dict[str, Tensor]:
        """Name -> the whole tensor, of all that a checkpoint has. Collective over the job."""
        copies: dict[str, Tensor] = {}
        first: dict[str, int] = {}
        for name, tensor in self.named.tensors():
            value = tensor.detach()
            value = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
            assert name not in copies or torch.equal(copies[name], value), f"copies of {name} differ"
            copies[name], first[name] = value, self.named.first_row(name, tensor)
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, {name: (first[name], value) for name, value in copies.items()})
        for name in copies:
            parts = dict(of_rank[name] for of_rank in held if name in of_rank)  # those of replicas are equal
            copies[name] = torch.cat([parts[row] for row in sorted(parts)]) if len(parts) > 1 else copies[name]
        return copies

    def boxes(self) -> Iterator[tuple[Shard, Tensor]]:
        """This rank's part of each tensor, copies included, and where it is in the stored one."""
        for name, tensor in self.named.tensors():
            yield shard_of(name, tensor, tensor.dtype, self.named.first_row(name, tensor)), raw_part(tensor)

    def gathered(self) -> Iterator[tuple[str, slice, Tensor]]:
        """(name, its rows, value) of the parameters as FSDP2 gathers them for a forward, and over tp. Collective."""
        first = first_rows(self.model.chunks)
        for chunk in self.model.chunks:
            parts = fsdp_modules(chunk)
            for part in parts:
                part.unshard()
            for name, value in chunk.named_parameters():
                full = value.full_tensor() if hasattr(value, "full_tensor") else value
                rows = slice(first[name], first[name] + len(full)) if name in first else slice(None)
                yield f"model.{self.model.aliases.get(name, name)}", rows, full.detach()
            for part in parts:
                part.reshard()


def storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of the memory behind tensors."""
    parts = [local_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return {part.data_ptr(): part.nbytes() for part in parts if part.nbytes()}


def changed(rank: int, folder: Path, case: Case) -> tuple[Moved, int]:
    """One change of layout; what this rank moved, and the bytes of the state that it lacked."""
    before = config.load(folder / "job.toml", [*FIXED, *case.before, *case.options])
    after = config.load(folder / "job.toml", [*FIXED, *case.after, *case.options])
    old_ranks = list(range(before.parallelism.layout.world_size))
    new_ranks = list(case.order[: after.parallelism.layout.world_size])
    new_world(folder, "before", old_ranks, rank)
    held = HeldShards.empty()
    if rank in old_ranks:
        placed = Placed(before)
        for _ in range(case.steps):
            placed.step()
        save_file(placed.whole(), folder / f"{rank}.safetensors")
        dist.barrier()
    new_world(folder, "after", new_ranks, rank)
    if rank in old_ranks and rank not in case.lost:
        held = HeldShards.of(placed.named)  # needs no process group
    untouched = {shard: tensor.clone() for shard, tensor in held.shards.items()}
    old = storages(held.shards.values())
    placed = Placed(after, held.lend()) if rank in new_ranks else None  # type: ignore[assignment]
    members = dist.ProcessGroupGloo(
        dist.FileStore(str(folder / "members"), WORLD), rank, WORLD, datetime.timedelta(seconds=60)
    )
    moved = move(held, placed.named if placed else None, members, message_bytes=5000)
    lacked = 0
    if placed:
        lacked = check_placed(folder, placed, held, case)
        check_memory(placed, old, held)
    assert all(torch.equal(tensor, untouched[shard]) for shard, tensor in held.shards.items())
    if placed:
        placed.step()
        dist.barrier()
    return moved, lacked


def check_placed(folder: Path, placed: Placed, held: HeldShards, case: Case) -> int:
    """The state is that of the old layout, bit for bit; the bytes of it that this rank did not have, each once."""
    old: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        old |= load_file(file)
    new = list(placed.boxes())
    assert new and any(shard.name.startswith("optimizer.") for shard, _ in new) == bool(case.steps)
    assert any(shard.name.endswith(".ema") for shard, _ in new) == (AVERAGES in case.options)
    assert [shard for shard, part in new if not torch.equal(part, old[shard.name][box(shard)])] == []
    for name, rows, value in placed.gathered():
        assert torch.equal(value, old[name][rows].to(value.dtype)), name
    lacked = 0
    for shard in {shard for shard, _ in new}:
        have = torch.zeros(old[shard.name].shape, dtype=torch.bool)
        for other in held.shards:
            if other.name == shard.name:
                have[box(other)] = True
        lacked += int((~have[box(shard)]).sum()) * old[shard.name].element_size()
    return lacked


def box(shard: Shard) -> tuple[slice, ...]:
    return tuple(slice(first, first + n) for first, n in zip(shard.offsets, shard.lengths, strict=True))


def check_memory(placed: Placed, old: dict[int, int], held: HeldShards) -> None:
    """What a rank had in the same box is in the same memory, once; the rest is new memory of its size."""
    tensors = {part.data_ptr(): (shard, part) for shard, part in placed.boxes()}
    lent: set[Shard] = set()
    fresh = 0
    for shard, part in tensors.values():
        # FSDP2 copies the smaller shards of an uneven division into memory of the size of the others.
        padded = part.untyped_storage().nbytes() > shard.num_bytes or not shard.elements
        if shard not in held.shards or shard in lent or (padded and shard.name.startswith("model.")):
            fresh += part.untyped_storage().nbytes()
            assert padded or part.untyped_storage().nbytes() == shard.num_bytes
        else:
            assert part.data_ptr() == held.shards[shard].data_ptr(), shard.name
        lent.add(shard)
    parameters = [raw_part(p) for chunk in placed.model.chunks for p in chunk.parameters()]
    moments = [raw_part(t) for optimizer in placed.optimizers for v in optimizer.state.values() for t in v.values()]
    own = [part.data_ptr() for part in (*parameters, *moments) if part.numel()]
    assert len(own) == len(set(own)), "two tensors share memory"
    both = storages(part for _, part in tensors.values()) | old
    assert sum(both.values()) <= sum(old.values()) + fresh


DAILY = (
    "a newcomer, and another order", "gathered at each use", "strided shards", "two copies on one rank",
    "low precision, offloaded", "rows that tp or FSDP2 divides", "a rank with rows is lost",
)  # fmt: skip


def all_cases(rank: int, folder: Path, names: list[str]) -> list[tuple[Moved, int]]:
    found = []
    for number, name in enumerate(names):
        found.append(changed(rank, folder / str(number), CASES[name]))
    new_world(folder, "end", list(range(WORLD)), rank)
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([*DAILY], id="daily"),
        pytest.param([name for name in CASES if name not in DAILY], id="others", marks=pytest.mark.nightly),
    ],
)
def test_all_layouts_get_the_state_bit_for_bit_and_only_what_they_lack_travels(
    tmp_path: Path, names: list[str]
) -> None:
    for number, _ in enumerate(names):
        write_config(tmp_path / str(number), tmp_path / "nowhere")
    ranks = run_ranks(all_cases, WORLD, tmp_path, names)
    for number, name in enumerate(names):
        moved = [found[number] for found in ranks]
        assert [m.received for m, _ in moved] == [lacked for _, lacked in moved], name
        assert {m.total for m, _ in moved} == {sum(m.sent for m, _ in moved)} == {sum(m.received for m, _ in moved)}
        assert moved[0][0].total > 0


# ------------------------------------------------------------------------------------------ broken steps


def broken(rank: int, path: Path, overrides: list[str], function: str, calls: int) -> bool:
    """One whole step, and one that fails on all ranks in a call of a function of FSDP2.

    Returns: whether parameters were gathered, or about to be, when the step had failed.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from mmtrain.training.trainer import Trainer

    trainer = Trainer(config.load(path, [*SHALLOW, *overrides]))
    trainer.set_up(CPU)
    batches = [next(trainer.items) for _ in range(2)]
    trainer.train_step(1, batches[0], trainer.plan(batches[0].meta, step=1))
    before = {shard: tensor.clone() for shard, tensor in HeldShards.of(trainer.named()).shards.items()}
    assert {shard.name.rpartition(".")[2] for shard in before} >= {"weight", "exp_avg", "exp_avg_sq", "step"}
    called, original = [0], getattr(_fsdp_param_group, function)

    def failing(*args: Any, **kwargs: Any) -> Any:
        called[0] += 1
        if called[0] == calls:
            raise RuntimeError("a rank was lost")
        return original(*args, **kwargs)

    plan = trainer.plan(batches[1].meta, step=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fsdp_param_group, function, failing)
        with pytest.raises(RuntimeError, match="a rank was lost"):
            trainer.train_step(2, batches[1], plan)
    groups = [g for c in trainer.model.chunks for part in fsdp_modules(c) for g in _param_groups(part)]
    middle = any(group.is_unsharded or group._all_gather_result is not None for group in groups)
    dist.destroy_process_group()
    held = HeldShards.of(trainer.named()).shards
    assert held.keys() == before.keys()
    assert all(torch.equal(tensor, before[shard]) for shard, tensor in held.items())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which `run_ranks` ends
    return middle


@pytest.mark.parametrize(
    ("overrides", "function", "calls"),
    [
        pytest.param([*layout(shard=3)], "foreach_all_gather", 4, id="in a gather"),
        pytest.param([*layout(shard=3)], "foreach_reduce", 3, id="in a reduction"),
        pytest.param(
            [*layout(cp=2), "parallelism.fsdp_reshard_after_forward=always"], "foreach_all_gather", 5, id="regathered"
        ),
    ],
)
def test_of_a_broken_step_the_state_before_it_is_held(
    tmp_path: Path, charts: Path, overrides: list[str], function: str, calls: int
) -> None:
    path = write_config(tmp_path, charts)
    assert all(run_ranks(broken, world_size(overrides[:5]), path, overrides, function, calls))


# ------------------------------------------------------------------------------------------ broken moves


def interrupted(rank: int, folder: Path) -> tuple[Moved, int]:
    """A rank is lost when all have told what they hold; the others move to another layout instead."""
    path = folder / "job.toml"
    case = Case(pipelines(1, 2), layout(pp=2))
    before, never, after = (config.load(path, [*FIXED, *d]) for d in (case.before, pipelines(2, 1), case.after))
    placed = Placed(before)
    placed.step()
    save_file(placed.whole(), folder / f"{rank}.safetensors")
    dist.barrier()
    new_world(folder, "never", [0, 1, 2], rank)
    held = HeldShards.of(placed.named)
    placed = Placed(never, held.lend())
    store, patience = dist.FileStore(str(folder / "three"), 3), datetime.timedelta(seconds=10)
    members = dist.ProcessGroupGloo(store, rank, 3, patience)
    if rank == 2:
        gather_tables(held.shards, [shard_of(n, t, t.dtype) for n, t in placed.named.tensors()], members)
        del members  # its connections end
    else:
        with suppress(RuntimeError):  # who needs nothing from the lost rank does not see it
            assert move(held, placed.named, members, message_bytes=5000).total > 0 and rank == 0
    new_world(folder, "after", [0, 1], rank)
    if rank == 2:
        new_world(folder, "end", [2], rank)
        return Moved(sent=0, received=0, total=0), 0
    placed = Placed(after, held.lend())
    members = dist.ProcessGroupGloo(dist.FileStore(str(folder / "two"), 2), rank, 2, patience)
    moved = move(held, placed.named, members)
    return moved, check_placed(folder, placed, held, case)


def test_a_broken_move_is_tried_again_to_another_layout(tmp_path: Path) -> None:
    write_config(tmp_path, tmp_path / "nowhere")
    (zero, none), (one, lacked), _ = run_ranks(interrupted, 3, tmp_path)
    assert none == 0 and zero.sent == one.received == lacked > 0


# ------------------------------------------------------------------------------------------ what cannot be moved


def lost(rank: int, path: Path) -> list[str]:
    """A move of which the first stage's only holder is gone; then one of a table that cannot be read."""
    job = config.load(path, [*FIXED, *layout(pp=2)])
    placed = Placed(job)
    placed.step()
    held = HeldShards.empty() if rank == 0 else HeldShards.of(placed.named)
    before = {shard: tensor.clone() for shard, tensor in HeldShards.of(placed.named).shards.items()}
    with pytest.raises(NoHolderError) as caught:
        move(held, placed.named, dist.group.WORLD)
    assert all(torch.equal(t, before[s]) for s, t in HeldShards.of(placed.named).shards.items())
    assert all(name in {shard.name for shard in before} for name in caught.value.names) or rank == 1
    return [str(caught.value), *caught.value.names]


def test_a_state_without_a_holder_is_refused_on_all_ranks_before_anything_is_sent(tmp_path: Path) -> None:
    one, other = run_ranks(lost, 2, write_config(tmp_path, tmp_path / "nowhere"))
    message, *names = one
    assert one == other and len(names) > 30
    assert message.startswith("move: no rank holds all of model.") and f"and {len(names) - 3} more" in message
    assert not any("language.model.embed_tokens" in name for name in names)  # the head has a copy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[]", "keys held and wanted"),
        (b'{"held": [], "wanted": [], "more": 1}', "keys held and wanted"),
        (b'{"held": {}, "wanted": []}', "come in a list"),
        (b'{"held": [["x", [0], [1, 2], "float32"]], "wanted": []}', "a shard is"),
        (b'{"held": [["x", [0], [true], "float32"]], "wanted": []}', "a shard is"),
        (b'{"held": [["x", [-1], [2], "float32"]], "wanted": []}', "a shard is"),
        (b'{"held": [["x", [0], [2], "object"]], "wanted": []}', "a shard is"),
        (b'{"held": [[1, [0], [2], "float32"]], "wanted": []}', "a shard is"),
        (b"\xff", "cannot be read"),
    ],
)
def test_a_table_that_is_none_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(TrainingError, match="rank 3 sent a table of shards that cannot be read") as caught:
        parse_table(text, 3)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_is_read_as_it_was_sent() -> None:
    shard = Shard("model.x", (3, 0), (2, 5), "bfloat16")
    assert parse_table(b'{"held":[["model.x",[3,0],[2,5],"bfloat16"]],"wanted":[]}', 0) == ((shard,), ())
