"""What models refuse, in one line each."""


class ModelError(ValueError):
    """A model file, folder or request that cannot be served; the message says what came and what is accepted."""
