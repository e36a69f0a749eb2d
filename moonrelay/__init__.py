"""Words that every Moonrelay process shares."""

__version__ = "0.1.0"
