"""Tokenizers: the two small ones that ship with mmtrain, their training, and loading any other.

`python -m mmtrain.data.tokenizer OUT` trains the one for charts again, and with `--captions` the one for the captions
of moving shapes (the results are deterministic).
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mmtrain.config.config import Config
from mmtrain.config.data import TokenizerConfig
from mmtrain.config.model import ModelConfig, placeholder
from mmtrain.data.tokenizer_limits import limited
from mmtrain.errors import ConfigError, one_line
from mmtrain.families.catalogue import COMPOSITES
from mmtrain.spec.hub_files import fetched, find_file, local_path, no_folder, read_json, unreachable
from mmtrain.spec.job_files import check_steps, check_tokenizer
from mmtrain.spec.model_configs import language_config
from mmtrain.spec.module_sizes import whole_kind

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "tokenizer"
"""Folder of the default tokenizer, of `tokenizer.path = ""`."""

SHIPPED_CAPTIONS = SHIPPED.parent / "caption_tokenizer"
"""Folder of the default tokenizer of a text-to-video job."""

VOCAB_SIZE = 448
"""Vocabulary size of the default tokenizer, with special tokens."""

CAPTION_VOCAB_SIZE = 416
"""Vocabulary size of the default tokenizer for captions: each of their words but one is one token."""

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
"""Chat template of the default tokenizer, and of any tokenizer without one that has its tokens."""

_PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] + ':\\n' + message['content'] }}{{ eos_token if message['role'] == 'assistant' }}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""Chat template of a tokenizer without one and without the tokens of ChatML."""

PROBE = "a message\nof two lines"
"""A text that a template which writes a list in Python's form does not show."""


def job_tokenizer(config: Config) -> Any:
    """The tokenizer of a job, as `load_tokenizer` gives it.

    Raises: ConfigError: as there, or it has more entries than the language model's vocabulary.
    """
    captions = config.model.reads_clips or config.model.reads_pairs
    tokenizer = load_tokenizer(config.tokenizer, captions=captions, model=config.model)
    vocab_size = language_config(config.model.language)["vocab_size"]
    if len(tokenizer) > vocab_size:
        model = "text encoder" if captions else "language model"
        raise ConfigError(
            f"tokenizer.path = {config.tokenizer.path!r} has {len(tokenizer)} entries, but the {model}'s vocab_size is "
            f"{vocab_size}; raise it or use the model's own tokenizer"
        )
    return tokenizer


def load_tokenizer(section: TokenizerConfig, *, captions: bool = False, model: ModelConfig | None = None) -> Any:
    """The tokenizer of a config, as a fast Hugging Face tokenizer with a chat template.

    Args: captions: for captions only, so it needs no image token. model: for whose further encoders the tokenizer that
        ships with mmtrain gets tokens in addition.
    Raises: ConfigError: it does not exist, is slow (no character offsets), lacks the image token, or its chat template
        cannot be read or shows no text.
    """
    path = section.path or str(SHIPPED_CAPTIONS if captions else SHIPPED)
    tokenizer = read_tokenizer(path)
    if not section.path and model is not None and model.reads_pairs:
        _end_captions(tokenizer)
    if not section.path:
        further = model.modules.items() if model is not None else ()
        tokenizer.add_tokens([placeholder(*item) for item in further], special_tokens=True)
    added = tokenizer.get_added_vocab()
    if section.image_token not in added and not captions:
        likely = ", ".join(token for token in added if "im" in token.lower()) or "none that looks like one"
        raise ConfigError(
            f"tokenizer.image_token = {section.image_token!r} is no special token of {path!r}; it has {likely}"
        )
    if not captions:
        tokenizer.chat_template = _chat_template(section, path, tokenizer, model)
        content_form(tokenizer)
    return tokenizer


