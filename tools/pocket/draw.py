"""Random words, numbers and phrases for Pocket's questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from . import phrases, words

T = TypeVar("T")

LETTERS, DIGITS, ACCENTED = "ABCDEFGHJKLMNPQRSTUVWXYZ", "0123456789", "àáâäåèéêëìíîïòóôöùúûüæø"
SCRIPTS = (0x3B1, 0x430, 0x5D0, 0x627, 0x905, 0x3042, 0x30A2, 0x4E00, 0x6C34, 0xAC00, 0x1F600)


class Draw:
    """Draws words and numbers that are all held out, or all not held out."""

    def __init__(self, random: Random, held_out: bool, pieces: Sequence[str] = ()) -> None:
        self.random = random
        self.held_out = held_out
        self.pieces = pieces

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def seldom(self, share: float) -> bool:
        """Do the same as `often`, but twice as often in training, which learns rare cases last."""
        return self.often(share if self.held_out else 2 * share)

    def of(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def phrase(self, pair: tuple[Sequence[str], Sequence[str]]) -> str:
        return self.of(pair[self.held_out])

    def word(self, *lists: Sequence[str]) -> str:
        """Draw a word of one of the lists. In training it is often made up instead, so that the
        model cannot learn the lists by heart."""
        found = self.unseen(lambda: self.of(self.of(lists)))
        if self.held_out or not self.often(0.4):
            return found
        return self.made_up().capitalize() if found[0].isupper() else self.made_up()

    def made_up(self) -> str:
        return self.unseen(lambda: words.made_up(self.random, self.pieces))

    def plain(self) -> str:
        if self.seldom(0.01):
            return self.foreign()
        kind = self.random.random()
        if kind < 0.4:
            return self.made_up()
        return self.word(words.THINGS) if kind < 0.85 else self.word(words.EVERYDAY)

    def name(self) -> str:
        """Draw the name of a line of a table: one to three words."""
        count = self.of((1, 1, 2, 2, 2, 3))
        if count == 1:
            return self.plain()
        first = self.word(words.QUALITIES) if self.often(0.5) else self.plain()
        return " ".join((first, *(self.plain() for _ in range(count - 1))))

    def unseen(self, make: Callable[[], str]) -> str:
        """Return the first result of `make` that belongs to this draw's half: held out, or not."""
        while True:
            found = make()
            if words.held_out(found) == self.held_out:
                return found

    def number(self) -> str:
        return self.unseen(lambda: str(self.random.randrange(10 ** self.of((2, 3, 3, 4, 4, 5, 6)))))

    def time(self) -> str:
        return self.unseen(lambda: f"{self.random.randrange(24)}:{self.random.randrange(60):02}")

    def code(self) -> str:
        def make() -> str:
            parts = [
                "".join(self.of(LETTERS if self.often(0.4) else DIGITS) for _ in range(size))
                for size in (self.of((1, 2, 3)), self.of((2, 3, 4)))
            ]
            return self.of(("-", "", "/")).join(parts)

        return self.unseen(make)

    def sum(self) -> tuple[int, int]:
        """Draw two numbers whose sum training shows, or never shows if this draw is held out."""
        pair = self.unseen(
            lambda: " ".join(
                str(self.random.randrange(10 ** self.of((1, 2, 3, 3, 3)))) for _ in range(2)
            )
        )
        a, b = pair.split(" ")
        return int(a), int(b)

    def foreign(self) -> str:
        """Draw a word with letters that English does not have."""
        if self.often(0.85):
            return "".join(
                self.of(ACCENTED) if letter in "aeiou" and self.often(0.5) else letter
                for letter in self.made_up()
            )
        first = self.of(SCRIPTS)
        return "".join(chr(first + self.random.randrange(24)) for _ in range(self.of((1, 2, 3, 4))))

    def value(self) -> str:
        if self.seldom(0.02):
            return self.foreign()
        kind = self.random.random()
        if kind < 0.3:
            return self.number()
        if kind < 0.38:
            return self.time()
        if kind < 0.46:
            return self.code()
        if kind < 0.48:
            return ", ".join(self.plain() for _ in range(self.of((2, 3, 4))))
        if kind < 0.58:
            return f"{self.word(words.PEOPLE)} {self.made_up().capitalize()}"
        if kind < 0.7:
            return self.word(words.PLACES, words.PEOPLE)
        if kind < 0.75:
            return f"{self.number()} {self.plain()}"
        if kind < 0.8:
            return self.made_up().capitalize()
        return " ".join(self.plain() for _ in range(self.of((1, 1, 2, 2, 3))))

    def filled(self, phrase: str, *blanks: str) -> str:
        """Fill the blanks of the phrase: first with the given words, then with drawn ones."""
        parts = phrase.split("{}")
        filling = [*blanks, *(self.plain() for _ in range(len(parts) - 1 - len(blanks)))]
        return "".join(a + b for a, b in zip(parts, [*filling[: len(parts) - 1], ""], strict=True))

    def prose(self) -> str:
        if self.often(0.7):
            return self.filled(self.of(phrases.PROSE))
        return " ".join(self.plain() for _ in range(self.of((4, 7, 10)))).capitalize() + "."
