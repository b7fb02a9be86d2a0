"""Chat templates in Jinja: those of others are read in a sandbox, and ours are written so that others say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from config import load
from data.text import jinja_bounds
from data.text.chat_templates import read_chat_template, render
from data.text.templates import ASSISTANT, SYSTEM, TEMPLATES, USER, Template, Turn, template_of
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer
from settings.fields import UserError

THEIRS = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<U>{{ message['content'] }}</U>\n"
    "{% else %}<A>{{ message['content'] }}</A>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<A>{% endif %}"
)
TALKS: list[list[Turn]] = [
    [(USER, "你好")],
    [(SYSTEM, "be short"), (USER, 'a "quoted" question')],
    [(USER, "one "), (ASSISTANT, "two"), (USER, "three"), (ASSISTANT, "四\n五"), (USER, "six {prompt} {{ x }}")],
    [(SYSTEM, "a"), (SYSTEM, "b"), (USER, "c"), (ASSISTANT, "d"), (USER, "e")],
]
OURS = [*TEMPLATES, "Q: {prompt}\nA:", "[{prompt}] ({system})", "{prompt}\n"]


def messages(turns: list[Turn]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turns]


@pytest.mark.parametrize("prefix", ["", "summarize: "])
@pytest.mark.parametrize("name", OURS)
def test_ours_says_the_same_in_jinja(name: str, prefix: str) -> None:
    template = Template.load(name, prefix)
    source = Template(template.text, template.prefix, template.name, turns=True).chat_template()
    assert source is not None
    for turns in TALKS:
        assert render(source, messages(turns)) == template.prompt(turns)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "alpaca", "chat_zh"])
def test_transformers_says_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    tokenizer.template = Template.load(name, "x: ")
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for turns in TALKS:
        said = theirs.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
        assert said == tokenizer.template.prompt(turns)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json", "several"])
def test_theirs_is_read_and_kept(tmp_path: Path, file: str) -> None:
    byte_tokenizer().save(tmp_path)
    if file == "chat_template.jinja":
        (tmp_path / file).write_text(THEIRS)
    else:
        named = [{"name": "tools", "template": "x"}, {"name": "default", "template": THEIRS}]
        held = named if file == "several" else THEIRS
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": held}))
    for asked in ("auto", "chat_template"):
        template = template_of(load("train", {"prompt_template": asked, "train_file": "x"}).data, tmp_path)
        assert template.prompt([(USER, "a"), (ASSISTANT, "b"), (USER, "c")]) == "<U>a</U>\n<A>b</A>\n<U>c</U>\n<A>"
        assert template.question("<U>a</U>\n<A>b</A>\n<U>c</U>\n<A>") == "c"
    assert template.turns, "a chat template is for conversations"
    assert template_of(load("train", {"prompt_template": "plain", "train_file": "x"}).data, tmp_path) == Template()
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.template = template
    tokenizer.save(tmp_path / "next")
    assert template_of(load("train", {"train_file": "x"}).data, tmp_path / "next") == template
    assert read_chat_template(tmp_path / "next") == THEIRS


def test_a_plain_tokenizer_gets_none(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    assert read_chat_template(tmp_path) is None
    with pytest.raises(UserError, match="has none"):
        template_of(load("train", {"prompt_template": "chat_template", "train_file": "x"}).data, tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% for x in range(10**9) %}{% endfor %}",
        "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
        "{% for x in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * ['a'] }}",
        "{{ 7 ** 99999999 }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%(a)s' * 9999 % {'a': 'a' * 99999} }}",
        "{{ 'a'.center(10**10) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ 'a'|center(10**10) }}",
        "{{ lipsum(n=10**6) }}",
        "{{ [1, 2]|tojson(indent=10**9) }}",
        "{{ '\\n'|indent(10**9) }}",
        "{{ 1.5|round(10**8, 'ceil') }}",
        "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999)|replace('a', 'b' * 9999) }}",
        "{{ ('a' * 9999).join('b' * 9999) }}",
        "{{ ('b' * 9999)|join('a' * 9999) }}",
        "{{ ['a' * 9999] * 9999 }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
        "{% set x = 'a' * 9999999 %}{% for i in range(9999) %}{% if 'b' in x or x[1:] or x.find('b') %}{% endif %}{% endfor %}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ 'a\\t'.encode().expandtabs(10**9) }}",
        "{{ 'a'.encode().ljust(10**9, 'b'.encode()) }}",
        "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ a }}" * 2**20,
        "{{ raise_exception('no system turns') }}",
        "{% if %}",
    ],
)
def test_strangers_reach_nothing_and_do_not_last(source: str) -> None:
    with pytest.raises(UserError, match="cannot word these turns"):
        text = render(source, [{"role": "user", "content": "x"}])
        assert text == "never"


def test_values_in_lists_cost_what_looking_at_them_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    source, turns = "{{ [0] * 20000 == [0] * 20000 }}", [{"role": "user", "content": "x"}]
    assert render(source, turns) == "True"
    monkeypatch.setattr(jinja_bounds, "MOST_WORK", 200_000)
    with pytest.raises(UserError, match="does more than a template"):
        render(source, turns)


def test_long_conversations_are_no_strangers_tricks() -> None:
    turns = [{"role": role, "content": "some words " * 90} for role in ("user", "assistant") * 200]
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '> ' + m['content']|trim + '\n' }}{% endfor %}{{ messages|length ~ 1.5 ~ none }}"
    assert render(source, turns) == "".join(f"<{m['role']}> {m['content'].strip()}\n" for m in turns) + "4001.5None"
    assert len(render("{{ messages[0].content * 2000 }}", turns)) == 1024 * 1024, "no more is believed"


# of published models, in parts: slices, tests, calls of texts, macros, filters of lists
PUBLISHED = {
    "alternating": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message "
        "= messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false"
        " %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % "
        "2 == 0) %}!{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>"
        "\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['c"
        "ontent'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() +"
        " ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "thinking": (
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- \"\\n\" }}{{- tool | tojson }}{"
        "%- endfor %}{%- else %}{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0"
        "].content + '<|im_end|>\\n' }}{%- endif %}{%- endif %}{%- set ns = namespace(multi_step_tool=true, la"
        "st_query_index=messages|length - 1) %}{%- for message in messages[::-1] %}{%- set index = (messages|"
        'length - 1) - loop.index0 %}{%- if ns.multi_step_tool and message.role == "user" and message.content'
        " is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</too"
        "l_response>')) %}{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endi"
        "f %}{%- endfor %}{%- for message in messages %}{%- if message.content is string %}{%- set content = "
        "message.content %}{%- else %}{%- set content = '' %}{%- endif %}{%- if (message.role == \"user\") or ("
        "message.role == \"system\" and not loop.first) %}{{- '<|im_start|>' + message.role + '\\n' + content + "
        "'<|im_end|>' + '\\n' }}{%- elif message.role == \"assistant\" %}{%- set reasoning_content = '' %}{%- if"
        " message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}{%- e"
        "lse %}{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip"
        "('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\"
        "n') %}{%- endif %}{%- endif %}{%- if loop.index0 > ns.last_query_index %}{{- '<think>' + reasoning_c"
        "ontent.strip('\\n') + '</think>' + content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>' + message.rol"
        "e + '\\n' + content }}{%- endif %}{%- if message.tool_calls %}{%- for tool_call in message.tool_calls"
        " %}{%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}{{- tool_call.argume"
        "nts | tojson }}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_gen"
        "eration_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinki"
        "ng is false %}{{- '<think>' }}{%- endif %}{%- endif %}"
    ),
    "dense": (
        "{%- macro show(m, i) -%}{{ i }}:{{ m.role|upper }}={{ m['content']|trim|replace('a','bb')|indent(4) "
        "}};{%- endmacro -%}{% for m in messages if m.role != 'system' %}{{ show(m, loop.index) }}{{ ',' if n"
        "ot loop.last }}{{ loop.length }}{{ loop.previtem.role if loop.previtem is defined }}{% else %}none{%"
        " endfor %}{{ messages|map(attribute='content')|join('|') }}{{ messages|selectattr('role','equalto','"
        "user')|list|length }}{{ messages|rejectattr('role','equalto','user')|map(attribute='role')|list|firs"
        "t }}{% for k, v in {'a':1,'b':[2,3]}.items() %}{{ k ~ v }}{% endfor %}{% set x %}in {{ messages[0].c"
        "ontent[:3] }}{% endset %}{{ x|upper }}{{ '%02d' % 7 }}{{ 7 // 2 * 3 ** 2 }}{{ [1,2] + [3] }}{{ 'x' *"
        " 3 }}{{ (1, 2) }}{{ none }}{{ messages|length|tojson }}{{ undefined_thing }}{{ undefined_thing|defau"
        "lt('d') }}"
    ),
}
TURNS = [
    {"role": "system", "content": "be nice"}, {"role": "user", "content": "hello a\nb"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\nanswer"}, {"role": "user", "content": "again"},
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_counted_says_what_jinja_says(name: str) -> None:
    given = {"add_generation_prompt": True, "bos_token": "", "eos_token": "</s>", "tools": None, "documents": None}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(PUBLISHED[name])
    for turns in (TURNS, TURNS[1:], TURNS[1:2]):
        assert render(PUBLISHED[name], turns) == plain.render(messages=turns, **given)
