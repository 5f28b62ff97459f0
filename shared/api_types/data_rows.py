"""Rows of a job's data set."""

from typing import TypedDict


class RowPoint(TypedDict):
    """The plays of a row in a step, or in several neighbouring ones."""

    step: int
    """The last of them."""
    played: int
    """Episodes."""
    solved: float
    """Share of them that were solved."""


class DataRow(TypedDict):
    """A row as the policy gets it, and how it was played."""

    row: int
    """Its number in the data set."""
    place: str
    """Where it stands, for example file and line; may be empty."""
    prompt: str
    """The chat template's rendering, at most 20,000 characters of it."""
    left_out: int
    """Characters after those."""
    tokens: int | None
    """Tokens of the whole prompt, without those of images; null if the server does not have the tokenizer."""
    images: int
    """Images in it, each with a text in its place."""
    answers: dict[str, str]
    """Turns that an sft or dpo job learns, by column."""
    problem: str
    """Why there is no prompt, or why it is not rendered; empty: it is."""
    played: int
    """Episodes that were played on it, also of groups that were discarded."""
    reward: float | None
    """Their mean reward; null if there are none."""
    solved: float | None
    """Share of them that were solved; null if there are none."""
    series: list[RowPoint]
    """The same by step, oldest first."""
    kept: list[int]
    """Steps with episodes of it that can be read: /rollouts, of an eval job /transcripts."""


class DataRows(TypedDict):
    """A page of rows."""

    rows: list[DataRow]
    total: int
    """Rows that pass the filters."""
    count: int
    """Rows of the data set."""
    searched: int
    """Rows, from the first, that were searched for the text."""
    played: int
    """Rows that were played at least once."""
    source: str
    """The environment, or the path of the data."""
    solved_at: float | None
    """Smallest reward with which an episode counts as solved; null for jobs that play none."""
    first_step: int
    """Counts begin with this step, because the file of a long job is of bounded size; 0: with the first."""
    note: str
    """Why prompts are plain messages without tokens; empty: they are rendered."""
