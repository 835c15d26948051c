"""What a chat template makes of a conversation: which parts of messages it shows, and the token that ends an answer."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmtrain.data.record_parts import placeholder
from mmtrain.data.tokenizer import PROBE, content_form, one_part
from mmtrain.errors import MMTrainError

ChatPart = dict[str, Any]
"""`type`, and for a text `text`."""


class Ending(NamedTuple):
    """How an answer ends."""

    token: int | None
    """The special token that is the last target of each answer, and that stops decoding; None: there is none."""
    behind: str
    """What the template writes behind an answer."""
    learned: int
    """How many characters of that are targets, up to the token; 0: the template does not write the token, so it is the
    label of an answer's last position, and not in the text."""

    def end(self, before: str, after: str) -> int:
        """The character at which the targets of an answer end. Args: before, after: the conversation up to the answer,
        and with it."""
        content = after.removesuffix(self.behind) if len(after) - len(self.behind) >= len(before) else after
        if self.learned and len(content) < len(after):
            return len(content) + self.learned
        return max(len(before), len(content.rstrip()))


def answer_ending(tokenizer: Any) -> Ending:
    """The token that ends an answer: the special token that the tokenizer's chat template writes behind it, else the
    tokenizer's end of text."""
    user, assistant = (content_form(tokenizer, role) for role in ("user", "assistant"))
    messages = [{"role": "user", "content": user("?")}, {"role": "assistant", "content": assistant(PROBE)}]
    behind = (_rendered(tokenizer, messages) or "").rpartition(PROBE)[2]
    text = behind.lstrip()
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for token, (_, end) in zip(encoded["input_ids"][:1], encoded["offset_mapping"][:1], strict=True):
        if token in (*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()):
            return Ending(int(token), behind, len(behind) - len(text) + end)
    token = tokenizer.eos_token_id
    return Ending(None if token is None else int(token), behind, 0)


def prompt_notes(tokenizer: Any) -> Iterator[str]:
    """What the log of a job says about its chat template: answers do not end, or do not begin where prompts end."""
    if answer_ending(tokenizer).token is None:
        yield (
            "no token ends an answer: the chat template writes no special token behind one, and the tokenizer has no "
            "eos_token, so a model does not learn to stop; name another template in tokenizer.chat_template"
        )
    user, assistant = (content_form(tokenizer, role) for role in ("user", "assistant"))
    question = {"role": "user", "content": user("What?")}
    prompt = _rendered(tokenizer, [question], add_generation_prompt=True)
    whole = _rendered(tokenizer, [question, {"role": "assistant", "content": assistant("red")}])
    if prompt is None or whole is None or not whole.startswith(prompt):
        return  # which is said of a record
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, whole))
    if after[: len(before)] != before:
        yield (
            f"the chat template's prompt ends with {prompt[-12:]!r}, whose last characters the tokenizer joins to the "
            "first word of an answer: training sees them as one token, a prompt without it; remove white space at the "
            "end of the prompt in tokenizer.chat_template"
        )


