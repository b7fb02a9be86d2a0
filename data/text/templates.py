"""Prompt templates: how a question and the turns before it become the encoder's input text.

A template is a text with {prompt} and optionally {system}: "User: {prompt}\\nAssistant:". A single question fills it
once. In a conversation each question fills it once, followed by its answer, and the newest question comes last. So one
text defines the format of single questions, of conversations and of `chat`, and it is all that is saved, in the model's
folder next to the tokenizer. The decoder's targets are bare answers without any text of a template.

Source: task prefixes are from Raffel et al. 2020 (arXiv 1910.10683), section 2.4; the wording of `alpaca` is from
github.com/tatsu-lab/stanford_alpaca, with {system} in place of its fixed preamble.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data.text.chat_templates import T5_TOKENS, as_jinja, read_chat_template, render, separator_after, special_tokens
from settings.declared import DataConfig
from settings.errors import UserError
from settings.fields import AUTO
from support.language import join, say
from support.storage import read_text

USER = "user"
ASSISTANT = "assistant"
SYSTEM = "system"
FILE_NAME = "prompt_template.json"
PLAIN = "plain"
CHAT_TEMPLATE = "chat_template"
TEMPLATES = {
    PLAIN: "{system}\n{prompt}",
    "chat": "{system}\nUser: {prompt}\nAssistant:",
    "alpaca": "{system}\n\n### Instruction:\n{prompt}\n\n### Response:\n",
    "question": "question: {prompt}",
    "chat_zh": "{system}\n问：{prompt}\n答：",
}
Turn = tuple[str, str]  # (role, text)

_JINJA = re.compile(r"\{[%{]")
_FIELD = re.compile(r"\{([A-Za-z_]+)\}")
_SYSTEM_FIELD = re.compile(r"\{system\}\s*")


@dataclass(frozen=True)
class Template:
    """Converts turns to the encoder's text. Make one with `Template.load`, or `Template.read` it from a folder.

    Args:
        text: contains {prompt} exactly once, and {system} at most once.
        prefix: text before everything else, such as "summarize: ".
        name: what `load` was called with: a name in TEMPLATES, or the template itself. It is what `save` writes.
        has_turns: whether the model was trained on prompts that contain earlier turns.
        jinja: a Jinja chat template, used instead of `text`; the prefix still comes before it.
        tokens: the tokenizer's special tokens, which a chat template may refer to.
    """

    text: str = TEMPLATES[PLAIN]
    prefix: str = ""
    name: str = PLAIN
    has_turns: bool = field(default=False, compare=False)
    jinja: str = ""
    tokens: dict[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def load(cls, name_or_text: str, prefix: str = "", tokens: Mapping[str, str] = T5_TOKENS) -> Template:
        """Find a template by name, or make one from a text, in which the two characters backslash and n are a line end.

        Args:
            tokens: the special tokens that a chat template may name.
        Raises:
            UserError: no such name, or a text without {prompt} or with another field than {prompt} and {system}.
        """
        name = name_or_text.strip()
        prefix = _unescaped(prefix)
        if name in TEMPLATES:
            return cls(TEMPLATES[name], prefix, name)
        if _JINJA.search(name_or_text):
            return cls("", prefix, name_or_text, jinja=name_or_text, tokens=dict(tokens))
        text = _unescaped(name_or_text)
        fields = sorted(_FIELD.findall(text))
        unknown = sorted(set(fields) - {"prompt", SYSTEM})
        if not fields:
            message = (
                "is not a name of a template ({templates}, {chat_template}), no text with {{prompt}} in it and no Jinja"
            )
            problem = say(message, templates=join(", ", TEMPLATES), chat_template=CHAT_TEMPLATE)
        elif unknown:
            problem = say("has the unknown place {{{unknown}}}; allowed: {{prompt}} and {{system}}", unknown=unknown[0])
        elif fields not in (["prompt"], ["prompt", SYSTEM]):
            problem = say("needs {prompt} exactly once, and {system} once at most")
        else:
            return cls(text, prefix, text)
        raise UserError("--prompt_template = {name_or_text}, {problem}", name_or_text=name_or_text, problem=problem)

    @classmethod
    def read(cls, folder: str | Path) -> Template | None:
        """Read the template in a model's or tokenizer's folder; None where there is none.

        Raises:
            UserError: the file is broken.
        """
        path = Path(folder) / FILE_NAME
        try:
            content = json.loads(read_text(path))
            tokens = dict(content.get("special_tokens", {}))
            template = cls.load(str(content["prompt_template"]), str(content["source_prefix"]), tokens)
            return replace(template, has_turns=content.get("turns") is True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                "{path}: cannot be read ({error}); copy the folder again, or delete the file", path=path, error=error
            ) from None

    def save(self, folder: str | Path) -> None:
        """Write the template into an existing folder, for `read`; the file of a plain one is removed instead."""
        path = Path(folder) / FILE_NAME
        if self.is_plain:
            path.unlink(missing_ok=True)
            return
        content = self.as_dict()
        if self.has_turns:
            content["turns"] = True
        text = json.dumps(content, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf8")

    @property
    def is_plain(self) -> bool:
        """Whether this is the default template without prefix or earlier turns, which need not be saved."""
        return self == Template() and not self.has_turns

    def as_dict(self) -> dict[str, Any]:
        """The template as JSON: what `save` writes, and part of the key by which tokenized shards are reused."""
        tokens = {"special_tokens": self.tokens} if self.jinja else {}
        return {"prompt_template": self.name, "source_prefix": self.prefix, **tokens}

    def prompt(self, turns: Sequence[Turn], system: str | None = None) -> str:
        """The encoder's text for a conversation.

        Args:
            turns: (role, text) from the oldest to the newest, with the roles "user", "assistant" and "system". The last
                one is the user's: the question to answer.
            system: the system prompt; None: the texts of the system turns, if there are any.
        Raises:
            ValueError: the last turn is not the user's.
        """
        if system is None:
            system = "\n".join(text for role, text in turns if role == SYSTEM)
        dialogue = [turn for turn in turns if turn[0] != SYSTEM]
        if USER not in dict(dialogue[-1:]):
            raise ValueError(say("the last turn must be the user's"))
        if self.jinja:
            system_turns = [(SYSTEM, system)] if system else []
            messages = [{"role": role, "content": text} for role, text in system_turns + dialogue]
            return self.prefix + render(self.jinja, messages, self.tokens)
        result = self.prefix
        for role, text in dialogue:
            if role == USER:
                result += self._fill(text, system)
                system = ""  # Only the first question contains the system prompt.
            else:
                result += f"{self._answer_separator(result)}{text}\n"
        return result

    def question(self, encoder_text: str) -> str:
        """The newest question in a text that `prompt` returned; the whole text if it was truncated or made otherwise.

        Args:
            encoder_text: leading and trailing whitespace may be missing.
        """
        before, after = self.text_around_question()
        body = encoder_text.removeprefix(self.prefix.strip()).rstrip()
        if not body.endswith(after.strip()):
            return encoder_text
        body = body.removesuffix(after.strip())
        start = body.rfind(before.strip()) if before.strip() else 0
        return encoder_text if start < 0 else body[start + len(before.strip()) :].strip()

    def text_around_question(self) -> tuple[str, str]:
        """The text before and after a single question without system prompt; the prefix is left out."""
        if not self.jinja:
            before, after = self._fill("\0", "").split("\0")
            return before, after
        before, _, after = render(self.jinja, [{"role": USER, "content": "\0"}], self.tokens).partition("\0")
        return before, after

    def chat_template(self) -> str | None:
        """This template as a Jinja chat template, for other programs; None for a plain one."""
        if self.jinja:
            # A Jinja expression that prints the prefix: {{- "summarize: " -}}
            prefix = f"{{{{- {json.dumps(self.prefix, ensure_ascii=False)} -}}}}" if self.prefix else ""
            return prefix + self.jinja
        if self.is_plain:
            return None
        before_with_system, after_with_system = self.text.split("{prompt}")
        return as_jinja(*self.text_around_question(), before_with_system, after_with_system, self.prefix)

    def _fill(self, prompt: str, system: str) -> str:
        text = self.text if system else _SYSTEM_FIELD.sub("", self.text)
        before, after = text.split("{prompt}")
        return before.replace("{system}", system) + prompt + after.replace("{system}", system)

    def _answer_separator(self, text: str) -> str:
        """What separates the answer of an earlier turn from the text before it."""
        if not text or text[-1].isspace():
            return ""
        return "\n" if self.text.endswith("{prompt}") else separator_after(text)


def template_of(data: DataConfig, tokenizer_dir: str | Path) -> Template:
    """The template of the settings `prompt_template` and `source_prefix`.

    auto: the one saved next to the tokenizer, else the tokenizer's chat template, else plain.

    Raises:
        UserError: the settings or the file next to the tokenizer are wrong.
    """
    saved = Template.read(tokenizer_dir)
    asks_for_chat_template = data.prompt_template == CHAT_TEMPLATE
    chat_template = read_chat_template(tokenizer_dir) if saved is None or asks_for_chat_template else None
    if saved is None:
        saved = replace(Template.load(chat_template or PLAIN), has_turns=chat_template is not None, tokens={})
    name = saved.name if data.prompt_template == AUTO else data.prompt_template
    if asks_for_chat_template:
        if chat_template is None:
            raise UserError(
                "--prompt_template = {chat_template}, {tokenizer_dir} has none; allowed: {templates}, or a text with "
                "{{prompt}}",
                chat_template=CHAT_TEMPLATE,
                tokenizer_dir=tokenizer_dir,
                templates=join(", ", TEMPLATES),
            )
        name = chat_template
    prefix = saved.prefix if data.source_prefix == AUTO else data.source_prefix
    tokens = saved.tokens or T5_TOKENS | special_tokens(tokenizer_dir)
    # Naming another template does not change what the model was trained on.
    return replace(Template.load(name, prefix or "", tokens), has_turns=saved.has_turns)


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")
