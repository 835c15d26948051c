"""Ranks that share the patches of images, or have no image, against one rank with all of them."""

import threading

import pytest
import torch

from mmtrain.errors import DataError
from mmtrain.spec.rows import part_of
from tests.models.attention.masks import Given
from tests.models.test_chunk import TOLERANCE, assert_equal_gradients, build, grads, vision_inputs


class Exchange:
    """Keys and values of all parts, which run in threads and wait for each other at every block."""

    def __init__(self, parts):
        self.parts, self.held = parts, [None] * len(parts)
        self.barrier = threading.Barrier(len(parts), timeout=20)

    def gather(self, index):
        given = Given()

        def start(key, value):
            lo, hi = self.parts[index]
            self.held[index] = key[:, :, : hi - lo], value[:, :, : hi - lo]
            self.barrier.wait()
            both = tuple(torch.cat(all_of, dim=2) for all_of in zip(*self.held, strict=True))
            self.barrier.wait()
            return lambda: both

        given.start = start
        return given


def run_parts(chunks, pixels, grids, parts):
    """The output of each part, in one graph."""
    exchange, outputs = Exchange(parts), [None] * len(parts)

    def run(index):
        lo, hi = parts[index]
        x = pixels[torch.from_numpy(chunks[0].shape.row_order(grids)[lo:hi])]
        for chunk in chunks:
            x = chunk(x, grids=grids, part=(lo, hi), gather=exchange.gather(index))
            assert bool(len(x)) == (lo < hi)
        outputs[index] = x

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("cuts", [(), (1, 3, 4)], ids=str)
@pytest.mark.parametrize(
    ("encoder", "projector"),
    [
        ("qwen2_vl", {}),
        ("qwen2_5_vl", {"kind": "native"}),
        ("qwen2_5_vl", {}),
        ("qwen2_5_vl", {"spatial_merge": 1}),
        ("qwen3_vl", {"kind": "native"}),
    ],
)
def test_parts_together_are_the_whole(tiny, encoder, projector, cuts, num_parts):
    """The largest error of a gradient was 7e-7."""
    model = tiny.model(encoder, projector=projector)
    pixels, grids = vision_inputs(model)
    chunks = build(model, "vision", cuts)
    x = pixels
    for chunk in chunks:
        x = chunk(x, grids=grids)
    weight = torch.randn_like(x)
    (x * weight).sum().backward()
    expected, expected_grads = x.detach(), {n: g.clone() for n, g in grads(*chunks).items()}
    for chunk in chunks:
        chunk.zero_grad()

    unit = chunks[0].shape.patches_per_token
    parts = [tuple(unit * edge for edge in part_of(len(pixels) // unit, i, num_parts)) for i in range(num_parts)]
    outputs = run_parts(chunks, pixels, grids, parts)
    assert [len(y) for y in outputs] == [(hi - lo) // unit for lo, hi in parts]
    order = torch.from_numpy(chunks[0].shape.feature_order(grids))
    together = torch.cat(outputs)
    torch.testing.assert_close(together, expected[order], rtol=0, atol=TOLERANCE * expected.abs().max().item())
    (together * weight[order]).sum().backward()
    assert_equal_gradients(grads(*chunks), expected_grads)


@pytest.mark.parametrize("cuts", [(), (1, 3, 4)], ids=str)
@pytest.mark.parametrize("encoder", ["qwen2_vl", "qwen2_5_vl"])
def test_more_ranks_than_tokens_leave_empty_parts(tiny, encoder, cuts):
    """A part without rows takes part in every exchange, and changes nothing."""
    model = tiny.model(encoder)
    grids = ((1, 2, 4),)
    pixels = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    chunks = build(model, "vision", cuts)
    outputs = run_parts(chunks, pixels, grids, [(0, 4), (4, 4), (4, 8)])
    assert [tuple(x.shape) for x in outputs] == [(1, 24), (0, 24), (1, 24)]
    assert outputs[1].requires_grad
    torch.cat(outputs).square().sum().backward()
    found = {n: g.clone() for n, g in grads(*chunks).items()}
    for chunk in chunks:
        chunk.zero_grad()
    x = pixels
    for chunk in chunks:
        x = chunk(x, grids=grids)
    x.square().sum().backward()
    assert_equal_gradients(found, grads(*chunks))


@pytest.mark.parametrize("encoder", ["qwen2_vl", "qwen2_5_vl", "siglip", "clip", "vit", "whisper"])
def test_without_images_no_layer_runs_and_the_graph_stays_whole(tiny, encoder):
    chunks = build(tiny.model(encoder), "vision", (1, 3))

    def refuse(module, args):
        raise AssertionError(f"{type(module).__name__} was called")

    for chunk in chunks:
        for module in chunk.modules():
            if module is not chunk:
                module.register_forward_pre_hook(refuse)
    x = chunks[0](torch.empty(0), grids=())
    assert x.shape == (0, 32)
    x.requires_grad_()
    out = chunks[2](chunks[1](x, grids=()), grids=())
    assert out.shape == (0, 24)
    assert not out._is_view()
    out.sum().backward()
    assert x.grad.shape == (0, 32)


def test_parts_that_do_not_fit(tiny):
    (packed,) = build(tiny.model("qwen2_vl"), "vision")
    with pytest.raises(DataError, match=r"a part 0\.\.6 of 16 rows was asked for; it must be whole features of 4 rows"):
        packed(torch.zeros(6, 96), grids=((1, 4, 4),), part=(0, 6))
    with pytest.raises(DataError, match=r"a part 8\.\.20 of 16 rows"):
        packed(torch.zeros(12, 96), grids=((1, 4, 4),), part=(8, 20))
    with pytest.raises(DataError, match="7 rows arrived, but 1 images have 8"):
        packed(torch.zeros(7, 96), grids=((1, 4, 4),), part=(8, 16))
    (fixed,) = build(tiny.model("siglip"), "vision")
    with pytest.raises(DataError, match="all rows of an encoder of a fixed size"):
        fixed(torch.zeros(1, 3, 32, 32), grids=((1, 4, 4),), part=(0, 8))
