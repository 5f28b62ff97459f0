"""Tool calls in the formats of four families of models: parsing, and the prompt that follows them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.tool_calls import FORMATS, MAX_CALLS, ParsedReply, parse, recognise
from opentinker.shared.data.light_tokenizer import LightTokenizer
from opentinker.shared.types import codec
from opentinker.shared.types.core import Message, StopReason, Tool, ToolCall
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Span
from tests.support.factories import V0

ADD = Tool(
    name="add",
    description="Add two numbers.",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a"],
    },
)
CALL = '{"name": "add", "arguments": {"a": 1}}'
WRITTEN = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
}


def said(form: str, text: str, stop: StopReason = StopReason.EOS) -> ParsedReply:
    return parse(form, text, [ADD], stop=stop, turn=3)


def called(form: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    found = said(form, text)
    assert found.problem == ""
    return [(call.name, call.arguments) for call in found.calls]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_call_is_read_in_every_format_alone_and_within_text(form: str) -> None:
    assert called(form, WRITTEN[form]) == [("add", {"a": 1})]
    assert called(form, f"I add.\n{WRITTEN[form]}") == [("add", {"a": 1})]
    assert called(form, "It is 3, {surely}.") == []


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_several_calls_of_a_turn_have_ids_of_their_own(form: str) -> None:
    found = said(form, WRITTEN[form] + "\n" + WRITTEN[form])
    assert [call.id for call in found.calls] == ["t00003n00", "t00003n01"]
    assert "at most 8" in said(form, WRITTEN[form] * (MAX_CALLS + 1)).problem


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"<tool_call>[{CALL}, {CALL}]</tool_call>"),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]"),
        ("mistral", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]add{"a": 1}'),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}'),
        ("llama3_json", f"<|python_tag|>{CALL}; {CALL}"),
    ],
)
def test_variants_of_a_family_are_read_too(form: str, text: str) -> None:
    assert called(form, text) == [("add", {"a": 1})] * 2


def test_a_value_of_any_depth_is_read_or_said_to_be_wrong() -> None:
    for depth in range(1, sys.getrecursionlimit() + 50):
        nested = "[" * depth + "]" * depth
        assert said("mistral", f"[TOOL_CALLS] [{nested}]").problem
        assert said("hermes", f'<tool_call>{{"name": "add", "arguments": {nested}}}</tool_call>').problem


def test_arguments_without_quotation_marks_get_the_type_of_the_schema() -> None:
    text = (
        "<tool_call><function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=note>\n12\n</parameter>\n"
        '<parameter=other>\n{"x": [1]}\n</parameter>\n</function></tool_call>'
    )
    assert called("qwen3_coder", text) == [("add", {"a": 12, "note": "12", "other": {"x": [1]}})]


@pytest.mark.parametrize(
    ("form", "text", "problem"),
    [
        ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not valid JSON: Expecting property name"),
        ("hermes", f"<tool_call>{CALL} and so on</tool_call>", "nothing may follow the JSON"),
        ("hermes", "<tool_call>add(1)</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call></tool_call>", "has no end"),
        ("hermes", "<tool_call>3</tool_call>", "must be a JSON object, not 3"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', '"name" and "arguments"; there are: ["name"]'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "does not name its tool"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', 'must be a JSON object, not "1"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON number"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1%s}}</tool_call>' % ("0" * 30), "cannot be sent"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1%s}}</tool_call>' % ("0" * 9000), "not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "cannot be sent"),
        ("hermes", "<tool_call>" + "[" * 100_000, "not valid JSON"),
        ("hermes", f"<tool_call>{CALL}</tool_call><tool_call>", "has no end"),
        ("llama3_json", '{"name": "add", "parameters": 3}', "must be a JSON object, not 3"),
        ("llama3_json", '{"name": "add", parameters}', "not valid JSON"),
        ("llama3_json", "<|python_tag|>print(1)", "must be a JSON object, not 'print(1)'"),
        ("mistral", "[TOOL_CALLS] add me", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add", "has no arguments"),
        ("qwen3_coder", "<tool_call>add</tool_call>", "holds one <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=add>a=1</function></tool_call>", "was expected at 'a=1'"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_with_how_to_do_it(form: str, text: str, problem: str) -> None:
    found = said(form, text)
    assert problem in found.problem
    assert FORMATS[form].example in found.problem
    assert found.calls == []


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_call_that_the_turn_s_limit_cut_off_is_told_so(form: str) -> None:
    for cut in range(1, len(WRITTEN[form])):
        text = "so: " + WRITTEN[form][:cut]
        found = said(form, text, StopReason.LENGTH)
        assert found.problem in ("", "the tool call was cut off, because the turn was too long; be shorter")
        assert not (found.problem and found.calls)
    assert found.problem or found.calls


@given(text=st.text(alphabet='<tool_call>/{}[]"name:argu,ments1\\ \n=|fp', max_size=80), tag=st.booleans())
def test_no_text_is_a_crash_and_every_call_can_be_sent(text: str, tag: bool) -> None:
    for form in FORMATS:
        opening = {"mistral": "[TOOL_CALLS]", "llama3_json": '{"name":'}.get(form, "<tool_call>") if tag else ""
        codec.encode(said(form, opening + text))


@pytest.mark.vllm
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_vllm_reads_the_same_calls(form: str) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    vocabulary = {"[TOOL_CALLS]": 0, "<|python_tag|>": 1, "<tool_call>": 2, "</tool_call>": 3, "x": 4}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    described = {"name": ADD.name, "description": ADD.description, "parameters": ADD.parameters}
    request = ChatCompletionRequest.model_validate(
        {"messages": [], "model": "m", "tools": [{"type": "function", "function": described}]}
    )
    parser = ToolParserManager.get_tool_parser(form)(tokenizer, request.tools)
    for text in (WRITTEN[form], f"Well. {WRITTEN[form]}", "No call."):
        theirs = parser.extract_tool_calls(text, request)
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in theirs.tool_calls]
        assert called(form, text) == calls


# --- prompts ------------------------------------------------------------------------------------------------------

QWEN = """
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Write <tool_call> around a call.<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """<|begin|>
{%- if tools %}<|head|>system<|/head|>Environment: ipython
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}<|eot|>{% endif %}
{%- for m in messages %}
{%- if m.tool_calls is defined %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|head|>assistant<|/head|>
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>
{%- elif m.role == "tool" %}<|head|>ipython<|/head|>
{{ m.content | tojson }}<|eot|>
{%- else %}<|head|>{{ m.role }}<|/head|>
{{ m.content }}<|eot|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|head|>assistant<|/head|>
{% endif %}"""
MISTRAL = """
{%- set ns = namespace(user=false) %}
{%- for m in messages %}
{%- if m.role == "user" %}
{%- if ns.user %}{{ raise_exception("roles must alternate") }}{% endif %}
{%- set ns.user = true %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]
{%- elif m.role == "tool" %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception("an id has 9 characters") }}
{%- endif %}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %}
{%- set ns.user = false %}
{%- if m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("an id has 9 characters") }}{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]<|eot|>
{%- else %}{{ m.content }}<|eot|>{% endif %}
{%- endif %}
{%- endfor %}"""
TEMPLATES = {"hermes": (QWEN, "<|im_end|>"), "llama3_json": (LLAMA, "<|eot|>"), "mistral": (MISTRAL, "<|eot|>")}
SPECIAL = [
    "<|im_end|>",
    "<|im_start|>",
    "<|eot|>",
    "<|head|>",
    "<|/head|>",
    "<|begin|>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
]


