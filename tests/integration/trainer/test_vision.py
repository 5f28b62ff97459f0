"""Models that see, without an engine: tokens and places of images, the packed forward pass, learning, refusals."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from opentinker.sdk.merge_adapter import merge
from opentinker.services.reference_forward.required_models import ModelKey
from opentinker.services.reference_forward.scorer import Scorer
from opentinker.services.rollout_worker.renderer import Renderer, images_of
from opentinker.services.trainer.learners.rl import RlLearner
from opentinker.shared.data.model_families import VISION_MODULES
from opentinker.shared.nn.layout import layout
from opentinker.shared.nn.models import load_model, model_bytes
from opentinker.shared.nn.vision import LruCache, VisionProcessor, mark_image_tokens
from opentinker.shared.types import codec
from opentinker.shared.types.core import Image, Message, Text, WeightVersion
from opentinker.shared.types.errors import BadImage, JobFailed
from opentinker.shared.types.trajectories import Group, Picture
from tests.support.factories import V0
from tests.support.learning import loaded, torch_learner
from tests.support.seeing import KINDS, Plain, ask, make, picture, shown, together

pytestmark = pytest.mark.filterwarnings("ignore")
ANSWER = [5, 9, 30, 1]


@pytest.fixture(scope="module", params=list(KINDS))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.fixture(scope="module")
def idefics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("seeing"), "idefics3")


def renderer(base: Path, mode: str = "model") -> Renderer:
    return Renderer.load(str(base), mode)


def group_at(base: Path, logprobs: Plain | None = None) -> Group:
    """Siblings at one image, a sample at another, one at two, and one at none."""
    eyes = renderer(base)
    chats = [ask(picture(n), "what? ") for n in (1, 1, 2)] + [ask("a ", picture(1), " b ", picture(2)), ask("what? ")]
    answers = [ANSWER, [5, 9, 1], ANSWER, [7, 1], [6, 1]]
    trajectories = []
    for index, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
        said = logprobs.logprobs(chat, answer).tolist() if logprobs else [-4.0] * len(answer)
        made = shown(eyes, chat, answer, index=index, reward=float(index % 2))
        padded = np.r_[np.zeros(len(made.ids) - len(answer)), said].astype("<f4").tobytes()
        trajectories.append(msgspec.structs.replace(made, logprobs_T=padded))
    return together(trajectories)


# --- rendering ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["model", "plain"])
def test_tokens_are_those_of_the_model_s_own_processor(base: Path, mode: str) -> None:
    chat = ask("look: ", picture(1, 100, 70), " and ", picture(2), "?")
    eyes, plain = renderer(base, mode), Plain(base)
    ids = eyes.prompt(chat)
    assert ids == plain.inputs(chat)["input_ids"][0].tolist()
    pictures = eyes.pictures(chat, ids)
    assert [p.digest for p in pictures] == list(images_of(chat))
    places = [place for p in pictures for start, end in p.runs for place in range(start, end)]
    assert places == [n for n, token in enumerate(ids) if token == plain.image_token_id]
    one, two = eyes.shown(pictures, images_of(chat))
    own = [one.inputs["pixel_values"], two.inputs["pixel_values"]]
    theirs = plain.inputs(chat)["pixel_values"]
    if not plain.has_grids:
        own, theirs = [pixels.flatten(0, -4) for pixels in own], theirs.flatten(0, -4)
    together = torch.cat(own)
    padding = (theirs == 0).flatten(1).all(1)
    assert torch.equal(together, theirs[~padding])


def test_a_later_observation_shows_images_too(idefics: Path) -> None:
    eyes = renderer(idefics)
    chat = ask("wrong. and ", picture(3), "? ")
    ids = eyes.extend(False, chat)
    assert ids == eyes.prompt(chat)  # this template writes nothing around its messages
    (found,) = eyes.pictures(chat, ids)
    assert found.moved(7).runs == [(start + 7, end + 7) for start, end in found.runs]


def test_rendering_does_without_pixels_that_are_not_kept_any_more(idefics: Path) -> None:
    sight = VisionProcessor.of(str(idefics))
    first, second = picture(1).data, picture(2).data
    known = sight.words(first)
    sight._looks = LruCache(lambda look: 0)
    sight._look = None  # type: ignore[assignment, method-assign] # it is asked for none
    assert sight.words(first) == known and known.tokens == known.text.count(sight.token) > 0
    with pytest.raises(TypeError):
        sight.words(second)


def test_trajectories_that_disagree_on_an_image_s_tokens_are_refused(idefics: Path) -> None:
    made = shown(renderer(idefics), ask("see ", picture(1)), ANSWER)
    (seen,) = made.pictures
    start, end = seen.runs[0]
    fewer = msgspec.structs.replace(made, pictures=[Picture(seen.digest, [(start, end - 1), *seen.runs[1:]])])
    assert mark_image_tokens([made, made], made.images)[1][0].tokens == seen.tokens
    with pytest.raises(JobFailed, match=f"{seen.tokens - 1} tokens in one trajectory and {seen.tokens} in another"):
        mark_image_tokens([made, fewer], made.images)


def test_text_alone_is_rendered_as_ever(idefics: Path) -> None:
    eyes = renderer(idefics)
    words = [Message(role="user", content="what? ")]
    assert eyes.prompt(words) == eyes.plain("what? ", first=False)
    assert eyes.pictures(words, eyes.prompt(words)) == [] == eyes.shown([], {})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "neither PNG nor JPEG"),
        (b"GIF89a", "neither PNG nor JPEG"),
        (picture(1).data[:90], "cannot be read"),
        (picture(1, 3000, 20).data, "one side is over 100 times the other"),
    ],
)
def test_images_that_are_none_are_refused(idefics: Path, data: bytes, said: str) -> None:
    with pytest.raises(BadImage, match=said):
        renderer(idefics).prompt(ask("see ", Image(data)))


def test_what_is_too_large_is_refused_before_it_is_unpacked(idefics: Path) -> None:
    data = picture(1, 8, 8).data
    large = data[:16] + (5000).to_bytes(4, "big") + (5000).to_bytes(4, "big") + data[24:]
    whole = large[:29] + zlib.crc32(large[12:29]).to_bytes(4, "big") + large[33:]
    with pytest.raises(BadImage, match="5000 x 5000 pixels, and 16,777,216 are allowed"):
        renderer(idefics).prompt(ask(Image(whole)))


def test_no_text_can_pass_for_an_image_and_no_crowd_is_looked_at(idefics: Path) -> None:
    with pytest.raises(BadImage, match="<image>, which stands for an image"):
        renderer(idefics).prompt(ask("an <image>", picture(1)))
    with pytest.raises(BadImage, match="65 images at once, and 64 are allowed"):
        renderer(idefics).prompt(ask(*[picture(1)] * 65))


def test_a_template_that_shows_no_images_is_named(idefics: Path, tmp_path: Path) -> None:
    blind = shutil.copytree(idefics, tmp_path / "m")
    (blind / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    eyes = renderer(blind)
    assert eyes.prompt([Message(role="user", content="hi")]) == eyes.plain("hi", first=False)
    with pytest.raises(JobFailed, match="shows 0 of 1 images"):
        eyes.prompt(ask(picture(1)))
    assert renderer(blind, "plain").prompt(ask(picture(1)))


def test_models_that_cannot_see_are_told_apart(idefics: Path, small: Path, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"show images, and model '.*' has no eyes"):
        renderer(small, "plain").prompt(ask(picture(1)))
    with pytest.raises(JobFailed, match="the simulated engine does not see"):
        Renderer.load_light(str(idefics), "plain").prompt(ask(picture(1)))
    other = shutil.copytree(idefics, tmp_path / "gemma")
    config = {"model_type": "gemma3", "vision_config": {}, "text_config": {}, "architectures": []}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(JobFailed, match=r"of models that see, gemma3 \(.*\) is not supported; images can .* idefics3"):
        renderer(other, "plain").prompt(ask(picture(1)))
    bare = shutil.copytree(idefics, tmp_path / "bare")
    (bare / "processor_config.json").unlink()
    with pytest.raises(JobFailed, match="no usable image processor"):
        VisionProcessor.of(str(bare))


# --- trajectories -------------------------------------------------------------------------------------------------


def test_a_group_holds_each_image_once_and_is_checked(idefics: Path) -> None:
    group = group_at(idefics)
    assert len(group.images) == 2 and not any(t.images for t in group.trajectories)
    assert codec.decode(Group, codec.encode(group)) == group
    first = group.trajectories[0]
    wrong: dict[str, dict[str, Any]] = {
        "lacks an image": {"pictures": [Picture("ab", first.pictures[0].runs)]},
        "same number of tokens": {"pictures": [Picture(first.pictures[0].digest, [(2, 4)])]},
        "out of order or the policy's own": {"pictures": [Picture(first.pictures[0].digest, [(2, len(first.ids))])]},
    }
    for said, change in wrong.items():
        changed = [msgspec.structs.replace(first, **change), *group.trajectories[1:]]
        with pytest.raises(ValueError, match=said):
            msgspec.structs.replace(group, trajectories=changed).check()


# --- learning -----------------------------------------------------------------------------------------------------


def learner_of(base: Path, **parts: Any) -> RlLearner:
    return torch_learner(base, **{"algorithm": {"group_size": 5, "groups_per_batch": 1}, **parts})


def test_the_packed_forward_pass_is_the_plain_one_and_the_reference_s(base: Path) -> None:
    group = group_at(base, Plain(base))
    metrics = learner_of(base).step([group], V0)
    assert metrics["mismatch/tokens"] == 15 and metrics["mismatch/max"] < 1e-5
    assert metrics["tokens/computed"] < metrics["tokens/total"] - metrics["tokens"]  # siblings share their image
    scorer = Scorer(tokens_per_batch=100)
    ((found, *_),) = scorer.score(scorer.load(ModelKey(str(base), "float32")), [group], [1.0])
    np.testing.assert_allclose(found, group.trajectories[0].logprobs, atol=1e-5)
    other = Plain(base).logprobs(ask(picture(2), "what? "), ANSWER)
    assert np.abs(found[-len(ANSWER) :] - other).max() > 1e-4, "what is shown makes no difference"


def test_the_language_model_learns_and_the_tower_neither_moves_nor_travels(base: Path, tmp_path: Path) -> None:
    learner = learner_of(base)
    learner.step([group_at(base)], V0)
    sent = {info.name for info in learner.snapshot(WeightVersion(1, 1)).manifest}
    assert sent and not any(re.search(VISION_MODULES, name) for name in sent)
    learner.save(tmp_path / "c")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "c" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and changed <= sent
    group = group_at(base, Plain(tmp_path / "c"))  # transformers loads model and processor
    again = loaded(RlLearner(learner.spec), tmp_path / "c")
    assert again.step([group], V0)["mismatch/max"] < 1e-5


def test_a_vision_tower_that_is_trained_moves_and_travels(base: Path, tmp_path: Path) -> None:
    learner = learner_of(base, model={"base": str(base), "train_vision": True})
    learner.step([group_at(base)], V0)
    sent = {info.name for info in learner.snapshot(WeightVersion(1, 1)).manifest}
    learner.save(tmp_path / "c")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "c" / "model.safetensors")
    assert before.keys() == after.keys() == sent
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len([name for name in changed if re.search(VISION_MODULES, name)]) > 10
    group = group_at(base, Plain(tmp_path / "c"))
    assert learner.step([group], V0)["mismatch/max"] < 1e-5


def test_a_vision_tower_has_the_gradient_that_transformers_gives_it(base: Path) -> None:
    learner = learner_of(base, model={"base": str(base), "train_vision": True})
    made = shown(renderer(base), ask("see ", picture(1, 90, 60), " and ", picture(2)), ANSWER)
    ids, images = mark_image_tokens([made], made.images)
    learner.forward(layout(ids, [made.mask], shown=images))[0].sum().backward()
    plain = Plain(base)
    inputs = plain.inputs(ask("see ", picture(1, 90, 60), " and ", picture(2)))
    inputs["input_ids"] = torch.from_numpy(made.ids.astype(np.int64))[None]
    if plain.has_grids:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == plain.image_token_id).int()
    answer = torch.tensor(ANSWER)[:, None]
    logits = plain.model(**inputs).logits[0, -len(ANSWER) - 1 : -1]
    logits.log_softmax(-1).gather(-1, answer).sum().backward()
    for name, parameter in plain.model.named_parameters():
        own = learner.parameters[name].grad
        assert (parameter.grad is None) == (own is None), name
        if own is not None and parameter.grad is not None:
            scale = parameter.grad.abs().max()
            assert (own - parameter.grad).abs().max() <= 1e-4 * scale + 1e-6, name


def test_an_adapter_is_on_the_language_model_alone_and_merges(base: Path, tmp_path: Path) -> None:
    learner = learner_of(base, model={"base": str(base), "lora": {"rank": 4, "target_modules": "all-linear"}})
    assert learner.parameters and not any(re.search(VISION_MODULES, name) for name in learner.parameters)
    learner.step([group_at(base)], V0)
    learner.save(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "adapter" / "trainer")  # a download has none
    merge(tmp_path / "adapter", tmp_path / "merged")
    group = group_at(base, Plain(tmp_path / "merged"))
    assert learner.step([group], V0)["mismatch/max"] < 1e-5


def test_what_cannot_be_done_with_images_is_said(idefics: Path, small: Path) -> None:
    group = group_at(idefics)
    with pytest.raises(JobFailed, match="value models and critics do not see"):
        learner_of(idefics, algorithm={"name": "ppo", "group_size": 5, "groups_per_batch": 1}).step([group], V0)
    scorer = Scorer()
    with pytest.raises(JobFailed, match=r"knows 64 tokens|no model that sees"):
        scorer.score(scorer.load(ModelKey(str(small), "float32")), [group], [1.0])
    learner = learner_of(idefics)
    spoilt = msgspec.structs.replace(group, images=dict.fromkeys(group.images, b"\x89PNG"))
    with pytest.raises(JobFailed, match="an image of a trajectory cannot be read"):
        learner.step([spoilt], V0)
    fewer = [
        msgspec.structs.replace(t, pictures=[Picture(p.digest, [(2, 4)]) for p in t.pictures[:1]])
        for t in group.trajectories
    ]
    with pytest.raises(JobFailed, match=r"an image has 2 tokens in a trajectory and 4 here"):
        learner.step([msgspec.structs.replace(group, trajectories=fewer)], V0)


def test_a_model_that_sees_is_measured_before_it_is_loaded(idefics: Path) -> None:
    model = load_model(str(idefics), torch.float32)
    assert model_bytes(str(idefics), torch.float32) == sum(p.nbytes for p in model.parameters())
    assert isinstance(model, AutoModelForImageTextToText._model_mapping[type(model.config)])


def test_content_of_text_and_images_keeps_its_order(idefics: Path) -> None:
    eyes, chat = renderer(idefics), [Message(role="user", content=[Text("a"), picture(1), Text("b")])]
    ids = eyes.prompt(chat)
    (found,) = eyes.pictures(chat, ids)
    assert ids[0] == eyes.plain("a", first=False)[0]
    assert found.runs[0][0] > 1 and found.runs[-1][1] < len(ids) - 1