def _end_captions(tokenizer: Any) -> None:
    """Lets a shipped tokenizer end each text with its first token, as those of CLIP do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.eos_token = end = SPECIAL_TOKENS[0]
    template = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.convert_tokens_to_ids(end))])
    tokenizer.backend_tokenizer.post_processor = template


def read_tokenizer(path: str) -> Any:
    """The fast Hugging Face tokenizer of a folder or hub id. This is the only place that reads one.

    Its templates and its library are limited wherever they are called.
    Raises: ConfigError: it does not exist, is slow (no character offsets), is refused, or cannot be loaded.
    """
    from transformers import AutoTokenizer

    folder = local_path("tokenizer.path", path)
    if folder:
        check_tokenizer(folder)
    offline = "" if folder else unreachable(path)
    try:
        if not folder and (steps := fetched(path, "tokenizer.json", offline=bool(offline))):
            check_steps(steps)
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder or path),
            local_files_only=bool(folder or offline),
            trust_remote_code=False,  # unset, it asks on a terminal
        )
    except ConfigError:
        raise
    except Exception as error:  # OSError, ValueError, hub client errors: all mean that it cannot be loaded
        reason = offline or one_line(error, 300)
        if not folder:
            reason = f"{no_folder(path)}, and from the hub: {reason}"
        raise ConfigError(
            f"tokenizer.path = {path!r} cannot be loaded: {reason}; name a folder with "
            "tokenizer.json, or an id that is cached or can be reached"
        ) from None
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenizer.path = {path!r} is a slow tokenizer, which cannot tell where an answer starts; "
            "name one with a tokenizer.json"
        )
    return limited(tokenizer)


def _chat_template(section: TokenizerConfig, path: str, tokenizer: Any, model: ModelConfig | None) -> str:
    """The chat template of a job: of the files that a folder may have, the one that a processor of transformers takes.

    Args: path: of the tokenizer. model: whose class may have a template of its own.
    """
    if section.chat_template:
        key, source = "tokenizer.chat_template", local_path("tokenizer.chat_template", section.chat_template)
        if source is None or not source.is_file():
            raise ConfigError(f"{key} = {section.chat_template!r} is no file; name one with a Jinja template")
        return _stored_template(key, source)
    key = "tokenizer.path"
    if path != str(SHIPPED):
        whole = find_file(key, path, "processor_config.json", optional=True)
        if whole is not None and read_json(key, whole).get("chat_template") is not None:
            return _stored_template(key, whole)
        older = find_file(key, path, "chat_template.json", optional=True)
        if older is not None:
            return _stored_template(key, older)
    own = tokenizer.chat_template
    own = own.get("default") if isinstance(own, Mapping) else own
    return own or (_class_template(model) if model else "") or _without_template(tokenizer)


def _stored_template(key: str, source: Path) -> str:
    """The chat template in a file, Jinja or JSON. Args: key: of the config that names it."""
    if source.suffix != ".json":
        try:
            return source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key} = {str(source)!r} cannot be read: {one_line(error)}; name a UTF-8 text") from None
    template = read_json(key, source).get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(f"{key}: {source} has no text for the key chat_template; name a file that has it")
    return template


def _class_template(model: ModelConfig) -> str:
    """The chat template that the processor class of a whole model has of its own; empty: it has none."""
    import transformers

    kind = whole_kind(model)
    processor = getattr(transformers, f"{COMPOSITES[kind].class_name}Processor", None) if kind else None
    own = getattr(processor, "default_chat_template", None)
    return str(own.fget(processor)) if isinstance(own, property) and own.fget else ""


def _without_template(tokenizer: Any) -> str:
    """The chat template of a tokenizer without one, in tokens that it has."""
    return CHATML if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_added_vocab().keys() else _PLAIN


def content_form(tokenizer: Any, role: str = "user", *, parts_first: bool = False) -> Callable[[str], Any]:
    """What makes of a message's text what the chat template shows: the text itself, or a list of one part with it.

    Args: role: of the message. parts_first: which of the two, if the template shows either.
    Raises: ConfigError: the template shows neither of a user's message.
    """
    before: list[dict[str, Any]] = []
    if role != "user":
        user = content_form(tokenizer, parts_first=parts_first)
        before = [{"role": "user", "content": user("?")}] if role != "system" else []
        before += [{"role": "assistant", "content": user("!")}] if role not in ("system", "assistant") else []
    behind = [{"role": "user", "content": user("?")}] if role == "system" else []
    reason = "it shows no text of a user's message"
    for form in (one_part, str) if parts_first else (str, one_part):
        messages = [*before, {"role": role, "content": form(PROBE)}, *behind]
        try:
            shown = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # templates are programs: jinja errors, and any error of their filters
            reason = one_line(error)
            continue
        if PROBE in shown:
            return form
    if role != "user":
        return str
    raise ConfigError(
        f"the chat template of the tokenizer {tokenizer.name_or_path!r} cannot be used: {reason}; name a file with "
        "another one in tokenizer.chat_template"
    )


def one_part(text: str) -> list[dict[str, str]]:
    """The content of a message whose only part is a text."""
    return [{"type": "text", "text": text}]


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
    """Trains a shipped tokenizer on the text of the charts data set, or on the captions of the shapes data set."""
    from mmtrain.data.toy.charts import chart_texts
    from mmtrain.data.toy.shapes import shape_captions

    parser = argparse.ArgumentParser(prog="python -m mmtrain.data.tokenizer", description=main.__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--captions", action="store_true", help="the one for text-to-video")
    parser.add_argument("--num-samples", type=int, default=4000, help="conversations or captions to train on")
    parser.add_argument("--vocab-size", type=int, help=f"default {VOCAB_SIZE}, {CAPTION_VOCAB_SIZE} for captions")
    options = parser.parse_args(arguments)
    vocab_size = options.vocab_size or (CAPTION_VOCAB_SIZE if options.captions else VOCAB_SIZE)
    texts = shape_captions if options.captions else chart_texts
    tokenizer = train_tokenizer(texts(options.num_samples, seed=0), vocab_size)
    save_tokenizer(tokenizer, options.out)


if __name__ == "__main__":
    main()
