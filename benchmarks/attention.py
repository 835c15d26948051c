"""python benchmarks/attention.py [--seconds 420]

Forward and backward of the attention function of all hosted models, alone, in one layer of 32 query and 8 key heads
of 128 columns in bfloat16. On a GPU first variable-length attention, scaled-dot-product attention piece by piece and
FlexAttention by the number of causal documents, of different lengths; then for each mask the latter two, at 8k to 64k
packed tokens, on one rank with all tokens and on one of 4 context-parallel ranks. On a CPU: a small float32 layer,
piece by piece against one call with a dense T x T mask. Prints the median time of a step and the peak of memory on top
of what was there (GPU alone); for masks, the ratio of the times. After `--seconds` nothing further begins.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from operators import lengths
from torch import Tensor

from mmtrain.modality.bitfield import Bits, allowed, language_bits
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta
from mmtrain.modality.token_split import split_tokens
from mmtrain.models.attention.backend import Backend
from mmtrain.models.attention.context import AttentionChoices, attention_context, packed_attention

KINDS = ("causal", "image_bidirectional", "prefix")


class Layer(NamedTuple):
    heads: int
    key_heads: int
    columns: int
    dtype: torch.dtype


GPU, CPU = Layer(32, 8, 128, torch.bfloat16), Layer(4, 2, 32, torch.float32)


def sequence(total: int, seed: int = 0) -> MicrobatchMeta:
    """Documents of an eighth to a half of the tokens, each with images of 1/64 of all; the last quarter answers."""
    rng = random.Random(seed)
    size = total // 64
    documents = []
    left = total
    while left:
        length = min(left, rng.randint(total // 8, total // 2))
        room = length * 3 // 4
        images: list[ImageMeta] = []
        at = rng.randint(1, size)
        while at + size <= room:
            images.append(ImageMeta(sample=0, index=len(images), grid=(1, 2, 2 * size), num_tokens=size, start=at))
            at += size + rng.randint(1, size)
        document = DocumentMeta(sample=0, num_tokens=length, num_targets=0, images=tuple(images), prefix=room)
        documents.append(document)
        left -= length
    return MicrobatchMeta(documents=tuple(documents))


def inputs(layer: Layer, rows: int, total: int, device: str) -> list[Tensor]:
    """Query, key and value."""
    shapes = (layer.heads, rows), (layer.key_heads, total), (layer.key_heads, total)
    return [
        torch.randn(1, heads, n, layer.columns, dtype=layer.dtype, device=device, requires_grad=True)
        for heads, n in shapes
    ]


def measure(attend: Callable[..., Tensor], tensors: list[Tensor], repetitions: int) -> tuple[float, str]:
    """(median milliseconds, peak MiB on top of the inputs) of forward and backward, after one step to warm up."""
    on_gpu = tensors[0].is_cuda
    times: list[float] = []
    before = 0
    for repetition in range(repetitions + 1):
        if on_gpu and repetition == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        out = attend(*tensors)
        torch.autograd.grad(out, tensors, torch.ones_like(out))
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
        del out
    peak = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}" if on_gpu else "-"
    return statistics.median(times[1:]), peak


class AtHand:
    """A gather of keys that are gathered already."""

    head_groups = 1

    def start(self, key: Tensor, value: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Nothing to wait for."""
        return lambda: (key, value)


def packed(bits: Bits, rows: np.ndarray, backend: Backend) -> Callable[..., Tensor]:
    """`packed_attention` of some rows; the keys are already gathered."""
    gather = None if len(rows) == len(bits) else AtHand()
    context = attention_context(bits, rows=rows, gather=gather, choices=AttentionChoices(backend))
    return lambda q, k, v: packed_attention(None, q, k, v, context)[0]


def dense(bits: Bits) -> Callable[..., Tensor]:
    """One call with a T x T mask."""
    places = np.arange(len(bits))
    mask = torch.from_numpy(allowed(bits, places, bits, places))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def by_documents(tokens: list[int], repetitions: int, end: float) -> None:
    """A line for each number of causal documents in a sequence, with each kernel of a GPU. Args: end: as of `main`."""
    names: tuple[Backend, ...] = ("varlen", "sdpa", "flex")
    print(f"{'tokens':>7} {'documents':>10}" + "".join(f"{name + ' ms':>12}{name + ' MiB':>12}" for name in names))
    for total in tokens:
        for count in (1, 16, 256, 1024):
            if time.monotonic() > end:
                return
            parts = lengths(count, total)
            documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(parts)]
            bits = language_bits(MicrobatchMeta(documents=tuple(documents)))
            tensors = inputs(GPU, total, total, "cuda")
            found = [measure(packed(bits, np.arange(total), name), tensors, repetitions) for name in names]
            print(f"{total:7} {count:10}" + "".join(f"{ms:12.2f}{peak:>12}" for ms, peak in found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="default: 8k, 16k, 32k, 64k on a GPU; 1k, 2k on a CPU")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=420)
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        by_documents(args.tokens or [8192, 32768], args.repetitions, end)
    device, layer = ("cuda", GPU) if on_gpu else ("cpu", CPU)
    names = ("sdpa", "flex") if on_gpu else ("sdpa", "dense")
    heading = "".join(f"{name + ' ms':>12}{name + ' MiB':>12}" for name in names)
    print(f"{'tokens':>7} {'cp':>3}  {'mask':20}{heading}{names[1] + ' / ' + names[0]:>14}")
    for total in args.tokens or ([8192, 16384, 32768, 65536] if on_gpu else [1024, 2048]):
        for cp in (1, 4) if on_gpu else (1,):
            for kind in KINDS:
                if time.monotonic() > end:
                    return
                bits = language_bits(sequence(total), kind)
                rows = split_tokens(bits, cp, "balanced", 128)[0]
                tensors = inputs(layer, len(rows), total, device)
                runs = [dense(bits) if name == "dense" else packed(bits, rows, name) for name in names]
                results = [measure(run, tensors, args.repetitions) for run in runs]
                figures = "".join(f"{ms:12.2f}{peak:>12}" for ms, peak in results)
                print(f"{total:7} {cp:3}  {kind:20}{figures}{results[1][0] / results[0][0]:14.2f}", flush=True)


if __name__ == "__main__":
    main()
