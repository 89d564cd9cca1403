"""What data refuses, in one line each."""


class DataError(ValueError):
    """A file, line or setting that cannot be trained on; the message names it and says what to do."""
