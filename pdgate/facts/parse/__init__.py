"""Parsers, one file per tool. They take real formats, which vary; what they cannot read they report, never skip."""


class ParseError(ValueError):
    """The text is not of the tool's known formats; the message quotes the line."""