def tokenizer_of(template: str, end: str) -> PreTrainedTokenizerFast:
    """A character per token, and the markup of chats."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["<unk>", *characters])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, chat_template=template)


def renderer_of(form: str) -> tuple[Renderer, PreTrainedTokenizerFast]:
    tokenizer = tokenizer_of(*TEMPLATES[form])
    return Renderer(tokenizer, "model", frozenset([tokenizer.eos_token_id])), tokenizer


def spoken(text: str, last_logprob: float = -0.5) -> Completion:
    """A turn in the hermes tokenizer's tokens, which an end of turn closes."""
    _, tokenizer = renderer_of("hermes")
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    logprobs = [-0.5] * (len(ids) - 1) + [last_logprob]
    return Completion(ids=ids, logprobs=logprobs, spans=[Span(0, len(ids), V0)], stop=StopReason.EOS)


def result(place: int, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=f"t00000n{place:02d}", name="add")


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("hermes", "\n<|im_start|>user<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("llama3_json", '<|head|>ipython<|/head|>\n"3"<|eot|><|head|>assistant<|/head|>\n'),
        ("mistral", '[TOOL_RESULTS]{"content": "3", "call_id": "t00000n00"}[/TOOL_RESULTS]'),
    ],
)
def test_what_a_tool_said_follows_the_end_of_the_turn_that_called_it(form: str, expected: str) -> None:
    renderer, tokenizer = renderer_of(form)
    assert tokenizer.decode(renderer.extend(True, [result(0, "3")])) == expected
    assert tokenizer.decode(renderer.extend(False, [result(0, "3")])) == TEMPLATES[form][1] + expected


