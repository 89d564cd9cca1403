"""riftco inside other libraries: one module for each, imported when it is named."""
