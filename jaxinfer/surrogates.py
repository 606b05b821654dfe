"""Halves of surrogate pairs: what strings of command lines and of JSON hold for what is not Unicode."""


def not_unicode(text: str) -> str | None:
    """What is wrong with a text that UTF-8 cannot say, as the end of a sentence; None if nothing is."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = text[error.start]
        return f"is not Unicode: character {error.start} is {found!r}; it was made from bytes that are not UTF-8"
    return None
