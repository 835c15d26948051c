"""python benchmarks/split_backward.py

What I and W of a split backward take against the whole one, on one chunk of decoder layers, and what is held
in between: seconds of B, I and W, (I + W) / B pair by pair in one run, and bytes after F and between I and W, with
what planning counts. `--mode full` recomputes the blocks. Prints minimum, median and maximum over the repetitions.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mmtrain.config.model import LanguageConfig, ModelConfig
from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.models.attention.context import attention_context
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.parallel.activation_memory import ActivationMemory
from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.spec.builders import model_spec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import documents_work


def seconds(device: torch.device, run: Callable[[], None]) -> float:
    """How long a call takes, the device's work included; on a CPU in CPU time, which other jobs disturb less."""
    if device.type == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.accelerator.synchronize()
    start = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def spread(values: list[float], form: str) -> str:
    return f"min {min(values):{form}}  median {statistics.median(values):{form}}  max {max(values):{form}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--mode", choices=("none", "full", "selective"), default="none", help="of recomputation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    heads = max(1, args.width // 64)
    model = ModelConfig(
        language=LanguageConfig(
            config={
                "model_type": "llama", "hidden_size": args.width, "intermediate_size": 4 * args.width,
                "num_hidden_layers": args.layers, "num_attention_heads": heads, "num_key_value_heads": heads,
                "vocab_size": 128, "max_position_embeddings": args.tokens,
            }
        )
    )  # fmt: skip
    spec = model_spec(model, dtype_bytes=dtype.itemsize)
    chunk = build_chunk(model, spec, "language", (1, 1 + args.layers), device=device, dtype=dtype)
    init_weights(chunk, 0)
    section = ActivationCheckpointConfig(mode=args.mode)
    ActivationMemory(chunk.blocks(), section)
    grads = WeightGrads(chunk)
    document = DocumentMeta(sample=0, num_tokens=args.tokens, num_targets=1, images=())
    attention = attention_context(language_bits(MicrobatchMeta(documents=(document,)), "causal"))
    positions = torch.arange(args.tokens, device=device)
    x = torch.randn(args.tokens, args.width).to(device, dtype).requires_grad_()
    outputs: dict[str, Tensor] = {}

    def forward() -> None:
        outputs["out"] = chunk(x, attention=attention, position_ids=positions)

    def backward() -> None:
        out = outputs.pop("out")
        torch.autograd.backward(out, torch.ones_like(out))

    figures: dict[str, list[float]] = {name: [] for name in ("F", "B", "F, split", "I", "W", "I + W")}
    held = 0
    for _ in range(args.repetitions + 1):
        figures["F"].append(seconds(device, forward))
        figures["B"].append(seconds(device, backward))
        with grads.deferred(0):
            figures["F, split"].append(seconds(device, forward))
        with grads.deferred(0):
            figures["I"].append(seconds(device, backward))
        held = grads.held_bytes()
        figures["W"].append(seconds(device, lambda: grads.run(0)))
        figures["I + W"].append(figures["I"][-1] + figures["W"][-1])
        gc.collect()
    size = documents_work((args.tokens,), 1)
    layers = spec.module("language").layers[1 : 1 + args.layers]
    kept = sum(Recomputation.of(section).kept_bytes(layer, size) for layer in layers)
    planned = sum(layer.linear_bytes(size) for layer in layers)
    print(
        f"{args.layers} decoder layers of width {args.width}, {args.tokens} tokens, {args.dtype}, recomputation "
        f"{args.mode}; torch {torch.__version__} on {device.type}, {args.threads} threads of {os.cpu_count()} cores"
    )
    for name, values in figures.items():
        print(f"{name:10s} ms: {spread([1e3 * v for v in values[1:]], '.2f')}")  # the first repetition warms up
    ratios = [a / b for a, b in zip(figures["I + W"][1:], figures["B"][1:], strict=True)]
    print(f"(I + W) / B: {spread(ratios, '.3f')}")
    mib = [amount / 2**20 for amount in (kept, held, planned)]
    print("MiB after F, planned: {:.2f}; between I and W: {:.2f}, planned: {:.2f}".format(*mib))


if __name__ == "__main__":
    main()
