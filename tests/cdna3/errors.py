"""What the interpreter refuses, and how it says so."""

__all__ = ["InterpreterError", "MemoryFault", "UnsupportedInstructionError"]


class InterpreterError(Exception):
    """A kernel did something that the machine does not define, or that we watch for."""


class MemoryFault(InterpreterError):
    """An access left every registered buffer, the LDS allocation or the scratch of the lane."""


class UnsupportedInstructionError(InterpreterError):
    """The instruction decodes, but its meaning is not written yet."""
