"""Text from a model, made safe to show."""


def printable(text: str) -> str:
    """Replace control characters, so that no answer can steer the reader's terminal.

    Parameters
    ----------
    text : str
        What a model wrote.

    Returns
    -------
    str
        The same length; line ends and tabs stay.
    """
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text
    )
