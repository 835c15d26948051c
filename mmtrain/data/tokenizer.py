"""Tokenizers: the small one that ships with mmtrain, how it was trained, and how any other is loaded.

`python -m mmtrain.data.tokenizer OUT` trains the shipped one again (the result is deterministic).
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmtrain.config import TokenizerConfig
from mmtrain.errors import ConfigError

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "tokenizer"
"""Folder of the tokenizer that `tokenizer.path = ""` means."""

VOCAB_SIZE = 448
"""Entries of the shipped tokenizer, special tokens included."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Chat template of the shipped tokenizer, and of any tokenizer that has none."""


def load_tokenizer(section: TokenizerConfig) -> Any:
    """The tokenizer that a config names, as a fast Hugging Face tokenizer with a chat template.

    Raises: ConfigError: it does not exist, is slow (no character offsets), or lacks the image token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = section.path or str(SHIPPED)
    try:
        loader = AutoTokenizer if section.path else PreTrainedTokenizerFast
        tokenizer = loader.from_pretrained(path)
    except Exception as error:  # OSError, ValueError, hub client errors: all mean that it cannot be loaded
        reason = " ".join(str(error).split())
        raise ConfigError(f"tokenizer.path = {path!r} cannot be loaded: {reason[:300]}") from None
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenizer.path = {path!r} is a slow tokenizer, which cannot tell where an answer starts; "
            "name one with a tokenizer.json"
        )
    added = tokenizer.get_added_vocab()
    if section.image_token not in added:
        likely = ", ".join(token for token in added if "im" in token.lower()) or "none that looks like one"
        raise ConfigError(
            f"tokenizer.image_token = {section.image_token!r} is no special token of {path!r}; it has {likely}"
        )
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of exactly vocab_size entries, special tokens first.

    Raises: ConfigError: the texts do not hold enough repeated pairs to fill the vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.get_vocab_size()} entries instead of {vocab_size}: too little text"
        )
    return tokenizer


def save_tokenizer(tokenizer: Any, out: Path) -> None:
    """Writes a trained tokenizer as a Hugging Face folder that `AutoTokenizer` loads."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHATML,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Trains the shipped tokenizer on the text of the charts data set."""
    from mmtrain.data.charts import chart_texts

    parser = argparse.ArgumentParser(prog="python -m mmtrain.data.tokenizer", description=main.__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--num-samples", type=int, default=4000, help="conversations to train on")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    options = parser.parse_args(arguments)
    tokenizer = train_tokenizer(chart_texts(options.num_samples, seed=0), options.vocab_size)
    save_tokenizer(tokenizer, options.out)


if __name__ == "__main__":
    main()
