"""Plays tasks of MiniWoB++ in a headless Chromium in the child process: the page as text, actions as text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from opentinker.envs.adapters import miniwob_page as page
from opentinker.envs.adapters.browser_pool import BrowserPool, programs, start
from opentinker.envs.adapters.library import (
    Illegal,
    IllegalConfig,
    LibraryConfig,
    Randomness,
    check_known,
    episode_seed,
)
from opentinker.envs.base import FORKS, Action, Environment, Step, user
from opentinker.envs.png import png
from opentinker.shared.types.core import Image, Message, Text

if TYPE_CHECKING:
    from miniwob.environment import MiniWoBEnvironment

KEPT, IDLE_S = 2, 60.0
"""Number of idle browsers that a process keeps for the next episode of their task, and for how long."""
SETTLES_S, POLL_S = 3.0, 0.05
"""For how long, and how often, a page that is forked is looked at until it shows what the other one did."""
ENDLESS_MS = 24 * 3600 * 1000


class Diverged(Exception):
    """A page depends on more than seed and actions."""


class MiniWob(Environment):
    """One seat. Reward: the task's at its end, from -1 to 1. An action that cannot be read is answered with the reason
    and costs `penalty`. The page has no clock: a policy may think until the episode's deadline, without effect on its
    reward."""

    class Config(LibraryConfig, IllegalConfig):
        library: ClassVar[str] = "miniwob"

        tasks: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
        """Names as in MiniWoB++, e.g. click-button. The row of an episode selects one."""
        reward: Literal["raw", "binary", "timed"] = "raw"
        """`raw`: the task's own, which may be a part of 1; `binary`: 1 if the task is fully solved, otherwise -1;
        `timed`: the original one, which falls to 0 over the time limit."""
        time_limit_s: Annotated[float, Field(gt=0, le=24 * 3600)] | None = None
        """Time after which the page ends the episode with -1; default: never (MiniWoB++ itself has 10 s)."""
        max_steps: Annotated[int, Field(ge=1)] = 20
        """Number of actions that ends the episode, with reward 0 for the last."""
        data_mode: Literal["train", "test"] = "train"
        """Half of the words and numbers that a task draws from, if it has two."""
        positions: bool = False
        """Add positions of elements and actions by position: click_at, double_click_at, drag, scroll."""
        screenshot: bool = False
        """Send a screenshot of the page with its text."""
        instruction: str | None = None
        """First message to the policy, instead of the description of actions; may be empty."""

        @model_validator(mode="after")
        def _time_is_limited(self, info: ValidationInfo) -> Self:
            if self.reward == "timed" and self.time_limit_s is None:
                raise ValueError("reward = 'timed' needs time_limit_s")
            if self.time_limit_s is not None and (info.context or {}).get(FORKS):
                raise ValueError("time_limit_s does not go with tree sampling: the clock of a copied page starts again")
            return self

        def check(self) -> None:
            known = _task_classes()
            for task in self.tasks:
                check_known("task as tasks", task, known)
            programs()

    config: Config
    can_fork = True
    blocking = True
    cost = 64.0
    """A browser takes about 290 MB of unshared memory, and much of a core while its page is active."""
    recycle_after = 100
    memory_mb = 500
    shelf: ClassVar = BrowserPool(KEPT, IDLE_S)

    async def open(self, row: int, seed: int) -> list[Message]:
        config = self.config
        self._seed = episode_seed(row, seed)
        self._task = config.tasks[row % len(config.tasks)]
        self._illegal = self._steps = 0
        self._done = False
        self._made: list[tuple[dict[str, Any], str]] = []
        """Actions on the page since the start of the episode, each with the page it led to."""
        self._begin()
        told = page.introduction(config.positions) if config.instruction is None else config.instruction
        return [self._message(told)]

    def _begin(self) -> None:
        """Open the page of the task as its seed draws it."""
        config = self.config
        self._randomness = Randomness(self._seed)
        self._sound = False
        with self._randomness:
            self._browser = self._take()
            driver = self._browser.instance.driver
            driver.get(self._browser.instance.url)  # a page of the last episode has other elements and marks
            limit = ENDLESS_MS if config.time_limit_s is None else round(config.time_limit_s * 1000)
            driver.execute_script(f"core.EPISODE_MAX_TIME = {limit};")
            self._browser.set_data_mode(config.data_mode)
            self._browser.set_record_screenshots(config.screenshot)
            self._observation, _ = self._browser.reset(seed=self._seed)
        self._sound = True

    def __deepcopy__(self, _: dict[int, Any]) -> MiniWob:
        """Return an episode in the same state: a new browser repeats every action. Raise Diverged if that leads to
        another page."""
        other = MiniWob(self.config)
        other.__dict__.update(self.__dict__, _made=[])
        del other._browser
        try:
            other._begin()
            other._repeat(self._made)
        except BaseException:
            other._sound = False
            other.shut()
            raise
        return other

    async def step(self, action: Action) -> Step:
        try:
            refs = {element["ref"] for element in self._observation["dom_elements"] if element["ref"] > 0}
            deed = page.read(action.text, refs, self._size, self.config.positions)
            moves = self._moves(deed)
        except Illegal as error:
            return self._refuse(error)
        info = self._do(moves)
        self._steps += 1
        reward = self._reward(info) if self._done else 0.0
        over = self._done or self._steps >= self.config.max_steps
        return Step(
            messages=[] if self._done else [self._message()],
            reward=reward,
            components={"reward": reward},
            done=over,
            truncated=over and not self._done,
            metrics=self._metrics(float(self._done and info["raw_reward"] == 1.0)),
        )

    def _do(self, moves: list[dict[str, Any]]) -> dict[str, Any]:
        """Make moves until the episode is over. Return what MiniWoB++ says of the last one."""
        info: dict[str, Any] = {}
        self._sound = False  # an error from here on leaves the browser in an unknown state: do not reuse it
        with self._randomness:
            for move in moves:
                self._observation, _, self._done, _, info = self._browser.step(move)
                self._made.append((move, self._view()))
                if self._done:
                    break
        self._sound = True
        return info

    def _repeat(self, made: list[tuple[dict[str, Any], str]]) -> None:
        """Do the same on a fresh page, and wait each time until it shows the same: some do so after a while."""
        from miniwob.action import ActionTypes as Types

        nothing = {"action_type": list(self._browser.action_space_config.action_types).index(Types.NONE)}
        for move, shown in made:
            self._do([move])
            due = time.monotonic() + SETTLES_S
            while self._view() != shown:
                if time.monotonic() > due:
                    raise Diverged(f"{self._task} cannot be forked here: the same actions led to another page")
                time.sleep(POLL_S)
                with self._randomness:
                    self._observation, _, self._done, _, _ = self._browser.step(nothing)
            self._made[-1] = (move, shown)

    async def close(self) -> None:
        self.shut()

    def shut(self) -> None:
        """Give the browser back, or end it. Blocking."""
        browser: MiniWoBEnvironment | None = getattr(self, "_browser", None)
        if browser is None:
            return
        if self._sound:
            self.shelf.put(self._task, browser)
        else:
            browser.close()

    # --- the browser ------------------------------------------------------------------------------------------------

    def _take(self) -> MiniWoBEnvironment:
        """Return an idle browser with the task's page, or a new one."""
        return self.shelf.take(self._task) or start(_task_classes()[self._task])

    @property
    def _size(self) -> tuple[float, float]:
        return self._browser.instance.task_width, self._browser.instance.task_height

    def _moves(self, deed: page.PageAction) -> list[dict[str, Any]]:
        """Convert to MiniWoB++ actions. Raise Illegal."""
        from miniwob.action import ActionTypes as Types

        space = self._browser.action_space_config
        moves: list[tuple[Types, dict[str, Any]]]
        match deed.name, deed.arguments:
            case "click", (ref,):
                moves = [(Types.CLICK_ELEMENT, {"ref": ref})]
            case "type", (ref, text):
                moves = [(Types.FOCUS_ELEMENT_AND_TYPE_TEXT, {"ref": ref, "text": text})]
            case "type", (text,):
                moves = [(Types.TYPE_TEXT, {"text": text})]
            case "press", (key,):
                moves = [(Types.PRESS_KEY, {"key": _key(list(space.allowed_keys), key)})]
            case "click_at", point:
                moves = [(Types.CLICK_COORDS, {"coords": point})]
            case "double_click_at", point:
                moves = [(Types.DBLCLICK_COORDS, {"coords": point})]
            case "drag", (x, y, x2, y2):
                ends = {"coords": (x2, y2)}
                moves = [
                    (Types.MOUSEDOWN_COORDS, {"coords": (x, y)}),
                    (Types.MOVE_COORDS, ends),
                    (Types.MOUSEUP_COORDS, ends),
                ]
            case _, (x, y, direction):
                if direction not in ("up", "down"):
                    raise Illegal('scroll goes "up" or "down"')
                kind = Types.SCROLL_UP_COORDS if direction == "up" else Types.SCROLL_DOWN_COORDS
                moves = [(kind, {"coords": (x, y)})]
        order = list(space.action_types)
        return [{"action_type": order.index(kind), **arguments} for kind, arguments in moves]

    # --- what it says -----------------------------------------------------------------------------------------------

    def _reward(self, info: dict[str, Any]) -> float:
        raw = float(info["raw_reward"])
        if self.config.reward == "binary":
            return 1.0 if raw == 1.0 else -1.0
        return float(info["env_reward"]) if self.config.reward == "timed" else raw

    def _refuse(self, why: Exception) -> Step:
        self._illegal += 1
        possible = page.POSSIBLE + (f", {page.POSSIBLE_AT}" if self.config.positions else "")
        return self.config.refuse(why, possible, self._illegal, self._metrics(0.0))

    def _metrics(self, solved: float) -> dict[str, float]:
        found = {"solved": solved, "illegal": float(self._illegal), "truncated": float(not self._done)}
        return found | ({f"task/{self._task}": 1.0} if len(self.config.tasks) > 1 else {})

    def _view(self) -> str:
        return page.view(self._observation["utterance"], self._observation["dom_elements"], self.config.positions)

    def _message(self, first: str = "") -> Message:
        text = "\n".join(filter(None, [first, self._view()]))
        if not self.config.screenshot:
            return user(text)

        return Message(role="user", content=[Text(text), Image(data=png(self._observation["screenshot"]))])


def _key(keys: list[str], name: str) -> int:
    """Return the number of an element. Raise Illegal."""
    found = next((known for known in (name, f"<{name}>") if known in keys), None)
    if found is None:
        raise Illegal(f"there is no key {name!r:.40}")
    return keys.index(found)


def _task_classes() -> dict[str, Any]:
    import miniwob
    from gymnasium.envs.registration import load_env_creator, registry

    del miniwob  # importing it registers them
    found = {}
    for id, spec in registry.items():
        if id.startswith("miniwob/"):
            found[id.removeprefix("miniwob/").rpartition("-v")[0]] = spec.entry_point
    return {name: load_env_creator(entry) if isinstance(entry, str) else entry for name, entry in found.items()}