@pytest.mark.parametrize("form", sorted(TEMPLATES))
def test_a_played_dialogue_has_the_tokens_of_the_template_s_own_rendering(form: str) -> None:
    """What was sampled, and what came between, is what the template writes for the whole of it."""
    renderer, tokenizer = renderer_of(form)
    messages = [Message(role="user", content="add")]
    call = ToolCall(id="t00000n00", name="add", arguments={"a": 1})
    whole = renderer.prompt([*messages, Message(role="assistant", tool_calls=[call]), result(0, "3")], [ADD])
    prompt = renderer.prompt(messages, [ADD])
    after = renderer.extend(True, [result(0, "3")])
    assert whole[: len(prompt)] == prompt
    assert whole[-len(after) :] == after
    sampled = whole[len(prompt) : -len(after)]
    assert sampled[-1] == tokenizer.eos_token_id
    found = renderer.said(sampled, [ADD], stop=StopReason.EOS, turn=0)
    assert found == ParsedReply(calls=[call])


@pytest.mark.parametrize("form", sorted(TEMPLATES))
def test_several_results_and_words_of_a_user_follow_too(form: str) -> None:
    renderer, tokenizer = renderer_of(form)
    both = tokenizer.decode(renderer.extend(True, [result(0, "3"), result(1, "4")]))
    assert both.index("3") < both.index("4")
    assert "hello" in tokenizer.decode(renderer.extend(True, [Message(role="user", content="hello")]))


@pytest.mark.parametrize("form", sorted(TEMPLATES))
def test_the_light_tokenizer_renders_tools_as_transformers_does(form: str, tmp_path: Path) -> None:
    renderer, tokenizer = renderer_of(form)
    tokenizer.save_pretrained(tmp_path)
    light = Renderer.load_light(str(tmp_path), "model")
    messages = [Message(role="user", content="<add> & é")]
    assert light.prompt(messages, [ADD]) == renderer.prompt(messages, [ADD])
    assert light.extend(True, [result(0, "3")]) == renderer.extend(True, [result(0, "3")])
    assert LightTokenizer(tmp_path).chat_template == tokenizer.chat_template
    assert light.tool_format == form


def test_formats_are_recognised_by_the_template_that_teaches_them() -> None:
    for form, (template, _) in TEMPLATES.items():
        assert recognise(template) == form
    assert recognise("<tool_call>\n<function=...>") == "qwen3_coder"
    assert recognise("{{ messages }}") is None


def test_a_template_that_tells_of_no_tools_or_of_no_known_format_fails_the_job() -> None:
    silent = tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}", "<|eot|>")
    strange = tokenizer_of("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "<|eot|>")
    ends = frozenset([silent.eos_token_id])
    hello = [Message(role="user", content="hello")]
    with pytest.raises(JobFailed, match="says nothing of the tools"):
        Renderer(silent, "model", ends, "hermes").prompt(hello, [ADD])
    with pytest.raises(JobFailed, match=r"set model\.tool_format to one of hermes, llama3_json"):
        Renderer(strange, "model", ends).prompt(hello, [ADD])
    assert Renderer(strange, "model", ends, "hermes").prompt(hello, [ADD])
    with pytest.raises(JobFailed, match="no end-of-turn token after"):
        open_ended = QWEN.replace("endfor %}<|im_end|>", "endfor %}")
        Renderer(tokenizer_of(open_ended, "<|eot|>"), "model", ends).extend(True, [result(0, "3")])
