"""The patches that lead from script to script, and stack.py, which applies them."""
