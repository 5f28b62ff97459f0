"""Guides for forced calls and formats accept the calls of each tool format, and nothing else."""

from __future__ import annotations

import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as fits

from opentinker.services.rollout_worker.tool_calls import FORMATS, beginning, parse, structure
from opentinker.shared.types.core import StopReason, Tool
from opentinker.shared.types.guide import Guide

ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [Tool(name=name, description="", parameters=ARGUMENTS) for name in ("add", "halve")]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": {"a": 1}}\n</tool_call>',
    "llama3_json": '{"name": "NAME", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": {"a": 1}}]',
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_forced_call_is_one_that_the_format_s_parser_reads(form: str) -> None:
    add, halve = (WRITTEN[form].replace("NAME", name) for name in ("add", "halve"))
    anyone = Grammar.from_structural_tag(structure(form, Guide(call=""), TOOLS))
    named = Grammar.from_structural_tag(structure(form, Guide(call="halve"), TOOLS))
    assert [fits(anyone, text) for text in (add, halve, "no call", add.replace("1", '"x"'))] == [
        True,
        True,
        False,
        False,
    ]
    assert [fits(named, text) for text in (add, halve)] == [False, True]
    (call,) = parse(form, add, TOOLS, stop=StopReason.EOS, turn=0).calls
    assert (call.name, call.arguments) == ("add", {"a": 1})
    assert add.startswith(beginning(form, "")) and add.startswith(beginning(form, "add"))


def test_a_format_is_forced_and_a_call_may_stand_in_its_place() -> None:
    alone = Grammar.from_structural_tag(structure("", Guide(schema=ARGUMENTS), []))
    either = Grammar.from_structural_tag(structure("hermes", Guide(schema=ARGUMENTS), TOOLS))
    call = WRITTEN["hermes"].replace("NAME", "add")
    assert [fits(alone, text) for text in ('{"a": 1}', "{}", call)] == [True, False, False]
    assert [fits(either, text) for text in ('{"a": 1}', "{}", call)] == [True, False, True]
