"""Jinja as transformers sets it up for chat templates, with bounds on what a template may take.

A template comes from whoever published the tokenizer. The sandbox lets it neither import nor reach into Python; its
length and that of its text are limited; and before it runs here it has rendered once in a child process whose processor
time and memory the system bounds.

Source: transformers, `utils/chat_template_utils.py`; Jinja, "Sandbox".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from support.child_process import MEMORY, TIME, ChildDied, call
from support.language import say

LONGEST_TEMPLATE = 64 * 1024  # letters
LONGEST_TEXT = 1024 * 1024  # letters of what is rendered; more is cut off, as no model reads so much
# Processor time and memory, that of the interpreter included; templates of published models take 0.1 to 0.3 s.
TRIAL_SECONDS = 5
TRIAL_BYTES = 128 * 1024**2


class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for programs that learn that alone; its text stays as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call of `_said`, whose scope is its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return caller()


def _raise(message: str) -> str:
    raise TemplateError(message)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@cache
def _compiled(source: str) -> Template:
    if len(source) > LONGEST_TEMPLATE:
        raise TemplateError(say("it is longer than {letters:,} letters", letters=LONGEST_TEMPLATE))
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def rendered(source: str, values: Mapping[str, Any]) -> str:
    """The text of a template, at most `LONGEST_TEXT` of it. Raises whatever the template does."""
    parts: list[str] = []
    size = 0
    for part in _compiled(source).generate(**values):
        parts.append(part)
        size += len(part)
        if size >= LONGEST_TEXT:
            break
    return "".join(parts)[:LONGEST_TEXT]


def try_in_child(source: str, values: Mapping[str, Any]) -> None:
    """Render a template in a child process.

    Raises:
        TemplateError: it takes too much time or memory. What else a template raises there, it raises here too, when it
            is rendered.
    """
    try:
        call(rendered, source, dict(values), max_cpu=TRIAL_SECONDS, max_bytes=TRIAL_BYTES, is_quiet=True)
    except ChildDied as died:
        if died.reason in (MEMORY, TIME):
            raise TemplateError(
                say("it takes more than {seconds} s or {size} MiB", seconds=TRIAL_SECONDS, size=TRIAL_BYTES // 1024**2)
            ) from None
