"""`mmtrain generate` of a folder that somebody else made: one sentence on what is wrong, and nothing of it runs."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmtrain.commands.cli import main
from mmtrain.config.data import TokenizerConfig
from mmtrain.data import tokenizer_limits
from mmtrain.data.tokenizer import SHIPPED, load_tokenizer
from mmtrain.errors import DataError
from mmtrain.models.whole_files import read_whole, whole_class_config
from mmtrain.spec.composites import class_name
from tests.llava import LLAVAS, SPELLINGS, save_llava
from tests.strangers import CONFIG, KINDS, TOKENIZER, TOKENS, edited, save_stranger, weights
from tests.whole_models import tiny_whole

ASKED = ["--prompt", "what is it that you see in here?", "--max-new-tokens", "3"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stranger(tmp_path_factory.mktemp("published") / "theirs")


@pytest.fixture
def folder(tmp_path: Path, published: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "theirs"))


class Program:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def pickled(folder: Path) -> None:
    """Weights as transformers would unpickle them, and nothing else."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def outside(folder: Path) -> None:
    """The weights are a file next to the folder."""
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(name: str, count: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:count])

    return edit


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def template(text: str) -> Callable[[Path], None]:
    """The chat template, in whichever file it is."""

    def edit(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return edit


GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": 10 * "a"}
GROWING = {"type": "Sequence", "normalizers": 30 * [GROWS]}
SLOW = {"type": "Split", "pattern": {"Regex": "([a-z ]+)+$"}, "behavior": "Isolated", "invert": False}
NESTED = 3 * "{% for a in range(99999) %}" + 3 * "{% endfor %}"
IF_WHAT = "{%% if 'what' in messages[0]['content'] %%}%s{%% endif %%}{{ messages[0]['content'] }}"
THEIRS = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}


