"""Errors that the engine raises for a person to read."""


class EngineError(Exception):
    """One sentence: what is wrong, where (file, tensor, offset, shape), what to do."""


class ModelError(EngineError):
    """A model file that cannot be used; the sentence names the file and, where it applies, tensor, type and offset."""


class LeverError(EngineError):
    """A lever or value that this engine does not have."""
