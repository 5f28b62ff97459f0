"""Episodes and rendering: exact tokens, masks and spans; budgets; a reason for every ending."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from opentinker.services.rollout_worker.engines.base import Completion
from opentinker.services.rollout_worker.engines.toy import ToyEngine
from opentinker.services.rollout_worker.episode import turn_seed
from opentinker.services.rollout_worker.episode_protocol import described_wait
from opentinker.services.rollout_worker.renderer import Renderer
from opentinker.services.rollout_worker.token_stream import merge
from opentinker.shared.spec import ToySpec
from opentinker.shared.types.core import Ending, Image, Message, StopReason, Text, Tool, ToolCall
from opentinker.shared.types.env_protocol import OpenSession, SessionReply
from opentinker.shared.types.errors import JobFailed
from opentinker.shared.types.trajectories import Span
from tests.support.factories import V0
from tests.unit.rollout_worker.scripted_episode import (
    EOS,
    V1,
    Chars,
    Env,
    Script,
    episode,
    failure_of,
    read_with,
    renderer,
    reply,
    say,
)


async def test_plain_text_goes_on_by_no_template_and_begins_as_the_tokenizer_begins() -> None:
    env = Env([reply(prompt_text="hi "), reply(prompt_text=" and "), reply(done=True)])
    engine = Script([say("ab", stop=StopReason.LENGTH), say("c$")])
    (trajectory,) = await episode(engine, env).run()
    assert trajectory.ids.tolist() == Chars().encode("hi ab and c$")
    assert trajectory.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    asked: list[bool] = []

    class Begins(Chars):
        def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
            asked.append(add_special_tokens)
            return super().encode(text)

    plain = Renderer(Begins(), "model", frozenset({EOS}))
    assert plain.plain("a", first=True) == plain.plain("a", first=False) and asked == [True, False]


async def test_two_turns_have_the_template_s_tokens_and_exact_masks() -> None:
    env = Env([reply("hi"), reply("more", reward=0.25), reply(reward=1.0, done=True, metrics={"exact": 1.0})])
    engine = Script([say("ab$"), say("c$")])
    (trajectory,) = await episode(engine, env).run()
    text = "<u>hi$\n<a>ab$\n<u>more$\n<a>c$"
    assert trajectory.ids.tolist() == Chars().encode(text)
    assert "".join(c for c, m in zip(text, trajectory.mask, strict=True) if m) == "ab$c$"
    assert trajectory.logprobs[trajectory.mask == 1].tolist() == [-0.5] * 5
    assert (trajectory.reward, trajectory.ending, trajectory.metrics) == (1.25, Ending.ENV_DONE, {"exact": 1.0})
    assert [t.reward for t in trajectory.turns] == [0.25, 1.0]
    assert env.steps == [(0, "ab", StopReason.EOS), (1, "c", StopReason.EOS)]
    assert env.closed == 0  # a session that is done closes itself
    trajectory.check()


async def test_turn_cut_by_its_budget_is_stepped_and_closed_by_the_template() -> None:
    env = Env([reply("q"), reply("again"), reply(done=True)])
    engine = Script([say("abc", StopReason.LENGTH), say("d$")])
    (trajectory,) = await episode(engine, env, rollout__max_tokens_per_turn=3).run()
    assert trajectory.ids.tolist() == Chars().encode("<u>q$\n<a>abc$\n<u>again$\n<a>d$")
    assert env.steps[0] == (0, "abc", StopReason.LENGTH)
    assert [s.max_tokens for _, s in engine.asked] == [3, 3]


async def test_plain_mode_adds_no_markup() -> None:
    env = Env([reply("472="), reply("8="), reply(done=True)])
    (trajectory,) = await episode(Script([say("472$"), say("8$")]), env, mode="plain").run()
    assert trajectory.ids.tolist() == Chars().encode("472=472$8=8$")


async def test_sampling_settings_of_the_spec_reach_the_engine() -> None:
    engine = Script([say("x$")])
    spec: dict[str, Any] = {
        "rollout__engine": "vllm",
        "rollout__temperature": 0.7,
        "rollout__top_p": 0.9,
        "rollout__top_k": 5,
        "rollout__stop": ["!"],
    }
    await episode(engine, Env([reply("q"), reply(done=True)]), rollout__seed=3, **spec).run()
    sampling = engine.asked[0][1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.7, 0.9, 5, ["!"])
    assert sampling.seed == turn_seed(0, 0, 0) != turn_seed(0, 1, 0)


@pytest.mark.parametrize(
    ("spec", "answers", "context", "ending"),
    [
        ({"rollout__max_turns": 1}, ["a$"], 1000, Ending.MAX_TURNS),
        ({"rollout__max_tokens": 2}, ["a$"], 1000, Ending.MAX_TOKENS),
        ({}, ["a$"], 16, Ending.CONTEXT),
    ],
)
async def test_ordinary_endings(spec: dict[str, Any], answers: list[str], context: int, ending: Ending) -> None:
    env = Env([reply("q"), reply("next", reward=0.5), reply()])
    (trajectory,) = await episode(Script([say(a) for a in answers], context_length=context), env, **spec).run()
    assert (trajectory.ending, trajectory.reward, len(env.steps)) == (ending, 0.5, 1)
    assert env.closed == 1


@pytest.mark.parametrize(
    ("spec", "replies", "truncated", "seen"),
    [
        ({}, [reply("next", done=True)], False, ""),
        ({}, [reply("next", done=True, truncated=True)], True, "<u>next$\n<a>"),
        ({}, [reply(done=True, truncated=True)], True, ""),
        ({"rollout__max_turns": 1}, [reply("next")], True, "<u>next$\n<a>"),
        ({"rollout__max_tokens": 2}, [reply("next")], True, "<u>next$\n<a>"),
    ],
)
async def test_a_limit_truncates_and_a_critic_is_shown_the_state_that_was_left(
    spec: dict[str, Any], replies: list[SessionReply], truncated: bool, seen: str
) -> None:
    for algorithm, end in (("grpo", ""), ("ppo", seen)):
        env = Env([reply("q"), *replies])
        (trajectory,) = await episode(Script([say("a$")]), env, algorithm__name=algorithm, **spec).run()
        assert trajectory.truncated is truncated
        assert renderer().text(trajectory.ids.tolist()[len("<u>q$\n<a>a$") :]).strip() == end.replace("$", "")
        trajectory.check()


async def test_an_end_of_context_truncates() -> None:
    env = Env([reply("q"), reply("next")])
    (trajectory,) = await episode(Script([say("a$")], context_length=16), env, algorithm__name="ppo").run()
    assert (trajectory.ending, trajectory.truncated) == (Ending.CONTEXT, True)


async def test_output_cut_by_the_context_says_so() -> None:
    env = Env([reply("q"), reply()])
    engine = Script([say("abc", StopReason.LENGTH)], context_length=len("<u>q$\n<a>") + 3)
    (trajectory,) = await episode(engine, env).run()
    assert trajectory.turns[0].stop == StopReason.CONTEXT
    assert engine.asked[0][1].max_tokens == 3


@pytest.mark.parametrize(
    ("replies", "answers", "ending"),
    [
        ([reply("q"), reply(failure=Ending.ENV_ERROR, error="boom")], ["a$"], Ending.ENV_ERROR),
        ([reply(failure=Ending.ENV_LOST, error="no worker")], [], Ending.ENV_LOST),
        ([reply("q")], [], Ending.ENGINE_ERROR),
        ([reply("x" * 2000)], [], Ending.PROMPT),
    ],
)
async def test_failures_close_the_session(replies: list[SessionReply], answers: list[str], ending: Ending) -> None:
    env = Env(list(replies))
    opened = not replies[0].failure
    assert (await failure_of(episode(Script([say(a) for a in answers]), env))).ending == ending
    assert env.closed == int(opened)


async def test_import_of_the_environment_does_not_count_as_time_of_the_episode() -> None:
    env = Env([reply("q"), reply(done=True)], import_s=0.6)
    assert await episode(Script([say("a$")]), env, rollout__episode_timeout_s=0.5).run()


async def test_the_time_in_which_the_engine_sleeps_does_not_count() -> None:
    engine = ToyEngine(ToySpec(), eos_id=EOS, vocab_size=128, context_length=1000, sleeps=True)
    await engine.serve(V0)
    asked: list[OpenSession] = []

    class Opened(Env):
        async def open(self, request: OpenSession, *given: Any, **named: Any) -> SessionReply:
            asked.append(request)
            return await super().open(request, *given, **named)

    env = Opened([reply("q"), reply(done=True)])
    await engine.sleep()
    playing = asyncio.create_task(episode(engine, env, rollout__episode_timeout_s=0.5).run())
    await asyncio.wait([playing], timeout=1.5)
    assert not playing.done()
    await engine.wake()
    assert await playing
    assert asked[0].deadline_s == 0.5 and asked[0].pauses_s >= 3600.0, "an env worker does not know when it sleeps"


async def test_an_episode_that_is_late_says_what_it_waits_for() -> None:
    class Sleeper(Script):
        async def generate(self, *_: Any, **__: Any) -> Completion:
            self.asleep_s = 0.6
            await asyncio.Event().wait()
            raise AssertionError

    failed = await failure_of(episode(Sleeper([]), Env([reply("q")]), rollout__episode_timeout_s=0.05))
    assert failed.ending == Ending.TIMEOUT
    assert "no end within rollout.episode_timeout_s = 0.05: it waited for the engine in turn 0" in failed.error
    assert "the 1 s in which the engine slept for steps of the trainer do not count" in failed.error


async def test_hanging_environment_ends_at_the_deadline() -> None:
    env = Env([reply("q")], hang=True)
    failed = await failure_of(episode(Script([say("a$")]), env, rollout__episode_timeout_s=0.05))
    assert (failed.ending, env.closed) == (Ending.ENV_TIMEOUT, 1)
    assert failed.error == (
        "no end within rollout.episode_timeout_s = 0.05: it waited for turn 0 of the environment on env-0"
    )


@pytest.mark.parametrize(
    ("state", "worker", "said"),
    [
        ("PENDING", None, "the environment to open"),
        ("GENERATING", "env-0", "the engine in turn 7"),
        ("INTERACTING", "env-0", "turn 7 of the environment on env-0"),
    ],
)
def test_an_episode_that_is_late_says_what_it_waited_for(state: str, worker: str | None, said: str) -> None:
    assert f"it waited for {said}" in described_wait(state, worker, 7)


async def test_spans_are_shifted_to_the_trajectory_and_cover_every_sampled_token() -> None:
    env = Env([reply("q"), reply("r"), reply(done=True)])
    crossing = say("abcd$", spans=[Span(0, 2, V0), Span(2, 5, V1)])
    (trajectory,) = await episode(Script([crossing, say("e$", spans=[Span(0, 2, V1)])]), env).run()
    first = len("<u>q$\n<a>")
    second = first + len("abcd$\n<u>r$\n<a>")
    assert trajectory.spans == [
        Span(first, first + 2, V0),
        Span(first + 2, first + 5, V1),
        Span(second, second + 2, V1),
    ]
    assert trajectory.oldest == V0
    trajectory.check()


def test_touching_spans_of_one_version_are_merged() -> None:
    assert merge([Span(0, 2, V0), Span(2, 4, V0), Span(5, 6, V0)]) == [Span(0, 4, V0), Span(5, 6, V0)]


def test_tokenizer_without_template_is_refused_unless_the_spec_allows_it() -> None:
    bare = Chars()
    bare.chat_template = ""
    with pytest.raises(JobFailed, match="plain"):
        Renderer(bare, "model", frozenset({EOS}))
    assert Renderer(bare, "plain", frozenset({EOS})).prompt([Message(role="user", content="ab")]) == [97, 98]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [([2, 5], 3, {1, 2, 5}), (None, 3, {1, 3}), (None, [3, 4], {1, 3, 4}), (None, None, {1})],
)
def test_end_of_turn_tokens(tmp_path: Path, generation: list[int] | None, config: Any, ends: set[int]) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(orjson.dumps({"model_type": "qwen3", "eos_token_id": config}))
    if generation:
        (tmp_path / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": generation}))
    assert Renderer.load(str(tmp_path), "plain").eos_ids == ends


def test_a_tokenizer_decodes_while_another_thread_encodes() -> None:
    """Streamed answers are decoded in the event loop beside the thread that renders prompts."""
    core = Tokenizer(WordLevel({"a": 0, "</s>": 1, "b": 2}, unk_token="a"))
    core.pre_tokenizer = Whitespace()
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"), "plain", frozenset({1}))
    text, ids = "a b " * 5_000, [0, 2] * 5_000
    with ThreadPoolExecutor(1) as threads:
        encoding = [threads.submit(renderer.plain, text, first=False) for _ in range(20)]
        decoded = []
        while not encoding[-1].done():
            decoded.append(renderer.text(ids[:20]))
        assert [one.result() == ids for one in encoding] == [True] * 20
    assert decoded and set(decoded) == {text[:39]}


def test_tokenizer_without_an_end_of_sequence_token_is_refused() -> None:
    with pytest.raises(JobFailed, match="eos_token"):
        Renderer(Chars(), "plain", frozenset())


def test_prompt_is_a_fresh_list_each_time() -> None:
    one = renderer()
    messages = [Message(role="user", content="q")]
    one.prompt(messages).append(0)
    assert np.array_equal(one.prompt(messages), Chars().encode("<u>q$\n<a>"))


async def test_a_prompt_of_token_ids_is_taken_as_it_is_and_answered_with_tokens() -> None:
    first = Chars().encode("raw>")
    more = [*first, *Chars().encode("a$"), *Chars().encode("more>")]
    env = Env(
        [
            SessionReply(worker="env-0", prompt_ids=first, wants_tokens=True, max_tokens=7, stop=["!"]),
            SessionReply(worker="env-0", prompt_ids=more),
            SessionReply(worker="env-0", done=True),
        ]
    )
    engine = Script([say("a$"), say("b$")])
    (trajectory,) = await episode(engine, env).run()
    assert trajectory.ids.tolist() == [*more, *Chars().encode("b$")]
    assert (env.requests[0].ids, env.requests[0].logprobs) == (Chars().encode("a$"), [-0.5, -0.5])
    assert (engine.asked[0][1].max_tokens, engine.asked[0][1].stop) == (7, ["!"])
    assert engine.asked[1][1].stop == []


@pytest.mark.parametrize(
    "second",
    [
        SessionReply(worker="env-0", prompt_ids=[5, 6, 7]),
        SessionReply(worker="env-0", stream="new"),
        SessionReply(worker="env-0", prompt_text="x", messages=[Message(role="user", content=[Image(b"x")])]),
        reply("x", tools=[Tool(name="t", description="", parameters={})]),
    ],
)
async def test_what_does_not_continue_the_stream_is_the_environment_s_fault(second: SessionReply) -> None:
    empty = Chars()
    empty.apply_chat_template = lambda chat, **_: "".join(m["content"] for m in chat)  # type: ignore[method-assign]
    played = episode(Script([say("a$")]), Env([reply("hi"), second]))
    read_with(played, Renderer(empty, "model", frozenset({EOS})))
    assert (await failure_of(played)).ending == Ending.ENV_BAD_REPLY


def test_what_tools_said_and_what_may_be_called_reach_the_template() -> None:
    seen: list[Any] = []

    class Template(Chars):
        def apply_chat_template(self, chat: Any, tokenize: bool, add_generation_prompt: bool, tools: Any = None) -> str:
            seen.extend([chat, tools])
            return f"tools: {tools}"

    call = ToolCall(id="c1", name="add", arguments={"a": 1})
    tool = Tool(name="add", description="adds", parameters={"type": "object"})
    chat = [
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", content=[Text("3")], tool_call_id="c1", name="add"),
    ]
    Renderer(Template(), "model", frozenset({EOS}), "hermes").prompt(chat, [tool])
    function = {"name": "add", "arguments": {"a": 1}}
    assert seen[0] == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
    ]
    described = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    assert seen[1] == [{"type": "function", "function": described}]


def test_images_and_tools_that_a_model_cannot_be_shown_fail_the_job() -> None:
    picture = Message(role="user", content=[Text("what is this?"), Image(b"\x89PNG")])
    with pytest.raises(JobFailed, match="show images, and the model does not see"):
        renderer().prompt([picture])
    with pytest.raises(JobFailed, match="tools need a chat template"):
        renderer("plain").prompt([picture], [Tool(name="t", description="", parameters={})])


async def test_a_later_observation_that_the_template_refuses_costs_its_own_episode() -> None:
    class Strict(Chars):
        def apply_chat_template(self, chat: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
            if [m["role"] for m in chat[-2:]] == ["user", "user"]:
                raise ValueError("roles must alternate")
            return super().apply_chat_template(chat, tokenize, add_generation_prompt)

    env = Env([reply("go"), reply("one", "two")])
    played = episode(Script([say("a$")]), env)
    read_with(played, Renderer(Strict(), "model", frozenset({EOS})))
    failed = await failure_of(played)
    assert failed.ending == Ending.ENV_BAD_REPLY and "roles must alternate" in failed.error
    first = episode(Script([]), Env([reply("one", "two")]))
    read_with(first, Renderer(Strict(), "model", frozenset({EOS})))
    with pytest.raises(JobFailed, match="roles must alternate"):
        await first.run()