def nan(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(float("nan"))


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut weights": (cut("model.safetensors", -5), r"cannot be read as safetensors: it has \d+ bytes, and its header"),
    "no header": (cut("model.safetensors", 99), "cannot be read as safetensors: its 99 bytes do not hold its header"),
    "pickled weights": (pickled, r"there is no model\.safetensors"),
    "weights elsewhere": (outside, r"is refused: it names '\.\./outside\.safetensors'; weights are"),
    "a weight is missing": (weights(lambda t: t.pop(sorted(t)[3])), "has no weights for"),
    "a weight of another shape": (
        weights(lambda t: t.update({k: v[:1].clone() for k, v in list(t.items())[:1]})),
        r"has shape .* in the weights, but config\.json makes",
    ),
    "NaN weights": (weights(nan), "logits are not finite, so it has no answer"),
    "config is no JSON": (written(CONFIG, "{"), "is not valid JSON"),
    "config is a list": (written(CONFIG, "[]"), "holds no JSON object"),
    "unknown model": (edited(CONFIG, lambda c: c.update(model_type="timm_wrapper")), "no whole model that is known"),
    "unknown part": (
        edited(CONFIG, lambda c: c["text_config"].update(model_type="gemma")), r"model_type = 'gemma' for the part"
    ),
    "no parts": (edited(CONFIG, lambda c: c.update(vision_config=7)), "has no vision_config"),
    "odd sizes": (edited(CONFIG, lambda c: c["text_config"].update(hidden_size="a")), "hidden_size"),
    "other sizes": (edited(CONFIG, lambda c: c["text_config"].update(intermediate_size=96)), "in the weights, but"),
    "huge sizes": (edited(CONFIG, lambda c: c["text_config"].update(vocab_size=10**12)), "vocab_size"),
    "endless layers": (edited(CONFIG, lambda c: c["text_config"].update(num_hidden_layers=10**9)), "num_hidden_layers"),
    "odd rope": (edited(CONFIG, lambda c: c["text_config"].update(rope_parameters={"rope_type": 1})), "rope"),
    "odd token": (edited(CONFIG, lambda c: c.update(image_token_id="x")), "."),
    "quantized": (edited(CONFIG, lambda c: c.update(quantization_config={"quant_method": "fp8"})), "quantized"),
    "no tokenizer": (lambda folder: (folder / TOKENIZER).unlink(), "has no tokenizer; add"),
    "tokenizer is no JSON": (written(TOKENIZER, "{"), "is not valid JSON"),
    "tokenizer of another form": (written(TOKENIZER, "{}"), "cannot be loaded"),
    "no vocabulary": (edited(TOKENIZER, lambda t: t["model"].update(vocab={})), "tokenizer"),
    "text that grows": (edited(TOKENIZER, lambda t: t.update(normalizer=GROWING)), "refused: its normalizer"),
    "template that is no Jinja": (template("{% for %}"), "the chat template .* cannot be used"),
    "template without text": (template("hello"), "it shows no text of a user's message"),
    "template of code": (template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "cannot be used: .*unsafe"),
    "template without end": (template(NESTED), r"does not end within 0\.2 s"),
    "template that refuses": (template(IF_WHAT % "{{ raise_exception('no') }}"), "the chat template refuses it: no"),
    "template without end for this question": (template(IF_WHAT % NESTED), r"does not end within 0\.2 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_one_sentence(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = REFUSED[name]
    change(folder)
    monkeypatch.setattr(tokenizer_limits, "TEMPLATE_S", 0.2)
    assert main(["generate", str(folder), *ASKED]) == 2
    out, err = capsys.readouterr()
    assert out.strip() == ""
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("error: ") and len(line) < 1500
    assert re.search(said, line), line


def test_a_library_that_gives_up_is_one_sentence(tmp_path: Path) -> None:
    """A pattern that takes exponential time; the error of the library is no `Exception`."""
    folder = shutil.copytree(SHIPPED, tmp_path / "tokenizer")
    edited(TOKENIZER, lambda table: table.update(pre_tokenizer=SLOW))(folder)
    tokenizer = load_tokenizer(TokenizerConfig(path=str(folder)))
    with pytest.raises(DataError, match=r"^the tokenizer fails on 'what is it .*Onig.*; take the tokenizer from"):
        tokenizer("what is it that you see in here?", add_special_tokens=False)


HARMLESS: dict[str, Callable[[Path], None]] = {
    "as published": lambda folder: None,
    "kernels of the hub": edited(
        CONFIG,
        lambda c: [part.update(attn_implementation="stranger/kernel", _attn_implementation="stranger/kernel")
                   for part in (c, c["text_config"], c["vision_config"])],
    ),
    "code of its own": edited(CONFIG, lambda c: c.update(auto_map={"AutoModel": "theirs.Theirs"})),
    "adapters of another model": written(
        "adapter_config.json", json.dumps({"peft_type": "LORA", "base_model_name_or_path": "stranger/model"})
    ),
    "tokenizer of its own": edited(TOKENS, lambda t: t.update(THEIRS)),
    "generation settings": written("generation_config.json", '{"max_new_tokens": "a", "custom_generate": "x"}'),
    "a program": written("modeling.py", "raise SystemExit"),
    "pickled weights in addition": lambda folder: (folder / "pytorch_model.bin").write_bytes(
        pickle.dumps(Program(str(folder / "made")))
    ) and None,
}  # fmt: skip


def test_what_is_not_read_changes_nothing(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {}
    for name, change in HARMLESS.items():
        copy = shutil.copytree(published, tmp_path / name.replace(" ", "-"))
        change(copy)
        assert main(["generate", str(copy), *ASKED]) == 0, name
        answers[name] = capsys.readouterr().out
        assert not (copy / "made").exists()
    assert len(set(answers.values())) == 1, answers


def test_what_a_model_says_cannot_steer_the_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All its tokens spell a sequence that a terminal obeys."""
    steering = "\x1b]52;c;aGk=\x07\x9b2J\rline\n\tend"

    def rename(table: Any) -> None:
        model = table["model"]
        added = {token["content"] for token in table["added_tokens"]}
        model["vocab"] = {k if k in added else f"{k}{i}": i for k, i in model["vocab"].items()}
        model["merges"] = []
        table["decoder"] = {"type": "Replace", "pattern": {"Regex": r"\S+"}, "content": steering}

    edited(TOKENIZER, rename)(folder)
    questions = folder / "q.jsonl"
    questions.write_text(json.dumps({"question": "a\x9bb", "answer": steering}))
    for words in (["--prompt", "what?"], ["--questions", str(questions)]):
        assert main(["generate", str(folder), *words, "--max-new-tokens", "3"]) == 0
        out, err = capsys.readouterr()
        assert not set(out + err) & set("\x1b\x07\x9b\r"), ascii(out + err)
    assert json.loads(out)["reference"] == steering, "it is JSON still"


@pytest.mark.parametrize("kind", [*KINDS, *LLAVAS, *SPELLINGS])
def test_a_model_is_read_as_transformers_reads_it(tmp_path: Path, kind: str) -> None:
    import transformers

    if kind in KINDS:
        save_stranger(tmp_path, kind)
    else:
        save_llava(kind if kind in LLAVAS else "clip, llama", tmp_path, kind if kind in SPELLINGS else "fresh")
    config = whole_class_config(tmp_path)
    ours = read_whole(tmp_path, config)
    theirs = getattr(transformers, class_name(config.model_type)).from_pretrained(tmp_path)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor) and ours.state_dict()[name].dtype == tensor.dtype, name
    assert {n: b.tolist() for n, b in ours.named_buffers()} == {n: b.tolist() for n, b in theirs.named_buffers()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_have_the_dtype_that_transformers_gives_them(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also where a tensor of the file has another one."""
    import transformers

    tiny_whole("qwen2_5_vl").to(dtype).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = sorted(tensors)[0]
    save_file(tensors | {name: tensors[name].float()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path)
    ours = read_whole(tmp_path, whole_class_config(tmp_path))
    assert {p.dtype for p in ours.parameters()} == {p.dtype for p in theirs.parameters()} == {dtype}
