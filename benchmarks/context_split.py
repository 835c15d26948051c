"""python benchmarks/context_split.py

How evenly context-parallel ranks, and the multiprocessors inside of one, share attention; and what deciding it costs.

Between ranks: packed sequences are split by mirrored pieces (`causal`) and by longest block first (`balanced`, blocks
of 128). Prints for each mask the CPU time of the split and the largest share of a rank over the mean: of attended
pairs, of blocks of 128 x 128 pairs that a kernel visits, and of tokens; `by pairs` is `balanced` with pairs instead of
blocks as the work. Times are medians of the sequences, shares the worst of them.

The first sequences have many short documents or few long ones, with images; the last are those of Cornstarch's figure
3.5, with the mask `modality`: images before the text, in the middle of it, and several such sequences packed.

Inside of a rank: blocks of rows of a few heads on the multiprocessors of a device, each taken by the first one that is
free, whole and in parts (`attention_part_blocks = -1`): the longest block or part, and the last multiprocessor's end,
over the mean work of a multiprocessor.
"""

import argparse
import heapq
import random
import time
from collections.abc import Sequence

import numpy as np

from mmtrain.modality.bitfield import Bits, language_bits, visible_keys
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta
from mmtrain.modality.token_split import (
    block_work,
    longest_first,
    longest_part,
    parts_of_rows,
    split_tokens,
)
from mmtrain.models.attention.flex import visible_blocks

BLOCK_SIZE = 128
SHORT, LONG = (100, 4000), (16000, 60000)


def sequence(total: int, lengths: tuple[int, int], seed: int) -> MicrobatchMeta:
    """Documents of text and images of 64 to 4096 tokens, `total` tokens in all; the last quarter is the answer."""
    rng = random.Random(seed)
    documents = []
    while total:
        length = min(total, rng.randint(*lengths))
        images: list[ImageMeta] = []
        at, room = rng.randint(1, 50), length * 3 // 4
        while at + (size := rng.choice([64, 256, 1024, 4096])) <= room:
            images.append(ImageMeta(sample=0, index=len(images), grid=(1, 2, 2 * size), num_tokens=size, start=at))
            at += size + rng.randint(1, 400)
        documents.append(
            DocumentMeta(sample=0, num_tokens=length, num_targets=length - room, images=tuple(images), prefix=room)
        )
        total -= length
    return MicrobatchMeta(documents=tuple(documents))


