"""The language of the demo: ``a <digit> drifting <direction>``, and nothing else."""

from __future__ import annotations

from ithaca.errors import InvalidInputError

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
#: Direction to its step per frame in pixels, as (down, right).
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

#: Token 0 is the dropped word: a prompt of four of them is the unconditional one.
WORDS = ("", "a", "drifting", *DIGITS, *DIRECTIONS)
PROMPT_WORDS = 4
UNCONDITIONAL = (0,) * PROMPT_WORDS


def prompt(digit: int, direction: str) -> str:
    """The sentence for ``digit`` (0 to 9) and one of ``DIRECTIONS``."""
    return f"a {DIGITS[digit]} drifting {direction}"


def tokenize(text: str) -> tuple[int, ...]:
    """The four token ids of a prompt; `InvalidInputError` for any other sentence."""
    words = text.lower().split()
    match words:
        case ["a", digit, "drifting", direction] if digit in DIGITS and direction in DIRECTIONS:
            return tuple(WORDS.index(word) for word in words)
    raise InvalidInputError(
        f"the demo model was required to draw 'a <digit> drifting <direction>', "
        f"with a digit from {', '.join(DIGITS)} and a direction from {', '.join(DIRECTIONS)}; it received {text!r}"
    )
