"""Reading whole numbers from text of any length."""

_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Read a whole number of at most 18 digits; None for any other text."""
    # `int` raises an error for more than 4300 digits.
    digits = text.lstrip("0") or text[-1:]
    return (
        int(digits)
        if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
        else None
    )
