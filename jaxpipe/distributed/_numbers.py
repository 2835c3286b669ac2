"""Reading whole numbers from text of any length."""

_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Read a whole number.

    Unlike `int`, it does not raise an error for more than 4300 digits.

    Args:
        text: Any text.

    Returns:
        The number. None if the text has other characters than digits, or if the number has more
        than 18 digits.
    """
    digits = text.lstrip("0") or text[-1:]
    return (
        int(digits)
        if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS
        else None
    )
