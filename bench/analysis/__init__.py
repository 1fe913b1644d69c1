"""From a journal's Measured to a Row for each run: is a script faster, or is it noise?"""
