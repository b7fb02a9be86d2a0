"""The encoder's text for a question and the turns before it.

A template is a text with {prompt} and, where wanted, {system}: "User: {prompt}\\nAssistant:". One turn fills it once;
of several turns each earlier one is written by the same text with its answer after it, the newest last. So one text
says how one question, a conversation and `chat` look, and nothing but it has to be remembered: it is in the model's
folder beside the tokenizer. The decoder writes the bare response; no part of a template is ever learnt.

Source: prefixes as tasks: Raffel et al. 2020 (arXiv 1910.10683), section 2.4; the words of `alpaca`:
github.com/tatsu-lab/stanford_alpaca, without its preamble, which stands where {system} does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.language import join, say
from common.storage import read_text
from data.text.chat_templates import T5_TOKENS, as_jinja, glue_after, read_chat_template, render, special_tokens
from settings.declared import DataConfig
from settings.errors import UserError
from settings.fields import AUTO

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
Turn = tuple[str, str]  # role and text

_JINJA = re.compile(r"\{[%{]")
_FIELD = re.compile(r"\{([A-Za-z_]+)\}")
_SYSTEM_FIELD = re.compile(r"\{system\}\s*")


@dataclass(frozen=True)
class Template:
    """How turns become the encoder's text. Make one with `Template.load`, or read that of a folder.

    Args:
        text: holds {prompt} once, and {system} once at most. prefix: comes before everything, such as "summarize: ".
        name: what was asked for, for messages. turns: whether prompts with turns before them were learnt.
        jinja: a chat template, which says all the words but for the prefix; text is not used then.
        tokens: the tokenizer's special tokens, for a chat template.
    """

    text: str = TEMPLATES[PLAIN]
    prefix: str = ""
    name: str = PLAIN
    turns: bool = field(default=False, compare=False)
    jinja: str = ""
    tokens: dict[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def load(cls, name_or_text: str, prefix: str = "", tokens: Mapping[str, str] = T5_TOKENS) -> Template:
        """Find a template by name, or take a text as one; in a text, backslash and n are a line end.

        Args:
            tokens: the special tokens that a chat template may name.
        Raises:
            UserError: no such name, or a text without {prompt} or with an unknown place.
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
            return replace(template, turns=content.get("turns") is True)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                "{path}: cannot be read ({error}); copy the folder again, or delete the file", path=path, error=error
            ) from None

    def save(self, folder: str | Path) -> None:
        """Write it into an existing folder, for `read`; a plain one needs no file."""
        path = Path(folder) / FILE_NAME
        if self.is_plain:
            path.unlink(missing_ok=True)
            return
        facts = self.facts()
        if self.turns:
            facts["turns"] = True
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf8")

    @property
    def is_plain(self) -> bool:
        """Whether a prompt stands alone, so that there is nothing to remember."""
        return self == Template() and not self.turns

    def facts(self) -> dict[str, Any]:
        """What `read` needs, and what shards are known by."""
        tokens = {"special_tokens": self.tokens} if self.jinja else {}
        return {"prompt_template": self.name, "source_prefix": self.prefix, **tokens}

    def prompt(self, turns: Sequence[Turn], system: str | None = None) -> str:
        """Write turns for the encoder.

        Args:
            turns: role and text of each, the first first; roles "user", "assistant", and "system" for instructions that
                were given with the turns. The last one is the user's: it is to be answered.
            system: instructions for all turns; None: those of the turns, if any.
        Raises:
            ValueError: the last turn is not the user's.
        """
        if system is None:
            system = "\n".join(text for role, text in turns if role == SYSTEM)
        spoken = [turn for turn in turns if turn[0] != SYSTEM]
        if USER not in dict(spoken[-1:]):
            raise ValueError(say("the last turn must be the user's"))
        if self.jinja:
            rules = [(SYSTEM, system)] if system else []
            messages = [{"role": role, "content": text} for role, text in rules + spoken]
            return self.prefix + render(self.jinja, messages, self.tokens)
        written = self.prefix
        for role, text in spoken:
            if role == USER:
                written += self._filled(text, system)
                system = ""  # The rules stand once, at the top.
            else:
                written += f"{self._glue(written)}{text}\n"
        return written

    def question(self, written: str) -> str:
        """The newest question in a text that `prompt` has written; the whole text where it was cut or is none of those.

        Args:
            written: may have lost blanks at both ends.
        """
        before, after = self.around()
        body = written.removeprefix(self.prefix.strip()).rstrip()
        if not body.endswith(after.strip()):
            return written
        body = body.removesuffix(after.strip())
        at = body.rfind(before.strip()) if before.strip() else 0
        return written if at < 0 else body[at + len(before.strip()) :].strip()

    def around(self) -> tuple[str, str]:
        """What stands before and behind a question that is alone, but for the prefix."""
        if not self.jinja:
            before, after = self._filled("\0", "").split("\0")
            return before, after
        before, _, after = render(self.jinja, [{"role": USER, "content": "\0"}], self.tokens).partition("\0")
        return before, after

    def chat_template(self) -> str | None:
        """The same as Jinja, for other programs; None where a prompt stands alone."""
        if self.jinja:
            prefix = f"{{{{- {json.dumps(self.prefix, ensure_ascii=False)} -}}}}" if self.prefix else ""
            return prefix + self.jinja
        if self.is_plain:
            return None
        before_with_rules, after_with_rules = self.text.split("{prompt}")
        return as_jinja(*self.around(), before_with_rules, after_with_rules, self.prefix)

    def _filled(self, prompt: str, system: str) -> str:
        text = self.text if system else _SYSTEM_FIELD.sub("", self.text)
        before, after = text.split("{prompt}")
        return before.replace("{system}", system) + prompt + after.replace("{system}", system)

    def _glue(self, written: str) -> str:
        """What is between a question and its answer in the turns before."""
        if not written or written[-1].isspace():
            return ""
        return "\n" if self.text.endswith("{prompt}") else glue_after(written)


def template_of(data: DataConfig, tokenizer_dir: str | Path) -> Template:
    """The template that the settings ask for; auto: the one beside the tokenizer, else plain.

    Raises:
        UserError: the settings or the file beside the tokenizer are wrong.
    """
    saved = Template.read(tokenizer_dir)
    asks_for_chat_template = data.prompt_template == CHAT_TEMPLATE
    chat_template = read_chat_template(tokenizer_dir) if saved is None or asks_for_chat_template else None
    if saved is None:
        saved = replace(Template.load(chat_template or PLAIN), turns=chat_template is not None, tokens={})
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
    return replace(Template.load(name, prefix or "", tokens), turns=saved.turns)


def _unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")
