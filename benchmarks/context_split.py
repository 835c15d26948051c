"""python benchmarks/context_split.py

How evenly context-parallel ranks share attention, and what deciding it costs. Packed sequences of 64k tokens with
images, many short documents or few long ones, are split by mirrored pieces (`causal`) and by longest block first
(`balanced`, blocks of 128). Prints for each mask the CPU time of the split and the largest share of a rank over
the mean: of attended pairs, of blocks of 128 x 128 pairs that a kernel visits, and of tokens; `by pairs` is
`balanced` with pairs instead of blocks as the work. Times are medians of the sequences, shares the worst of them.
"""

import argparse
import random
import time

import numpy as np

from mmtrain.modality.bitfield import Bits, language_bits
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta
from mmtrain.modality.token_split import attended_pairs, block_work, longest_first, split_tokens
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


def by_pairs(bits: Bits, cp: int) -> list[np.ndarray]:
    """The split by longest block first whose work is pairs."""
    blocks, pairs = block_work(bits, BLOCK_SIZE)
    positions = np.arange(len(bits))
    return [
        np.concatenate([positions[b * BLOCK_SIZE : (b + 1) * BLOCK_SIZE] for b in of_rank])
        for of_rank in longest_first(pairs, cp, blocks)
    ]


def blocks_visited(bits: Bits, parts: list[np.ndarray]) -> np.ndarray:
    """Blocks of pairs that a kernel visits on each rank, whose rows it takes by BLOCK_SIZE as they lie there."""
    return np.array([visible_blocks(bits, part)[0].sum() for part in parts])


def excess(values: np.ndarray) -> float:
    """The largest over the mean."""
    return float(values.max() / values.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--sequences", type=int, default=5)
    parser.add_argument("--cp", type=int, nargs="+", default=[4, 16, 64])
    args = parser.parse_args()
    print(f"{args.tokens} tokens, {args.sequences} sequences; largest / mean over ranks of pairs, blocks, tokens")
    print(f"{'documents':10}{'mask':21}{'cp':>3}  {'split':10}{'ms':>6}{'pairs':>8}{'blocks':>8}{'tokens':>8}")
    for name, lengths in (("short", SHORT), ("long", LONG)):
        for kind in ("causal", "image_bidirectional", "prefix"):
            masks = [language_bits(sequence(args.tokens, lengths, seed), kind) for seed in range(args.sequences)]
            for cp in args.cp:
                for policy in ("causal", "balanced", "by pairs"):
                    rows = []
                    for bits in masks:
                        start = time.process_time()
                        parts = (
                            by_pairs(bits, cp)
                            if policy == "by pairs"
                            else list(split_tokens(bits, cp, policy, BLOCK_SIZE))
                        )
                        seconds = time.process_time() - start
                        sizes = np.array([len(part) for part in parts])
                        pairs, blocks = attended_pairs(bits, tuple(parts)), blocks_visited(bits, parts)
                        rows.append((seconds * 1e3, excess(pairs), excess(blocks), excess(sizes)))
                    worst, median = np.max(rows, axis=0), np.median(rows, axis=0)[0]
                    figures = f"{median:6.1f}" + "".join(f"{value:8.3f}" for value in worst[1:])
                    print(f"{name:10}{kind:21}{cp:3}  {policy:10}{figures}")


if __name__ == "__main__":
    main()
