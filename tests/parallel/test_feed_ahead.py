"""Inputs of coming forwards: in which order they are copied, how many wait, and that nobody holds them for too long."""

import gc
import weakref

import pytest
import torch

from mmtrain.parallel import feed_ahead
from mmtrain.parallel.feed_ahead import FeedAhead, Uploads
from mmtrain.parallel.offload import copies_to

CPU = torch.device("cpu")
FORWARDS = [(stage, work) for work in range(4) for stage in (0, 1)]


class Recorded:
    """Stands for a stream: copies are made when somebody waits for them, and not before."""

    least_bytes = 1

    def __init__(self):
        self.log, self.under_way = [], {}

    def buffer(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, copies):
        number = len(self.under_way)
        self.under_way[number] = list(copies)
        self.log.append(("start", number))
        return number

    def wait(self, started):
        for number in range(started + 1):  # one stream: those before are done, too
            for to, source in self.under_way[number]:
                to.copy_(source)
            self.under_way[number] = []
        self.log.append(("wait", started))


class Inputs:
    """A feed of ten numbers for each forward, and a table that works have in common."""

    def __init__(self, uploads):
        self.uploads, self.made, self.tables = uploads, [], {}

    def __call__(self, stage, work):
        self.made.append((stage, work))
        if work not in self.tables:
            self.tables[work] = self.uploads.add(torch.full((1,), -1 - work))
        return (self.uploads.add(torch.full((10,), float(10 * stage + work))),), {"table": self.tables[work]}


def check_values(arguments, stage, work):
    (x,), kwargs = arguments
    assert x.tolist() == [10 * stage + work] * 10 and kwargs["table"].tolist() == [-1 - work]


def test_a_forward_waits_for_its_own_copies_while_later_ones_are_under_way():
    copies = Recorded()
    inputs = Inputs(uploads := Uploads(CPU, copies))
    ahead = FeedAhead(inputs, uploads, FORWARDS, most_bytes=1e6)
    for index, forward in enumerate(FORWARDS):
        check_values(ahead(*forward), *forward)
        assert inputs.made == FORWARDS[: 1 + 2 * (index + 1)], "two more of them, in the order of the program"
        assert [number for what, number in copies.log if what == "wait"] == list(range(index + 1))
        assert ahead.num_bytes == sum(40 if stage else 48 for stage, _ in FORWARDS[index + 1 : 1 + 2 * (index + 1)])
    assert ahead.num_bytes == 0


@pytest.mark.parametrize("most", [0.0, 1.0, 100.0])
def test_no_more_bytes_wait_than_allowed_and_one_forwards_inputs(most):
    inputs = Inputs(uploads := Uploads(CPU, Recorded()))
    ahead = FeedAhead(inputs, uploads, FORWARDS, most_bytes=most)
    waiting = []
    for forward in FORWARDS:
        check_values(ahead(*forward), *forward)
        waiting.append(ahead.num_bytes)
    assert inputs.made == FORWARDS
    assert max(waiting) < most + 48 and (max(waiting) > 0) == (most > 0)


def test_inputs_are_free_when_their_forward_drops_them(monkeypatch):
    sources = []

    def pinned(x, device):
        sources.append(weakref.ref(copy := x.clone()))
        return copy

    monkeypatch.setattr(feed_ahead, "pinned", pinned)
    copies = Recorded()
    uploads = Uploads(CPU, copies)
    ahead = FeedAhead(lambda stage, work: ((uploads.add(torch.ones(10)),), {}), uploads, FORWARDS, most_bytes=1e6)
    for index, forward in enumerate(FORWARDS):
        (x,), _ = ahead(*forward)
        alive = weakref.ref(x)
        del x
        gc.collect()
        assert alive() is None, "nobody but the forward holds its inputs"
        assert sources[index]() is None, "nor host memory, once it is copied"
    assert all(source() is None for source in sources)


def test_a_step_that_fails_leaves_no_copy_under_way():
    copies = Recorded()
    uploads = Uploads(CPU, copies)
    ahead = FeedAhead(Inputs(uploads), uploads, FORWARDS, most_bytes=1e6)
    ahead(*FORWARDS[0])
    ahead.close()
    assert sorted(number for what, number in copies.log if what == "wait") == [0, 1, 2]
    assert ahead.num_bytes == 0


def test_copies_of_a_feed_that_failed_are_not_those_of_the_next_step():
    uploads = Uploads(CPU, copies := Recorded())

    def fails(stage, work):
        uploads.add(torch.ones(10))
        raise ValueError

    ahead = FeedAhead(fails, uploads, FORWARDS, most_bytes=0)
    with pytest.raises(ValueError):
        ahead(*FORWARDS[0])
    ahead.close()
    assert uploads.start() == (0, None) and not copies.log


def test_an_order_that_the_program_has_not_is_refused():
    uploads = Uploads(CPU, Recorded())
    ahead = FeedAhead(Inputs(uploads), uploads, FORWARDS, most_bytes=1e6)
    ahead(*FORWARDS[0])
    with pytest.raises(KeyError):
        ahead(3, 3)


def test_a_cpu_reads_the_values_themselves():
    assert copies_to(CPU) is None
    uploads = Uploads(CPU, copies_to(CPU))
    x = torch.ones(3)
    assert uploads.add(x) is x
    assert uploads.start() == (0, None)
    uploads.wait(None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_copies_on_a_stream_of_their_own_have_the_values():
    device = torch.device("cuda")
    inputs = Inputs(uploads := Uploads(device, copies_to(device)))
    ahead = FeedAhead(inputs, uploads, FORWARDS, most_bytes=1e6)
    busy = torch.ones(2048, 2048, device=device)
    for forward in FORWARDS:
        busy = busy @ busy / 2048
        arguments = ahead(*forward)
        assert arguments[0][0].device.type == "cuda"
        check_values(arguments, *forward)