def of_figure(total: int, kind: str, seed: int) -> MicrobatchMeta:
    """A sequence of Cornstarch's figure 3.5, half of its tokens of images. Args: kind: a key of `FIGURE`."""
    rng = random.Random(seed)
    parts = [total] if kind != "packed" else [total // 8 * n for n in (1, 2, 2, 3)]
    documents = []
    for number, length in enumerate(parts):
        sizes = [length // 16] * 8
        text = length - sum(sizes)
        before = kind == "before the text" or (kind == "packed" and number % 2 == 0)
        cuts = [0] * 8 if before else sorted(rng.randint(0, text) for _ in sizes)
        images = tuple(
            ImageMeta(sample=0, index=i, grid=(1, 2, 2 * size), num_tokens=size, start=cut + sum(sizes[:i]))
            for i, (cut, size) in enumerate(zip(cuts, sizes, strict=True))
        )
        documents.append(DocumentMeta(sample=0, num_tokens=length, num_targets=1, images=images, prefix=1))
    return MicrobatchMeta(documents=tuple(documents))


FIGURE = ("before the text", "in the text", "packed")


def ends(num_blocks: np.ndarray, heads: int, units: int) -> tuple[float, float]:
    """(longest, last end), over the mean work of a unit, of blocks of rows that units take as they become free."""
    free = [0] * units
    for _ in range(heads):
        for blocks in num_blocks:
            heapq.heapreplace(free, free[0] + int(blocks))
    mean = heads * num_blocks.sum() / units
    return float(num_blocks.max() / mean), float(max(free) / mean)


def by_pairs(bits: Bits, cp: int) -> list[np.ndarray]:
    """The split by longest block first whose work is pairs."""
    blocks, pairs = block_work(bits, BLOCK_SIZE)
    positions = np.arange(len(bits))
    return [
        np.concatenate([positions[b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE] for b in of_rank])
        for of_rank in longest_first(pairs, cp, blocks)
    ]


def attended_pairs(bits: Bits, parts: Sequence[np.ndarray]) -> np.ndarray:
    """[cp]: number of (query, key) pairs of each rank's tokens. Args: parts: [cp rank] -> positions of its tokens."""
    number = visible_keys(bits).number
    return np.array([number[tokens].sum() for tokens in parts], dtype=np.int64)


def blocks_visited(bits: Bits, parts: list[np.ndarray]) -> np.ndarray:
    """Blocks of pairs that a kernel visits on each rank, whose rows it takes by BLOCK_SIZE as they lie there."""
    return np.array([visible_blocks(bits, part)[0].sum() for part in parts])


def excess(values: np.ndarray) -> float:
    """The largest over the mean."""
    return float(values.max() / values.mean())


def compare_splits(name: str, kind: str, masks: list[Bits], degrees: list[int]) -> None:
    """Prints the rows of one kind of sequence and mask."""
    for cp in degrees:
        for policy in ("causal", "balanced", "by pairs"):
            rows = []
            for bits in masks:
                start = time.process_time()
                parts = by_pairs(bits, cp) if policy == "by pairs" else list(split_tokens(bits, cp, policy, BLOCK_SIZE))
                seconds = time.process_time() - start
                sizes = np.array([len(part) for part in parts])
                pairs, blocks = attended_pairs(bits, parts), blocks_visited(bits, parts)
                rows.append((seconds * 1e3, excess(pairs), excess(blocks), excess(sizes)))
            worst, median = np.max(rows, axis=0), np.median(rows, axis=0)[0]
            figures = f"{median:6.1f}" + "".join(f"{value:8.3f}" for value in worst[1:])
            print(f"{name:16}{kind:21}{cp:3}  {policy:10}{figures}")


def compare_parts(name: str, bits: Bits, cp: int, units: int) -> None:
    """Prints the rows of one sequence, for some heads in one call."""
    for policy in ("causal", "balanced"):
        visible = visible_blocks(bits, split_tokens(bits, cp, policy, BLOCK_SIZE)[0])[0]
        whole = visible.sum(axis=1)
        for heads in (1, 4, 32):
            most = longest_part(whole, heads, units)
            block, low, high = parts_of_rows(visible, most or len(visible[0]))
            before = np.pad(visible.cumsum(axis=1), ((0, 0), (1, 0)))
            cut = before[block, high] - before[block, low]
            figures = "".join(f"{value:8.3f}" for value in (*ends(whole, heads, units), *ends(cut, heads, units)))
            print(f"{name:16}{policy:10}{heads:5}{most:6}{len(cut) / len(whole):7.1f}{figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--sequences", type=int, default=5)
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--units", type=int, default=84, help="multiprocessors of a device; 84: an A40")
    args = parser.parse_args()
    print(f"{args.tokens} tokens, {args.sequences} sequences; largest / mean over ranks of pairs, blocks, tokens")
    print(f"{'documents':16}{'mask':21}{'cp':>3}  {'split':10}{'ms':>6}{'pairs':>8}{'blocks':>8}{'tokens':>8}")
    seeds = range(args.sequences)
    for name, lengths in (("short", SHORT), ("long", LONG)):
        for kind in ("causal", "image_bidirectional", "prefix"):
            masks = [language_bits(sequence(args.tokens, lengths, seed), kind) for seed in seeds]
            compare_splits(name, kind, masks, args.cp)
    figure = {
        name: [language_bits(of_figure(args.tokens, name, seed), "modality") for seed in seeds] for name in FIGURE
    }
    for name, masks in figure.items():
        compare_splits(name, "modality", masks, args.cp)
    cp = args.cp[min(1, len(args.cp) - 1)]
    print(f"\ninside of rank 0 of {cp}, {args.units} multiprocessors: longest, last end; in parts: longest, last end")
    print(f"{'documents':16}{'split':10}{'heads':>5}{'most':>6}{'parts':>7}{'whole':>16}{'in parts':>16}")
    for name, masks in figure.items():
        compare_parts(name, masks[0], cp, args.units)


if __name__ == "__main__":
    main()
