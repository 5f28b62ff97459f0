"""Five in a row, with the published rewards, on the board and against the bot of the environment `gomoku`."""

from __future__ import annotations

import random
from typing import Any

from opentinker.envs.builtin.gomoku_board import BLACK, STONES, Board, bot
from opentinker.envs.game import AbstractGame, StepResult

NO_FIELD = 1.0
"""How wrong (envs/builtin/gomoku_board.py) an answer is that names no field at all."""


class GomokuGame(AbstractGame):
    """The policy is black and begins. An invalid move costs REWARD_INVALID_FORMAT or, if it names a field that is taken
    or off the board, REWARD_INVALID_POSITION, and is asked for again. MAX_CONSECUTIVE_INVALID_MOVES of them end the
    game with REWARD_INVALID_GAME_OVER.

    Everything random, the bot's moves too, comes from the `seed` of the start state: the games of a group begin with
    the same stones and meet the same player.
    """

    REWARD_WIN = 10.0
    REWARD_LOSS = -10.0
    REWARD_DRAW = 0.0
    REWARD_VALID_MOVE = 0.0
    REWARD_INVALID_FORMAT = -1.0
    REWARD_INVALID_POSITION = -1.0
    REWARD_INVALID_GAME_OVER = -20.0
    REWARD_TIMEOUT = -20.0
    MAX_CONSECUTIVE_INVALID_MOVES = 100
    DEFAULT_MAX_TOTAL_STEPS = 40
    OPPONENT_RANDOM_PROB = 0.3
    MAX_INITIAL_MOVES = 6
    EMPTY_BOARD_PROB = 0.2

    def __init__(
        self,
        board_size: int = 9,
        win_length: int = 5,
        max_total_steps: int | None = None,
        max_initial_moves: int | None = None,
        empty_board_prob: float | None = None,
        random_moves: float | None = None,
    ) -> None:
        """`max_total_steps`: answers of the policy; then the game is lost by time. `max_initial_moves`: largest number
        of stones on the initial board, equally many of each colour; with probability `empty_board_prob` it is empty.
        `random_moves`: share of the bot's. None: the class's constant; on a small board a third of the fields may be
        taken initially."""
        if max_total_steps is None:
            max_total_steps = self.DEFAULT_MAX_TOTAL_STEPS
        if max_initial_moves is None:
            max_initial_moves = min(self.MAX_INITIAL_MOVES, board_size**2 // 3)
        empty_board_prob = self.EMPTY_BOARD_PROB if empty_board_prob is None else empty_board_prob
        random_moves = self.OPPONENT_RANDOM_PROB if random_moves is None else random_moves
        if not 3 <= win_length <= board_size <= 19:
            raise ValueError(
                f"win_length = {win_length}, board_size = {board_size}: 3 <= win_length <= board_size <= 19"
            )
        if max_total_steps < 1 or not 0 <= 2 * max_initial_moves <= board_size**2:
            raise ValueError("max_total_steps must be at least 1, max_initial_moves 0 to half of the fields")
        if not (0.0 <= random_moves <= 1.0 and 0.0 <= empty_board_prob <= 1.0):
            raise ValueError("random_moves and empty_board_prob are shares, 0 to 1")
        self.board_size, self.win_length, self.max_total_steps = board_size, win_length, max_total_steps
        self.max_initial_moves, self.empty_board_prob = max_initial_moves, empty_board_prob
        self.random_moves = random_moves
        self.board = Board(board_size, win_length)
        self.steps = self.illegal = self.illegal_in_a_row = 0

    def generate_initial_state(self) -> dict[str, Any]:
        return {"seed": random.randrange(2**31)}

    def reset(self, seed: int | None = None, **kwargs: Any) -> str:
        self.draw = random.Random(f"gomoku/{random.randrange(2**31) if seed is None else seed}")
        self.board = Board(self.board_size, self.win_length)
        self.steps = self.illegal = self.illegal_in_a_row = 0
        empty = self.draw.random() < self.empty_board_prob
        stones = 0 if empty else 2 * self.draw.randint(0, self.max_initial_moves // 2)
        for field in self.draw.sample(self.board.free(), stones):
            if not self.board.over:
                self.board.place(field)
        if self.board.over:
            self.board = Board(self.board_size, self.win_length)
        return str(self.board)

    def step(self, action: str) -> StepResult:
        if self.board.over:
            return StepResult(f"The game is over.\n\n{self.board}", 0.0, True, self._info(""))
        self.steps += 1
        field = (read := self.board.read(action)).field
        if field is None:
            self.illegal += 1
            self.illegal_in_a_row += 1
            if self.illegal_in_a_row >= self.MAX_CONSECUTIVE_INVALID_MOVES:
                return self._ended("loss", self.REWARD_INVALID_GAME_OVER)
            cost = self.REWARD_INVALID_FORMAT if read.wrong == NO_FIELD else self.REWARD_INVALID_POSITION
            return self._goes_on(f"{read.problem}: say another one.", cost)
        self.illegal_in_a_row = 0
        self.board.place(field)
        said = ""
        if not self.board.over:
            answer = bot(self.board, self.draw, self.random_moves)
            self.board.place(answer)
            said = f"{STONES[BLACK]} took {self.board.name(field)}, the other player {self.board.name(answer)}."
        if not self.board.over:
            return self._goes_on(said, self.REWARD_VALID_MOVE)
        if not self.board.winner:
            return self._ended("draw", self.REWARD_DRAW)
        won = self.board.winner == BLACK
        return self._ended("win" if won else "loss", self.REWARD_WIN if won else self.REWARD_LOSS)

    def _goes_on(self, said: str, reward: float) -> StepResult:
        if self.steps >= self.max_total_steps:
            return self._ended("timeout", self.REWARD_TIMEOUT)
        return StepResult(f"{said}\n\n{self.board}", reward, False, self._info(""))

    def _ended(self, result: str, reward: float) -> StepResult:
        return StepResult(f"{result}\n\n{self.board}", reward, True, self._info(result))

    def _info(self, result: str) -> dict[str, Any]:
        told = {"exact": float(result == "win"), "moves": float(self.board.played), "illegal": float(self.illegal)}
        return told | ({"result": result} if result else {})

    def get_system_prompt(self) -> str:
        return (
            f"You play gomoku on a board of {self.board_size} by {self.board_size} fields. You are x and begin; "
            f"{self.win_length} of your stones in an unbroken row, column or diagonal win. Think if you like; the last "
            "field that you name, column and row like c3, is your move."
        )

    def get_initial_user_message(self) -> str:
        return "It is your move."

    def get_state(self) -> dict[str, Any]:
        return {"board": str(self.board), "steps": self.steps}

    def get_interaction_name(self) -> str:
        return "gomoku"
