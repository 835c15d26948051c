"""Passes of a block take turns at exchanges alone: in one order, whatever takes how long."""

import time

import pytest
import torch
import torch.distributed as dist

from mmtrain.parallel import passes

CPU = torch.device("cpu")


class Exchange(dist.Work):
    """An exchange that writes down when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__()
        self._log, self._name = log, name
        log.append(f"start {name}")

    def wait(self, timeout=None) -> bool:
        self._log.append(f"wait {self._name}")
        return True


class Owner:
    """Something with a state of its own in each pass."""

    pass_state = "outside"


def units(log: list[str], name: str, count: int, *, scatters: bool = False, seconds: float = 0.0):
    def run() -> None:
        for unit in range(count):
            time.sleep(seconds)
            log.append(f"{name}{unit}")
            passes.exchange(Exchange(log, f"{name}{unit}"), scatters=scatters)

    return run


def test_each_exchange_lies_under_a_unit_of_the_other_pass():
    log: list[str] = []
    passes.Block(CPU).run(units(log, "a", 2), units(log, "b", 3), [])
    assert log == [
        "a0", "start a0", "b0", "start b0", "wait a0", "a1", "start a1", "wait b0", "b1", "start b1", "wait a1",
        "wait b1", "b2", "start b2", "wait b2",
    ]  # fmt: skip


@pytest.mark.parametrize(("first_s", "second_s"), [(0.002, 0.0), (0.0, 0.002)])
def test_the_order_does_not_depend_on_how_long_units_take(first_s, second_s):
    logs: list[list[str]] = [[], []]
    block = passes.Block(CPU)
    block.run(units(logs[0], "a", 4), units(logs[0], "b", 3), [])
    block.run(units(logs[1], "a", 4, seconds=first_s), units(logs[1], "b", 3, seconds=second_s), [])
    assert logs[0] == logs[1]


def test_weight_gradients_are_made_between_start_and_wait():
    log: list[str] = []

    def second() -> None:
        with passes.filled(lambda scatters: log.append(f"fill {scatters}")):
            units(log, "b", 1, scatters=True)()

    passes.Block(CPU).run(units(log, "a", 1), second, [])
    assert log == ["a0", "start a0", "b0", "start b0", "wait a0", "fill True", "wait b0"]
    log.clear()
    second()  # by itself
    assert log == ["b0", "start b0", "fill True", "wait b0"]


def test_a_pause_gives_way_to_the_first_of_two_exchanges_alone():
    """Of rows that ranks divide: scatter, norm, gather. The unit of the other pass is cut in two, and covers both."""
    log: list[str] = []

    def half_layers() -> None:
        for unit in range(2):
            log.append("attention")
            passes.pause()
            log.append("output")
            passes.exchange(Exchange(log, f"scatter{unit}"), scatters=True)
            log.append("norm")
            passes.exchange(Exchange(log, f"gather{unit}"))

    def other() -> None:
        for _ in range(3):
            log.append("b, first half")
            passes.pause()
            log.append("b, second half")
            passes.exchange(Exchange(log, "b"))

    passes.Block(CPU).run(half_layers, other, [])
    first = log.index("start scatter0")
    assert log[first : log.index("wait gather0") + 1] == [
        "start scatter0", "b, first half", "wait scatter0", "norm", "start gather0", "b, second half", "start b",
        "wait gather0",
    ]  # fmt: skip


def test_each_pass_has_its_own_state():
    owner, seen = Owner(), {}

    def run(name: str):
        def compute() -> None:
            before, owner.pass_state = owner.pass_state, name
            for _ in range(3):
                passes.exchange(Exchange([], name))
                seen.setdefault(name, set()).add(owner.pass_state)
            owner.pass_state = before

        return compute

    passes.Block(CPU).run(run("a"), run("b"), [owner])
    assert seen == {"a": {"a"}, "b": {"b"}}
    assert owner.pass_state == "outside"


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_the_error_of_one_pass_ends_the_other_and_is_raised(failing, at):
    log: list[str] = []
    block = passes.Block(CPU)

    def fail() -> None:
        units(log, "failing", at)()
        raise ValueError("this one")

    computes = [units(log, "other", 6)] * 2
    computes[failing] = fail
    with pytest.raises(ValueError, match="this one"):
        block.run(*computes, [])
    assert "wait other5" not in log
    log.clear()
    block.run(units(log, "a", 1), units(log, "b", 1), [])  # the next one is not affected
    assert log[-1] == "wait b0"


def test_a_backward_takes_turns_with_a_forward():
    """Autograd's own thread included: its nodes yield in the middle of a backward."""
    log: list[str] = []

    class Unit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            log.append("b")
            passes.exchange(Exchange(log, "b"))
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    y = Unit.apply(Unit.apply(x)).sum()
    passes.Block(CPU).run(units(log, "a", 2), y.backward, [])
    assert torch.equal(x.grad, torch.full((2,), 4.0))
    assert [entry for entry in log if not entry.startswith(("start", "wait"))] == ["a0", "b", "a1", "b"]
