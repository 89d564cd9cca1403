"""One room per op; see DESIGN.md."""

ROOMS = ("cross_entropy", "rms_norm")
