"""Small folders of whole models as they are published: config, tokenizer, chat template, processor; their processors by
transformers' own classes; chat templates of each kind."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmtrain.config.config import Config
from mmtrain.config.config import load as load_config
from mmtrain.data.tokenizer import SHIPPED
from tests import llava, sounds, whole_models
from tests.data.sound_files import wav

IMAGES = {"a.png": (84, 56), "b.png": (56, 56)}
SOUNDS = {"a.wav": 0.4, "b.wav": 0.7}
FRAMES = np.random.default_rng(1).integers(0, 256, (7, 56, 84, 3), np.uint8)
"""Of walk.npy."""
AREA = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}
VIDEO = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}, "patch_size": 14, "merge_size": 2,
    "temporal_patch_size": 2, "do_sample_frames": True, "fps": 2.0, "min_frames": 4, "max_frames": 768,
    "cap_pixels_per_frame": False,
}  # fmt: skip

_QWEN = (  # as of Qwen2-VL and Qwen3-VL: text or parts, markers around images, numbers if asked for
    "{% set seen = namespace(images=0, videos=0) %}{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' or 'image' in p or 'image_url' in p %}{% set seen.images = seen.images + 1 %}"
    "{% if add_vision_id %}Picture {{ seen.images }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' or 'video' in p %}{% set seen.videos = seen.videos + 1 %}"
    "{% if add_vision_id %}Video {{ seen.videos }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAVA = (  # as of LLaVA-1.5: images first, each with a line break behind it; it writes neither beginning nor end
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}{% endif %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_AUDIO = (  # as of Qwen2-Audio: sounds are numbered through the conversation
    "{% set seen = namespace(sounds=0) %}{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'audio' %}{% set seen.sounds = seen.sounds + 1 %}"
    "Audio {{ seen.sounds }}: <|audio_bos|><|AUDIO|><|audio_eos|>\n{% elif 'text' in p %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _marked(item: str, kind: str) -> dict[str, str]:
    """Templates of each way to show parts. Args: item: what they write for one."""
    part = f"{{% if p.type == '{kind}' %}}{item}{{% elif p.type == 'text' %}}{{{{ p.text }}}}{{% endif %}}"
    parts = f"{{% for p in m.content %}}{part}{{% endfor %}}"
    last = f"{{% for p in m.content | rejectattr('type', 'equalto', '{kind}') %}}{{{{ p.text | trim }}}}{{% endfor %}}"
    last += f"{{% for p in m.content | selectattr('type', 'equalto', '{kind}') %}}\n{item}{{% endfor %}}"
    return {
        "beginning written": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]" + parts + "</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        "items last, trimmed": "{% for m in messages %}{{ m.role | upper }}:\n" + last + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:\n{% endif %}",
        "answers as text": "{% for m in messages %}{% if m.role == 'assistant' %}Bot: {{ m.content }}</s>{% else %}"
        "{{ m.role }}: " + parts + "\n{% endif %}{% endfor %}{% if add_generation_prompt %}Bot:{% endif %}",
        "two ends": "{% for m in messages %}<|im_start|>{{ m.role }}\n" + parts + "<|im_end|><|endoftext|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }


TEMPLATES: Mapping[str, Mapping[str, str]] = {
    "qwen": {"own": _QWEN, **_marked("<|vision_start|><|image_pad|><|vision_end|>", "image")},
    "llava": {"own": _LLAVA, **_marked("<image>", "image")},
    "audio": {"own": _AUDIO, **_marked("<|audio_bos|><|AUDIO|><|audio_eos|>", "audio")},
}
"""Kind of family -> name -> a chat template that shows parts."""
FAMILIES = {"qwen2_vl": "qwen", "qwen2_5_vl": "qwen", "qwen3_vl": "qwen", "llava": "llava", "qwen2_audio": "audio"}
EXTRA = ("<|video_pad|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<image>", "<s>", "</s>")


def make_tokenizer(folder: Path, template: str = "", *, begins: bool = False, eos: str | None = "</s>") -> Any:
    """Saves a tokenizer, and gives it as transformers reads it. Args: begins: whether it puts <s> before each text."""
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    raw = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    raw.add_special_tokens(list(EXTRA))
    if begins:
        begin = ("<s>", raw.token_to_id("<s>"))
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[begin]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token=eos, pad_token="<|endoftext|>", chat_template=template or None
    )
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def save_folder(family: str, folder: Path, template: str = "", *, weights: bool = False, **options: Any) -> None:
    """Saves a whole model with what its processor needs. Args: options: of `make_tokenizer`."""
    from transformers import CLIPImageProcessor, LlavaConfig, LlavaForConditionalGeneration

    tokenizer = make_tokenizer(folder, template, **options)
    size, ids = 464, tokenizer.convert_tokens_to_ids
    if family == "qwen2_audio":
        model = sounds.tiny_whole({**sounds.TEXT, "vocab_size": size})
        model.config.audio_token_index = model.config.audio_token_id = ids("<|AUDIO|>")
        sounds.extractor().save_pretrained(folder)
    elif family == "llava":
        values = llava.LLAVAS["clip, llama"]
        text = {**values["text_config"], "vocab_size": size}
        config = LlavaConfig(**{**values, "text_config": text}, image_token_index=ids("<image>"))
        model = LlavaForConditionalGeneration(config)
        CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
        own = {"processor_class": "LlavaProcessor", "image_token": "<image>", "patch_size": 4}
        own |= {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        (folder / "processor_config.json").write_text(json.dumps(own))
    else:
        patch = {**whole_models.VISION[family], "patch_size": 14}
        patch |= {"window_size": 56} if "window_size" in patch else {}
        model = whole_models.whole_model(family, whole_models.tiny_text(family, vocab_size=size), patch)
        names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        for key, token in names.items():
            setattr(model.config, key, ids(token))
        image = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, **AREA}
        (folder / "preprocessor_config.json").write_text(json.dumps(image | {"temporal_patch_size": 2}))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO))
    model.save_pretrained(folder) if weights else model.config.save_pretrained(folder)


def processor_of(family: str, folder: Path, monkeypatch: Any) -> Any:
    """transformers' processor of a folder, by its own `from_pretrained`."""
    import transformers

    if FAMILIES[family] != "qwen":
        samples = {name: sounds.wave(seconds, seed) for seed, (name, seconds) in enumerate(SOUNDS.items())}
        reads = "transformers.processing_utils.load_audio"  # which needs a library that is not here
        monkeypatch.setattr(reads, lambda path, **_: samples[Path(path).name])
        return transformers.AutoProcessor.from_pretrained(folder)
    from tests.video_processor import video_processor_class

    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    made_of = getattr(transformers, f"{name}Processor")
    videos = video_processor_class(monkeypatch, "qwen3_vl" if family == "qwen3_vl" else "qwen2_vl")
    monkeypatch.setattr(made_of, "check_argument_for_proper_class", lambda self, name, value: type(value))
    values, _ = made_of.get_processor_dict(folder)
    made = made_of.__new__(made_of)  # its base finds no class of videos without torchvision
    made.__init__(
        image_processor=transformers.AutoImageProcessor.from_pretrained(folder),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
        video_processor=videos(**VIDEO),
        chat_template=values.get("chat_template"),
    )
    return made


def write_media(folder: Path) -> None:
    """Images, sounds and a video that records name."""
    np.save(folder / "walk.npy", FRAMES)
    rng = np.random.default_rng(0)
    for name, size in IMAGES.items():
        Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), np.uint8)).save(folder / name)
    for seed, (name, seconds) in enumerate(SOUNDS.items()):
        (folder / name).write_bytes(wav(sounds.wave(seconds, seed)))


def job(family: str, folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    """The config of a job on a whole model's folder, `folder/whole`."""
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kind = '[model.projector]\nkind = "llava"\n[model.encoder]\nfeature_layer = -2\n' if family == "llava" else ""
    token = 'image_token = "<image>"\n' if family == "llava" else ""
    (folder / "job.toml").write_text(
        f'[model]\npretrained = "{folder / "whole"}"\n{kind}[tokenizer]\n{token}[data]\nsource = "{folder}"\n'
        "[training]\nsteps = 1\nseq_len = 2048\nglobal_batch_size = 1\n"
    )
    return load_config(folder / "job.toml", list(overrides))
