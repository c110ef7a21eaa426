"""The errors a user can meet. Everything else that is raised is a defect of the library."""


class PartitaError(RuntimeError):
    """An error of the user's making: its message names what, where, expected and got, and the remedy."""


class ConfigError(PartitaError, ValueError):
    """A wrong configuration, found before anything is built."""
