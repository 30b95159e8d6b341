"""Errors written for the person who meets them."""


class CraftError(Exception):
    """Something a person can mend. The message says what is wrong and what to do; the command prints it as it is."""
