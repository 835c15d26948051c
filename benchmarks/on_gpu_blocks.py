"""python benchmarks/on_gpu_blocks.py [--counts 1 16 256] [--seconds 420] [--small]

One block in the shape of Qwen2-VL-2B's language model, of its encoder and of ViT-L, and that language model's head with
its loss, in bfloat16 on one CUDA device: milliseconds of forward and backward, MFU, kernels, times that the host waits
for the device, and MiB kept from forward to backward and at the peak, beside the bytes that planning counts. Blocks run
with each kernel of attention, eager and compiled, for 1 to 256 documents or images of different sizes; MFU counts
attended pairs alone. After `--seconds` nothing further begins. `--small` tries the program on a CPU, where it measures
neither kernels nor bytes.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from on_gpu_step import waits_warn
from operators import TOKENS, Work, activation, documents, images, make_chunk
from operators import VISION as NARROW
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mmtrain.config.model import LanguageConfig, ModelConfig
from mmtrain.config.sections import MetricsConfig
from mmtrain.errors import MMTrainError
from mmtrain.modality.bitfield import segment_bits
from mmtrain.models.attention.backend import Backend
from mmtrain.models.attention.context import attention_context
from mmtrain.observe.reporter import peak_flops
from mmtrain.parallel.compile import compile_blocks
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import documents_work

MIB = 2.0**20
REPETITIONS = 5
LANGUAGE = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 1,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "Qwen2-VL's encoder": {
        "model_type": "qwen2_vl_vision", "depth": 1, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16,
        "mlp_ratio": 4, "patch_size": 14,
    },
    "ViT-L (SigLIP 2)": {
        "model_type": "siglip2_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1,
        "num_attention_heads": 16, "num_patches": 256, "patch_size": 16,
    },
}  # fmt: skip
TINY_VISION = {config["model_type"]: config for config in NARROW.values()}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 1000}


class Measured(NamedTuple):
    """One work."""

    ms: float
    kernels: int
    waits: int
    kept_bytes: int
    peak_bytes: int


def step(work: Work) -> None:
    """Forward and backward."""
    out = work.run()
    out.backward(torch.ones_like(out))


def measure(work: Work, device: torch.device) -> Measured:
    """Medians of `REPETITIONS` after two that warm up; kernels and waits of one more."""
    for _ in range(2):
        step(work)
    times = []
    for _ in range(REPETITIONS):
        synchronize(device)
        start = time.perf_counter()
        step(work)
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    ms = statistics.median(times)
    if device.type != "cuda":
        return Measured(ms, 0, 0, 0, 0)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out = work.run()
    kept = torch.cuda.memory_allocated(device) - before
    out.backward(torch.ones_like(out))
    peak = torch.cuda.max_memory_allocated(device) - before
    del out
    return Measured(ms, num_kernels(work), num_waits(work), kept, peak)


def synchronize(device: torch.device) -> None:
    """Waits for the device, if it is one that computes beside the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def num_kernels(work: Work) -> int:
    """Kernels, and copies of memory, of forward and backward."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step(work)
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in recorded.events())


def num_waits(work: Work) -> int:
    """Times that the host waits for the device in forward and backward."""
    with warnings.catch_warnings(record=True) as found, waits_warn():
        warnings.simplefilter("always")
        step(work)
    return sum("synchroniz" in str(warning.message) for warning in found)


def head(language: dict[str, Any], labels: int, device: str) -> Work:
    """The language model's last layer and the loss, for labelled tokens."""
    model = ModelConfig(encoder=None, language=LanguageConfig(config=language))
    module = model_spec(model, dtype_bytes=2).module("language")
    chunk = make_chunk(model, "language", (len(module.layers) - 1, len(module.layers)), device)
    context, positions = attention_context(segment_bits([labels])), torch.arange(labels, device=device)
    targets = torch.zeros(labels, dtype=torch.int64, device=device)
    x = activation(labels, language["hidden_size"], device)
    return Work(
        lambda: chunk(x, attention=context, position_ids=positions, labelled=positions, targets=targets).loss_sum,
        chunk,
        module.layers[-1:],
        documents_work([labels], labels),
    )


def compiled(work: Work) -> Work:
    """The same, with blocks compiled as those of a job."""
    compile_blocks(work.chunk)
    return work


def works(counts: list[int], small: bool, device: str) -> Iterator[tuple[str, Callable[[], Work]]]:
    """(name, what makes it), the most telling first."""
    language, tokens = (LANGUAGE | SMALL, 64) if small else (LANGUAGE, TOKENS)
    backends: tuple[Backend, ...] = ("varlen", "sdpa", "flex") if device == "cuda" else ("sdpa",)
    text = partial(documents, language, device=device, tokens=tokens)
    for count, backend in product(counts, backends):
        yield f"Qwen2-VL-2B, {count} documents, {backend}", partial(text, count, backend)
    for labels in (tokens // 4, tokens):
        yield f"its head, {labels} labels", partial(head, language, labels, device)
    for (name, config), count, backend in product(VISION.items(), counts, backends[:2]):
        of = TINY_VISION[config["model_type"]] if small else config
        yield f"{name}, {count} images, {backend}", partial(images, of, count, backend, device)
    for count in counts:
        yield f"Qwen2-VL-2B, {count} documents, compiled", lambda n=count: compiled(text(n, backends[0]))
    for (name, config), count in product(VISION.items(), counts):
        of = TINY_VISION[config["model_type"]] if small else config
        work = partial(images, of, count, backends[0], device)
        yield f"{name}, {count} images, compiled", lambda work=work: compiled(work())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 16, 256], help="documents or images")
    parser.add_argument("--seconds", type=int, default=420)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate, begin = peak_flops(MetricsConfig(), device), time.monotonic()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {TOKENS} tokens")
    columns = "".join(f"{name:>9}" for name in ("ms", "MFU", "kernels", "waits", "kept MiB", "planned", "peak MiB"))
    print(f"{'work':46}{columns}")
    failed = 0
    jobs = list(works(args.counts, args.small, device.type))
    for name, make in jobs:
        if time.monotonic() - begin > args.seconds:
            print(f"{name:46} not begun: {args.seconds} s are over", flush=True)
            continue
        try:
            work = make()
            found = measure(work, device)
        except (RuntimeError, MMTrainError) as error:  # the others may work; out of memory is one of them
            failed += 1
            print(f"{name:46} FAILED: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        flops = [layer.flops(work.size) for layer in work.layers]
        total = sum(of.forward + of.backward_input + of.backward_weight for of in flops)
        planned = sum(layer.activation_bytes(work.size) for layer in work.layers)
        print(
            f"{name:46}{found.ms:9.3f}{total / found.ms * 1e3 / rate:9.1%}{found.kernels:9d}{found.waits:9d}"
            f"{found.kept_bytes / MIB:9.0f}{planned / MIB:9.0f}{found.peak_bytes / MIB:9.0f}",
            flush=True,
        )
        del work
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
