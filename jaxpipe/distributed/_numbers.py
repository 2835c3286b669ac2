"""Whole numbers in text of any length."""

_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Read a whole number.

    Python itself raises at more than 4300 digits.

    Args:
        text: Anything.

    Returns:
        The number; None where the text is not digits alone, or is of a number that nothing here can
        be.
    """
    digits = text.lstrip("0") or text[-1:]
    return (
        int(digits)
        if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
        else None
    )