class Placeholder(NamedTuple):
    """What stands for an item of a kind in a text that the tokenizer reads."""

    token: str
    """The token of one feature."""
    text: str
    """The token with the markers around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A chat template that shows the text of messages, and every kind of content that a model reads as a part of its
    own: the tokenizer's, where it does this, else one that writes such parts into the text first.

    A processor of transformers that has this template makes the same text of the same parts.
    """

    text: str
    """The template in Jinja."""
    forms: Mapping[str, Callable[[str], Any]]
    """Role -> what makes of a text the content that its messages have."""
    breaks: frozenset[str]
    """Kinds behind which the template writes a line break."""
    moved: frozenset[str]
    """Kinds that the template shows before the text, wherever they are."""
    kinds: frozenset[str]
    """The kinds of content that the model reads."""
    placeholders: re.Pattern[str]
    """What stands for an item in the text of a record, with the backslash before one that is text."""

    @classmethod
    def of(
        cls, tokenizer: Any, placeholders: Mapping[str, Placeholder], roles: Iterable[str], unread: Iterable[str] = ()
    ) -> "ChatTemplate":
        """The template of a tokenizer.

        Args: placeholders: of each kind that the model reads. roles: of messages. unread: kinds that are text for it.

        Raises: ConfigError: it shows no text.
        """
        template = tokenizer.get_chat_template()
        forms = {role: content_form(tokenizer, role, parts_first=bool(placeholders)) for role in roles}
        around = {kind: _around(tokenizer, kind, placeholders) for kind in placeholders}
        shown = {kind: texts for kind, texts in around.items() if texts is not None}
        if len(shown) < len(placeholders):
            strings = [role for role, form in forms.items() if form is not one_part]
            template = _writing_parts(placeholders, sorted(shown), strings) + template
        marks = [re.escape(placeholder(kind)) for kind in (*placeholders, *unread)]
        return cls(
            text=template,
            forms=forms,
            breaks=frozenset(kind for kind, (behind, _) in shown.items() if behind.endswith("\n")),
            moved=frozenset(kind for kind, (_, moves) in shown.items() if moves),
            kinds=frozenset(placeholders),
            placeholders=re.compile(rf"(\\?)({'|'.join(marks) or '(?!)'})"),
        )

    def parts(self, text: str) -> Iterator[ChatPart]:
        """A text of a record as parts, cut at its placeholders.

        A line break between a placeholder and the text behind it is left out where the template writes one there; one
        before it where the template shows the item elsewhere.
        """
        before, begin = "", 0
        for mark in self.placeholders.finditer(text):
            before += text[begin : mark.start()]
            begin, kind = mark.end(), mark[2][1:-1]
            if mark[1] or kind not in self.kinds:
                before += mark[2]
                continue
            yield from _text(before.removesuffix("\n") if kind in self.moved else before)
            yield {"type": kind}
            before = ""
            begin += kind in self.breaks and text.startswith("\n", begin)
        yield from _text(before + text[begin:])

    def content(self, role: str, parts: list[ChatPart]) -> Any:
        """The content of a message. Args: parts: of it."""
        if any(part["type"] != "text" for part in parts) or (len(parts) > 1 and self.forms[role] is one_part):
            return parts
        return self.forms[role]("".join(part["text"] for part in parts))


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What the tokenizer's chat template makes of messages; None: it refuses them. Args: options: of its method."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except MMTrainError:
        raise
    except Exception:  # templates are programs: jinja errors, and any error of their filters
        return None


def _text(text: str) -> Iterator[ChatPart]:
    if text:
        yield {"type": "text", "text": text}


def _around(tokenizer: Any, kind: str, placeholders: Mapping[str, Placeholder]) -> tuple[str, bool] | None:
    """What a template writes between an item and the text behind it, and whether it shows an item behind a text before
    it; None: it shows no item of the kind, or not as one placeholder."""
    item, text = {"type": kind}, {"type": "text", "text": PROBE}
    token, tokens = placeholders[kind].token, {other.token for other in placeholders.values()}
    behind = []
    for content in ([item, text], [text, item]):
        shown = _rendered(tokenizer, [{"role": "user", "content": content}])
        if shown is None or PROBE not in shown or any(shown.count(t) != (t == token) for t in tokens):
            return None
        behind.append(shown.partition(token)[2].partition(PROBE))
    return behind[0][0], bool(behind[1][1])


def _writing_parts(placeholders: Mapping[str, Placeholder], shown: list[str], strings: list[str]) -> str:
    """The beginning of a template that lacks kinds of parts: it writes them into the text of their messages.

    Args: shown: kinds that the template itself shows. strings: roles whose content it takes as text alone.
    """
    texts = json.dumps({kind: item.text for kind, item in placeholders.items()})
    own = f"part['type'] in {json.dumps(shown)} and message['role'] not in {json.dumps(strings)}"
    is_list = "message['content'] is defined and message['content'] is sequence and message['content'] is not string"
    text = "([{'type': 'text', 'text': one.text}] if one.text else [])"
    return "\n".join(
        (
            "{%- set given = namespace(messages=[]) -%}",
            "{%- for message in messages -%}",
            f"{{%- if {is_list} -%}}",
            "{%- set one = namespace(parts=[], text='') -%}",
            "{%- for part in message['content'] -%}",
            f"{{%- if {own} -%}}",
            f"{{%- set one.parts = one.parts + {text} + [part] -%}}",
            "{%- set one.text = '' -%}",
            "{%- else -%}",
            f"{{%- set one.text = one.text + {texts}.get(part['type'], part['text']) -%}}",
            "{%- endif -%}",
            "{%- endfor -%}",
            f"{{%- set content = one.text if message['role'] in {json.dumps(strings)} else one.parts + {text} -%}}",
            "{%- set given.messages = given.messages + [dict(message, content=content)] -%}",
            "{%- else -%}",
            "{%- set given.messages = given.messages + [message] -%}",
            "{%- endif -%}",
            "{%- endfor -%}",
            "{%- set messages = given.messages %}\n",  # of which transformers removes the line break
        )
    )
