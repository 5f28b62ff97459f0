"""What the phone shows."""

GOAL = "Open the contacts."
