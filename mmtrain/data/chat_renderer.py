"""The text of a record's conversation, by the tokenizer's chat template, and where its answers are in it."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from mmtrain.data.chat_templates import ChatPart, ChatTemplate, Placeholder, answer_ending
from mmtrain.data.conversation_records import Record
from mmtrain.data.media import check_length, check_text
from mmtrain.data.record_keys import (
    CALLS,
    SHOWN,
    WEIGHTS,
    UnreadKeys,
    check_shown,
    encodes_arguments,
    is_learnt,
    unread,
    with_arguments,
)
from mmtrain.data.record_parts import PARTS, kind_of, placeholder
from mmtrain.errors import ConfigError, DataError, one_line, shown

ROLES = ("system", "user", "assistant")
"""Roles of messages; also "tool", with a chat template that names it."""


class ChatRenderer:
    """Renders conversations as a tokenizer reads them, with the tokens of images, videos and sounds.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        placeholders: of each kind of content that the model reads.
        text_kinds: kinds of content whose placeholders are text for it.
        max_text_bytes: of the text of a record.
    """

    def __init__(
        self, tokenizer: Any, placeholders: Mapping[str, Placeholder], text_kinds: Collection[str], max_text_bytes: int
    ) -> None:
        self._tokenizer = tokenizer
        self._placeholders = placeholders
        self._known = (*placeholders, *text_kinds)
        self._max_text_bytes = max_text_bytes
        self._roles = (*ROLES, "tool") if re.search("""["']tool["']""", str(tokenizer.chat_template)) else ROLES
        self.template = ChatTemplate.of(tokenizer, placeholders, self._roles, text_kinds)
        self.ending = answer_ending(tokenizer)
        self.unread = UnreadKeys()

    def prompt(self, where: str, record: Record) -> str:
        """A conversation up to the place where its next answer begins.

        Raises: DataError: the chat template refuses it, or does not show all of it. Args: where: it is, for errors.
        """
        messages = [self._message(where, m) for m in record.messages]
        text = self._template(where, messages, record.tools, add_generation_prompt=True)
        check_shown(messages, record.tools, str(self._tokenizer.chat_template), partial(self._template, where), where)
        return text

    def conversation(self, where: str, record: Record) -> tuple[str, list[tuple[int, int]]]:
        """The whole conversation, and the characters of each answer that is learnt.

        Raises: DataError: as `prompt`, or it has no answer that is learnt, or one that cannot be located.
        """
        self._note_unread(where, record)
        messages = [self._message(where, m) for m in record.messages]
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not answers or answers[0] == 0:
            raise DataError(
                f"{where}: its roles are {[m['role'] for m in messages]}; a conversation needs an "
                "assistant's answer, after a question"
            )
        answers = [index for index in answers if is_learnt(record.messages[index])]
        if not answers:
            keys = ", ".join(f"`{key}`" for key in WEIGHTS)
            raise DataError(f"{where}: none of its answers is learnt, as their {keys} say; leave the sample out")
        template = partial(self._template, where)
        check_shown(messages, record.tools, str(self._tokenizer.chat_template), template, where)
        whole = template(messages, record.tools)
        spans = []
        for index in answers:
            before = template(messages[:index], record.tools, add_generation_prompt=True)
            after = template(messages[: index + 1], record.tools) if index + 1 < len(messages) else whole
            if not (whole.startswith(after) and after.startswith(before)):
                raise DataError(
                    f"{where}: the tokenizer's chat template renders turn {index} differently with the turns "
                    "around it, so its answer cannot be located; use another template or one answer a sample"
                )
            spans.append((len(before), self.ending.end(before, after)))
        return whole, spans

    def _template(
        self,
        where: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Raises: DataError: the template refuses it. TooLongError: it has more text than can be tokenized."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                chat_template=self.template.text,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except ConfigError:  # it does not end
            raise
        except Exception as error:  # templates are programs: jinja errors, and any error of their filters
            raise DataError(f"{where}: the chat template refuses it: {one_line(error)}") from None
        check_length(text, self._max_text_bytes, f"{where}: its text")
        return check_text(text, f"{where}: its text")

    def _message(self, where: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the chat template takes it: whole, with the tokens of images, videos and sounds."""
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in self._roles:
            raise DataError(f"{where}: a message has the role {shown(role)}; the roles are {', '.join(self._roles)}")
        whole = dict(message)
        if "tool_calls" in whole and self._encodes_arguments:
            whole["tool_calls"] = with_arguments(whole["tool_calls"])
        if content is None and not whole.keys().isdisjoint(CALLS):
            return whole
        if not isinstance(content, str | list):
            what = f"content is a {type(content).__name__}" if content is not None else "`content` is absent or null"
            raise DataError(
                f"{where}: a message's {what}; write text or a list of parts (its keys are {', '.join(whole)})"
            )
        contents = content if isinstance(content, list) else [{"type": "text", "text": content}]
        parts = [part for given in contents for part in self._parts(where, role, given)]
        return {**whole, "content": self.template.content(role, parts)}

    @cached_property
    def _encodes_arguments(self) -> bool:
        user = {"role": "user", "content": self.template.content("user", [{"type": "text", "text": "?"}])}
        return encodes_arguments(partial(self._template, "a call"), user)

    def _note_unread(self, where: str, record: Record) -> None:
        """Notes the keys of a record that neither we nor the chat template read."""
        template, keys = str(self._tokenizer.chat_template), [*record.unread]
        for message in record.messages:
            passed = (key for key in message if key in template)
            keys += unread(message, ("role", "content", *WEIGHTS, *SHOWN, *passed), "message")
        self.unread.add(where, record.source, keys)

    def _parts(self, where: str, role: str, part: Any) -> Iterator[ChatPart]:
        """A part of a content as those that the template gets: a text is cut at its placeholders."""
        kind = kind_of(part)
        if kind in self._known:
            yield {"type": kind} if kind in self._placeholders else {"type": "text", "text": placeholder(str(kind))}
            return
        name = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if name == "text":
            if not isinstance(part.get("text"), str):
                raise DataError(
                    f"{where}: a part of type 'text' has `text` = {shown(part.get('text'))}; write its text there (its "
                    f"keys are {', '.join(map(str, part))})"
                )
            yield from self.template.parts(check_text(part["text"], f"{where}: the {role}'s text"))
            return
        supported = ", ".join(("text", *self._known, *PARTS))
        raise DataError(f"{where}: a part of its content is of type {shown(name)}; supported are {supported}")
