"""Gomoku against a bot or in self-play: two seats, each with a separate view."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from opentinker.envs.base import Action, Bot, Environment, EnvironmentConfig, Opening, Step, user
from opentinker.envs.builtin.gomoku_board import BLACK, STONES, WHITE, Board, ParsedMove, bot, expert, other
from opentinker.envs.builtin.gomoku_cells import FREE, LARGEST_SIZE, OWN, RIVAL, CellsBoard
from opentinker.envs.builtin.gomoku_values import move_values

FEWEST_FREE = 4
"""Fields that random stones at the start leave free."""


def greedy(game: Gomoku) -> str:
    """Return the move of the scripted player that `opponent = "bot"` names."""
    return game.board.name(bot(game.board, game.draw, game.config.random_moves))


class Gomoku(Environment):
    """Every turn shows the board and asks for a field, column and row, like `c3`; the last one named counts.

    Reward components: `outcome` is 1 won, 0 drawn, -1 lost; `illegal` is -`illegal_penalty` for an answer that names no
    free field, and -1 more once `retries` are used up: that forfeits the game, and the other side gets nothing for it;
    `legal`, if there is a `legal_reward`. `outcome` sums to 0 over the seats. With `progress` that
    component replaces `outcome`. `exact` is 1 for a game won against the bot.
    """

    class Config(EnvironmentConfig):
        size: Annotated[int, Field(ge=3, le=19)] = 9
        """Rows and columns."""
        win: Annotated[int, Field(ge=3, le=19)] = 5
        """Stones in a row that win; more do too."""
        opponent: Literal["bot", "self"] = "bot"
        """`bot`: one seat against a scripted player. `self`: the seats black and white."""
        colour: Literal["alternate", "black", "white"] = "alternate"
        """bot: colour of the policy; black begins. `alternate`: black in even rows."""
        random_moves: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
        """bot: share of random moves."""
        random_stones: Literal[0, 2, 4] = 2
        """Stones on the board at the start, placed by row and seed, so that games differ."""
        retries: Annotated[int, Field(ge=0, le=20)] = 1
        """Illegal answers per move before the game is lost."""
        illegal_penalty: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
        """Deducted for each illegal answer."""
        shaped: bool = False
        """Deduct less for near misses: three quarters for a field off the board, half if its column or row is on it, a
        quarter if it is taken. For policies that have not yet learned the form of a move."""
        legal_reward: Annotated[float, Field(ge=0.0, le=0.1)] = 0.0
        """Reward of each legal move, for policies that seldom make one; winning is worth more."""
        context: Literal["game", "turn"] = "game"
        """`game`: a seat sees all its turns. `turn`: each move starts a new context with rules and board, so that it
        does not grow with the game."""
        rules: bool = True
        """Begin every context with the rules in a sentence; false for models that learn from random weights."""
        board: Literal["rows", "cells"] = "rows"
        """`cells`: a line with a character per field, which says both the field and its owner, seen by the seat that
        acts: free fields are a to y, own stones A to Y, those of the other seat α to ω. A move is one character, too.
        For models that learn from random weights, and boards of up to 5 x 5."""
        progress: bool = False
        """self: reward every move immediately, instead of the outcome: the rating of the move, less that of the best
        one. That is 0 for the best moves and below 0 for mistakes; the other seat gets the opposite. The rating is a
        search of forced wins and the shape of the position (`gomoku_values.py`), not perfect play. For tree sampling,
        which compares the candidates of a turn by their immediate rewards, and boards of up to 5 x 5."""
        random_turns: Annotated[float, Field(ge=0.0, le=0.9)] = 0.0
        """self: probability that the next move, of either seat, is made at random by the environment; and games begin
        with any number of random stones. Policies then meet many more positions than their own play leads to, late
        ones as often as early ones."""

        @model_validator(mode="after")
        def _rules(self) -> Gomoku.Config:
            if self.win > self.size:
                raise ValueError(f"win={self.win} stones in a row do not fit on size={self.size}")
            given = self.model_fields_set & {"colour", "random_moves"}
            if self.opponent == "self" and given:
                raise ValueError(f"{' and '.join(sorted(given))}: only with opponent = 'bot'")
            if self.opponent == "bot" and (self.progress or self.random_turns):
                raise ValueError("progress and random_turns: only with opponent = 'self'")
            if self.size > LARGEST_SIZE and (self.progress or self.board == "cells"):
                raise ValueError(f"progress and board = 'cells': only with size = {LARGEST_SIZE} or less")
            if self.board == "cells" and self.context == "game":
                raise ValueError("board = 'cells' shows nothing else of the game: set context = 'turn'")
            return self

    config: Config
    can_fork = True
    bots: ClassVar[Mapping[str, Bot]] = {
        "random": lambda game: game.board.name(bot(game.board, game.draw, 1.0)),
        "greedy": greedy,
        "expert": lambda game: game.gold(),
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.opponent == "self":
            self.seats = (BLACK, WHITE)

    async def open(self, row: int, seed: int) -> Opening:
        self.draw = random.Random(f"gomoku/{seed}/{row}")
        self.board = (CellsBoard if self.config.board == "cells" else Board)(self.config.size, self.config.win)
        for field in self.draw.sample(self.board.free(), self.config.random_stones):
            self.board.place(field)
        self.colour: str = self.config.colour
        if self.colour == "alternate":
            self.colour = WHITE if row % 2 else BLACK
        self.tries = self.illegal = 0
        self.moves: dict[str, int] = {}
        self.seen: set[str] = set()
        if self.config.opponent == "bot" and self.board.next != self.colour:
            self._bot()
        if self.config.random_turns:
            self._place_stones()
        return Opening(messages=[user(self._asks())], seat=self._seat, stream=self._stream)

    async def step(self, action: Action) -> Step:
        read = self.board.read(action.text)
        if read.field is None:
            return self._refuse(read)
        mover = self.board.next
        self.tries = 0
        progress = self._progress(read.field)
        self._place(read.field)
        if not self.board.over and self.config.opponent == "bot":
            self._bot()
        while not self.board.over and self._is_random_turn():
            self._place(self.draw.choice(self.board.free()))
        outcome = 0.0 if not self.board.winner else 1.0 if self.board.winner == mover else -1.0
        parts = self._parts(outcome=outcome, progress=progress, legal=self.config.legal_reward)
        if self.board.over:
            return self._end(mover, parts, -parts[self._paid])
        asked = self._next(self._asks(), parts)
        if self.config.progress:
            asked.rewards = {other(mover): {"progress": -progress}}
        return asked

    def gold(self) -> str:
        return self.board.name(expert(self.board))

    # --- moves ----------------------------------------------------------------------------------------------------

    def _refuse(self, read: ParsedMove) -> Step:
        self.tries += 1
        self.illegal += 1
        left = self.config.retries + 1 - self.tries
        penalty = self.config.illegal_penalty * (read.wrong if self.config.shaped else 1.0)
        if not left:
            return self._end(self.board.next, self._parts(illegal=-penalty - 1.0), 0.0, forfeit=True)
        return self._next(f"{read.problem}, {left} more.\n{STONES[self.board.next]}:", self._parts(illegal=-penalty))

    def _place_stones(self) -> None:
        """Add any number of random stones that do not end the game."""
        stones = self.draw.randrange(self.config.size**2 - FEWEST_FREE)
        while self.board.played < stones:
            quiet = sorted({*self.board.free()} - {*self.board.completes(self.board.next)})
            if not quiet:
                return
            self.board.place(self.draw.choice(quiet))

    def _is_random_turn(self) -> bool:
        """Without random turns nothing is drawn: bots have the same draws whichever way they play."""
        return self.config.random_turns > 0 and self.draw.random() < self.config.random_turns

    def _progress(self, field: int) -> float:
        if not self.config.progress:
            return 0.0
        values = move_values(self.board)
        return values[field] - max(values.values())

    @property
    def _paid(self) -> str:
        return "progress" if self.config.progress else "outcome"

    def _parts(
        self, *, outcome: float = 0.0, progress: float = 0.0, illegal: float = 0.0, legal: float = 0.0
    ) -> dict[str, float]:
        parts = {self._paid: progress if self.config.progress else outcome, "illegal": illegal}
        return parts | {"legal": legal} if self.config.legal_reward else parts

    def _place(self, field: int) -> None:
        self.moves[self.board.next] = field
        self.board.place(field)

    def _bot(self) -> None:
        field = self.board.field(greedy(self))
        assert field is not None
        self._place(field)

    # --- words ----------------------------------------------------------------------------------------------------

    @property
    def _seat(self) -> str:
        return self.board.next if self.config.opponent == "self" else ""

    @property
    def _stream(self) -> str:
        return str(self.board.played) if self.config.context == "turn" else ""

    def _asks(self) -> str:
        """Return the next player's messages: the rules at the start of a context, the opponent's last move, the
        board."""
        if self.config.board == "cells":
            return f"{self._cells_rules()}{self.board}:"
        size, stone = self.config.size, STONES[self.board.next]
        said = ""
        if self.config.rules and (self.config.context == "turn" or self._seat not in self.seen):
            said = f"gomoku {size}x{size}, {self.config.win} in a row win. you are {stone}. say a free field like c3.\n"
        self.seen.add(self._seat)
        rival = other(self.board.next)
        if rival in self.moves:
            said += f"{STONES[rival]} took {self.board.name(self.moves[rival])}.\n"
        return f"{said}{self.board}\n{stone}:"

    def _cells_rules(self) -> str:
        if not self.config.rules:
            return ""
        size, last = self.config.size, self.config.size**2 - 1
        stones = f"you have {OWN[0]} to {OWN[last]}, the other {RIVAL[0]} to {RIVAL[last]}"
        return f"gomoku {size}x{size}, {self.config.win} in a row win. {stones}. say a free field, a to {FREE[last]}.\n"

    def _next(self, text: str, parts: dict[str, float]) -> Step:
        return Step(
            messages=[user(text)],
            reward=sum(parts.values()),
            components=parts,
            seat=self._seat,
            stream=self._stream,
            metrics=self._metrics(),
        )

    def _end(self, mover: str, parts: dict[str, float], rival: float, *, forfeit: bool = False) -> Step:
        two = self.config.opponent == "self"
        return Step(
            done=True,
            reward=sum(parts.values()),
            components=parts,
            rewards={other(mover): {self._paid: rival}} if two else {},
            metrics=self._metrics() | {"forfeit": float(forfeit)},
        )

    def _metrics(self) -> dict[str, float]:
        board = self.board
        found = {"moves": float(board.played), "illegal": float(self.illegal), "forfeit": 0.0}
        found["draw"] = float(board.over and not board.winner)
        if self.config.opponent == "self":
            return found | {"black_won": float(board.winner == BLACK)}
        return found | {"exact": float(board.winner == self.colour)}
