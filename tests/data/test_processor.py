import dataclasses
from typing import Any

import numpy as np
import pytest

from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.data.chat_templates import answer_ending, prompt_notes
from mmtrain.data.conversation_records import Record
from mmtrain.data.media import RawImage
from mmtrain.data.media_readers import vision_readers
from mmtrain.data.pixels import pixel_rules
from mmtrain.data.processor import Document, Processor
from mmtrain.data.tokenizer import load_tokenizer
from mmtrain.errors import DataError
from mmtrain.modality.geometry import image_geometry
from mmtrain.models.batch import IGNORE_INDEX
from tests.data.samples import png

TEMPLATES = {
    "chatml": None,
    "inst": (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}<|endoftext|>{% endif %}{% endfor %}"
    ),
    "parts": (  # as LLaVA's: shows the parts of a list, and nothing of a string
        "{% for m in messages %}{{ m['role'] | upper }}: "
        "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }} {% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "system": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def make_processor(template: str | None = None, eos_token: str | None = "<|im_end|>", **options: Any) -> Processor:
    tokenizer = load_tokenizer(TokenizerConfig())
    tokenizer.eos_token = eos_token
    if template:
        tokenizer.chat_template = template
    geometry = image_geometry({"model_type": "qwen2_vl"}, spatial_merge=2)
    data, vocabulary = DataConfig(source="x", **options), tokenizer.get_vocab()
    readers = vision_readers(TokenizerConfig(), geometry, pixel_rules("qwen2_vl"), data, vocabulary=vocabulary)
    return Processor(tokenizer, readers)


def record(*turns: Any, images: int = 0, role: str = "user") -> Record:
    roles = [role, "assistant"] * len(turns)
    messages = tuple({"role": r, "content": t} for r, t in zip(roles, turns, strict=False))
    return Record(sample=5, messages=messages, images=tuple(RawImage(data=png(60 + 28 * i, 60)) for i in range(images)))


def targets(processor: Processor, document: Document) -> list[str]:
    """The text of each answer that is learned."""
    out, at = [], 0
    labelled = [int(label) for label in document.labels if label != IGNORE_INDEX]
    for length in document.meta.answers:
        out.append(processor.tokenizer.decode(labelled[at : at + length]))
        at += length
    assert at == len(labelled) == document.meta.num_targets
    return out


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_answers_and_their_end_are_targets(name: str) -> None:
    processor = make_processor(TEMPLATES[name])
    document = processor.document(record("<image>What colour?", "blue", "And now?", "a red pie", images=1))
    end = {"inst": "<|endoftext|>"}.get(name, "<|im_end|>")
    assert [t.strip() for t in targets(processor, document)] == [f"blue{end}", f"a red pie{end}"]


def test_labels_are_shifted_by_one() -> None:
    document = make_processor().document(record("Hi", "blue"))
    ids, labels = document.input_ids.tolist(), document.labels.tolist()
    labelled = [t for t, label in enumerate(labels) if label != IGNORE_INDEX]
    assert [labels[t] for t in labelled] == [ids[t + 1] for t in labelled]
    assert labels[-1] == IGNORE_INDEX
    # The newline after <|im_end|> is no target, so the last labelled position is two before the end.
    assert labelled[-1] == len(ids) - 3


def test_placeholders_expand_to_one_run_per_image() -> None:
    processor = make_processor()
    document = processor.document(record("<image> and <image>?", "yes", images=2))
    assert [image.num_tokens for image in document.meta.images] == [4, 6]
    names = processor.tokenizer.convert_ids_to_tokens(document.input_ids.tolist())
    text = "".join(names)
    assert text.count("<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>") == 1
    assert text.count("<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>") == 1
    assert names.count("<|image_pad|>") == 10
    assert not any(label == processor.token_ids["image"] for label in document.labels)


def test_where_images_and_the_first_answer_begin() -> None:
    processor = make_processor()
    document = processor.document(record("<image> and <image>?", "yes", "why?", "so", images=2))
    ids, labels = document.input_ids, document.labels
    at = np.flatnonzero(ids == processor.token_ids["image"])
    assert [image.start for image in document.meta.images] == [at[0], at[4]]
    assert at[4] > at[0] + 4
    first = document.meta.prefix
    assert first == np.flatnonzero(labels != IGNORE_INDEX)[0] + 1
    assert processor.tokenizer.decode(ids[first : first + 1]) == "yes"
    assert processor.without_images(document).meta.prefix == 0
    text = processor.document(record("a", "b", "c", "one two three four"))
    assert processor.truncated(text, text.meta.num_tokens - 4).meta.prefix == text.meta.prefix > 0


def test_content_parts_are_the_same_as_placeholders() -> None:
    processor = make_processor()
    parts = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "!"}]
    by_parts = processor.document(record(parts, "yes", images=1))
    by_text = processor.document(record("See <image>!", "yes", images=1))
    assert by_parts.input_ids.tolist() == by_text.input_ids.tolist()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record("<image><image>?", "yes", images=1), "sample 5: 2 `<image>` placeholders .* but 1 images"),
        (record("?", "yes", images=2), "0 `<image>` placeholders .* but 2 images"),
        (record("only a question"), "a conversation needs an assistant's answer"),
        (record("hello", role="assistant"), "a conversation needs an assistant's answer, after a question"),
        (record(7, "yes"), "content is a int"),
        (record([{"type": "smell"}], "yes"), "of type 'smell'; supported are text, image, video, audio, image_url"),
        (record("?", "yes", role=3), "has the role 3; the roles are system, user, assistant$"),  # type: ignore[arg-type]
        (record("?", "yes", role="human"), "has the role 'human'; the roles are system, user, assistant$"),
        (record("?", "yes", "3", role="tool"), "has the role 'tool'; the roles are system, user, assistant$"),
        (record("?\ud800", "yes"), r"the user's text has a lone surrogate, '\\ud800', at 1; write the whole character"),
        (record("?", [{"type": "text", "text": "\udfff"}]), "the assistant's text has a lone surrogate"),
    ],
)
def test_refusals(bad: Record, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_processor().document(bad)


def test_a_tool_speaks_where_the_template_knows_it() -> None:
    rest = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    knows = make_processor(
        "{% for m in messages %}{% if m.role == 'tool' %}<tool>{{ m.content }}</tool>{% else %}"
        + rest.replace("{% endfor %}", "{% endif %}{% endfor %}")
        + prompt
    )
    turns = [("user", "2 + 1?"), ("assistant", "add(2, 1)"), ("tool", "3"), ("assistant", "It is 3.")]
    messages = tuple({"role": role, "content": text} for role, text in turns)
    document = knows.document(Record(sample=5, messages=messages, images=()))
    assert targets(knows, document) == ["add(2, 1)<|im_end|>", "It is 3.<|im_end|>"]
    unknown = dataclasses.replace(record("a"), messages=({"role": "human", "content": "a"}, *messages))
    with pytest.raises(DataError, match=r"has the role 'human'; the roles are system, user, assistant, tool$"):
        knows.document(unknown)


def test_images_in_an_answer_are_no_targets() -> None:
    processor = make_processor()
    document = processor.document(record("Draw <image> again", "like <image> this", images=2))
    at = np.flatnonzero(document.input_ids == processor.token_ids["image"])
    assert [image.num_tokens for image in document.meta.images] == [4, 6]
    assert at[4] > document.meta.prefix  # the second one is inside of the answer
    assert processor.token_ids["image"] not in document.labels
    (answer,) = targets(processor, document)
    assert answer == "like <|vision_start|><|vision_end|> this<|im_end|>"


def test_templates_that_refuse_or_rewrite_history_are_named() -> None:
    refusing = make_processor(
        "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    with pytest.raises(DataError, match="the chat template refuses it: roles must alternate"):
        refusing.document(record("a", "b"))
    rewriting = make_processor(
        "{% for m in messages %}{{ m['content'] if loop.last else 'old' }};{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(DataError, match="renders turn 1 differently"):
        rewriting.document(record("a", "b", "c", "d"))


def test_a_model_without_encoder_takes_text_alone() -> None:
    readers = vision_readers(TokenizerConfig(), None, None, DataConfig(source="x"), vocabulary={})
    processor = Processor(load_tokenizer(TokenizerConfig()), readers)
    assert processor.document(record("Hi", "yes")).meta.images == ()
    with pytest.raises(DataError, match="1 images, but the model has no encoder of images; add"):
        processor.document(record("<image>", "yes", images=1))


def test_truncation_keeps_the_first_tokens_and_their_labels() -> None:
    processor = make_processor()
    whole = processor.document(record("a", "b", "c", "one two three four"))
    cut = processor.truncated(whole, whole.meta.num_tokens - 4)
    assert cut.input_ids.tolist() == whole.input_ids.tolist()[:-4]
    assert cut.labels.tolist() == [*whole.labels.tolist()[: len(cut.labels) - 1], IGNORE_INDEX]
    assert cut.meta.answers[0] == whole.meta.answers[0]
    assert 0 < cut.meta.answers[1] < whole.meta.answers[1]
    assert sum(cut.meta.answers) == cut.meta.num_targets
    with pytest.raises(DataError, match="it has no answer left"):
        processor.truncated(whole, 3)
    with pytest.raises(DataError, match="a sample with images, videos or sounds is not cut"):
        processor.truncated(processor.document(record("<image>", "yes", images=1)), 5)


def test_text_alone_of_a_document_has_no_target() -> None:
    processor = make_processor()
    text = processor.without_images(processor.document(record("<image>?", "yes", images=1)))
    assert text.meta.num_targets == 0
    assert text.meta.images == ()
    assert processor.token_ids["image"] not in text.input_ids
    assert len(text.input_ids) == text.meta.num_tokens > 0


def test_pixels_follow_the_metadata_and_blank_hides_them() -> None:
    document = make_processor().document(record("<image><image>", "yes", images=2))
    seen, hidden = make_processor().pixels(document), make_processor(blank_images=True).pixels(document)
    assert [len(p) for p in seen] == [len(p) for p in hidden] == [i.num_patches for i in document.meta.images]
    assert all(p.std() > 0.5 for p in seen)
    for pixels in hidden:
        assert pixels.reshape(-1, 3, 2 * 14 * 14).std(dim=(0, 2)).max() == 0


ENDS: dict[str, tuple[str, str]] = {
    "a special token": ("{{ m.content }}<|im_end|>\n", "<|im_end|>"),
    "behind white space": ("{{ m.content }} <|im_end|>\n", " <|im_end|>"),
    "two special tokens": ("{{ m.content }}<|im_end|><|vision_end|>\n", "<|im_end|>"),
    "nothing": ("{{ m.content }} ", "<|endoftext|>"),
    "not even a space": ("{{ m.content }}", "<|endoftext|>"),
    "ordinary characters": ("{{ m.content }} ### ", "<|endoftext|>"),
    "only between turns": (
        "{{ m.content }}{% if not loop.last and m.role == 'assistant' %}<|im_end|>{% endif %}",
        "<|endoftext|>",
    ),
}
"""How a template ends a message -> what is learnt behind an answer."""


@pytest.mark.parametrize("name", ENDS)
def test_each_answer_ends_with_the_token_that_stops_decoding(name: str) -> None:
    written, learnt = ENDS[name]
    prompt = "{% if add_generation_prompt %}assistant:{% endif %}"
    template = "{% for m in messages %}{{ m.role }}:" + written + "{% endfor %}" + prompt
    processor = make_processor(template, eos_token="<|endoftext|>")
    document = processor.document(record("a # b", "c < d # e", "and", "a bar"))
    assert targets(processor, document) == [f"c < d # e{learnt}", f"a bar{learnt}"]
    stop = answer_ending(processor.tokenizer).token
    assert processor.tokenizer.decode([stop]) == learnt.strip() and processor.ending.token == stop
    assert (document.labels == stop).sum() == 2
    at = np.flatnonzero(document.labels == stop)
    following = [int(token) for token in document.input_ids[at[:-1] + 1]]
    assert all((token == stop) == (learnt != "<|endoftext|>") for token in following), "the text stays as it is served"
    cut = processor.truncated(document, at[0] + 2)
    assert cut.labels.tolist() == [*document.labels[: at[0] + 1].tolist(), IGNORE_INDEX]
    assert cut.meta.answers == document.meta.answers[:1]
    assert processor.ending.token not in processor.prompt(record("a")).input_ids[-3:]


@pytest.mark.parametrize(("answer", "learnt"), [("", ""), ("like <image>", "like <|vision_start|><|vision_end|>")])
def test_an_answer_without_text_at_its_end_has_the_token_too(answer: str, learnt: str) -> None:
    text = "{% for m in messages %}{{ m.role }}:" + "{{ m.content }} {% endfor %}"
    processor = make_processor(text + "{% if add_generation_prompt %}assistant:{% endif %}", eos_token="<|endoftext|>")
    document = processor.document(record("a", answer, "b", "red", images=answer.count("image")))
    assert targets(processor, document) == [f"{learnt}<|endoftext|>", "red<|endoftext|>"]
    stops = np.flatnonzero(document.labels == processor.ending.token)
    assert processor.tokenizer.decode(document.input_ids[: stops[0] + 1]).endswith("<|vision_end|>" if answer else "t:")


def test_an_end_that_nothing_writes_is_one_line() -> None:
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
    silent = make_processor(text + "{% if add_generation_prompt %}assistant: {% endif %}", eos_token=None)
    assert answer_ending(silent.tokenizer).token is None
    assert targets(silent, silent.document(record("a", "red"))) == [" red"]
    notes = list(prompt_notes(silent.tokenizer))
    assert [note.partition(":")[0].partition(" '")[0] for note in notes] == [
        "no token ends an answer", "the chat template's prompt ends with"
    ]  # fmt: skip
    assert list(prompt_notes(make_processor().tokenizer)) == []


def test_content_that_a_template_leaves_out_is_named() -> None:
    shows = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}{% if m.role == 'user' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>"
        "{% endfor %}"
    )
    with pytest.raises(DataError, match="the chat template shows 1 of the 2 images of its messages; name another"):
        make_processor(shows).document(record("<image>?", "like <image> this", images=2))


@pytest.mark.parametrize("form", ["text", "a list"])
def test_a_template_without_parts_gets_them_as_text(form: str) -> None:
    """It then makes the same of a list of parts, as a server passes it, as of the text with tokens in it."""
    shown = "m.content" if form == "text" else "m.content[0].text"
    template = "{% for m in messages %}[{{ m.role }}]{{ " + shown + " + '<|im_end|>' }}{% endfor %}"
    processor = make_processor(template)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    parts = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}]
    content: Any = f"a {image} b" if form == "text" else [{"type": "text", "text": f"a {image} b"}]
    expected, ours = (
        processor.tokenizer.apply_chat_template([{"role": "user", "content": c}], chat_template=t, tokenize=False)
        for c, t in ((content, template), (parts, processor.renderer.template.text))
    )
    assert ours == expected == f"[user]a {image} b<|im_end|>"
    tokens = processor.document(record("a <image> b", "c", images=1)).input_ids
    whole = expected.replace("<|image_pad|>", "<|image_pad|>" * 4) + "[assistant]c<|im_end|>"
    assert processor.tokenizer.decode(tokens) == whole


def test_a_backslash_makes_text_of_a_placeholder() -> None:
    processor = make_processor()
    assert list(processor.renderer.template.parts("a \\<image> \\<video> <audio> <image>b")) == [
        {"type": "text", "text": "a <image> <video> <audio> "}, {"type": "image"}, {"type": "text", "text": "b"}
    ]  # fmt: skip
